"""A schedule without the repetitions of its steady state: nothing else is lost, and it closes up without overlaps."""

from __future__ import annotations

import itertools

import pytest

from ultrascale.schedules import REGISTRY, StageTimes, Timeline, build, simulate
from ultrascale.schedules.steady_state import shortened

CASES = [(name, virtual) for name, spec in REGISTRY.items() for virtual in (1, 2) if spec.takes(virtual)]
CASES.remove(("afab", 1))  # every rank has its own pace there, unless all stages take as long


def timeline_of(name: str, virtual: int, microbatches: int, head: float) -> Timeline:
    """All stages take as long, but the last one with the head."""
    schedule = build(name, 4, microbatches, virtual)
    forward = (1.0,) * (schedule.stages - 1) + (head,)
    times = StageTimes(forward, tuple(1.1 * one for one in forward), tuple(0.9 * one for one in forward), 0.05)
    return simulate(schedule, times)


@pytest.mark.parametrize("head", [1.0, 1.13, 1.6])
@pytest.mark.parametrize(("name", "virtual"), CASES)
def test_a_step_is_warm_up_one_period_and_cool_down(name: str, virtual: int, head: float) -> None:
    whole = timeline_of(name, virtual, 64, head)
    short = shortened(whole)
    assert len(short.events) < len(whole.events) / 2
    # Every period that is left out holds as many actions of each rank and kind, for its number of micro-batches.
    for one in short.left_out:
        dropped = [event for event in whole.events if one.start_s <= event.start_s < one.end_s]
        for rank in range(4):
            of_rank = sum(event.rank == rank for event in dropped)
            kinds = len({(event.action.kind, event.action.stage) for event in dropped if event.rank == rank})
            assert of_rank == one.count * one.microbatches * kinds
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for event in short.events:
        place = short.place_s(event.start_s)
        by_rank.setdefault(event.rank, []).append((place, place + event.end_s - event.start_s))
        assert short.time_s(place) == pytest.approx(event.start_s)
    for spans in by_rank.values():
        distinct = sorted({(round(start, 6), round(end, 6)) for start, end in spans})  # a pair shares its span
        assert all(first[1] <= second[0] + 2e-6 for first, second in itertools.pairwise(distinct))


def test_the_shortened_step_of_many_is_as_long_as_that_of_few() -> None:
    few, many = (shortened(timeline_of("1f1b", 1, count, 1.6)) for count in (40, 90))
    assert few.place_s(few.makespan_s) == pytest.approx(many.place_s(many.makespan_s))
    assert len(few.events) == len(many.events)


def test_equal_stages_of_afab_have_a_steady_state_in_forward_and_one_in_backward() -> None:
    forward, backward = shortened(timeline_of("afab", 1, 64, 1.0)).left_out
    assert forward.length_s / forward.count == pytest.approx(1.0)
    assert backward.length_s / backward.count == pytest.approx(2.0)
