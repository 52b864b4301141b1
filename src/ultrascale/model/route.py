"""Routing of tokens to experts: logits, top-k choice, capacity, statistics with the balance loss, permutation of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.specs.model import MoE

HIGH = -(2**16)  # mask of the fp32 bits that bf16 has too


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """x [b, s, h] by weight [experts, h], in at least fp32."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        wide: Tensor = _BF16GemmToFP32.apply(x.flatten(0, 1), weight)  # type: ignore[no-untyped-call]
        return wide.view(*x.shape[:2], -1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(dtype), weight.to(dtype))


class _BF16GemmToFP32(torch.autograd.Function):
    """A GEMM of bf16 operands with fp32 output, without an fp32 copy of the tokens: bf16 products are exact in fp32.

    Backward splits the gradient of the logits into two bf16 tensors, which together have 16 of its 24 bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _gemm_to_fp32(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        # By bit mask: a compiler would remove a cast to bf16 and back.
        high = (grad.contiguous().view(torch.int32) & HIGH).view(torch.float32)
        halves = torch.cat([high, grad - high], 1).to(x.dtype)
        to_weight = _gemm_to_fp32(halves.t(), x).view(2, *weight.shape).sum(0)
        return halves @ torch.cat([weight, weight]), to_weight.to(weight.dtype)


def _gemm_to_fp32(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def choose(scores: Tensor, moe: MoE) -> Tensor:
    """Scores […, experts] -> indices of the top k, […, k]; with groups, among the experts of the best groups."""
    if moe.groups > moe.top_groups:
        grouped = scores.view(*scores.shape[:-1], moe.groups, -1)
        # The score of a group is the sum of its two best experts (DeepSeek-V3, section 2.1.2), in V2 its best one.
        counted = min(2 if moe.router == "sigmoid" else 1, grouped.shape[-1])
        best = grouped.topk(counted, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
        excluded = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best, False)
        scores = grouped.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.topk(moe.top_k, dim=-1).indices


def counts_of(experts: Tensor, number: int) -> Tensor:
    """[b, n] -> how often each of `number` experts occurs in each row, [b, number]."""
    if torch.compiler.is_compiling():  # compare and sum fuse into one pass; atomic adds to one address would serialize
        return (experts.unsqueeze(-1) == torch.arange(number, device=experts.device)).sum(1, dtype=torch.float32)
    counts = torch.zeros(experts.shape[0], number, device=experts.device)
    return counts.scatter_add_(1, experts, torch.ones_like(experts, dtype=counts.dtype))


def first(experts: Tensor, capacity: int) -> Tensor:
    """[b, s, k]: whether the token is among the first `capacity` of its sequence that chose the expert.

    By position, not by score: otherwise whether a token is dropped would depend on later tokens.
    """
    chosen = experts.flatten(1)
    order = chosen.argsort(dim=1, stable=True)
    sorted_ = chosen.gather(1, order)
    starts = torch.searchsorted(sorted_, sorted_)  # where the run of equal experts begins
    rank = torch.arange(chosen.shape[1], device=chosen.device) - starts
    return torch.empty_like(chosen).scatter_(1, order, rank).lt(capacity).view_as(experts)


class RouterStats(torch.autograd.Function):
    """The identity on scores; its backward accumulates routing statistics as the gradient of `stats` and adds the balance loss.

    A gradient, because backward runs once per micro-batch, even if its forward is recomputed. The balance loss of a sequence
    is experts · Σ fraction · probability (Fedus 2021, equation 4; per sequence as DeepSeek-V3, section 2.1.2, so that it does
    not depend on how a batch is sharded), 1 if all experts are chosen equally often. `totals` [b, experts] are the sums of the
    probabilities over each sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        totals: Tensor,
        stats: Tensor,
        counts: Tensor,
        dropped: Tensor,
        balance_grad: Tensor | None,
        top_k: int,
        sum_over_sequence: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(totals, counts, dropped, balance_grad)
        ctx.top_k, ctx.sum_over_sequence = top_k, sum_over_sequence
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        totals, counts, dropped, balance_grad = ctx.saved_tensors
        whole = counts if ctx.sum_over_sequence is None else ctx.sum_over_sequence(counts.clone())  # [b, experts]
        routed = whole.sum(1, keepdim=True)  # tokens of the sequence · k
        slope = whole.shape[1] * ctx.top_k * whole / routed.square()  # of the loss by one probability
        found = torch.cat([counts.sum(0), (slope * totals).sum().float().view(1), dropped.float().view(1)])
        totals_grad = None if balance_grad is None else (balance_grad * slope).to(totals.dtype)
        return grad, totals_grad, found, None, None, None, None, None


@dataclass(frozen=True)
class ExpertPermutation:
    """The k choices of each of t tokens, sorted by expert. Gathers in forward and backward: autograd would use index_add."""

    sorted: Tensor
    """[n ≤ t · k]: the choices that are not dropped, by expert and then by token"""
    positions: Tensor
    """[t, k]: the index of each choice in `sorted`; 0 for a dropped one"""
    kept: Tensor | None
    """[t, k]; None: no choice is dropped"""

    @classmethod
    def sort(cls, experts: Tensor, kept: Tensor | None, number: int) -> ExpertPermutation:
        """`experts` [t, k]: indices of experts; `number`: how many experts there are."""
        keys = experts.flatten().to(torch.int16 if number < 2**15 else torch.int32)  # a radix sort has one pass per byte
        sorted_ = keys.argsort(stable=True)
        if kept is not None:
            sorted_ = sorted_[kept.flatten()[sorted_]]
        ranks = torch.arange(len(sorted_), device=experts.device)
        positions = torch.zeros(experts.numel(), dtype=ranks.dtype, device=experts.device).scatter(0, sorted_, ranks)
        return cls(sorted_, positions.view_as(experts), kept)

    def permute(self, tokens: Tensor) -> Tensor:
        """Tokens [t, h] -> one row per choice, sorted by expert: [n, h]."""
        rows: Tensor = _PermuteRows.apply(tokens, self.sorted, self.positions, self.kept)  # type: ignore[no-untyped-call]
        return rows

    def unpermute(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sorted rows [n, h] -> each token's sum of its rows weighted by weights [t, k]: [t, h]."""
        if self.kept is not None:
            weights = weights * self.kept
        chosen: Tensor = _UnpermuteRows.apply(rows, self.sorted, self.positions)  # type: ignore[no-untyped-call]
        return (chosen * weights.unsqueeze(-1)).sum(-2)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sorted_: Tensor, positions: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(positions, kept)
        return tokens[sorted_ // positions.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        positions, kept = ctx.saved_tensors
        each = grad[positions]
        if kept is not None:
            each = each * kept.unsqueeze(-1)
        return each.sum(-2), None, None, None


class _UnpermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sorted_: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(sorted_)
        return rows[positions]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (sorted_,) = ctx.saved_tensors
        return grad.flatten(0, 1)[sorted_], None, None
