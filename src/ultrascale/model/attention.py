"""Attention with its log-sum-exp, forward and backward as plain functions, and causal attention with grouped heads.

Layout [b, s, heads, d] throughout; k and v may have fewer heads than q. Tiles of one attention can be computed separately and
merged by their log-sum-exp: `attend_backward` of a tile takes the merged output and log-sum-exp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.model.operators import at_least_fp32

aten = torch.ops.aten

Gradients = tuple[Tensor, Tensor, Tensor]


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, cudnn: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output [b, s, heads, d] and its log-sum-exp [b, heads, s] in fp32 (float64 for float64).

    `causal` requires q and k of equal length; without it their lengths may differ. `cudnn`: by its kernel on a GPU, instead of
    FlashAttention 2. `mask`: added to scores in the place of the causal one, in the dtype of q; not by a GPU's kernels.
    """
    if cudnn and mask is None and _flash_on_gpu(q):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse.squeeze(-1)
    if mask is None and _flash_on_gpu(q):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse
    groups = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), _expand(k, groups), _expand(v, groups)
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        out, lse = _plain(q, k, v, causal, scale, mask)
    return out.transpose(1, 2), lse


def attend_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    cudnn: bool = False,
    mask: Tensor | None = None,
) -> Gradients:
    """Gradients of q, k and v in their own layouts; a head of k and v sums over the heads of q that use it."""
    if mask is None and _flash_on_gpu(q):
        return _flash_backward_on_gpu(grad_out, q, k, v, out, lse, causal, scale, cudnn)
    groups = q.shape[2] // k.shape[2]
    grad_out, q, out = (x.transpose(1, 2) for x in (grad_out, q, out))
    k, v = _expand(k, groups), _expand(v, groups)
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)
    else:
        dq, dk, dv = _plain_backward(grad_out, q, k, v, out, lse, causal, scale, mask)
    return dq.transpose(1, 2), _gather(dk, groups), _gather(dv, groups)


class TileAttention(nn.Module):
    """Attention between some queries and some keys of a sequence, and its gradients."""

    cudnn: bool = False
    """by cuDNN's kernel on a GPU; kernels/autotune.py times both"""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, causal, self._scale(q), self.cudnn)

    def gradients(self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool) -> Gradients:
        """`out` and `lse` are those over all keys."""
        return attend_backward(grad_out, q, k, v, out, lse, causal, self._scale(q), self.cudnn)

    def _scale(self, q: Tensor) -> float:
        return float(q.shape[-1] ** -0.5) if self.scale is None else self.scale


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """Causal attention that saves q, k, v, the output and the log-sum-exp; k and v with their kv_heads, not expanded.

    The kernels have one width of heads: narrower values (latent attention) are padded. `mask` [s, s] or [b, 1, s, s] is added
    to scores, in the place of the causal one. `sinks` [heads]: logits that join each softmax.
    """
    out: Tensor = _Causal.apply(q, k, padded(v, q.shape[-1]), scale, mask, sinks)  # type: ignore[no-untyped-call]
    return out[..., : v.shape[-1]]


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention where each head's softmax has one more logit, without a value (gpt-oss).

    Backward of a tile is the usual one of these two.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype).view(-1, 1))
    return out * (lse - total).exp().transpose(1, 2).unsqueeze(-1).to(out.dtype), total


def sinks_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient [heads] of sinks, from output [b, s, heads, d] and log-sum-exp [b, heads, s] with them.

    A sink's probability times what softmax's backward subtracts, as its value is zero.
    """
    probability = (sinks.to(lse.dtype).view(-1, 1) - lse).exp()
    correction = (at_least_fp32(grad_out) * out).sum(-1).transpose(1, 2)
    return -(probability * correction).sum((0, 2)).to(sinks.dtype)


def padded(v: Tensor, width: int) -> Tensor:
    """Values as wide as `width`; themselves if they are, which F.pad would copy."""
    return v if v.shape[-1] == width else F.pad(v, (0, width - v.shape[-1]))


def softcapped_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, mask: Tensor | None = None) -> Tensor:
    """Causal attention whose scores are cap · tanh(score / cap) (Gemma 2), with materialized scores.

    `mask`: boolean or added to scores, in the place of the causal one.
    """
    groups = q.shape[2] // k.shape[2]
    scores = at_least_fp32(q.transpose(1, 2) @ _expand(k, groups).transpose(-1, -2)) * scale
    scores = cap * torch.tanh(scores / cap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return (scores.softmax(-1).to(v.dtype) @ _expand(v, groups)).transpose(1, 2)


class _Causal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        out, lse = attend(q, k, v, mask is None, scale, mask=mask)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, mask, sinks)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask, sinks = ctx.saved_tensors
        to_sinks = None if sinks is None else sinks_gradient(grad_out, out, lse, sinks)
        grads = attend_backward(grad_out, q, k, v, out, lse, mask is None, ctx.scale, mask=mask)
        return *grads, None, None, to_sinks


def _flash_on_gpu(q: Tensor) -> bool:
    # The kernel supports half precision and head dimensions that are multiples of 8, up to 256.
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _flash_backward_on_gpu(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float, cudnn: bool
) -> Gradients:
    grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
    saved, lengths = (grad_out, q, k, v, out), (q.shape[2], k.shape[2])
    # `state` is the random state of dropout, which is off here.
    if cudnn:
        state = (torch.empty((), dtype=torch.int64, device=q.device),) * 2
        cudnn_backward = aten._scaled_dot_product_cudnn_attention_backward
        unused = None, None, None
        grads = cudnn_backward(*saved, lse.unsqueeze(-1), *state, *unused, *lengths, 0.0, causal, scale=scale)
    else:
        state = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, dtype=torch.uint64, device=q.device)
        backward = aten._scaled_dot_product_flash_attention_backward
        grads = backward(*saved, lse, None, None, *lengths, 0.0, causal, *state, scale=scale)
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv


def _expand(x: Tensor, groups: int) -> Tensor:
    """[b, s, kv_heads, d] -> [b, heads, s, d]."""
    return x.transpose(1, 2) if groups == 1 else x.transpose(1, 2).repeat_interleave(groups, dim=1)


def _gather(grad: Tensor, groups: int) -> Tensor:
    """[b, heads, s, d] -> [b, s, kv_heads, d], summed over the heads of a group."""
    if groups > 1:
        batch, heads, length, width = grad.shape
        grad = grad.view(batch, heads // groups, groups, length, width).sum(2)
    return grad.transpose(1, 2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, mask: Tensor | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """[b, heads, s, d], with materialized scores: for inputs that no kernel supports, such as fp32 on a GPU."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = _scores(q.to(wide), k.to(wide), causal, scale, mask)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.to(wide)).to(q.dtype), lse


def _plain_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | None,
) -> Gradients:
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    grad_out, q, k, v, out = (x.to(wide) for x in (grad_out, q, k, v, out))
    weights = (_scores(q, k, causal, scale, mask) - lse.unsqueeze(-1)).exp()
    # Flash attention 2 (Dao 2023), algorithm 2: the row sums of grad·out are the correction term of softmax's backward.
    grad_scores = weights * (grad_out @ v.transpose(-1, -2) - (grad_out * out).sum(-1, keepdim=True)) * scale
    grads = grad_scores @ k, grad_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad_out
    dq, dk, dv = (grad.to(dtype) for grad in grads)
    return dq, dk, dv
