"""What a rank holds for the backward: activations per stage and micro-batch, along its action list.

A forward keeps the stage's activations; a full backward lets them go. With a split backward they stay until the weight
gradient, which needs the saved inputs: the conservative reading, as an engine may free part of them after I.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ultrascale.schedules.actions import Kind, Schedule


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
