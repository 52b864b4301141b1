"""Products of one input with several weights, whose backward knows two tricks that autograd does not.

With sequence parallelism the gathered input is not kept: backward gathers it again (Korthikanti 2022, section 4.2.2), while
the input's gradient is computed. And a pipeline that splits its backward puts the weights' products off (`Later`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ultrascale.kernels.float8_products import Plain
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.once import once

SEQUENCE = 1  # the dimension of [batch, sequence, hidden] that sequence parallelism cuts

ALONE = Axis("alone", None, 0, 1, (0,))
Result = Literal["kept", "again", "unasked"]


@dataclass
class Later:
    """Weight gradients owed: while `open`, backward leaves them here instead of computing them."""

    used: bool
    """does the schedule split its backward at all?"""
    open: bool = False
    owed: list[Callable[[], None]] = field(default_factory=list)

    def owe(self, pay: Callable[[], None]) -> bool:
        """Takes a payment while open; False: it must be made at once."""
        if self.open:
            self.owed.append(pay)
        return self.open

    def take(self) -> list[Callable[[], None]]:
        owed, self.owed = self.owed, []
        return owed


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, sequence, later, numbers, count, *tensors):  # type: ignore[no-untyped-def]
        weights, biases = tensors[:count], tensors[count:]

        def make() -> tuple[torch.Tensor, ...]:
            whole = comm.all_gather(x, axis, SEQUENCE) if sequence else x
            return tuple(numbers.forward(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

        ctx.axis, ctx.sequence, ctx.later, ctx.numbers = axis, sequence, later, numbers
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.parameters = weights  # the leaves themselves: what checkpointing unpacks is a copy whose .grad is lost
        ctx.save_for_backward(x, *weights)
        return once(make)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x, *weights = ctx.saved_tensors
        axis, later, numbers = ctx.axis, ctx.later, ctx.numbers
        # What is owed gathers when it is paid: until then the slice waits, not the whole.
        gathering = comm.all_gather_start(x, axis, SEQUENCE) if ctx.sequence and not later.open else None
        dx = None
        if ctx.needs_input_grad[0]:
            dx = numbers.to_input(grads[0], weights[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                dx += numbers.to_input(grad, weight)
        whole = gathering.wait() if gathering is not None else x
        meeting = None
        if dx is not None:
            meeting = comm.reduce_scatter_start(dx, axis, SEQUENCE) if ctx.sequence else comm.all_reduce_start(dx, axis)
        if later.open:
            later.owed.append(_owed(x, axis if ctx.sequence else ALONE, grads, ctx.parameters, numbers))
            dw: list[torch.Tensor | None] = [None] * len(weights)
        else:
            dw = [numbers.to_weight(grad, whole) for grad in grads]
        db = [grad.flatten(0, -2).sum(0) if has else None for grad, has in zip(grads, ctx.has_bias, strict=True)]
        if meeting is not None:
            dx = meeting.wait()
        return dx, None, None, None, None, None, *dw, *db


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, axis, sequence, later, numbers, result):  # type: ignore[no-untyped-def]
        def make() -> tuple[torch.Tensor, ...]:
            part = numbers.forward(x, weight)
            return (comm.reduce_scatter(part, axis, SEQUENCE) if sequence else comm.all_reduce(part, axis),)

        ctx.axis, ctx.sequence, ctx.later, ctx.numbers = axis, sequence, later, numbers
        ctx.parameter = weight
        ctx.save_for_backward(x, weight)
        (out,) = make() if result == "again" else once(make, asked=result == "kept")
        return out

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        numbers, later = ctx.numbers, ctx.later
        grad = comm.all_gather(grads[0], ctx.axis, SEQUENCE) if ctx.sequence else grads[0]
        dx = numbers.to_input(grad, weight) if ctx.needs_input_grad[0] else None
        if later.open:
            later.owed.append(_owed(x, ALONE, [grad], [ctx.parameter], numbers))
        dw = None if later.open else numbers.to_weight(grad, x)
        return dx, dw, None, None, None, None, None


def _owed(
    x: torch.Tensor, axis: Axis, grads: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], numbers: Plain
) -> Callable[[], None]:
    @torch.no_grad()
    def pay() -> None:
        whole = comm.all_gather(x, axis, SEQUENCE)
        for grad, parameter in zip(grads, parameters, strict=True):
            gradient = numbers.to_weight(grad, whole)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    return pay


def summed(
    x: torch.Tensor,
    weight: torch.Tensor,
    axis: Axis,
    sequence: bool,
    later: Later,
    numbers: Plain,
    result: Result,
) -> torch.Tensor:
    """x·wᵀ of an input that is cut over the axis, summed over it: whole, or in slices of the sequence.

    `result`: what becomes of it where the layer is recomputed: kept, made again, or not asked for.
    """
    out: torch.Tensor = _Sum.apply(x, weight, axis, sequence, later, numbers, result)  # type: ignore[no-untyped-call]
    return out


def products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    later: Later,
    axis: Axis,
    sequence: bool,
    numbers: Plain,
) -> tuple[torch.Tensor, ...]:
    """x·wᵀ + b for each weight. On an axis the input is the same (or in slices) and its gradients are summed over it."""
    settings = axis, sequence, later, numbers, len(weights)
    out: tuple[torch.Tensor, ...] = _Products.apply(x, *settings, *weights, *biases)  # type: ignore[no-untyped-call]
    return out
