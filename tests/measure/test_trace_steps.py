"""Sets of intervals, against the same arithmetic on sets of integer points."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ultrascale.measure.trace_steps import Intervals, both, length, lengths, merged, without

stretches = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def points_in(of: Intervals) -> set[int]:
    return {point for start, end in of for point in range(int(start), int(end))}


@given(stretches, stretches)
def test_sets_of_time_are_sets(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = merged(first), merged(second)
    assert points_in(a) == {point for start, end in first for point in range(start, end)}
    assert length(a) == len(points_in(a))
    assert points_in(both(a, b)) == points_in(a) & points_in(b)
    assert points_in(without(a, b)) == points_in(a) - points_in(b)
    assert both(a, b) == both(b, a)
    for one in (a, both(a, b), without(a, b)):
        assert one == merged(one)
        assert all(before[1] < after[0] for before, after in pairwise(one))


@given(stretches, stretches, st.integers(0, 40), st.integers(0, 40))
def test_parts_add_up_to_the_window(first: list[tuple[int, int]], second: list[tuple[int, int]], start: int, end: int) -> None:
    """The parts of a step: only compute, only communication, both, neither."""
    window = (min(start, end), max(start, end))
    computing, exchanging = (both(merged(one), [window]) for one in (first, second))
    overlapped = both(computing, exchanging)
    idle = without(merged([window]), merged([*computing, *exchanging]))
    alone = without(computing, exchanging), without(exchanging, computing)
    assert sum(map(length, (*alone, overlapped, idle))) == window[1] - window[0]
    assert lengths(merged(first), [window, (0, 40)]) == [length(computing), length(merged(first))]


def test_a_worked_example() -> None:
    """Kernels 0–10 and 5–20 and 30–40; a collective 15–35."""
    computing, exchanging = merged([(0, 10), (30, 40), (5, 20)]), merged([(15, 35)])
    assert computing == [(0, 20), (30, 40)]
    assert both(computing, exchanging) == [(15, 20), (30, 35)]
    assert without(exchanging, computing) == [(20, 30)]
