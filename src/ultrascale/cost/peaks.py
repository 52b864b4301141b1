"""When each pipeline rank is fullest: its list of actions, walked with the bytes of its chunks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost import memory, stages
from ultrascale.cost.columns import Array
from ultrascale.cost.moments import Moment
from ultrascale.cost.view import View
from ultrascale.schedules import counts
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
    """A moment that some of the rank's actions have."""

    name: str
    there: Array
    """which actions have it"""
    live: Array
    """what waits meanwhile"""
    top: Moment
    """on top of that, for each action"""

    @property
    def total(self) -> Array:
        return np.where(self.there, self.live + self.top.total, -np.inf)


def peaks(view: View) -> list[Peak]:
    """Of every rank."""
    job, layout, share = view.job, view.layout, view.chunk_share()
    rows = view.row.take(np.zeros(len(share.layers), dtype=np.int64))
    holders = stages.share_of(job, rows, view.chunk_ranks())
    later = memory.peak_parts(job, rows, share, holders)
    # FSDP makes room for gradients in a step's first backward.
    begins = job.framework.followed and layout.zero and layout.shards > 1 and layout.gas > 1
    first = memory.peak_parts(job, rows, share, holders, first=True) if begins else later
    return [_peak(view, first, later, rank) for rank in range(layout.pp)]


def _peak(view: View, first: memory.PeakParts, later: memory.PeakParts, rank: int) -> Peak:
    """Walks the rank's action list with the bytes of its own chunks, other ones until its `first` backward is over."""
    layout = view.layout
    # Beyond four rounds the list only repeats itself, and what it holds no longer grows (AFAB holds everything).
    enough = layout.gas if layout.schedule == "afab" else min(layout.gas, _settled(layout))
    held = counts(layout.schedule, layout.pp, enough, layout.virtual_stages, rank)
    local = np.asarray(stages.chunks_of(rank, layout.pp, layout.virtual_stages, view.v_shaped))
    kept, dropped, waiting_loss = later.kept[local], later.dropped[local], later.kept_loss[local]
    kinds, at = np.asarray([str(kind) for kind in held.kinds]), local[held.local]
    live = held.waiting @ (kept + waiting_loss) + held.working @ kept + held.deferred @ (kept + dropped)
    # A split backward has brought nothing back yet at the loss.
    at_loss = live - np.where(kinds == "I", dropped[held.local], 0.0) if view.job.framework.followed else live
    ends = np.isin(kinds, ("B", "W"))
    begun = np.asarray(np.cumsum(ends) - ends > 0)

    def top(before: Moment, after: Moment) -> Moment:
        return after.at(at).where(begun, before.at(at))

    candidates = (
        _Candidate("end of a forward", kinds == "F", live, top(first.forward, later.forward)),
        _Candidate("weight gradients", kinds == "W", live, top(first.between, later.between)),
        _Candidate("backward of a layer", kinds == "B", live, top(first.layer, later.layer)),
        _Candidate("backward of a layer", kinds == "I", live, top(first.split_layer, later.split_layer)),
        _Candidate("loss of a micro-batch", np.isin(kinds, ("B", "I")), at_loss, top(first.loss, later.loss)),
    )
    found = max(candidates, key=lambda each: float(each.total.max()))
    action = int(np.argmax(found.total))
    waiting = held.waiting[action] + held.working[action] + held.deferred[action]
    return Peak(
        float(found.live[action] + found.top.activations[action]),
        float(found.top.buffers[action]),
        float(found.top.gradients[action]),
        {int(chunk): float(count) for chunk, count in zip(local, waiting, strict=True)},
        found.name,
    )
