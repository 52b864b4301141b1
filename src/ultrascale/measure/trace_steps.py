"""One rank's steps as sets of time intervals: when it computed, when it communicated, and for which technique.

A set is a sorted list of (start, end) that neither touch nor overlap. On a GPU kernels decide: collectives are communication,
all others, copies too, are computing, and a step lasts from its first kernel to the first of the next step. On a CPU operators
of the main thread are computing; communication is the host waiting in a range of our engine, or gloo's threads at work.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ultrascale.measure.trace_rank import (
    ACTION,
    STEP,
    TECHNIQUE_OF_KIND,
    EnclosingRanges,
    RankTrace,
    Thread,
    TraceEvent,
    is_collective_kernel,
    is_optimizer,
    kind_of,
    message_bytes,
    our_comm_range,
    technique_of_group,
    technique_of_range,
)

Interval = tuple[float, float]
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """The union of intervals; empty ones are dropped."""
    return _combine(lambda inside: inside, intervals)


def event_times(events: Iterable[TraceEvent | CommInterval]) -> Intervals:
    """The union of the times of events."""
    return union((one.start, one.end) for one in events)


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> Intervals:
    """The intersection of two sets."""
    return _combine(lambda in_first, in_second: in_first & in_second, first, second)


def difference(first: Iterable[Interval], second: Iterable[Interval]) -> Intervals:
    """The first set without the second."""
    return _combine(lambda in_first, in_second: in_first & ~in_second, first, second)


def _combine(keep: Callable[..., Any], *sets: Iterable[Interval]) -> Intervals:
    """The times for which `keep` is true, given which times are inside each set."""
    arrays = [np.fromiter(chain.from_iterable(one), float).reshape(-1, 2) for one in sets]
    times = np.unique(np.concatenate(arrays))
    inside = []
    for array_ in arrays:
        began, ended = np.searchsorted(times, array_[array_[:, 0] < array_[:, 1]]).T
        inside.append(np.cumsum(np.bincount(began, minlength=len(times)) - np.bincount(ended, minlength=len(times))) > 0)
    edges = times[np.flatnonzero(np.diff(keep(*inside), prepend=False))].tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def length(of: Intervals) -> float:
    return sum(end - start for start, end in of)


def lengths(of: Intervals, windows: Sequence[Interval]) -> list[float]:
    """The length of a set inside each window."""
    if not of or not windows:
        return [0.0] * len(windows)
    edges = np.ravel(of)
    before = np.cumsum(np.diff(edges, prepend=edges[0]) * (np.arange(len(edges)) % 2))  # the set's length before each edge
    found: list[float] = np.diff(np.interp(windows, edges, before))[:, 0].tolist()
    return found


UNMARKED = "the whole trace"
"""instead of a step's name"""
OUTSIDE_PASS = ("pipeline", "data")
"""techniques whose communication is no part of a stage's pass: messages of other stages, and gradient reduction"""


class CommInterval(NamedTuple):
    start: float
    end: float
    technique: str
    kind: str
    """of collective; wait: the host waits for any kind"""
    bytes: int | None = None
    launched: float = math.nan
    """when the host started it"""
    facts: Mapping[str, Any] = MappingProxyType({})
    """of its process group, as Kineto writes them"""


class TracedPass(NamedTuple):
    """One pass of one stage over a micro-batch."""

    start: float
    end: float
    name: str
    """forward, backward, input gradients, weight gradients"""
    stage: int
    microbatch: int
    busy: float
    """without waiting for other stages or gradients"""


@dataclass(frozen=True)
class StepIntervals:
    steps: list[tuple[str, Interval]]
    computing: Intervals
    optimizer: Intervals
    """computing in the update"""
    communication: list[CommInterval]
    collectives: list[CommInterval]
    """one for every collective that was started"""
    transfers: list[CommInterval]
    """collectives and messages while they run: kernels of NCCL, or work of gloo"""
    actions: list[TracedPass]


def step_intervals(trace: RankTrace) -> StepIntervals:
    return _of_gpu(trace) if trace.on_gpu else _of_cpu(trace)


def _of_gpu(trace: RankTrace) -> StepIntervals:
    technique_of = _TechniqueOf(trace)
    launched = sorted(trace.kernels, key=trace.launched_at)
    communication, computing, own = [], [], []
    for kernel in launched:
        if is_collective_kernel(kernel.name):
            communication.append(technique_of.kernel(kernel))
            if communication[-1].technique in OUTSIDE_PASS:
                continue
        else:
            computing.append(kernel)
        own.append(kernel)

    def busy(one: TraceEvent) -> tuple[float, float, float] | None:
        kernels = event_times(_between(trace, own, one.start, one.end))
        return (kernels[0][0], kernels[-1][1], length(kernels)) if kernels else None

    updates = [kernel for one in trace.ranges if is_optimizer(one.name) for kernel in _between(trace, own, one.start, one.end)]
    return StepIntervals(
        steps=_device_steps(trace, launched),
        computing=event_times(computing),
        optimizer=event_times(kernel for kernel in updates if not is_collective_kernel(kernel.name)),
        communication=communication,
        collectives=communication,
        transfers=communication,
        actions=list(_passes(trace, busy)),
    )


def _of_cpu(trace: RankTrace) -> StepIntervals:
    technique_of, main = _TechniqueOf(trace), _main_thread(trace)
    pairs = trace.ops.get(main, array("d"))
    operators = union(zip(pairs[::2], pairs[1::2], strict=True))
    ranges = [(one, our_comm_range(one.name)) for one in trace.ranges if one.thread == main]
    waits = [CommInterval(one.start, one.end, *comm) for one, comm in ranges if comm is not None]
    calls = [technique_of.call(one) for one in trace.calls if one.thread == main]
    # A message of gloo lasts until it is asked for, so that the host's waits say more, where they are known.
    transfers = [technique_of.background(one) for one in sorted(trace.background, key=lambda one: one[:3])]
    background = [one for one in transfers if not waits or one.kind != "send_recv"]
    waited_for = {one.technique for one in waits}
    # Where the ranges tell when the host waits, communication outside of them is overlapped.
    hidden = difference(event_times(one for one in background if one.technique in waited_for), event_times(waits))
    pipeline = event_times(one for one in waits if one.technique == "pipeline")

    def busy(one: TraceEvent) -> tuple[float, float, float]:
        (waited,) = lengths(pipeline, [(one.start, one.end)])
        return one.start, one.end, one.end - one.start - waited

    return StepIntervals(
        steps=windows(trace),
        computing=union([*operators, *hidden]),
        optimizer=intersection(operators, event_times(one for one in trace.ranges if is_optimizer(one.name))),
        communication=[*waits, *calls, *background],
        collectives=calls,
        transfers=transfers,
        actions=list(_passes(trace, busy)),
    )


def windows(trace: RankTrace) -> list[tuple[str, Interval]]:
    """The steps of the host, or the whole trace where no steps are marked."""
    steps = sorted((one.start, one.end, one.name) for one in trace.ranges if STEP.match(one.name))
    if steps:
        return [(name, (start, end)) for start, end, name in steps]
    if trace.on_gpu:
        return [(UNMARKED, (-math.inf, math.inf))]
    spans = [(one.start, one.end) for one in (*trace.ranges, *trace.background)]
    spans += [(min(pairs[::2]), max(pairs[1::2])) for pairs in trace.ops.values()]
    return [(UNMARKED, (min(start for start, _ in spans), max(end for _, end in spans)))] if spans else []


class _TechniqueOf:
    """The technique of a collective: by the range in which it starts, by its process group, or else by its kind."""

    def __init__(self, trace: RankTrace) -> None:
        self._trace = trace
        self._ranges = EnclosingRanges([one for one in trace.ranges if technique_of_range(one.name) is not None])
        self._calls = EnclosingRanges(trace.calls)
        self._ddp = any(one.name.startswith("DistributedDataParallel") for one in trace.ranges)
        distributed = trace.facts.get("distributedInfo")
        groups = distributed.get("pg_config") if isinstance(distributed, dict) else None
        groups = groups if isinstance(groups, list) else []
        self._groups = {str(one.get("pg_name")): str(one.get("pg_desc", "")) for one in groups if isinstance(one, dict)}
        self._queues = _queues(trace.calls)

    def kernel(self, kernel: TraceEvent) -> CommInterval:
        launch = self._trace.launches.get(kernel.correlation)
        call = self._calls.innermost(launch.thread, launch.start) if launch is not None else None
        facts = {**(call.facts if call is not None else {}), **kernel.facts}
        return self._interval(kernel, launch, facts)

    def call(self, call: TraceEvent) -> CommInterval:
        return self._interval(call, call, call.facts)

    def background(self, one: TraceEvent) -> CommInterval:
        """gloo runs collectives in the order of their calls, without their process group."""
        kind, facts = kind_of(one.name), {"Collective name": one.name.removeprefix("gloo:")}
        queue = self._queues.get(kind)
        if queue and queue[0].start <= one.start:
            return self.call(queue.popleft())._replace(start=one.start, end=one.end, facts=facts)
        return CommInterval(one.start, one.end, TECHNIQUE_OF_KIND.get(kind, "unknown"), kind, None, one.start, facts)

    def _interval(self, one: TraceEvent, started: TraceEvent | None, facts: Mapping[str, Any]) -> CommInterval:
        """`started`: the host's call, whose place tells the technique; without it, the process group or the kind does."""
        kind = kind_of(one.name, facts)
        holder = self._ranges.innermost(started.thread, started.start) if started is not None else None
        if holder is not None:
            technique = technique_of_range(holder.name)
        else:
            group = str(facts.get("Process Group Name", ""))
            technique = technique_of_group(str(facts.get("Process Group Description", "")), self._groups.get(group, ""), group)
            if technique is None and kind == "all_reduce" and self._ddp:
                technique = "data"
        technique = technique or TECHNIQUE_OF_KIND.get(kind, "unknown")
        launched = one.start if started is None else started.start
        return CommInterval(one.start, one.end, technique, kind, message_bytes(facts), launched, facts)


def _queues(calls: Iterable[TraceEvent]) -> dict[str, deque[TraceEvent]]:
    queues: dict[str, deque[TraceEvent]] = defaultdict(deque)
    for call in sorted(calls, key=lambda call: call.start):
        kind = kind_of(call.name, call.facts)
        queues["all_reduce" if kind == "reduce_scatter" else kind].append(call)  # which gloo runs for it
    return queues


def _main_thread(trace: RankTrace) -> Thread:
    steps = [one.thread for one in trace.ranges if STEP.match(one.name)]
    return steps[0] if steps else max(trace.ops, key=lambda thread: len(trace.ops[thread]), default=(None, None))


def _between(trace: RankTrace, launched: list[TraceEvent], start: float, end: float) -> list[TraceEvent]:
    first, last = (bisect_left(launched, time, key=trace.launched_at) for time in (start, end))
    return launched[first:last]


def _device_steps(trace: RankTrace, launched: list[TraceEvent]) -> list[tuple[str, Interval]]:
    """A step of the device lasts from the first kernel that the host launches in it to the first of the next step."""
    begun = []
    for name, window in windows(trace):
        if kernels := _between(trace, launched, *window):
            begun.append((name, min(kernel.start for kernel in kernels), max(kernel.end for kernel in kernels)))
    starts = [start for _, start, _ in begun]
    ends = [*starts[1:], *(end for _, _, end in begun[-1:])]
    return [(name, (start, end)) for (name, start, _), end in zip(begun, ends, strict=True)]


def _passes(trace: RankTrace, times: Callable[[TraceEvent], tuple[float, float, float] | None]) -> Iterator[TracedPass]:
    """`times`: start, end and busy time of a range; None where nothing ran."""
    for one in trace.ranges:
        if (found := ACTION.match(one.name)) is not None and (span := times(one)) is not None:
            start, end, busy = span
            yield TracedPass(start, end, found[1], int(found[2]), int(found[3]), busy)
