"""A weight in fp8: one byte per element and one scale, as ZeRO-3 gathers it (parallel/float8_gather.py).

To autograd, and so to FSDP2, it is a tensor of the compute dtype, with gradients in that dtype; GEMMs read its bytes directly.
No other operator may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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


def stacked(weights: Sequence[Float8Weight]) -> Float8Weight:
    """Concatenates matrices that share a scale along their rows."""
    return Float8Weight(torch.cat([weight.fp8 for weight in weights]), weights[0].scale, weights[0].dtype)
