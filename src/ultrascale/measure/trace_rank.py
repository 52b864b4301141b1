"""One rank's trace: kernels with their launches, operators, named ranges, collectives, copies and waits; and what names mean.

Times are microseconds on the clock of the machine that wrote the trace. Names are those of our engine, of torch and of others.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from sys import intern
from types import MappingProxyType
from typing import Any, NamedTuple

from ultrascale.measure import trace_nsight
from ultrascale.measure.trace_file import TraceFile
from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

TECHNIQUES = ("tensor", "context", "expert", "pipeline", "zero", "data", "muon", "bookkeeping", "unknown")
"""time that several techniques share is counted for the first of them"""
ACTION = re.compile(r"(forward|backward|input gradients|weight gradients) stage (\d+) micro-batch (\d+)\Z")
"""pipeline actions, as parallel/pipeline.py names them"""
STEP = re.compile(r"ProfilerStep#(\d+)\Z")

_OURS = re.compile(r"(tensor|context|expert|pipeline|zero|data|bookkeeping) ([a-z_]+)\Z")
_GROUPS = (
    ("zero", {"fsdp", "efsdp", "hsdp", "shard", "zero"}),
    ("data", {"dp", "ddp", "edp", "data", "replicate"}),
    ("pipeline", {"pp", "pipeline"}),
    ("tensor", {"tp", "tensor", "sp"}),
    ("expert", {"ep", "expert"}),
    ("context", {"cp", "context"}),
)
"""words in the name of a process group; those of data ranks first: `dp_shard_cp` shards weights, not sequences"""
_KINDS = (
    ("all_reduce", ("allreduce",)),
    ("reduce_scatter", ("reducescatter",)),
    ("all_gather", ("allgather",)),
    ("all_to_all", ("alltoall",)),
    ("send_recv", ("send", "recv", "coalesced")),
    ("broadcast", ("broadcast",)),
    ("barrier", ("barrier",)),
)
TECHNIQUE_OF_KIND = {"send_recv": "pipeline", "all_to_all": "expert"}
"""the most likely technique of a collective where nothing else tells"""
_SIZES = {"double": 8, "long": 8, "float": 4, "int": 4, "bfloat16": 2, "half": 2, "short": 2}


def our_comm_range(name: str) -> tuple[str, str] | None:
    """Technique and kind of a range that our engine names, such as `tensor all_reduce` or `data wait`; None: another range."""
    found = _OURS.match(name)
    return (found[1], found[2]) if found else None


def technique_of_range(name: str) -> str | None:
    """The technique whose collectives run inside a range of our engine, of torch's FSDP or of its pipelines."""
    if (ours := our_comm_range(name)) is not None:
        return ours[0]
    if name.startswith("FSDP::") or "FullyShardedDataParallel" in name:
        return "zero"
    if name.startswith("PP::"):
        return "pipeline"
    return None


def technique_of_group(*names: str) -> str | None:
    """By the description or name of a process group: `mesh_dp_shard`, `TENSOR_MODEL_PARALLEL_GROUP`."""
    for name in names:
        words = {word.rstrip("0123456789") for word in re.split(r"[^a-z0-9]+", name.lower())}
        for technique, signs in _GROUPS:
            if words & signs:
                return technique
    return None


def kind_of(name: str, facts: Mapping[str, Any] = MappingProxyType({})) -> str:
    """`all_reduce` of `ncclDevKernel_AllReduce_Sum_bf16_RING_LL(…)`, `c10d::allreduce_` or `gloo:all_reduce`."""
    plain = str(facts.get("Collective name") or name).lower().replace("_", "").replace("-", "")
    return next((kind for kind, signs in _KINDS if any(sign in plain for sign in signs)), "other")


def is_collective_kernel(name: str) -> bool:
    return name.startswith(("nccl", "rccl", "mscclKernel", "void nccl"))


def is_collective_op(name: str) -> bool:
    """Whether the host starts a collective with this operator."""
    return name.startswith(("c10d::", "_c10d_functional::", "nccl:", "record_param_comms"))


def is_optimizer(name: str) -> bool:
    return name == "optimizer" or name.startswith("Optimizer.step#")


def computes(name: str) -> bool:
    """Whether an operator of the host computes, rather than only containing others that do."""
    if name.startswith(("aten::", "CompiledFunction", "Torch-Compiled Region", "## Call CompiledFxGraph")):
        return True
    return (
        "::" in name
        and not name.startswith(("autograd::", "torch::autograd", "torch.", "profiler::"))
        and not is_collective_op(name)
    )


def message_bytes(facts: Mapping[str, Any]) -> int | None:
    """Of a collective, by Kineto's metadata: the larger of input and output."""
    counts = [facts.get("In msg nelems"), facts.get("Out msg nelems")]
    numbers = [count for count in counts if isinstance(count, int)]
    size = _SIZES.get(str(facts.get("dtype", "")).lower(), 1)
    return max(numbers) * size if numbers else None


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 2`; eight at most are listed."""
    few = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {few}{f' and {len(ranks) - 8:,} more' if len(ranks) > 8 else ''}"


OURS = "ultrascale"
"""key of our engine's metadata in a trace"""
MERGED_KEY = "ultrascale_merged"
"""marks the trace of all ranks that trace_merge.py writes"""
_OLD = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
"""Kineto's categories before 2022"""
MOST_US = 1e18  # 30,000 years: a clock that counts from 1970 in nanoseconds has 1.8e18, in microseconds 1.8e15
_DEPTH = 64  # ranges that may begin inside another one before a given time

Thread = tuple[Any, Any]
NO_FACTS: Mapping[str, Any] = MappingProxyType({})


class TraceEvent(NamedTuple):
    """A kernel, a range, or a call of the host."""

    start: float
    end: float
    name: str
    thread: Thread
    facts: Mapping[str, Any] = NO_FACTS
    """metadata of collectives and copies"""
    correlation: int | None = None
    """of a kernel: key of its launch"""


@dataclass
class RankTrace:
    path: Path
    rank: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    broken: str | None = None
    notes: tuple[str, ...] = ()
    events: int = 0
    kernels: list[TraceEvent] = field(default_factory=list)
    """copies and memsets too"""
    launches: dict[int | None, TraceEvent] = field(default_factory=dict)
    """the host's calls that launched kernels, by correlation"""
    syncs: list[TraceEvent] = field(default_factory=list)
    """the host waits for the device"""
    ranges: list[TraceEvent] = field(default_factory=list)
    calls: list[TraceEvent] = field(default_factory=list)
    """operators with which the host starts collectives"""
    background: list[TraceEvent] = field(default_factory=list)
    """collectives of gloo, on its own threads"""
    ops: dict[Thread, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    """starts and ends of operators that compute on the host, by thread"""

    @property
    def on_gpu(self) -> bool:
        return bool(self.kernels)

    def launched_at(self, kernel: TraceEvent) -> float:
        """When the host launched a kernel; its own start where that is unknown."""
        return self.launches.get(kernel.correlation, kernel).start

    @property
    def ours(self) -> dict[str, Any] | None:
        """Our engine's metadata of the run."""
        metadata = self.facts.get(OURS)
        return metadata if isinstance(metadata, dict) else None

    @property
    def origin_us(self) -> float:
        """Zero of this trace's clock, so that traces of one machine can be aligned."""
        base = self.facts.get("baseTimeNanoseconds")
        return float(base) / 1e3 if isinstance(base, int | float) and 0 <= base <= MOST_US * 1e3 else 0.0


def read(path: Path) -> RankTrace:
    """Read a trace; SpecError where it is none, or has no events with a duration."""
    file = trace_nsight.NsightFile(path) if path.suffix == trace_nsight.SUFFIX else TraceFile(path)
    trace = RankTrace(path)
    for events in file.blocks():
        _add(trace, events)
    trace.facts, trace.broken, trace.notes = file.facts, file.broken, tuple(file.notes)
    if file.facts.get(MERGED_KEY):
        raise SpecError(f"--trace {path} is a merged trace of all ranks: name the traces that it was made of")
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


def _add(trace: RankTrace, events: list[dict[str, Any]]) -> None:
    """A loop with few calls: it takes as long as parsing."""
    number, new = 0, TraceEvent
    for event in events:
        name = event.get("name")
        if event.get("ph") != "X" or "ts" not in event or not isinstance(name, str):
            continue
        start, lasts, pid, tid = event["ts"], event.get("dur", 0), event.get("pid"), event.get("tid")
        if type(start) is not float or not -MOST_US <= start <= MOST_US:  # an event may begin before the clock's zero
            start = _microseconds(trace, event, "ts", least=-MOST_US)
        if type(lasts) not in (float, int) or not 0 <= lasts <= MOST_US:
            lasts = _microseconds(trace, event, "dur", least=0.0)
        if type(pid) is not int or type(tid) is not int:
            pid, tid = _identifier(pid), _identifier(tid)
        number += 1
        end, thread, kind = start + lasts, (pid, tid), _category(str(event.get("cat", "")))
        if kind == "cpu_op":
            what = _operator(name)
            if what == "computes":
                trace.ops[thread].extend((start, end))
            elif what == "collective":
                trace.calls.append(new(start, end, intern(name), thread, _kept(event)))
            elif what == "optimizer":
                trace.ranges.append(new(start, end, intern(name), thread))
        elif kind == "device":
            trace.kernels.append(new(start, end, intern(name), thread, _kept(event), _correlation(event)))
        elif kind == "host":
            call, correlation = new(start, end, intern(name), thread), _correlation(event)
            if correlation is not None:
                trace.launches.setdefault(correlation, call)
            if "Synchronize" in name or name in ("cudaMemcpy", "hipMemcpy"):
                trace.syncs.append(call)
        elif kind == "user_annotation" or (not kind and STEP.match(name)):
            (trace.background if name.startswith("gloo:") else trace.ranges).append(new(start, end, intern(name), thread))
    trace.events += number


# Names and categories repeat by the ten thousand, and are looked at once.
@lru_cache(maxsize=4096)
def _operator(name: str) -> str:
    if is_collective_op(name):
        return "collective"
    if is_optimizer(name):
        return "optimizer"
    return "computes" if computes(name) else ""


@lru_cache(maxsize=256)
def _category(given: str) -> str:
    """Kineto's category; `device` for kernels, copies and memsets, `host` for calls of the runtime and the driver."""
    kind = _OLD.get(given.lower(), given.lower())
    if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
        return "device"
    return "host" if kind.endswith(("_runtime", "_driver")) else kind


def _correlation(event: dict[str, Any]) -> int | None:
    facts = event.get("args")
    found = facts.get("correlation") if isinstance(facts, dict) else None
    return found if isinstance(found, int) else None


def _kept(event: dict[str, Any]) -> Mapping[str, Any]:
    facts = event.get("args")
    if not isinstance(facts, dict) or _KEPT.isdisjoint(facts):
        return NO_FACTS
    return {key: value for key, value in facts.items() if key in _KEPT}


def _identifier(value: Any) -> Any:
    """Of a process, thread or stream, as a dictionary key: a file may have lists there."""
    return value if value is None or isinstance(value, int | str) else str(value)


def _microseconds(trace: RankTrace, event: dict[str, Any], name: str, least: float) -> float:
    """A time of an event; SpecError if it is no number in range."""
    value = event.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST_US:
        raise SpecError(
            f"--trace {trace.path}: {name} of the event {shown(event['name'])} is {shown(value)} but must be a number of "
            f"microseconds from {least:g} to {MOST_US:g}: record the trace again"
        )
    return float(value)


_KEPT = frozenset({
    "bytes", "Collective name", "Process Group Name", "Process Group Description", "Process Group Ranks", "Group size",
    "Src Rank", "Dst Rank", "In msg nelems", "Out msg nelems", "dtype",
})  # fmt: skip


class EnclosingRanges:
    """Finds the range of a thread that contains a given time."""

    def __init__(self, ranges: Iterable[TraceEvent]) -> None:
        self._by_thread: dict[Thread, list[TraceEvent]] = defaultdict(list)
        for one in sorted(ranges, key=lambda one: one.start):
            self._by_thread[one.thread].append(one)

    def innermost(self, thread: Thread, time: float) -> TraceEvent | None:
        """The range that began last and has not ended."""
        found = self._by_thread.get(thread, [])
        place = bisect_right(found, time, key=lambda one: one.start)
        return next((one for one in reversed(found[max(0, place - _DEPTH) : place]) if one.end > time), None)
