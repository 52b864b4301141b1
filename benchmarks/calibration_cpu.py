"""Small models on this machine's CPU, six to calibrate with and twenty to judge by: `python benchmarks/calibration_cpu.py`.

Six runs are chosen to tell constants apart, twenty others are drawn at random by `--seed` (models, sequence lengths,
micro-batches, accumulation, recomputation; with `--processes 2` also what cuts them), all before any was measured.

A machine that is shared drifts: neighbours want its caches, its memory and the other half of its cores, and the same step takes
up to twice as long from one second to the next. So everything is measured in `--rounds`: a round measures the machine's rates
once and makes every run once, for a second or two, in an order that is turned from round to round. Of a run the first decile of
its steps in all rounds counts, of each rate the fastest: what the machine gives when nobody else wants it. (Of 26 other runs in
four rounds, the deciles of two rounds and of the other two differed by 11 % as standard deviations go, the fastest medians by
17 %.) Runs to fit and runs to judge by are treated alike, and none is left out. `--out` keeps everything; what is there is not
measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import NamedTuple

import calibration
from ultrascale.cost.estimate import estimate
from ultrascale.parallel import local
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.files import read_mapping
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan, job_to_mapping
from ultrascale.train import launch
from ultrascale.train.machine import cpu_cluster, cpu_rates, memory_bytes
from ultrascale.train.rates import LinkRate, Rates
from ultrascale.train.request import Overrides, Request, from_model

SEED, OTHERS, ROUNDS = 20, 20, 6
TRAINED_S, FEWEST, MOST = 1.5, 7, 16  # steps that together take about so long
UNSETTLED = 2  # the first makes buffers, the second is followed for its memory
# Wider heads and a vocabulary of some thousands, for a third to half of a second a step.
SMALL = Model(name="small", layers=4, hidden=512, heads=8, kv_heads=4, ffn=1536, vocab=4096, max_positions=2048)
MODELS = {"tiny": Model.load("tiny"), "mini": Model.load("mini"), "small": SMALL}
MOST_TOKENS = {"tiny": 4096, "mini": 4096, "small": 1024}  # of a step, which is to take less than a second


class Asked(NamedTuple):
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


# Products; long rows of narrow heads, where softmax is all; operators, with hardly a token; a vocabulary; and what is computed
# again, with few tokens and with more.
TO_FIT = (
    Asked("mini", 256, 4, 2),
    Asked("tiny", 1024, 1, 2),
    Asked("tiny", 64, 1, 4),
    Asked("small", 256, 2, 1),
    Asked("tiny", 256, 4, 2, "full"),
    Asked("mini", 512, 1, 2, "selective"),
)
# Products; softmax; operators; a link by many exchanges of few bytes, by some of more, and by weights.
TO_FIT_IN_TWO = (
    Asked("mini", 256, 4, 2, cut="dp=2"),
    Asked("tiny", 512, 4, 2, cut="dp=2"),
    Asked("tiny", 128, 2, 2, "full", cut="pp=2"),
    Asked("tiny", 128, 1, 4, cut="tp=2"),
    Asked("mini", 256, 4, 2, cut="tp=2"),
    Asked("mini", 256, 4, 2, cut="zero=3"),
)
CUTS = ("dp=2", "tp=2", "pp=2", "zero=1", "zero=3")


def others(processes: int, seed: int) -> list[Asked]:
    """Models in turn, everything else at random."""
    rng, found = random.Random(seed), list[Asked]()
    while len(found) < OTHERS:
        name = list(MODELS)[len(found) % len(MODELS)]
        seq, mbs, gas = rng.choice((64, 128, 256, 512, 1024)), rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 4))
        recompute = rng.choice(("none", "none", "selective", "full"))
        cut = rng.choice(CUTS) if processes == 2 else ""
        one = Asked(name, seq, mbs, gas, recompute, cut)
        fills = cut != "pp=2" or gas > 1  # a pipeline
        if fills and 256 <= seq * mbs * gas <= MOST_TOKENS[name] and one not in (*to_fit(processes), *found):
            found.append(one)
    return found


def to_fit(processes: int) -> tuple[Asked, ...]:
    return TO_FIT_IN_TWO if processes == 2 else TO_FIT


def request(one: Asked, processes: int, steps: int) -> Request:
    words = [f"job.seq={one.seq}", f"layout.mbs={one.mbs}", f"layout.gas={one.gas}", f"layout.recompute={one.recompute}"]
    words += [f"layout.{one.cut}"] if one.cut else []
    words += [f"train.steps={steps}", "train.data=synthetic", "checkpoint.save=false"]
    return from_model(MODELS[one.model], Overrides.parse(words), processes, precision="fp32")


def train(one: Asked, folder: Path, cluster: Cluster) -> None:
    """In a fresh process, as a user's run is."""
    asked = request(one, cluster.gpus, FEWEST).on(cluster)
    steps = min(MOST, max(FEWEST, UNSETTLED + math.ceil(TRAINED_S / estimate(asked.job, asked.layout).step_time_s)))
    asked = request(one, cluster.gpus, steps)
    if cluster.gpus > 1:
        launch.train(asked, folder, cluster.gpus, cluster, quiet=True)
    else:
        local.run(_rank, 1, asked, folder, cluster)


def _rank(_: int, __: int, ___: str, asked: Request, folder: Path, cluster: Cluster) -> None:
    launch.train(asked, folder, None, cluster, quiet=True)


def measure(wanted: list[Asked], out: Path, processes: int, rounds: int) -> Cluster:
    """Every run in every round; the machine by the fastest of its rates."""
    seen: list[tuple[Rates, LinkRate]] = []
    cluster = None
    for number in range(rounds):
        folder = out / f"round-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        seen.append(rates(folder / "rates.json", processes))
        cluster = fastest(seen, processes)
        first = number * len(wanted) // rounds
        for one in (*wanted[first:], *wanted[:first]):
            if not (folder / one.name / launch.MEASUREMENT).exists():
                shutil.rmtree(folder / one.name, ignore_errors=True)  # of a run that was ended
                train(one, folder / one.name, cluster)
        print(f"round {number + 1} of {rounds}: {asdict(seen[-1][0])}", flush=True)
    assert cluster is not None
    return cluster


def rates(file: Path, processes: int) -> tuple[Rates, LinkRate]:
    if not file.exists():
        found, link = cpu_rates(processes)
        file.write_text(json.dumps({"rates": asdict(found), "link": asdict(link)}), encoding="utf-8")
    kept = json.loads(file.read_text(encoding="utf-8"))
    return Rates(**kept["rates"]), LinkRate(**kept["link"])


def fastest(seen: list[tuple[Rates, LinkRate]], processes: int) -> Cluster:
    def best(name: str, values: list[float]) -> float:
        return (min if name.endswith("_s") and not name.endswith(("bytes_s", "scores_s")) else max)(values)

    found = {each.name: best(each.name, [getattr(one, each.name) for one, _ in seen]) for each in fields(Rates)}
    link = {each.name: best(each.name, [getattr(one, each.name) for _, one in seen]) for each in fields(LinkRate)}
    return cpu_cluster(processes, Rates(**found), LinkRate(**link), memory_bytes())


def gather(wanted: list[Asked], out: Path, cluster: Cluster, rounds: int, fitted: int) -> Path:
    """A line for each run on the machine as it was measured in all rounds, with the steps of its fastest round."""
    file, lines = out / "runs.jsonl", []
    for index, one in enumerate(wanted):
        folders = [out / f"round-{number}" / one.name for number in range(rounds)]
        steps = [[step["step_time_s"] for step in map(json.loads, (each / launch.METRICS).open())] for each in folders]
        settled = sorted(step for each in steps for step in each[UNSETTLED:])
        fastest = min(range(rounds), key=lambda number: median(steps[number]))
        plan = Plan.load(folders[fastest] / launch.PLAN)
        measured = read_mapping(folders[fastest] / launch.MEASUREMENT, "measurement")
        line = {
            "run": one.name,
            "use": "fit" if index < fitted else "other",
            "job": job_to_mapping(plan.job.changed(cluster=cluster)),
            "layout": plan.layout.model_dump(mode="json", exclude_defaults=True),
            "measurement": {**measured, "step_time_s": settled[len(settled) // 10]},
            "steps_s": [round(step, 6) for step in steps[fastest]],
        }
        lines.append(json.dumps(line))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/calibration-cpu"))
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=SEED, help="of the draw of others")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    launch.import_torch()
    fit = to_fit(options.processes)
    wanted = [*fit, *others(options.processes, options.seed)]
    cluster = measure(wanted, options.out, options.processes, options.rounds)
    calibration.show(gather(wanted, options.out, cluster, options.rounds, len(fit)), draws=0)


if __name__ == "__main__":
    main()
