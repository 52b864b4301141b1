"""Grouped GEMM over rows sorted by expert: torch's grouped kernel on a GPU, a loop of matmuls elsewhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 16  # bytes: the row alignment that the grouped kernel requires


def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [n, in] by weight [experts, out, in]: the first counts[0] rows by weight[0], the next counts[1] by weight[1] …"""
    out: Tensor = _GroupedGemm.apply(x, weight, counts)  # type: ignore[no-untyped-call]
    return out


class _GroupedGemm(torch.autograd.Function):
    """Hand-written: autograd would allocate a gradient as large as all experts for each expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return gemms(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad = grads[0].contiguous()  # the kernel rejects expanded tensors
        dx = gemms(grad, weight, counts) if ctx.needs_input_grad[0] else None
        return dx, weight_gradient(grad, x, counts), None


def gemms(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiplies the rows of x by the matrix [in, out] of their expert."""
    if has_kernel(x, x.shape[1], matrices.shape[2]):
        return F.grouped_mm(x, matrices, offs=_ends(counts))
    parts = torch.split(x, counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def weight_gradient(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """The gradient [experts, out, in] of all matrices, from the gradient of the output."""
    if has_kernel(x, x.shape[1], grad.shape[1]):
        return F.grouped_mm(grad.t(), x, offs=_ends(counts))
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
