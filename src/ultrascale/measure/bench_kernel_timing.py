"""Runs contests of kernels on this machine's GPU: each contestant once for its numbers, then all in turns for their times."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ultrascale.kernels import gated_gemm
from ultrascale.measure import bench_kernel_cases as cases
from ultrascale.measure.bench_kernels import KernelCandidate, KernelComparison, KernelResult, KernelShape, KernelsReport
from ultrascale.specs.errors import SpecError
from ultrascale.specs.gpu import GPU
from ultrascale.specs.units import GIB
from ultrascale.train import attention, gate_autotune
from ultrascale.train.machine import kind_of_gpu

ROUNDS = 3  # contestants take turns: a card that warms up slows all of them
ROUND_MS, FEWEST = 40.0, 3  # how long a turn is, and how many times it runs at the least
COLD_BYTES = 2**30  # written before each run: many times the L2 cache, and long enough that the host stays ahead of the GPU

MAKERS: dict[str, Callable[[KernelShape, torch.device, torch.dtype], KernelComparison]] = {
    "norm": cases.norm,
    "rotary": cases.rotary,
    "gate": cases.gate,
    "loss": cases.loss,
    "adamw": cases.adamw,
    "window": cases.window,
    "documents": cases.documents,
}


def measure(
    kernels: Sequence[str], models: Sequence[KernelShape], say: Callable[[str], None] = lambda text: None
) -> Iterator[KernelsReport]:
    """Every contest, one after the other: what is known after each. `say` is told what is under way."""
    if not torch.cuda.is_available():
        raise SpecError(
            "bench kernels races kernels on a GPU but torch sees none here: try `ultrascale doctor`, which says what it sees"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    gpu = _gpu(name)
    say("attention by each kernel that there is; gates between products and within them")
    lines = tuple(f"{shape.model.name}: {found}" for shape in models for found in _choices(shape, device))
    report = KernelsReport(f"{name}, torch {torch.__version__}", (), lines)
    asked = [(kernel, shape) for shape in models for kernel in kernels]
    for number, (kernel, shape) in enumerate(asked, 1):
        step = f"{number} of {len(asked)}: {kernel}, {shape.model.name}"
        say(f"{step}: making its inputs")
        contest = MAKERS[kernel](shape, device, torch.bfloat16)
        report = replace(report, rows=(*report.rows, _row(kernel, shape, contest, gpu, partial(_told, say, step))))
        del contest
        _free()
        yield report


def _told(say: Callable[[str], None], step: str, text: str) -> None:
    say(f"{step}: {text}")


def _row(kernel: str, shape: KernelShape, asked: KernelComparison, gpu: GPU | None, say: Callable[[str], None]) -> KernelResult:
    runners: dict[str, KernelCandidate] = {}
    missing = dict(asked.missing)
    wanted: tuple[Tensor, ...] = ()
    differences: dict[str, float] = {}
    extra: dict[str, float] = {}
    for way, make in asked.ways.items():
        say(f"{way}, once, compiled where it has to be")
        try:
            one = make()
            outputs = one.run()
            found = outputs if one.result is None else one.result()
            differences[way] = difference(found, wanted or found)
            wanted = wanted or tuple(output.detach().clone() for output in found)
            extra[way] = _extra_gib(one)
            runners[way] = one
        except torch.OutOfMemoryError:
            missing[way] = "out of memory"
        except Exception as error:
            if way == "ours":
                raise
            missing[way] = f"failed: {type(error).__name__}"  # another's version that does not go with this torch
        _free()
    del wanted
    times = time_ms(runners, say)
    ours = times.get("ours")
    gb_s = asked.moved / ours / 1e6 if ours and asked.moved else None
    tflops = asked.flops / ours / 1e9 if ours and asked.flops else None
    of_peak = None
    if gpu is not None and gb_s is not None:
        of_peak = gb_s / gpu.memory_bandwidth_gb_s
    elif gpu is not None and tflops is not None and "bf16" in gpu.peak_tflops:
        of_peak = tflops / gpu.peak_tflops["bf16"]
    return KernelResult(kernel, shape.model.name, asked.size, times, missing, differences, extra, gb_s, tflops, of_peak)


def _extra_gib(one: KernelCandidate) -> float:
    """Not of the first run, which also makes what stays."""
    one.reset()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    one.run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB


def time_ms(runners: dict[str, KernelCandidate], say: Callable[[str], None]) -> dict[str, float]:
    """The median of each, in turns, with a cold L2 cache."""
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

    turns = {way: max(FEWEST, round(ROUND_MS / min(turn(one, FEWEST)))) for way, one in runners.items()}
    seen: dict[str, list[float]] = {way: [] for way in runners}
    for number in range(ROUNDS):
        for way, one in runners.items():
            say(f"timing, round {number + 1} of {ROUNDS}, {way}")
            seen[way] += turn(one, turns[way])
    return {way: statistics.median(times) for way, times in seen.items()}


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest, each over the largest number of what is wanted."""
    worst = 0.0
    for one, other in zip(found, wanted, strict=True):
        wide = torch.promote_types(other.dtype, torch.float32)
        largest = float(other.abs().max()) or 1.0
        worst = max(worst, float((one.detach().to(wide) - other.to(wide)).abs().max()) / largest)
    return worst


def _choices(shape: KernelShape, device: torch.device) -> Iterator[str]:
    """What a run of this shape would choose among kernels that are not ours."""
    model = shape.model
    heads = attention.AttentionShape(shape.mbs, shape.seq, model.heads, model.kv_heads, model.head_dim, torch.bfloat16)
    if (found := attention.timed(heads, device)) is not None:
        yield str(found)
    if gated_gemm.why_not(torch.bfloat16) is None:
        products = gate_autotune.timed(shape.tokens, model.hidden, model.ffn, torch.bfloat16, device)
        if products is not None:
            yield str(products)


def _gpu(name: str) -> GPU | None:
    try:
        return GPU.load(kind_of_gpu(name))
    except SpecError:
        return None


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
