"""Read the traces of a large job: seconds and memory of `ultrascale profile --trace` for 64 ranks with 20,000 kernels each.

There is no such cluster here, so the traces are written by this script with the events, fields and sizes of Kineto's: a
transformer with 8 tensor-parallel and 8 data-parallel ranks, one of them slow.

    python benchmarks/traces.py --ranks 64 --kernels 20000
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

from ultrascale import __version__

TP, SLOW, SLOWDOWN = 8, 11, 1.15
KERNEL_US, COLLECTIVE_EVERY = 40.0, 60
KERNEL = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn_align8>"
DETAILS = {
    "queued": 0, "device": 0, "context": 1, "registers per thread": 230, "shared memory": 98304, "blocks per SM": 3.87,
    "warps per SM": 31.03, "grid": [128, 4, 1], "block": [256, 1, 1], "est. achieved occupancy %": 48,
}  # fmt: skip


def collectives(ranks: int, kernels: int) -> dict[int, list[tuple[float, float]]]:
    """Start and end of every collective of every rank, on one clock: ranks leave together."""
    rng = random.Random(0)
    now = dict.fromkeys(range(ranks), 0.0)
    found: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(ranks)}
    for number in range(kernels // COLLECTIVE_EVERY):
        for rank in range(ranks):
            now[rank] += COLLECTIVE_EVERY * KERNEL_US * (SLOWDOWN if rank == SLOW else 1.0) * rng.uniform(0.99, 1.01)
        groups = _groups(ranks, number)
        for group in groups:
            end = max(now[rank] for rank in group) + 150.0
            for rank in group:
                found[rank].append((now[rank], end))
                now[rank] = end
    return found


def _groups(ranks: int, number: int) -> list[list[int]]:
    """Every eighth collective is of the data ranks, all others of the tensor ranks."""
    if number % 8 == 7:
        return [list(range(place, ranks, TP)) for place in range(TP)]
    return [list(range(first, first + TP)) for first in range(0, ranks, TP)]


def events(rank: int, kernels: int, steps: int, times: list[tuple[float, float]], clock: float) -> Iterator[dict[str, object]]:
    period = times[-1][1] + 500.0
    correlation = 0
    for step in range(steps):
        zero = clock + step * period
        yield _event("user_annotation", f"ProfilerStep#{step + 3}", zero - 400, period, 100, 1, {"External id": step})
        last = zero
        for number, (start, end) in enumerate(times):
            each = (zero + start - last) / COLLECTIVE_EVERY
            for place in range(COLLECTIVE_EVERY):
                correlation += 1
                at = last + place * each
                launched = at - 300
                yield _event(
                    "cpu_op", "aten::mm", launched - 6, 12, 100, 1, {"External id": correlation, "Ev Idx": correlation}
                )
                yield _event("cpu_op", "aten::linear", launched - 8, 16, 100, 1, {"External id": correlation, "Ev Idx": 1})
                yield _event("cuda_runtime", "cudaLaunchKernel", launched, 4, 100, 1,
                             {"External id": correlation, "cbid": 211, "correlation": correlation})  # fmt: skip
                yield _event("kernel", KERNEL, at, each - 1, 0, 7,
                             {"External id": correlation, **DETAILS, "stream": 7, "correlation": correlation})  # fmt: skip
                yield _arrow(correlation, launched, 100, 1)
                yield {**_arrow(correlation, at, 0, 7), "ph": "f", "bp": "e"}
            correlation += 1
            launched = last - 200
            data = number % 8 == 7
            group = {
                "Collective name": "allreduce", "In msg nelems": 33554432, "Out msg nelems": 33554432, "Group size": 8,
                "dtype": "BFloat16", "Process Group Name": ("dp" if data else "tp") + str(rank % TP if data else rank // TP),
                "Process Group Description": "mesh_dp" if data else "mesh_tp",
            }  # fmt: skip
            yield _event("cuda_runtime", "cudaLaunchKernelExC", launched, 5, 100, 1, {"correlation": correlation})
            yield _event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", zero + start,
                         end - start, 0, 20, {**DETAILS, "stream": 20, "correlation": correlation, **group})  # fmt: skip
            last = zero + end


def _event(cat: str, name: str, ts: float, dur: float, pid: int, tid: int, args: dict[str, object]) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": round(ts, 3), "dur": round(dur, 3), "args": args}


def _arrow(number: int, ts: float, pid: int, tid: int) -> dict[str, object]:
    """The start of Kineto's arrow from a launch to its kernel."""
    return {"ph": "s", "id": number, "pid": pid, "tid": tid, "ts": round(ts, 3), "cat": "ac2g", "name": "ac2g"}


def write(job: tuple[Path, int, int, int, int, list[tuple[float, float]]]) -> int:
    folder, rank, ranks, kernels, steps, times = job
    listed = [{"pg_name": f"tp{rank // TP}", "pg_desc": "mesh_tp", "ranks": list(range(rank // TP * TP, rank // TP * TP + TP))}]
    listed.append({"pg_name": f"dp{rank % TP}", "pg_desc": "mesh_dp", "ranks": list(range(rank % TP, ranks, TP))})
    head = {"schemaVersion": 1, "host_name": f"node{rank // 8}", "baseTimeNanoseconds": 1_790_000_000_000_000_000,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks, "pg_config": listed}}  # fmt: skip
    clock = 5_000_000.0 + 7_000.0 * (rank // 8)  # nodes' clocks differ by 7 ms each
    text = json.dumps({**head, "traceEvents": list(events(rank, kernels, steps, times, clock))}, indent=1)
    (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(text.encode(), 5))
    return len(text)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--ranks", type=int, default=64)
    options.add_argument("--kernels", type=int, default=20_000, help="of each rank, over all steps")
    options.add_argument("--steps", type=int, default=2)
    options.add_argument("--keep", type=Path, help="write the traces here, and leave them")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        each = given.kernels // given.steps
        times = collectives(given.ranks, each)
        jobs = [(folder, rank, given.ranks, each, given.steps, times[rank]) for rank in range(given.ranks)]
        with Pool() as pool:
            size = sum(pool.imap_unordered(write, jobs))
        packed = sum(path.stat().st_size for path in folder.glob("*.gz"))
        page, merged = (Path(temporary) / f"page{end}" for end in (".html", ".perfetto.json.gz"))
        command = [sys.executable, "-m", "ultrascale", "profile", "--trace", str(folder), "-o", str(page)]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            printed = process.stdout.read() if process.stdout else ""
            _, status, used = os.wait4(process.pid, 0)  # its readers too
            process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
        if process.returncode:
            raise SystemExit(process.returncode)
        from plotly.offline import get_plotlyjs

        data = page.stat().st_size - len(get_plotlyjs().encode())
        print(printed[-1500:])
        print(
            f"ultrascale {__version__}, Python {platform.python_version()}, {os.cpu_count()} cores: {given.ranks} traces, "
            f"{size / 1e9:.2f} GB of JSON ({packed / 1e6:,.0f} MB packed), {took:.1f} s "
            f"({used.ru_utime + used.ru_stime:.1f} s of the processor, load {os.getloadavg()[0]:.1f}), largest process "
            f"{used.ru_maxrss / 2**20:.2f} GiB, page "
            f"{data / 1e3:,.0f} kB beside Plotly, merged trace {merged.stat().st_size / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
