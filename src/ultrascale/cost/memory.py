"""Bytes on one GPU by owner, at the peak of a step, for every row of a table of layouts.

Playbook: peak = model_bf16 + model_fp32 + grads_fp32 + optimstates + actives, with ZeRO dividing each by the ranks it shards
over. Added here is what a real run also holds: gathered layers, transfers in flight, the loss, the context, allocator slack.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost import activations, params
from ultrascale.cost.columns import Array, Columns
from ultrascale.cost.stages import RankShare
from ultrascale.specs.job import OPTIMIZER_STATE_BYTES, Job
from ultrascale.specs.units import GIB

FP32 = 4


@dataclass(frozen=True)
class OwnerBytes:
    parameters: Array
    master: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array
    runtime: Array
    loss_is_peak: Array
    """the peak comes with the logits of the last stage, not with a layer's backward"""

    @property
    def static(self) -> Array:
        return np.asarray(self.parameters + self.master + self.gradients + self.optimizer)

    @property
    def total(self) -> Array:
        return np.asarray(self.static + self.activations + self.buffers + self.runtime)


@dataclass(frozen=True)
class StateBytes:
    """Parameters, fp32 master, gradients and optimizer states of one rank."""

    parameters: Array
    master: Array
    gradients: Array
    optimizer: Array


def gradient_bytes(job: Job) -> int:
    return FP32 if job.gradients == "fp32" or job.precision == "fp32" else 2


def states(job: Job, columns: Columns, held: params.RankParameters) -> StateBytes:
    """The playbook's four persistent owners; experts are sharded over the data ranks that ep left them."""
    shards = columns.shards
    expert_shards = np.maximum(1, shards / columns.ep)
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
    return StateBytes(
        parameters=np.where(columns.is_("offload", "parameters"), 0.0, parameters),
        master=np.where(on_gpu, sharded(FP32 if job.precision != "fp32" else 0, 1), 0.0),
        gradients=sharded(gradient_bytes(job), 2),
        optimizer=np.where(on_gpu, sharded(OPTIMIZER_STATE_BYTES[job.optimizer], 1), 0.0),
    )


def transfer_buffers(job: Job, columns: Columns, held: params.RankParameters) -> Array:
    """Memory that exists only because something is on its way between GPUs."""
    model, b = job.model, activations.compute_bytes(job)
    tokens = columns.tokens(job.seq)
    wide = b * tokens * model.hidden
    beyond_own_shard = held.total * (1 - 1 / columns.shards)
    # ZeRO-3: the layer at work and the one prefetched behind it, plus embedding and head, which stay gathered; never more
    # than the parameters that live elsewhere.
    gathered = np.where(
        (columns.zero == 3) & (columns.keep_gathered == 0),
        b * np.minimum(2 * held.layer + held.ends, beyond_own_shard),
        0.0,
    )
    gathered = np.where(columns.is_("offload", "parameters"), b * (2 * held.layer + held.ends), gathered)
    # One layer's gradients as autograd makes them, and from ZeRO-2 on the same layer's on its way into the reduce-scatter.
    fresh_gradients = b * held.layer if gradient_bytes(job) != b else 0.0
    reduced = np.where(columns.zero >= 2, gradient_bytes(job) * np.minimum(held.layer, beyond_own_shard), 0.0)
    gathered_sequence = np.where((columns.tp > 1) & (columns.sequence_parallel == 1), wide, 0.0)
    received = np.where(columns.pp > 1, 2 * wide / columns.sequence_cut, 0.0)
    buffers = gathered + fresh_gradients + reduced + gathered_sequence + received + _context_buffers(job, columns)
    if model.moe is not None:
        routed = job.cluster.efficiency.expert_imbalance * model.moe.top_k * wide / columns.sequence_cut
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


def at_peak(job: Job, columns: Columns, share: RankShare, in_flight: Array) -> OwnerBytes:
    """Every owner at the rank's peak; `in_flight` is the micro-batches whose activations the rank then holds."""
    model = job.model
    held = params.on_rank(model, columns, share)
    state = states(job, columns, held)
    dense = activations.layer(job, columns, moe=False)
    kept = share.dense_layers * dense.total
    working = np.where(share.dense_layers > 0, dense.working, 0.0)
    if model.moe_layers:
        moe = activations.layer(job, columns, moe=True)
        kept = kept + share.moe_layers * moe.total
        working = np.maximum(working, np.where(share.moe_layers > 0, moe.working, 0.0))
    head = activations.head(job, columns)
    # The loss follows its forward at once, so one micro-batch's logits live at a time; AFAB alone keeps them all.
    kept_losses = np.where(columns.is_("schedule", "afab") & (columns.pp > 1), np.maximum(in_flight - 1, 0), 0)
    at_loss = share.head * head.peak
    live = in_flight * kept + share.head * kept_losses * head.saved + np.maximum(working, at_loss)
    buffers = transfer_buffers(job, columns, held)
    constants = job.cluster.efficiency
    return OwnerBytes(
        state.parameters,
        state.master,
        state.gradients,
        state.optimizer,
        np.asarray(live),
        buffers,
        constants.context_gib * GIB + constants.allocator_slack * (live + buffers),
        at_loss > working,
    )
