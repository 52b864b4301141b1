"""Closed forms against the lists: in-flight exactly, the makespan within the stated bounds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from schedules.references import most_in_flight
from ultrascale.schedules import (
    SCHEDULES,
    Schedule,
    StageTimes,
    build,
    in_flight,
    legal,
    makespan,
    simulate,
)
from ultrascale.specs.errors import SpecError

VIRTUAL = {"afab": (1,), "1f1b": (1,), "interleaved": (2, 3, 4), "zero-bubble": (1, 2, 3, 4)}


def schedules(name: str, ranks: int, microbatches: Iterator[int] | range) -> Iterator[Schedule]:
    for virtual_stages in VIRTUAL.get(name, (2,)):
        for m in microbatches:
            if legal(name, ranks, m, virtual_stages) is None:
                yield build(name, ranks, m, virtual_stages)


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("name", SCHEDULES)
def test_in_flight_is_exact(name: str, ranks: int) -> None:
    every = range(1, 4 * ranks + 1) if ranks <= 8 else range(4, 4 * ranks + 1, 4)
    for schedule in schedules(name, ranks, every):
        listed = [most_in_flight(schedule, rank) for rank in range(ranks)]
        m, v = schedule.microbatches, schedule.virtual_stages
        assert in_flight(name, ranks, np.arange(ranks), m, v).tolist() == listed, (m, v)


def test_in_flight_of_the_textbook() -> None:
    rank = np.arange(4)
    assert in_flight("afab", 4, rank, 8).tolist() == [8, 8, 8, 8]
    assert in_flight("1f1b", 4, rank, 8).tolist() == [4, 3, 2, 1]
    # Narayanan 2021: warm-up 2(p − r − 1) + (v − 1)p, and the forward before the first backward.
    assert in_flight("interleaved", 4, rank, 8, 2).tolist() == [11, 9, 7, 5]
    # Qi 2024: ZB-V holds what 1F1B's first rank holds, P stages of a P-th = 2P chunks of half the size.
    assert in_flight("zb-v", 4, rank, 8, 2).tolist() == [8, 8, 8, 8]
    # Counted on the list: 2P in flight as in ZB-V, and the forward of a pair, which starts before its backward ends.
    assert in_flight("dualpipe-v", 4, rank, 8, 2).tolist() == [9, 9, 9, 9]


def closed_and_simulated(schedule: Schedule, f: float, i: float, w: float, last: float, send_s: float) -> tuple[float, float]:
    factor = [1.0] * (schedule.stages - 1) + [last]
    times = StageTimes(tuple(f * x for x in factor), tuple(i * x for x in factor), tuple(w * x for x in factor), send_s)
    slow = max(sum(factor[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.ranks))
    total = sum(factor)
    shape = (schedule.ranks, schedule.microbatches, schedule.virtual_stages)
    closed = makespan(schedule.name, *shape, [total * x for x in (f, i, w)], [slow * x for x in (f, i, w)], send_s)
    return float(closed), simulate(schedule, times).makespan_s


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", SCHEDULES)
def test_makespan_is_near_the_simulation(name: str, ranks: int) -> None:
    some = sorted({ranks, ranks + 1, 3 * ranks // 2, 2 * ranks - 1, 2 * ranks, 2 * ranks + 2, 4 * ranks})
    for schedule in schedules(name, ranks, iter(some[: 5 if ranks == 16 else None])):
        bound = 0.03 if schedule.microbatches >= 2 * ranks else 0.12
        for i, w in ((1.0, 1.0), (1.2, 0.8)):
            for last in (1.0, 1.15):
                for send_s in (0.0, 0.05):
                    closed, simulated = closed_and_simulated(schedule, 1.0, i, w, last, send_s)
                    assert closed == pytest.approx(simulated, rel=bound), (schedule.microbatches, i, last, send_s)


@pytest.mark.parametrize("name", ["afab", "1f1b", "interleaved"])
def test_schedules_with_full_backwards_are_exact_when_stages_are_equal(name: str) -> None:
    for ranks in (2, 3, 4, 8):
        for schedule in schedules(name, ranks, range(ranks, 4 * ranks, 2)):
            closed, simulated = closed_and_simulated(schedule, 1.0, 1.2, 0.8, 1.0, 0.05)
            assert closed == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_has_no_bubble_and_no_sends(name: str) -> None:
    for schedule in schedules(name, 1, range(2, 5)):
        closed, simulated = closed_and_simulated(schedule, 1.0, 1.2, 0.8, 1.15, 0.5)
        assert closed == pytest.approx(simulated)


@pytest.mark.parametrize("name", SCHEDULES)
def test_never_faster_than_the_slowest_rank(name: str) -> None:
    rng = np.random.default_rng(0)
    f, i, w = rng.uniform(0.1, 2.0, (3, 2000))
    p, m = rng.integers(2, 17, 2000), rng.integers(32, 200, 2000)
    v = VIRTUAL.get(name, (2,))[-1]
    slow = v * rng.uniform(1.0, 1.5, 2000)
    total = p * v
    time = makespan(name, p, m, v, [total * x for x in (f, i, w)], [slow * x for x in (f, i, w)], 0.01)
    assert time.shape == (2000,)
    assert (time >= m * slow * (f + i + w) * (1 - 1e-9)).all()


def test_textbook_makespans() -> None:
    def uniform(name: str, v: int, f: float = 1.0, i: float = 1.0, w: float = 1.0) -> float:
        chunk = (f / v, i / v, w / v)
        return float(makespan(name, 4, 8, v, [4 * v * x for x in chunk], [v * x for x in chunk]))

    assert uniform("afab", 1) == uniform("1f1b", 1) == (8 + 3) * 3
    assert uniform("interleaved", 2) == pytest.approx(8 * 3 + 3 * 3 / 2)
    assert uniform("zero-bubble", 1, i=1.2, w=0.8) == pytest.approx(8 * 3 + 3 * 1.4)
    assert uniform("zb-v", 2) == pytest.approx(8 * 3 + 3 / 2)
    assert uniform("dualpipe-v", 2) == pytest.approx(8 * 3 + 3)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(SpecError, match="1f1b"):
        in_flight("1f2b", 4, 0, 8)
    with pytest.raises(SpecError, match="1f1b"):
        makespan("1f2b", 4, 8, 1, (4, 4, 4), (1, 1, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_step_is_shorter_than_the_work_of_its_slowest_rank(name: str) -> None:
    """A search drops layouts by it before it computes their makespan."""
    chance = np.random.default_rng(5)
    for ranks in (2, 3, 8, 32):
        for virtual_stages in VIRTUAL.get(name, (2,)):
            m = np.arange(2 * ranks, 40 * ranks, ranks)
            slowest = chance.exponential(size=(3, len(m)))
            total = slowest + chance.uniform(size=len(m)) * (ranks - 1) * slowest
            send_s = chance.exponential(0.1, size=len(m))
            took = makespan(name, ranks, m, virtual_stages, total, slowest, send_s)
            assert np.all(took >= m * slowest.sum(axis=0) * (1 - 1e-12))
