"""One rank's trace as what matters of it: kernels with their launches, operators, named ranges, exchanges, copies, waits.

Times are microseconds on the clock of the machine that wrote the trace. No torch is needed.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ultrascale.measure.trace import names
from ultrascale.measure.trace.file import TraceFile
from ultrascale.measure.trace.intervals import Interval
from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

OURS = "ultrascale"
"""what our own traces say of their run stands under this name"""
_OLD = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
"""categories as Kineto wrote them before 2022"""
UNMARKED = "the whole trace"
"""in the place of a step's name"""
_COPY = re.compile(r"Memcpy (\w+) \((\w+) -> (\w+)\)")
MOST_US = 1e18  # 30,000 years: a clock that counts from 1970 in nanoseconds has 1.8e18, in microseconds 1.8e15
_HOLDS = 64  # ranges that may begin between another's beginning and what it holds

Thread = tuple[Any, Any]


class TraceRange(NamedTuple):
    start: float
    end: float
    name: str
    thread: Thread


class KernelLaunch(NamedTuple):
    """The host's call that put a kernel on its queue."""

    start: float
    end: float
    thread: Thread


class Kernel(NamedTuple):
    start: float
    end: float
    stream: Any
    correlation: int | None
    name: str | None
    """of collectives alone"""
    facts: dict[str, Any] | None
    """what is told of a collective"""


class Copy(NamedTuple):
    """Between host and device."""

    start: float
    end: float
    way: str
    """HtoD or DtoH"""
    pageable: bool
    bytes: int


class CollectiveLaunch(NamedTuple):
    """The host begins an exchange."""

    start: float
    end: float
    kind: str
    thread: Thread
    facts: dict[str, Any]


@dataclass
class RankTrace:
    path: Path
    rank: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    broken: str | None = None
    events: int = 0
    kernels: list[Kernel] = field(default_factory=list)
    launches: dict[int, KernelLaunch] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    syncs: list[TraceRange] = field(default_factory=list)
    """the host waits for the device"""
    ranges: list[TraceRange] = field(default_factory=list)
    calls: list[CollectiveLaunch] = field(default_factory=list)
    background: list[TraceRange] = field(default_factory=list)
    """gloo's exchanges, on its own threads"""
    ops: dict[Thread, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    """starts and ends of operators that compute on the host, by thread"""

    @property
    def on_gpu(self) -> bool:
        return bool(self.kernels)

    @property
    def ours(self) -> dict[str, Any] | None:
        """What our own engine says of the run."""
        said = self.facts.get(OURS)
        return said if isinstance(said, dict) else None

    @property
    def origin_us(self) -> float:
        """Of this trace's clock: traces of one machine can be laid side by side."""
        base = self.facts.get("baseTimeNanoseconds")
        return float(base) / 1e3 if isinstance(base, int | float) and 0 <= base <= MOST_US * 1e3 else 0.0


def read(path: Path) -> RankTrace:
    """Reads a trace; SpecError where it is none, or holds nothing that lasts."""
    file = TraceFile(path)
    trace = RankTrace(path)
    for event in file.events():
        if event.get("ph") == "X" and isinstance(event.get("name"), str):
            _add(trace, event)
    trace.facts, trace.broken = file.facts, file.broken
    distributed = file.facts.get("distributedInfo")
    if isinstance(distributed, dict) and isinstance(distributed.get("rank"), int):
        trace.rank = distributed["rank"]
    elif (found := re.search(r"rank[-_]?(\d+)", path.name)) is not None:
        trace.rank = int(found[1])
    if not trace.events:
        cut = f", and {trace.broken}" if trace.broken else ""
        raise SpecError(
            f"--trace {path} has no events that last{cut}: record some steps with torch.profiler and export them again"
        )
    return trace


def _add(trace: RankTrace, event: dict[str, Any]) -> None:
    if "ts" not in event:
        return
    start = _microseconds(trace, event, "ts", least=-MOST_US)  # an event before the clock's zero is one
    end = start + _microseconds(trace, event, "dur", least=0.0)
    trace.events += 1
    kind = str(event.get("cat", "")).lower()
    kind = _OLD.get(kind, kind)
    name, thread = event["name"], (_identifier(event.get("pid")), _identifier(event.get("tid")))
    facts = event.get("args") if isinstance(event.get("args"), dict) else {}
    assert isinstance(facts, dict)
    stream, correlation = _identifier(facts.get("stream", event.get("tid"))), facts.get("correlation")
    correlation = correlation if isinstance(correlation, int) else None
    if kind == "kernel":
        collective = names.is_collective_kernel(name)
        told = {key: facts[key] for key in _TOLD if key in facts} if collective else None
        trace.kernels.append(Kernel(start, end, stream, correlation, name if collective else None, told))
    elif kind in ("gpu_memcpy", "gpu_memset"):
        trace.kernels.append(Kernel(start, end, stream, correlation, None, None))
        way = _COPY.match(name)
        if way is not None and way[1] in ("HtoD", "DtoH"):
            trace.copies.append(Copy(start, end, way[1], "Pageable" in name, _bytes(facts.get("bytes"))))
    elif kind.endswith(("_runtime", "_driver")):
        if correlation is not None:
            trace.launches.setdefault(correlation, KernelLaunch(start, end, thread))
        if "Synchronize" in name or name in ("cudaMemcpy", "hipMemcpy"):
            trace.syncs.append(TraceRange(start, end, name, thread))
    elif kind == "user_annotation" or (not kind and names.STEP.match(name)):
        (trace.background if name.startswith("gloo:") else trace.ranges).append(TraceRange(start, end, name, thread))
    elif kind == "cpu_op":
        if names.is_collective_op(name):
            told = {key: facts[key] for key in _TOLD if key in facts}
            trace.calls.append(
                CollectiveLaunch(start, end, names.kind_of(str(told.get("Collective name") or name)), thread, told)
            )
        elif names.is_optimizer(name):
            trace.ranges.append(TraceRange(start, end, name, thread))
        elif names.computes(name):
            trace.ops[thread].extend((start, end))


def _identifier(value: Any) -> Any:
    """Of a process, thread or stream, to be a key: a file may have lists there."""
    return value if value is None or isinstance(value, int | str) else str(value)


def _bytes(size: Any) -> int:
    return int(size) if isinstance(size, int | float) and 0 <= size <= 2**63 else 0


def _microseconds(trace: RankTrace, event: dict[str, Any], name: str, least: float) -> float:
    """A time of an event; SpecError for what is none, since every sum that it enters would be none either."""
    value = event.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST_US:
        raise SpecError(
            f"--trace {trace.path}: {name} of the event {shown(event['name'])} is {shown(value)} but must be a number of "
            f"microseconds from {least:g} to {MOST_US:g}: record the trace again"
        )
    return float(value)


_TOLD = (
    "Collective name",
    "Process Group Name",
    "Process Group Description",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Group size",
)


class EnclosingRanges:
    """Which range of a thread holds a moment."""

    def __init__(self, ranges: list[TraceRange] | list[CollectiveLaunch]) -> None:
        self._by_thread: dict[Thread, list[Any]] = defaultdict(list)
        for one in ranges:
            self._by_thread[one.thread].append(one)
        for found in self._by_thread.values():
            found.sort(key=lambda one: one.start)
        self._starts = {thread: [one.start for one in found] for thread, found in self._by_thread.items()}

    def innermost(self, thread: Thread, moment: float) -> Any:
        """The one that began last and has not ended; None: none holds it."""
        found = self._by_thread.get(thread, ())
        place = bisect_right(self._starts.get(thread, []), moment)
        for one in reversed(found[max(0, place - _HOLDS) : place]):
            if one.end > moment:
                return one
        return None


def windows(trace: RankTrace) -> list[tuple[str, Interval]]:
    """The steps as the host ran them; the whole trace as one where nobody marked them."""
    steps = sorted((one.start, one.end, one.name) for one in trace.ranges if names.STEP.match(one.name))
    if steps:
        return [(name, (start, end)) for start, end, name in steps]
    spans = [(kernel.start, kernel.end) for kernel in trace.kernels]
    if not spans:
        spans += [(one.start, one.end) for one in (*trace.ranges, *trace.background)]
        spans += [(min(pairs[::2]), max(pairs[1::2])) for pairs in trace.ops.values()]
    if not spans:
        return []
    return [(UNMARKED, (min(start for start, _ in spans), max(end for _, end in spans)))]
