"""The fused block of kernels/fused.py with its GEMMs in fp8.

Forward has a scale per row, known to the kernel that computes the row; backward, where contractions also run over rows, one per
tensor. Only gradients are read an extra time for their largest entry: the largest entry of a tensor with row scales is the
largest of its rows, and the gate's gradients are bounded by the product of their inputs' largest entries. All scales are powers
of two, so that a value rounds the same with either kind.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.kernels import fused
from ultrascale.kernels.float8_gemm import E4M3, E5M2, Float8Weight, GemmOperand, concatenate, multiply, quantise, to_fp8
from ultrascale.kernels.fused import FusedBlock


class Float8Block(FusedBlock):
    """A fused block in fp8, with the parameters of the plain one under the same names."""

    def qkv_rotary(self, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _Float8QKV.apply(*given)  # type: ignore[no-untyped-call, no-any-return]

    def out_mlp(self, *given: Any) -> Tensor:
        return _Float8OutputAndMLP.apply(*given)  # type: ignore[no-untyped-call, no-any-return]


class _Float8QKV(torch.autograd.Function):
    """Norm, QKV projection and rotary embedding; also returns the input, so that its gradients are summed in one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, eps: float, dim: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _, normed, roots = norm_cast(x.flatten(0, 1), None, gain, eps)
        weight = cast_rows(joined(q, k, v))
        joint = multiply(normed, weight, x.dtype, fast=True).view(len(roots), -1, dim)
        heads, kv_heads = len(q) // dim, len(k) // dim
        fused.rotate_(joint, heads, kv_heads, (cos, sin))
        ctx.save_for_backward(x, roots, gain, q, k, v, cos, sin, amax_bound(normed), amax_bound(weight))
        rotated_q, rotated_k, values = torch.split(joint.view(*x.shape[:2], -1, dim), [heads, kv_heads, kv_heads], dim=2)
        return x.view_as(x), rotated_q, rotated_k, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, roots, gain, q, k, v, cos, sin, of_normed, of_weight = ctx.saved_tensors
        grad_q, grad_k, grad_v = (grad.contiguous().flatten(0, 1) for grad in grads)
        kept, transposed = cast_and_transpose(fused.rotate_back(grad_q, grad_k, grad_v, (cos, sin)).flatten(1))
        grad_normed = multiply(kept, cast_transposed(joined(q, k, v), of_weight), x.dtype)
        grad_x, grad_gain, normed = norm_backward_cast(grad_normed, x.flatten(0, 1), roots, gain, past.flatten(0, 1), of_normed)
        grad_weights = torch.split(multiply(transposed, normed, x.dtype), [len(q), len(k), len(v)])
        return grad_x.view_as(x), grad_gain, *grad_weights, None, None, None, None


class _Float8OutputAndMLP(torch.autograd.Function):
    """Output projection, residual sum with the norm, and the gated MLP."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, out: Tensor, gain: Tensor, gate_: Tensor, up: Tensor, down: Tensor, eps: float
    ) -> Tensor:
        rows = attended.flatten(2).flatten(0, 1)
        left, weights = cast_rows(rows), [cast_rows(weight) for weight in (out, joined(gate_, up), down)]
        projected = multiply(left, weights[0], x.dtype, fast=True)
        total, normed, roots = norm_cast(projected, x.flatten(0, 1), gain, eps)
        both = multiply(normed, weights[1], x.dtype, fast=True)
        gated, of_both = gate_cast(both)
        projected_down = multiply(gated, weights[2], x.dtype, fast=True)
        largest = [amax_bound(one) for one in (left, normed, gated, *weights)]
        ctx.save_for_backward(rows, total, roots, both, out, gain, gate_, up, down, of_both, *largest)
        ctx.shape = attended.shape
        return total.view_as(x) + projected_down.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, total, roots, both, out, gain, gate_, up, down, of_both, *largest = ctx.saved_tensors
        of_attended, of_normed, of_gated, of_out, of_inputs, of_down = largest
        flat = grad.contiguous().flatten(0, 1)
        kept, transposed = cast_and_transpose(flat)
        grad_gated = multiply(kept, cast_transposed(down, of_down), flat.dtype)
        grad_both, both_transposed, gated = gate_backward_cast(grad_gated, both, of_both, of_gated)
        del grad_gated
        grad_down = multiply(transposed, gated, flat.dtype)
        del gated, transposed
        grad_normed = multiply(grad_both, cast_transposed(joined(gate_, up), of_inputs), flat.dtype)
        grad_total, grad_gain, normed = norm_backward_cast(grad_normed, total, roots, gain, flat, of_normed)
        grad_gate, grad_up = torch.split(multiply(both_transposed, normed, flat.dtype), [len(gate_), len(up)])
        del grad_both, both_transposed, normed
        kept, transposed = cast_and_transpose(grad_total)
        grad_attended = multiply(kept, cast_transposed(out, of_out), flat.dtype).view(ctx.shape)
        grad_out = multiply(transposed, cast_transposed(rows, of_attended), flat.dtype)
        return grad_total.view_as(grad), grad_attended, grad_out, grad_gain, grad_gate, grad_up, grad_down, None


def joined(*weights: Tensor) -> Tensor:
    """Like `fused.joined`; weights gathered in fp8 share a scale (kernels/float8.py)."""
    narrow = [weight for weight in weights if isinstance(weight, Float8Weight)]
    return concatenate(narrow) if narrow else fused.joined(*weights)


def amax(x: Tensor) -> Tensor:
    """The largest absolute value, in fp32."""
    found: Tensor = torch.linalg.vector_norm(x, math.inf)
    return found.float()


def amax_bound(operand: GemmOperand) -> Tensor:
    """An upper bound of the largest entry of a tensor with a scale per row, from the largest scale."""
    return operand.scale.amax() * torch.finfo(operand.data.dtype).max


def cast_rows(x: Tensor) -> GemmOperand:
    """x [n, c] in fp8, with a scale per row; a weight gathered in fp8 has the same scale for all rows."""
    if isinstance(x, Float8Weight):
        return GemmOperand(x.fp8, x.scale.expand(len(x), 1).contiguous())
    if x.is_cuda:
        from ultrascale.kernels import float8_triton

        return GemmOperand(*float8_triton.cast_rows(x, E4M3))
    return quantise(x, "row", E4M3)


def norm_cast(x: Tensor, added: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, GemmOperand, Tensor]:
    """Like `fused.norm`, with the norm's output in fp8 and a scale per row."""
    if x.is_cuda:
        from ultrascale.kernels import float8_triton

        total, out, scale, roots = float8_triton.norm_cast(x, added, gain, eps, E4M3)
        return total, GemmOperand(out, scale), roots
    total, normed, roots = fused.norm(x, added, gain, eps)
    return total, quantise(normed, "row", E4M3), roots


def gate_cast(both: Tensor) -> tuple[GemmOperand, Tensor]:
    """silu(gate) · up of both [n, 2·f] in fp8 with a scale per row, and the largest entry of both."""
    if both.is_cuda:
        from ultrascale.kernels import float8_triton

        out, scale, inputs = float8_triton.gate_cast(both, E4M3)
        return GemmOperand(out, scale), inputs.amax()
    return quantise(fused.gate(both), "row", E4M3), amax(both)


def cast_transposed(x: Tensor, of_x: Tensor) -> GemmOperand:
    """x [n, c] in fp8 with one scale, transposed."""
    if isinstance(x, Float8Weight):
        return _transposed(GemmOperand(x.fp8, x.scale))
    if x.is_cuda:
        from ultrascale.kernels import float8_triton

        return GemmOperand(*float8_triton.cast_transposed(x, of_x, E4M3))
    return _transposed(to_fp8(x, of_x, E4M3))


def cast_and_transpose(grad: Tensor) -> tuple[GemmOperand, GemmOperand]:
    """A gradient [n, c] in fp8 with one scale, not transposed and transposed."""
    of_grad = amax(grad)
    if grad.is_cuda:
        from ultrascale.kernels import float8_triton

        kept, transposed, scale = float8_triton.cast_and_transpose(grad, of_grad, E5M2)
        return GemmOperand(kept, scale), GemmOperand(transposed, scale)
    narrow = to_fp8(grad, of_grad, E5M2)
    return narrow, _transposed(narrow)


def norm_backward_cast(
    grad: Tensor, x: Tensor, roots: Tensor, gain: Tensor, residual: Tensor, of_normed: Tensor
) -> tuple[Tensor, Tensor, GemmOperand]:
    """Like `fused.norm_backward`, with the norm's output in fp8 and transposed."""
    if x.is_cuda:
        from ultrascale.kernels import float8_triton, fused_triton

        gradients = fused_triton.norm_gradients(grad, x, roots, gain, residual)
        return *gradients, GemmOperand(*float8_triton.cast_transposed(x, of_normed, E4M3, norm=(roots, gain)))
    grad_x, grad_gain, normed = fused.norm_backward(grad, x, roots, gain, residual)
    return grad_x, grad_gain, cast_transposed(normed, of_normed)


def gate_backward_cast(
    grad: Tensor, both: Tensor, of_both: Tensor, of_gated: Tensor
) -> tuple[GemmOperand, GemmOperand, GemmOperand]:
    """The gradient of both, not transposed and transposed, and the gate's output transposed."""
    of_grad = amax(grad)
    if both.is_cuda:
        from ultrascale.kernels import float8_triton

        outputs = float8_triton.gate_backward_cast(grad, both, of_grad, of_both, of_gated, (E5M2, E4M3))
        kept, transposed, gated, scale, gated_scale = outputs
        return GemmOperand(kept, scale), GemmOperand(transposed, scale), GemmOperand(gated, gated_scale)
    grad_both, output = fused.gate_backward(grad, both)
    # |silu'| is below 1.1 and |silu(x)| below |x|: one bound for both halves.
    narrow = to_fp8(grad_both, 1.1 * of_grad * of_both, E5M2)
    return narrow, _transposed(narrow), cast_transposed(output, of_gated)


def _transposed(operand: GemmOperand) -> GemmOperand:
    return GemmOperand(operand.data.t().contiguous(), operand.scale)
