"""Collectives that gradients pass through: each is a forward exchange and the exchange that is its transpose.

| function      | forward        | backward       |
|---------------|----------------|----------------|
| `copy_to`     | identity       | all-reduce     |
| `reduce_from` | all-reduce     | identity       |
| `gather_from` | all-gather     | reduce-scatter |
| `scatter_to`  | reduce-scatter | all-gather     |
| `switch`      | all-to-all     | all-to-all     |

The first two are Megatron's f and g, the next two their sequence-parallel forms (Korthikanti et al. 2022, figure 5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis

Exchange = Callable[[Tensor], Tensor]


class _DifferentiableCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.exchange = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.exchange(grads[0]), None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """For an input that every rank holds and each uses with its own slice of the weights."""
    return _exchanged(x, axis, _same, lambda grad: _summed(grad, axis))


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """For partial sums: every rank gets the total."""
    return _exchanged(x, axis, lambda y: _summed(y, axis), _same)


def gather_from(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """For slices along `dim` that every rank needs whole, and uses with its own slice of the weights."""
    return _exchanged(x, axis, lambda y: comm.all_gather(y, axis, dim), lambda grad: comm.reduce_scatter(grad, axis, dim))


def scatter_to(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """For partial sums of which each rank goes on with its slice along `dim`."""
    return _exchanged(x, axis, lambda y: comm.reduce_scatter(y, axis, dim), lambda grad: comm.all_gather(grad, axis, dim))


def switch(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """From whole along `split_dim` and cut along `concat_dim` to the other way round."""
    return _exchanged(
        x,
        axis,
        lambda y: comm.all_to_all(y, axis, split_dim, concat_dim),
        lambda grad: comm.all_to_all(grad, axis, concat_dim, split_dim),
    )


def _exchanged(x: Tensor, axis: Axis, forward: Exchange, backward: Exchange) -> Tensor:
    if axis.size == 1:
        return x
    return cast(Tensor, _DifferentiableCollective.apply(x, forward, backward))  # type: ignore[no-untyped-call]


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, axis: Axis) -> Tensor:
    # A copy: autograd may hand the same gradient to others, and the forward's input may be saved for backward.
    return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), axis)
