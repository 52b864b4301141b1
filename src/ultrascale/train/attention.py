"""Which of torch's attention kernels a GPU runs: each is timed once for the job's own shape, and the fastest is used."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ultrascale.model.transformer import Core
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.train.build import COMPUTE

NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
}
WARM_UP, TIMED, REPLAYED = 2, 4, 3


class Shape(NamedTuple):
    """One layer's queries, keys and values on one rank."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Timed:
    """One layer's attention, forward and backward, by each kernel that takes it, the fastest first."""

    times_ms: dict[SDPBackend, float]

    def __str__(self) -> str:
        return "attention: " + ", ".join(f"{NAMES[backend]} {ms:.2f} ms" for backend, ms in self.times_ms.items())

    def apply(self, models: Iterable[nn.Module]) -> None:
        """Models take them in this order: the next serves a shape that the first refuses, the plain one what all refuse."""
        for core in (module for model in models for module in model.modules() if isinstance(module, Core)):
            core.backends = [*self.times_ms, SDPBackend.MATH]


def fastest(job: Job, layout: Layout, device: torch.device) -> Timed | None:
    """None where there is nothing to choose: on a CPU, where the sequence is cut, where a window needs kernels of its own."""
    model, window = job.model, job.model.sliding_window
    if device.type != "cuda" or layout.cp > 1 or (window is not None and window < job.seq):
        return None
    heads, kv_heads = model.heads // layout.tp, max(1, model.kv_heads // layout.tp)
    return timed(
        Shape(layout.mbs, job.seq, heads, kv_heads, model.head_dim, COMPUTE.get(job.precision, torch.bfloat16)), device
    )


def timed(shape: Shape, device: torch.device) -> Timed | None:
    """Every kernel that takes such an attention; None: no kernel does."""
    times: dict[SDPBackend, float] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns at length of why a kernel does not take a shape
        for backend in NAMES:
            try:
                times[backend] = _time_ms(backend, shape, device)
            except RuntimeError:  # it does not take this shape or format, or not on this GPU; or memory does not suffice
                continue
    torch.cuda.empty_cache()  # of shapes that the model may not have
    return Timed(dict(sorted(times.items(), key=lambda item: item[1]))) if times else None


def _time_ms(backend: SDPBackend, shape: Shape, device: torch.device) -> float:
    def numbers(heads: int) -> torch.Tensor:
        """[b, heads, s, d] as the model has them: a token's heads side by side."""
        made = torch.randn(shape.batch, shape.length, heads, shape.head_dim, dtype=shape.dtype, device=device)
        return made.transpose(1, 2).requires_grad_()

    q, k, v = (numbers(heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    grad = torch.randn_like(q)

    def forward_and_backward() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, (q, k, v), grad)

    # Recorded, so that it is the GPU that is timed and not how fast a host launches short kernels.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with sdpa_kernel(backend), torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            forward_and_backward()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(TIMED):
                forward_and_backward()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYED + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in pairwise(marks))) / TIMED
