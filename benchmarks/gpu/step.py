"""Training steps on one GPU, timed: `python benchmarks/gpu/step.py [--model 1b|3b|moe] [--mbs 8 4 2] [--recompute none full]`.

Builds the engine as `ultrascale train` does and steps it on synthetic tokens. Prints one row per combination of what was asked
for; `--profile` adds where one step's time goes, by kind of kernel. Compilation and the first steps are not counted.
`--precision bf16 fp8` compares the two. `--kernels` also runs the engine without its own kernels, in the same run: plain, loss,
adamw, grads, fused, graphs, flash and all, each with one kernel more than the one before.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from shapes import MODELS

from ultrascale import Cluster, Job, Layout, Model
from ultrascale.cost.flops import model_flops
from ultrascale.data.corpora import corpus
from ultrascale.kernels import selection as own
from ultrascale.kernels.optional_kernels import FLASH_ATTENTION_4, QUACK
from ultrascale.launch import local
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train.build import build_engine
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine

SEQ = 4096
WARM_UP = 5  # steps: compilation, the optimizer's states, the allocator's first blocks; the fifth may be captured

MBS = {"1b": 8, "3b": 4, "moe": 8}

# What each set of kernels has beyond the one before it: compiled blocks; the loss in chunks with its gradients; AdamW in one
# pass, masters in halves; gradients left as backward writes them; fused blocks; a step as one CUDA graph, where that is faster;
# and where they are installed and faster, FlashAttention 4 and gates within matmuls.
KERNEL_FLAGS = {
    "plain": "compiled",
    "loss": "loss",
    "adamw": "adamw",
    "grads": "single_microbatch",
    "fused": "fused",
    "graphs": "cuda_graphs",
}
INSTALLED = {"flash": FLASH_ATTENTION_4, "all": QUACK}
KERNEL_SETS = (*KERNEL_FLAGS, *INSTALLED)

# Parts of kernels' names, in the order in which they are tried.
KINDS = {
    "attention": ("flash", "fmha", "cudnn"),
    "matmuls": ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
    "casts to fp8, with what is fused to them": ("_scaled_mm", "_abs_", "_cast", "absmax", "maxnan"),
    "loss": ("softmax", "nll", "_row", "_scale"),
    "norms, rotations, gates": ("_norm", "_rotate", "_gate"),
    "optimizer": ("multi_tensor", "foreach", "adam", "_step", "_squares"),
    "fused by inductor": ("triton",),
    "embedding": ("embedding", "gather", "scatter", "compute_grad_weight", "sort"),
    "gradients into fp32": ("cudafunctor_add",),
    "copies and zeros": ("memcpy", "memset", "fillfunctor", "copy"),
}


@dataclasses.dataclass(frozen=True)
class Measured:
    model: str
    mbs: int
    recompute: str
    kernel_set: str
    numbers: str
    step_ms: float
    tokens_per_s: float
    mfu: float
    """forward and backward without the causal mask's saving or what is recomputed, over the preset's peak"""
    allocated_gib: float
    reserved_gib: float
    losses: tuple[float, ...]
    """of the first five steps and the last: every set of kernels must train alike"""
    ready_s: float
    """from nothing to the end of the warm-up"""
    selected: tuple[str, ...]
    """kernels that were timed and taken"""


class Numbers(NamedTuple):
    """Of the matmuls; scaling and keep are those of fp8."""

    precision: str = "bf16"
    scaling: str = "tensor"
    keep: str = "ends"

    def __str__(self) -> str:
        return self.precision if self.precision != "fp8" else f"fp8 {self.scaling}, keep {self.keep}"


class Kernel(NamedTuple):
    name: str
    ms: float
    calls: int


def build(model: Model, mbs: int, recompute: str, steps: int, numbers: Numbers, device: str = "cuda", seq: int = SEQ) -> Engine:
    layout = Layout(mbs=mbs, gas=1, recompute=recompute)
    job = Job(model=model, cluster=Cluster.load("1xh200"), seq=seq, batch_tokens=mbs * seq, precision=numbers.precision)
    training = Training(steps=steps, data="synthetic", clip=1.0, fp8_scaling=numbers.scaling, fp8_keep=numbers.keep)
    batches = Batches(corpus(training, model.vocab), seq, mbs, training.seed)
    return build_engine(job, Mesh.build(layout, model.kv_heads, 0, device), training, batches)


@contextmanager
def only(kernel_set: str) -> Iterator[None]:
    """The engine with the kernels of `kernel_set` and no others of its own."""
    names = KERNEL_SETS[: KERNEL_SETS.index(kernel_set) + 1]
    choose = own.choose

    def fewer(*arguments: Any) -> own.Kernels:
        selected = choose(*arguments)
        return own.Kernels(
            **{KERNEL_FLAGS[name]: getattr(selected, KERNEL_FLAGS[name]) for name in names if name in KERNEL_FLAGS}
        )

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(own, "choose", fewer))
        for module in (module for name, module in INSTALLED.items() if name not in names):
            stack.enter_context(mock.patch.object(module, "why_not", return_value="not asked for"))
        yield


def measure(
    name: str, mbs: int, recompute: str, kernel_set: str, numbers: Numbers, steps: int, profiled: bool
) -> tuple[Measured, list[Kernel], str]:
    began = time.perf_counter()
    with only(kernel_set):
        engine = build(MODELS[name], mbs, recompute, WARM_UP + steps, numbers)
    losses = [engine.step(number).loss for number in range(WARM_UP)]
    torch.cuda.synchronize()
    if (
        engine.cuda_graphs is None or not engine.cuda_graphs.used
    ):  # a captured step has a memory pool of its own: its peak was that of the capture
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    losses += [engine.step(number).loss for number in range(WARM_UP, WARM_UP + steps)]
    torch.cuda.synchronize()
    step_s = (time.perf_counter() - started) / steps
    tokens_per_s = engine.batches.batch * engine.job.seq / step_s
    row = Measured(
        model=name,
        mbs=mbs,
        recompute=recompute,
        kernel_set=kernel_set,
        numbers=str(numbers),
        step_ms=step_s * 1e3,
        tokens_per_s=tokens_per_s,
        mfu=tokens_per_s * model_flops(MODELS[name], SEQ) / engine.job.peak_flops,
        allocated_gib=torch.cuda.max_memory_allocated() / GIB,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB,
        losses=(*losses[:5], losses[-1]),
        ready_s=started - began,
        selected=tuple(map(str, engine.autotuned)),
    )
    return row, profile(engine, WARM_UP + steps) if profiled else [], torch.cuda.get_device_name()


def measure_in_own_process(
    name: str, mbs: int, recompute: str, kernel_set: str, numbers: Numbers, steps: int, profiled: bool
) -> tuple[Measured, list[Kernel], str]:
    """In a process of its own, so that every row finds the GPU empty."""

    def rank(_: int, __: int, ___: str) -> tuple[Measured, list[Kernel], str]:
        return measure(name, mbs, recompute, kernel_set, numbers, steps, profiled)

    (result,) = local.run(rank, 1)
    return result  # type: ignore[no-any-return]


def profile(engine: Engine, number: int) -> list[Kernel]:
    """The kernels of one step, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        engine.step(number)
        torch.cuda.synchronize()
    kernels = [Kernel(event.key, event.self_device_time_total / 1e3, event.count) for event in profiler.key_averages()]
    return sorted((kernel for kernel in kernels if kernel.ms > 0), key=lambda kernel: -kernel.ms)


def kind_of(kernel: str) -> str:
    lower = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(word in lower for word in words)), "other")


def by_kind(kernels: Sequence[Kernel]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[kind_of(kernel.name)] += kernel.ms
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def machine(gpu: str) -> str:
    versions = f"torch {torch.__version__} · Python {platform.python_version()}"
    return f"{gpu} · {versions} · {datetime.date.today()}"


def show(rows: Sequence[Measured], title: str) -> None:
    table = Table(title=title)
    words = ("model", "recompute", "kernels", "matmuls")
    for heading in (
        "model",
        "mbs",
        "recompute",
        "kernels",
        "matmuls",
        "step ms",
        "tokens/s",
        "MFU %",
        "peak GiB",
        "reserved",
        "loss",
        "ready s",
    ):
        table.add_column(heading, justify="left" if heading in words else "right")
    for row in rows:
        figures = f"{row.step_ms:.1f}", f"{row.tokens_per_s:,.0f}", f"{100 * row.mfu:.1f}"
        memory = f"{row.allocated_gib:.2f}", f"{row.reserved_gib:.2f}"
        ends = f"{row.losses[-1]:.3f}", f"{row.ready_s:.0f}"
        table.add_row(row.model, str(row.mbs), row.recompute, row.kernel_set, row.numbers, *figures, *memory, *ends)
    Console(width=128).print(table)
    for row in rows:
        print(
            row.model,
            row.mbs,
            row.recompute,
            row.kernel_set,
            row.numbers,
            "losses of the first steps:",
            *(f"{loss:.4f}" for loss in row.losses[:-1]),
            f"({'; '.join(row.selected)})",
        )


def show_profile(kernels: Sequence[Kernel], longest: int = 25) -> None:
    total = sum(kernel.ms for kernel in kernels)
    print(f"one step's kernels: {total:.1f} ms")
    for kind, milliseconds in by_kind(kernels).items():
        print(f"{milliseconds:8.2f} ms {100 * milliseconds / total:5.1f} %  {kind}")
    for kernel in kernels[:longest]:
        print(f"{kernel.ms:8.2f} ms {kernel.calls:5d} ×  {kernel.name[:100]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="1b")
    parser.add_argument("--mbs", type=int, nargs="+", help="sequences in a micro-batch; default 8, for 3b 4")
    parser.add_argument("--recompute", nargs="+", choices=("none", "selective", "full"), default=["none"])
    parser.add_argument("--kernels", nargs="+", choices=KERNEL_SETS, default=["all"], help="with how many of its own kernels")
    parser.add_argument("--precision", nargs="+", choices=("bf16", "fp8"), default=["bf16"])
    parser.add_argument("--fp8-scaling", choices=("tensor", "row", "block"), default="tensor")
    parser.add_argument("--fp8-keep", nargs="+", choices=("ends", "head", "none"), default=["ends"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="one more step, by kernel")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    kept = {"bf16": ["ends"], "fp8": options.fp8_keep}
    numbers = [Numbers(name, options.fp8_scaling, keep) for name in options.precision for keep in kept[name]]
    settings = product(options.mbs or [MBS[options.model]], options.recompute, options.kernels, numbers)
    for mbs, recompute, kernel_set, of in settings:
        row, kernels, gpu = measure_in_own_process(
            options.model, mbs, recompute, kernel_set, of, options.steps, options.profile
        )
        rows.append(row)
        if kernels:
            show_profile(kernels)
    if options.json:
        print(json.dumps({"machine": machine(gpu), "seq": SEQ, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1))
    else:
        show(rows, f"{machine(gpu)} · sequences of {SEQ}")


if __name__ == "__main__":
    main()
