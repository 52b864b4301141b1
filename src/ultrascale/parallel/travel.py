"""Rows on their way to the ranks of an axis and home again, and their gradients the other way, with work done meanwhile.

Two all-to-alls with as many rows as there are: rows leave sorted by expert, so that what goes to one rank lies in one piece.
Nothing is padded or dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.moe import Sorted, Visit
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis, Handle


@dataclass(frozen=True)
class Way:
    """How many rows go to each rank of the axis, and how many come."""

    axis: Axis
    sent: Sequence[int]
    received: Sequence[int]

    def start(self, rows: Tensor) -> Handle[Tensor]:
        return comm.all_to_all_rows_start(rows, self.axis, self.sent, self.received)

    @property
    def home(self) -> Way:
        return Way(self.axis, self.received, self.sent)


class Journey:
    """One exchange of rows, and in backward of their gradients the other way: each begun by one node, awaited by another.

    Autograd goes back in the order in which nodes were made: what was computed while rows travelled is undone while their
    gradients do.
    """

    def __init__(self, way: Way) -> None:
        self.way = way
        self.under_way: Handle[Tensor] | None = None

    def begin(self, rows: Tensor) -> Tensor:
        """The rows that shall come; what is in them, `end` tells."""
        coming: Tensor = Begin.apply(rows, self)  # type: ignore[no-untyped-call]
        return coming

    def end(self, coming: Tensor) -> Tensor:
        rows: Tensor = _End.apply(coming, self)  # type: ignore[no-untyped-call]
        return rows

    def start(self, way: Way, rows: Tensor) -> None:
        self.under_way = way.start(rows)

    def wait(self) -> Tensor:
        under_way, self.under_way = self.under_way, None
        assert under_way is not None
        return under_way.wait()


class Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.start(journey.way, rows)
        return rows.new_empty(1, 1).expand(sum(journey.way.received), rows.shape[1])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:
        return ctx.journey.wait(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor, journey: Journey) -> Tensor:
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
        self.journey = Journey(Way(axis, sent, received))
        self.set_out(rows, leaving, coming)

    def set_out(self, rows: Tensor, leaving: Tensor, coming: Tensor) -> None:
        """So many rows go to each rank and come from it, by expert there and here."""
        self.counts, self.order = coming.sum(0), by_expert(coming, sum(self.journey.way.received))
        self.rows = self.journey.begin(rows)

    def arrive(self, coming: Tensor) -> Sorted:
        return self.journey.end(coming)[self.order], self.counts

    def meet(self, experts: nn.Module) -> None:
        self.turn_back(experts(*self.arrive(self.rows))[self.order.argsort()])

    def turn_back(self, rows: Tensor) -> None:
        """Rows that lie as they came, by rank."""
        self.journey = Journey(self.journey.way.home)
        self.rows = self.journey.begin(rows)

    def return_(self) -> Tensor:
        return self.journey.end(self.rows)


def by_expert(counts: Tensor, rows: int) -> Tensor:
    """The order of experts of rows that come in the order of ranks; counts [ranks, experts here]."""
    ranks, experts = counts.shape
    here = torch.arange(experts, device=counts.device).repeat(ranks)
    return here.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)
