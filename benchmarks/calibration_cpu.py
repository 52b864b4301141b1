"""Small models on this machine's CPU, six to calibrate with and twenty to judge by: `python benchmarks/calibration_cpu.py`.

Six runs are chosen to identify the constants, twenty others are drawn at random by `--seed` (models, sequence lengths,
micro-batches, accumulation, recomputation; with `--processes 2` also what cuts them), all before any was measured.

Each run is `ultrascale train` in a fresh process once, which leaves its plan and its memory. Its time is taken in `--turns`: a
machine that is shared drifts, as neighbours want its caches and memory, and the same step takes up to twice as long from one
second to the next. So one process holds the engines of all runs, and in a turn the machine's rates are measured and every
engine takes a few steps, the first of which does not count, in an order that is turned: what slows a run slows the others and
the rates. Of a run and of a rate alike the fastest counts, for runs to fit and runs to judge by, and none is left out: that is
what the machine gives when nobody else wants it. In two sets of 30 and 40 turns the fastest of 26 runs were 3.6 % apart, as
standard deviations go, their medians 13 %. `--out` keeps everything; what is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import calibration
from ultrascale.launch import cpu_rates, launcher, local
from ultrascale.launch.cpu_rates import LinkRate
from ultrascale.launch.machine import cpu_cluster, detect, measure_cpu, memory_bytes
from ultrascale.specs import folders
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.files import read_mapping
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan, job_to_mapping
from ultrascale.train import import_torch
from ultrascale.train.request import Overrides, Request, from_model

SEED, OTHERS, TURNS = 20, 20, 40
STEPS = 4  # of the run that leaves its plan and its memory
EACH_S, MOST = 0.25, 4  # steps of a turn that count: about so long, and no more than that
# Wider heads and a vocabulary of some thousands, for a third to half of a second a step.
SMALL = Model(name="small", layers=4, hidden=512, heads=8, kv_heads=4, ffn=1536, vocab=4096, max_positions=2048)
MODELS = {"tiny": Model.load("tiny"), "mini": Model.load("mini"), "small": SMALL}
MOST_TOKENS = {"tiny": 4096, "mini": 4096, "small": 1024}  # of a step, which is to take less than a second


class RunShape(NamedTuple):
    model: str
    seq: int
    mbs: int
    gas: int = 1
    recompute: str = "none"
    cut: str = ""
    """a further word of the layout, such as tp=2"""

    @property
    def name(self) -> str:
        return f"{self.model}-s{self.seq}-m{self.mbs}-g{self.gas}-{self.recompute}{f'-{self.cut}' if self.cut else ''}"


# Matmuls; long rows of narrow heads, where softmax is all; operators, with hardly a token; a vocabulary; and what is computed
# again, with few tokens and with more.
TO_FIT = (
    RunShape("mini", 256, 4, 2),
    RunShape("tiny", 1024, 1, 2),
    RunShape("tiny", 64, 1, 4),
    RunShape("small", 256, 2, 1),
    RunShape("tiny", 256, 4, 2, "full"),
    RunShape("mini", 512, 1, 2, "selective"),
)
# Matmuls; softmax; operators; a link by many transfers of few bytes, by some of more, and by weights.
TO_FIT_IN_TWO = (
    RunShape("mini", 256, 4, 2, cut="dp=2"),
    RunShape("tiny", 512, 4, 2, cut="dp=2"),
    RunShape("tiny", 128, 2, 2, "full", cut="pp=2"),
    RunShape("tiny", 128, 1, 4, cut="tp=2"),
    RunShape("mini", 256, 4, 2, cut="tp=2"),
    RunShape("mini", 256, 4, 2, cut="zero=3"),
)
CUTS = ("dp=2", "tp=2", "pp=2", "zero=1", "zero=3")


def others(processes: int, seed: int) -> list[RunShape]:
    """Models in turn, everything else at random."""
    rng, found = random.Random(seed), list[RunShape]()
    while len(found) < OTHERS:
        name = list(MODELS)[len(found) % len(MODELS)]
        seq, mbs, gas = rng.choice((64, 128, 256, 512, 1024)), rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 4))
        recompute = rng.choice(("none", "none", "selective", "full"))
        cut = rng.choice(CUTS) if processes == 2 else ""
        one = RunShape(name, seq, mbs, gas, recompute, cut)
        fills = cut != "pp=2" or gas > 1  # a pipeline
        if fills and 256 <= seq * mbs * gas <= MOST_TOKENS[name] and one not in (*to_fit(processes), *found):
            found.append(one)
    return found


def to_fit(processes: int) -> tuple[RunShape, ...]:
    return TO_FIT_IN_TWO if processes == 2 else TO_FIT


def request(one: RunShape, processes: int, steps: int) -> Request:
    words = [f"job.seq={one.seq}", f"layout.mbs={one.mbs}", f"layout.gas={one.gas}", f"layout.recompute={one.recompute}"]
    words += [f"layout.{one.cut}"] if one.cut else []
    words += [f"train.steps={steps}", "train.data=synthetic", "checkpoint.save=false"]
    return from_model(MODELS[one.model], Overrides.parse(words), processes, precision="fp32")


def train(one: RunShape, folder: Path, predict: Cluster) -> None:
    """In fresh processes, as a user's run is."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was ended
    processes = predict.gpus
    requested = request(one, processes, STEPS)
    if processes > 1:
        launcher.train(requested, folder, processes, predict, quiet=True)
    else:
        local.run(_rank, 1, requested, folder, predict)


def _rank(_: int, __: int, ___: str, requested: Request, folder: Path, predict: Cluster) -> None:
    launcher.train(requested, folder, None, predict, quiet=True)


def in_turns(rank: int, world: int, store: str, wanted: Sequence[RunShape], turns: int) -> dict[str, Any]:
    """Seconds of every action that measures a rate, and of every run's steps, a list of each turn."""
    import torch.distributed as dist

    from ultrascale.data.corpora import corpus
    from ultrascale.launch.rank_info import RankInfo
    from ultrascale.launch.rendezvous import join
    from ultrascale.parallel.mesh import Mesh
    from ultrascale.train.build import build_engine
    from ultrascale.train.data import Batches
    from ultrascale.train.engine import Engine

    def build(one: RunShape) -> Engine:
        requested = request(one, world, 1)
        job, layout, training = requested.job, requested.layout, requested.training
        batches = Batches(corpus(training, job.model.vocab), job.seq, layout.mbs * layout.dp * layout.gas, training.seed)
        return build_engine(job, Mesh.build(layout, job.model.kv_heads, rank), training, batches)

    join(RankInfo(rank, world, rank, world, store), 600)
    if world == 1:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)  # rates are measured between barriers
    engines = {one.name: build(one) for one in wanted}
    counts = dict.fromkeys(engines, 1)
    todo = cpu_rates.actions()
    measured: dict[str, Any] = {"rates": [], "links": [], "steps": {name: [] for name in engines}}
    names, began = list(engines), time.monotonic()
    for turn in range(turns + 1):
        cpu_rates.time_actions(todo)  # caches and heap were another's
        took = cpu_rates.time_actions(todo)
        link = [asdict(cpu_rates.measure_link())] if world > 1 else []
        if turn:  # the first warms up, and sets how many steps of a run count
            measured["rates"].append(took)
            measured["links"] += link
        first = turn * len(names) // (turns + 1)
        for name in (*names[first:], *names[:first]):
            steps = []
            for number in range(1 + counts[name]):
                dist.barrier()
                start = time.perf_counter()
                engines[name].step(turn * (1 + MOST) + number)
                steps.append(time.perf_counter() - start)
            if turn:
                measured["steps"][name].append(steps[1:])
            else:
                counts[name] = _agreed(max(1, min(MOST, round(EACH_S / steps[-1]))))
        if rank == 0:
            print(f"turn {turn} of {turns}, {time.monotonic() - began:.0f} s", flush=True)
    dist.destroy_process_group()
    return measured


def _agreed(count: int) -> int:
    """The count of rank 0, for all ranks: they step together."""
    import torch.distributed as dist

    agreed = [count]
    dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def machine(everyone: Sequence[dict[str, Any]]) -> Cluster:
    """All processes in the mean, as `ultrascale.launch.machine` has it."""

    each = []
    for rank_times in everyone:
        took = {name: min(turn[name] for turn in rank_times["rates"]) for name in rank_times["rates"][0]}
        each.append(asdict(cpu_rates.from_times(took)))
    links = everyone[0]["links"]
    link = LinkRate(max(link["bytes_s"] for link in links), min(link["latency_s"] for link in links))
    together = cpu_rates.CPURates(**{name: mean(one[name] for one in each) for name in each[0]})
    return cpu_cluster(len(everyone), together, link, memory_bytes())


def gather(wanted: Sequence[RunShape], out: Path, everyone: Sequence[dict[str, Any]], fitted: int) -> Path:
    """A line for each run on the machine as it was measured in all turns, with each turn's mean step."""
    file, lines, cluster = out / "runs.jsonl", [], machine(everyone)
    for index, one in enumerate(wanted):
        plan = Plan.load(out / one.name / folders.PLAN)
        measured = read_mapping(out / one.name / folders.MEASUREMENT, "measurement")
        turns = everyone[0]["steps"][one.name]
        line = {
            "run": one.name,
            "use": "fit" if index < fitted else "other",
            "job": job_to_mapping(plan.job.changed(cluster=cluster)),
            "layout": plan.layout.model_dump(mode="json", exclude_defaults=True),
            "measurement": {**measured, "step_time_s": min(chain(*turns))},
            "steps_s": [round(mean(turn), 6) for turn in turns],
        }
        lines.append(json.dumps(line))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/calibration-cpu"))
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw of others")
    parser.add_argument("--turns", type=int, default=TURNS)
    options = parser.parse_args()
    import_torch()
    fit = to_fit(options.processes)
    wanted = [*fit, *others(options.processes, options.seed)]
    for number, one in enumerate(wanted, 1):
        if not (options.out / one.name / folders.MEASUREMENT).exists():
            train(one, options.out / one.name, detect(options.processes))
            print(f"{number} of {len(wanted)}: {one.name}", flush=True)
    file = options.out / "turns.json"
    if not file.exists():
        measured = local.run(in_turns, options.processes, wanted, options.turns)
        if options.processes == 1:  # it sends nothing; a plan of more processes on this cluster would
            measured[0]["links"] = [asdict(measure_cpu(1, 240.0)[1])]
        file.write_text(json.dumps(measured), encoding="utf-8")
    everyone = json.loads(file.read_text(encoding="utf-8"))
    calibration.show(gather(wanted, options.out, everyone, len(fit)), draws=0)


if __name__ == "__main__":
    main()
