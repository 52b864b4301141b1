"""Times: the textbook's bubbles, sends, pairs, deadlocks, and extrapolation to many micro-batches."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedules.references import ends_s
from ultrascale.schedules import (
    SCHEDULES,
    Action,
    ActionKind,
    DeadlockError,
    Schedule,
    StageTimes,
    TimedSchedule,
    build,
    legal,
    simulate,
    simulate_makespans,
)
from ultrascale.schedules.simulate import makespans
from ultrascale.specs.errors import SpecError


def unit(schedule: Schedule, send_s: float = 0.0) -> StageTimes:
    return StageTimes.uniform(schedule.stages, 1.0, 1.0, 1.0, send_s)


@pytest.mark.parametrize("name", ["afab", "1f1b"])
def test_bubble_of_the_plain_schedules(name: str) -> None:
    # Narayanan 2021, section 2.2.1: (p − 1)/m of the ideal time, so (p − 1)/(m + p − 1) of the whole: 3/11.
    timeline = simulate(build(name, 4, 8), StageTimes.uniform(4, 1.0, 1.0, 1.0))
    assert timeline.makespan_s == (8 + 3) * 3
    assert timeline.bubble_fraction == pytest.approx(3 / 11)
    assert timeline.busy_s == (24.0,) * 4
    assert timeline.bubble_s == (9.0,) * 4


@pytest.mark.parametrize("virtual_stages", [2, 4])
def test_interleaving_divides_the_bubble(virtual_stages: int) -> None:
    # Narayanan 2021, section 2.2.2: (p − 1)/(v·m). A rank's whole work per micro-batch is kept at 3.
    part = 1.0 / virtual_stages
    schedule = build("interleaved", 4, 8, virtual_stages)
    timeline = simulate(schedule, StageTimes.uniform(schedule.stages, part, part, part))
    assert timeline.makespan_s == pytest.approx(8 * 3 + 3 * 3 / virtual_stages)


def test_zero_bubble_h1() -> None:
    # Qi 2023, section 2: (p − 1)(F + I − W).
    timeline = simulate(build("zero-bubble", 4, 8), StageTimes.uniform(4, 1.0, 1.2, 0.8))
    assert timeline.bubble_s == pytest.approx([3 * (1.0 + 1.2 - 0.8)] * 4)


def test_v_schedules_have_bubbles_only_at_start_and_end() -> None:
    schedule = build("zb-v", 4, 8, 2)
    timeline = simulate(schedule, unit(schedule))
    assert timeline.bubble_s == (3.0,) * 4
    for rank in range(4):
        events = [event for event in timeline.events if event.rank == rank]
        # Zero bubble in the paper's sense: from its first to its last action no rank ever waits.
        assert events[-1].end_s - events[0].start_s == timeline.busy_s[rank]


def test_a_send_delays_the_receiver_and_not_the_sender() -> None:
    timeline = simulate(build("afab", 2, 2), StageTimes.uniform(2, 1.0, 1.0, 1.0, send_s=0.25))
    starts = {(event.action.kind, event.action.stage, event.action.microbatch): event.start_s for event in timeline.events}
    assert starts[ActionKind.F, 0, 1] == 1.0
    assert starts[ActionKind.F, 1, 0] == 1.25
    assert starts[ActionKind.B, 1, 0] == 3.25
    assert starts[ActionKind.B, 0, 0] == 5.5
    assert timeline.makespan_s == 9.5


def test_no_send_within_a_rank() -> None:
    schedule = build("zb-v", 1, 3, 2)
    assert simulate(schedule, unit(schedule, send_s=5.0)).makespan_s == 3 * 2 * 3


def test_a_pair_is_one_interval_that_is_busy_once() -> None:
    schedule = build("dualpipe-v", 2, 4, 2)
    timeline = simulate(schedule, unit(schedule))
    for event, after in zip(timeline.events, timeline.events[1:], strict=False):
        if event.action.paired:
            assert (event.start_s, event.end_s) == (after.start_s, after.end_s)
            assert event.end_s - event.start_s == 3.0
    assert timeline.busy_s == (4 * 2 * 3.0,) * 2


def test_unequal_stages_wait_for_the_slowest() -> None:
    timeline = simulate(build("afab", 2, 4), StageTimes((1.0, 2.0), (1.0, 1.0), (0.0, 0.0)))
    assert timeline.makespan_s == 1 + 4 * 2 + 4 * 1 + 1


def test_deadlocked_action_lists_are_named() -> None:
    F, B = ActionKind.F, ActionKind.B
    crossed = Schedule(
        "by hand", 2, 1, 2,
        (
            (Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)),
            (Action(F, 1, 0), Action(F, 1, 1), Action(B, 1, 0), Action(B, 1, 1)),
        ),
    )  # fmt: skip
    with pytest.raises(DeadlockError, match=r"rank 0 at B0 of stage 0, rank 1 at F1 of stage 1"):
        simulate(crossed, unit(crossed))


def test_stage_times_must_cover_all_stages() -> None:
    with pytest.raises(ValueError, match="forward_s has 2 entries, the schedule 4 stages"):
        simulate(build("1f1b", 4, 8), StageTimes.uniform(2, 1.0, 1.0, 1.0))


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize(
    ("name", "virtual_stages"),
    [
        ("afab", 1),
        ("1f1b", 1),
        ("interleaved", 3),
        ("zero-bubble", 1),
        ("zero-bubble", 2),
        ("zb-v", 2),
        ("dualpipe-v", 2),
    ],
)
@pytest.mark.parametrize("last", [1.0, 1.02, 1.15])
@pytest.mark.parametrize("send_s", [0.0, 0.05])
def test_extrapolation_to_many_microbatches(name: str, virtual_stages: int, last: float, send_s: float) -> None:
    ranks, microbatches = 4, 512
    factors = (1.0,) * (ranks * virtual_stages - 1) + (last,)
    times = StageTimes(factors, tuple(1.2 * x for x in factors), tuple(0.8 * x for x in factors), send_s)
    whole = simulate(build(name, ranks, microbatches, virtual_stages), times).makespan_s
    assert simulate_makespans([TimedSchedule(name, ranks, microbatches, virtual_stages, times)], cap=64)[0] == pytest.approx(
        whole, rel=1e-3
    )


def test_extrapolation_keeps_to_what_is_legal() -> None:
    # 4 ranks and 10 micro-batches make two rounds of 5; no smaller number does the same, so it is simulated whole.
    times = StageTimes.uniform(8, 1.0, 1.0, 1.0)
    whole = simulate(build("interleaved", 4, 10, 2), times).makespan_s
    assert simulate_makespans([TimedSchedule("interleaved", 4, 10, 2, times)], cap=4)[0] == whole


def test_extrapolation_refuses_what_build_refuses() -> None:
    with pytest.raises(SpecError, match="multiple of 4"):
        simulate_makespans([TimedSchedule("interleaved", 4, 1001, 2, StageTimes.uniform(8, 1.0, 1.0, 1.0))])


# ------------------------------------------------------------------------------------------------- many pipelines at once

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
    return max(ends_s(build(*pipeline[:-1]), pipeline.times).values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_ends_when_the_reference_says(name: str) -> None:
    shape = next(shape for shape in SHAPES if shape[:3] == (name, 4, 16))
    pipeline = uneven(shape, 3)
    schedule = build(*shape)
    found = {event.action: event.end_s for event in simulate(schedule, pipeline.times).events}
    assert found == pytest.approx(ends_s(schedule, pipeline.times), rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_batched_simulations_equal_single_ones(name: str) -> None:
    pipelines = [uneven(shape, seed) for seed, shape in enumerate(SHAPES) if shape[0] == name]
    assert len(pipelines) > 10
    assert makespans(pipelines) == pytest.approx([alone(pipeline) for pipeline in pipelines], rel=1e-13)


@given(st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 1000)), max_size=4))
def test_any_batch_of_simulations_equals_single_ones(cases: list[tuple[tuple[str, int, int, int], int]]) -> None:
    pipelines = [uneven(shape, seed) for shape, seed in cases]
    assert makespans(pipelines) == pytest.approx([alone(pipeline) for pipeline in pipelines], rel=1e-13)


def test_by_hand() -> None:
    # Two ranks, two micro-batches, F = I = W = 1, a hop of 0.5. Rank 0: F0 0-1, F1 1-2. Rank 1: F0 1.5-2.5, B0 2.5-4.5,
    # F1 4.5-5.5, B1 5.5-7.5. Rank 0: B0 5-7, B1 8-10.
    times = StageTimes.uniform(2, 1.0, 1.0, 1.0, 0.5)
    assert makespans([TimedSchedule("1f1b", 2, 2, 1, times)]) == [10.0]


@pytest.mark.parametrize("name", SCHEDULES)
def test_microbatches_are_simulated_up_to_the_cap(name: str) -> None:
    pipeline = uneven((name, 4, 64, {"afab": 1, "1f1b": 1}.get(name, 2)), 7)
    assert simulate_makespans([pipeline])[0] == pytest.approx(alone(pipeline), rel=1e-13)
