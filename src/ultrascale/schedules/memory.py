"""What a rank holds for the backward: activations per stage and micro-batch, along its action list.

A forward keeps the stage's activations; a full backward lets them go. With a split backward they stay until the weight
gradient, which needs the saved inputs: the conservative reading, as an engine may free part of them after I.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ultrascale.schedules.actions import Kind, Schedule
from ultrascale.schedules.build import build


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
    """What a rank holds while each of its actions runs: rows are actions, columns its local stages."""

    waiting: NDArray[np.float64]
    """micro-batches between their forward and their backward"""
    working: NDArray[np.float64]
    """the one in full backward"""
    deferred: NDArray[np.float64]
    """micro-batches from the start of their input gradient to the end of their weight gradient"""
    local: NDArray[np.int64]
    """the action's own stage"""
    kinds: tuple[Kind, ...]


@lru_cache(maxsize=2048)
def counts(name: str, ranks: int, microbatches: int, virtual_stages: int, rank: int) -> Counts:
    """Kept, because a search asks about few pipelines many times, each time with other bytes."""
    schedule = build(name, ranks, microbatches, virtual_stages)
    actions = schedule.actions[rank]
    position = {stage: index for index, stage in enumerate(schedule.stages_of(rank))}
    local = np.asarray([position[action.stage] for action in actions], dtype=np.int64)
    kinds = tuple(action.kind for action in actions)
    own = np.zeros((len(actions), virtual_stages))
    own[np.arange(len(actions)), local] = 1.0

    def of(kind: Kind) -> NDArray[np.float64]:
        return np.asarray(own * np.asarray([[1.0 if each is kind else 0.0] for each in kinds]))

    forward, backward, inputs, weights = (of(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    finished = np.cumsum(weights, axis=0) - weights  # a weight gradient lets go when it ends, not when it starts
    return Counts(np.cumsum(forward - backward - inputs, axis=0), backward, np.cumsum(inputs, axis=0) - finished, local, kinds)
