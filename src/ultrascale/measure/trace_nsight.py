"""Read SQLite exports of Nsight Systems (`nsys export --type sqlite`) as the events that Kineto would have written.

Tables and columns are those of Nvidia's "SQLite Schema Reference". Tables that a recording did not need are absent, and
columns that came with later versions may be. Times are nanoseconds since the session's start.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import open_regular, reason_of

SUFFIX, REPORT = ".sqlite", ".nsys-rep"
ROWS = 10_000  # of a block of events
_MAGIC = b"SQLite format 3\0"
_PROCESS = ~0xFFFFFF  # of a globalTid: its lower 24 bits are the thread
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
"""copyKind, as CUPTI numbers it"""
_VERSION = re.compile(r"_(v\d+|ptsz|ptds)\b")  # cudaLaunchKernel_v7000
_AUTOGRAD = re.compile(r", (seq|op_id) = .*", re.DOTALL)  # behind an operator's name, by torch.autograd.profiler.emit_nvtx
_NCCL = re.compile(r"nccl(All\w+|Broadcast|Gather|Recv|Reduce\w*|Scatter|Send)\Z")  # calls of NCCL, which marks them itself
_OPERATOR = re.compile(r"nccl:|record_param_comms|(?!FSDP::|PP::)\w+::|\w+Backward\d*\Z")  # not a range of the program
_STEP = re.compile(r"(?:profiler|train(?:ing)?)?[ _-]?(?:step|iteration|iter)[ _#:=-]*(\d{1,18})?\Z", re.IGNORECASE)
"""ranges that are steps: `step 3`, `iteration_3`, `train_step`, `ProfilerStep#3`"""


def export_command(path: Path) -> str:
    return f"nsys export --type sqlite -o {path.stem}{SUFFIX} {path.name}"


@dataclass
class NsightFile:
    """An export while it is read, as trace_file.TraceFile: iterate over `blocks` once, then the other fields are there."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    broken: str | None = None
    notes: list[str] = field(default_factory=list)

    def blocks(self) -> Iterator[list[dict[str, Any]]]:
        """Events of the one process that used a GPU. SpecError for a file that is no export, or is cut off."""
        self._check()
        try:
            with closing(sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
                database.text_factory = lambda raw: raw.decode("utf-8", "replace")
                database.execute("PRAGMA trusted_schema=OFF")
                yield from self._all(_Tables(database))
        except sqlite3.Error as error:
            raise self._refused(str(error)) from None

    def _check(self) -> None:
        """SQLite notices a missing end only where it looks for it."""
        try:
            with open_regular(self.path) as file:
                head, size = file.read(100), file.seek(0, 2)
        except OSError as error:
            raise SpecError(f"--trace {self.path} {reason_of(error)}: name a file that `nsys export` wrote") from None
        if len(head) < 100 or not head.startswith(_MAGIC):
            raise self._refused("it does not begin like SQLite")
        page = int.from_bytes(head[16:18], "big")
        wanted = (2**16 if page == 1 else page) * int.from_bytes(head[28:32], "big")
        if head[24:28] == head[92:96] and size < wanted:
            raise self._refused(f"it is cut off: {size:,} of {wanted:,} bytes")

    def _refused(self, why: str) -> SpecError:
        return SpecError(
            f"--trace {self.path} is no whole export of Nsight Systems ({why}): export the report again, "
            f"`{export_command(self.path.with_suffix(REPORT))}`"
        )

    def _all(self, tables: _Tables) -> Iterator[list[dict[str, Any]]]:
        if "StringIds" not in tables.columns:
            raise self._refused("it has no table StringIds")
        for (value,) in tables.rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",)):
            self.facts["baseTimeNanoseconds"] = value
        for (value,) in tables.rows("TARGET_INFO_SYSTEM_ENV", ("value",), "name = 'Hostname'"):
            self.facts["host_name"] = value
        process = self._process(tables)
        whole = 0
        for table, category in _DEVICE.items():
            for rows in tables.blocks(table, (*_COLUMNS, *_MORE[category]), process):
                events = [_device_event(category, row, tables.labels) for row in rows]
                whole += len(events) * (category == "graph")
                yield [one for one in events if one["dur"] or category != "graph"]  # a graph without times has zeros
        if whole:
            self.notes.append(
                f"{self.path} has {whole:,} CUDA graphs that were traced as a whole: their collectives count as computing; "
                "record with --cuda-graph-trace=node to see them"
            )
        columns = ("start", "end", "globalTid", "correlationId", "nameId")
        for rows in tables.blocks("CUPTI_ACTIVITY_KIND_RUNTIME", columns, process):
            yield [
                _event("cuda_runtime", _VERSION.sub("", str(name)), start, end, thread, {"correlation": correlation})
                for start, end, thread, correlation, name in rows
            ]
        yield list(_ranges(tables, process))

    def _process(self, tables: _Tables) -> int | None:
        """The globalPid whose kernels are here; None where the export does not tell. SpecError if there are several."""
        found = {
            pid
            for table in _DEVICE
            if "globalPid" in tables.columns.get(table, ())
            for (pid,) in tables.rows(table, ("globalPid",), distinct=True)
            if isinstance(pid, int)
        }
        if len(found) > 1:
            raise SpecError(
                f"--trace {self.path} has kernels of {len(found)} processes: record each rank in a file of its own, such as "
                "`torchrun --no-python … nsys profile -o rank%q{RANK} python train.py`"
            )
        if not found and not any(True for table in _DEVICE for _ in tables.rows(table, ("start",), "1 LIMIT 1")):
            raise SpecError(
                f"--trace {self.path} has no kernels: record with `nsys profile --trace=cuda,nvtx`, while the program computes"
            )
        return found.pop() if found else None


_DEVICE = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernel",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "gpu_memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "gpu_memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graph",
}
_COLUMNS = ("start", "end", "deviceId", "streamId", "correlationId")
_MORE = {
    "kernel": ("demangledName",),
    "gpu_memcpy": ("bytes", "copyKind", "srcKind", "dstKind"),
    "gpu_memset": ("bytes",),
    "graph": ("graphId",),
}
_NAMES = ("nameId", "demangledName", "textId")
"""columns that are keys of StringIds"""


class _Tables:
    """The tables of an export, of which any table and column may be absent."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self.columns = {
            name: {column for (column,) in database.execute("SELECT name FROM pragma_table_info(?)", (name,))} for name in names
        }
        self._strings = dict(self.rows("StringIds", ("id", "value")))
        self.labels = dict(self.rows("ENUM_CUDA_MEM_KIND", ("id", "label")))
        """of memory: Pageable, Pinned, Device"""

    def rows(self, table: str, columns: tuple[str, ...], where: str = "1", distinct: bool = False) -> Iterator[tuple[Any, ...]]:
        """Nothing where the table is absent, NULL for absent columns. Names of tables and columns are ours, not the file's."""
        if known := self.columns.get(table):
            listed = ", ".join(f'"{one}"' if one in known else "NULL" for one in columns)
            yield from self._database.execute(f"SELECT {'DISTINCT ' * distinct}{listed} FROM {table} WHERE {where}")

    def blocks(self, table: str, columns: tuple[str, ...], process: int | None) -> Iterator[list[list[Any]]]:
        """With strings instead of their keys, and only of this process where rows tell theirs."""
        known = self.columns.get(table, set())
        where = "1"
        if process is not None and {"globalPid", "globalTid"} & known:
            where = f"globalPid = {process:d}" if "globalPid" in known else f"(globalTid & {_PROCESS}) = {process & _PROCESS}"
        names = [place for place, column in enumerate(columns) if column in _NAMES]
        block = []
        for row in self.rows(table, columns, where):
            values = list(row)
            for place in names:
                values[place] = self._strings.get(values[place])
            block.append(values)
            if len(block) == ROWS:
                yield block
                block = []
        yield block


def _event(category: str, name: str, start: Any, end: Any, thread: Any, facts: dict[str, Any]) -> dict[str, Any]:
    plain = isinstance(start, int) and isinstance(end, int)  # else the reader of events refuses it
    ts, lasts = (start / 1e3, (end - start) / 1e3) if plain else (start, end)
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": thread, "ts": ts, "dur": lasts, "args": facts}


def _device_event(category: str, row: list[Any], memory: dict[Any, Any]) -> dict[str, Any]:
    start, end, device, stream, correlation, *more = row
    facts = {"correlation": correlation}
    if category == "gpu_memcpy":
        size, kind, source, target = more
        ends = [str(memory.get(one, "Unknown")).split(" ")[0] for one in (source, target)]
        name, facts["bytes"] = f"Memcpy {_COPIES.get(kind, 'other')} ({ends[0]} -> {ends[1]})", size
    elif category == "gpu_memset":
        name, facts["bytes"] = "Memset", more[0]
    elif category == "graph":
        name = f"CUDA graph {more[0]}"
    else:
        name = str(more[0] or "unnamed kernel")
    return {**_event("kernel" if category == "graph" else category, name, start, end, stream, facts), "pid": device}


def _ranges(tables: _Tables, process: int | None) -> Iterator[dict[str, Any]]:
    """NVTX ranges that have ended; those that count steps are named as Kineto's."""
    columns = ("start", "end", "globalTid", "text", "textId")
    found = []
    for rows in tables.blocks("NVTX_EVENTS", columns, process):
        for start, end, thread, text, by_id in rows:
            name = text if isinstance(text, str) else by_id
            if isinstance(name, str) and isinstance(start, int) and isinstance(end, int) and start <= end:  # marks have none
                found.append((start, end, thread, _AUTOGRAD.sub("", name)))
    found.sort(key=lambda one: (one[0], -one[1]))
    steps: list[tuple[int, str | None]] = []
    until = -(2**63)
    for place, (start, end, _, name) in enumerate(found):
        if start >= until and (number := _STEP.match(name)) is not None:
            steps.append((place, number[1]))
            until = end  # a range inside a step is none
    numbers = [number for _, number in steps]
    counted = None not in numbers and len(set(numbers)) == len(numbers)
    named = {place: f"ProfilerStep#{number if counted else at}" for at, (place, number) in enumerate(steps)}
    for place, (start, end, thread, name) in enumerate(found):
        facts, category = {}, "user_annotation"
        if (call := _NCCL.match(name)) is not None:
            category, name, facts = "cpu_op", f"nccl:{name}", {"Collective name": call[1]}
        elif _OPERATOR.match(name):
            category = "cpu_op"
        yield _event(category, named.get(place, name), start, end, thread, facts)
