"""Permutation of tokens to expert order and back, as gathers in forward and backward; autograd would use index_add."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ExpertPermutation:
    """The k choices of each of t tokens, sorted by expert."""

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
