"""The contests of attention under a mask: a sliding window, and documents packed into sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from ultrascale.measure.bench.kernels import KernelCandidate, KernelComparison, KernelShape
from ultrascale.measure.bench.kernels_block import both_ways, leaves, numbers
from ultrascale.model import flex
from ultrascale.model.transformer import CausalAttention, within

WINDOW, DOCUMENT = 1024, 500  # tokens: seen, and in a document on average
NONE = {"liger": "has none"}


def window(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """Others make a dense mask in every layer, as the plain model does."""
    reach = min(WINDOW, max(1, shape.seq // 4))
    pairs = shape.seq * reach - reach * (reach - 1) // 2
    return _contest(shape, device, dtype, reach, None, pairs * shape.mbs, f"window {reach:,}")


def documents(shape: KernelShape, device: torch.device, dtype: torch.dtype) -> KernelComparison:
    """All get their mask made: it is made once for all layers."""
    at_random = torch.Generator().manual_seed(0)
    ends = torch.rand(shape.mbs, shape.seq, generator=at_random) < 1 / DOCUMENT
    numbered = ends.cumsum(dim=1).to(device)
    lengths = [torch.bincount(row) for row in numbered]
    pairs = sum(int((row * (row + 1) // 2).sum()) for row in lengths)
    mean = shape.tokens / sum(len(row) for row in lengths)
    return _contest(shape, device, dtype, None, numbered, pairs, f"documents of {mean:,.0f}")


def _contest(
    shape: KernelShape,
    device: torch.device,
    dtype: torch.dtype,
    reach: int | None,
    numbered: Tensor | None,
    pairs: int,
    what: str,
) -> KernelComparison:
    model, rows = shape.model, (shape.mbs, shape.seq)
    heads = model.heads, model.kv_heads, model.kv_heads
    inputs = leaves(*(numbers(device, dtype, *rows, count, model.head_dim, seed=seed) for seed, count in enumerate(heads)))
    grads = (numbers(device, dtype, *rows, model.heads, model.head_dim, seed=3),)
    core = CausalAttention(reach)
    bias = None if numbered is None else within(numbered, dtype)
    seen = flex.mask(shape.seq, reach, numbered, device)

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = core(q, k, v, bias)
        return out

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex.attend(q, k, v, seen)

    return KernelComparison(
        f"{shape.mbs} × {shape.seq:,}, {model.heads} heads of {model.head_dim}, {what}",
        {
            "eager": lambda: KernelCandidate(both_ways(dense, inputs, grads)),
            "compile": lambda: KernelCandidate(both_ways(torch.compile(dense, dynamic=False), inputs, grads)),
            "ours": lambda: KernelCandidate(both_ways(ours, inputs, grads)),
        },
        # Two products of a pair forward and five backward, 2·d operations each.
        flops=7 * 2.0 * model.head_dim * model.heads * pairs,
        missing=NONE,
    )
