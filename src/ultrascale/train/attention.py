"""Which attention kernel a GPU runs, of torch's and FlashAttention 4 where it is installed.

Each is timed once for the job's own shape, and the fastest is used.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ultrascale.kernels import flash
from ultrascale.kernels.optional_kernels import FLASH_ATTENTION_4, one_line
from ultrascale.model.transformer import CausalAttention
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.train.build import COMPUTE
from ultrascale.train.timing import TimedGraph

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""torch's own"""
FLASH_4 = "FlashAttention 4"


class AttentionShape(NamedTuple):
    """One layer's queries, keys and values on one rank."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionTimes:
    """One layer's attention, forward and backward, by each kernel that takes it, the fastest first."""

    times_ms: dict[str, float]
    failed: str = ""
    """what FlashAttention 4 said, where it is installed and does not run here"""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self.times_ms.items())
        return f"attention: {times}" + (f"; {FLASH_4} does not run here: {self.failed}" if self.failed else "")

    def apply(self, models: Iterable[nn.Module]) -> None:
        """Models take torch's in this order: the next serves a shape that the first refuses, the plain one what all refuse."""
        first = next(iter(self.times_ms))
        for core in (module for model in models for module in model.modules() if isinstance(module, CausalAttention)):
            core.backends = [*(BACKENDS[name] for name in self.times_ms if name in BACKENDS), SDPBackend.MATH]
            core.kernel = flash.attend if first == FLASH_4 else None


def fastest(job: Job, layout: Layout, device: torch.device) -> AttentionTimes | None:
    """None where there is nothing to choose: on a CPU, where the sequence is cut, where a window needs kernels of its own."""
    model, window = job.model, job.model.sliding_window
    if device.type != "cuda" or layout.cp > 1 or (window is not None and window < job.seq):
        return None
    heads, kv_heads = model.heads // layout.tp, max(1, model.kv_heads // layout.tp)
    return timed(
        AttentionShape(layout.mbs, job.seq, heads, kv_heads, model.head_dim, COMPUTE.get(job.precision, torch.bfloat16)), device
    )


def timed(shape: AttentionShape, device: torch.device) -> AttentionTimes | None:
    """Every kernel that takes such an attention; None: no kernel of torch's does."""
    times: dict[str, float] = {}
    failed = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns at length of why a kernel does not take a shape
        for name in BACKENDS:
            try:
                times[name] = _time_ms(name, shape, device)
            except RuntimeError:  # it does not take this shape or format, or not on this GPU; or memory does not suffice
                continue
        if times and flash.why_not(shape.dtype) is None:
            try:
                with FLASH_ATTENTION_4.raising():
                    times[FLASH_4] = _time_ms(FLASH_4, shape, device)
            except Exception as error:  # a compiler of its own, whose errors are of many kinds: a run does without it
                failed = one_line(error)
    torch.cuda.empty_cache()  # of shapes that the model may not have
    return AttentionTimes(dict(sorted(times.items(), key=lambda item: item[1])), failed) if times else None


def _plainly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _time_ms(name: str, shape: AttentionShape, device: torch.device) -> float:
    def numbers(heads: int) -> Tensor:
        return torch.randn(shape.batch, shape.length, heads, shape.head_dim, dtype=shape.dtype, device=device)

    q, k, v = (numbers(heads).requires_grad_() for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    grad = torch.randn_like(q)
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = flash.attend if name == FLASH_4 else _plainly

    def forward_and_backward() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
        return statistics.median(TimedGraph(forward_and_backward, device).times_ms())
