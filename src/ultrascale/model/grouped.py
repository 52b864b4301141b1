"""Grouped GEMM over rows sorted by expert: torch's grouped kernel on a GPU, a loop of matmuls elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PushDeferred = Callable[[Callable[[], None]], bool]
"""queues a function that computes a weight gradient; returns False if the caller must compute it now"""

PendingGrads = list[tuple[Tensor, Tensor, Tensor]]
"""output gradients, rows and counts of GEMMs whose weight gradient is not computed yet"""

ALIGNED = 16  # bytes: the row alignment that the grouped kernel requires


def grouped_gemm(
    x: Tensor, weight: Tensor, counts: Tensor, push_deferred: PushDeferred | None = None, leaf: Tensor | None = None
) -> Tensor:
    """x [n, in] by weight [experts, out, in]: the first counts[0] rows by weight[0], the next counts[1] by weight[1] …

    `leaf`: the parameter of which `weight` is a view; a deferred gradient is accumulated in its `.grad`.
    """
    out: Tensor = _GroupedGemm.apply(x, weight, counts, push_deferred, leaf, None)  # type: ignore[no-untyped-call]
    return out


class DeferredWeightGrad:
    """A weight whose gradient is computed when backward reaches the creation of this object, not together with the rows'.

    Autograd runs nodes in reverse order of creation: the backward of everything created in between runs before.
    """

    def __init__(self, weight: Tensor, shape: tuple[int, int, int]) -> None:
        """`shape`: [experts, out, in], the view of the weight that the GEMMs use."""
        self.weight = weight
        self.pending: PendingGrads = []
        self.view: Tensor = _DeferredWeightGrad.apply(weight, shape, self.pending)  # type: ignore[no-untyped-call]

    def gemm(self, x: Tensor, counts: Tensor, push_deferred: PushDeferred | None = None) -> Tensor:
        """Like `grouped_gemm`."""
        out: Tensor = _GroupedGemm.apply(x, self.view, counts, push_deferred, self.weight, self.pending)  # type: ignore[no-untyped-call]
        return out


class _DeferredWeightGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: tuple[int, int, int], pending: PendingGrads) -> Tensor:
        ctx.stored, ctx.pending = weight.shape, pending
        ctx.set_materialize_grads(False)  # the GEMMs return no gradient; they append its operands to `pending`
        return weight.view(shape)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None, None]:
        total: Tensor | None = None
        while ctx.pending:
            part = _weight_gradient(*ctx.pending.pop())
            total = part if total is None else total.add_(part)
        return None if total is None else total.view(ctx.stored), None, None


class _GroupedGemm(torch.autograd.Function):
    """Hand-written: autograd would allocate a gradient as large as all experts for each expert."""

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
        # The leaf itself: checkpointing unpacks a copy whose .grad is lost.
        ctx.parameter, ctx.push_deferred, ctx.pending = weight if parameter is None else parameter, push_deferred, pending
        return _gemms(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad = grads[0].contiguous()  # the kernel rejects expanded tensors
        dx = _gemms(grad, weight, counts) if ctx.needs_input_grad[0] else None
        if ctx.push_deferred is not None and ctx.push_deferred(_deferred_grad(grad, x, counts, ctx.parameter)):
            return dx, None, None, None, None, None
        if ctx.pending is not None:
            ctx.pending.append((grad, x, counts))
            return dx, None, None, None, None, None
        return dx, _weight_gradient(grad, x, counts), None, None, None, None


def _deferred_grad(grad: Tensor, x: Tensor, counts: Tensor, parameter: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        gradient = _weight_gradient(grad, x, counts).view(parameter.shape)
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient

    return run


def _gemms(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiplies the rows of x by the matrix [in, out] of their expert."""
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
    """Whether the grouped kernel supports such rows and matrices of these widths."""
    return x.is_cuda and why_not(x.dtype, *widths) is None


def why_not(dtype: torch.dtype, *widths: int) -> str | None:
    """Why the grouped kernel cannot be used, so that experts are multiplied one by one; None if it can."""
    if dtype != torch.bfloat16:
        return f"the grouped kernel multiplies bf16, not {str(dtype).removeprefix('torch.')}"
    odd = [width for width in widths if width * dtype.itemsize % ALIGNED]
    return f"the grouped kernel wants widths that are multiples of {ALIGNED // dtype.itemsize}, not {odd[0]}" if odd else None
