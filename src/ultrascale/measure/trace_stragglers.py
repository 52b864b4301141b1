"""Who comes last to the collectives, how long the others wait for it, and why; and groups whose transfers are slow.

Ranks leave a collective together, so that what each does until the next one of the same group is comparable: the last rank's
excess over the median of the others, by share of its time, is the cause.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrascale.measure.trace_clocks import Clock, MatchedCollectives
from ultrascale.measure.trace_groups import CommLabel
from ultrascale.measure.trace_summary import SHARES, RankSummary
from ultrascale.measure.trace_times import US

Array = NDArray[Any]

SLOW_TRANSFER = 1.5  # times the median of the same collective in other groups of the axis


@dataclass(frozen=True)
class Straggler:
    """A rank for which others wait. Times are seconds of a mean step."""

    rank: int
    wait_s: float
    """exposed wait of the others, their mean, at collectives to which this rank came last"""
    last: int
    """collectives to which it came last, of all steps"""
    collectives: int
    """in which it takes part"""
    causes: dict[str, float]
    """wait by cause, of SHARES, the largest first"""
    excess: dict[str, float]
    """how much longer than the others it took for each of SHARES before these collectives"""
    groups: dict[CommLabel, float]
    """wait by axis"""


@dataclass(frozen=True)
class SlowGroup:
    """A group whose transfers take longer than the same ones of other groups, while its ranks arrive together."""

    label: CommLabel
    ranks: tuple[int, ...]
    transfer_s: float
    """in a mean step, from the last arrival to the end"""
    usual_s: float


@dataclass(frozen=True)
class Waits:
    """Seconds of exposed wait, by rank and step."""

    waited_s: Array
    """for later ranks"""
    caused_s: Array
    """mean of the others, by the rank that came last"""
    stragglers: tuple[Straggler, ...]
    slow_groups: tuple[SlowGroup, ...]
    by_label: dict[CommLabel, float]
    """of the mean rank's mean step"""
    arrivals: dict[int, tuple[Array, Array]]
    """by place of the rank: for each of its transfers the last arrival in aligned microseconds, and who that was"""


def waits(
    ranks: Sequence[RankSummary], clocks: Sequence[Clock], matched: Sequence[MatchedCollectives], steps: Sequence[str]
) -> Waits:
    """Messages of a pipeline are no waits here: a stage waits for the one before it by its schedule."""
    found = _Tally(ranks, clocks, steps)
    timed = [_Timed(one, ranks, clocks) for one in matched]
    for one in timed:
        found.note_arrivals(one)
    timed = [one for one in timed if one.of.step in found.steps and one.of.kind != "send_recv"]
    _count_once(timed, len(ranks))
    for one in timed:
        found.add(one)
    return found.result()


class _Moved(NamedTuple):
    """Transfers of one group, of all steps."""

    calls: int
    bytes: int
    stage: int | None
    time_s: float


class _Timed:
    """Matched collectives in aligned microseconds: a line for each rank, a column for each collective."""

    def __init__(self, of: MatchedCollectives, ranks: Sequence[RankSummary], clocks: Sequence[Clock]) -> None:
        self.of = of
        pairs = list(zip(of.ranks.tolist(), of.rows, strict=True))
        self.start, self.end = (
            np.array([clocks[place].aligned(getattr(ranks[place].transfers, side)[rows]) for place, rows in pairs])
            for side in ("start", "end")
        )
        self.late, self.arrived = self.start.argmax(axis=0), self.start.max(axis=0)
        self.until = np.clip(self.arrived, self.start, self.end)
        self.waits_from, self.transfers_from = self.start.copy(), self.until.copy()
        """later than the start where an earlier collective's wait or transfer still lasts"""


def _count_once(timed: Sequence[_Timed], ranks: int) -> None:
    """A rank that is in several collectives at once waits once, for the first of them."""
    lines: list[list[tuple[_Timed, int]]] = [[] for _ in range(ranks)]
    for one in timed:
        for line, place in enumerate(one.of.ranks.tolist()):
            lines[place].append((one, line))
    for mine in lines:
        if not mine:
            continue
        for begin, end, result in (("start", "until", "waits_from"), ("until", "end", "transfers_from")):
            first, last = (np.concatenate([getattr(one, side)[line] for one, line in mine]) for side in (begin, end))
            order = np.argsort(first, kind="stable")
            taken = np.concatenate([[-np.inf], np.maximum.accumulate(last[order])[:-1]])
            counted = np.empty_like(first)
            counted[order] = np.clip(taken, first[order], last[order])
            parts = np.split(counted, np.cumsum([one.start.shape[1] for one, _ in mine])[:-1])
            for (one, line), part in zip(mine, parts, strict=True):
                getattr(one, result)[line] = part


class _Tally:
    """Sums over the collectives of all groups."""

    def __init__(self, ranks: Sequence[RankSummary], clocks: Sequence[Clock], steps: Sequence[str]) -> None:
        self.ranks, self.steps = ranks, {name: place for place, name in enumerate(steps)}
        self.computed = [_ComputedBefore(one, clock) for one, clock in zip(ranks, clocks, strict=True)]
        self.waited, self.caused = (np.zeros((len(ranks), len(steps))) for _ in range(2))
        self.causes, self.excess = (np.zeros((len(ranks), len(SHARES))) for _ in range(2))
        self.last, self.taken = (np.zeros(len(ranks), int) for _ in range(2))
        self.groups: dict[int, Counter[CommLabel]] = defaultdict(Counter)
        self.labels: dict[CommLabel, float] = defaultdict(float)
        self.transfers: dict[CommLabel, dict[tuple[int, ...], _Moved]] = defaultdict(dict)
        sizes = [len(one.transfers.kind) for one in ranks]
        self.arrivals = {place: (np.full(size, np.nan), np.full(size, place)) for place, size in enumerate(sizes)}

    def note_arrivals(self, one: _Timed) -> None:
        for place, rows in zip(one.of.ranks.tolist(), one.of.rows, strict=True):
            self.arrivals[place][0][rows], self.arrivals[place][1][rows] = one.arrived, one.of.ranks[one.late]

    def add(self, one: _Timed) -> None:
        of, columns = one.of, np.arange(one.of.rows.shape[1])
        mine, step = of.ranks.tolist(), self.steps[of.step]
        wait = self._idle_s(mine, one.waits_from, one.until)
        self.waited[of.ranks, step] += wait.sum(axis=1)
        self.labels[of.label] += float(wait.sum())
        lost = wait.sum(axis=0) / (len(mine) - 1)  # the last rank itself does not wait
        before = np.array([self.ranks[place].transfers.before[rows] for place, rows in zip(mine, of.rows, strict=True)])
        others = before.copy()
        others[one.late, columns] = np.nan
        more = before[one.late, columns] - np.nanmedian(others, axis=0)
        who = of.ranks[one.late]
        np.add.at(self.caused, (who, step), lost)
        np.add.at(self.causes, (who, more.argmax(axis=1)), lost)
        np.add.at(self.excess, who, more * US * (lost > 0)[:, None])
        np.add.at(self.last, who, 1)
        self.taken[of.ranks] += len(columns)
        for place, time in zip(who.tolist(), lost.tolist(), strict=True):
            self.groups[place][of.label] += time
        members = tuple(self.ranks[place].rank for place in mine)
        sofar = self.transfers[of.label].get(members, _Moved(0, 0, self.ranks[mine[0]].stage, 0.0))
        transfer = float(np.maximum(0.0, one.end - one.transfers_from).min(axis=0).sum()) * US
        size = int(self.ranks[mine[0]].transfers.bytes[of.rows[0]].sum())
        self.transfers[of.label][members] = _Moved(
            sofar.calls + len(columns), sofar.bytes + size, sofar.stage, sofar.time_s + transfer
        )

    def _idle_s(self, mine: list[int], start: Array, end: Array) -> Array:
        lines = [
            stop - begin - self.computed[place].between(begin, stop)
            for place, begin, stop in zip(mine, start, end, strict=True)
        ]
        found: Array = np.maximum(0.0, np.array(lines)) * US
        return found

    def result(self) -> Waits:
        count = max(1, len(self.steps))
        total = self.caused.sum(axis=1) / count
        found = [
            Straggler(
                self.ranks[place].rank,
                float(total[place]),
                int(self.last[place]),
                int(self.taken[place]),
                _largest(self.causes[place] / count),
                {name: time / count for name, time in zip(SHARES, self.excess[place].tolist(), strict=True)},
                {label: time / count for label, time in self.groups[place].most_common()},
            )
            for place in sorted(range(len(self.ranks)), key=lambda place: -total[place])
            if self.last[place]
        ]
        by_label = {label: wait / count / len(self.ranks) for label, wait in self.labels.items()}
        return Waits(
            self.waited, self.caused, tuple(found), tuple(_slow_groups(self.transfers, count)), by_label, self.arrivals
        )


def _largest(times: Array) -> dict[str, float]:
    pairs = sorted(zip(SHARES, times.tolist(), strict=True), key=lambda pair: -pair[1])
    return {name: time for name, time in pairs if time > 0}


def _slow_groups(transfers: dict[CommLabel, dict[tuple[int, ...], _Moved]], steps: int) -> list[SlowGroup]:
    """Beside other groups of the same axis that transfer as much; a pipeline's stages differ where gloo gives no sizes."""
    found = []
    for label, groups in transfers.items():
        alike: dict[tuple[int | None, ...], dict[tuple[int, ...], float]] = defaultdict(dict)
        for members, one in groups.items():
            alike[one.calls, one.bytes, one.stage if one.bytes <= 0 else None][members] = one.time_s
        for took in alike.values():
            usual = float(np.quantile(list(took.values()), 0.5 if len(took) > 2 else 0.0))  # of two, the faster one
            found += [
                SlowGroup(label, members, time / steps, usual / steps)
                for members, time in took.items()
                if time > SLOW_TRANSFER * usual
            ]
    return sorted(found, key=lambda one: one.usual_s - one.transfer_s)


class _ComputedBefore:
    """Computing time of a rank between two aligned times."""

    def __init__(self, one: RankSummary, clock: Clock) -> None:
        edges = one.computing[:, :2].ravel()
        self._edges = clock.aligned(edges) if len(edges) else np.zeros(1)
        sums = np.cumsum(one.computing[:, 2])
        self._sums = np.column_stack([sums - one.computing[:, 2], sums]).ravel() if len(edges) else np.zeros(1)

    def between(self, start: Array, end: Array) -> Array:
        inside: Array = np.interp(end, self._edges, self._sums) - np.interp(start, self._edges, self._sums)
        return inside
