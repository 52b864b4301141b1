"""Differentiable collectives: each runs one collective in forward and its transpose in backward.

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

Collective = Callable[[Tensor], Tensor]


class _DifferentiableCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.collective = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.collective(grads[0]), None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Passes on an input that is the same on all ranks and that each rank multiplies by its own weight shard."""
    return _apply(x, axis, _identity, lambda grad: _all_reduce_copy(grad, axis))


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sums partial results; every rank gets the total."""
    return _apply(x, axis, lambda y: _all_reduce_copy(y, axis), _identity)


def gather_from(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Gathers slices along `dim`; each rank multiplies the whole by its own weight shard."""
    return _apply(x, axis, lambda y: comm.all_gather(y, axis, dim), lambda grad: comm.reduce_scatter(grad, axis, dim))


def scatter_to(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sums partial results; each rank gets its slice of the total along `dim`."""
    return _apply(x, axis, lambda y: comm.reduce_scatter(y, axis, dim), lambda grad: comm.all_gather(grad, axis, dim))


def switch(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Reshards a tensor: sharded along `concat_dim` before, along `split_dim` after."""
    return _apply(
        x,
        axis,
        lambda y: comm.all_to_all(y, axis, split_dim, concat_dim),
        lambda grad: comm.all_to_all(grad, axis, concat_dim, split_dim),
    )


def _apply(x: Tensor, axis: Axis, forward: Collective, backward: Collective) -> Tensor:
    if axis.size == 1:
        return x
    return cast(Tensor, _DifferentiableCollective.apply(x, forward, backward))  # type: ignore[no-untyped-call]


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


def _all_reduce_copy(x: Tensor, axis: Axis) -> Tensor:
    # A copy: autograd may pass the same gradient to other nodes, and the forward's input may be saved for backward.
    return comm.all_reduce(x.clone(memory_format=torch.contiguous_format), axis)
