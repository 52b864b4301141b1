"""Expert parallelism: each rank of the ep axis holds some of the experts; an all-to-all dispatches tokens to them.

Rows are sorted by expert before they are sent, so that the rows for one rank are contiguous. The split sizes are the actual
counts: nothing is padded or dropped. Shared experts overlap with the all-to-all: their first GEMMs with the dispatch, their
last with the combine, in forward and in backward. Routed experts can overlap too. `OverlapWeightGrads`: backward computes the
row gradients first, and the weight gradients of the experts while the row gradients are sent back; nothing is computed twice or
in smaller pieces. `LocalTokensFirst`: rows whose experts are on this rank are computed while the others are received. Two
grouped GEMMs take longer than one, so whether that is faster depends on sizes.

The ep axis runs over data ranks, which have different tokens: the gradient of an expert is complete on its rank, except for the
ranks that hold the same experts. The cost model is cost/communication.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.moe import MixtureOfExperts, RoutingResult
from ultrascale.model.transformer import Transformer
from ultrascale.parallel import comm
from ultrascale.parallel.comm import AsyncCollective, Axis
from ultrascale.parallel.expert_layer import ParallelExperts, Sorted
from ultrascale.parallel.mesh import Mesh, Shard
from ultrascale.parallel.tensor import TensorParallelExperts
from ultrascale.specs.training import ExpertOverlap


def apply(model: Transformer, mesh: Mesh, shards: dict[str, Shard], overlap: ExpertOverlap) -> None:
    """Keeps only this rank's experts, in place, and records them in `shards`. `overlap`: what runs during the all-to-all."""
    axis = mesh.ep
    if axis.size == 1:
        return
    for index, mlp in model.moe_layers().items():
        experts = ParallelExperts.of(mlp)
        for leaf, parameter in list(experts.named_parameters()):
            name = f"blocks.{index}.mlp.experts.{leaf}"
            each = parameter.shape[0] // axis.size
            shards[name] = replace(shards[name], rows=(axis.rank * each, each))
            own = parameter.data.narrow(0, axis.rank * each, each).contiguous()
            setattr(experts, leaf, nn.Parameter(own, parameter.requires_grad))
        forward = partial(dispatched_forward, mlp, partial(DISPATCHERS[overlap], axis))
        if isinstance(mlp, TensorParallelExperts):
            mlp.local_forward = forward
        else:
            mlp.forward = forward  # type: ignore[method-assign]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the numbers of rows are read by the host
def dispatched_forward(mlp: MixtureOfExperts, dispatch: Callable[[Tensor, Tensor], TokenDispatcher], x: Tensor) -> Tensor:
    """The forward of an MoE layer with its experts on several ranks.

    The shared experts are computed in two halves: one overlaps with the dispatch, the other with the combine.
    """
    routes: RoutingResult = mlp.router(x)
    order = routes.order()
    dispatcher = dispatch(routes.permute(order, x), routes.counts)
    shared: Any = mlp.shared
    inner = None if shared is None else shared.activate(x)
    dispatcher.run_experts(mlp.experts)
    shared_out = None if inner is None else mlp.gate_shared(shared.project(inner), x)
    out = routes.unpermute(order, dispatcher.combine()).view_as(x)
    return out if shared_out is None else out + shared_out


@dataclass(frozen=True)
class SplitSizes:
    """Split sizes of an all-to-all: rows sent to each rank of the axis, and rows received from it."""

    axis: Axis
    sent: Sequence[int]
    received: Sequence[int]

    def start(self, rows: Tensor) -> AsyncCollective[Tensor]:
        return comm.all_to_all_rows_start(rows, self.axis, self.sent, self.received)

    @property
    def reversed(self) -> SplitSizes:
        return SplitSizes(self.axis, self.received, self.sent)


class AsyncAllToAll:
    """An all-to-all of rows, and in backward of their gradients with reversed split sizes.

    `begin` and `end` are two autograd nodes. Autograd runs nodes in reverse order of creation: what is computed between the two
    in forward overlaps with the all-to-all of rows, and its backward with the all-to-all of their gradients.
    """

    def __init__(self, splits: SplitSizes) -> None:
        self.splits = splits
        self.pending: AsyncCollective[Tensor] | None = None

    def begin(self, rows: Tensor) -> Tensor:
        """Starts the all-to-all. Returns a placeholder of the received shape; `end` returns the rows."""
        incoming: Tensor = BeginAllToAll.apply(rows, self)  # type: ignore[no-untyped-call]
        return incoming

    def end(self, incoming: Tensor) -> Tensor:
        rows: Tensor = _EndAllToAll.apply(incoming, self)  # type: ignore[no-untyped-call]
        return rows

    def start(self, splits: SplitSizes, rows: Tensor) -> None:
        self.pending = splits.start(rows)

    def wait(self) -> Tensor:
        pending, self.pending = self.pending, None
        assert pending is not None
        return pending.wait()


class BeginAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, all_to_all: AsyncAllToAll) -> Tensor:
        ctx.all_to_all = all_to_all
        all_to_all.start(all_to_all.splits, rows)
        return rows.new_empty(1, 1).expand(sum(all_to_all.splits.received), rows.shape[1])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.all_to_all.wait(), None


class _EndAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, incoming: Tensor, all_to_all: AsyncAllToAll) -> Tensor:
        ctx.all_to_all = all_to_all
        return all_to_all.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.all_to_all.start(ctx.all_to_all.splits.reversed, grads[0])
        return grads[0], None  # the placeholder has no values: any gradient of its shape is valid


class TokenDispatcher:
    """Sends rows to the ranks of an axis and back; rank 0 holds the first experts, rank 1 the next ones."""

    def __init__(self, axis: Axis, rows: Tensor, counts: Tensor) -> None:
        """Starts to dispatch rows, which are sorted by expert; counts: number of rows of each expert."""
        outgoing = counts.view(axis.size, -1)
        incoming = comm.all_to_all(counts, axis, 0, 0).view(axis.size, -1)
        sent, received = torch.stack([outgoing.sum(1), incoming.sum(1)]).tolist()
        self.all_to_all = AsyncAllToAll(SplitSizes(axis, sent, received))
        self.dispatch(rows, outgoing, incoming)

    def dispatch(self, rows: Tensor, outgoing: Tensor, incoming: Tensor) -> None:
        """Starts sending rows. outgoing, incoming: row counts by rank and expert, [ranks, experts of a rank]."""
        self.counts, self.order = incoming.sum(0), by_expert(incoming, sum(self.all_to_all.splits.received))
        self.rows = self.all_to_all.begin(rows)

    def receive(self, incoming: Tensor) -> Sorted:
        return self.all_to_all.end(incoming)[self.order], self.counts

    def run_experts(self, experts: nn.Module) -> None:
        """Runs the local experts on their rows, and starts to send back their outputs."""
        self.begin_combine(experts(*self.receive(self.rows))[self.order.argsort()])

    def begin_combine(self, rows: Tensor) -> None:
        """Starts sending back the outputs of experts, in the order in which the rows were received."""
        self.all_to_all = AsyncAllToAll(self.all_to_all.splits.reversed)
        self.rows = self.all_to_all.begin(rows)

    def combine(self) -> Tensor:
        """The outputs, in the order of the dispatched rows."""
        return self.all_to_all.end(self.rows)


def by_expert(counts: Tensor, rows: int) -> Tensor:
    """Indices that sort received rows, which are ordered by rank, by expert; counts: [ranks, local experts]."""
    ranks, experts = counts.shape
    expert = torch.arange(experts, device=counts.device).repeat(ranks)
    return expert.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)


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
        splits = self.all_to_all.splits
        own_rank, own = splits.axis.rank, splits.sent[splits.axis.rank]
        start, rows_received = sum(splits.received[:own_rank]), sum(splits.received)
        others = incoming.index_fill(0, torch.tensor([own_rank], device=incoming.device), 0)
        order = by_expert(others, rows_received - own)
        self.parts = _LocalRemoteSplit(start, start + own, order + own * (order >= start), rows_received)
        first = sum(splits.sent[:own_rank])
        self.rows, local_rows = _DispatchRemote.apply(rows, self.all_to_all, first, first + own)  # type: ignore[no-untyped-call]
        self.counts, self.local_rows = others.sum(0), (local_rows, outgoing[own_rank])

    def receive(self, incoming: Tensor) -> Sorted:
        rows: Tensor = _TakeRemote.apply(self.all_to_all.end(incoming), self.parts)  # type: ignore[no-untyped-call]
        return rows, self.counts

    def run_experts(self, experts: nn.Module) -> None:
        local_out, remote_out = experts(self.rows, receive=self.receive, local_rows=self.local_rows)
        self.begin_combine(_JoinLocalRemote.apply(local_out, remote_out, self.parts))  # type: ignore[no-untyped-call]


class _DispatchRemote(BeginAllToAll):
    """Starts the all-to-all and returns a copy of the local rows: a view would keep all rows alive until backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, all_to_all: AsyncAllToAll, start: int, end: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ctx.own = slice(start, end)
        return BeginAllToAll.forward(ctx, rows, all_to_all), rows[start:end].clone()

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


DISPATCHERS: dict[ExpertOverlap, type[TokenDispatcher]] = {
    "none": TokenDispatcher,
    "gradients": OverlapWeightGrads,
    "rows": LocalTokensFirst,
}
