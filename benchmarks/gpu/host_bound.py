"""Steps of small models and cut layers, where the host is often late: `python benchmarks/gpu/host_bound.py -o steps.jsonl`.

One GPU is one rank, as in rank.py. torchtitan 0.2 compiled and not, transformers under FSDP2 as Accelerate runs it, and our
engine operator by operator, compiled, and fused, each kernel launched alone. Models of 0.1 to 3 billion parameters with few and
many sequences, tp 1 to 8. WORKS was written before any was measured; every second one is to fit by, the others are to judge by.
Each engine has one process for all its works. Lines of JSON are appended; what is there is not run again.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rank import RankWork, Turn, ours, torchtitan, transformers
from shapes import MODELS

from ultrascale import Layout, Model
from ultrascale.launch import local

SMALL = ("smollm2-135m", "smollm2-360m", "qwen3-0.6b", "llama-3.2-1b", "smollm2-1.7b", "llama-3.2-3b")
MODELS.update({name: Model.load(name) for name in SMALL})
SEQ, STEPS = 2048, 8


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", "-o", type=Path, required=True)
    parser.add_argument("--engines", nargs="+", choices=list(RUNNERS), default=list(RUNNERS))
    parser.add_argument("--seconds", type=float, default=3600, help="after which no work starts")
    options = parser.parse_args()
    until = time.time() + options.seconds
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {(line["engine"], line["model"], json.dumps(line["layout"])) for line in lines}
    for engine in options.engines:
        some = [(work, use) for name, work, use in works() if name == engine]
        some = [
            each
            for each in some
            if (engine, each[0].model, json.dumps(each[0].layout.model_dump(mode="json", exclude_defaults=True))) not in known
        ]
        local.run(_rank, 1, engine, some, options.out, until, timeout_s=3600)


def _rank(_: int, __: int, ___: str, engine: str, some: list[tuple[RankWork, str]], out: Path, until: float) -> None:
    measure(engine, some, out, until)


if __name__ == "__main__":
    main()
