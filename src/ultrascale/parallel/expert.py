"""Expert parallelism: each rank of the ep axis holds some of the experts, and tokens travel to theirs and back.

Two all-to-alls with as many rows as there are: rows leave sorted by expert, so that what goes to one rank lies in one piece.
Nothing is padded or dropped. Shared experts compute while rows travel, their first products on the way there and their last on
the way back, in backward alike. The ep axis runs over data ranks: they bring different tokens, and an expert's gradient is
complete on its rank but for those ranks that hold the same experts. The law is cost/expert.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.moe import MixtureOfExperts, Visit
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


class _Journey:
    """One exchange of rows, and in backward of their gradients the other way: each begun by one node, awaited by another.

    Autograd goes back in the order in which nodes were made: what was computed while rows travelled is undone while their
    gradients do.
    """

    def __init__(self, way: _Way) -> None:
        self.way = way
        self.under_way: Handle[Tensor] | None = None

    def begin(self, rows: Tensor) -> Tensor:
        """The rows that shall come; what is in them, `end` tells."""
        coming: Tensor = _Begin.apply(rows, self)  # type: ignore[no-untyped-call]
        return coming

    def end(self, coming: Tensor) -> Tensor:
        rows: Tensor = _End.apply(coming, self)  # type: ignore[no-untyped-call]
        return rows

    def start(self, way: _Way, rows: Tensor) -> None:
        self.under_way = way.start(rows)

    def wait(self) -> Tensor:
        under_way, self.under_way = self.under_way, None
        assert under_way is not None
        return under_way.wait()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.start(journey.way, rows)
        return rows.new_empty(1, 1).expand(sum(journey.way.received), rows.shape[1])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.journey.start(ctx.journey.way.home, grads[0])
        return grads[0], None  # the gradient of nothing, in the shape that is asked for


class Travel(Visit):
    """Rows go to the ranks of an axis and come home; rank 0 has the first experts, and so on."""

    def __init__(self, axis: Axis, rows: Tensor, counts: Tensor) -> None:
        leaving = counts.view(axis.size, -1)
        coming = comm.all_to_all(counts, axis, 0, 0).view(axis.size, -1)
        sent, received = torch.stack([leaving.sum(1), coming.sum(1)]).tolist()
        self.counts, self.order = coming.sum(0), _by_expert(coming, sum(received))
        self.journey = _Journey(_Way(axis, sent, received))
        self.rows = self.journey.begin(rows)

    def arrive(self) -> tuple[Tensor, Tensor]:
        return self.journey.end(self.rows)[self.order], self.counts

    def turn_back(self, rows: Tensor) -> None:
        self.journey = _Journey(self.journey.way.home)
        self.rows = self.journey.begin(rows[self.order.argsort()])

    def return_(self) -> Tensor:
        return self.journey.end(self.rows)


def _by_expert(counts: Tensor, rows: int) -> Tensor:
    """The order of experts of rows that come in the order of ranks; counts [ranks, experts here]."""
    ranks, experts = counts.shape
    here = torch.arange(experts, device=counts.device).repeat(ranks)
    return here.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)


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
        block.mlp.visit = partial(Travel, axis)


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
