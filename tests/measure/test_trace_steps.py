"""Sets of intervals, against the same arithmetic on sets of integer points."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ultrascale.measure.trace_steps import Intervals, difference, intersection, length, lengths, union

stretches = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def points_in(of: Intervals) -> set[int]:
    return {point for start, end in of for point in range(int(start), int(end))}


@given(stretches, stretches)
def test_sets_of_time_are_sets(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    a, b = union(first), union(second)
    assert points_in(a) == {point for start, end in first for point in range(start, end)}
    assert length(a) == len(points_in(a))
    assert points_in(intersection(a, b)) == points_in(a) & points_in(b)
    assert points_in(difference(a, b)) == points_in(a) - points_in(b)
    assert intersection(a, b) == intersection(b, a)
    for one in (a, intersection(a, b), difference(a, b)):
        assert one == union(one)
        assert all(before[1] < after[0] for before, after in pairwise(one))


@given(stretches, stretches, st.integers(0, 40), st.integers(0, 40))
def test_parts_add_up_to_the_window(first: list[tuple[int, int]], second: list[tuple[int, int]], start: int, end: int) -> None:
    """The parts of a step: only compute, only communication, both, neither."""
    window = (min(start, end), max(start, end))
    computing, exchanging = (intersection(union(one), [window]) for one in (first, second))
    overlapped = intersection(computing, exchanging)
    idle = difference(union([window]), union([*computing, *exchanging]))
    alone = difference(computing, exchanging), difference(exchanging, computing)
    assert sum(map(length, (*alone, overlapped, idle))) == window[1] - window[0]
    assert lengths(union(first), [window, (0, 40)]) == [length(computing), length(union(first))]


def test_a_worked_example() -> None:
    """Kernels 0–10 and 5–20 and 30–40; a collective 15–35."""
    computing, exchanging = union([(0, 10), (30, 40), (5, 20)]), union([(15, 35)])
    assert computing == [(0, 20), (30, 40)]
    assert intersection(computing, exchanging) == [(15, 20), (30, 35)]
    assert difference(exchanging, computing) == [(20, 30)]
