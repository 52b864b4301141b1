"""What a rank holds for the backward: activations per stage and micro-batch, along its action list.

A forward keeps the stage's activations; a full backward lets them go. With a split backward they stay until the weight
gradient, which needs the saved inputs: the conservative reading, as an engine may free part of them after I.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from ultrascale.schedules.actions import KINDS, Kind, Schedule
from ultrascale.schedules.build import lists


@dataclass(frozen=True)
class Held:
    """The most a rank holds at once."""

    peak_bytes: float
    at: int  # index into the rank's actions: the level is reached when this one has started
    count: tuple[int, ...]  # micro-batches held then, per local stage in the order of `Schedule.stages_of`


def peak_held(schedule: Schedule, rank: int, bytes_per_stage: Sequence[float]) -> Held:
    """The first highest level of a rank. `bytes_per_stage` is per global stage, for one micro-batch."""
    peak = Held(0.0, 0, (0,) * schedule.virtual_stages)
    for at, (level, count) in enumerate(_levels(schedule, rank, bytes_per_stage)):
        if level > peak.peak_bytes:
            peak = Held(level, at, tuple(count))
    return peak


def timeline(schedule: Schedule, rank: int, bytes_per_stage: Sequence[float]) -> tuple[float, ...]:
    """Bytes held by a rank after each of its actions."""
    return tuple(level for level, _ in _levels(schedule, rank, bytes_per_stage))


def _levels(schedule: Schedule, rank: int, bytes_per_stage: Sequence[float]) -> Iterator[tuple[float, list[int]]]:
    stages = schedule.stages_of(rank)
    local = {stage: i for i, stage in enumerate(stages)}
    count = [0] * len(stages)
    for action in schedule.actions[rank]:
        if action.kind is Kind.F:
            count[local[action.stage]] += 1
        elif action.kind is not Kind.I:
            count[local[action.stage]] -= 1
        # Summed anew from the counts: adding and subtracting floats would drift from zero.
        yield sum(n * bytes_per_stage[stage] for n, stage in zip(count, stages, strict=True)), count


@dataclass(frozen=True)
class Counts:
    """What every rank holds while each of its actions runs: ranks × actions, a shorter list with empty ones at its end."""

    waiting: NDArray[np.float64]
    """micro-batches between their forward and their backward, of each of the rank's stages"""
    deferred: NDArray[np.float64]
    """micro-batches from the start of their input gradient to the end of their weight gradient, of each stage"""
    stage: NDArray[np.int64]
    """the action's own stage, of the whole pipeline's"""
    kind: NDArray[np.int64]
    """its place in KINDS, −1 where there is no action"""
    begun: NDArray[np.bool_]
    """the rank has finished a backward before"""

    @cached_property
    def of(self) -> dict[Kind, NDArray[np.bool_]]:
        """Which actions are of each kind that there is."""
        masks = {kind: np.asarray(self.kind == KINDS.index(kind)) for kind in Kind}
        return {kind: mask for kind, mask in masks.items() if mask.any()}


@lru_cache(maxsize=128)
def counts(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Counts:
    """Kept, because a search asks about few pipelines many times, each time with other bytes."""
    made = lists(name, ranks, microbatches, virtual_stages)
    longest = int(np.diff(made.start).max())
    position = np.arange(len(made.kind)) - np.repeat(made.start[:-1], np.diff(made.start))
    kind = np.full((ranks, longest), -1)
    kind[made.rank, position] = made.kind
    stage = np.zeros((ranks, longest), dtype=np.int64)
    stage[made.rank, position] = made.stage
    # Looped or folded, a rank's stages rise in the order in which a micro-batch passes them, one in every `ranks`.
    own = (stage // ranks)[..., None] == np.arange(virtual_stages)
    forward, backward, inputs, weights = (own & (kind == KINDS.index(one))[..., None] for one in Kind)
    ends = (backward | weights).any(axis=2)
    waiting = np.cumsum(forward * 1.0 - backward - inputs, axis=1)
    # A weight gradient lets go when it ends, not when it starts.
    deferred = np.cumsum(inputs * 1.0 - weights, axis=1) + weights
    return Counts(waiting, deferred, stage, kind, np.asarray(np.cumsum(ends, axis=1) > ends))
