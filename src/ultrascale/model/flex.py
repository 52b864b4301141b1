"""Sliding-window and document masks on a GPU with torch's FlexAttention.

A dense mask has s² entries per sequence and prevents attention from using its fast kernels. A block mask marks each
128 × 128 block of pairs as full, partial or empty: empty blocks are never computed, and the mask function is evaluated pair by
pair inside the kernel only for partial blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from ultrascale.model.attention import add_sinks

MIN_HEAD_DIM = 16  # smallest head dimension of torch's kernel: the tile of a matrix unit

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def why_not(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why FlexAttention cannot be used, so that masks are dense; None if it can."""
    if head_dim < MIN_HEAD_DIM:
        return f"heads of {head_dim} are narrower than {MIN_HEAD_DIM}"
    if dtype == torch.float64:
        return "the numbers are float64"
    return None


def mask(length: int, window: int | None, documents: Tensor | None, device: torch.device, chunked: bool = False) -> BlockMask:
    """The causal block mask of sequences of `length` tokens, within a window and within `documents` [b, s] if given.

    `chunked`: the window is a token's chunk of the sequence.
    """
    if documents is None:
        return _windowed(length, window, device, chunked)
    return _block_mask(length, window, documents, device, chunked)


@lru_cache(maxsize=8)
def _windowed(length: int, window: int | None, device: torch.device, chunked: bool) -> BlockMask:
    """Cached: the mask is the same for every micro-batch."""
    return _block_mask(length, window, None, device, chunked)


def _block_mask(length: int, window: int | None, documents: Tensor | None, device: torch.device, chunked: bool) -> BlockMask:
    # Uncompiled, create_block_mask would materialize every pair first.
    create = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    batch = None if documents is None else len(documents)
    mask: BlockMask = create(rule(window, documents, chunked), batch, None, length, length, device=device)
    return mask


def rule(window: int | None, documents: Tensor | None, chunked: bool = False) -> Rule:
    """A mask function: whether the token at `q` attends to the one at `k`."""

    def attends(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        visible = k <= q
        if window is not None and chunked:
            visible = visible & (q // window == k // window)
        elif window is not None:
            visible = visible & (q - k < window)  # the token itself and the window - 1 before it
        if documents is not None:
            visible = visible & (documents[b, q] == documents[b, k])
        return visible

    return attends


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: BlockMask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """q [b, s, heads, d], k and v [b, s, kv_heads, d] -> [b, s, heads, d]. `softcap`: scores become cap · tanh(score / cap).

    `sinks` [heads]: logits that join each softmax.
    """
    # Inside a compiled block it is compiled with the block; on a CPU it cannot be compiled, and tests run it eagerly.
    function: Any = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        function = _compiled(function)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    capped = None if softcap is None else _softcap(softcap)
    options: dict[str, Any] = {"block_mask": visible, "scale": scale, "enable_gqa": True}
    if sinks is None:
        out: Tensor = function(q, k, v, capped, **options)
        return out.transpose(1, 2)
    out, aux = function(q, k, v, capped, return_aux=AuxRequest(lse=True), **options)
    return add_sinks(out.transpose(1, 2), aux.lse, sinks)[0]


@cache
def _softcap(cap: float) -> Callable[..., Tensor]:
    """Cached: torch.compile would compile each new function anew."""

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
