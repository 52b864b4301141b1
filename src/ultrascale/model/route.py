"""Which experts a token goes to: the router's scores, its choice among them, and what it tells of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.specs.model import MoE

HIGH = -(2**16)  # of an fp32 number's bits, those that bf16 has too


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """x [b, s, h] by weight [experts, h], in at least fp32."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        wide: Tensor = _Wide.apply(x.flatten(0, 1), weight)  # type: ignore[no-untyped-call]
        return wide.view(*x.shape[:2], -1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))


class _Wide(torch.autograd.Function):
    """The fp32 product of bf16 numbers, without a copy of the tokens in fp32: products of two are exact in fp32 anyway.

    Backward cuts the gradient of the logits in two bf16 numbers, which together have 16 of its 24 bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        # By its bits: a compiler takes a cast there and back for nothing.
        high = (grad.contiguous().view(torch.int32) & HIGH).view(torch.float32)
        halves = torch.cat([high, grad - high], 1).to(x.dtype)
        to_weight = _product(halves.t(), x).view(2, *weight.shape).sum(0)
        return halves @ torch.cat([weight, weight]), to_weight.to(weight.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def choose(wanted: Tensor, moe: MoE) -> Tensor:
    """[…, experts] -> the top k, […, k]; where there are groups, among the experts of the best groups."""
    if moe.groups > moe.top_groups:
        grouped = wanted.view(*wanted.shape[:-1], moe.groups, -1)
        # A group is as good as its two best experts (DeepSeek-V3, section 2.1.2), in V2 as its best one.
        counted = min(2 if moe.router == "sigmoid" else 1, grouped.shape[-1])
        best = grouped.topk(counted, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
        far = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=wanted.device).scatter(-1, best, False)
        wanted = grouped.masked_fill(far.unsqueeze(-1), -torch.inf).flatten(-2)
    return wanted.topk(moe.top_k, dim=-1).indices


def counts_of(experts: Tensor, of: int) -> Tensor:
    """[b, n] -> how often each row names each expert, [b, experts]."""
    if torch.compiler.is_compiling():  # compared and summed in one pass, where adding to one place would queue
        return (experts.unsqueeze(-1) == torch.arange(of, device=experts.device)).sum(1, dtype=torch.float32)
    counts = torch.zeros(experts.shape[0], of, device=experts.device)
    return counts.scatter_add_(1, experts, torch.ones_like(experts, dtype=counts.dtype))


def first(experts: Tensor, capacity: int) -> Tensor:
    """[b, s, k]: is the token among the first `capacity` of its sequence that chose the expert?

    In the order of positions: were the best scores kept instead, a token's fate would depend on later ones.
    """
    chosen = experts.flatten(1)
    order = chosen.argsort(dim=1, stable=True)
    sorted_ = chosen.gather(1, order)
    starts = torch.searchsorted(sorted_, sorted_)  # where the run of equal experts begins
    rank = torch.arange(chosen.shape[1], device=chosen.device) - starts
    return torch.empty_like(chosen).scatter_(1, order, rank).lt(capacity).view_as(experts)


class RouterStats(torch.autograd.Function):
    """Passes scores on; tells in backward, as the gradient of `tally`, what a router saw, and pulls towards balance.

    A gradient, since backward passes every micro-batch once, even where its forward is recomputed. The balance loss of a
    sequence is experts · Σ fraction · probability (Fedus 2021, equation 4; per sequence as DeepSeek-V3, section 2.1.2, so that
    it does not depend on how a batch is cut), 1 where all experts are chosen alike. `totals` [b, experts] are the
    probabilities' sums over each sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        totals: Tensor,
        tally: Tensor,
        counts: Tensor,
        dropped: Tensor,
        pull: Tensor | None,
        top_k: int,
        over_sequence: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(totals, counts, dropped, pull)
        ctx.top_k, ctx.over_sequence = top_k, over_sequence
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        totals, counts, dropped, pull = ctx.saved_tensors
        whole = counts if ctx.over_sequence is None else ctx.over_sequence(counts.clone())  # [b, experts]
        routed = whole.sum(1, keepdim=True)  # tokens of the sequence · k
        slope = whole.shape[1] * ctx.top_k * whole / routed.square()  # of the loss by one probability
        seen = torch.cat([counts.sum(0), (slope * totals).sum().float().view(1), dropped.float().view(1)])
        pulled = None if pull is None else (pull * slope).to(totals.dtype)
        return grad, pulled, seen, None, None, None, None, None
