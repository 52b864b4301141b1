"""Deferred weight gradients: schedules with a split backward compute them after the input gradients of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class DeferredWeightGrads:
    """A queue of weight gradients: while `open`, backward pushes functions that compute them instead of computing them."""

    used: bool
    """whether the schedule splits its backward"""
    open: bool = False
    pending: list[Callable[[], None]] = field(default_factory=list)

    def push(self, run: Callable[[], None]) -> bool:
        """Queues a weight gradient if open. Returns False if the caller must compute it now."""
        if self.open:
            self.pending.append(run)
        return self.open

    def compute(
        self, parameters: Sequence[Tensor], function: Callable[..., Sequence[Tensor]], *operands: object
    ) -> Sequence[Tensor | None]:
        """The gradients of leaves, `function(*operands)`; while open, it is queued and each is None."""

        @torch.no_grad()
        def run() -> None:
            for parameter, gradient in zip(parameters, function(*operands), strict=True):
                add_gradient(parameter, gradient)

        return [None] * len(parameters) if self.push(run) else function(*operands)

    def pop(self) -> list[Callable[[], None]]:
        pending, self.pending = self.pending, []
        return pending


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Accumulates a gradient that was computed outside autograd."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient
