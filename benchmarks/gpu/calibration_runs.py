"""Runs to calibrate with and to judge by: `python benchmarks/gpu/calibration_runs.py --out runs/calibration [--limit 440]`.

Six runs are chosen to identify the constants, twenty others are drawn at random (models of 0.1 to 3 billion parameters,
micro-batches, accumulation, recomputation, sequence lengths), all before any was measured. Each is `ultrascale train` in a
fresh process on one GPU and leaves a run's folder; `runs.jsonl` gathers them. The cluster of their plans is what
`ultrascale bench hardware` measures first. What is there already is not run again, and nothing starts after `--limit` seconds.

benchmarks/calibration.py prints what they tell; benchmarks/calibration_cpu.py is the same for a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # processes that warm caches side by side are enough of them

from ultrascale.cost.estimate import estimate
from ultrascale.cost.memory.states import fused_blocks_problem
from ultrascale.launch import launcher, local
from ultrascale.launch.machine import detect
from ultrascale.measure import bench_hardware as hardware
from ultrascale.specs import folders
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError
from ultrascale.specs.files import read_mapping
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan, job_to_mapping
from ultrascale.train import import_torch
from ultrascale.train.request import Overrides, Request, from_model

SEED = 20
OTHERS = 20
LONGEST_S, FULLEST_GIB = 0.8, 110  # of a step, by the estimate: the whole set is to take some minutes
TRAINED_S, FEWEST, MOST = 4.0, 14, 60  # steps that together take about so long
AT_ONCE = 13  # processes that fill compilers' caches side by side


class RunShape(NamedTuple):
    model: str
    seq: int
    mbs: int
    gas: int = 1
    recompute: str = "none"

    @property
    def name(self) -> str:
        return f"{self.model}-s{self.seq}-m{self.mbs}-g{self.gas}-{self.recompute}"


# What identifies the constants: launches, long rows, few and many tokens, matmuls alone, fp32 gradients, recomputation.
TO_FIT = (
    RunShape("smollm2-135m", 1024, 4),
    RunShape("smollm2-360m", 2048, 16),
    RunShape("llama-3.2-1b", 16384, 1),
    RunShape("smollm2-1.7b", 2048, 4, gas=4),
    RunShape("qwen2.5-1.5b", 4096, 4, recompute="selective"),
    RunShape("llama-3.2-3b", 4096, 2, recompute="full"),
)
SMALL = ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "llama-3.2-1b")
MODELS = (*SMALL, "smollm2-1.7b", "qwen2.5-1.5b", "llama-3.2-3b", "smollm3-3b")


def others(cluster: Cluster, seed: int) -> list[RunShape]:
    """Models in turn, everything else at random, as long as it fits and a step is short."""
    rng, found = random.Random(seed), list[RunShape]()
    while len(found) < OTHERS:
        seq = rng.choice((1024, 2048, 4096, 8192, 16384))
        mbs = rng.choice((4096, 8192, 16384, 32768)) // seq
        recompute, gas = rng.choice(("none", "selective", "full")), rng.choice((1, 1, 2, 4))
        one = RunShape(MODELS[len(found) % len(MODELS)], seq, mbs, gas, recompute)
        if mbs and not any(_same(one, other) for other in (*TO_FIT, *found)) and _short(one, cluster):
            found.append(one)
    return found


def _same(one: RunShape, other: RunShape) -> bool:
    """Fused blocks drop by themselves all that selective recomputation would: the two are one run."""
    cluster = Cluster.load("1xh200")
    if fused_blocks_problem(Job(model=Model.load(one.model), cluster=cluster, seq=one.seq, batch_tokens=one.seq)) is None:
        one, other = (each._replace(recompute=each.recompute.replace("selective", "none")) for each in (one, other))
    return one == other


def _short(one: RunShape, cluster: Cluster) -> bool:
    job = Job(model=Model.load(one.model), cluster=cluster, seq=one.seq, batch_tokens=one.seq * one.mbs * one.gas)
    expected = estimate(job, Layout(mbs=one.mbs, gas=one.gas, recompute=one.recompute))
    return expected.step_time_s < LONGEST_S and expected.peak_gib < FULLEST_GIB


def request(one: RunShape, steps: int, layers: int | None = None) -> Request:
    words = [f"job.seq={one.seq}", f"layout.mbs={one.mbs}", f"layout.gas={one.gas}", f"layout.recompute={one.recompute}"]
    words += [f"train.steps={steps}", "train.data=synthetic", "checkpoint.save=false"]
    model = Model.load(one.model)
    if layers is not None:
        model = model.model_copy(update={"layers": layers})
    return from_model(model, Overrides.parse(words), 1, precision="bf16")


def steps_for(step_s: float) -> int:
    return min(MOST, max(FEWEST, math.ceil(TRAINED_S / step_s)))


def train(one: RunShape, folder: Path, cluster: Cluster) -> None:
    """In a fresh process, as a user's run is."""
    requested = request(one, FEWEST).on_cluster(cluster)
    requested = request(one, steps_for(estimate(requested.job, requested.layout).step_time_s))
    local.run(_rank, 1, requested, folder, cluster)


def _rank(_: int, __: int, ___: str, requested: Request, folder: Path, cluster: Cluster) -> None:
    launcher.train(requested, folder, None, cluster, quiet=True)


def warm(wanted: Sequence[RunShape]) -> None:
    """Fills the compilers' caches: blocks of one layer are those of all, so that little memory lets many compile at once."""
    for at in range(0, len(wanted), AT_ONCE):
        some = wanted[at : at + AT_ONCE]
        local.run(_warm_rank, len(some), some)


def _warm_rank(rank: int, _: int, __: str, some: Sequence[RunShape]) -> None:
    from ultrascale.launch.rank import run_rank
    from ultrascale.launch.rank_info import RankInfo

    try:
        run_rank(request(some[rank], 2, layers=1), RankInfo(), None, None, quiet=True)
    except Exception as error:  # the run itself will say so
        print(f"{some[rank].name} did not warm up: {error!r:.200}", flush=True)


def measure(wanted: Sequence[RunShape], out: Path, cluster: Cluster, until: float) -> None:
    for number, one in enumerate(wanted, 1):
        folder = out / one.name
        if (folder / folders.MEASUREMENT).exists():
            continue
        if time.monotonic() > until:
            print(f"time is up: {len(wanted) - number + 1} runs are left; the same command goes on with them", flush=True)
            return
        began = time.monotonic()
        try:
            train(one, folder, cluster)
        except RunError as error:
            print(f"{one.name} failed: {str(error).splitlines()[-1]:.200}", flush=True)
            continue
        line = kept(folder, "fit" if one in wanted[:6] else "other")
        with (out / "runs.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        plan, measured = Plan.load(folder / folders.PLAN), Measurement.load(folder / folders.MEASUREMENT)
        print(
            f"{number:2} {one.name:44} {plan.estimate.step_time_s * 1e3:8.1f} ms predicted, {measured.step_time_s * 1e3:8.1f} "
            f"measured, {time.monotonic() - began:5.1f} s",
            flush=True,
        )


def kept(folder: Path, use: str) -> dict[str, Any]:
    """What a calibration needs of a run, and how long each of its steps took."""
    plan = Plan.load(folder / folders.PLAN)
    return {
        "run": folder.name,
        "use": use,
        "job": job_to_mapping(plan.job),
        "layout": plan.layout.model_dump(mode="json", exclude_defaults=True),
        "measurement": read_mapping(folder / folders.MEASUREMENT, "measurement"),
        "steps_s": [round(each, 6) for each in _steps(folder / folders.METRICS)],
    }


def _steps(metrics: Path) -> Iterator[float]:
    for line in metrics.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["step_time_s"]


def machine(out: Path) -> Cluster:
    file = out / "cluster.yaml"
    if not file.exists():
        hardware.measured(detect(1)).save(file)
    return Cluster.load(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/calibration"))
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw of others")
    parser.add_argument("--limit", type=float, default=1800, help="seconds after which no run starts")
    parser.add_argument("--only", type=int, help="so many of the runs, for a try")
    options = parser.parse_args()
    until = time.monotonic() + options.limit
    import_torch()
    options.out.mkdir(parents=True, exist_ok=True)
    cluster = machine(options.out)
    wanted = [*TO_FIT, *others(Cluster.load("1xh200"), options.seed)][: options.only]
    print(f"measured: {cluster.efficiency.model_dump(exclude_defaults=True)}", flush=True)
    began = time.monotonic()
    warm([one for one in wanted if not (options.out / one.name).exists()])
    print(f"caches are warm after {time.monotonic() - began:.0f} s", flush=True)
    measure(wanted, options.out, cluster, until)


if __name__ == "__main__":
    main()
