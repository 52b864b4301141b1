"""When each pipeline rank is fullest: the lists of actions, walked with the bytes of their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ultrascale.cost import memory
from ultrascale.cost.activations import compute_bytes, gradient_bytes
from ultrascale.cost.chunk_progress import OtherChunks, summed
from ultrascale.cost.columns import Array
from ultrascale.cost.layout_rows import LayoutRows
from ultrascale.cost.memory_point import MemoryPoint
from ultrascale.schedules import KINDS, REGISTRY, ActionKind, InFlightCounts, counts
from ultrascale.specs.layout import Layout


def _settled(layout: Layout) -> int:
    """The fewest micro-batches, a multiple of the ranks away from gas, at which the schedule is in its steady state."""
    least = 4 * layout.pp
    return least + (layout.gas - least) % layout.pp if layout.gas > least else layout.gas


@dataclass(frozen=True)
class Peak:
    """The busiest action of a rank: bytes of what comes and goes, micro-batches' worth it holds, and what it is doing."""

    activations: float
    buffers: float
    gradients: float
    chunks: dict[int, float]
    """how many micro-batches of each of its chunks wait"""
    moment: str
    gone: float
    """bytes of the rank's parameters that are not there then: its buffers are counted less by it"""

    def in_flight(self, layers: tuple[int, ...]) -> float:
        """Micro-batches' worth of the rank's layers."""
        return sum(count * layers[chunk] for chunk, count in self.chunks.items()) / sum(layers[chunk] for chunk in self.chunks)


@dataclass(frozen=True)
class _Candidate:
    """A moment that some actions of the ranks have: ranks × actions."""

    name: str
    there: Array
    """which actions have it"""
    live: Array
    """what waits meanwhile"""
    later: MemoryPoint
    """on top of that, for each chunk"""
    first: MemoryPoint
    """the same until the chunk's first backward of a step is over"""


def peaks(view: LayoutRows) -> list[Peak]:
    """Of every rank."""
    later = view.parts()
    # FSDP makes room for gradients in a step's first backward.
    begins = view.job.framework.exact_memory_trace and _sharded(view.layout) and view.layout.gas > 1
    return _walked(view, view.parts(first=True) if begins else later, later)


def _sharded(layout: Layout) -> bool:
    return layout.zero > 0 and layout.shards > 1


def _walked(view: LayoutRows, first: memory.WalkedParts, later: memory.WalkedParts) -> list[Peak]:
    """Walks the ranks' action lists with the bytes of their chunks, other ones until a chunk's `first` backward is over."""
    layout = view.layout
    # Beyond four rounds the list only repeats itself, and what it holds no longer grows (AFAB holds everything).
    enough = layout.gas if REGISTRY[layout.schedule].holds_all else min(layout.gas, _settled(layout))
    held = counts(layout.schedule, layout.pp, enough, layout.virtual_stages)
    candidates = [each for each in _candidates(view, first, later, held) if each.there.any()]
    others = OtherChunks.of(view, later, held) if first is not later else None
    totals = np.stack([_totals(each, held, others) for each in candidates], axis=1)
    fullest = totals.reshape(layout.pp, -1).argmax(axis=1)
    return [
        _peak(held, rank, int(action), candidates[which], others, view.chunks[rank])
        for rank, (which, action) in enumerate(zip(*np.divmod(fullest, held.stage.shape[1]), strict=True))
    ]


def _candidates(
    view: LayoutRows, first: memory.WalkedParts, later: memory.WalkedParts, held: InFlightCounts
) -> Iterator[_Candidate]:
    chunks, at = view.chunks, held.stage
    kept, dropped, waiting_loss = later.kept, later.dropped, later.kept_loss
    forward, whole, inputs, weights = (held.of[kind] for kind in ActionKind)
    live = summed(held.waiting, (kept + waiting_loss)[chunks]) + summed(held.deferred, (kept + dropped)[chunks])
    live = live + np.where(whole, kept[at], 0.0) + summed(held.ended >= 2, later.met[chunks])
    at_loss = live
    if view.job.framework.exact_memory_trace and inputs.any():  # a split backward has brought nothing back yet at the loss
        at_loss = live - np.where(inputs, dropped[at], 0.0)
    in_forward = live
    if view.job.framework.exact_memory_trace:  # where experts make it fullest, its own loss is yet to come
        in_forward = live - np.where(forward, waiting_loss[at], 0.0)
    yield _Candidate("end of a forward", forward, in_forward, later.forward, first.forward)
    yield _Candidate("weight gradients", weights, live, later.between, first.between)
    yield _Candidate("end of a backward", whole | weights, live, later.scattering, first.scattering)
    if inputs.any():
        # Gradients of the ends are never put off: FSDP holds them until it scatters others', and the next ones beside them.
        owed = held.inputs_again & _sharded(view.layout)
        at_loss = at_loss + np.where(owed, later.waiting_head[at], 0.0)
        # What meets in another format than it was made in is there in both for a moment.
        both = owed | (gradient_bytes(view.job) > compute_bytes(view.job))
        at_embedding = live + later.fresh_embedding[at] + np.where(both, later.waiting_embedding[at], 0.0)
        yield _Candidate("backward of the embedding", inputs, at_embedding, later.between, first.between)
    yield _Candidate("backward of a layer", whole, live, later.layer, first.layer)
    yield _Candidate("backward of a layer", held.backward_again, live, later.beginning, first.beginning)
    yield _Candidate("backward of a layer", inputs, live, later.split_layer, first.split_layer)
    yield _Candidate("loss of a micro-batch", whole | inputs, at_loss, later.loss, first.loss)


def _totals(candidate: _Candidate, held: InFlightCounts, others: OtherChunks | None) -> Array:
    top = candidate.later.total[held.stage]
    if others is not None:
        top = np.where(held.begun, top, candidate.first.total[held.stage]) + others.gradients + others.buffers
    return np.where(candidate.there, candidate.live + top, -np.inf)


def _peak(held: InFlightCounts, rank: int, action: int, found: _Candidate, others: OtherChunks | None, chunks: Array) -> Peak:
    chunk, own = held.stage[rank, action], (rank, action)
    top = found.later if others is None or held.begun[own] else found.first
    waiting = held.waiting[own] + held.deferred[own]
    waiting[chunks == chunk] += held.kind[own] == KINDS.index(ActionKind.B)
    return Peak(
        float(found.live[own] + top.activations[chunk]),
        float(top.buffers[chunk] + (others.buffers[own] if others else 0.0)),
        float(top.gradients[chunk] + (others.gradients[own] if others else 0.0)),
        {int(each): float(count) for each, count in zip(chunks, waiting, strict=True)},
        found.name,
        float(np.broadcast_to(top.gone, top.buffers.shape)[chunk]),
    )
