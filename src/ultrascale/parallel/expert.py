"""Expert parallelism: each rank of the ep axis holds some of the experts, and tokens travel to theirs and back.

Two all-to-alls with as many rows as there are: rows leave sorted by expert, so that what goes to one rank lies in one piece.
Nothing is padded or dropped. The first is under way while shared experts compute. The ep axis runs over data ranks: they
bring different tokens, and an expert's gradient is complete on its rank but for those ranks that hold the same experts. The
law is cost/expert.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.moe import Exchange, MixtureOfExperts
from ultrascale.model.transformer import Transformer
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis, Handle
from ultrascale.parallel.data import Gradients
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.shards import Shard


@dataclass(frozen=True)
class _Way:
    """How many rows go to each rank of the axis, and how many come."""

    axis: Axis
    sent: Sequence[int]
    received: Sequence[int]

    def start(self, rows: Tensor) -> Handle[Tensor]:
        return comm.all_to_all_rows_start(rows, self.axis, self.sent, self.received)

    @property
    def home(self) -> _Way:
        return _Way(self.axis, self.received, self.sent)


class _Travelled(torch.autograd.Function):
    """Rows whose journey was begun before; their gradients go home."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: _Way, under_way: Handle[Tensor]) -> Tensor:
        ctx.way = way
        return under_way.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way.home.start(grads[0]).wait(), None, None


@dataclass(frozen=True)
class _Trip:
    """One forward's rows on their way."""

    rows: Tensor
    way: _Way
    under_way: Handle[Tensor]
    counts: Tensor
    """[ranks, experts here]: where the rows that come are from, and whom they are for"""

    @cached_property
    def order(self) -> Tensor:
        """From the order of ranks to that of experts."""
        ranks, experts = self.counts.shape
        here = torch.arange(experts, device=self.counts.device).repeat(ranks)
        return here.repeat_interleave(self.counts.flatten(), output_size=sum(self.way.received)).argsort(stable=True)


class AllToAll(Exchange):
    """The experts of an axis: rank 0 has the first, and so on."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.trip: _Trip | None = None

    def begin(self, rows: Tensor, counts: Tensor) -> None:
        leaving = counts.view(self.axis.size, -1)
        coming = comm.all_to_all(counts, self.axis, 0, 0).view(self.axis.size, -1)
        sent, received = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()
        way = _Way(self.axis, sent, received)
        self.trip = _Trip(rows, way, way.start(rows.detach()), coming)

    def arrived(self) -> tuple[Tensor, Tensor]:
        trip = self.trip
        assert trip is not None
        rows: Tensor = _Travelled.apply(trip.rows, trip.way, trip.under_way)  # type: ignore[no-untyped-call]
        return rows[trip.order], trip.counts.sum(0)

    def back(self, rows: Tensor) -> Tensor:
        trip, self.trip = self.trip, None
        assert trip is not None
        by_rank = rows[trip.order.argsort()]
        home = trip.way.home
        out: Tensor = _Travelled.apply(by_rank, home, home.start(by_rank.detach()))  # type: ignore[no-untyped-call]
        return out


def apply(model: Transformer, mesh: Mesh, shards: dict[str, Shard]) -> None:
    """Leaves each rank its experts, in place; tells so in `shards`."""
    axis = mesh.ep
    if axis.size == 1:
        return
    for index, block in zip(model.blocks, model.each_block(), strict=True):
        if not isinstance(block.mlp, MixtureOfExperts):
            continue
        experts = block.mlp.experts
        for leaf, parameter in list(experts.named_parameters()):
            name = f"blocks.{index}.mlp.experts.{leaf}"
            each = parameter.shape[0] // axis.size
            shards[name] = replace(shards[name], rows=(axis.rank * each, each))
            setattr(experts, leaf, nn.Parameter(parameter.data.narrow(0, axis.rank * each, each).contiguous()))
        block.mlp.exchange = AllToAll(axis)


def experts_of(model: Transformer) -> list[nn.Parameter]:
    found = [block.mlp.experts for block in model.each_block() if isinstance(block.mlp, MixtureOfExperts)]
    return [parameter for experts in found for parameter in experts.parameters()]


class Apart(Gradients):
    """Experts meet over other ranks than the rest does."""

    def __init__(self, module: nn.Module, experts: Gradients, rest: Gradients) -> None:
        super().__init__(module)
        self.both = (experts, rest)
        self.owner = {parameter: part for part in self.both for parameter in part.module.parameters()}

    def begin(self) -> None:
        for part in self.both:
            part.begin()

    def before_backward(self, last: bool, split: bool) -> None:
        for part in self.both:
            part.before_backward(last, split)

    def after_backward(self, last: bool, split: bool) -> None:
        for part in self.both:
            part.after_backward(last, split)

    def finish(self) -> None:
        for part in self.both:
            part.finish()

    def of(self, parameter: nn.Parameter) -> Tensor:
        return self.owner[parameter].of(parameter)

    def held(self) -> list[Tensor]:
        return [tensor for part in self.both for tensor in part.held()]
