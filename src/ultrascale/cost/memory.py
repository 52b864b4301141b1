"""Bytes on one GPU by owner, at the peak of a step, for every row of a table of layouts.

Playbook: peak = model_bf16 + model_fp32 + grads_fp32 + optimstates + actives, with ZeRO dividing each by the ranks it shards
over. Added here is what a real run also holds: gathered layers, transfers in flight, the loss, the context, allocator slack.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ultrascale.cost import activations, float8, moments, moments_layer, moments_zero, params
from ultrascale.cost.chunk_memory import ChunkMemory
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.memory_point import MemoryPoint
from ultrascale.cost.stages import RankShare
from ultrascale.specs.job import OPTIMIZERS, Job
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


def states(job: Job, columns: LayoutColumns, held: params.RankParameters, narrow: Array) -> StateBytes:
    """The playbook's four persistent owners; experts are sharded over the data ranks that ep left them.

    `narrow` of the elements are gathered in fp8.
    """
    shards = columns.shards
    expert_shards = np.maximum(1, shards * columns.tp / columns.expert_cut / columns.ep)
    zero = columns.zero

    def sharded(bytes_each: Array | float, from_stage: int) -> Array:
        cut = np.where(zero >= from_stage, shards, 1)
        expert_cut = np.where(zero >= from_stage, expert_shards, 1)
        return np.asarray(bytes_each * (held.trunk / cut + held.experts / expert_cut))

    compute = activations.compute_bytes(job)
    on_gpu = columns.is_("offload", "none")
    # ZeRO-3 keeping its layers gathered holds the whole copy through the step, as ZeRO-2 does.
    stage_of_parameters = np.where(columns.keep_gathered == 1, 4, 3)
    parameters = np.where(zero >= stage_of_parameters, sharded(compute, 3), sharded(compute, 4))
    parameters = np.where((zero == 3) & (columns.keep_gathered == 1), parameters - float8.less(job, narrow), parameters)
    master = sharded(activations.FP32 if has_master(job) else 0, 1)
    if job.framework.fused_blocks and job.optimizer == "adamw" and job.precision in ("bf16", "fp8"):
        master = np.where((shards == 1) | (zero == 0), sharded(activations.FP32 - compute, 1), master)
    whole = activations.gradient_bytes(job) * (held.total - held.padding)
    gradients = np.where(zero >= 2, sharded(_kept_gradient_bytes(job, shards), 2), whole)
    if job.framework.states == "fp32":
        # FSDP's shards are the fp32 weights. A copy in the compute format exists only where it is gathered; in fp32 a copy that
        # stays gathered stands beside them.
        apart = (zero >= stage_of_parameters) & (shards > 1) & (job.precision != "fp32")
        parameters = np.where(apart, 0.0, parameters)
        beside = (zero >= 1) & (zero < stage_of_parameters) & (shards > 1) & (job.precision == "fp32")
        master = np.where(beside, sharded(activations.FP32, 1), master)
        # With one micro-batch each layer's gradients are scattered as soon as they are made, in ZeRO-1 too.
        alone = (columns.gas == 1) & (zero >= 1)
        gradients = np.where(alone, sharded(_kept_gradient_bytes(job, shards), 1), gradients)
    return StateBytes(
        parameters=np.where(columns.is_("offload", "parameters"), 0.0, parameters),
        master=np.where(on_gpu, master, 0.0),
        gradients=gradients,
        optimizer=np.where(on_gpu, sharded(OPTIMIZERS[job.optimizer].state_bytes, 1), 0.0),
    )


def _kept_gradient_bytes(job: Job, shards: Array) -> Array:
    return np.where(shards > 1, activations.sharded_gradient_bytes(job), activations.gradient_bytes(job))


@dataclass(frozen=True)
class InFlightMicrobatches:
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

    def take(self, rows: Array) -> InFlightMicrobatches:
        return replace(self, in_flight=self.in_flight[rows], deferred=self.deferred[rows], losses=self.losses[rows])


@dataclass(frozen=True)
class PeakParts:
    """A rank's peak as a function of what waits on it: everything but those numbers."""

    state: StateBytes
    kept: Array
    """activations of one micro-batch in flight"""
    dropped: Array
    """what recomputation left out of them and a deferred weight gradient brings back"""
    layer: MemoryPoint
    """the layer in backward: what it dropped, and gradients of its activations"""
    split_layer: MemoryPoint
    """the same where what it dropped is counted with the chunks that wait for their weight gradients"""
    loss: MemoryPoint
    kept_loss: Array
    slack: float
    """the allocator's, of what comes and goes"""

    def live(self, waiting: InFlightMicrobatches) -> Array:
        """Activations that wait, of all micro-batches."""
        live = waiting.in_flight * self.kept + waiting.losses * self.kept_loss
        if waiting.together:
            return np.asarray(live + waiting.deferred * self.dropped)
        draining = waiting.deferred * (self.kept + self.dropped)
        return np.asarray(np.maximum(live + waiting.one * self.dropped, draining))

    @cached_property
    def _lasting(self) -> Array:
        return np.asarray(self.state.parameters + self.state.master + self.state.optimizer)

    @cached_property
    def _passing(self) -> tuple[Array, Array]:
        """The fuller of layer and loss with the allocator's share of what moves; the same where backward is split."""
        slack = 1 + self.slack
        layer, split, loss = (slack * one.moving + one.gradients for one in (self.layer, self.split_layer, self.loss))
        return np.maximum(layer, loss), np.maximum(split, loss)

    def total(self, job: Job, waiting: InFlightMicrobatches) -> Array:
        whole, split = self._passing
        passing = np.where(waiting.deferred > 0, split, whole)
        lasting = self._lasting + job.cluster.efficiency.context_gib * GIB
        return np.asarray(lasting + (1 + self.slack) * self.live(waiting) + passing)


@dataclass(frozen=True)
class WalkedParts(PeakParts):
    """With what else a walk along a rank's list of actions meets, action by action."""

    forward: MemoryPoint
    """its end: what is on its way, and rows that come home from experts"""
    between: MemoryPoint
    """weight gradients that were put off: nothing but what is on its way"""
    scattering: MemoryPoint
    """the end of a chunk's backward, where FSDP scatters what is left"""
    beginning: MemoryPoint
    """of a backward before which ZeRO-3 gathers the ends again"""
    fresh_head: Array
    """the head's gradient, never put off"""
    fresh_embedding: Array
    waiting_head: Array
    """that, while it waits for the others'"""
    waiting_embedding: Array
    left_over: Array
    """of what the chunk scattered last"""
    met: Array
    """of what its replicas met with last, from its second backward on"""


def runtime(job: Job, moving: Array) -> Array:
    """The context, and the allocator's rounding and holes in what comes and goes."""
    constants = job.cluster.efficiency
    return np.asarray(constants.context_gib * GIB + constants.allocator_slack * moving)


def peak_parts(job: Job, columns: LayoutColumns, share: RankShare) -> PeakParts:
    """Of a rank that computes `share`."""
    return _parts(ChunkMemory(job, columns, share, share))


def walked_parts(job: Job, columns: LayoutColumns, share: RankShare, holder: RankShare, first: bool = False) -> WalkedParts:
    """One chunk of several computes its own share, but its rank (`holder`) has the states of all.

    `first`: until a step's first backward is over, where gradients exist only as far as they were made.
    """
    scene = ChunkMemory(job, columns, share, holder, first)
    parts = _parts(scene)
    gradients = parts.state.gradients
    return WalkedParts(
        **{name: getattr(parts, name) for name in PeakParts.__dataclass_fields__},
        forward=moments.in_forward(scene, gradients),
        between=moments.between(scene, gradients),
        scattering=moments.scattering(scene, gradients),
        beginning=moments.beginning(scene, gradients),
        fresh_head=moments.fresh(scene, share.head),
        fresh_embedding=moments.fresh(scene, share.embedding) + moments.looked_up(scene),
        waiting_head=moments.waiting(scene, share.head),
        waiting_embedding=moments.waiting(scene, share.embedding),
        left_over=moments_zero.left_over(scene),
        met=moments_zero.met(scene),
    )


def _parts(scene: ChunkMemory) -> PeakParts:
    job, columns, share, held = scene.job, scene.columns, scene.share, scene.held
    state = states(job, columns, held, float8.on_rank(job, columns, scene.holder).elements)
    if scene.first:
        state = replace(state, gradients=0.0 * state.gradients)
    layer, loss = moments_layer.in_layer(scene, state.gradients, split=False), moments.at_loss(scene, state.gradients)
    if job.framework.fused_blocks:
        single, b = alone(job, columns), activations.compute_bytes(job)
        # None at the loss, the head's at the first layer; then each layer's take the place of activations that it frees. The
        # fullest layer is the first or the last of backward: there all gradients stand and nothing waits.
        heads = np.where(single, b * share.head * job.model.vocab * job.model.hidden, 0.0)
        at_last = np.maximum(0.0, b * held.total - heads - scene.kept)
        loss = replace(loss, gradients=np.where(single, 0.0, loss.gradients))
        state = replace(state, gradients=np.where(single, at_last, state.gradients))
        made = np.where(single, at_last, layer.gradients)
        uncounted = heads - np.where(single & job.framework.exact_memory_trace, moments_zero.head_gradients(scene), 0.0)
        layer = replace(layer, activations=layer.activations + uncounted, gradients=made)
    return PeakParts(
        state,
        scene.kept,
        scene.dropped + scene.settled,
        layer,
        moments_layer.in_layer(scene, state.gradients, split=True),
        loss,
        np.asarray(share.head * scene.head.saved),
        job.cluster.efficiency.allocator_slack,
    )


def alone(job: Job, columns: LayoutColumns) -> Array:
    """One micro-batch on one GPU with AdamW on it: there is nothing to add a gradient to."""
    return np.asarray((columns.gas == 1) & on_one_gpu(job, columns))


def on_one_gpu(job: Job, columns: LayoutColumns) -> Array:
    """With AdamW on it too."""
    ranks = columns.data_ranks * columns.tp * columns.pp * columns.ep
    return np.asarray((ranks == 1) & columns.is_("offload", "none") & (job.optimizer == "adamw"))
