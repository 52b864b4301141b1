"""torchtitan 0.2 rehearsed on a GPU, without one, and estimated: `python benchmarks/gpu/foreign.py --device cuda -o gpu.json`.

Each layout is one rank of torchtitan's own Trainer (`ultrascale rehearse --engine torchtitan`), in a process of its own, with
torch's `fake` process group. Lines of JSON are appended as layouts end, and a layout that has a peak there is not run again. A
layout that fails or takes too long is an error in its line. Times of step are comparable with `--parallel 1` alone.

    python benchmarks/gpu/foreign.py --device cuda -o gpu.json
    python benchmarks/gpu/foreign.py --device meta -o meta.json --parallel 2 --timeout 900
    python benchmarks/gpu/foreign.py --compare gpu.json meta.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from shapes import FLAVORS

from ultrascale import Cluster, Job, Layout
from ultrascale.cost.estimate import estimate
from ultrascale.measure.foreign.request import FIRST_STEPS, NOT_COMPILED, ForeignRequest
from ultrascale.measure.foreign.run import rehearse_foreign
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.units import GIB

STEPS = 8  # on a GPU: four to warm up, three measured; the last, which only counts operators, is not run
TIMEOUT_S = 200
CAPACITY_GIB = 130  # of an H200's 139, for all that run at a time
KNOWN, UNKNOWN, CONTEXT_GIB = (
    1.15,
    1.5,
    3,
)  # a process may need: this multiple of a rehearsed peak, or of an estimate; CUDA's own


@dataclass(frozen=True)
class Case:
    """A rank of torchtitan. `recompute`: none, full, `op` or, recomputing every second layer, `2`."""

    model: str
    recompute: str
    tp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    replicas: int = 1
    mbs: int = 1
    seq: int = 8192
    compiled: bool = True
    loss_parallel: bool = True

    @property
    def name(self) -> str:
        axes = {"TP": self.tp, "CP": self.cp, "FSDP": self.dp // self.replicas, "EP": self.ep}
        words = [f"{axis} {size}" for axis, size in axes.items() if size > 1]
        cut = " x ".join([*([f"HSDP {self.replicas}"] if self.replicas > 1 else []), *words]) or "one GPU"
        size = f"mbs {self.mbs}" if self.seq == 8192 else f"mbs {self.mbs} of {self.seq}"
        more = ["eager"] * (not self.compiled) + ["whole loss"] * (not self.loss_parallel)
        return ", ".join([self.model, cut, size, {"2": "every 2nd"}.get(self.recompute, self.recompute), *more])

    @property
    def layout(self) -> Layout:
        half = FLAVORS[self.model].layers // 2 if self.recompute == "2" else None
        shards = self.dp * self.cp // self.replicas
        recompute: Any = {"op": "selective", "2": "full"}.get(self.recompute, self.recompute)
        return Layout(
            recompute=recompute, recompute_layers=half,
            tp=self.tp, dp=self.dp, cp=self.cp, ep=self.ep, mbs=self.mbs, zero=3 if self.dp * self.cp > 1 else 0,
            zero_shards=shards if self.replicas > 1 else None,
        )  # fmt: skip

    def estimate_gib(self) -> float:
        """All tensors at the peak, for torchtitan compiled or not."""
        layout, preset = self.layout, "torchtitan-0.2" if self.compiled else "torchtitan-0.2-eager"
        job = Job(
            model=FLAVORS[self.model],
            cluster=Cluster.load(f"{layout.gpus}xh200"),
            seq=self.seq,
            batch_tokens=layout.batch_tokens(self.seq),
            framework=Framework.load(preset).model_copy(update={"loss_parallel": self.loss_parallel}),
        )
        [stage] = estimate(job, layout).memory
        return (stage.memory.total - stage.memory.runtime) / GIB

    def toml(self) -> str:
        """torchtitan's configuration: everything that is not here is its default."""
        selective = self.recompute in ("op", "2")
        sections: dict[str, dict[str, Any]] = {
            "model": {"name": "llama3" if FLAVORS[self.model].moe is None else "qwen3", "flavor": self.model},
            "training": {"seq_len": self.seq, "local_batch_size": self.mbs},
            "parallelism": {
                "data_parallel_replicate_degree": self.replicas,
                "data_parallel_shard_degree": self.dp // self.replicas,
                "tensor_parallel_degree": self.tp,
                "context_parallel_degree": self.cp,
                "expert_parallel_degree": self.ep,
                "disable_loss_parallel": not self.loss_parallel,
            },
            "activation_checkpoint": {
                "mode": "selective" if selective else self.recompute,
                "selective_ac_option": self.recompute if selective else "op",
            },
            "compile": {"enable": self.compiled},
            "debug": {"moe_force_load_balance": True},
            "experimental": {"custom_import": "titan_flavors"},
        }
        lines = []
        for section, values in sections.items():
            lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
        return "\n".join(lines) + "\n"


def cases() -> list[Case]:
    """Kinds in turn: a run that is ended early has some of all."""
    found = [Case("8b", recompute, tp=8, dp=8, mbs=2) for recompute in ("none", "op", "2", "full")]
    found += [Case("8b-16", recompute, dp=8) for recompute in ("none", "op", "2", "full")]
    found += [Case(model, recompute, mbs=2) for model in ("1b", "3b") for recompute in ("none", "full")]
    found += [Case("8b-16", "op", cp=8, dp=8, seq=65536), Case("moe", "none", dp=8, mbs=2)]
    found += [Case("moe", "full", dp=8, ep=8, mbs=2), Case("8b-16", "op", dp=8, replicas=2)]
    found += [Case("8b-16", recompute, dp=8, compiled=False) for recompute in ("none", "op", "full")]
    found += [Case("8b", "op", tp=8, dp=8, mbs=2, loss_parallel=False), Case("8b", "full", dp=64)]
    found += [Case("moe", "full", dp=8, mbs=2), Case("moe", "none", dp=8, ep=8, mbs=2)]
    found += [Case("1b", "none", mbs=2, compiled=False), Case("moe", "full", dp=8, mbs=2, compiled=False)]
    found += [Case("8b", "op", tp=4, dp=4), Case("8b", "op", tp=2, dp=8), Case("8b", "none", tp=4, dp=4)]
    found += [Case("8b-16", "full", cp=8, dp=8, seq=65536), Case("8b-16", "full", dp=8, replicas=2)]
    found += [Case("8b", recompute, tp=8, dp=8, mbs=2, compiled=False) for recompute in ("none", "full")]
    found += [Case("8b", "op", dp=64), Case("8b", "full", tp=8, dp=8, mbs=2, loss_parallel=False)]
    return found


class Room:
    """GPU memory for several processes: one that does not fit beside the others waits."""

    def __init__(self, gib: float) -> None:
        self.free, self.gib, self.changed = gib, gib, threading.Condition()

    @contextmanager
    def taken(self, gib: float) -> Iterator[None]:
        need = min(gib, self.gib)
        with self.changed:
            self.changed.wait_for(lambda: need <= self.free)
            self.free -= need
        try:
            yield
        finally:
            with self.changed:
                self.free += need
                self.changed.notify_all()


def rehearsed(case: Case, folder: Path, device: str, timeout_s: float) -> dict[str, Any]:
    """The line of a layout."""
    config = folder / f"{case.name}.toml"
    config.write_text(case.toml(), encoding="utf-8")
    steps = STEPS if device == "cuda" else FIRST_STEPS
    request = ForeignRequest(
        str(config), case.layout.gpus, engine="torchtitan", steps=steps, device=device, count=device != "cuda"
    )
    line: dict[str, Any] = {"layout": case.name, "world": case.layout.gpus, "device": device}
    try:
        found = rehearse_foreign(request, timeout_s)
    except (RunError, SpecError) as failed:
        return line | {"error": str(failed).replace(str(config), "torchtitan")}
    ms = None if found.step_s is None else found.step_s * 1e3
    return line | {
        "peak_bytes": found.peak, "ms": ms, "engine": found.engine, "torch": found.torch, "gpu": found.gpu,
        "seconds": round(found.seconds, 1), "notes": found.notes,
    }  # fmt: skip


def run(out: Path, device: str, parallel: int, timeout_s: float, chosen: Sequence[Case], peaks: dict[str, float]) -> None:
    """`peaks`: GiB of layouts that were rehearsed before, so that more of them run at a time."""
    known = peaks_of(out) if out.exists() else {}
    left = [case for case in chosen if case.name not in known]
    room, writing, started = Room(CAPACITY_GIB), threading.Lock(), time.monotonic()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])

    def one(case: Case) -> None:
        tensors = peaks[case.name] * KNOWN if case.name in peaks else case.estimate_gib() * UNKNOWN
        with room.taken(tensors + CONTEXT_GIB if device == "cuda" else 0.0):
            line = rehearsed(case, Path(folder), device, timeout_s)
        with writing, out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        result = f"{line['peak_bytes'] / GIB:.2f} GiB" if "peak_bytes" in line else line["error"]
        print(f"{time.monotonic() - started:5.0f} s  {case.name}: {result}", flush=True)

    print(f"{len(left)} of {len(chosen)} layouts to rehearse, {parallel} at a time", flush=True)
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder, ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, left))


def peaks_of(file: Path) -> dict[str, float]:
    """GiB by layout."""
    return {line["layout"]: line["peak_bytes"] / GIB for line in lines_of(file) if "peak_bytes" in line}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def compare(measured: Path, rehearsed: Path) -> None:
    """Peaks of a GPU beside those without one and the estimate's; a difference is relative to the GPU's."""
    gpu, meta = ({line["layout"]: line for line in lines_of(file)} for file in (measured, rehearsed))
    table = Table(title="torchtitan's rank 0, GiB at the peak", show_edge=False)
    for heading in ("layout", "GPU", "rehearsed", "difference", "estimate", "difference"):
        table.add_column(heading, justify="left" if heading == "layout" else "right", no_wrap=heading != "layout")
    differences: dict[str, list[tuple[float, str]]] = {"rehearsed": [], "estimate": []}
    left_out = False
    for case in cases():
        there, here, guess = gpu.get(case.name, {}), meta.get(case.name, {}), case.estimate_gib()
        true, found = (line["peak_bytes"] / GIB if "peak_bytes" in line else None for line in (there, here))
        eager = case.compiled and NOT_COMPILED in here.get("notes", ())
        left_out |= eager
        cells = [f"{true:.2f}" if true else _missing(there), f"{found:.2f}{'*' * eager}" if found else _missing(here)]
        for which, value in (("rehearsed", found), ("estimate", guess)):
            cells += [f"{guess:.2f}"] * (which == "estimate")
            cells.append(f"{value / true - 1:+.1%}" if value and true else "")
            if value and true and not (eager and which == "rehearsed"):
                differences[which].append((value / true - 1, case.name))
        table.add_row(case.name, *cells)
    console = Console(width=96)
    console.print(table)
    if left_out:
        console.print("* rehearsed without torch.compile, and left out of the mean", highlight=False)
    for which, found in differences.items():
        if found:
            mean, worst = statistics.mean(abs(value) for value, _ in found), max(found, key=lambda one: abs(one[0]))
            line = f"{which}: {len(found)} layouts, mean difference {mean:.2%}, worst {worst[0]:+.1%} ({worst[1]})"
            console.print(line, highlight=False)


def _missing(line: dict[str, Any]) -> str:
    return "failed" if "error" in line else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", choices=("cuda", "meta"), default="cuda", help="meta: tensors without memory, on any machine"
    )
    parser.add_argument("--out", "-o", type=Path, help="lines of JSON; those of layouts that it has are not run again")
    parser.add_argument("--parallel", type=int, default=4, help="layouts at a time, as far as they fit a GPU together")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a layout")
    parser.add_argument("--peaks", type=Path, help="a file with known peaks: more layouts run at a time")
    parser.add_argument("--only", default="", help="layouts whose names contain this")
    parser.add_argument("--list", action="store_true", help="names of layouts, with their estimates")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("GPU.JSON", "META.JSON"))
    options = parser.parse_args()
    chosen = [case for case in cases() if options.only in case.name]
    if options.compare:
        compare(*options.compare)
    elif options.list:
        for case in chosen:
            print(f"{case.estimate_gib():7.2f} GiB  {case.name}")
    elif options.out is None:
        sys.exit("--out is missing: name the file for results, such as -o gpu.json")
    else:
        peaks = {} if options.peaks is None else peaks_of(options.peaks)
        run(options.out, options.device, options.parallel, options.timeout, chosen, peaks)


if __name__ == "__main__":
    main()
