"""Steps of small models and cut layers, where the host is often late: `python benchmarks/gpu/host_bound.py -o steps.jsonl`.

One GPU is one rank, as in rank.py. torchtitan 0.2 compiled and not, transformers under FSDP2 as Accelerate runs it, and our
engine operator by operator and fused, each kernel launched alone. Models of 0.1 to 3 billion parameters with few and
many sequences, tp 1 to 8. They were drawn before any was measured; every second one is to fit by, the others are to judge by.
Each engine has one process for all its works. Lines of JSON are appended; what is there is not run again.

`--compare host_bound_h200.jsonl` prints every step beside its estimate, and mean errors, without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rank import RankWork, Turn, ours, torchtitan, transformers
from rich.console import Console
from rich.table import Table
from shapes import MODELS

from ultrascale import Cluster, Estimate, Job, Layout, Model
from ultrascale.cost.estimate import estimate
from ultrascale.launch import local
from ultrascale.specs.framework import Framework

SMALL = ("smollm2-135m", "smollm2-360m", "qwen3-0.6b", "llama-3.2-1b", "smollm2-1.7b", "llama-3.2-3b")
MODELS.update({name: Model.load(name) for name in SMALL})
SEQ, STEPS = 2048, 8
MEASURED = {
    "matmul": 1.034, "attention_forward": 0.666, "attention_backward": 0.530, "boost": 1.234, "memory_bandwidth": 0.882,
    "kernel_launch_s": 5.87e-6,
}  # fmt: skip
"""by `ultrascale bench hardware` on the machine of host_bound_h200.jsonl"""


@dataclass(frozen=True)
class Measured:
    engine: str
    """a preset of specs/framework.py"""
    model: str
    seq: int
    layout: dict[str, Any]
    use: str
    """fit or judge"""
    step_ms: float
    kernels: int
    """in one profiled step, and how long they ran"""
    kernels_ms: float
    gpu: str
    versions: str


def works() -> Iterator[tuple[str, RankWork, str]]:
    """Drawn once: engines with their models, micro-batches and cuts."""
    rng = random.Random(25)
    for engine in RUNNERS:
        found: list[tuple[str, int, int, int]] = []
        while len(found) < COUNTS[engine]:
            name, mbs, tp, dp = rng.choice(SMALL), rng.choice((1, 1, 2, 4, 8)), rng.choice(CUTS[engine]), rng.choice((1, 8))
            model, dp = MODELS[name], 8 if tp > 1 else dp  # torchtitan has mixed precision under FSDP alone
            if (name, mbs, tp, dp) in found or model.heads % tp or model.kv_heads % tp or (engine in LLAMA and model.qk_norm):
                continue
            if mbs * model.layers * model.hidden > 8 * 28 * 2048:  # long steps are bound by the GPU
                continue
            found.append((name, mbs, tp, dp))
        # A second draw of one sequence on one GPU, where a layer's own launches are seen alone.
        smallest = [(name, 1, 1, 1) for name in SMALL[:4] if engine not in LLAMA or not MODELS[name].qk_norm]
        found += [each for each in smallest if each not in found]
        for number, (name, mbs, tp, dp) in enumerate(found):
            layout = Layout(tp=tp, dp=dp, zero=3 if dp > 1 else 0, mbs=mbs, gas=1)
            yield engine, RankWork(name, MODELS[name].layers, SEQ, STEPS, layout), ("fit", "judge")[number % 2]


def no_graph(kernels: Any) -> Callable[[RankWork], Turn]:
    return lambda work: ours(replace(work, kernels=kernels, graphs="never"))


RUNNERS: dict[str, Callable[[RankWork], Turn]] = {
    "ultrascale-eager": no_graph("eager"),
    "accelerate": transformers,
    "torchtitan-0.2-eager": lambda work: torchtitan(replace(work, compiled=False)),
    "ultrascale": no_graph("fused"),
    "torchtitan-0.2": torchtitan,
}
COUNTS = {"ultrascale-eager": 14, "accelerate": 14, "torchtitan-0.2-eager": 18, "ultrascale": 10, "torchtitan-0.2": 10}
CUTS = {engine: (1,) if engine == "accelerate" else (1, 1, 2, 4, 8) for engine in RUNNERS}
LLAMA = ("torchtitan-0.2", "torchtitan-0.2-eager")
"""without norms of queries and keys"""


def measure(engine: str, some: list[tuple[RankWork, str]], out: Path, until: float) -> None:
    for work, use in some:
        if time.time() > until:
            return
        began = time.perf_counter()
        torch._dynamo.reset()
        label = f"{engine}: {work.model} {work.layout}"
        try:
            turn = RUNNERS[engine](replace(work, profiled=True))
        except Exception as error:
            print(f"{label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        layout = work.layout.model_dump(mode="json", exclude_defaults=True)
        line = Measured(
            engine, work.model, work.seq, layout, use, round(turn.step_ms, 3), turn.kernels,
            round(turn.kernels_ms, 3), turn.gpu, f"torch {torch.__version__}",
        )  # fmt: skip
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")
        took = time.perf_counter() - began
        print(
            f"{label} {use}: {turn.step_ms:.1f} ms, {turn.kernels} kernels of {turn.kernels_ms:.1f} ms; {took:.0f} s",
            flush=True,
        )


def predicted(line: dict[str, Any]) -> Estimate:
    """By the engine's preset, where links take no time."""
    layout, framework, model = Layout(**line["layout"]), Framework.load(line["engine"]), Model.load(line["model"])
    if line["engine"] in LLAMA:
        model = model.model_copy(update={"tied_embeddings": False})
    cluster = Cluster.load(f"{layout.gpus}xh200")
    at_once = dict.fromkeys(("link_latency_s", "network_latency_s", "network_call_s", "link_call_s"), 0.0)
    efficiency = cluster.efficiency.model_copy(update=at_once | MEASURED)
    cluster = cluster.model_copy(update={"efficiency": efficiency, "link_bandwidth_gb_s": 1e6, "network_gb_s": 1e6})
    framework = framework.model_copy(update={"cuda_graphs": False})
    batch_tokens = layout.batch_tokens(line["seq"])
    job = Job(model=model, cluster=cluster, seq=line["seq"], batch_tokens=batch_tokens, framework=framework)
    return estimate(job, layout)


def compare(file: Path) -> None:
    table = Table(title="host-bound steps, ms", show_edge=False)
    for heading in ("engine", "rank", "use", "kernels", "measured", "estimate", "difference"):
        table.add_column(heading, justify="left" if heading in ("engine", "rank", "use") else "right", no_wrap=True)
    errors: dict[tuple[str, str], list[float]] = {}
    for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        step_ms = predicted(line).step_time_s * 1e3
        error = step_ms / line["step_ms"] - 1
        errors.setdefault((line["engine"], line["use"]), []).append(error)
        figures = f"{line['kernels_ms']:.1f}", f"{line['step_ms']:.1f}", f"{step_ms:.1f}", f"{error:+.0%}"
        table.add_row(line["engine"], f"{line['model']} {Layout(**line['layout'])}", line["use"], *figures)
    console = Console(width=110)
    console.print(table)
    for use in ("fit", "judge"):
        for (engine, kind), each in errors.items():
            if kind == use:
                print(f"{use}: {engine}: {len(each)} steps, mean error {mean(map(abs, each)):.1%}, bias {mean(each):+.1%}")
        together = [error for (_, kind), each in errors.items() if kind == use for error in each]
        print(f"{use}: {len(together)} steps, mean error {mean(map(abs, together)):.1%}, bias {mean(together):+.1%}")


def run(out: Path, engines: list[str], seconds: float) -> None:
    until = time.time() + seconds
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    known = [(line["engine"], line["model"], Layout(**line["layout"])) for line in lines]
    for engine in engines:
        some = [(work, use) for name, work, use in works() if name == engine and (name, work.model, work.layout) not in known]
        local.run(_rank, 1, engine, some, out, until, timeout_s=3600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", "-o", type=Path)
    parser.add_argument("--engines", nargs="+", choices=list(RUNNERS), default=list(RUNNERS))
    parser.add_argument("--seconds", type=float, default=3600, help="after which no work starts")
    parser.add_argument("--compare", type=Path, metavar="STEPS.JSONL")
    options = parser.parse_args()
    if options.compare:
        compare(options.compare)
    elif options.out is None:
        sys.exit("--out is missing: name the file for results, such as -o steps.jsonl")
    else:
        run(options.out, options.engines, options.seconds)


def _rank(_: int, __: int, ___: str, engine: str, some: list[tuple[RankWork, str]], out: Path, until: float) -> None:
    measure(engine, some, out, until)


if __name__ == "__main__":
    main()
