"""The fused block of kernels/fused.py with its GEMMs in fp8.

Forward has a scale per row, known to the kernel that computes the row; backward, where contractions also run over rows, one per
tensor. Only gradients are read an extra time for their largest entry: the largest entry of a tensor with row scales is the
largest of its rows, and the gate's gradients are bounded by the product of their inputs' largest entries. All scales are powers
of two, so that a value rounds the same with either kind. A split backward defers weight gradients and keeps only their
operands, in fp8 and transposed: half the bytes of a bf16 block's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.kernels import fused
from ultrascale.kernels.deferred import DeferredWeightGrads
from ultrascale.kernels.float8_gemm import E4M3, E5M2, Float8Weight, GemmOperand, concatenate, multiply, quantise, to_fp8
from ultrascale.kernels.fused import FusedBlock
from ultrascale.kernels.recompute_cache import cache_across_recompute
from ultrascale.model.operators import at_least_fp32


class Float8Block(FusedBlock):
    """A fused block in fp8, with the parameters of the plain one under the same names."""

    def __init__(self, plain: FusedBlock) -> None:
        super().__init__(plain, plain.deferred)

    def qkv_rotary(self, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _Float8QKV.apply(*given, self.deferred)  # type: ignore[no-untyped-call, no-any-return]

    def out_mlp(self, *given: Any) -> Tensor:
        settings = self.saves_gate_up, self.deferred
        return _Float8OutputAndMLP.apply(*given, *settings)  # type: ignore[no-untyped-call, no-any-return]


class _Float8QKV(torch.autograd.Function):
    """Norm, QKV projection and rotary embedding; also returns the input, so that its gradients are summed in one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, eps: float, dim: int,
        deferred: DeferredWeightGrads,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        _, normed, roots = norm_cast(x.flatten(0, 1), None, gain, eps)
        weight = cast_rows(joined(q, k, v))
        joint = multiply(normed, weight, x.dtype, fast=True).view(len(roots), -1, dim)
        heads, kv_heads = len(q) // dim, len(k) // dim
        fused.rotate_(joint, heads, kv_heads, (cos, sin))
        ctx.save_for_backward(x, roots, gain, q, k, v, cos, sin, amax_bound(normed), amax_bound(weight))
        ctx.deferred, ctx.parameters = deferred, (q, k, v)  # the leaves: checkpointing unpacks copies, whose .grad is lost
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
        grad_weights = ctx.deferred.compute(ctx.parameters, weight_grads((q, k, v)), transposed, normed)
        return grad_x.view_as(x), grad_gain, *grad_weights, None, None, None, None, None


class _Float8OutputAndMLP(torch.autograd.Function):
    """Output projection, residual sum with the norm, and the gated MLP."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, out: Tensor, gain: Tensor, gate_: Tensor, up: Tensor, down: Tensor, eps: float,
        saves_gate_up: bool, deferred: DeferredWeightGrads,
    ) -> Tensor:  # fmt: skip
        left, weights = cast_rows(_rows(attended)), [cast_rows(weight) for weight in (out, joined(gate_, up), down)]
        projected = multiply(left, weights[0], x.dtype, fast=True)
        total, normed, roots = norm_cast(projected, x.flatten(0, 1), gain, eps)
        del projected
        both = multiply(normed, weights[1], x.dtype, fast=True)
        gated, of_both = gate_cast(both)
        largest = [amax_bound(one) for one in (left, normed, gated, *weights)]
        kept = both if saves_gate_up else None
        ctx.save_for_backward(attended, total, roots, kept, out, gain, gate_, up, down, of_both, *largest)
        ctx.eps, ctx.deferred, ctx.parameters = eps, deferred, (out, gate_, up, down)  # the leaves, as above
        down_weight = weights[2]
        del left, normed, weights, both, kept

        def result() -> tuple[Tensor]:
            return (total.view_as(x) + multiply(gated, down_weight, x.dtype, fast=True).view_as(x),)

        return cache_across_recompute(result, needed_in_backward=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attended, total, roots, both, out, gain, gate_, up, down, of_both, *largest = ctx.saved_tensors
        of_attended, of_normed, of_gated, of_out, of_inputs, of_down = largest
        flat, deferred, (leaf_out, *leaves_inputs, leaf_down) = grad.contiguous().flatten(0, 1), ctx.deferred, ctx.parameters
        if both is None:
            both = multiply(norm_cast(total, None, gain, ctx.eps)[1], cast_rows(joined(gate_, up)), flat.dtype, fast=True)
        kept, transposed = cast_and_transpose(flat)
        grad_gated = multiply(kept, cast_transposed(down, of_down), flat.dtype)
        del kept
        grad_both, both_transposed, gated = gate_backward_cast(grad_gated, both, of_both, of_gated)
        del grad_gated, both
        (grad_down,) = deferred.compute((leaf_down,), weight_grads((down,)), transposed, gated)
        del gated, transposed
        grad_normed = multiply(grad_both, cast_transposed(joined(gate_, up), of_inputs), flat.dtype)
        del grad_both
        grad_total, grad_gain, normed = norm_backward_cast(grad_normed, total, roots, gain, flat, of_normed)
        del grad_normed
        grad_gate, grad_up = deferred.compute(leaves_inputs, weight_grads((gate_, up)), both_transposed, normed)
        del both_transposed, normed
        kept, transposed = cast_and_transpose(grad_total)
        grad_attended = multiply(kept, cast_transposed(out, of_out), flat.dtype).view(attended.shape)
        operands = transposed, cast_transposed(_rows(attended), of_attended)
        (grad_out,) = deferred.compute((leaf_out,), weight_grads((out,)), *operands)
        grads = grad_total.view_as(grad), grad_attended, grad_out, grad_gain, grad_gate, grad_up, grad_down
        return *grads, None, None, None


def _rows(attended: Tensor) -> Tensor:
    """Attention's output [b, s, heads, d] as [n, heads·d]."""
    return attended.flatten(2).flatten(0, 1)


def weight_grads(weights: Sequence[Tensor]) -> Callable[[GemmOperand, GemmOperand], Sequence[Tensor]]:
    """Computes the gradients of weights that are joined in one GEMM, from output gradient and input, both transposed."""
    rows, dtype = [len(weight) for weight in weights], weights[0].dtype
    return lambda grad, x: torch.split(multiply(grad, x, dtype), rows)


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
        return transpose(GemmOperand(x.fp8, x.scale))
    if x.is_cuda:
        from ultrascale.kernels import float8_triton

        return GemmOperand(*float8_triton.cast_transposed(x, of_x, E4M3))
    return transpose(to_fp8(x, of_x, E4M3))


def cast_and_transpose(grad: Tensor) -> tuple[GemmOperand, GemmOperand]:
    """A gradient [n, c] in fp8 with one scale, not transposed and transposed."""
    of_grad = amax(grad)
    if grad.is_cuda:
        from ultrascale.kernels import float8_triton

        kept, turned, scale = float8_triton.cast_and_transpose(grad, of_grad, E5M2)
        return GemmOperand(kept, scale), GemmOperand(turned, scale)
    narrow = to_fp8(grad, of_grad, E5M2)
    return narrow, transpose(narrow)


def cast(x: Tensor, of_x: Tensor, dtype: torch.dtype, norm: tuple[Tensor, Tensor] | None = None) -> GemmOperand:
    """x [n, c] in fp8 with one scale. `norm`: reciprocal roots of the rows and gain, applied first."""
    if x.is_cuda:
        from ultrascale.kernels import float8_triton

        return GemmOperand(*float8_triton.cast(x, of_x, dtype, norm))
    if norm is not None:
        roots, gain = norm
        x = (at_least_fp32(x) * roots.unsqueeze(-1) * at_least_fp32(gain)).to(x.dtype)
    return to_fp8(x, of_x, dtype)


def norm_backward(grad: Tensor, x: Tensor, roots: Tensor, gain: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, with `residual` added, and of the gain."""
    if x.is_cuda:
        from ultrascale.kernels import fused_triton

        return fused_triton.norm_gradients(grad, x, roots, gain, residual)
    return fused.norm_backward(grad, x, roots, gain, residual)[:2]


def norm_backward_cast(
    grad: Tensor, x: Tensor, roots: Tensor, gain: Tensor, residual: Tensor, of_normed: Tensor
) -> tuple[Tensor, Tensor, GemmOperand]:
    """Like `norm_backward`, and the norm's output in fp8 and transposed."""
    gradients = norm_backward(grad, x, roots, gain, residual)
    if x.is_cuda:
        from ultrascale.kernels import float8_triton

        return *gradients, GemmOperand(*float8_triton.cast_transposed(x, of_normed, E4M3, norm=(roots, gain)))
    return *gradients, transpose(cast(x, of_normed, E4M3, norm=(roots, gain)))


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
    return narrow, transpose(narrow), cast_transposed(output, of_gated)


def transpose(operand: GemmOperand, out: Tensor | None = None) -> GemmOperand:
    """data [n, c] as [c, n]. `out`: columns of a matrix to write it to, else new memory."""
    data, scale = operand
    if out is None:
        out = data.new_empty(data.shape[::-1])
    if data.is_cuda:
        from ultrascale.kernels import float8_triton

        float8_triton.transpose(data, out)
    else:
        out.copy_(data.t())
    return GemmOperand(out, scale)
