"""When each pipeline rank is fullest: the lists of actions, walked with the bytes of their chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost import memory
from ultrascale.cost.columns import Array
from ultrascale.cost.moments import Moment
from ultrascale.cost.view import View
from ultrascale.schedules import KINDS, Counts, Kind, counts
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

    def in_flight(self, layers: tuple[int, ...]) -> float:
        """Micro-batches' worth of the rank's layers."""
        return sum(count * layers[chunk] for chunk, count in self.chunks.items()) / sum(layers[chunk] for chunk in self.chunks)


@dataclass(frozen=True)
class _Candidate:
    """A moment that some actions have, ranks × actions."""

    name: str
    kinds: tuple[Kind, ...]
    """whose moment it is"""
    live: Array
    """what waits meanwhile"""
    top: Moment
    """on top of that, for each chunk"""
    top_of_first: Moment
    """the same until the rank's first backward is over"""


def peaks(view: View) -> list[Peak]:
    """Of every rank."""
    layout = view.layout
    # FSDP makes room for gradients in a step's first backward.
    begins = view.job.framework.followed and layout.zero and layout.shards > 1 and layout.gas > 1
    later = view.parts()
    return _walked(view, view.parts(first=True) if begins else later, later)


def _walked(view: View, first: memory.PeakParts, later: memory.PeakParts) -> list[Peak]:
    """Walks the ranks' action lists with the bytes of their chunks, other ones until a rank's `first` backward is over."""
    layout = view.layout
    # Beyond four rounds the list only repeats itself, and what it holds no longer grows (AFAB holds everything).
    enough = layout.gas if layout.schedule == "afab" else min(layout.gas, _settled(layout))
    held = counts(layout.schedule, layout.pp, enough, layout.virtual_stages)
    chunks, at, of = view.chunks, held.stage, held.of
    kept, dropped, waiting_loss = later.kept, later.dropped, later.kept_loss
    live = _summed(held.waiting, (kept + waiting_loss)[chunks]) + _summed(held.deferred, (kept + dropped)[chunks])
    if Kind.B in of:
        live += np.where(of[Kind.B], kept[at], 0.0)
    # A split backward has brought nothing back yet at the loss.
    apart = view.job.framework.followed and Kind.I in of
    at_loss = live - np.where(of[Kind.I], dropped[at], 0.0) if apart else live
    moments = (
        _Candidate("end of a forward", (Kind.F,), live, later.forward, first.forward),
        _Candidate("weight gradients", (Kind.W,), live, later.between, first.between),
        _Candidate("backward of a layer", (Kind.B,), live, later.layer, first.layer),
        _Candidate("backward of a layer", (Kind.I,), live, later.split_layer, first.split_layer),
        _Candidate("loss of a micro-batch", (Kind.B, Kind.I), at_loss, later.loss, first.loss),
    )
    candidates = [each for each in moments if not of.keys().isdisjoint(each.kinds)]
    totals = np.stack([_totals(each, held, first is later) for each in candidates], axis=1)
    fullest = totals.reshape(layout.pp, -1).argmax(axis=1)
    return [
        _peak(held, rank, int(action), candidates[which], chunks[rank])
        for rank, (which, action) in enumerate(zip(*np.divmod(fullest, at.shape[1]), strict=True))
    ]


def _summed(count: Array, bytes_: Array) -> Array:
    """Of ranks × actions × stages of the rank, with the bytes of ranks × stages."""
    return np.asarray(np.matmul(count, bytes_[:, :, None])[:, :, 0])


def _totals(candidate: _Candidate, held: Counts, always_alike: bool) -> Array:
    top = candidate.top.total[held.stage]
    if not always_alike:
        top = np.where(held.begun, top, candidate.top_of_first.total[held.stage])
    there = np.logical_or.reduce([held.of[kind] for kind in candidate.kinds if kind in held.of])
    return np.where(there, candidate.live + top, -np.inf)


def _peak(held: Counts, rank: int, action: int, found: _Candidate, chunks: Array) -> Peak:
    chunk = held.stage[rank, action]
    top = found.top if held.begun[rank, action] else found.top_of_first
    waiting = held.waiting[rank, action] + held.deferred[rank, action]
    waiting[chunks == chunk] += held.kind[rank, action] == KINDS.index(Kind.B)
    return Peak(
        float(found.live[rank, action] + top.activations[chunk]),
        float(top.buffers[chunk]),
        float(top.gradients[chunk]),
        {int(each): float(count) for each, count in zip(chunks, waiting, strict=True)},
        found.name,
    )
