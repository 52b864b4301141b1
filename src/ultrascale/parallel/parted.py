"""Experts that compute while rows are on their way, in two steps beyond what a shared expert does (travel.py).

`Behind`: backward first makes the gradients of the rows, and those of the experts' matrices while these travel home. Nothing is
computed twice or in smaller pieces. `Parted`: rows whose experts are on their own rank are multiplied while the others travel.
Whether that pays is a matter of sizes, since two grouped products take longer than one. The law is cost/expert.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.moe import Sorted
from ultrascale.parallel.travel import Begin, Journey, Travel, by_expert


class Behind(Travel):
    """The experts wait for the rows themselves, and so know what to make when."""

    def meet(self, experts: nn.Module) -> None:
        self.turn_back(experts(self.rows, arrive=self.arrive)[self.order.argsort()])


@dataclass(frozen=True)
class _Parts:
    """Of the rows that come: where those of this rank lie, and in which order of experts the others."""

    start: int
    end: int
    others: Tensor
    rows: int


class Parted(Behind):
    """The same, and rows whose experts are here are multiplied before the others are waited for.

    They go along, so that what is exchanged is the same, but what comes of them is not looked at. In backward gradients of the
    others set out first, and these are computed meanwhile: `_Part` wants them before it waits.
    """

    def set_out(self, rows: Tensor, leaving: Tensor, coming: Tensor) -> None:
        way = self.journey.way
        here, own = way.axis.rank, way.sent[way.axis.rank]
        start, rows_coming = sum(way.received[:here]), sum(way.received)
        others = coming.index_fill(0, torch.tensor([here], device=coming.device), 0)
        order = by_expert(others, rows_coming - own)
        self.parts = _Parts(start, start + own, order + own * (order >= start), rows_coming)
        first = sum(way.sent[:here])
        self.rows, staying = _Part.apply(rows, self.journey, first, first + own)  # type: ignore[no-untyped-call]
        self.counts, self.staying = others.sum(0), (staying, leaving[here])

    def arrive(self, coming: Tensor) -> Sorted:
        rows: Tensor = _Take.apply(self.journey.end(coming), self.parts)  # type: ignore[no-untyped-call]
        return rows, self.counts

    def meet(self, experts: nn.Module) -> None:
        stayed, made = experts(self.rows, arrive=self.arrive, staying=self.staying)
        self.turn_back(_Join.apply(stayed, made, self.parts))  # type: ignore[no-untyped-call]


class _Part(Begin):
    """Begins a journey, and hands over a copy of the rows that stay: a view would keep all rows until backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey, start: int, end: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.own = slice(start, end)
        return Begin.forward(ctx, rows, journey), rows[start:end].clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor, staying: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        gradient, _none = Begin.backward(ctx)
        gradient[ctx.own] = staying
        return gradient, None, None, None


class _Take(torch.autograd.Function):
    """Of rows that came, those of others, sorted by expert; gradients of the rest are `_Part`'s."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: _Parts) -> Tensor:
        ctx.parts = parts
        return rows[parts.others]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].new_zeros(ctx.parts.rows, grads[0].shape[1])
        gradient[ctx.parts.others] = grads[0]
        return gradient, None


class _Join(torch.autograd.Function):
    """What experts made of the rows that stayed and of the others, as these came, by rank."""

    @staticmethod
    def forward(ctx: Any, stayed: Tensor, others: Tensor, parts: _Parts) -> Tensor:
        ctx.parts = parts
        rows = others.new_empty(parts.rows, others.shape[1])
        rows[parts.start : parts.end] = stayed
        rows[parts.others] = others
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        parts: _Parts = ctx.parts
        return grads[0][parts.start : parts.end], grads[0][parts.others], None
