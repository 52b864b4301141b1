"""Expert computation that overlaps with token dispatch, beyond what shared experts do (token_dispatch.py).

`OverlapWeightGrads`: backward computes the row gradients first, and the weight gradients of the experts while the row gradients
are sent back. Nothing is computed twice or in smaller pieces. `LocalTokensFirst`: rows whose experts are on this rank are
computed while the others are received. Two grouped GEMMs take longer than one, so whether that is faster depends on sizes. The
cost model is cost/communication.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.moe import Sorted
from ultrascale.parallel.token_dispatch import AllToAllExchange, BeginAllToAll, TokenDispatcher, by_expert


class OverlapWeightGrads(TokenDispatcher):
    """The experts wait for their rows themselves, so that they can order their gradient GEMMs around the all-to-all."""

    def run_experts(self, experts: nn.Module) -> None:
        self.begin_combine(experts(self.rows, receive=self.receive)[self.order.argsort()])


@dataclass(frozen=True)
class _LocalRemoteSplit:
    """Received rows: the range of this rank's own rows, and the indices of the others in expert order."""

    start: int
    end: int
    others: Tensor
    rows: int


class LocalTokensFirst(OverlapWeightGrads):
    """Like OverlapWeightGrads, and computes the rows of local experts before it waits for the others.

    Local rows are part of the all-to-all, so that its sizes stay the same, but their received copies are not read. In backward
    the gradients of remote rows are sent first and the local ones are computed during the transfer: `_DispatchRemote` needs
    them before it waits.
    """

    def dispatch(self, rows: Tensor, outgoing: Tensor, incoming: Tensor) -> None:
        splits = self.exchange.splits
        own_rank, own = splits.axis.rank, splits.sent[splits.axis.rank]
        start, rows_received = sum(splits.received[:own_rank]), sum(splits.received)
        others = incoming.index_fill(0, torch.tensor([own_rank], device=incoming.device), 0)
        order = by_expert(others, rows_received - own)
        self.parts = _LocalRemoteSplit(start, start + own, order + own * (order >= start), rows_received)
        first = sum(splits.sent[:own_rank])
        self.rows, local_rows = _DispatchRemote.apply(rows, self.exchange, first, first + own)  # type: ignore[no-untyped-call]
        self.counts, self.local_rows = others.sum(0), (local_rows, outgoing[own_rank])

    def receive(self, incoming: Tensor) -> Sorted:
        rows: Tensor = _TakeRemote.apply(self.exchange.end(incoming), self.parts)  # type: ignore[no-untyped-call]
        return rows, self.counts

    def run_experts(self, experts: nn.Module) -> None:
        local_out, remote_out = experts(self.rows, receive=self.receive, local_rows=self.local_rows)
        self.begin_combine(_JoinLocalRemote.apply(local_out, remote_out, self.parts))  # type: ignore[no-untyped-call]


class _DispatchRemote(BeginAllToAll):
    """Starts the all-to-all and returns a copy of the local rows: a view would keep all rows alive until backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: AllToAllExchange, start: int, end: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.own = slice(start, end)
        return BeginAllToAll.forward(ctx, rows, exchange), rows[start:end].clone()

    @staticmethod
    def backward(ctx: Any, _: Tensor, local_rows: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        gradient, _none = BeginAllToAll.backward(ctx)
        gradient[ctx.own] = local_rows
        return gradient, None, None, None


class _TakeRemote(torch.autograd.Function):
    """Received remote rows, sorted by expert; `_DispatchRemote` takes the gradients of the local ones."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: _LocalRemoteSplit) -> Tensor:
        ctx.parts = parts
        return rows[parts.others]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].new_zeros(ctx.parts.rows, grads[0].shape[1])
        gradient[ctx.parts.others] = grads[0]
        return gradient, None


class _JoinLocalRemote(torch.autograd.Function):
    """Outputs of experts for local and remote rows, in the order in which rows were received."""

    @staticmethod
    def forward(ctx: Any, local_out: Tensor, others: Tensor, parts: _LocalRemoteSplit) -> Tensor:
        ctx.parts = parts
        rows = others.new_empty(parts.rows, others.shape[1])
        rows[parts.start : parts.end] = local_out
        rows[parts.others] = others
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        parts: _LocalRemoteSplit = ctx.parts
        return grads[0][parts.start : parts.end], grads[0][parts.others], None
