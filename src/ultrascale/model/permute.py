"""Rows in the order of their experts and back: gathers both ways and in both passes, where autograd would add row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class ExpertPermutation:
    """How the k choices of each of t tokens are sorted by expert."""

    sorted: Tensor
    """[n ≤ t · k]: the choices that are kept, by expert and then by token"""
    places: Tensor
    """[t, k]: where each choice lies among the sorted; 0 for one that is dropped"""
    kept: Tensor | None
    """[t, k]; None: all are"""

    @classmethod
    def of(cls, experts: Tensor, kept: Tensor | None, number: int) -> ExpertPermutation:
        """`experts` [t, k] of `number`."""
        keys = experts.flatten().to(torch.int16 if number < 2**15 else torch.int32)  # a radix sort passes each byte
        sorted_ = keys.argsort(stable=True)
        if kept is not None:
            sorted_ = sorted_[kept.flatten()[sorted_]]
        ranks = torch.arange(len(sorted_), device=experts.device)
        places = torch.zeros(experts.numel(), dtype=ranks.dtype, device=experts.device).scatter(0, sorted_, ranks)
        return cls(sorted_, places.view_as(experts), kept)

    def spread(self, tokens: Tensor) -> Tensor:
        """Tokens [t, h] -> a row for each choice, sorted: [n, h]."""
        rows: Tensor = _PermuteRows.apply(tokens, self.sorted, self.places, self.kept)  # type: ignore[no-untyped-call]
        return rows

    def collect(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sorted rows [n, h] -> each token's sum by weights [t, k]: [t, h]."""
        if self.kept is not None:
            weights = weights * self.kept
        chosen: Tensor = _UnpermuteRows.apply(rows, self.sorted, self.places)  # type: ignore[no-untyped-call]
        return (chosen * weights.unsqueeze(-1)).sum(-2)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sorted_: Tensor, places: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(places, kept)
        return tokens[sorted_ // places.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        places, kept = ctx.saved_tensors
        each = grad[places]
        if kept is not None:
            each = each * kept.unsqueeze(-1)
        return each.sum(-2), None, None, None


class _UnpermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sorted_: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(sorted_)
        return rows[places]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (sorted_,) = ctx.saved_tensors
        return grad.flatten(0, 1)[sorted_], None, None
