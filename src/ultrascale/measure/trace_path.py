"""The critical path of a step across ranks: from the end of the last rank backwards, to what each part waited for.

A rank that computes waits for nothing. Before that it left a collective: the path goes on with the transfer, then on the rank
that arrived last. What remains is the host, or data loading.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrascale.measure.trace_clocks import Clock
from ultrascale.measure.trace_stragglers import Waits
from ultrascale.measure.trace_summary import RankSummary
from ultrascale.measure.trace_times import US

Array = NDArray[Any]

LEAST_US = 0.5  # two times closer than this are one: clocks are aligned no better
MOST_PARTS = 100_000  # of one step's path


class PathPart(NamedTuple):
    rank: int
    start_s: float
    """since the step's start on the first rank"""
    end_s: float
    what: str
    """computing, host, data loading, or a technique's communication"""
    kind: str
    """of a collective; else empty"""


@dataclass(frozen=True)
class CriticalPath:
    step: str
    parts: tuple[PathPart, ...]
    by_what: dict[str, float]
    """seconds, the largest first"""
    by_rank: dict[int, float]

    @property
    def length_s(self) -> float:
        return sum(self.by_what.values())


class _Lane(NamedTuple):
    """One rank in aligned microseconds."""

    computing: Array
    data: Array
    ends: list[float]
    """of transfers, sorted"""
    order: list[int]
    """their places in the rank's transfers"""
    starts: Array


def critical_paths(
    ranks: Sequence[RankSummary], clocks: Sequence[Clock], waits: Waits, steps: Sequence[str]
) -> list[CriticalPath]:
    lanes = [_lane(one, clock) for one, clock in zip(ranks, clocks, strict=True)]
    found = []
    for name in steps:
        windows = [clock.aligned(one.windows[one.steps.index(name)]).tolist() for one, clock in zip(ranks, clocks, strict=True)]
        parts = list(_joined(reversed(list(_backwards(ranks, lanes, waits, windows))), windows[0][0]))
        what, who = Counter[str](), Counter[int]()
        for part in parts:
            what[part.what] += part.end_s - part.start_s  # type: ignore[assignment]
            who[part.rank] += part.end_s - part.start_s  # type: ignore[assignment]
        found.append(CriticalPath(name, tuple(parts), dict(what.most_common()), dict(who.most_common())))
    return found


def _lane(one: RankSummary, clock: Clock) -> _Lane:
    ends = clock.aligned(one.transfers.end)
    order = np.argsort(ends, kind="stable")
    edges = clock.aligned(one.computing[:, :2])
    return _Lane(
        np.column_stack([edges, one.computing[:, 2]]),
        clock.aligned(one.data),
        ends[order].tolist(),
        order.tolist(),
        clock.aligned(one.transfers.start),
    )


def _backwards(
    ranks: Sequence[RankSummary], lanes: Sequence[_Lane], waits: Waits, windows: list[list[float]]
) -> Iterator[tuple[int, float, float, str, str]]:
    """Rank, start, end, what and kind of each part, in microseconds, the last part first."""
    place = max(range(len(ranks)), key=lambda place: windows[place][1])
    time = windows[place][1]
    for _ in range(MOST_PARTS):
        begin, lane, rank = windows[place][0], lanes[place], ranks[place].rank
        if time <= begin + LEAST_US:
            return
        at = bisect_left(lane.computing[:, 0], time) - 1
        ended = max(begin, float(lane.computing[at, 1])) if at >= 0 else begin
        if ended >= time - LEAST_US and at >= 0:
            start, end, busy = lane.computing[at].tolist()
            first = max(begin, start)
            computing = (time - first) * (busy / (end - start) if end > start else 1.0)
            yield rank, first + (time - first - computing), time, "computing", ""
            if time - first - computing > 0:
                yield rank, first, first + (time - first - computing), "host", ""
            time = first
            continue
        row = _left(lane, ended, time)
        if row is None:
            yield from _idle(lane, rank, ended, time)
            time = ended
            continue
        end, transfers = min(time, lane.ends[row[0]]), ranks[place].transfers
        yield from _idle(lane, rank, end, time)
        arrived, who = waits.arrivals[place][0][row[1]], int(waits.arrivals[place][1][row[1]])
        start = float(lane.starts[row[1]])
        what = f"{transfers.labels[transfers.label[row[1]]].technique} communication"
        elsewhere = who != place and start < arrived < end and windows[who][0] < arrived
        begins = max(float(arrived) if elsewhere else start, begin)
        yield rank, begins, end, what, transfers.kind[row[1]]
        place, time = (who, begins) if elsewhere else (place, min(begins, end - LEAST_US))


def _left(lane: _Lane, after: float, until: float) -> tuple[int, int] | None:
    """The transfer that the rank left last in this gap: its place by end, and among the rank's transfers."""
    at = bisect_right(lane.ends, until + LEAST_US) - 1
    if at < 0 or lane.ends[at] <= after + LEAST_US:
        return None
    return at, lane.order[at]


def _idle(lane: _Lane, rank: int, start: float, end: float) -> Iterator[tuple[int, float, float, str, str]]:
    """Data loading and the rest of a gap, the last part first."""
    inside = [(max(start, a), min(end, b)) for a, b in lane.data.tolist() if a < end and b > start]
    for first, last in reversed(inside):
        if last < end:
            yield rank, last, end, "host", ""
        yield rank, first, last, "data loading", ""
        end = first
    if start < end:
        yield rank, start, end, "host", ""


def _joined(parts: Iterator[tuple[int, float, float, str, str]], zero: float) -> Iterator[PathPart]:
    """Neighbours of one rank that do the same are one part."""
    current: PathPart | None = None
    for rank, start, end, what, kind in parts:
        part = PathPart(rank, (start - zero) * US, (end - zero) * US, what, kind)
        if current is not None and (current.rank, current.what, current.kind) == (rank, what, kind):
            current = current._replace(end_s=part.end_s)
            continue
        if current is not None:
            yield current
        current = part
    if current is not None:
        yield current
