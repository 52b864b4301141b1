"""One product per expert over rows that are sorted by expert: a grouped kernel on a GPU, a loop of plain products elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PushDeferred = Callable[[Callable[[], None]], bool]
"""takes a weight gradient that shall be computed later; False: it must be computed now"""

PendingGrads = list[tuple[Tensor, Tensor, Tensor]]
"""gradients, rows and counts of products whose weight's gradient is still to be made"""

ALIGNED = 16  # bytes: what the grouped kernel asks of every row


def grouped_product(
    x: Tensor, weight: Tensor, counts: Tensor, push_deferred: PushDeferred | None = None, leaf: Tensor | None = None
) -> Tensor:
    """x [n, in] by weight [experts, out, in]: the first counts[0] rows meet weight[0], the next counts[1] weight[1] …

    `leaf`: of which the weight is a view, and which is given what is pending.
    """
    out: Tensor = _GroupedGemm.apply(x, weight, counts, push_deferred, leaf, None)  # type: ignore[no-untyped-call]
    return out


class DeferredWeightGrad:
    """A weight whose gradient is made when backward comes back to where this was made, not with those of the rows.

    Autograd goes back in the order in which nodes were made: whatever was made in between is undone before.
    """

    def __init__(self, weight: Tensor, shape: tuple[int, int, int]) -> None:
        """`shape`: [experts, out, in], as which it is seen."""
        self.weight = weight
        self.pending: PendingGrads = []
        self.seen: Tensor = _DeferredWeightGrad.apply(weight, shape, self.pending)  # type: ignore[no-untyped-call]

    def product(self, x: Tensor, counts: Tensor, push_deferred: PushDeferred | None = None) -> Tensor:
        """As `grouped_product`."""
        out: Tensor = _GroupedGemm.apply(x, self.seen, counts, push_deferred, self.weight, self.pending)  # type: ignore[no-untyped-call]
        return out


class _DeferredWeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: tuple[int, int, int], pending: PendingGrads) -> Tensor:
        ctx.stored, ctx.pending = weight.shape, pending
        ctx.set_materialize_grads(False)  # products give none: they leave what it is made of
        return weight.view(shape)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None, None]:
        total: Tensor | None = None
        while ctx.pending:
            part = _weight_gradient(*ctx.pending.pop())
            total = part if total is None else total.add_(part)
        return None if total is None else total.view(ctx.stored), None, None


class _GroupedGemm(torch.autograd.Function):
    """Autograd would make a gradient as large as all experts for each of them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        push_deferred: PushDeferred | None,
        parameter: Tensor | None,
        pending: PendingGrads | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        # The leaf itself: what checkpointing unpacks is a copy whose .grad is lost.
        ctx.parameter, ctx.push_deferred, ctx.pending = weight if parameter is None else parameter, push_deferred, pending
        return _products(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad = grads[0].contiguous()  # the kernel refuses expanded ones
        dx = _products(grad, weight, counts) if ctx.needs_input_grad[0] else None
        if ctx.push_deferred is not None and ctx.push_deferred(_deferred_grad(grad, x, counts, ctx.parameter)):
            return dx, None, None, None, None, None
        if ctx.pending is not None:
            ctx.pending.append((grad, x, counts))
            return dx, None, None, None, None, None
        return dx, _weight_gradient(grad, x, counts), None, None, None, None


def _deferred_grad(grad: Tensor, x: Tensor, counts: Tensor, parameter: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def pay() -> None:
        gradient = _weight_gradient(grad, x, counts).view(parameter.shape)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient

    return pay


def _products(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Rows of x times the matrix [in, out] of their expert."""
    if has_kernel(x, x.shape[1], matrices.shape[2]):
        return torch._grouped_mm(x, matrices, offs=_ends(counts))
    parts = torch.split(x, counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def _weight_gradient(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    if has_kernel(x, x.shape[1], grad.shape[1]):
        return torch._grouped_mm(grad.t(), x, offs=_ends(counts))
    sizes = counts.tolist()
    return torch.stack([g.t() @ part for g, part in zip(torch.split(grad, sizes), torch.split(x, sizes), strict=True)])


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def has_kernel(x: Tensor, *widths: int) -> bool:
    """Can the grouped kernel multiply such rows by matrices of these widths?"""
    return x.is_cuda and why_not(x.dtype, *widths) is None


def why_not(dtype: torch.dtype, *widths: int) -> str | None:
    """Why a GPU multiplies the rows of one expert after the other; None: it has a kernel for all of them."""
    if dtype != torch.bfloat16:
        return f"the grouped kernel multiplies bf16, not {str(dtype).removeprefix('torch.')}"
    odd = [width for width in widths if width * dtype.itemsize % ALIGNED]
    return f"the grouped kernel wants widths that are multiples of {ALIGNED // dtype.itemsize}, not {odd[0]}" if odd else None
