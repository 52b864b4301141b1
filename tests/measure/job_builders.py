"""Traces of whole jobs with chosen numbers: every wait, offset and bubble is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trace_builders import Device, span, step, write

from ultrascale.measure import trace_job
from ultrascale.measure.trace_job import JobAnalysis


def group(name: str, description: str, size: int, kind: str = "allreduce", **more: Any) -> dict[str, Any]:
    facts = {"Collective name": kind, "Process Group Name": name, "Process Group Description": description, "Group size": size}
    return {**facts, "In msg nelems": 1000, "dtype": "Float", **more}


def rank_of(
    folder: Path,
    rank: int,
    events: list[dict[str, Any]],
    clock: float = 0.0,
    world: int = 2,
    rate: float = 1.0,
    **groups: Sequence[int],
) -> Path:
    """A rank's trace on a machine whose clock is ahead by `clock` and runs `rate` times as fast; groups by name."""
    listed = [{"pg_name": name, "pg_desc": name, "ranks": list(ranks)} for name, ranks in groups.items()]
    shifted = [{**one, "ts": clock + rate * one["ts"], "dur": rate * one["dur"]} for one in events]
    folder.mkdir(exist_ok=True)
    info = {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": listed}
    return write(folder / f"rank{rank}.json", shifted, distributedInfo=info, host_name=f"node{rank}")


def data_parallel(
    folder: Path,
    late: dict[int, float],
    how: str,
    ranks: int = 3,
    steps: int = 4,
    clocks: Sequence[float] = (0, 0, 0),
    drift: float = 0.0,
    odd: bool = False,
) -> JobAnalysis:
    """Steps of 2,000 µs: a kernel of 600, an all-reduce that ends 100 after the last rank has come, the optimizer's 50.

    A rank comes later by computing for longer, by loading data first, or by launching its kernel late. Where the last rank is
    odd, its trace begins with another kernel, and its first all-reduce ends later than on the others.
    """
    for rank in range(ranks):
        gpu, marks = Device(), []
        for number in range(steps):
            zero, delay = 2000.0 * number, late.get(rank, 0.0)
            end = zero + 600 + max(late.values(), default=0.0) + 100
            marks.append(step(number, zero - 90, zero + 1900))
            begin, last = zero, zero + 600 + delay
            if how == "data loading" and delay:
                gpu.kernel(zero, zero + 1, launched=zero - 50)
                marks.append(span("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", zero + 1, zero + 1 + delay))
                begin = zero + 1 + delay
            elif how == "host" and delay:
                gpu.kernel(zero, zero + 1, launched=zero - 50)
                begin = zero + 1 + delay
            if odd and rank == ranks - 1 and number == 0:
                gpu.kernel(zero - 30, zero - 25, launched=zero - 60)
                end += 40
            gpu.kernel(begin, last, launched=begin - 20)
            gpu.collective(last, end, launched=begin - 10, **group("0", "mesh_dp", ranks))
            gpu.kernel(end, end + 50, launched=begin - 5, name="adam")
        rank_of(folder, rank, [*marks, *gpu.events], clocks[rank], ranks, 1 + drift * rank, **{"0": range(ranks)})
    return analysed(folder)


def analysed(folder: Path) -> JobAnalysis:
    return trace_job.analyse(trace_job.read([folder]), folder.name)
