"""Match the collectives of all ranks and align the ranks' clocks by them: ranks leave the same collective together.

The n-th collective of a kind in a group and a step is the same one on every rank. The clocks of two ranks differ by the median
difference of their collectives' ends, which neither late arrivals nor some slow ends change. Ranks that share no group with
the first rank are aligned through others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultrascale.measure.trace_groups import CommLabel, TracedGroup
from ultrascale.measure.trace_summary import RankSummary

Array = NDArray[Any]

UNALIGNED_KINDS = ("send_recv", "broadcast")
"""whose senders leave before their receivers"""
MIN_DRIFT_US = 20.0  # over the trace; crystals of two machines differ by up to 50 µs a second
MAX_DRIFT = 5e-4  # of time: a larger one is noise
MIN_DRIFT_POINTS = 8
SAME_CLOCK_SPREADS, SAME_CLOCK_US = 3.0, 50.0
"""ranks of one host name whose clocks differ by less have one clock; names such as localhost may be of several machines"""
MAX_DRIFT_POINTS = 300  # of which all pairs are compared


@dataclass(frozen=True)
class MatchedCollectives:
    """All collectives of one kind, group and step, each on several ranks."""

    group: TracedGroup
    label: CommLabel
    kind: str
    step: str
    ranks: Array
    """places in the list of summaries, of those that take part and were traced"""
    rows: Array
    """places in their transfers: a line for each rank, a column for each collective"""


@dataclass(frozen=True)
class Clock:
    """Of one rank, relative to the first: its time t is `offset_us + rate * t` on the first rank's clock."""

    offset_us: float
    rate: float
    spread_us: float
    """median deviation of single collectives from this"""
    collectives: int
    """0: none in common, and the machines' own clocks are used"""

    def aligned(self, times_us: Array) -> Array:
        return self.offset_us + self.rate * times_us


def match(ranks: Sequence[RankSummary]) -> tuple[list[MatchedCollectives], list[str]]:
    """The collectives in common, and sentences about what could not be matched."""
    found: dict[tuple[TracedGroup, str, str], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, one in enumerate(ranks):
        mine = one.transfers
        for row, (group, kind, step) in enumerate(zip(mine.group.tolist(), mine.kind, mine.step.tolist(), strict=True)):
            if group >= 0 and step >= 0:
                found[mine.groups[group], kind, one.steps[step]][place].append(row)
    matched, problems = [], {}
    for (group, kind, step), rows in found.items():
        counts = {len(some) for some in rows.values()}
        if group.size and len(rows) > group.size:
            problems[group.name] = (
                f"{len(rows)} ranks have a group {group.name!r} of {group.size}, which is several groups of one name: "
                "its collectives are not matched"
            )
        elif len(counts) > 1:
            most, least = (pick(rows, key=lambda place: len(rows[place])) for pick in (max, min))
            problems[group.name] = (
                f"{step}: rank {ranks[least].rank} has {len(rows[least]):,} {kind} of group {group.name!r} and rank "
                f"{ranks[most].rank} has {len(rows[most]):,}: these are not matched"
            )
        elif len(rows) > 1:
            places = sorted(rows)
            transfers = ranks[places[0]].transfers
            label = transfers.labels[transfers.label[rows[places[0]][0]]]
            matched.append(
                MatchedCollectives(group, label, kind, step, np.array(places), np.array([rows[place] for place in places]))
            )
    return matched, list(problems.values())


def align(ranks: Sequence[RankSummary], matched: Sequence[MatchedCollectives]) -> list[Clock]:
    """Each rank's clock, by the neighbours with which it has the most collectives in common."""
    pairs = _ends(ranks, matched)
    clocks: dict[int, Clock] = {0: Clock(0.0, 1.0, 0.0, 0)}
    for near, far in _spanning_tree(pairs):
        known = clocks[near]
        here, there = pairs[near, far] if (near, far) in pairs else pairs[far, near][::-1]
        offset, rate, spread = _fit(there, here)
        own = ranks[far].zero_us - ranks[near].zero_us
        if ranks[far].host == ranks[near].host != "" and abs(offset - own) < SAME_CLOCK_SPREADS * spread + SAME_CLOCK_US:
            offset, rate = own, 1.0  # one machine, one clock
        clocks[far] = Clock(
            known.offset_us + known.rate * offset, known.rate * rate, float(np.hypot(spread, known.spread_us)), len(here)
        )
    return [clocks.get(place) or Clock(one.zero_us - ranks[0].zero_us, 1.0, 0.0, 0) for place, one in enumerate(ranks)]


def _ends(ranks: Sequence[RankSummary], matched: Sequence[MatchedCollectives]) -> dict[tuple[int, int], tuple[Array, Array]]:
    """When two ranks left the collectives in common, for the first rank of a group with each of the others."""
    found: dict[tuple[int, int], list[tuple[Array, Array]]] = defaultdict(list)
    for one in matched:
        if one.kind in UNALIGNED_KINDS:
            continue
        ends = [ranks[place].transfers.end[rows] for place, rows in zip(one.ranks.tolist(), one.rows, strict=True)]
        for place, end in zip(one.ranks.tolist()[1:], ends[1:], strict=True):
            found[int(one.ranks[0]), place].append((ends[0], end))
    return {pair: (np.concatenate([a for a, _ in ends]), np.concatenate([b for _, b in ends])) for pair, ends in found.items()}


def _spanning_tree(pairs: dict[tuple[int, int], tuple[Array, Array]]) -> Iterator[tuple[int, int]]:
    """From rank 0 outwards, over the pairs with the most collectives first."""
    edges: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (one, other), (ends, _) in pairs.items():
        edges[one].append((len(ends), other))
        edges[other].append((len(ends), one))
    reached, border = {0}, [(number, 0, other) for number, other in edges[0]]
    while border:
        best = max(border, key=lambda edge: (edge[0], -edge[1], -edge[2]))
        _, near, far = best
        border.remove(best)
        if far in reached:
            continue
        reached.add(far)
        yield near, far
        border += [(number, far, other) for number, other in edges[far] if other not in reached]


def _fit(there: Array, here: Array) -> tuple[float, float, float]:
    """Offset and rate that turn one clock's times into the other's, and the median deviation.

    The rate is the median slope of all pairs (Theil and Sen), and 1 where it explains no more than the ends scatter.
    """
    gap = here - there
    offset = float(np.median(gap))
    spread = float(np.median(np.abs(gap - offset)))
    if len(gap) < MIN_DRIFT_POINTS:
        return offset, 1.0, spread
    some = np.unique(np.linspace(0, len(gap) - 1, min(len(gap), MAX_DRIFT_POINTS)).astype(int))
    x, y = there[some], gap[some]
    first, second = np.triu_indices(len(x), 1)
    apart = np.abs(x[second] - x[first]) > 0.1 * np.ptp(x)
    if not apart.any():
        return offset, 1.0, spread
    slope = float(np.median((y[second] - y[first])[apart] / (x[second] - x[first])[apart]))
    level = float(np.median(gap - slope * there))
    drifted = float(np.median(np.abs(gap - slope * there - level)))
    if abs(slope) < MAX_DRIFT and abs(slope) * float(np.ptp(x)) > max(MIN_DRIFT_US, 5 * drifted):
        return level, 1.0 + slope, drifted
    return offset, 1.0, spread
