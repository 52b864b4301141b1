"""What a GPU's host does to it: launches that come too late, copies between host and device, waits in the middle of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ultrascale.measure.trace import names
from ultrascale.measure.trace.intervals import Interval, merged, without
from ultrascale.measure.trace.rank import EnclosingRanges, RankTrace, Thread

US = 1e-6


Late = tuple[int, float, float, float, float]
"""a kernel's place among all, when the gap before it began and ended, when it was launched, how long it ran"""


@dataclass(frozen=True)
class Launches:
    """Of a mean step: when the device had nothing to do because the next kernel was launched after the last one ended."""

    late_s: float
    gaps: float
    stretches: float
    """runs of kernels that each found the queue empty"""
    longest_s: float
    """of those runs, over all steps"""
    kernel_s: float
    """mean length of the kernels that came late"""
    every_s: float
    """mean time from one launch to the next in those runs"""
    after_waits_s: float
    """idle because the host had waited for the device before it launched more"""
    where: dict[str, float]
    """seconds by what the host was doing"""


@dataclass(frozen=True)
class Copies:
    """Between host and device, in a mean step."""

    to_device: float
    to_device_bytes: float
    to_host: float
    to_host_bytes: float
    pageable: float
    pageable_bytes: float
    copy_s: float
    waits: float
    """times that the host waited for the device"""
    wait_s: float


def launches(trace: RankTrace, steps: list[Interval]) -> Launches:
    busy = merged((kernel.start, kernel.end) for kernel in trace.kernels)
    kernels = sorted(trace.kernels, key=lambda kernel: kernel.start)
    starts = [kernel.start for kernel in kernels]
    phases = EnclosingRanges([one for one in trace.ranges if not names.STEP.match(one.name)])
    hosts = dict.fromkeys(one.thread for one in trace.ranges if names.STEP.match(one.name))
    waits = sorted((one.start, one.end) for one in trace.syncs)
    late: list[Late] = []
    after_waits_s = 0.0
    where: dict[str, float] = defaultdict(float)
    for begin, end in without(merged(steps), busy):
        place = bisect_left(starts, end)
        kernel = kernels[place] if place < len(kernels) and starts[place] == end else None
        launch = trace.launches.get(kernel.correlation) if kernel is not None and kernel.correlation is not None else None
        if kernel is None or launch is None or launch.start <= begin:
            continue  # the device waited for something else: another stream, another rank
        if _ended_in(waits, begin, launch.start):
            after_waits_s += (end - begin) * US
            continue
        late.append((place, begin, end, launch.start, kernel.end - kernel.start))
        where[_phase(phases, (launch.thread, *hosts), launch.start)] += (end - begin) * US
    count, runs = len(steps), _runs(late)
    intervals = [(run[-1][3] - run[0][3]) / (len(run) - 1) for run in runs if len(run) > 1]
    return Launches(
        late_s=sum(end - begin for _, begin, end, *_ in late) * US / count,
        gaps=len(late) / count,
        stretches=len(runs) / count,
        longest_s=max((run[-1][2] - run[0][1] for run in runs), default=0.0) * US,
        kernel_s=sum(one[4] for one in late) * US / len(late) if late else 0.0,
        every_s=sum(intervals) / len(intervals) * US if intervals else 0.0,
        after_waits_s=after_waits_s / count,
        where={name: time_s / count for name, time_s in sorted(where.items(), key=lambda one: -one[1])},
    )


def _runs(late: list[Late]) -> list[list[Late]]:
    """Kernels that came late one after the other."""
    runs: list[list[Late]] = []
    for one in late:
        if runs and one[0] == runs[-1][-1][0] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _ended_in(waits: list[Interval], begin: float, end: float) -> bool:
    """Did the host come out of a wait between the device's last kernel and its next launch?"""
    place = bisect_left(waits, (end, end))
    return any(begin <= done <= end for _, done in waits[max(0, place - 4) : place])


def _phase(phases: EnclosingRanges, threads: Iterable[Thread], moment: float) -> str:
    """The pass of the pipeline, the optimizer, or whatever the engine named; backward launches from a thread of its own."""
    for one in (phases.innermost(thread, moment) for thread in threads):
        if one is not None:
            found = names.ACTION.match(one.name)
            return found[1] if found else str(one.name).split(" (")[0]
    return "no range"


def copies(trace: RankTrace, steps: list[Interval], count: int) -> Copies:
    inside = [one for one in trace.copies if any(start <= one.start < end for start, end in steps)]
    ways = {way: [one for one in inside if one.way == way] for way in ("HtoD", "DtoH")}
    pageable = [one for one in inside if one.pageable]
    waits = [one for one in trace.syncs if any(start <= one.start < end for start, end in steps)]
    return Copies(
        to_device=len(ways["HtoD"]) / count,
        to_device_bytes=sum(one.bytes for one in ways["HtoD"]) / count,
        to_host=len(ways["DtoH"]) / count,
        to_host_bytes=sum(one.bytes for one in ways["DtoH"]) / count,
        pageable=len(pageable) / count,
        pageable_bytes=sum(one.bytes for one in pageable) / count,
        copy_s=sum(one.end - one.start for one in inside) * US / count,
        waits=len(waits) / count,
        wait_s=sum(one.end - one.start for one in waits) * US / count,
    )
