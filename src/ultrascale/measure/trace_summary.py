"""Reduce one rank's trace to what a whole job needs of it: steps, collectives by process group, and summed intervals.

A trace is read once and only its summary is kept, some hundred kB, so that 1,024 traces fit in memory. Times are microseconds
since the start of the rank's first step: since 1970 they would have a resolution of a quarter of a microsecond.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ultrascale.measure import trace_rank, trace_times
from ultrascale.measure.trace_groups import CommLabel, ProcessGroups, TracedGroup
from ultrascale.measure.trace_rank import TECHNIQUES, RankTrace, is_collective_kernel
from ultrascale.measure.trace_steps import (
    CommInterval,
    Interval,
    Intervals,
    StepIntervals,
    difference,
    event_times,
    intersection,
    lengths,
    step_intervals,
    union,
    windows,
)
from ultrascale.measure.trace_times import RankTime

Array = NDArray[Any]

SHARES = ("computing", "data loading", "communication", "host")
"""what a rank does between two collectives of a group; host: neither kernels nor operators, nor waiting for data"""
FINEST = 1 / 2000  # of a step: shorter gaps between kernels are joined, unless communication fills them
LONGEST_NAME = 120  # of a kernel in the merged trace: those of templates have thousands of characters
_DATA = re.compile(r"reading\Z|.*(data_?loader|get_batch|batch[-_ ]generator|next_batch)", re.IGNORECASE)


@dataclass(frozen=True)
class Transfers:
    """Collectives and messages of a rank, one row each, sorted by start."""

    group: Array
    """place in `groups`; -1: unknown"""
    label: Array
    """place in `labels`"""
    kind: tuple[str, ...]
    step: Array
    """place in the rank's steps by the launch; -1: outside of them"""
    start: Array
    end: Array
    bytes: Array
    """0: unknown"""
    before: Array
    """microseconds by SHARES since the group's last collective, or the first step's start"""
    groups: tuple[TracedGroup, ...]
    labels: tuple[CommLabel, ...]


@dataclass(frozen=True)
class TimelineEvents:
    """Events for the merged trace."""

    start: Array
    duration: Array
    name: Array
    lane: Array
    names: tuple[str, ...]
    lanes: tuple[str, ...]
    left_out: int
    """kernels and joined operators, the shortest ones"""


@dataclass(frozen=True)
class RankSummary:
    times: RankTime
    zero_us: float
    """start of the first step on the machine's clock"""
    world: int | None
    stage: int | None
    """of a pipeline"""
    host: str
    steps: tuple[str, ...]
    windows: Array
    shares: Array
    """seconds of every step by SHARES; they add up to the step"""
    exposed: dict[CommLabel, Array]
    """exposed communication of every step in seconds; time that several share is counted for one"""
    transfers: Transfers
    computing: Array
    """start, end and computing time inside, of stretches of kernels or operators"""
    data: Array
    """start and end of data loading"""
    timeline: TimelineEvents

    @property
    def rank(self) -> int:
        assert self.times.rank is not None
        return self.times.rank


def summarise(path: Path, timeline_events: int) -> RankSummary:
    """Read a trace; at most `timeline_events` of its events are kept for the merged trace."""
    trace = trace_rank.read(path)
    intervals = step_intervals(trace)
    times = trace_times.analyse(trace, intervals)
    zero = intervals.steps[0][1][0]
    inside = [window for _, window in intervals.steps]
    sets = _disjoint(trace, intervals)
    groups = ProcessGroups(trace)
    exposed = _exposed(groups, intervals, union([*sets[0], *sets[1]]))
    shares = np.array([lengths(one, inside) for one in sets]).T
    whole = np.array([end - start for start, end in inside])
    shares = np.column_stack([shares, np.maximum(0.0, whole - shares.sum(axis=1))]) * trace_times.US
    distributed = trace.facts.get("distributedInfo")
    world = distributed.get("world_size") if isinstance(distributed, dict) else None
    return RankSummary(
        times=times,
        zero_us=zero + trace.origin_us,
        world=world if isinstance(world, int) and not isinstance(world, bool) else None,
        stage=groups.stage(intervals.transfers),
        host=str(trace.facts.get("host_name", ""))[:80],
        steps=tuple(name for name, _ in intervals.steps),
        windows=np.array(inside) - zero,
        shares=shares,
        exposed={label: np.array(lengths(times_, inside)) * trace_times.US for label, times_ in exposed.items() if times_},
        transfers=_transfers(trace, groups, intervals, sets, zero),
        computing=_stretches(sets[0], sets[2], inside, zero),
        data=_array(intersection(sets[1], inside)) - zero,
        timeline=_timeline(trace, intervals, zero, timeline_events),
    )


def _array(intervals: Intervals) -> Array:
    return np.array(intervals, float).reshape(-1, 2)


def _disjoint(trace: RankTrace, intervals: StepIntervals) -> tuple[Intervals, Intervals, Intervals]:
    """Computing, data loading, communication. Kernels hide a host that loads data; on a CPU operators are part of loading."""
    communication = event_times(intervals.communication)
    loading = event_times(one for one in trace.ranges if _DATA.match(one.name))
    if trace.on_gpu:
        exposed = difference(communication, intervals.computing)
        return intervals.computing, difference(difference(loading, intervals.computing), communication), exposed
    computing = difference(intervals.computing, loading)
    return computing, loading, difference(difference(communication, computing), loading)


def _exposed(groups: ProcessGroups, intervals: StepIntervals, hidden: Intervals) -> dict[CommLabel, Intervals]:
    """Exposed communication by group, technique by technique in the order that trace_times counts shared time in."""
    of_label: dict[CommLabel, list[CommInterval]] = defaultdict(list)
    for one in intervals.communication:
        of_label[groups.label(one)].append(one)
    found, taken = {}, hidden
    for label in sorted(of_label, key=lambda one: TECHNIQUES.index(one.technique)):
        found[label] = difference(event_times(of_label[label]), taken)
        taken = union([*taken, *found[label]])
    return found


def _transfers(
    trace: RankTrace, process_groups: ProcessGroups, intervals: StepIntervals, sets: Sequence[Intervals], zero: float
) -> Transfers:
    rows = sorted(intervals.transfers, key=lambda one: one[:2])
    groups: dict[TracedGroup, int] = {}
    labels: dict[CommLabel, int] = {}
    of_group, of_label = [], []
    for one in rows:
        group = process_groups.group(one)
        of_group.append(-1 if group is None else groups.setdefault(group, len(groups)))
        of_label.append(labels.setdefault(process_groups.label(one), len(labels)))
    ended: dict[int, float] = {}
    since: list[Interval] = []
    for one, group_ in zip(rows, of_group, strict=True):
        last = ended.get(group_, zero)
        since.append((min(last, one.start), one.start))
        ended[group_] = max(last, one.end)
    shares = np.array([lengths(part, since) for part in sets]).reshape(len(sets), len(rows)).T
    whole = np.array([end - start for start, end in since])
    before = np.column_stack([shares, np.maximum(0.0, whole - shares.sum(axis=1))]) if rows else np.zeros((0, len(SHARES)))
    return Transfers(
        group=np.array(of_group, int),
        label=np.array(of_label, int),
        kind=tuple(one.kind for one in rows),
        step=np.array(_steps_of(trace, intervals, [one.launched for one in rows]), int),
        start=np.array([one.start for one in rows]) - zero,
        end=np.array([one.end for one in rows]) - zero,
        bytes=np.array([min(one.bytes or 0, 2**60) for one in rows], int),
        before=before,
        groups=tuple(groups),
        labels=tuple(labels),
    )


def _steps_of(trace: RankTrace, intervals: StepIntervals, launched: Iterable[float]) -> list[int]:
    """By the host's clock: a collective may run on while the next step's first kernels do."""
    places = {name: place for place, (name, _) in enumerate(intervals.steps)}
    hosts = [(start, end, places[name]) for name, (start, end) in windows(trace) if name in places]
    starts = [start for start, _, _ in hosts]
    found = []
    for time in launched:
        at = bisect_right(starts, time) - 1
        found.append(hosts[at][2] if at >= 0 and time < hosts[at][1] else -1)
    return found


def _stretches(computing: Intervals, communication: Intervals, steps: list[Interval], zero: float) -> Array:
    """Computing in the steps, joined over gaps that are short and without communication."""
    found = _array(intersection(computing, steps))
    if len(found) < 2:
        busy = found[:, 1] - found[:, 0]
    else:
        shortest = FINEST * min(end - start for start, end in steps)
        gaps = list(zip(found[:-1, 1].tolist(), found[1:, 0].tolist(), strict=True))
        idle = np.array(lengths(communication, gaps)) == 0
        joined = idle & (found[1:, 0] - found[:-1, 1] < shortest)
        first = np.flatnonzero(np.concatenate([[True], ~joined]))
        busy = np.add.reduceat(found[:, 1] - found[:, 0], first)
        found = np.column_stack([found[first, 0], found[np.append(first[1:] - 1, len(found) - 1), 1]])
    return np.column_stack([found - zero, busy])


def _timeline(trace: RankTrace, intervals: StepIntervals, zero: float, most: int) -> TimelineEvents:
    """Ranges and communication, and the longest of the kernels, or of a CPU's joined operators, that there is room for."""
    kept = [(one.start, one.end, one.name, f"thread {one.thread[1]}") for one in (*trace.ranges, *trace.background)]
    if trace.on_gpu:
        kernels = [(one.start, one.end, one.name[:LONGEST_NAME], f"stream {one.thread[1]}") for one in trace.kernels]
        kept += [one for one in kernels if is_collective_kernel(one[2])]
        rest = [one for one in kernels if not is_collective_kernel(one[2])]
    else:
        rest = [(start, end, "operators", "operators") for start, end in intervals.computing]
    by_length = sorted(rest, key=lambda one: one[0] - one[1])
    room = max(0, most - len(kept))
    chosen = sorted([*sorted(kept, key=lambda one: one[0] - one[1])[:most], *by_length[:room]])
    names = {name: place for place, name in enumerate(dict.fromkeys(one[2] for one in chosen))}
    lanes = {lane: place for place, lane in enumerate(dict.fromkeys(one[3] for one in chosen))}
    start, end = (np.array([one[side] for one in chosen], float) for side in (0, 1))
    return TimelineEvents(
        start=start - zero,
        duration=(end - start).astype(np.float32),
        name=np.array([names[one[2]] for one in chosen], np.int32),
        lane=np.array([lanes[one[3]] for one in chosen], np.int16),
        names=tuple(names),
        lanes=tuple(lanes),
        left_out=len(kept) + len(rest) - len(chosen),
    )
