"""Stretches of time as sets: what at least one of them covers, what two cover both, what one covers alone.

A set is a list of (start, end) in order that neither touch nor overlap; `merged` makes one of any stretches.


One rank's step as sets of time, the same for hosts and devices: when it computed, when it exchanged and for whom.

On a GPU kernels tell: collectives are exchanges, all others (copies too) are computing, and a step lasts from its first kernel
to the next step's. On a CPU operators of the main thread are computing; exchanging is waiting in a range of ours, or gloo's
threads at work.
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
    our_exchange,
    technique_of_group,
    technique_of_kind,
    technique_of_range,
)

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


UNMARKED = "the whole trace"
"""in the place of a step's name"""
BESIDE = ("pipeline", "data")
"""whose exchanges are no part of a stage's pass: messages of others, and gradients that travel while it goes on"""


class Exchange(NamedTuple):
    start: float
    end: float
    technique: str
    kind: str
    """wait: of the host, for any kind"""
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
    """without waiting for other stages, or for gradients"""


@dataclass(frozen=True)
class StepIntervals:
    steps: list[tuple[str, Interval]]
    computing: Intervals
    optimizer: Intervals
    """computing for the update"""
    exchanges: list[Exchange]
    counted: list[Exchange]
    """one for every exchange that was begun"""
    actions: list[TracedPass]


def view(trace: RankTrace) -> StepIntervals:
    return _of_gpu(trace) if trace.on_gpu else _of_cpu(trace)


def _of_gpu(trace: RankTrace) -> StepIntervals:
    whose = _Owner(trace)
    launched = sorted(((_launched(trace, kernel), kernel) for kernel in trace.kernels), key=lambda pair: pair[0])
    exchanges = [whose.kernel(kernel) for kernel in trace.kernels if kernel.name is not None]
    beside = {(one.start, one.end) for one in exchanges if one.technique in BESIDE}
    own = [(at, kernel) for at, kernel in launched if kernel.name is None or (kernel.start, kernel.end) not in beside]
    updates = [kernel for one in trace.ranges if is_optimizer(one.name) for kernel in _between(own, one)]
    return StepIntervals(
        steps=_device_steps(windows(trace), launched),
        computing=_covered(kernel for kernel in trace.kernels if kernel.name is None),
        optimizer=_covered(kernel for kernel in updates if kernel.name is None),
        exchanges=exchanges,
        counted=exchanges,
        actions=[action for one in trace.ranges if (action := _device_action(one, own)) is not None],
    )


def _of_cpu(trace: RankTrace) -> StepIntervals:
    whose, main = _Owner(trace), _main_thread(trace)
    pairs = trace.ops.get(main, array("d"))
    operators = merged(zip(pairs[::2], pairs[1::2], strict=True))
    held = [(one, our_exchange(one.name)) for one in trace.ranges if one.thread == main]
    waits = [Exchange(one.start, one.end, *said) for one, said in held if said is not None]
    calls = [Exchange(one.start, one.end, *whose.call(one)) for one in trace.calls if one.thread == main]
    running = sorted(one for one in trace.background if not waits or _collective(one))
    behind = [Exchange(one.start, one.end, *whose.background(one)) for one in running]
    told = {one.technique for one in waits}
    # Where the host tells its waits, an exchange outside of them runs behind whatever the host does.
    hidden = without(
        merged((one.start, one.end) for one in behind if one.technique in told),
        merged((one.start, one.end) for one in waits),
    )
    pipeline = merged((one.start, one.end) for one in waits if one.technique == "pipeline")
    updates = merged((one.start, one.end) for one in trace.ranges if is_optimizer(one.name))
    return StepIntervals(
        steps=windows(trace),
        computing=merged([*operators, *hidden]),
        optimizer=both(operators, updates),
        exchanges=[*waits, *calls, *behind],
        counted=calls,
        actions=[action for one in trace.ranges if (action := _host_action(one, pipeline)) is not None],
    )


def windows(trace: RankTrace) -> list[tuple[str, Interval]]:
    """The steps as the host ran them; the whole trace as one where nobody marked them."""
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


class _Owner:
    """Whose an exchange is: told by the range that holds its beginning, by its process group, or else by its kind."""

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

    def kernel(self, kernel: Kernel) -> Exchange:
        launch = self._trace.launches.get(kernel.correlation) if kernel.correlation is not None else None
        holder = self._ranges.innermost(launch.thread, launch.start) if launch is not None else None
        call = self._calls.innermost(launch.thread, launch.start) if launch is not None else None
        facts = {**(call.facts if call is not None else {}), **(kernel.facts or {})}
        kind = kind_of(str(facts.get("Collective name") or kernel.name))
        return Exchange(kernel.start, kernel.end, self._technique(holder, facts, kind), kind, message_bytes(facts))

    def call(self, call: CollectiveLaunch) -> tuple[str, str, int | None]:
        holder = self._ranges.innermost(call.thread, call.start)
        return self._technique(holder, call.facts, call.kind), call.kind, message_bytes(call.facts)

    def background(self, one: TraceRange) -> tuple[str, str, int | None]:
        """gloo runs what is given to it in order, and says nothing of whom it is for."""
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
        queues["all_reduce" if call.kind == "reduce_scatter" else call.kind].append(call)  # as gloo scatters
    return queues


def _collective(one: TraceRange) -> bool:
    """gloo's messages last from their posting until somebody asks for them: where waits are told, those tell more."""
    return kind_of(one.name) != "send_recv"


def _main_thread(trace: RankTrace) -> Thread:
    steps = [one.thread for one in trace.ranges if STEP.match(one.name)]
    return steps[0] if steps else max(trace.ops, key=lambda thread: len(trace.ops[thread]), default=(None, None))


def _launched(trace: RankTrace, kernel: Kernel) -> float:
    launch = trace.launches.get(kernel.correlation) if kernel.correlation is not None else None
    return launch.start if launch is not None else kernel.start


def _covered(kernels: Iterable[Kernel]) -> Intervals:
    return merged((kernel.start, kernel.end) for kernel in kernels)


def _between(launched: list[tuple[float, Kernel]], one: TraceRange) -> list[Kernel]:
    first, last = (bisect_left(launched, moment, key=lambda pair: pair[0]) for moment in (one.start, one.end))
    return [kernel for _, kernel in launched[first:last]]


def _device_steps(steps: list[tuple[str, Interval]], launched: list[tuple[float, Kernel]]) -> list[tuple[str, Interval]]:
    """A step of the device begins with the first kernel that the host launches in it, and ends where the next begins."""
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
    kernels = _covered(_between(own, one)) if found is not None else []
    if found is None or not kernels:
        return None
    return TracedPass(kernels[0][0], kernels[-1][1], found[1], int(found[2]), int(found[3]), length(kernels))
