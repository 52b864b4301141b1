"""Autotunes the attention kernel on a GPU: torch's backends, and FlashAttention 4 if it is installed.

Each is timed once for the job's shape, and the fastest is used.
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
"""torch's backends"""
FLASH_4 = "FlashAttention 4"


class AttentionShape(NamedTuple):
    """The shape of one layer's queries, keys and values on one rank."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class AttentionTimes:
    """Time of one layer's attention, forward and backward, with each kernel that supports it, the fastest first."""

    times_ms: dict[str, float]
    failed: str = ""
    """the error of FlashAttention 4 if it is installed but does not run here"""

    def __str__(self) -> str:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in self.times_ms.items())
        return f"attention: {times}" + (f"; {FLASH_4} does not run here: {self.failed}" if self.failed else "")

    def apply(self, models: Iterable[nn.Module]) -> None:
        """Sets the order of torch's backends: the next is used for a shape that the first rejects, the math one last."""
        first = next(iter(self.times_ms))
        for core in (module for model in models for module in model.modules() if isinstance(module, CausalAttention)):
            core.backends = [*(BACKENDS[name] for name in self.times_ms if name in BACKENDS), SDPBackend.MATH]
            core.kernel = flash.attend if first == FLASH_4 else None


def fastest(job: Job, layout: Layout, device: torch.device) -> AttentionTimes | None:
    """Times the kernels; None if there is no choice: on a CPU, with context parallelism, with a sliding window."""
    model, window = job.model, job.model.sliding_window
    if device.type != "cuda" or layout.cp > 1 or (window is not None and window < job.seq):
        return None
    heads, kv_heads = model.heads // layout.tp, max(1, model.kv_heads // layout.tp)
    return timed(
        AttentionShape(layout.mbs, job.seq, heads, kv_heads, model.head_dim, COMPUTE.get(job.precision, torch.bfloat16)), device
    )


def timed(shape: AttentionShape, device: torch.device) -> AttentionTimes | None:
    """Times every kernel that supports the shape; None if none of torch's backends does."""
    times: dict[str, float] = {}
    failed = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns at length about why a kernel does not support a shape
        for name in BACKENDS:
            try:
                times[name] = _time_ms(name, shape, device)
            except RuntimeError:  # shape, dtype or GPU is not supported, or memory does not suffice
                continue
        if times and flash.why_not(shape.dtype) is None:
            try:
                with FLASH_ATTENTION_4.raising():
                    times[FLASH_4] = _time_ms(FLASH_4, shape, device)
            except Exception as error:  # it has its own compiler, with errors of many classes: the run continues without it
                failed = one_line(error)
    torch.cuda.empty_cache()  # frees blocks of shapes that the model may not have
    return AttentionTimes(dict(sorted(times.items(), key=lambda item: item[1])), failed) if times else None


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _time_ms(name: str, shape: AttentionShape, device: torch.device) -> float:
    def randn(heads: int) -> Tensor:
        return torch.randn(shape.batch, shape.length, heads, shape.head_dim, dtype=shape.dtype, device=device)

    q, k, v = (randn(heads).requires_grad_() for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    grad = torch.randn_like(q)
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] = flash.attend if name == FLASH_4 else _sdpa

    def forward_and_backward() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
        return statistics.median(TimedGraph(forward_and_backward, device).times_ms())
