"""Many pipelines timed at once: each takes what it takes alone, action by action."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.schedules import SCHEDULES, StageTimes, TimedSchedule, build, legal, simulate, simulate_makespan
from ultrascale.schedules.makespans import makespans

SHAPES = [
    (name, ranks, microbatches, virtual_stages)
    for name in SCHEDULES
    for ranks in (1, 2, 3, 4, 7)
    for microbatches in (1, 2, 3, 4, 5, 8, 9, 14, 16, 21)
    for virtual_stages in (1, 2, 3)
    if legal(name, ranks, microbatches, virtual_stages) is None
]


def uneven(shape: tuple[str, int, int, int], seed: int) -> TimedSchedule:
    """Stages that take between half and twice as long as each other, and a hop that is short or long against them."""
    chance = random.Random(seed)
    parts = [tuple(chance.uniform(0.5, 2.0) for _ in range(shape[1] * shape[3])) for _ in range(3)]
    return TimedSchedule(*shape, StageTimes(*parts, send_s=chance.choice([0.0, 0.01, 0.5, 3.0])))


def alone(pipeline: TimedSchedule) -> float:
    return simulate(build(*pipeline[:-1]), pipeline.times).makespan_s


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_together_take_what_each_takes_alone(name: str) -> None:
    pipelines = [uneven(shape, seed) for seed, shape in enumerate(SHAPES) if shape[0] == name]
    assert len(pipelines) > 10
    assert makespans(pipelines) == pytest.approx([alone(pipeline) for pipeline in pipelines], rel=1e-13)


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 1000)), max_size=4))
def test_any_few_together(asked: list[tuple[tuple[str, int, int, int], int]]) -> None:
    pipelines = [uneven(shape, seed) for shape, seed in asked]
    assert makespans(pipelines) == pytest.approx([alone(pipeline) for pipeline in pipelines], rel=1e-13)


def test_by_hand() -> None:
    # Two ranks, two micro-batches, F = I = W = 1, a hop of 0.5. Rank 0: F0 0-1, F1 1-2. Rank 1: F0 1.5-2.5, B0 2.5-4.5,
    # F1 4.5-5.5, B1 5.5-7.5. Rank 0: B0 5-7, B1 8-10.
    times = StageTimes.uniform(2, 1.0, 1.0, 1.0, 0.5)
    assert makespans([TimedSchedule("1f1b", 2, 2, 1, times)]) == [10.0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_as_many_as_are_asked_are_simulated_up_to_the_cap(name: str) -> None:
    pipeline = uneven((name, 4, 64, {"afab": 1, "1f1b": 1}.get(name, 2)), 7)
    assert simulate_makespan(*pipeline) == pytest.approx(alone(pipeline), rel=1e-13)
