"""Stand-ins for the fp8 kernels of a GPU, which only allocate their outputs; used by rehearse_world.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ultrascale.kernels.float8_gemm import E4M3, E5M2, Float8Weight, GemmOperand


def _operand(x: Tensor, dtype: torch.dtype, *shape: int) -> GemmOperand:
    return GemmOperand(x.new_empty(shape or x.shape, dtype=dtype), _scalar(x))


def _turned(x: Tensor, dtype: torch.dtype) -> GemmOperand:
    return _operand(x, dtype, x.shape[1], x.shape[0])


def _rows(x: Tensor, width: int) -> GemmOperand:
    scales = x.new_empty(len(x), 1, dtype=torch.float32)
    return GemmOperand(x.new_empty(len(x), width, dtype=E4M3), scales)


def _scalar(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


def cast_rows(x: Tensor) -> GemmOperand:
    if isinstance(x, Float8Weight):
        return GemmOperand(x.fp8, x.scale.new_empty(len(x), 1))
    return _rows(x, x.shape[1])


def norm_cast(x: Tensor, added: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, GemmOperand, Tensor]:
    total = x if added is None else torch.empty_like(x)
    return total, _rows(x, x.shape[1]), x.new_empty(len(x), dtype=torch.float32)


def gate_cast(both: Tensor) -> tuple[GemmOperand, Tensor]:
    return _rows(both, both.shape[1] // 2), _scalar(both)


def cast_transposed(x: Tensor, of_x: Tensor) -> GemmOperand:
    return _turned(x.fp8 if isinstance(x, Float8Weight) else x, E4M3)


def cast_and_transpose(grad: Tensor) -> tuple[GemmOperand, GemmOperand]:
    return _operand(grad, E5M2), _turned(grad, E5M2)


def cast(x: Tensor, of_x: Tensor, dtype: torch.dtype, norm: tuple[Tensor, Tensor] | None = None) -> GemmOperand:
    return _operand(x, dtype)


def norm_backward(grad: Tensor, x: Tensor, roots: Tensor, gain: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gain)


def norm_backward_cast(
    grad: Tensor, x: Tensor, roots: Tensor, gain: Tensor, residual: Tensor, of_normed: Tensor
) -> tuple[Tensor, Tensor, GemmOperand]:
    return *norm_backward(grad, x, roots, gain, residual), _turned(x, E4M3)


def gate_backward_cast(
    grad: Tensor, both: Tensor, of_both: Tensor, of_gated: Tensor
) -> tuple[GemmOperand, GemmOperand, GemmOperand]:
    return _operand(both, E5M2), _turned(both, E5M2), _turned(grad, E4M3)


def transpose(operand: GemmOperand, out: Tensor | None = None) -> GemmOperand:
    return _turned(operand.data, operand.data.dtype) if out is None else GemmOperand(out, operand.scale)


def amax(x: Tensor) -> Tensor:
    return _scalar(x)


def scaled_gradient(logits: Tensor, targets: Tensor, losses: Tensor, transposed: Tensor, z_loss: float) -> Tensor:
    return torch.empty_like(logits, dtype=transposed.dtype)


def shard_scaled_gradient(
    logits: Tensor, targets: Tensor, first: int, statistics: Tensor, losses: Tensor, transposed: Tensor, z_loss: float
) -> Tensor:
    return torch.empty_like(logits, dtype=transposed.dtype)


def dequantized(operand: GemmOperand, dtype: torch.dtype) -> Tensor:
    """For a GEMM of the same FLOPs, whose operands take no memory beside the fp8 ones."""
    return operand.scale.new_empty((), dtype=dtype).expand(operand.data.shape)


_BLOCK: tuple[Any, ...] = (
    *(cast_rows, norm_cast, gate_cast, cast_transposed, cast_and_transpose, cast, transpose, amax),
    *(norm_backward, norm_backward_cast, gate_backward_cast),
)
BLOCK: dict[str, Callable[..., Any]] = {function.__name__: function for function in _BLOCK}
HEAD: dict[str, Callable[..., Any]] = {function.__name__: function for function in (scaled_gradient, shard_scaled_gradient)}
