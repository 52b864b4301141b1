"""Self-attention of a layer: projections of queries, keys and values, rotation, causal attention, output projection."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from ultrascale.model import flex
from ultrascale.model.adapters import Adapters
from ultrascale.model.attention import causal_attention, softcapped_attention
from ultrascale.model.operators import RMSNorm, l2_norm
from ultrascale.model.rotary import Rope, rotate
from ultrascale.specs.model import Model

Mask = Any
"""an attention mask: a Tensor that is added to scores, or a BlockMask on a GPU"""


class MultiLinear(nn.Module):
    """Several linear layers with one input, so that the input is gathered or cast once."""

    def __init__(self, width: int, outputs: Mapping[str, int], bias: bool) -> None:
        super().__init__()
        for name, output in outputs.items():
            self.add_module(name, nn.Linear(width, output, bias=bias))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear(x) for linear in self.children())


class CausalAttention(nn.Module):
    """Causal attention: q [b, s, heads, d], k [b, s, kv_heads, d] and v [b, s, kv_heads, dv] -> [b, s, heads, dv].

    `bias`, the complete mask with the window in it: [s, s] or [b, 1, s, s] that is added to the scores, 0 for pairs that attend
    and minus infinity for all others, or a block mask. `sinks` [heads]: logits that join each softmax. `chunked`: the window is
    a token's chunk of the sequence.
    """

    def __init__(
        self,
        sliding_window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        chunked: bool = False,
    ) -> None:
        super().__init__()
        self.sliding_window, self.scale, self.softcap, self.chunked = sliding_window, scale, softcap, chunked
        self.backends: list[SDPBackend] = []
        """backends of torch's attention on a GPU, the fastest first (kernels/autotune.py); empty: torch's own order"""
        self.kernel: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """a faster kernel to use instead of torch's backends"""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Mask | None = None, sinks: Tensor | None = None) -> Tensor:
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        if isinstance(bias, BlockMask):
            return flex.attend(q, k, v, bias, scale, self.softcap, sinks)
        length, mask, window = q.shape[1], bias, self.sliding_window
        if mask is None and window is not None and window < length:
            if self.chunked and length % window == 0:  # chunks are sequences of their own: nothing is masked but the future
                q, k, v = (torch.unflatten(x, 1, (-1, window)).flatten(0, 1) for x in (q, k, v))
                return torch.unflatten(self.forward(q, k, v, sinks=sinks), 0, (-1, length // window)).flatten(1, 2)
            mask = window_bias(length, window, q.dtype, q.device, self.chunked)
        if self.softcap is not None:
            return softcapped_attention(q, k, v, scale, self.softcap, mask)
        if sinks is not None:
            return causal_attention(q, k, v, scale, mask, sinks)
        if mask is None and self.kernel is not None:
            return self.kernel(q, k, v)
        if q.device.type == "cpu" and not torch.compiler.is_compiling():
            return causal_attention(q, k, v, scale, mask)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal: dict[str, Any] = {"attn_mask": mask, "is_causal": mask is None, "scale": scale, "enable_gqa": True}
        if mask is None and self.backends:
            with sdpa_kernel(self.backends, set_priority=True):
                return F.scaled_dot_product_attention(q, k, v, **causal).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, **causal).transpose(1, 2)


def window_bias(length: int, window: int, dtype: torch.dtype, device: torch.device, chunked: bool = False) -> Tensor:
    """[s, s]: 0 where the second token is the first or one of the window - 1 before it, else minus infinity; `chunked`: or one
    before it in its chunk of the sequence.
    """
    near = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    if chunked:
        chunks = torch.arange(length, device=device) // window
        near &= chunks.unsqueeze(1) == chunks
    else:
        near.triu_(1 - window)
    return torch.zeros(length, length, dtype=dtype, device=device).masked_fill_(near.logical_not_(), -math.inf)


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        outputs = {"q": model.q_dim, "k": model.kv_dim, "v": model.kv_dim}
        outputs |= {"gate": model.q_dim} if model.attention_gate else {}
        self.qkv = MultiLinear(model.hidden, outputs, model.qkv_bias)
        self.norms_heads = model.qk_norm_over == "head"
        """queries and keys are normed head by head; False: all heads together"""
        widths = (model.head_dim, model.head_dim) if self.norms_heads else (model.q_dim, model.kv_dim)
        self.q_norm, self.k_norm = (RMSNorm(width, model.norm_eps) if model.qk_norm else None for width in widths)
        self.l2_eps = model.norm_eps if model.qk_l2_norm and model.rotates(layer) else None
        """of the norm of rotated queries and keys; None: they are not normed"""
        self.core = CausalAttention(model.window(layer), model.score_scale, model.attention_softcap, model.chunked_window)
        self.sinks = nn.Parameter(torch.empty(model.heads)) if model.attention_sinks else None
        self.out = nn.Linear(model.q_dim, model.hidden, bias=model.attention_output_bias)
        self.adapters: Adapters | None = None

    def forward(self, x: Tensor, rope: Rope | Tensor | None, bias: Mask | None = None) -> Tensor:
        """`rope`: the rotary tables, or in a layer that does not rotate factors of queries by position."""
        q, k, v, *gate = self.qkv(x)
        if self.adapters is not None:
            q, k, v = self.adapters.add_to_inputs(x, (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and not self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (projected.unflatten(-1, (-1, self.head_dim)) for projected in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if isinstance(rope, Tensor):
            q = q * rope.to(q.dtype).view(-1, 1, 1)
        elif rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        if self.l2_eps is not None:
            q, k = l2_norm(q, self.l2_eps), l2_norm(k, self.l2_eps)
        # Cores with a key-value cache or other ranks' keys take no mask.
        masks = {name: one for name, one in (("bias", bias), ("sinks", self.sinks)) if one is not None}
        heads = self.core(q, k, v, **masks).flatten(-2)
        if gate:
            heads = heads * gate[0].sigmoid()
        out: Tensor = self.out(heads) if self.adapters is None else self.adapters.output_with(heads, self.out)
        return out
