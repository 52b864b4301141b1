"""The fused fp8 block (kernels/float8_block.py) where tensor parallelism cuts its layers.

What a GEMM needs whole is cast before it is gathered, in half the bytes of bf16; what it yields in parts is summed in bf16, as
in parallel/fused_block.py. Scales are those of the whole: a row of a slice is a whole row, whose scale is gathered with it, and
in backward ranks agree on the largest entry of an output gradient, in an all-reduce of four bytes. So the gathered operands
have the bits that they have in one process. A weight or an activation that is cut along a row has the scale of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.kernels import float8_block, fused
from ultrascale.kernels.deferred import DeferredWeightGrads
from ultrascale.kernels.float8_block import Float8Block, amax_bound, joined, weight_grads
from ultrascale.kernels.float8_gemm import E4M3, E5M2, GemmOperand, multiply
from ultrascale.kernels.fused import FusedBlock
from ultrascale.kernels.recompute_cache import cache_across_recompute
from ultrascale.parallel import comm
from ultrascale.parallel.async_tensor import AsyncTensorParallel
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.fused_block import TensorParallelFusedBlock, rotated_heads


class TensorParallelFloat8Block(Float8Block):
    def __init__(self, plain: FusedBlock) -> None:
        super().__init__(plain)
        assert isinstance(plain, TensorParallelFusedBlock)
        self.tp = plain.tp

    def qkv_rotary(self, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _TensorParallelFloat8QKV.apply(*given, self.deferred, self.tp)  # type: ignore[no-untyped-call, no-any-return]

    def out_mlp(self, *given: Any) -> Tensor:
        settings = self.saves_gate_up, self.deferred, self.tp
        return _TensorParallelFloat8OutputAndMLP.apply(*given, *settings)  # type: ignore[no-untyped-call, no-any-return]


class Float8AllGather:
    """A pending all-gather of an operand's rows, and of their scales unless all ranks have one scale."""

    def __init__(self, operand: GemmOperand, axis: Axis) -> None:
        data, scale = operand
        self._dtype, self._data = data.dtype, comm.all_gather_start(data.view(torch.uint8), axis)
        self._scale = comm.all_gather_start(scale, axis) if scale.dim() else comm.completed(scale, axis)

    def wait(self) -> GemmOperand:
        return GemmOperand(self._data.wait().view(self._dtype), self._scale.wait())


def all_gather(operand: GemmOperand, axis: Axis) -> GemmOperand:
    return Float8AllGather(operand, axis).wait()


def cast_gradient(grad: Tensor, axis: Axis) -> GemmOperand:
    """A slice of an output gradient in fp8, with the scale of the whole."""
    return float8_block.cast(grad, comm.all_reduce(float8_block.amax(grad), axis, op="max"), E5M2)


class _TensorParallelFloat8QKV(torch.autograd.Function):
    """Norm, QKV projection and rotary embedding; also returns the input, so that its gradients are summed in one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, eps: float, dim: int,
        deferred: DeferredWeightGrads, tp: AsyncTensorParallel,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        _, own, roots = float8_block.norm_cast(x.flatten(0, 1), None, gain, eps)
        gathering = Float8AllGather(own, tp.slices)
        weight = float8_block.cast_rows(joined(q, k, v))
        normed = gathering.wait()
        rows = multiply(normed, weight, x.dtype, fast=True)
        ctx.save_for_backward(x, roots, gain, q, k, v, cos, sin, amax_bound(normed), amax_bound(weight))
        del own, gathering, weight, normed
        ctx.deferred, ctx.tp = deferred, tp
        ctx.parameters = q, k, v  # the leaves: checkpointing unpacks copies, whose .grad is lost
        return x.view_as(x), *rotated_heads(rows, len(x), (len(q) // dim, len(k) // dim, dim), (cos, sin), tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, roots, gain, q, k, v, cos, sin, of_normed, of_weight = ctx.saved_tensors
        tp, rows = ctx.tp, x.flatten(0, 1)
        normed = float8_block.cast(rows, of_normed, E4M3, norm=(roots, gain))
        gathering = None if ctx.deferred.open else Float8AllGather(normed, tp.slices)
        grad_q, grad_k, grad_v = (grad.contiguous().flatten(0, 1) for grad in grads)
        joint = fused.rotate_back(grad_q, grad_k, grad_v, (cos, sin)).flatten(1)
        joint = tp.to_chunk_order(joint.view(len(x), -1, joint.shape[1]))
        kept, transposed = float8_block.cast_and_transpose(joint)
        del joint
        reduction = tp.sum_start(multiply(kept, float8_block.cast_transposed(joined(q, k, v), of_weight), x.dtype))
        del kept
        of_weights = weight_grads((q, k, v))
        if gathering is not None:
            grad_weights = of_weights(transposed, float8_block.transpose(gathering.wait()))
        else:
            grad_weights = ctx.deferred.compute(
                ctx.parameters, lambda: of_weights(transposed, float8_block.transpose(all_gather(normed, tp.slices)))
            )
        grad_x, grad_gain = float8_block.norm_backward(reduction.wait(), rows, roots, gain, past.flatten(0, 1))
        return grad_x.view_as(x), grad_gain, *grad_weights, None, None, None, None, None, None


class _TensorParallelFloat8OutputAndMLP(torch.autograd.Function):
    """Output projection, residual sum with the norm, and the gated MLP."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, out: Tensor, gain: Tensor, gate_: Tensor, up: Tensor, down: Tensor, eps: float,
        saves_gate_up: bool, deferred: DeferredWeightGrads, tp: AsyncTensorParallel,
    ) -> Tensor:  # fmt: skip
        left, weight = float8_block.cast_rows(tp.to_chunk_order(attended.flatten(2))), float8_block.cast_rows(out)
        reduction = tp.sum_start(multiply(left, weight, x.dtype, fast=True))
        largest = [amax_bound(left), amax_bound(weight)]
        weights = [float8_block.cast_rows(joined(gate_, up)), float8_block.cast_rows(down)]
        total, own, roots = float8_block.norm_cast(reduction.wait(), x.flatten(0, 1), gain, eps)
        del left, weight, reduction
        normed = all_gather(own, tp.slices)
        both = multiply(normed, weights[0], x.dtype, fast=True)
        largest += [amax_bound(one) for one in (normed, *weights)]
        down_weight = weights[1]
        del own, normed, weights
        gated, of_both = float8_block.gate_cast(both)
        kept = both if saves_gate_up else None
        ctx.save_for_backward(attended, total, roots, kept, out, gain, gate_, up, down, of_both, amax_bound(gated), *largest)
        del both, kept
        ctx.deferred, ctx.tp, ctx.parameters = deferred, tp, (out, gate_, up, down)  # the leaves, as above

        def result() -> tuple[Tensor]:
            summed = tp.sum_start(multiply(gated, down_weight, x.dtype, fast=True)).wait()
            return (total.view_as(x) + summed.view_as(x),)

        return cache_across_recompute(result, needed_in_backward=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = grad.contiguous().flatten(0, 1)
        grads = (_deferred_backward if ctx.deferred.open else _whole_backward)(ctx, own, grad.shape)
        return *grads, None, None, None, None


def _whole_backward(ctx: Any, own: Tensor, shape: torch.Size) -> Sequence[Tensor]:
    attended, total, roots, both, out, gain, gate_, up, down, of_both, of_gated, *largest = ctx.saved_tensors
    of_attended, of_out, of_normed, of_inputs, of_down = largest
    tp, dtype = ctx.tp, own.dtype
    axis: Axis = tp.slices
    grads = Float8AllGather(cast_gradient(own, axis), axis)
    gathering = Float8AllGather(float8_block.cast(total, of_normed, E4M3, norm=(roots, gain)), axis)
    narrow = grads.wait()
    del grads
    grad_gated = multiply(narrow, float8_block.cast_transposed(down, of_down), dtype)
    if both is None:
        both = _gate_up(gathering.wait(), gate_, up, dtype)
    grad_both, both_transposed, gated = float8_block.gate_backward_cast(grad_gated, both, of_both, of_gated)
    del grad_gated, both
    (grad_down,) = weight_grads((down,))(float8_block.transpose(narrow), gated)
    del narrow, gated
    reduction = tp.sum_start(multiply(grad_both, float8_block.cast_transposed(joined(gate_, up), of_inputs), dtype))
    del grad_both
    normed = float8_block.transpose(gathering.wait())
    del gathering
    grad_gate, grad_up = weight_grads((gate_, up))(both_transposed, normed)
    del both_transposed, normed
    grad_total, grad_gain = float8_block.norm_backward(reduction.wait(), total, roots, gain, own)
    del reduction
    narrow = all_gather(cast_gradient(grad_total, axis), axis)
    grad_attended = tp.to_sequence_order(multiply(narrow, float8_block.cast_transposed(out, of_out), dtype), len(attended))
    turned = float8_block.transpose(narrow)
    del narrow
    (grad_out,) = weight_grads((out,))(
        turned, float8_block.cast_transposed(tp.to_chunk_order(attended.flatten(2)), of_attended)
    )
    return grad_total.view(shape), grad_attended.reshape(attended.shape), grad_out, grad_gain, grad_gate, grad_up, grad_down


def _deferred_backward(ctx: Any, own: Tensor, shape: torch.Size) -> Sequence[Tensor | None]:
    """The input gradients. Weight gradients are queued with slices of what they need gathered, in fp8."""
    attended, total, roots, both, out, gain, gate_, up, down, of_both, of_gated, *largest = ctx.saved_tensors
    of_attended, of_out, of_normed, of_inputs, of_down = largest
    tp, dtype = ctx.tp, own.dtype
    axis: Axis = tp.slices
    own_narrow, normed = cast_gradient(own, axis), float8_block.cast(total, of_normed, E4M3, norm=(roots, gain))
    if both is None:
        both = _gate_up(all_gather(normed, axis), gate_, up, dtype)
    grad_gated = multiply(all_gather(own_narrow, axis), float8_block.cast_transposed(down, of_down), dtype)
    grad_both, both_transposed, gated = float8_block.gate_backward_cast(grad_gated, both, of_both, of_gated)
    del grad_gated, both
    reduction = tp.sum_start(multiply(grad_both, float8_block.cast_transposed(joined(gate_, up), of_inputs), dtype))
    del grad_both
    grad_total, grad_gain = float8_block.norm_backward(reduction.wait(), total, roots, gain, own)
    del reduction
    total_narrow = cast_gradient(grad_total, axis)
    grad_attended = tp.to_sequence_order(
        multiply(all_gather(total_narrow, axis), float8_block.cast_transposed(out, of_out), dtype), len(attended)
    )
    attended_transposed = float8_block.cast_transposed(tp.to_chunk_order(attended.flatten(2)), of_attended)

    def grads_of_weights() -> Sequence[Tensor]:
        first, second = Float8AllGather(own_narrow, axis), Float8AllGather(normed, axis)
        (grad_down,) = weight_grads((down,))(float8_block.transpose(first.wait()), gated)
        del first
        third = Float8AllGather(total_narrow, axis)
        grad_gate, grad_up = weight_grads((gate_, up))(both_transposed, float8_block.transpose(second.wait()))
        del second
        (grad_out,) = weight_grads((out,))(float8_block.transpose(third.wait()), attended_transposed)
        return grad_out, grad_gate, grad_up, grad_down

    grad_out, *of_mlp = ctx.deferred.compute(ctx.parameters, grads_of_weights)
    return grad_total.view(shape), grad_attended.reshape(attended.shape), grad_out, grad_gain, *of_mlp


def _gate_up(normed: GemmOperand, gate_: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """The outputs of both GEMMs once more, from the norm's output with one scale."""
    rows = GemmOperand(normed.data, normed.scale.expand(len(normed.data), 1).contiguous())
    return multiply(rows, float8_block.cast_rows(joined(gate_, up)), dtype, fast=True)
