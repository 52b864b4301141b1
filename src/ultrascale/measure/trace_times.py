"""Where a rank's time went: computing, communication, launch overhead, copies and synchronizations, and the pipeline bubble."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

from ultrascale.measure.trace_rank import ACTION, STEP, TECHNIQUES, EnclosingRanges, RankTrace, Thread, TraceEvent
from ultrascale.measure.trace_steps import (
    CommInterval,
    Interval,
    StepIntervals,
    TracedPass,
    difference,
    event_times,
    intersection,
    length,
    lengths,
    step_intervals,
    union,
)
from ultrascale.schedules import build
from ultrascale.schedules.simulate import StageTimes, simulate
from ultrascale.specs.errors import SpecError

US = 1e-6
_COPY = re.compile(r"Memcpy (HtoD|DtoH) \(\w+ -> \w+\)")


@dataclass(frozen=True)
class LaunchOverhead:
    """Launch overhead of a mean step: the device is idle because the host launches the next kernel too late."""

    late_s: float
    gaps: float
    stretches: float
    """runs of kernels that are all late"""
    longest_s: float
    """of these runs, over all steps"""
    kernel_s: float
    """mean duration of late kernels"""
    every_s: float
    """mean time between launches in these runs"""
    after_waits_s: float
    """idle because the host synchronized with the device before it launched more"""
    where: dict[str, float]
    """seconds by the range that the host was in"""


@dataclass(frozen=True)
class HostCopies:
    """Between host and device, in a mean step."""

    to_device: float
    to_device_bytes: float
    to_host: float
    to_host_bytes: float
    pageable: float
    pageable_bytes: float
    copy_s: float
    waits: float
    """synchronizations of the host with the device"""
    wait_s: float


class _LateKernel(NamedTuple):
    """A kernel that the host launched when the device was idle already."""

    place: int
    idle_from: float
    start: float
    end: float
    launched: float


def launches(trace: RankTrace, steps: list[Interval]) -> LaunchOverhead:
    kernels = sorted(trace.kernels, key=lambda kernel: kernel.start)
    starts = [kernel.start for kernel in kernels]
    phases = EnclosingRanges(one for one in trace.ranges if not STEP.match(one.name))
    hosts = dict.fromkeys(one.thread for one in trace.ranges if STEP.match(one.name))
    waits = sorted((one.start, one.end) for one in trace.syncs)
    runs: list[list[_LateKernel]] = []  # of consecutive kernels
    after_waits_s, count = 0.0, len(steps)
    where: dict[str, float] = defaultdict(float)
    for begin, end in difference(steps, event_times(kernels)):
        place = bisect_left(starts, end)
        kernel = kernels[place] if place < len(kernels) and starts[place] == end else None
        launch = trace.launches.get(kernel.correlation) if kernel is not None else None
        if kernel is None or launch is None or launch.start <= begin:
            continue  # the device waited for another stream or rank
        if _ended_in(waits, begin, launch.start):
            after_waits_s += (end - begin) * US
            continue
        if not runs or runs[-1][-1].place != place - 1:
            runs.append([])
        runs[-1].append(_LateKernel(place, begin, kernel.start, kernel.end, launch.start))
        where[_phase(phases, (launch.thread, *hosts), launch.start)] += (end - begin) * US
    late = [one for run in runs for one in run]
    intervals = [(run[-1].launched - run[0].launched) / (len(run) - 1) for run in runs if len(run) > 1]
    return LaunchOverhead(
        late_s=sum(one.start - one.idle_from for one in late) * US / count,
        gaps=len(late) / count,
        stretches=len(runs) / count,
        longest_s=max((run[-1].start - run[0].idle_from for run in runs), default=0.0) * US,
        kernel_s=mean(one.end - one.start for one in late) * US if late else 0.0,
        every_s=mean(intervals) * US if intervals else 0.0,
        after_waits_s=after_waits_s / count,
        where={name: time_s / count for name, time_s in sorted(where.items(), key=lambda one: -one[1])},
    )


def _ended_in(waits: list[Interval], begin: float, end: float) -> bool:
    """Whether the host ended a synchronization between the device's last kernel and the next launch."""
    place = bisect_left(waits, (end, end))
    return any(begin <= done <= end for _, done in waits[max(0, place - 4) : place])


def _phase(phases: EnclosingRanges, threads: Iterable[Thread], time: float) -> str:
    """The innermost range on one of these threads: a pipeline action, the optimizer. Backward has a thread of its own."""
    for one in (phases.innermost(thread, time) for thread in threads):
        if one is not None:
            found = ACTION.match(one.name)
            return found[1] if found else str(one.name).split(" (")[0]
    return "no range"


def copies(trace: RankTrace, steps: list[Interval]) -> HostCopies:
    inside = [one for one in trace.kernels if _COPY.match(one.name) and _in(one, steps)]
    waits = [one for one in trace.syncs if _in(one, steps)]
    count = len(steps)

    def number_and_bytes(word: str) -> tuple[float, float]:
        sizes = [one.facts.get("bytes") for one in inside if word in one.name]
        known = [int(size) for size in sizes if isinstance(size, int | float) and 0 <= size <= 2**63]
        return len(sizes) / count, sum(known) / count

    return HostCopies(
        *number_and_bytes("HtoD"),
        *number_and_bytes("DtoH"),
        *number_and_bytes("Pageable"),
        copy_s=sum(one.end - one.start for one in inside) * US / count,
        waits=len(waits) / count,
        wait_s=sum(one.end - one.start for one in waits) * US / count,
    )


@dataclass(frozen=True)
class StepTime:
    """Seconds; computing, exchanging, both and neither add up to the step."""

    name: str
    step_s: float
    computing_s: float
    exchanging_s: float
    both_s: float
    neither_s: float
    optimizer_s: float
    """of computing"""


@dataclass(frozen=True)
class TechniqueTime:
    """One technique's communication in a mean step."""

    technique: str
    calls: float
    kinds: dict[str, float]
    """calls by kind"""
    time_s: float
    exposed_s: float
    """exposed communication; time that several techniques share is counted for one"""


@dataclass(frozen=True)
class Reductions:
    """Gradient reduction in a mean step."""

    technique: str
    calls: float
    time_s: float
    exposed_s: float
    backward_s: float | None
    """of the backward that it could overlap with"""
    bytes: float | None


@dataclass(frozen=True)
class RankTime:
    """The times of one rank's trace."""

    file: str
    rank: int | None
    device: str
    events: int
    broken: str | None
    steps: tuple[StepTime, ...]
    techniques: tuple[TechniqueTime, ...]
    actions: tuple[tuple[TracedPass, ...], ...]
    """by step, in microseconds of the machine's clock"""
    reductions: Reductions | None
    launches: LaunchOverhead | None
    copies: HostCopies | None
    run: dict[str, Any] | None = None
    """our engine's metadata of the run"""
    notes: tuple[str, ...] = ()

    def mean(self, *fields: str) -> float:
        """Of these fields of a StepTime, added up, over the steps."""
        return float(sum(getattr(step, name) for step in self.steps for name in fields)) / len(self.steps)


def analyse(trace: RankTrace, intervals: StepIntervals | None = None) -> RankTime:
    """`intervals`: where they are known already."""
    intervals = intervals or step_intervals(trace)
    if not intervals.steps:
        raise SpecError(f"--trace {trace.path} marks steps in which nothing ran: profile steps that compute")
    inside = [window for _, window in intervals.steps]
    return RankTime(
        file=str(trace.path),
        rank=trace.rank,
        device="gpu" if trace.on_gpu else "cpu",
        events=trace.events,
        broken=trace.broken,
        steps=_steps(intervals, inside),
        techniques=_techniques(intervals, inside),
        actions=tuple(_actions(intervals, window, trace.origin_us) for window in inside),
        reductions=_reductions(intervals, inside),
        launches=launches(trace, inside) if trace.on_gpu else None,
        copies=copies(trace, inside) if trace.on_gpu else None,
        run=trace.ours,
        notes=trace.notes,
    )


def _steps(intervals: StepIntervals, windows: list[Interval]) -> tuple[StepTime, ...]:
    exchanging = event_times(intervals.communication)
    sets = intervals.computing, exchanging, intersection(intervals.computing, exchanging), intervals.optimizer
    parts = zip(*(lengths(one, windows) for one in sets), strict=True)
    found = []
    for (name, (start, end)), (computes, communicates, overlapped, optimizer) in zip(intervals.steps, parts, strict=True):
        whole = end - start
        alone, exposed = computes - overlapped, communicates - overlapped
        idle = max(0.0, whole - alone - exposed - overlapped)
        found.append(StepTime(name, *(time * US for time in (whole, alone, exposed, overlapped, idle, optimizer))))
    return tuple(found)


def _techniques(intervals: StepIntervals, steps: list[Interval]) -> tuple[TechniqueTime, ...]:
    whole, count = union(steps), len(steps)
    taken = intervals.computing
    found = []
    used = {one.technique for one in (*intervals.communication, *intervals.collectives)}
    for technique in (one for one in TECHNIQUES if one in used):
        mine = intersection(event_times(one for one in intervals.communication if one.technique == technique), whole)
        exposed = difference(mine, taken)
        taken = union([*taken, *exposed])
        kinds = Counter(one.kind for one in intervals.collectives if one.technique == technique and _in(one, steps))
        if mine or kinds:
            each = {kind: number / count for kind, number in kinds.most_common()}
            calls = kinds.total() / count
            found.append(TechniqueTime(technique, calls, each, length(mine) * US / count, length(exposed) * US / count))
    return tuple(found)


def _in(one: TraceEvent | CommInterval | TracedPass, steps: list[Interval]) -> bool:
    return any(start <= one.start < end for start, end in steps)


def _actions(intervals: StepIntervals, window: Interval, origin_us: float) -> tuple[TracedPass, ...]:
    mine = sorted(one for one in intervals.actions if _in(one, [window]))
    return tuple(one._replace(start=one.start + origin_us, end=one.end + origin_us) for one in mine)


def _reductions(intervals: StepIntervals, steps: list[Interval]) -> Reductions | None:
    """All-reduces of data parallelism, or reduce-scatters of ZeRO, with the waits for them."""
    kinds = {"data": "all_reduce", "zero": "reduce_scatter"}
    for technique, kind in kinds.items():
        started = [one for one in intervals.collectives if (one.technique, one.kind) == (technique, kind) and _in(one, steps)]
        if not started:
            continue
        spans = event_times(one for one in intervals.communication if one.technique == technique and one.kind in (kind, "wait"))
        mine = intersection(spans, union(steps))
        sizes = [one.bytes for one in started if one.bytes is not None]
        backward = [one.busy for one in intervals.actions if one.name != "forward" and _in(one, steps)]
        count = len(steps)
        return Reductions(
            technique,
            len(started) / count,
            length(mine) * US / count,
            length(difference(mine, intervals.computing)) * US / count,
            sum(backward) * US / count if backward else None,
            sum(sizes) / count if sizes else None,
        )
    return None


@dataclass(frozen=True)
class Bubble:
    measured: float
    """idle share of all ranks' time between the first and the last action of the step"""
    scheduled: float
    """of the schedule simulated with these stage times and without messages"""
    schedule: str
    makespan_s: float
    stage_s: tuple[float, ...]
    """all passes of one micro-batch, by stage"""


def bubble(ranks: Sequence[RankTime]) -> Bubble | None:
    """None without pipeline actions in the traces, or where not all ranks of a pipeline were traced."""
    pipelines: dict[tuple[int, ...], list[RankTime]] = defaultdict(list)
    for one in ranks:
        if one.run is not None and any(one.actions) and _layout(one)["pp"] > 1:
            place = one.run["place"]
            pipelines[place["dp"], place["cp"], place["tp"]].append(one)
    whole = [group for group in pipelines.values() if len(group) == _layout(group[0])["pp"]]
    if not whole:
        return None
    shares, spans = [], []
    for group in whole:
        for step in range(min(len(one.actions) for one in group)):
            found = [one.actions[step] for one in group]
            if all(found):
                span = max(one.end for rank in found for one in rank) - min(one.start for rank in found for one in rank)
                shares.append(1 - sum(one.busy for rank in found for one in rank) / (len(found) * span))
                spans.append(span)
    if not shares:
        return None
    layout = _layout(whole[0][0])
    times = _stage_times([one for group in whole for rank in group for step in rank.actions for one in step], layout)
    schedule = build(layout["schedule"], layout["pp"], layout["gas"], layout["virtual_stages"])
    stages = [sum(parts) for parts in zip(times.forward_s, times.input_grad_s, times.weight_grad_s, strict=True)]
    return Bubble(mean(shares), simulate(schedule, times).bubble_fraction, layout["schedule"], mean(spans) * US, tuple(stages))


def _layout(one: RankTime) -> dict[str, Any]:
    assert one.run is not None
    layout = one.run.get("layout")
    if not isinstance(layout, dict):
        raise SpecError(f"--trace {one.file} does not say how its run was cut: profile it again")
    return layout


def _stage_times(actions: Iterable[TracedPass], layout: dict[str, Any]) -> StageTimes:
    took: dict[tuple[str, int], list[float]] = defaultdict(list)
    for one in actions:
        took[one.name, one.stage].append(one.busy * US)

    def typical(name: str, stage: int) -> float:
        return mean(took[name, stage]) if took[name, stage] else 0.0

    stages = range(layout["pp"] * layout["virtual_stages"])
    weights = tuple(typical("weight gradients", stage) for stage in stages)
    inputs = tuple(
        typical("input gradients", stage) or max(0.0, typical("backward", stage) - weights[stage]) for stage in stages
    )
    return StageTimes(tuple(typical("forward", stage) for stage in stages), inputs, weights)
