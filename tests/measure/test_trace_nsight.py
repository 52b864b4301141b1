"""SQLite exports of Nsight Systems, with the tables and columns of version 2025.3: read as the traces of Kineto are."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trace_builders import Device, step, write

from ultrascale.measure import trace_rank, trace_times
from ultrascale.specs.errors import SpecError

Run = Callable[..., tuple[int, str, str]]
PID, TID, STREAM, NCCL_STREAM = 41 << 24, (41 << 24) + 7, 7, 20
TIMES = "start INTEGER, end INTEGER"
DEVICE = f"{TIMES}, deviceId INTEGER, contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER"
SCHEMA = f"""
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ENUM_CUDA_MEM_KIND (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({DEVICE}, demangledName INTEGER, shortName INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY ({DEVICE}, bytes INTEGER, copyKind INTEGER, srcKind INTEGER, dstKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ({DEVICE}, graphId INTEGER, graphExecId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME
  ({TIMES}, eventClass INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
CREATE TABLE NVTX_EVENTS
  ({TIMES}, eventType INTEGER, text TEXT, globalTid INTEGER, textId INTEGER, domainId INTEGER);
INSERT INTO ENUM_CUDA_MEM_KIND VALUES (0, 'CUDA_MEMOPR_MEMORY_KIND_PAGEABLE', 'Pageable');
INSERT INTO ENUM_CUDA_MEM_KIND VALUES (2, 'CUDA_MEMOPR_MEMORY_KIND_DEVICE', 'Device');
INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1790000000000000000, '', '');
INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (0, '', 'Hostname', 0, 'node7');
"""


class Export:
    """Times are microseconds, as in trace_builders; the file has nanoseconds."""

    def __init__(self, path: Path) -> None:
        self.database = sqlite3.connect(path)
        self.database.executescript(SCHEMA)
        self._strings: dict[str, int] = {}
        self._correlation = 0

    def insert(self, table: str, **values: Any) -> None:
        times = {name: round(values[name] * 1000) for name in ("start", "end") if isinstance(values.get(name), int | float)}
        values |= times
        marks = ", ".join("?" * len(values))
        self.database.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))

    def text(self, value: str) -> int:
        if value not in self._strings:
            self._strings[value] = len(self._strings)
            self.database.execute("INSERT INTO StringIds VALUES (?, ?)", (self._strings[value], value))
        return self._strings[value]

    def launch(self, at: float, name: str = "cudaLaunchKernel_v7000") -> int:
        self._correlation += 1
        call = {"start": at, "end": at + 1, "globalTid": TID, "correlationId": self._correlation, "nameId": self.text(name)}
        self.insert("CUPTI_ACTIVITY_KIND_RUNTIME", **call)
        return self._correlation

    def device(self, table: str, start: float, end: float, launched: float, stream: int = STREAM, **more: Any) -> None:
        where = {"deviceId": 0, "streamId": stream, "globalPid": PID, "correlationId": self.launch(launched)}
        self.insert(f"CUPTI_ACTIVITY_KIND_{table}", start=start, end=end, **where, **more)

    def kernel(self, start: float, end: float, launched: float, name: str = "gemm", stream: int = STREAM) -> None:
        self.device("KERNEL", start, end, launched, stream, demangledName=self.text(name))

    def collective(self, start: float, end: float, launched: float, kind: str) -> None:
        name = f"ncclDevKernel_{kind}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self.kernel(start, end, launched, name, NCCL_STREAM)
        self.range(f"nccl{kind}", launched - 1, launched + 2)

    def range(self, name: str, start: float, end: float | None, thread: int = TID) -> None:
        self.insert("NVTX_EVENTS", start=start, end=end, eventType=59, textId=self.text(name), globalTid=thread)

    def close(self) -> None:
        self.database.commit()
        self.database.close()


def two_steps(path: Path, name: str = "step {}") -> Path:
    """Steps of 1,000 µs: a gemm of 300, an all-reduce of 200 behind it, of which 50 overlap with a kernel of 100."""
    export = Export(path)
    for number in range(2):
        zero = 1000.0 * number
        export.range(name.format(number), zero, zero + 990)
        export.kernel(zero + 100, zero + 400, launched=zero + 50)
        export.collective(zero + 400, zero + 600, launched=zero + 60, kind="AllReduce")
        export.kernel(zero + 550, zero + 650, launched=zero + 70)
        export.range("Optimizer.step#AdamW.step, op_id = 4", zero + 69, zero + 75)
    export.close()
    return path


def test_an_export_reads_as_the_same_trace_of_kineto(tmp_path: Path) -> None:
    """Only what the export does not have differs: the name of a process group, and the rank."""
    gpu, marks = Device(), []
    for number in range(2):
        zero = 1000.0 * number
        marks.append(step(number, zero, zero + 990))
        gpu.kernel(zero + 100, zero + 400, launched=zero + 50)
        gpu.collective(zero + 400, zero + 600, launched=zero + 60)
        gpu.kernel(zero + 550, zero + 650, launched=zero + 70)
        marks.append({**step(number, zero + 69, zero + 75), "name": "Optimizer.step#AdamW.step"})
    expected = trace_times.analyse(trace_rank.read(write(tmp_path / "rank3.json", [*marks, *gpu.events])))
    trace = trace_rank.read(two_steps(tmp_path / "rank3.sqlite"))
    found = trace_times.analyse(trace)
    for name in ("rank", "device", "steps", "techniques", "launches", "copies", "reductions"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.steps[0].exchanging_s, found.steps[0].both_s) == (pytest.approx(150e-6), pytest.approx(50e-6))
    assert (trace.facts["host_name"], trace.origin_us) == ("node7", 1.79e15)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("iteration_{}", ["ProfilerStep#0", "ProfilerStep#1"]),
        ("ProfilerStep#{}, op_id = 12", ["ProfilerStep#0", "ProfilerStep#1"]),
        ("train_step", ["ProfilerStep#0", "ProfilerStep#1"]),
        ("step 7", ["ProfilerStep#0", "ProfilerStep#1"]),
        ("Step 1{}", ["ProfilerStep#10", "ProfilerStep#11"]),
        ("forward {}", ["the whole trace"]),
        ("optimizer_step", ["the whole trace"]),
    ],
)
def test_ranges_that_count_are_steps(tmp_path: Path, name: str, steps: list[str]) -> None:
    found = trace_times.analyse(trace_rank.read(two_steps(tmp_path / "a.sqlite", name)))
    assert [one.name for one in found.steps] == steps


def test_copies_graphs_and_ranges_inside_a_step(tmp_path: Path, run: Run) -> None:
    export = Export(tmp_path / "rank0.sqlite")
    export.range("step 1", 0, 1000)
    export.range("step 5", 10, 20)
    export.range("a mark", 15, None)
    export.range("tensor all_reduce", 195, 215)
    export.range("aten::mm, seq = 40, op_id = 3", 30, 40)
    export.device("MEMCPY", 100, 200, 90, bytes=2**21, copyKind=1, srcKind=0, dstKind=2)
    export.collective(300, 400, launched=200, kind="AllReduce")
    export.device("GRAPH_TRACE", 400, 700, 210, graphId=3)
    export.device("GRAPH_TRACE", 0, 0, 220, graphId=4)
    for number in range(4):
        export.launch(500 + number, "cudaStreamSynchronize_v3020")
    export.range("step 2", 90, 95, thread=(42 << 24) + 1)  # another process: a data loader
    export.close()
    trace = trace_rank.read(tmp_path / "rank0.sqlite")
    assert {one.name for one in trace.ranges} == {"ProfilerStep#1", "step 5", "tensor all_reduce"}
    found = trace_times.analyse(trace)
    (step_,) = found.steps
    assert (step_.step_s, step_.computing_s, step_.exchanging_s) == tuple(map(pytest.approx, (600e-6, 400e-6, 100e-6)))
    assert found.techniques[0].technique == "tensor", "by the range that holds the launch"
    assert found.copies is not None
    assert (found.copies.pageable_bytes, found.copies.waits) == (2**21, 4)
    code, printed, err = run("profile", "--trace", tmp_path / "rank0.sqlite", "--json", tmp_path / "out.json")
    assert code == 0, err
    notes = json.loads((tmp_path / "out.json").read_text())["notes"]
    assert "2 CUDA graphs that were traced as a whole" in notes[0]
    assert "pageable memory" in printed


def test_what_is_no_whole_export_of_one_rank_is_refused(tmp_path: Path, run: Run) -> None:
    def refused(*words: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        code, _, err = run("profile", "--trace", *words, "-o", tmp_path / "page.html")
        assert (code, "Traceback" in err) == (2, False)
        assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
        return " ".join(err.split())

    whole = two_steps(tmp_path / "rank0.sqlite")
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(whole.read_bytes()[:-4096])
    assert "(it is cut off: " in refused(cut)
    cut.write_bytes(whole.read_bytes()[:4096] + b"\xff" * (whole.stat().st_size - 4096))
    assert "is no whole export of Nsight Systems" in refused(cut)
    cut.write_text("id,name\n")
    assert "does not begin like SQLite" in refused(cut)
    cut.unlink()
    sqlite3.connect(cut).execute("CREATE TABLE a (b)").connection.close()
    assert "no table StringIds" in refused(cut)
    for table, values, why in (
        ("GRAPH_TRACE", {"start": 1, "end": 2, "globalPid": 7 << 24}, "kernels of 2 processes"),
        ("KERNEL", {"start": "now", "end": 2, "globalPid": PID}, "'now' but must be a number of microseconds"),
        ("KERNEL", {"start": 5, "end": 2, "globalPid": PID}, "is -0.003 but must be a number of microseconds"),
    ):
        path = two_steps(tmp_path / "bad.sqlite")
        with sqlite3.connect(path) as database:
            names = ", ".join(values)
            database.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_{table} ({names}) VALUES (?, ?, ?)", tuple(values.values()))
        assert why in refused(path)
        path.unlink()
    Export(tmp_path / "empty.sqlite").close()
    assert "has no kernels: record with `nsys profile --trace=cuda,nvtx`" in refused(tmp_path / "empty.sqlite")
    (tmp_path / "reports").mkdir()
    report = tmp_path / "reports" / "rank0.nsys-rep"
    report.write_bytes(b"")
    for given in ((report,), (tmp_path / "reports",), (whole, report)):
        assert "`nsys export --type sqlite -o rank0.sqlite rank0.nsys-rep`" in refused(*given)
    other = write(tmp_path / "rank1.json", [step(0, 0, 10)])
    assert "name those of one tool" in refused(whole, other)
    with pytest.raises(SpecError, match="does not exist"):
        trace_rank.read(tmp_path / "none.sqlite")
