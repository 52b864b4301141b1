"""Norms and activations that save for backward only what the memory model counts: their inputs, and one scale per row.

Eager autograd would save every intermediate of the plain formulas, so backward is hand-written here. torch.compile already
fuses the plain formulas without saving intermediates; and on a GPU torch's norm is one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.specs.model import Model

Unary = Callable[[Tensor], Tensor]
Derivative = Callable[[Tensor, Tensor], Tensor]
"""of the output's gradient and the input"""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in at least fp32, in the dtype of x."""
    if x.is_cuda or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call, no-any-return]


def l2_norm(x: Tensor, eps: float) -> Tensor:
    """The same without a weight."""
    if x.is_cuda or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.shape[-1],), eps=eps)
    return _RMSNorm.apply(x, None, eps)  # type: ignore[no-untyped-call, no-any-return]


def gelu(x: Tensor) -> Tensor:
    """The tanh approximation, as in GPT-2; torch's operator saves only its input."""
    return F.gelu(x, approximate="tanh")


def relu2(x: Tensor) -> Tensor:
    """relu(x)² (Primer, So et al. 2021)."""
    if torch.compiler.is_compiling():
        return F.relu(x).square()
    return _SquaredReLU.apply(x)  # type: ignore[no-untyped-call, no-any-return]


class _SquaredReLU(torch.autograd.Function):
    """Saves relu's output alone; torch's own backward of a square allocates three tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root: Tensor = F.relu(x)
        ctx.save_for_backward(root)
        return root.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        root: Tensor = ctx.saved_tensors[0]
        return (grad * root).mul_(2)


class _GatedUnit(torch.autograd.Function):
    """activation(gate) · up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Unary, derivative: Derivative) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.derivative = activation, derivative
        return activation(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        return ctx.derivative(grad * up, gate), grad * ctx.activation(gate), None, None


def _gated(activation: Unary, derivative: Derivative) -> Callable[[Tensor, Tensor], Tensor]:
    def unit(gate: Tensor, up: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return activation(gate) * up
        return _GatedUnit.apply(gate, up, activation, derivative)  # type: ignore[no-untyped-call, no-any-return]

    return unit


SWIGLU_ALPHA = 1.702  # of gpt-oss: gate · sigmoid(1.702 · gate) approximates gelu(gate)


class _ClampedSwiGLU(torch.autograd.Function):
    """Saves its inputs alone, and holds no more tensors at a time than the other gates."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        low = gate.clamp(max=limit)
        out = (SWIGLU_ALPHA * low).sigmoid_().mul_(low)
        del low
        return out.mul_(up.clamp(-limit, limit).add_(1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        limit = ctx.limit
        low = gate.clamp(max=limit)
        share = (SWIGLU_ALPHA * low).sigmoid_()
        to_up = (low * share).mul_(grad).masked_fill_(up.abs() > limit, 0)
        # Of low · share: share · (1 + alpha · low · (1 - share)).
        to_gate = low.addcmul_(low, share, value=-1).mul_(SWIGLU_ALPHA).add_(1).mul_(share)
        del share
        to_gate.mul_(grad).mul_(up.clamp(-limit, limit).add_(1))
        return to_gate.masked_fill_(gate > limit, 0), to_up, None


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """gate · sigmoid(1.702 · gate) · (up + 1), of gate up to `limit` and up within ± `limit` (gpt-oss)."""
    if torch.compiler.is_compiling():
        low = gate.clamp(max=limit)
        return low * torch.sigmoid(SWIGLU_ALPHA * low) * (up.clamp(-limit, limit) + 1)
    return _ClampedSwiGLU.apply(gate, up, limit)  # type: ignore[no-untyped-call, no-any-return]


swiglu = _gated(F.silu, torch.ops.aten.silu_backward)
geglu = _gated(gelu, partial(torch.ops.aten.gelu_backward, approximate="tanh"))
geglu_exact = _gated(F.gelu, torch.ops.aten.gelu_backward)

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_exact": geglu_exact,
    "gelu": gelu,
    "gelu_exact": F.gelu,
    "relu": F.relu,
    "relu2": relu2,
}
"""by the Model's name"""


def activation_of(model: Model) -> Callable[..., Tensor]:
    """Of the outputs of the MLP's first linear layers."""
    return partial(clamped_swiglu, limit=model.swiglu_limit) if model.swiglu_limit else ACTIVATIONS[model.activation]


class RMSNorm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """Torch's operator: computes in fp32 and saves its input, one mean and one scale per row."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps).to(x.dtype)


def at_least_fp32(x: Tensor) -> Tensor:
    """Casts half precision to fp32; float64 must stay exact for gradient checks."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        wide = at_least_fp32(x)
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        unit = wide * scale
        return (unit if weight is None else unit * at_least_fp32(weight)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        unit, wide_grad = at_least_fp32(x) * scale, at_least_fp32(grad)
        grad_weight, grad_unit = None, wide_grad
        if weight is not None:
            grad_weight = (wide_grad * unit).flatten(0, -2).sum(0).to(weight.dtype)
            grad_unit = wide_grad * at_least_fp32(weight)
        grad_x = scale * (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None
