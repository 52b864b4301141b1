"""What a checkpoint costs: how long training stands still for one that is written beside it, and for one it waits for.

    python benchmarks/checkpoint.py [--processes 2] [--folder runs]

Both are measured in one run, in turns, on the slowest rank; medians. `stands still` is the call that begins the copy and the
wait for it before the next update; `while writing` is the step during which copy and writing go on, beside an ordinary one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch._dynamo  # before the fork
import torch.distributed as dist
import torch.distributed.checkpoint
from rich.console import Console
from rich.table import Table

from ultrascale.data.corpora import corpus
from ultrascale.launch import local
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train.async_checkpoint import CheckpointManager
from ultrascale.train.build import build_engine
from ultrascale.train.data import Batches

TURNS = 5
SHAPES = {
    "mini": Model.load("mini"),
    "100M": Model(name="100M", layers=8, hidden=1024, heads=16, kv_heads=4, ffn=2816, vocab=8192),
}


def measure(rank: int, world: int, store: str, name: str, layout: Layout, folder: str) -> dict[str, float]:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    training = Training(steps=1000, data="synthetic")
    job = Job(model=SHAPES[name], cluster=Cluster.load(f"{world}xh100"), seq=64, batch_tokens=64 * world, precision="fp32")
    engine = build_engine(
        job, Mesh.build(layout, job.model.kv_heads, rank), training, Batches(corpus(training, job.model.vocab), 64, world, 0)
    )
    beside, waited = (
        CheckpointManager(engine, Path(folder) / name, Checkpointing(keep=1, background=background))
        for background in (True, False)
    )
    times_s: dict[str, list[float]] = {"plain": [], "waited": [], "still": [], "during": [], "written": []}
    number = 0

    def step(manager: CheckpointManager | None = None) -> tuple[float, float]:
        nonlocal number
        start = time.perf_counter()
        loss = engine.backward(engine.read(number))
        still = manager.wait_for_copy() if manager is not None else 0.0
        engine.update(number, loss)
        number += 1
        return time.perf_counter() - start, still

    step()
    for turn in range(TURNS + 1):  # the first makes the buffers, and counts nowhere
        plain, _ = step()
        start = time.perf_counter()
        waited.save(number)
        synchronous = time.perf_counter() - start
        step()
        start = time.perf_counter()
        still = beside.save(number)
        during, settled = step(beside)
        beside.finish()
        written = time.perf_counter() - start
        if turn:
            for key, value in (
                ("plain", plain),
                ("waited", synchronous),
                ("still", still + settled),
                ("during", during),
                ("written", written),
            ):
                times_s[key].append(value)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    return {key: statistics.median(values) for key, values in times_s.items()}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--folder", type=Path, default=Path("runs"))
    given = arguments.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    table = Table(title=f"checkpoints, {given.processes} processes, torch {torch.__version__}, CPU", title_justify="left")
    for column in (
        "model",
        "layout",
        "state",
        "synchronous",
        "stands still",
        "share",
        "until written",
        "step",
        "while writing",
    ):
        table.add_column(column, justify="left" if column in ("model", "layout") else "right")
    layouts = {"data": Layout(dp=given.processes), "ZeRO-3": Layout(dp=given.processes, zero=3)}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for name, model in SHAPES.items():
            for label, layout in layouts.items():
                ranks = local.run(measure, given.processes, name, layout, folder)
                worst = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
                table.add_row(
                    name,
                    label,
                    f"{12 * model.parameters / GIB:.2f} GiB",
                    f"{worst['waited'] * 1e3:,.0f} ms",
                    f"{worst['still'] * 1e3:,.1f} ms",
                    f"{worst['still'] / worst['waited']:.1%}",
                    f"{worst['written'] * 1e3:,.0f} ms",
                    f"{worst['plain'] * 1e3:,.0f} ms",
                    f"{worst['during'] * 1e3:,.0f} ms",
                )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
