"""The three GEMMs of a linear layer in fp8: forward, input gradient and weight gradient.

Operands are rounded to eight bits, scaled so that their largest entry is near the format's largest; accumulation and results
stay wide. Why by hand: docs/decisions/0009-fp8.md.

There is one scale per tensor (`tensor`), per row along the contraction (`row`), or per 128 elements of such a row and 128 × 128
of a weight (`block`). Scales are computed from the current values, none is kept from step to step. On a CPU the rounded
operands are multiplied in the wide format: the same as on a GPU, except for the order of summation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.specs.training import FP8_BLOCK, FP8_TOKENS, Fp8Scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # three fraction bits and a range of 2^18, or two bits and 2^32
EXPONENT_MASK = 0x7F800000  # mask of the exponent bits of a float
MIN_AMAX = 1e-12  # lower bound of the largest entry, for a tensor of zeros


aten = torch.ops.aten
_ITSELF = (aten.detach.default, aten.alias.default)


class Float8Weight(Tensor):
    """fp8 [o, i] times scale []."""

    fp8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, fp8: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Weight:
        self: Float8Weight = Tensor._make_wrapper_subclass(cls, fp8.shape, strides=fp8.stride(), dtype=dtype, device=fp8.device)
        self.fp8, self.scale = fp8, scale
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Float8Weight({tuple(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["fp8", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], dtype: torch.dtype, size: Any, stride: Any) -> Float8Weight:
        return Float8Weight(inner["fp8"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        weight = args[0]
        same = func is aten.as_strided.default and tuple(args[1]) == weight.shape and tuple(args[2]) == weight.stride()
        if func in _ITSELF or same:
            return cls(weight.fp8, weight.scale, weight.dtype)
        if func in (aten.zeros_like.default, aten.empty_like.default):  # for a gradient, in the compute dtype
            wide = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            return func(wide, **{"device": weight.device, **(kwargs or {})})
        raise NotImplementedError(f"{func} wants the wide numbers of a weight that was gathered in fp8")


def concatenate(weights: Sequence[Float8Weight]) -> Float8Weight:
    """Concatenates matrices that share a scale along their rows."""
    return Float8Weight(torch.cat([weight.fp8 for weight in weights]), weights[0].scale, weights[0].dtype)


class PlainGemms:
    """The GEMMs of a linear layer as torch computes them."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A differentiable linear layer."""
        return F.linear(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., i] · weight [o, i]ᵀ + bias [o]."""
        return F.linear(x, weight, bias)

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        """grad [..., o] · weight [o, i]."""
        return grad @ weight

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """grad [..., o]ᵀ · x [..., i], summed over tokens."""
        return _rows(grad).t() @ _rows(x)


@dataclass(frozen=True)
class Float8Gemms(PlainGemms):
    """The GEMMs of a linear layer in fp8."""

    scaling: Fp8Scaling

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = _Float8Gemm.apply(x, weight, self.scaling)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        left = quantise(_rows(x), self.scaling, E4M3)
        right = quantise(weight, self.scaling, E4M3, is_weight=True)
        out = multiply(left, right, x.dtype, fast=self.scaling != "block").view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def grad_input(self, grad: Tensor, weight: Tensor) -> Tensor:
        left = quantise(_rows(grad), self.scaling, self._grad_dtype)
        right = quantise_transposed(weight, self.scaling, E4M3, is_weight=True)
        return multiply(left, right, grad.dtype).view(*grad.shape[:-1], -1)

    def grad_weight(self, grad: Tensor, x: Tensor) -> Tensor:
        grads, rows = _rows(grad), _rows(x)
        if len(rows) % FP8_TOKENS[self.scaling]:
            return super().grad_weight(grad, x)
        left = quantise_transposed(grads, self.scaling, self._grad_dtype)
        right = quantise_transposed(rows, self.scaling, E4M3)
        return multiply(left, right, grad.dtype)

    @property
    def _grad_dtype(self) -> torch.dtype:
        # Gradients of a whole tensor have a wider range than those of one token (torchao chooses the same).
        return E5M2 if self.scaling == "tensor" else E4M3


class _Float8Gemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Fp8Scaling) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        return Float8Gemms(scaling).forward(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        gemms = Float8Gemms(ctx.scaling)
        return gemms.grad_input(grad, weight), gemms.grad_weight(grad, x), None


class CustomGemmModule:
    """A module that calls its GEMMs explicitly; `gemms` can be replaced, by fp8 ones."""

    gemms: PlainGemms = PlainGemms()


class GemmOperand(NamedTuple):
    """One operand of a GEMM, with the contracted dimension last."""

    data: Tensor
    scale: Tensor
    """the factor that converts the data back"""


def quantise(x: Tensor, scaling: Fp8Scaling, dtype: torch.dtype, is_weight: bool = False) -> GemmOperand:
    """x [rows, summed] in fp8."""
    if isinstance(x, Float8Weight):
        return GemmOperand(x.fp8, x.scale)
    if scaling == "tensor":
        # Rows first: that maximum fuses with the norm or activation that computes the rows.
        return to_fp8(x, x.abs().amax(-1).amax(), dtype)
    if scaling == "row":
        return to_fp8(x, x.abs().amax(-1, keepdim=True), dtype)
    rows, summed = x.shape
    if is_weight:
        squares = x.reshape(rows // FP8_BLOCK, FP8_BLOCK, summed // FP8_BLOCK, FP8_BLOCK)
        factor = power_of_two_scale(squares.abs().amax((1, 3)), dtype)
        return GemmOperand(_cast(squares, factor[:, None, :, None], dtype).view(x.shape), factor.reciprocal())
    blocks = x.reshape(rows, summed // FP8_BLOCK, FP8_BLOCK)
    factor = power_of_two_scale(blocks.abs().amax(-1), dtype)
    # The kernel reads these scales column by column.
    return GemmOperand(_cast(blocks, factor.unsqueeze(-1), dtype).view(x.shape), factor.reciprocal().t().contiguous().t())


def quantise_transposed(x: Tensor, scaling: Fp8Scaling, dtype: torch.dtype, is_weight: bool = False) -> GemmOperand:
    """xᵀ in fp8. The contraction runs over x's rows, so it has other scales, unless they are per tensor or per square block."""
    if scaling == "row" or (scaling == "block" and not is_weight):
        return quantise(x.t(), scaling, dtype)
    data, scale = quantise(x, scaling, dtype, is_weight)
    return GemmOperand(data.t().contiguous(), scale.t().contiguous())


def multiply(left: GemmOperand, right: GemmOperand, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """left [m, k] · right [n, k]ᵀ. `fast` accumulates in the matrix unit, which keeps fewer bits of the partial sums."""
    if left.data.device.type == "cpu":
        return _dequantize(left, dtype) @ _dequantize(right, dtype).t()
    return torch._scaled_mm(left.data, right.data.t(), left.scale, right.scale.t(), out_dtype=dtype, use_fast_accum=fast)


def to_fp8(x: Tensor, largest: Tensor, dtype: torch.dtype) -> GemmOperand:
    """x in fp8, with a scale computed from its largest entries."""
    factor = power_of_two_scale(largest, dtype)
    return GemmOperand(_cast(x, factor, dtype), factor.reciprocal())


def _dequantize(operand: GemmOperand, dtype: torch.dtype) -> Tensor:
    data, scale = operand
    for dimension in range(scale.dim()):
        scale = scale.repeat_interleave(data.shape[dimension] // scale.shape[dimension], dimension)
    return (data.float() * scale).to(dtype)


def power_of_two_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two that scales `largest` to just below the format's maximum.

    A power of two changes exponents but not fractions, so that a value rounds the same whatever other values share its scale.
    """
    factor = torch.finfo(dtype).max / largest.float().clamp(min=MIN_AMAX)
    return (factor.view(torch.int32) & EXPONENT_MASK).view(torch.float32)  # exact, unlike a logarithm


def _cast(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() * factor).clamp(-limit, limit).to(dtype, memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2)
