"""Traces written by hand, in Kineto's format: every length is chosen, so that every answer is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HOST, MAIN, BACKWARD = 100, 1, 2
COMPUTE, NCCL = 7, 20


def event(cat: str, name: str, start: float, end: float, tid: Any = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": tid, "ts": start, "dur": end - start, "args": args}


def step(number: int, start: float, end: float) -> dict[str, Any]:
    return event("user_annotation", f"ProfilerStep#{number}", start, end)


def span(name: str, start: float, end: float, tid: Any = MAIN) -> dict[str, Any]:
    return event("user_annotation", name, start, end, tid)


def op(name: str, start: float, end: float, tid: Any = MAIN) -> dict[str, Any]:
    return event("cpu_op", name, start, end, tid)


class Device:
    """A GPU's events: every kernel with the host's launch of it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def kernel(
        self, start: float, end: float, launched: float, name: str = "gemm", stream: int = COMPUTE, tid: int = MAIN, **args: Any
    ) -> None:
        self._add("kernel", name, start, end, launched, stream, tid, **args)

    def collective(
        self, start: float, end: float, launched: float, kind: str = "AllReduce", tid: int = MAIN, **args: Any
    ) -> None:
        name = f"ncclDevKernel_{kind}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._add("kernel", name, start, end, launched, NCCL, tid, **args)

    def copy(self, start: float, end: float, launched: float, direction: str, size: int) -> None:
        self._add("gpu_memcpy", f"Memcpy {direction}", start, end, launched, COMPUTE, MAIN, bytes=size)

    def _add(self, cat: str, name: str, start: float, end: float, launched: float, stream: int, tid: int, **args: Any) -> None:
        self._correlation += 1
        details = {"stream": stream, "device": 0, "correlation": self._correlation, **args}
        self.events.append(
            event("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, tid, correlation=self._correlation)
        )
        self.events.append({**event(cat, name, start, end, stream), "pid": 0, "args": details})


def write(path: Path, events: list[dict[str, Any]], rank: int | None = None, **facts: Any) -> Path:
    if rank is not None:
        facts["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2, "pg_config": []}
    begin = {"ph": "M", "name": "process_name", "pid": HOST, "tid": 0, "ts": 0, "args": {"name": "python"}}
    text = json.dumps({"schemaVersion": 1, **facts, "traceEvents": [begin, *events], "traceName": path.name}, indent=1)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path
