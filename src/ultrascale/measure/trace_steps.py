"""One rank's steps as sets of time intervals: when it computed, when it communicated, and for which technique.

A set is a sorted list of (start, end) that neither touch nor overlap. On a GPU kernels decide: collectives are communication,
all others, copies too, are computing, and a step lasts from its first kernel to the first of the next step. On a CPU operators
of the main thread are computing; communication is the host waiting in a range of our engine, or gloo's threads at work.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ultrascale.measure.trace_rank import (
    ACTION,
    STEP,
    CollectiveLaunch,
    EnclosingRanges,
    Kernel,
    RankTrace,
    Thread,
    TraceRange,
    is_optimizer,
    kind_of,
    message_bytes,
    our_comm_range,
    technique_of_group,
    technique_of_kind,
    technique_of_range,
)

Interval = tuple[float, float]
Intervals = list[Interval]


def merged(intervals: Iterable[Interval]) -> Intervals:
    """The union of intervals; empty ones are dropped."""
    found: Intervals = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def covered(events: Iterable[Kernel | TraceRange | CommInterval]) -> Intervals:
    """The union of the times of events."""
    return merged((one.start, one.end) for one in events)


def length(of: Intervals) -> float:
    return sum(end - start for start, end in of)


def both(first: Intervals, second: Intervals) -> Intervals:
    """The intersection of two sets."""
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
    """The first set without the second."""
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
    """The part of a set inside one window."""
    first = bisect_right(of, window[0], key=lambda one: one[1])
    last = bisect_left(of, window[1], key=lambda one: one[0])
    return both(of[first:last], [window])


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
    actions: list[TracedPass]


def view(trace: RankTrace) -> StepIntervals:
    return _of_gpu(trace) if trace.on_gpu else _of_cpu(trace)


def _of_gpu(trace: RankTrace) -> StepIntervals:
    technique_of = _TechniqueOf(trace)
    launched = sorted(((_launched(trace, kernel), kernel) for kernel in trace.kernels), key=lambda pair: pair[0])
    communication = [technique_of.kernel(kernel) for kernel in trace.kernels if kernel.name is not None]
    beside = {(one.start, one.end) for one in communication if one.technique in OUTSIDE_PASS}
    own = [(at, kernel) for at, kernel in launched if kernel.name is None or (kernel.start, kernel.end) not in beside]
    updates = [kernel for one in trace.ranges if is_optimizer(one.name) for kernel in _between(own, one)]
    return StepIntervals(
        steps=_device_steps(windows(trace), launched),
        computing=covered(kernel for kernel in trace.kernels if kernel.name is None),
        optimizer=covered(kernel for kernel in updates if kernel.name is None),
        communication=communication,
        collectives=communication,
        actions=[action for one in trace.ranges if (action := _device_action(one, own)) is not None],
    )


def _of_cpu(trace: RankTrace) -> StepIntervals:
    technique_of, main = _TechniqueOf(trace), _main_thread(trace)
    pairs = trace.ops.get(main, array("d"))
    operators = merged(zip(pairs[::2], pairs[1::2], strict=True))
    held = [(one, our_comm_range(one.name)) for one in trace.ranges if one.thread == main]
    waits = [CommInterval(one.start, one.end, *said) for one, said in held if said is not None]
    calls = [CommInterval(one.start, one.end, *technique_of.call(one)) for one in trace.calls if one.thread == main]
    running = sorted(one for one in trace.background if not waits or _collective(one))
    background = [CommInterval(one.start, one.end, *technique_of.background(one)) for one in running]
    waited_for = {one.technique for one in waits}
    # Where the ranges tell when the host waits, communication outside of them is overlapped.
    hidden = without(
        covered(one for one in background if one.technique in waited_for),
        covered(waits),
    )
    pipeline = covered(one for one in waits if one.technique == "pipeline")
    updates = covered(one for one in trace.ranges if is_optimizer(one.name))
    return StepIntervals(
        steps=windows(trace),
        computing=merged([*operators, *hidden]),
        optimizer=both(operators, updates),
        communication=[*waits, *calls, *background],
        collectives=calls,
        actions=[action for one in trace.ranges if (action := _host_action(one, pipeline)) is not None],
    )


def windows(trace: RankTrace) -> list[tuple[str, Interval]]:
    """The steps of the host, or the whole trace where no steps are marked."""
    steps = sorted((one.start, one.end, one.name) for one in trace.ranges if STEP.match(one.name))
    if steps:
        return [(name, (start, end)) for start, end, name in steps]
    spans = [(kernel.start, kernel.end) for kernel in trace.kernels]
    if not spans:
        spans += [(one.start, one.end) for one in (*trace.ranges, *trace.background)]
        spans += [(min(pairs[::2]), max(pairs[1::2])) for pairs in trace.ops.values()]
    if not spans:
        return []
    return [(UNMARKED, (min(start for start, _ in spans), max(end for _, end in spans)))]


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

    def kernel(self, kernel: Kernel) -> CommInterval:
        launch = self._trace.launches.get(kernel.correlation) if kernel.correlation is not None else None
        holder = self._ranges.innermost(launch.thread, launch.start) if launch is not None else None
        call = self._calls.innermost(launch.thread, launch.start) if launch is not None else None
        facts = {**(call.facts if call is not None else {}), **(kernel.facts or {})}
        kind = kind_of(str(facts.get("Collective name") or kernel.name))
        return CommInterval(kernel.start, kernel.end, self._technique(holder, facts, kind), kind, message_bytes(facts))

    def call(self, call: CollectiveLaunch) -> tuple[str, str, int | None]:
        holder = self._ranges.innermost(call.thread, call.start)
        return self._technique(holder, call.facts, call.kind), call.kind, message_bytes(call.facts)

    def background(self, one: TraceRange) -> tuple[str, str, int | None]:
        """gloo runs collectives in the order of their calls, without their process group."""
        kind = kind_of(one.name)
        queue = self._queues.get(kind)
        if queue and queue[0].start <= one.start:
            return self.call(queue.popleft())
        return technique_of_kind(kind), kind, None

    def _technique(self, holder: TraceRange | None, facts: dict[str, object], kind: str) -> str:
        if holder is not None:
            return technique_of_range(holder.name) or "unknown"
        group = str(facts.get("Process Group Name", ""))
        found = technique_of_group(str(facts.get("Process Group Description", "")), self._groups.get(group, ""), group)
        if found is None and kind == "all_reduce" and self._ddp:
            return "data"
        return found or technique_of_kind(kind)


def _queues(calls: Iterable[CollectiveLaunch]) -> dict[str, deque[CollectiveLaunch]]:
    queues: dict[str, deque[CollectiveLaunch]] = defaultdict(deque)
    for call in sorted(calls, key=lambda call: call.start):
        queues["all_reduce" if call.kind == "reduce_scatter" else call.kind].append(call)  # which gloo runs for it
    return queues


def _collective(one: TraceRange) -> bool:
    """A message of gloo lasts until it is asked for, so that the host's waits say more, where they are known."""
    return kind_of(one.name) != "send_recv"


def _main_thread(trace: RankTrace) -> Thread:
    steps = [one.thread for one in trace.ranges if STEP.match(one.name)]
    return steps[0] if steps else max(trace.ops, key=lambda thread: len(trace.ops[thread]), default=(None, None))


def _launched(trace: RankTrace, kernel: Kernel) -> float:
    launch = trace.launches.get(kernel.correlation) if kernel.correlation is not None else None
    return launch.start if launch is not None else kernel.start


def _between(launched: list[tuple[float, Kernel]], one: TraceRange) -> list[Kernel]:
    first, last = (bisect_left(launched, time, key=lambda pair: pair[0]) for time in (one.start, one.end))
    return [kernel for _, kernel in launched[first:last]]


def _device_steps(steps: list[tuple[str, Interval]], launched: list[tuple[float, Kernel]]) -> list[tuple[str, Interval]]:
    """A step of the device lasts from the first kernel that the host launches in it to the first of the next step."""
    begun = []
    for name, (start, end) in steps:
        kernels = (
            [one for _, one in launched] if name == UNMARKED else _between(launched, TraceRange(start, end, name, (None, None)))
        )
        if kernels:
            begun.append((name, min(kernel.start for kernel in kernels), max(kernel.end for kernel in kernels)))
    starts = [start for _, start, _ in begun]
    ends = [*starts[1:], *(end for _, _, end in begun[-1:])]
    return [(name, (start, end)) for (name, start, _), end in zip(begun, ends, strict=True)]


def _host_action(one: TraceRange, pipeline: Intervals) -> TracedPass | None:
    found = ACTION.match(one.name)
    if found is None:
        return None
    waited = length(both([(one.start, one.end)], pipeline))
    return TracedPass(one.start, one.end, found[1], int(found[2]), int(found[3]), one.end - one.start - waited)


def _device_action(one: TraceRange, own: list[tuple[float, Kernel]]) -> TracedPass | None:
    found = ACTION.match(one.name)
    kernels = covered(_between(own, one)) if found is not None else []
    if found is None or not kernels:
        return None
    return TracedPass(kernels[0][0], kernels[-1][1], found[1], int(found[2]), int(found[3]), length(kernels))
