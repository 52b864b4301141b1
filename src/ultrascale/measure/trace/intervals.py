"""Stretches of time as sets: what at least one of them covers, what two cover both, what one covers alone.

A set is a list of (start, end) in order that neither touch nor overlap; `merged` makes one of any stretches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

Interval = tuple[float, float]
Intervals = list[Interval]


def merged(stretches: Iterable[Interval]) -> Intervals:
    """All moments that lie in at least one stretch; those that have no length are none."""
    found: Intervals = []
    for start, end in sorted(stretches):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def length(of: Intervals) -> float:
    return sum(end - start for start, end in of)


def both(first: Intervals, second: Intervals) -> Intervals:
    """Moments in either of two sets at once."""
    found: Intervals = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(first: Intervals, second: Intervals) -> Intervals:
    """Moments in the first set and not in the second."""
    found: Intervals = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > start:
                found.append((start, second[k][0]))
            start = second[k][1]
            k += 1
        if start < end:
            found.append((start, end))
    return found


def within(of: Intervals, window: Interval) -> Intervals:
    """The part of a set that lies in one window."""
    first = bisect_right(of, window[0], key=lambda one: one[1])
    last = bisect_left(of, window[1], key=lambda one: one[0])
    return both(of[first:last], [window])
