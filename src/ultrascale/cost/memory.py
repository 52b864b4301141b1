"""Bytes on one GPU by owner, at the peak of a step, for every row of a table of layouts.

Playbook: peak = model_bf16 + model_fp32 + grads_fp32 + optimstates + actives, with ZeRO dividing each by the ranks it shards
over. Added here is what a real run also holds: gathered layers, transfers in flight, the loss, the context, allocator slack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ultrascale.cost import activations, params
from ultrascale.cost.columns import Array, Columns
from ultrascale.cost.stages import RankShare
from ultrascale.specs.job import OPTIMIZER_STATE_BYTES, Job
from ultrascale.specs.units import GIB


@dataclass(frozen=True)
class StateBytes:
    """Parameters, fp32 master, gradients and optimizer states of one rank."""

    parameters: Array
    master: Array
    gradients: Array
    optimizer: Array


def has_master(job: Job) -> bool:
    """Weights in fp32 beside the copy that computes."""
    return job.precision != "fp32" and job.framework.states != "pure"


def states(job: Job, columns: Columns, held: params.RankParameters) -> StateBytes:
    """The playbook's four persistent owners; experts are sharded over the data ranks that ep left them."""
    shards = columns.shards
    expert_shards = np.maximum(1, shards * columns.tp / columns.expert_cut / columns.ep)
    zero = columns.zero

    def sharded(bytes_each: float, from_stage: int) -> Array:
        cut = np.where(zero >= from_stage, shards, 1)
        expert_cut = np.where(zero >= from_stage, expert_shards, 1)
        return np.asarray(bytes_each * (held.trunk / cut + held.experts / expert_cut))

    compute = activations.compute_bytes(job)
    on_gpu = columns.is_("offload", "none")
    # ZeRO-3 keeping its layers gathered holds the whole copy through the step, as ZeRO-2 does.
    stage_of_parameters = np.where(columns.keep_gathered == 1, 4, 3)
    parameters = np.where(zero >= stage_of_parameters, sharded(compute, 3), sharded(compute, 4))
    master = sharded(activations.FP32 if has_master(job) else 0, 1)
    if job.framework.halves and job.optimizer == "adamw" and job.precision in ("bf16", "fp8"):
        master = np.where(shards == 1, sharded(activations.FP32 - compute, 1), master)
    gradients = sharded(activations.gradient_bytes(job), 2)
    if job.framework.states == "fp32":
        # FSDP's shards are the fp32 weights. A copy in the compute format exists only where it is gathered; in fp32 a copy that
        # stays gathered stands beside them.
        apart = (zero >= stage_of_parameters) & (job.precision != "fp32")
        parameters = np.where(apart, 0.0, parameters)
        beside = (zero >= 1) & (zero < stage_of_parameters) & (shards > 1) & (job.precision == "fp32")
        master = np.where(beside, sharded(activations.FP32, 1), master)
        # With one micro-batch each layer's gradients are scattered as soon as they are made, in ZeRO-1 too.
        gradients = np.where((columns.gas == 1) & (columns.pp == 1), sharded(activations.gradient_bytes(job), 1), gradients)
    return StateBytes(
        parameters=np.where(columns.is_("offload", "parameters"), 0.0, parameters),
        master=np.where(on_gpu, master, 0.0),
        gradients=gradients,
        optimizer=np.where(on_gpu, sharded(OPTIMIZER_STATE_BYTES[job.optimizer], 1), 0.0),
    )


def _alone(job: Job, columns: Columns) -> Array:
    """One micro-batch on one GPU with AdamW on it: there is nothing to add a gradient to."""
    ranks = columns.data_ranks * columns.tp * columns.pp * columns.ep
    return np.asarray((ranks * columns.gas == 1) & columns.is_("offload", "none") & (job.optimizer == "adamw"))


def transfer_buffers(job: Job, columns: Columns, held: params.RankParameters) -> Array:
    """Memory that exists only because something is on its way between GPUs."""
    model, b = job.model, activations.compute_bytes(job)
    tokens = columns.tokens(job.seq)
    wide = b * tokens * model.hidden
    # Experts are sharded over the data ranks that ep left them, so with ep = shards there is nothing of them to gather.
    expert_shards = np.maximum(1, columns.shards / columns.ep)
    beyond_own_shard = held.trunk * (1 - 1 / columns.shards) + held.experts * (1 - 1 / expert_shards)
    # ZeRO-3: the layer at work and the one prefetched behind it, plus embedding and head, which stay gathered; never more
    # than the parameters that live elsewhere.
    gathered = np.where(
        (columns.zero == 3) & (columns.keep_gathered == 0),
        b * np.minimum(2 * held.layer + held.ends, beyond_own_shard),
        0.0,
    )
    gathered = np.where(columns.is_("offload", "parameters"), b * (2 * held.layer + held.ends), gathered)
    # One layer's gradients as autograd makes them, and from ZeRO-2 on the same layer's on its way into the reduce-scatter.
    fresh = held.total if job.framework.late_gradients else held.layer
    fresh_gradients = b * fresh if activations.gradient_bytes(job) != b else 0.0
    waiting = held.layer
    if job.framework.states == "fp32":
        # FSDP scatters a chunk's gradients together where backward is split: hooks do not see weight gradients made later.
        waiting = np.where(activations.split_backward(columns), held.total / columns.virtual_stages, waiting)
    reduced = np.where(columns.zero >= 2, activations.gradient_bytes(job) * np.minimum(waiting, beyond_own_shard), 0.0)
    gathered_sequence = np.where((columns.tp > 1) & (columns.sequence_parallel == 1), wide, 0.0)
    received = np.where(columns.pp > 1, 2 * wide / columns.sequence_cut, 0.0)
    buffers = gathered + fresh_gradients + reduced + gathered_sequence + received + _context_buffers(job, columns)
    if model.moe is not None:
        routed = job.cluster.efficiency.expert_imbalance * model.moe.top_k * wide / columns.routed_cut
        buffers = buffers + np.where(columns.ep > 1, routed, 0.0)
    return np.asarray(buffers)


def _context_buffers(job: Job, columns: Columns) -> Array:
    model, b = job.model, activations.compute_bytes(job)
    tokens = columns.tokens(job.seq)
    kv_width = 2 * model.kv_dim if model.mla is None else model.heads * (model.qk_head_dim + model.v_head_dim)
    kv_cut = np.minimum(columns.tp, model.kv_heads if model.mla is None else model.heads)
    keys_and_values = b * tokens * kv_width / kv_cut
    queries = b * tokens * model.heads * model.qk_head_dim / columns.tp
    ring = columns.is_("context_parallel", "ring") | columns.is_("context_parallel", "zigzag")
    gather = columns.is_("context_parallel", "allgather")
    # Ring: the block at work and the one arriving, of values and in backward of their gradients. All-gather: the whole
    # sequence's keys and values. All-to-all: a second copy of q, k and v in the other cut.
    each = np.where(ring, 2 * keys_and_values, np.where(gather, columns.cp * keys_and_values, queries + keys_and_values))
    return np.where(columns.cp > 1, each, 0.0)


@dataclass(frozen=True)
class Waiting:
    """Micro-batches' worth of activations on a rank at its peak."""

    in_flight: Array
    """forward done, backward not finished"""
    deferred: Array
    """of these, those whose weight gradients a split backward put off: whatever was recomputed for them stays"""
    losses: Array
    """finished losses that wait for their backward: AFAB's only"""
    together: bool = True
    """most are in flight while most are deferred; a V defers only while it drains"""
    one: float = 1.0
    """one chunk, as a share of the rank's: what a split backward brings back at a time"""


@dataclass(frozen=True)
class PeakParts:
    """A rank's peak as a function of what waits on it: everything but those numbers."""

    state: StateBytes
    buffers: Array
    kept: Array
    """activations of one micro-batch in flight"""
    dropped: Array
    """what recomputation left out of them and a deferred weight gradient brings back"""
    working: Array
    """the layer in backward: what it dropped, and gradients of its activations"""
    gradients: Array
    at_loss: Array
    kept_loss: Array

    def activations(self, waiting: Waiting) -> Array:
        split = waiting.deferred > 0
        layer = np.where(split, self.gradients, self.working)
        live = waiting.in_flight * self.kept + waiting.losses * self.kept_loss
        if waiting.together:
            live = live + waiting.deferred * self.dropped
        else:
            draining = waiting.deferred * (self.kept + self.dropped)
            live = np.maximum(live + waiting.one * self.dropped, draining)
        return np.asarray(live + np.maximum(layer, self.at_loss))

    def total(self, job: Job, waiting: Waiting) -> Array:
        state = self.state.parameters + self.state.master + self.state.gradients + self.state.optimizer
        moving = self.activations(waiting) + self.buffers
        return np.asarray(state + moving + runtime(job, moving))


def runtime(job: Job, moving: Array) -> Array:
    """The context, and the allocator's rounding and holes in what comes and goes."""
    constants = job.cluster.efficiency
    return np.asarray(constants.context_gib * GIB + constants.allocator_slack * moving)


def peak_parts(job: Job, columns: Columns, share: RankShare) -> PeakParts:
    model = job.model
    held = params.on_rank(model, columns, share)
    nothing = np.zeros(len(columns))
    kept = dropped = working = gradients = nothing
    for count, moe in ((share.dense_layers, False), (share.moe_layers, True)):
        if not np.any(count):
            continue
        layer = activations.layer(job, columns, moe)
        kept, dropped = kept + count * layer.total, dropped + count * (layer.whole - layer.total)
        working = np.maximum(working, np.where(count > 0, layer.working, 0.0))
        gradients = np.maximum(gradients, np.where(count > 0, layer.gradients, 0.0))
    head = activations.head(job, columns)
    state = states(job, columns, held)
    if job.framework.gradients_as_made:
        alone = _alone(job, columns)
        b = activations.compute_bytes(job)
        # None at the loss, the head's at the first layer; then each layer's take the place of activations that it frees.
        working = working + np.where(alone, b * share.head * model.vocab * model.hidden, 0.0)
        state = replace(state, gradients=np.where(alone, np.maximum(0.0, b * held.total - kept), state.gradients))
    return PeakParts(
        state,
        transfer_buffers(job, columns, held),
        kept,
        dropped,
        working,
        gradients,
        np.asarray(share.head * head.peak),
        np.asarray(share.head * head.saved),
    )
