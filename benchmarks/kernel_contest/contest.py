"""`bench kernels`: our GPU kernels against plain torch, torch.compile and Liger-Kernel, with the same inputs in one run.

cases.py has the kernels; here each one runs once for its outputs, then all take turns for their times.
Torch is imported where it is used: the command checks its options first.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ultrascale.cli.common import progress, select, terminal, write_json
from ultrascale.launch import launcher
from ultrascale.show.lines import labelled, table
from ultrascale.specs.errors import SpecError
from ultrascale.specs.gpu import GPU
from ultrascale.specs.model import Model
from ultrascale.specs.units import GIB
from ultrascale.specs.units import tokens as count
from ultrascale.train import import_torch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CANDIDATES = ("eager", "compile", "liger", "ours")
KERNELS = ("norm", "rotary", "gate", "loss", "adamw", "window", "documents")
SEQ = 4096
ROUNDS = 3  # kernels take turns, since a GPU that warms up slows all of them
ROUND_MS, FEWEST = 40.0, 3  # length of a turn, and the fewest runs in it
COLD_BYTES = 2**30  # written before each run: many times the L2 cache, and long enough for the host to stay ahead


@dataclass(frozen=True)
class KernelShape:
    """What one GPU has of a model in a step."""

    model: Model
    mbs: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.mbs * self.seq


@dataclass(frozen=True)
class KernelCandidate:
    run: Callable[[], tuple[Tensor, ...]]
    """forward and backward: outputs, then gradients"""
    reset: Callable[[], None] = lambda: None
    """restores what a run overwrites; not timed"""
    result: Callable[[], tuple[Tensor, ...]] | None = None
    """what to compare, where it is not what `run` returns"""


@dataclass(frozen=True)
class KernelComparison:
    size: str
    candidates: dict[str, Callable[[], KernelCandidate]]
    """in the order of CANDIDATES; all are compared with the first"""
    moved: int = 0
    """bytes that ours reads and writes"""
    flops: float = 0.0
    """of matmuls, where they take the time"""
    missing: dict[str, str] = field(default_factory=dict)
    """candidates that do not exist, and why"""


@dataclass(frozen=True)
class KernelResult:
    kernel: str
    model: str
    size: str
    times_ms: dict[str, float]
    missing: dict[str, str]
    """candidates without a time, and why"""
    differences: dict[str, float]
    """from plain torch: the largest, over the largest value of that output or gradient"""
    extra_gib: dict[str, float]
    """peak memory of a run, beyond what was allocated before"""
    gb_s: float | None
    tflops: float | None
    of_peak: float | None
    """of the GPU's bandwidth, or of its matmul rate; None: neither is known"""

    @property
    def share(self) -> float | None:
        """Our time over the best other."""
        others = [ms for candidate, ms in self.times_ms.items() if candidate != "ours"]
        return self.times_ms["ours"] / min(others) if others and "ours" in self.times_ms else None

    @property
    def verdict(self) -> str:
        return "–" if self.share is None else "keep" if self.share < 1 else "slower"


@dataclass(frozen=True)
class KernelsReport:
    machine: str
    rows: tuple[KernelResult, ...]
    choices: tuple[str, ...]
    """which kernels of others the engine would select, by shape: causal attention, and gates inside GEMMs"""


def run(only: str | None, tokens: str | None, hidden: int | None, json_file: Path | None) -> None:
    """The command."""
    names, requested = (
        select(only, KERNELS, "kernel"),
        shapes(None if tokens is None else count(tokens, "--tokens", "16k"), hidden),
    )
    if not launcher.has_gpu():
        raise SpecError(
            "bench kernels needs a GPU but nvidia-smi shows none here: run it on a machine that has one; "
            "docs/kernels/README.md holds the table of an H200"
        )
    import_torch()
    with progress() as say:
        for report in measure(names, requested, say):
            write_json(json_file, kernels_json(report))  # after each, so an interrupted bench keeps its results
    show_kernels(terminal(), report)


def shapes(tokens: int | None, hidden: int | None) -> list[KernelShape]:
    """Those of benchmarks/gpu, or one of the given width."""
    if hidden is None:
        models = {"1b": (2048, 8192, 32, 64, 8), "3b": (3072, 8192, 24, 128, 4)}
    elif hidden % 128 or not 128 <= hidden <= 2**16:
        raise SpecError(f"--hidden is {hidden} but must be a multiple of 128 from 128 to 65536, such as 4096")
    else:
        models = {f"{hidden}": (hidden, 4 * hidden, hidden // 128, 128, 4)}
    if tokens is not None and not 1 <= tokens <= 2**24:
        raise SpecError(f"--tokens is {tokens} but must be from 1 to {2**24}, such as 32768")
    found = []
    for name, (width, ffn, heads, head_dim, mbs) in models.items():
        kv_heads = 8 if heads % 8 == 0 else 1
        model = Model(
            name=name, layers=1, hidden=width, ffn=ffn, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            vocab=128256, rope_theta=500000.0,
        )  # fmt: skip
        tokens_per_step = tokens or mbs * SEQ
        seq = SEQ if tokens_per_step % SEQ == 0 else tokens_per_step
        found.append(KernelShape(model, tokens_per_step // seq, seq))
    return found


def measure(
    kernels: Sequence[str], models: Sequence[KernelShape], say: Callable[[str], None] = lambda text: None
) -> Iterator[KernelsReport]:
    """Every kernel at every shape: the report after each. `say` gets what runs now."""
    import torch

    from kernel_contest.cases import CASES

    if not torch.cuda.is_available():
        raise SpecError(
            "bench kernels races kernels on a GPU but torch sees none here: try `ultrascale doctor`, which says what it sees"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    gpu = _gpu(name)
    say("attention by each kernel that there is; gates between matmuls and within them")
    lines = tuple(f"{shape.model.name}: {found}" for shape in models for found in _choices(shape, device))
    report = KernelsReport(f"{name}, torch {torch.__version__}", (), lines)
    cases = [(kernel, shape) for shape in models for kernel in kernels]
    for number, (kernel, shape) in enumerate(cases, 1):
        step = f"{number} of {len(cases)}: {kernel}, {shape.model.name}"
        say(f"{step}: making its inputs")
        comparison = CASES[kernel](shape, device, torch.bfloat16)
        row = _measure_one(kernel, shape, comparison, gpu, lambda text, step=step: say(f"{step}: {text}"))  # type: ignore[misc]
        report = replace(report, rows=(*report.rows, row))
        del comparison
        _free()
        yield report


def _measure_one(
    kernel: str, shape: KernelShape, comparison: KernelComparison, gpu: GPU | None, say: Callable[[str], None]
) -> KernelResult:
    import torch

    runners: dict[str, KernelCandidate] = {}
    missing = dict(comparison.missing)
    wanted: tuple[Tensor, ...] = ()
    differences: dict[str, float] = {}
    extra: dict[str, float] = {}
    for candidate, make in comparison.candidates.items():
        say(f"{candidate}, once, compiled where it has to be")
        try:
            one = make()
            outputs = one.run()
            found = outputs if one.result is None else one.result()
            differences[candidate] = difference(found, wanted or found)
            wanted = wanted or tuple(output.detach().clone() for output in found)
            extra[candidate] = _extra_gib(one)
            runners[candidate] = one
        except torch.OutOfMemoryError:
            missing[candidate] = "out of memory"
        except Exception as error:
            if candidate == "ours":
                raise
            missing[candidate] = f"failed: {type(error).__name__}"  # another's version that does not work with this torch
        _free()
    del wanted
    times = time_ms(runners, say)
    ours = times.get("ours")
    gb_s = comparison.moved / ours / 1e6 if ours and comparison.moved else None
    tflops = comparison.flops / ours / 1e9 if ours and comparison.flops else None
    of_peak = None
    if gpu is not None and gb_s is not None:
        of_peak = gb_s / gpu.memory_bandwidth_gb_s
    elif gpu is not None and tflops is not None and "bf16" in gpu.peak_tflops:
        of_peak = tflops / gpu.peak_tflops["bf16"]
    return KernelResult(kernel, shape.model.name, comparison.size, times, missing, differences, extra, gb_s, tflops, of_peak)


def _extra_gib(one: KernelCandidate) -> float:
    """Not of the first run, which also allocates what stays."""
    import torch

    one.reset()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one.run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def time_ms(runners: dict[str, KernelCandidate], say: Callable[[str], None]) -> dict[str, float]:
    """The median time of each, in turns, with a cold L2 cache."""
    import torch

    cold = torch.empty(COLD_BYTES, dtype=torch.int8, device="cuda")

    def turn(one: KernelCandidate, times: int) -> list[float]:
        starts, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(times)] for _ in range(2))  # type: ignore[no-untyped-call]
        for start, end in zip(starts, ends, strict=True):
            one.reset()
            cold.zero_()
            start.record()
            one.run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(starts, ends, strict=True)]

    turns = {candidate: max(FEWEST, round(ROUND_MS / min(turn(one, FEWEST)))) for candidate, one in runners.items()}
    samples: dict[str, list[float]] = {candidate: [] for candidate in runners}
    for number in range(ROUNDS):
        for candidate, one in runners.items():
            say(f"timing, round {number + 1} of {ROUNDS}, {candidate}")
            samples[candidate] += turn(one, turns[candidate])
    return {candidate: statistics.median(times) for candidate, times in samples.items()}


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest, each relative to the largest wanted value."""
    import torch

    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        wide = torch.promote_types(other.dtype, torch.float32)
        largest = float(other.abs().max()) or 1.0
        worst = max(worst, float((one.detach().to(wide) - other.to(wide)).abs().max()) / largest)
    return worst


def _choices(shape: KernelShape, device: torch.device) -> Iterator[str]:
    """Which kernels of others a run of this shape would select."""
    import torch

    from ultrascale.kernels import autotune
    from ultrascale.kernels.optional_kernels import QUACK

    model = shape.model
    heads = autotune.AttentionShape(shape.mbs, shape.seq, model.heads, model.kv_heads, model.head_dim, torch.bfloat16)
    if (found := autotune.time_attention(heads, device)) is not None:
        yield str(found)
    if QUACK.why_not(torch.bfloat16) is None:
        matmuls = autotune.time_mlp(shape.tokens, model.hidden, model.ffn, torch.bfloat16, device)
        if matmuls is not None:
            yield str(matmuls)


def _gpu(name: str) -> GPU | None:
    from ultrascale.launch.machine import kind_of_gpu

    try:
        return GPU.load(kind_of_gpu(name))
    except SpecError:
        return None


def _free() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


STYLES = {"keep": "green", "slower": "bold red", "–": ""}


def show_kernels(console: Console, report: KernelsReport) -> None:
    columns = (
        *(f"{candidate} ms" for candidate in CANDIDATES),
        "ours / best other",
        "ours moves or computes",
        "largest difference",
        "",
    )
    title = f"forward and backward, medians in ms with a cold L2 cache: {report.machine}"
    results = table(title, "kernel", "shape", *columns, left=("kernel", "shape"))
    for row in report.rows:
        results.add_row(
            row.kernel,
            f"{row.model}: {row.size}",
            *(_kernel_time(row, candidate) for candidate in CANDIDATES),
            "–" if row.share is None else f"{row.share:.2f}",
            _rate(row),
            ", ".join(f"{candidate} {value:.1e}" for candidate, value in list(row.differences.items())[1:]) or "–",
            Text(row.verdict, style=STYLES[row.verdict]),
        )
    console.print(results)
    for line in report.choices:
        console.print(f"{line}; a run takes the first")
    slower = [f"{row.kernel} ({row.model})" for row in report.rows if row.verdict == "slower"]
    if slower:
        labelled(console, "slower:", "bold red", f"{', '.join(slower)}: another implementation is faster here than ours")


def kernels_json(report: KernelsReport) -> dict[str, Any]:
    rows = [{**vars(row), "ours_of_best_other": row.share, "verdict": row.verdict} for row in report.rows]
    return {"machine": report.machine, "kernels": rows, "choices": report.choices}


def _kernel_time(row: KernelResult, candidate: str) -> str:
    return f"{row.times_ms[candidate]:,.3f}" if candidate in row.times_ms else row.missing.get(candidate, "–")


def _rate(row: KernelResult) -> str:
    share = "" if row.of_peak is None else f" ({100 * row.of_peak:.0f} % of the GPU's)"
    if row.gb_s is not None:
        return f"{row.gb_s:,.0f} GB/s{share}"
    return "–" if row.tflops is None else f"{row.tflops:,.0f} TFLOP/s{share}"
