"""How far each chunk of a pipeline rank has come along its list of actions, and what FSDP2 therefore holds of its gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost import memory
from ultrascale.cost.columns import Array
from ultrascale.cost.layout_rows import LayoutRows
from ultrascale.schedules import InFlightCounts, counts


@dataclass(frozen=True)
class OtherChunks:
    """Of other chunks of the rank, beside what the moments count, while each action runs: ranks × actions. FSDP has gradients
    only of those that had a backward.
    """

    gradients: Array
    buffers: Array

    @classmethod
    def of(cls, view: LayoutRows, later: memory.WalkedParts, held: InFlightCounts) -> OtherChunks:
        chunks, at, left = view.chunks, held.stage, later.left_over
        each, begun = view.chunk_gradients(), held.ended > 0
        there = summed(held.over, each.over[chunks]) + summed(begun & ~held.over, each.begun[chunks])
        counted = later.state.gradients[at]
        left_there = summed(begun, left[chunks]) - np.where(held.begun, left[at], 0.0)
        left_counted = left[chunks].sum(axis=1)[:, None] - left[at]
        return cls(there - np.where(held.begun, counted, 0.0), left_there - np.where(held.begun, left_counted, 0.0))


def summed(count: Array, bytes_: Array) -> Array:
    """Of ranks × actions × stages of the rank, with the bytes of ranks × stages."""
    return np.asarray(np.matmul(count, bytes_[:, :, None])[:, :, 0])


def most_gradients(view: LayoutRows, rank: int) -> float:
    """The most that a rank has of them: ZeRO-1 lets a chunk's go after its last backward, perhaps before another's first."""
    layout, each = view.layout, view.chunk_gradients()
    held = counts(layout.schedule, layout.pp, layout.gas, layout.virtual_stages)
    ends, local = held.ends[rank], view.chunks[rank]
    ended = np.cumsum(ends, axis=0)
    there = np.where(ended >= ends.sum(axis=0), each.over[local], np.where(ended > 0, each.begun[local], 0.0))
    return float(there.sum(axis=1).max())
