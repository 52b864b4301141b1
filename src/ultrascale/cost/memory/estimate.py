"""Peak memory of every pipeline rank: chunks of the schedule with their micro-batches in flight.

Playbook: peak = model_bf16 + model_fp32 + grads_fp32 + optimstates + actives, with ZeRO dividing each by the ranks it shards
over. Added here is what a real run also holds: gathered layers, transfers in flight, the loss, the context, allocator slack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ultrascale.cost import muon
from ultrascale.cost.columns import Array, LayoutColumns, RankShare, rows_of
from ultrascale.cost.memory import activations, tensors
from ultrascale.cost.memory.chunk import ChunkMemory, MemoryPoint
from ultrascale.cost.memory.layer_backward import layer_backward
from ultrascale.cost.memory.rehearsed_engines import engine_points
from ultrascale.cost.memory.states import (
    StateBytes,
    accumulates_nothing,
    compute_bytes,
    fp8_on_rank,
    fp8_saving,
    gradient_bytes,
    routes_slices,
    states,
    trained_fraction,
)
from ultrascale.cost.memory.tensors import ChunkEvent
from ultrascale.schedules import KINDS, REGISTRY, ActionKind, InFlightCounts, counts
from ultrascale.specs.job import OPTIMIZERS, Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import GIB

if TYPE_CHECKING:
    from ultrascale.cost.stages import LayoutRows


@dataclass(frozen=True)
class InFlightMicrobatches:
    """Micro-batches' worth of activations on a rank at its peak."""

    in_flight: Array
    """forward done, backward not finished"""
    deferred: Array
    """of these, those whose weight gradients a split backward deferred: what was recomputed for them stays"""
    losses: Array
    """finished losses that wait for their backward: only in AFAB"""
    together: bool = True
    """most are in flight while most are deferred; a V defers only while it drains"""
    one: float = 1.0
    """one chunk, as a share of the rank's: what a split backward brings back at a time"""


@dataclass(frozen=True)
class PeakParts:
    """A rank's peak as a function of its micro-batches in flight: everything but those numbers."""

    state: StateBytes
    kept: Array
    """activations of one micro-batch in flight"""
    dropped: Array
    """what deferred weight gradients of a micro-batch hold beyond that"""
    layer: MemoryPoint
    """backward of a layer"""
    split_layer: MemoryPoint
    """the same, its input gradients alone"""
    weight_grads: MemoryPoint
    """while deferred weight gradients are computed"""
    loss: MemoryPoint
    kept_loss: Array
    other_chunk: Array
    """the reduce-scatter input that FSDP holds for each other chunk of the rank"""
    slack: float
    """the allocator's, of temporary memory"""
    fragmentation: Array
    """the same of activations in flight, beside that"""

    def rows(self, rows: slice) -> PeakParts:
        return rows_of(self, rows)

    def live(self, waiting: InFlightMicrobatches) -> Array:
        """Activations of all micro-batches in flight."""
        live = waiting.in_flight * self.kept + waiting.losses * self.kept_loss
        if waiting.together:
            return np.asarray(live + waiting.deferred * self.dropped)
        draining = waiting.deferred * (self.kept + self.dropped)
        return np.asarray(np.maximum(live + waiting.one * self.dropped, draining))

    @cached_property
    def _persistent(self) -> Array:
        return np.asarray(self.state.parameters + self.state.master + self.state.optimizer)

    @cached_property
    def _on_top(self) -> tuple[Array, Array, Array]:
        """With the allocator's slack: the backward of a layer; the fuller of the passes of a split one; the loss."""
        slack = 1 + self.slack
        points = self.layer, self.split_layer, self.weight_grads, self.loss
        layer, split, weight_grads, loss = (slack * one.temporary + one.gradients for one in points)
        return layer, np.maximum(split, weight_grads), loss

    def total(self, job: Job, waiting: InFlightMicrobatches) -> Array:
        whole, split, loss = self._on_top
        # At the loss a split backward has recomputed nothing yet.
        before = (1 + self.slack) * waiting.one * self.dropped * job.framework.exact_memory_trace
        on_top = np.where(waiting.deferred > 0, np.maximum(split, loss - before), np.maximum(whole, loss))
        persistent = self._persistent + job.cluster.efficiency.context_gib * GIB
        others = (1 / waiting.one - 1) * self.other_chunk
        live = self.live(waiting)
        return np.asarray(persistent + (1 + self.slack) * (live + others) + self.fragmentation * live + on_top)


@dataclass(frozen=True)
class ChunkParts(PeakParts):
    """One chunk, with what else a walk along its rank's list of actions needs."""

    forward_end: MemoryPoint
    input_grads_end: MemoryPoint
    backward_end: MemoryPoint
    last_backward_end: MemoryPoint
    """of a step, in ZeRO-1"""
    backward_start: MemoryPoint
    embedding: Array
    """the embedding and its gradients, never deferred, in its backward"""
    unsplit_embedding: MemoryPoint
    """the same in a backward that is not split"""
    unsharded_ends: Array
    waiting_head: Array
    """the head's weight gradient while it waits for the chunk's reduce-scatter"""
    waiting_embedding: Array
    reduce_scatter_input: Array
    """of the chunk's last reduce-scatter"""
    hsdp_reduced_grads: Array
    """from its second backward on"""


def runtime(job: Job, columns: LayoutColumns, temporary: Array, in_flight: Array) -> Array:
    """The CUDA context, and the allocator's rounding and holes in temporary memory, of which activations are in flight."""
    constants = job.cluster.efficiency
    holes = constants.allocator_slack * temporary + fragmentation(job, columns) * in_flight
    return np.asarray(constants.context_gib * GIB + holes)


def fragmentation(job: Job, columns: LayoutColumns) -> Array:
    """Of activations in flight: what the allocator's cache loses to holes between them, in engines where that was seen.

    Blocks of one micro-batch are split for the next. Inputs that tensor parallelism gathers for a GEMM and frees leave holes,
    too: they are tp times what is kept beside them.
    """
    share = np.where(columns.gas > 1, job.framework.fragmentation, 0.0)
    if not share.any() or job.framework.gathered_inputs:
        return share
    kept = activations.layer(job, columns, job.model.kind(0)).total
    return np.asarray(share * (1 + gathered_inputs(job, columns) / kept))


def gathered_inputs(job: Job, columns: LayoutColumns) -> Array:
    """Of a layer's forward: what the GEMMs of attention and MLP gather along the sequence, beside their own slices.

    Nothing was seen of layers that are recomputed in full.
    """
    residual = compute_bytes(job) * columns.tokens(job.seq) * job.model.hidden / columns.sequence_cut
    return np.where(columns.is_("recompute", "full"), 0.0, 2 * (columns.sequence_cut - 1) * residual)


def peak_parts(job: Job, columns: LayoutColumns, share: RankShare) -> PeakParts:
    """Of a rank that computes `share`."""
    return _peak_parts(ChunkMemory(job, columns, share, share))


def lower_bound_parts(job: Job, columns: LayoutColumns, share: RankShare) -> PeakParts:
    """A lower bound of the same, in a tenth of the time: without what the loss and a layer's backward allocate."""
    chunk, nothing = ChunkMemory(job, columns, share, share), np.zeros(len(columns))
    state = states(job, columns, chunk.rank_params, fp8_on_rank(job, columns, share).elements)
    accumulated = MemoryPoint(nothing, nothing, np.where(columns.gas > 1, state.gradients, 0.0), nothing)
    return PeakParts(
        state,
        chunk.saved,
        chunk.deferred,
        layer=accumulated,
        split_layer=accumulated,
        weight_grads=accumulated,
        loss=accumulated,
        kept_loss=nothing,
        other_chunk=nothing,
        slack=job.cluster.efficiency.allocator_slack,
        fragmentation=fragmentation(job, columns),
    )


def chunk_parts(
    job: Job, columns: LayoutColumns, share: RankShare, rank_share: RankShare, first: bool = False, last: bool = False
) -> ChunkParts:
    """Of one chunk, whose rank has the states of several; until a step's first backward ends, or in its last one."""
    chunk = ChunkMemory(job, columns, share, rank_share, first, last)
    parts = _peak_parts(chunk)
    gradients, nothing = parts.state.gradients, np.zeros(len(columns))
    if job.framework.exact_memory_trace:
        live = tensors.chunk_events(chunk, gradients)
        forward_end, input_grads_end = live.at(ChunkEvent.FORWARD_END), live.at(ChunkEvent.WEIGHT_GRADS)
        backward_start, backward_end = live.at(ChunkEvent.BACKWARD_START), tensors.backward_end(chunk, live)
        last_backward_end = tensors.last_backward_end(chunk, gradients)
    else:
        rehearsed = job.framework.buffers == "rehearsed"  # no buffer of a backward is live at the end of a forward
        forward_end = (
            MemoryPoint.nothing(len(columns)) if rehearsed else MemoryPoint(nothing, parts.layer.buffers, gradients, nothing)
        )
        input_grads_end = MemoryPoint(nothing, parts.layer.buffers, gradients, nothing)
        ended = MemoryPoint.nothing(len(columns)) if first else MemoryPoint(nothing, nothing, gradients, nothing)
        backward_start = backward_end = last_backward_end = ended
    return ChunkParts(
        **vars(parts),
        forward_end=forward_end,
        input_grads_end=input_grads_end,
        backward_end=backward_end,
        last_backward_end=last_backward_end,
        backward_start=backward_start,
        embedding=tensors.embedding_backward(chunk),
        unsplit_embedding=tensors.unsplit_embedding_backward(chunk, gradients),
        unsharded_ends=chunk.unsharded_ends if job.framework.exact_memory_trace else nothing,
        waiting_head=tensors.waiting_gradient(chunk, share.head),
        waiting_embedding=tensors.waiting_gradient(chunk, share.embedding),
        reduce_scatter_input=chunk.reduce_scatter_input,
        hsdp_reduced_grads=chunk.hsdp_reduced_grads,
    )


def _peak_parts(chunk: ChunkMemory) -> PeakParts:
    job, columns = chunk.job, chunk.columns
    state, traced = _states(chunk), job.framework.exact_memory_trace
    if traced:
        layer = split_layer = layer_backward(chunk, state.gradients, split=False)
        live = tensors.chunk_events(chunk, state.gradients)
        loss, weight_grads = tensors.loss_peak(chunk, live), tensors.weight_grads_peak(chunk, live)
    else:
        points = engine_points if job.framework.buffers == "rehearsed" else _untraced_points
        layer, split_layer, loss = points(chunk, state.gradients)
        weight_grads = MemoryPoint(np.zeros(len(columns)), layer.buffers, state.gradients, np.zeros(len(columns)))
    if job.framework.fused_blocks:
        single, state = accumulates_nothing(job, columns), _states_at_peak(chunk, state)
        loss = replace(loss, gradients=np.where(single, 0.0, loss.gradients))
        uncounted = _single_head_gradient(chunk) - np.where(single & traced, chunk.head_gradient, 0.0)
        layer_gradients = np.where(single, state.gradients, layer.gradients)
        layer = replace(layer, activations=layer.activations + uncounted, gradients=layer_gradients)
    if traced:
        # A search gives the schedule separately from the rows: none of them is split in itself.
        split = columns.split_backward.any()
        split_layer = layer_backward(chunk, state.gradients, split=True) if split else layer
    return PeakParts(
        state,
        chunk.saved,
        chunk.deferred,
        layer,
        split_layer,
        weight_grads,
        loss,
        np.asarray(chunk.share.head * chunk.head.saved),
        np.where(chunk.reduce_scatters & (columns.gas > columns.pp), gradient_bytes(job) * chunk.last_group, 0.0)
        if traced
        else np.zeros(len(columns)),
        job.cluster.efficiency.allocator_slack,
        fragmentation(job, columns),
    )


def rank_states(job: Job, columns: LayoutColumns, share: RankShare) -> StateBytes:
    """Those of `peak_parts`."""
    chunk = ChunkMemory(job, columns, share, share)
    return _states_at_peak(chunk, _states(chunk))


def _states(chunk: ChunkMemory) -> StateBytes:
    job, columns = chunk.job, chunk.columns
    state = states(job, columns, chunk.rank_params, fp8_on_rank(job, columns, chunk.rank_share).elements)
    if chunk.first_backward and job.framework.exact_memory_trace:
        return replace(state, gradients=0.0 * state.gradients)
    return state


def _states_at_peak(chunk: ChunkMemory, state: StateBytes) -> StateBytes:
    """Of a single micro-batch on one GPU: no gradients at the loss, the head's at the first layer; then each layer's take the
    place of activations that it frees. The fullest layer is the first or the last of backward: there all gradients are live and
    nothing is in flight.
    """
    if not chunk.job.framework.fused_blocks:
        return state
    b = chunk.trained * compute_bytes(chunk.job)
    at_last = np.maximum(0.0, b * chunk.rank_params.total - _single_head_gradient(chunk) - chunk.saved)
    single = accumulates_nothing(chunk.job, chunk.columns)
    return replace(state, gradients=np.where(single, at_last, state.gradients))


def _single_head_gradient(chunk: ChunkMemory) -> Array:
    """The head's gradient where nothing is accumulated."""
    job = chunk.job
    size = chunk.trained * compute_bytes(job) * chunk.share.head * job.model.vocab * job.model.hidden
    return np.where(accumulates_nothing(job, chunk.columns), size, 0.0)


def _untraced_points(chunk: ChunkMemory, gradients: Array) -> Iterator[MemoryPoint]:
    """Backward of a layer, of its input gradients alone, and the loss, each with all buffers live at once."""
    buffers, nothing = np.asarray(sum(size for _, size in _concurrent_buffers(chunk))), np.zeros(len(chunk.columns))
    whole = split = nothing
    for alike in chunk.layers:
        layer = alike.saved
        whole = np.maximum(whole, np.where(alike.count > 0, layer.recomputed + layer.gradients, 0.0))
        split = np.maximum(split, np.where(alike.count > 0, layer.gradients, 0.0))
    for most in (whole, split, np.asarray(chunk.share.head * chunk.head.peak)):
        yield MemoryPoint(most, buffers, gradients, nothing)


def _concurrent_buffers(chunk: ChunkMemory) -> Iterator[tuple[str, Array]]:
    """Live at once in engines whose allocations were not traced: a planner must not promise too much."""
    job, columns, params = chunk.job, chunk.columns, chunk.rank_params
    model, b, g, wide = job.model, compute_bytes(job), gradient_bytes(job), chunk.full_sequence
    # Experts are sharded over the data ranks that ep leaves them: with ep = shards there is nothing of them to gather.
    elsewhere = 1 - 1 / columns.shards
    not_own = params.trunk * elsewhere + params.experts * (1 - 1 / np.maximum(1, columns.shards / columns.ep))
    # ZeRO-3: this layer and the one prefetched, embedding and head; never more than the parameters that live elsewhere.
    two_layers = b * (2 * params.layer + params.ends)
    least = np.minimum(
        chunk.fp8_prefetched(0 * chunk.share.layers), chunk.fp8_prefetched(np.maximum(0, chunk.share.layers - 2))
    )
    of_rank = fp8_on_rank(job, columns, chunk.rank_share).elements
    most = np.minimum(two_layers - fp8_saving(job, least), b * not_own - fp8_saving(job, of_rank * elsewhere))
    gathered = np.where((columns.zero == 3) & (columns.keep_gathered == 0), most, 0.0)
    yield "unsharded parameters", np.where(columns.is_("offload", "parameters"), two_layers, gathered)
    if g != b:
        fresh = params.total if job.framework.accumulation == "after-backward" else params.layer
        yield "fresh weight gradients", trained_fraction(job) * b * fresh
    reduced = params.layer
    if job.framework.states == "fp32":
        # FSDP reduce-scatters a chunk's gradients together where backward is split: its hooks do not see deferred ones.
        reduced = np.where(columns.split_backward, params.total / columns.virtual_stages, reduced)
    yield "reduce-scatter input", np.where(columns.zero >= 2, trained_fraction(job) * g * np.minimum(reduced, not_own), 0.0)
    yield "gathered sequence", np.where((columns.tp > 1) & (columns.sequence_parallel == 1), wide, 0.0)
    yield "received activations and gradients", np.where(columns.pp > 1, 2 * wide / columns.sequence_cut, 0.0)
    yield "keys and values of other ranks", _context_buffers(chunk)
    if model.moe is not None:
        routed = job.cluster.efficiency.expert_imbalance * model.moe.top_k * wide
        sent = routed / columns.routed_cut(routes_slices(job, columns))
        gathered = wide * columns.ep / columns.routed_cut(routes_slices(job, columns))
        sent = np.where(columns.is_("dispatcher", "allgather"), gathered, sent)
        yield "dispatched tokens", np.where(columns.ep > 1, sent, 0.0)
    if job.framework.expert_overlap == "microbatches":
        whole = [np.where(alike.count > 0, alike.saved.whole, 0.0) for alike in chunk.layers if alike.moe]
        if whole:
            yield "a layer of the micro-batch that hides the all-to-all", np.maximum.reduce(whole)


def _context_buffers(chunk: ChunkMemory) -> Array:
    """Ring: the block at work and the next, of values and in backward of gradients. All-gather: keys and values of the
    whole sequence. Ulysses: q, k and v a second time, cut by heads.
    """
    job, columns, model, b = chunk.job, chunk.columns, chunk.job.model, compute_bytes(chunk.job)
    tokens = columns.tokens(job.seq)
    kv_width = 2 * model.kv_dim if model.mla is None else model.heads * (model.qk_head_dim + model.v_head_dim)
    kv_cut = np.minimum(columns.tp, model.kv_heads if model.mla is None else model.heads)
    keys_and_values = b * tokens * kv_width / kv_cut
    queries = b * tokens * model.heads * model.qk_head_dim / columns.tp
    ring = columns.is_("context_parallel", "ring") | columns.is_("context_parallel", "zigzag")
    gather = columns.is_("context_parallel", "allgather")
    each = np.where(ring, 2 * keys_and_values, np.where(gather, columns.cp * keys_and_values, queries + keys_and_values))
    return np.where(columns.cp > 1, each, 0.0)


@dataclass(frozen=True)
class Peak:
    """The fullest action of a rank: bytes by owner, and what the rank is doing."""

    activations: float
    in_flight_bytes: float
    """of these, what micro-batches in flight keep"""
    buffers: float
    gradients: float
    chunks: dict[int, float]
    """micro-batches in flight of each of its chunks"""
    moment: str
    freed_parameters: float
    """bytes of the rank's parameters that are not live then: `buffers` is less by it"""

    @property
    def live(self) -> float:
        return self.activations + self.buffers + self.gradients

    def in_flight(self, layers: tuple[int, ...]) -> float:
        """Micro-batches' worth of the rank's layers."""
        if not self.chunks:
            return 0.0
        return sum(count * layers[chunk] for chunk, count in self.chunks.items()) / sum(layers[chunk] for chunk in self.chunks)


def peaks(view: LayoutRows) -> list[Peak]:
    """Of every rank: its list of actions, walked with the bytes of its chunks."""
    layout, steady = view.layout, view.parts()
    # FSDP allocates gradients in a step's first backward; torch's pipelines reduce them in the last one.
    several, whole = (
        _sharded(layout) and layout.gas > 1,
        layout.pp > 1 and view.job.framework.accumulation == "unsharded-in-pipelines",
    )
    allocates = several and (view.job.framework.exact_memory_trace or (whole and layout.virtual_stages == 1))
    first = view.parts(first=True) if allocates else steady
    last = view.parts(last=True) if several and whole else None
    # Beyond four rounds the list only repeats itself, and what is in flight no longer grows (AFAB holds everything).
    enough = layout.gas if REGISTRY[layout.schedule].holds_all else min(layout.gas, _steady_state(layout))
    actions = counts(layout.schedule, layout.pp, enough, layout.virtual_stages)
    points = [*_action_points(view, first, steady, actions)]
    if last is not None:
        points += _last_points(view, last, actions)
    points = [point for point in points if point.reached.any()]
    others = OtherChunks.of(view, steady, actions) if allocates else None
    totals = np.stack([point.totals(actions, others) for point in points], axis=1)
    fullest = totals.reshape(layout.pp, -1).argmax(axis=1)
    found = [
        points[which].peak(actions, others, rank, int(action), view.chunks[rank])
        for rank, (which, action) in enumerate(zip(*np.divmod(fullest, actions.stage.shape[1]), strict=True))
    ]
    if not (OPTIMIZERS[view.job.optimizer].matrices is not None or _writes_roots(view.job)) or view.row.offloads_states[0]:
        return found
    return [max(one, _optimizer_step(view, rank), key=lambda peak: peak.live) for rank, one in enumerate(found)]


def _optimizer_step(view: LayoutRows, rank: int) -> Peak:
    """Where whole matrices are gathered, or roots written: nothing of forward and backward is live, nor what FSDP's ZeRO-1 and
    2 gathered. Other engines keep the weights that compute, and in ZeRO-1 whole gradients.
    """
    layout, state = view.layout, view.state
    buffers = 0.5 * float(state.optimizer[rank])  # of both moments the second one's
    if OPTIMIZERS[view.job.optimizer].matrices is not None:
        buffers = muon.step_buffers(view.job, view.row, rows_of(view.share, slice(rank, rank + 1)))
    freed, gradients = 0.0, float(state.gradients[rank])
    if _sharded(layout) and view.job.framework.states == "fp32":
        freed = float(state.parameters[rank]) if layout.zero < 3 or layout.keep_gathered else 0.0
        gradients = most_gradients(view, rank)
    return Peak(0.0, 0.0, buffers - freed, gradients, {}, "optimizer step", freed)


def _writes_roots(job: Job) -> bool:
    """Of all second moments, before weights are stepped."""
    return job.framework.foreach_optimizer and job.optimizer == "adamw"


def _sharded(layout: Layout) -> bool:
    return layout.zero > 0 and layout.shards > 1


def _steady_state(layout: Layout) -> int:
    """The fewest micro-batches, a multiple of the ranks away from gas, at which the schedule is in its steady state."""
    least = 4 * layout.pp
    return least + (layout.gas - least) % layout.pp if layout.gas > least else layout.gas


@dataclass(frozen=True)
class _ActionPoint:
    """A point that some actions of the ranks have: ranks × actions."""

    name: str
    reached: Array
    """which actions have it"""
    in_flight: Array
    """activations in flight meanwhile"""
    steady: MemoryPoint
    """on top of that, for each chunk"""
    first: MemoryPoint
    """the same until the chunk's first backward of a step ends"""

    def totals(self, actions: InFlightCounts, others: OtherChunks | None) -> Array:
        top = self.steady.total[actions.stage]
        if others is not None:
            top = np.where(actions.after_first_backward, top, self.first.total[actions.stage])
            top = top + others.gradients + others.buffers
        return np.where(self.reached, self.in_flight + top, -np.inf)

    def peak(self, actions: InFlightCounts, others: OtherChunks | None, rank: int, action: int, chunks: Array) -> Peak:
        at = rank, action
        chunk = actions.stage[at]
        top = self.steady if others is None or actions.after_first_backward[at] else self.first
        in_flight = actions.waiting[at] + actions.deferred[at]
        in_flight[chunks == chunk] += actions.kind[at] == KINDS.index(ActionKind.B)
        return Peak(
            float(self.in_flight[at] + top.activations[chunk]),
            float(self.in_flight[at]),
            float(top.buffers[chunk] + top.parameters[chunk] + (others.buffers[at] if others else 0.0)),
            float(top.gradients[chunk] + (others.gradients[at] if others else 0.0)),
            {int(each): float(count) for each, count in zip(chunks, in_flight, strict=True)},
            self.name,
            -float(top.parameters[chunk]),
        )


def _action_points(view: LayoutRows, first: ChunkParts, steady: ChunkParts, actions: InFlightCounts) -> Iterator[_ActionPoint]:
    chunks, at, traced = view.chunks, actions.stage, view.job.framework.exact_memory_trace
    kept, dropped, kept_loss = steady.kept, steady.dropped, steady.kept_loss
    forward, whole, inputs, weights = (actions.by_kind[kind] for kind in ActionKind)
    live = _over_chunks(actions.waiting, (kept + kept_loss)[chunks]) + _over_chunks(actions.deferred, (kept + dropped)[chunks])
    live = live + np.where(whole, kept[at], 0.0) + _over_chunks(actions.backwards_done >= 2, steady.hsdp_reduced_grads[chunks])
    # Gradients of head and embedding are never deferred: they wait for the reduce-scatter after the deferred ones.
    waits = (actions.deferred > 0) & (forward[..., None] | ~actions.own_stage)
    live = live + _over_chunks(waits, (steady.waiting_head + steady.waiting_embedding)[chunks])
    # Embedding and head that ZeRO-3 gathered for a forward, and has not freed in a backward yet.
    gathered = actions.forward_before * steady.unsharded_ends[chunks][:, None]
    live = live + (gathered * ~actions.own_stage).sum(axis=2)
    # Where experts make the end of a forward the peak, its own loss is yet to come.
    in_forward = live - np.where(forward & traced, kept_loss[at], 0.0)
    yield _ActionPoint("end of a forward", forward, in_forward, steady.forward_end, first.forward_end)
    with_ends = live + (gathered * actions.own_stage).sum(axis=2)
    yield _ActionPoint("weight gradients", weights, with_ends, steady.weight_grads, first.weight_grads)
    # The points after a backward of a schedule that splits some are without what deferred weight gradients hold.
    ended = live + np.where(whole & inputs.any() & traced, dropped[at], 0.0)
    yield _ActionPoint("end of a backward", whole | weights, ended, steady.backward_end, first.backward_end)
    if traced and view.layout.zero == 1 and _sharded(view.layout) and view.layout.gas > 1:
        last = actions.ends_last_backward
        yield _ActionPoint("end of a backward", last, ended, steady.last_backward_end, first.last_backward_end)
    at_loss = at_layer = live
    if inputs.any():
        if view.job.adapter_rank is not None:  # adapters' gradients are not deferred: each layer frees what it saved
            at_layer = live - np.where(inputs, dropped[at], 0.0)
        # At the loss a split backward has recomputed nothing yet.
        at_loss = live - np.where(inputs & traced, dropped[at], 0.0)
        # The next ones of the same chunk are beside them.
        again = actions.consecutive_input_grads & _sharded(view.layout)
        at_loss = at_loss + np.where(again, steady.waiting_head[at], 0.0)
        # A gradient that is reduced in another format than it was made in is live in both.
        both = again | (gradient_bytes(view.job) > compute_bytes(view.job))
        at_embedding = live + steady.embedding[at] + np.where(both, steady.waiting_embedding[at], 0.0)
        yield _ActionPoint("backward of the embedding", inputs, at_embedding, steady.input_grads_end, first.input_grads_end)
    scatters = view.layout.zero >= 2 and _sharded(view.layout)
    if traced and view.layout.pp > 1 and (inputs.any() or not scatters):  # else a reduce-scatter follows at once, and is fuller
        yield _ActionPoint("backward of the embedding", whole, live, steady.unsplit_embedding, first.unsplit_embedding)
    yield _ActionPoint("backward of a layer", whole, live, steady.layer, first.layer)
    yield _ActionPoint("backward of a layer", actions.consecutive_backwards, live, steady.backward_start, first.backward_start)
    yield _ActionPoint("backward of a layer", inputs, at_layer, steady.split_layer, first.split_layer)
    yield _ActionPoint("loss of a micro-batch", whole | inputs, at_loss, steady.loss, first.loss)


def _last_points(view: LayoutRows, last: ChunkParts, actions: InFlightCounts) -> Iterator[_ActionPoint]:
    """Of a step's last backward, in engines that reduce gradients in it alone."""
    live = _over_chunks(actions.waiting, (last.kept + last.kept_loss)[view.chunks])
    live = live + _over_chunks(actions.deferred, (last.kept + last.dropped)[view.chunks])
    whole, ends = actions.by_kind[ActionKind.B], actions.ends_last_backward
    live = live + np.where(whole, last.kept[actions.stage], 0.0)
    yield _ActionPoint("backward of a layer", whole & ends, live, last.layer, last.layer)
    yield _ActionPoint("loss of a micro-batch", whole & ends, live, last.loss, last.loss)
    yield _ActionPoint("weight gradients", ~whole & ends, live, last.weight_grads, last.weight_grads)


@dataclass(frozen=True)
class OtherChunks:
    """What other chunks of the rank hold beyond what the action's own chunk counts for the rank: ranks × actions.

    FSDP has gradients only of chunks that had a backward.
    """

    gradients: Array
    buffers: Array

    @classmethod
    def of(cls, view: LayoutRows, steady: ChunkParts, actions: InFlightCounts) -> OtherChunks:
        chunks, at, scattered = view.chunks, actions.stage, steady.reduce_scatter_input
        each, finished, started = view.chunk_gradients(), actions.after_last_backward, actions.after_first_backward
        between = (actions.backwards_done > 0) & ~finished
        gradients = _over_chunks(finished, each.after_last_backward[chunks])
        gradients += _over_chunks(between, each.after_first_backward[chunks])
        own = steady.state.gradients[at]
        # A chunk's last backward of a step frees its last reduce-scatter input too.
        inputs = _over_chunks(between, scattered[chunks]) - np.where(started, scattered[at], 0.0)
        other_inputs = scattered[chunks].sum(axis=1)[:, None] - scattered[at]
        return cls(gradients - np.where(started, own, 0.0), inputs - np.where(started, other_inputs, 0.0))


def _over_chunks(count: Array, bytes_: Array) -> Array:
    """Sum over a rank's chunks of counts (ranks × actions × chunks) times bytes (ranks × chunks)."""
    return np.asarray(np.matmul(count, bytes_[:, :, None])[:, :, 0])


def most_gradients(view: LayoutRows, rank: int) -> float:
    """The most that a rank has: ZeRO-1 shards a chunk's after its last backward, perhaps before another's first."""
    layout, each = view.layout, view.chunk_gradients()
    ends = counts(layout.schedule, layout.pp, layout.gas, layout.virtual_stages).ends_backward[rank]
    ended, local = np.cumsum(ends, axis=0), view.chunks[rank]
    started = np.where(ended > 0, each.after_first_backward[local], 0.0)
    there = np.where(ended >= ends.sum(axis=0), each.after_last_backward[local], started)
    return float(there.sum(axis=1).max())
