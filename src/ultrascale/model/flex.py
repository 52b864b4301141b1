"""Attention to a part of the past on a GPU: a window, a document or both, by torch's FlexAttention.

A dense mask has a number for each pair of tokens, s² of them in every sequence, and keeps attention from its fast kernels. A
block mask says which 128 × 128 pairs are seen whole, in part or not at all: the last are never computed, and only for those
seen in part is the rule asked, pair by pair, inside the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

NARROWEST = 16  # heads that torch's kernel takes: what a matrix unit multiplies at once

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def why_not(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why masks are dense on a GPU too; None: they are block masks."""
    if head_dim < NARROWEST:
        return f"heads of {head_dim} are narrower than {NARROWEST}"
    if dtype == torch.float64:
        return "the numbers are float64"
    return None


def mask(length: int, window: int | None, documents: Tensor | None, device: torch.device) -> BlockMask:
    """Who sees whom, in sequences of so many tokens: nobody ahead, and of `documents` [b, s] only their own."""
    return _windowed(length, window, device) if documents is None else _made(length, window, documents, device)


@lru_cache(maxsize=8)
def _windowed(length: int, window: int | None, device: torch.device) -> BlockMask:
    """The same for every micro-batch."""
    return _made(length, window, None, device)


def _made(length: int, window: int | None, documents: Tensor | None, device: torch.device) -> BlockMask:
    # Uncompiled it would write out every pair first.
    make = _compiled(create_block_mask) if device.type == "cuda" else create_block_mask
    batch = None if documents is None else len(documents)
    made: BlockMask = make(rule(window, documents), batch, None, length, length, device=device)
    return made


def rule(window: int | None, documents: Tensor | None) -> Rule:
    """Whether the token at `q` sees the one at `k`."""

    def sees(b: Tensor, _: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = k <= q
        if window is not None:
            seen = seen & (q - k < window)  # itself and the window - 1 before it
        if documents is not None:
            seen = seen & (documents[b, q] == documents[b, k])
        return seen

    return sees


def attend(q: Tensor, k: Tensor, v: Tensor, seen: BlockMask) -> Tensor:
    """q [b, s, heads, d], k and v [b, s, kv_heads, d] -> [b, s, heads, d]."""
    # Inside a compiled block it is compiled with it; on a CPU it cannot be, and tests run it as it is.
    function: Any = flex_attention
    if q.is_cuda and not torch.compiler.is_compiling():
        function = _compiled(function)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = function(q, k, v, block_mask=seen, enable_gqa=True)
    return out.transpose(1, 2)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
