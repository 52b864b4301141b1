"""Autotuning on a GPU: the attention kernel, and where a fused block computes its gates.

Attention: torch's backends, and FlashAttention 4 if it is installed. Gates: between the GEMMs, or in their epilogues
(kernels/gated_gemm.py). Each is timed once for the job's shape, and the fastest is used; timings are kept on disk
(kernels/timing_cache.py). The kernels of linear attention are compared with the plain rule.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ultrascale.kernels import flash, gated_gemm, timing_cache
from ultrascale.kernels.delta_rule import DeltaRuleKernels
from ultrascale.kernels.fused import FusedBlock, GatedMLPKernel
from ultrascale.kernels.optional_kernels import FLASH_ATTENTION_4, QUACK, one_line
from ultrascale.kernels.selection import why_not_fused
from ultrascale.model.attention import TileAttention
from ultrascale.model.linear_attention import gated_delta_rule
from ultrascale.model.self_attention import CausalAttention
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training

WARM_UP, TIMED, REPLAYED = 2, 4, 3
BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""torch's backends"""
FLASH_4 = "FlashAttention 4"
ROUNDS, TURN_MS = 5, 100.0  # long enough for the power limit to set the clock, as it does in training
MAX_SLOWDOWN = 1.02
"""how much slower gates within GEMMs may be: avoided memory traffic saves power, which gives the rest of a step a higher clock
(3b on an H200: 8.55 ms either way, and a step 1 % faster)"""


CHECKED_TOKENS, MAX_ERROR = 256, 0.02
"""of linear attention: operands rounded to bf16 give 0.002 to 0.004 of output and gradients, wrong kernels gave 0.9"""

RECALLED = " (timed by an earlier run)"


def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else device.type


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TimedGraph:
    """Several runs of an action captured in one graph, so that the GPU is timed and not the launch overhead of the host."""

    def __init__(self, action: Callable[[], object], device: torch.device) -> None:
        self.graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                action()
            with torch.cuda.graph(self.graph, stream=stream):
                for _ in range(TIMED):
                    action()

    def times_ms(self, replays: int = REPLAYED) -> list[float]:
        """The time of one run of the action, for each replay."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            self.graph.replay()
            mark.record()
        marks[-1].synchronize()
        return [float(start.elapsed_time(end)) / TIMED for start, end in pairwise(marks)]


def in_turns_ms(pieces: dict[str, TimedGraph], rounds: int, turn_ms: float) -> dict[str, float]:
    """The median of each, measured in turns, so that the temperature of the card is the same for all."""
    times: dict[str, list[float]] = {name: [] for name in pieces}
    for _ in range(rounds):
        for name, piece in pieces.items():
            single_ms = piece.times_ms(1)[0]
            times[name] += piece.times_ms(max(REPLAYED, round(turn_ms / single_ms / TIMED)))
    return {name: statistics.median(each) for name, each in times.items()}


class AttentionShape(NamedTuple):
    """The shape of one layer's queries, keys and values on one rank."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        heads = f"{self.heads} and {self.kv_heads} heads of {self.head_dim}"
        return f"attention of {self.batch} × {self.length} tokens, {heads}, {_name(self.dtype)}"


@dataclass(frozen=True)
class AttentionTimes:
    """Time of one layer's attention, forward and backward, with each kernel that supports it, the fastest first."""

    times_ms: dict[str, float]
    failed: str = ""
    """the error of FlashAttention 4 if it is installed but does not run here"""
    recalled: bool = False
    """timed by an earlier run"""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self.times_ms.items())
        failed = f"; {FLASH_4} does not run here: {self.failed}" if self.failed else ""
        return f"attention: {times}{failed}{RECALLED * self.recalled}"

    def apply(self, models: Iterable[nn.Module]) -> None:
        """Sets the order of torch's backends: the next is used for a shape that the first rejects, the math one last."""
        first, modules = next(iter(self.times_ms)), [module for model in models for module in model.modules()]
        for core in (module for module in modules if isinstance(module, CausalAttention)):
            core.backends = [*(BACKENDS[name] for name in self.times_ms if name in BACKENDS), SDPBackend.MATH]
            core.kernel = flash.attend if first == FLASH_4 else None
        for tiles in (module for module in modules if isinstance(module, TileAttention)):
            tiles.cudnn = next((name for name in self.times_ms if name in ("cuDNN", "flash")), None) == "cuDNN"


def fastest_attention(job: Job, layout: Layout, dtype: torch.dtype, device: torch.device) -> AttentionTimes | None:
    """Times the kernels; None if there is no choice: on a CPU, with a sliding window, for other attention than Llama's.

    Where context parallelism cuts attention into tiles, a rank's own tile is timed.
    """
    model, window = job.model, job.model.sliding_window
    is_usual = model.mla is None and model.attention_scale is None and model.attention_softcap is None
    is_usual = is_usual and not model.attention_sinks
    if device.type != "cuda" or not is_usual or (window is not None and window < job.seq):
        return None
    head_ranks = layout.cp if layout.context_parallel == "ulysses" else 1
    heads, kv_heads = (max(1, count // layout.tp // head_ranks) for count in (model.heads, model.kv_heads))
    length = job.seq * head_ranks // layout.cp
    return time_attention(AttentionShape(layout.mbs, length, heads, kv_heads, model.head_dim, dtype), device)


def time_attention(shape: AttentionShape, device: torch.device) -> AttentionTimes | None:
    """Times every kernel that supports the shape, unless an earlier run did; None if none of torch's backends does."""
    gpu = _gpu(device)
    if (known := timing_cache.recall(gpu, str(shape))) is not None and any(name in BACKENDS for name in known):
        return AttentionTimes(dict(sorted(known.items(), key=lambda item: item[1])), recalled=True)
    times: dict[str, float] = {}
    failed = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns at length about why a kernel does not support a shape
        for name in BACKENDS:
            try:
                times[name] = _attention_ms(name, shape, device)
            except RuntimeError:  # shape, dtype or GPU is not supported, or memory does not suffice
                continue
        if times and FLASH_ATTENTION_4.why_not(shape.dtype) is None:
            try:
                with FLASH_ATTENTION_4.raising():
                    times[FLASH_4] = _attention_ms(FLASH_4, shape, device)
            except Exception as error:  # it has its own compiler, with errors of many classes: the run continues without it
                failed = one_line(error)
    torch.cuda.empty_cache()  # frees blocks of shapes that the model may not have
    if not times:
        return None
    if not failed:  # else the package is tried again: it may have been mended
        timing_cache.store(gpu, str(shape), times)
    return AttentionTimes(dict(sorted(times.items(), key=lambda item: item[1])), failed)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _attention_ms(name: str, shape: AttentionShape, device: torch.device) -> float:
    def randn(heads: int) -> Tensor:
        return torch.randn(shape.batch, shape.length, heads, shape.head_dim, dtype=shape.dtype, device=device)

    q, k, v = (randn(heads).requires_grad_() for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    grad = torch.randn_like(q)
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = flash.attend if name == FLASH_4 else _sdpa

    def forward_and_backward() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
        return statistics.median(TimedGraph(forward_and_backward, device).times_ms())


@dataclass(frozen=True)
class MLPTimes:
    """Times of one layer's GEMMs with its gates, forward and backward."""

    between_ms: float | None
    within_ms: float | None
    failed: str = ""
    """the error of quack if it is installed but does not run here"""
    recalled: bool = False
    """timed by an earlier run"""

    def __str__(self) -> str:
        if self.within_ms is None or self.between_ms is None:
            return f"gates: between matmuls; quack's kernels do not run here: {self.failed}"
        times = f"within matmuls {self.within_ms:.2f} ms, between them {self.between_ms:.2f} ms"
        return f"gates: {times}{RECALLED * self.recalled}"

    def apply(self, models: Iterable[nn.Module]) -> None:
        if self.within_ms is None or self.between_ms is None or self.within_ms > MAX_SLOWDOWN * self.between_ms:
            return
        for block in (module for model in models for module in model.modules() if isinstance(module, FusedBlock)):
            block.mlp_kernel = gated_gemm.GatedGemmKernel()


def fastest_mlp(job: Job, layout: Layout, training: Training, dtype: torch.dtype, device: torch.device) -> MLPTimes | None:
    """Times both; None if there is no choice: no GPU, no fused block with GEMMs in bf16 or fp16, no quack, GEMMs in chunks.

    The GEMMs of chunks write into one tensor, which quack's kernels allocate themselves.
    """
    if device.type != "cuda" or job.precision == "fp8" or (layout.tp > 1 and training.tp_chunks > 1):
        return None
    if QUACK.why_not(dtype) or why_not_fused(job, layout, training):
        return None
    return time_mlp(layout.mbs * job.seq // layout.cp, job.model.hidden, job.model.ffn // layout.tp, dtype, device)


def time_mlp(tokens: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device) -> MLPTimes | None:
    """Times both for a shape, unless an earlier run did; None if there is not enough memory."""
    gpu, what = _gpu(device), f"gates of {tokens} tokens, {hidden} × {ffn}, {_name(dtype)}"
    known = timing_cache.recall(gpu, what)
    if known is not None and known.keys() == {"between", "within"}:
        return MLPTimes(known["between"], known["within"], recalled=True)
    try:
        with QUACK.raising():
            times = _mlp_ms(
                {"between": GatedMLPKernel(), "within": gated_gemm.GatedGemmKernel()}, tokens, hidden, ffn, dtype, device
            )
    except torch.OutOfMemoryError:
        return None
    except Exception as error:  # it has its own compiler, with errors of many classes: the run continues without it
        return MLPTimes(None, None, one_line(error))
    finally:
        torch.cuda.empty_cache()
    timing_cache.store(gpu, what, times)
    return MLPTimes(times["between"], times["within"])


def _mlp_ms(
    kernels: dict[str, GatedMLPKernel], tokens: int, hidden: int, ffn: int, dtype: torch.dtype, device: torch.device
) -> dict[str, float]:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x, grad, down = randn(tokens, hidden), randn(tokens, hidden), randn(hidden, ffn)
    gate_, up = randn(2 * ffn, hidden).chunk(2)

    def forward_and_backward(kernel: GatedMLPKernel) -> None:
        both, _ = kernel.forward(x, gate_, up)
        grad_both, _ = kernel.backward(grad, down, both)
        kernel.grad_input(grad_both, gate_, up)
        kernel.grad_weights(grad_both, x)

    graphs = {name: TimedGraph(partial(forward_and_backward, kernel), device) for name, kernel in kernels.items()}
    return in_turns_ms(graphs, ROUNDS, TURN_MS)


@dataclass(frozen=True)
class DeltaRuleCheck:
    """Our kernels of linear attention beside the plain rule: Triton may compile them wrongly for a GPU, without a word."""

    error: float = 0.0
    """the largest of output and gradients, relative to their norms"""
    failed: str = ""
    """their own error if they do not run here"""

    @property
    def is_right(self) -> bool:
        return not self.failed and self.error < MAX_ERROR

    def __str__(self) -> str:
        if self.failed:
            return f"linear attention: operator by operator; our kernels do not run here: {self.failed}"
        found = f"their output and gradients differ from the plain rule's by {self.error:.2%}"
        return f"linear attention: {'our kernels' if self.is_right else 'operator by operator instead of our kernels'}; {found}"


def check_delta_rule(job: Job, layout: Layout, dtype: torch.dtype, device: torch.device) -> DeltaRuleCheck | None:
    """A few tokens of the job's heads; None without a GPU, where a rehearsal only pretends to run the kernels."""
    linear = job.model.linear_attention
    if device.type != "cuda" or linear is None:
        return None
    ranks = layout.tp * layout.cp
    heads = linear.key_heads // ranks, linear.value_heads // ranks
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(1, CHECKED_TOKENS, *shape, device=device, generator=generator)

    q, k = (randn(heads[0], linear.key_head_dim).to(dtype) for _ in range(2))
    v, grad = (randn(heads[1], linear.value_head_dim).to(dtype) for _ in range(2))
    inputs = [one.requires_grad_() for one in (q, k, v, -randn(heads[1]).exp(), randn(heads[1]).sigmoid())]

    def output_and_gradients(rule: Callable[..., Tensor]) -> Iterable[Tensor]:
        out = rule(*inputs)
        return (one.detach().float() for one in (out, *torch.autograd.grad(out, inputs, grad)))

    try:
        pairs = zip(output_and_gradients(DeltaRuleKernels.apply), output_and_gradients(gated_delta_rule), strict=True)
        errors = [float((mine - plain).norm() / plain.norm()) for mine, plain in pairs]
        return DeltaRuleCheck(max(errors) if all(error == error for error in errors) else float("inf"))
    except Exception as error:  # of Triton's compiler or the driver: the run goes on without them
        return DeltaRuleCheck(failed=one_line(error))
