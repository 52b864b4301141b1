"""The fused block (kernels/fused.py) where tensor parallelism cuts its layers.

With sequence parallelism norms, residual sums and their gradients run on this rank's slice of the sequence, GEMMs on all tokens
and this rank's columns or rows. What a GEMM needs whole is gathered, what it yields in parts is summed and scattered. In
backward both overlap with a GEMM: the norm's output is gathered while the input gradient is computed, which is scattered while
weight gradients are. A split backward keeps slices for the weight gradients, of output gradients too, and gathers them when it
computes these.
With several chunks (parallel/async_tensor.py) the collectives of forward, and those that would be exposed in backward, overlap
with the GEMMs of other chunks of the tokens. What is saved is the same, with rows in the order of chunks.
Without sequence parallelism nothing is gathered, and partial sums are all-reduced while weight gradients are computed.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ultrascale.kernels import fused
from ultrascale.kernels.deferred import DeferredWeightGrads
from ultrascale.kernels.fused import FusedBlock, GatedMLPKernel, joined
from ultrascale.kernels.recompute_cache import cache_across_recompute
from ultrascale.model.rotary import Rope
from ultrascale.model.transformer import Block, Transformer
from ultrascale.parallel.async_tensor import AsyncTensorParallel
from ultrascale.parallel.comm import Axis


def apply(
    model: Transformer, axis: Axis, deferred: DeferredWeightGrads | None = None, chunks: int = 1, sequence: bool = True
) -> None:
    """Replaces all blocks, whose linears are already cut, by fused ones; names and parameters stay."""
    tp = AsyncTensorParallel(axis, chunks if sequence else 1, sequence)
    for name, block in model.blocks.items():
        model.blocks[name] = TensorParallelFusedBlock(cast(Block, block), tp, deferred)


class TensorParallelFusedBlock(FusedBlock):
    def __init__(self, plain: Block, tp: AsyncTensorParallel, deferred: DeferredWeightGrads | None = None) -> None:
        super().__init__(plain, deferred)
        self.tp = tp

    def qkv_rotary(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _TensorParallelQKV.apply(*arguments, self.deferred, self.tp)  # type: ignore[no-untyped-call, no-any-return]

    def out_mlp(self, *arguments: Any) -> Tensor:
        settings = self.mlp_kernel, self.saves_gate_up, self.deferred, self.tp
        return _TensorParallelOutputAndMLP.apply(*arguments, *settings)  # type: ignore[no-untyped-call, no-any-return]


class _TensorParallelQKV(torch.autograd.Function):
    """Norm, QKV projection and rotary embedding; also returns the input, so that its gradients are summed in one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, eps: float, dim: int,
        deferred: DeferredWeightGrads, tp: AsyncTensorParallel,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        _, normed, scales = fused.norm(x.flatten(0, 1), None, gain, eps)
        rows = tp.all_gather_operand(normed) @ joined(q, k, v).t()
        ctx.save_for_backward(x, scales, gain, q, k, v, cos, sin)
        ctx.eps, ctx.deferred, ctx.tp = eps, deferred, tp
        ctx.parameters = q, k, v  # the leaves: checkpointing unpacks copies, whose .grad is lost
        return x.view_as(x), *rotated_heads(rows, len(x), (len(q) // dim, len(k) // dim, dim), (cos, sin), tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scales, gain, q, k, v, cos, sin = ctx.saved_tensors
        tp, deferred, rows = ctx.tp, ctx.deferred, x.flatten(0, 1)
        gathering = None if deferred.open else tp.all_gather_start(fused.norm(rows, None, gain, ctx.eps)[1])
        grad_q, grad_k, grad_v = (grad.contiguous().flatten(0, 1) for grad in grads)
        joint = fused.rotate_back(grad_q, grad_k, grad_v, (cos, sin)).flatten(1)
        joint = tp.to_chunk_order(joint.view(len(x), -1, joint.shape[1]))
        reduction = tp.matmul_reduce_scatter_start(joint, joined(q, k, v))
        of_weights = fused.qkv_weight_grads((q, k, v))
        grad_weights = None if gathering is None else of_weights(joint, gathering.wait())
        grad_x, grad_gain, normed = fused.norm_backward(reduction.wait(), rows, scales, gain, past.flatten(0, 1))
        if grad_weights is None:
            grad_weights = deferred.compute(ctx.parameters, lambda: of_weights(joint, tp.all_gather_start(normed).wait()))
        return grad_x.view_as(x), grad_gain, *grad_weights, None, None, None, None, None, None


def rotated_heads(
    rows: Tensor, batch: int, heads: tuple[int, int, int], rope: Rope, tp: AsyncTensorParallel
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v [b, s, heads, d] in the order of the sequence, the first two rotated, from the output of their joint GEMM.

    `heads`: of queries, of keys, and the dimension of each.
    """
    queries, keys, dim = heads
    joint = tp.to_sequence_order(rows, batch).reshape(len(rows), -1, dim)
    fused.rotate_(joint, queries, keys, rope)
    q, k, v = torch.split(joint.view(batch, -1, *joint.shape[1:]), [queries, keys, keys], dim=2)
    return q, k, v


class _TensorParallelOutputAndMLP(torch.autograd.Function):
    """Output projection, residual sum with the norm, and the gated MLP."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, out: Tensor, gain: Tensor, gate_: Tensor, up: Tensor, down: Tensor, eps: float,
        mlp_kernel: GatedMLPKernel, saves_gate_up: bool, deferred: DeferredWeightGrads, tp: AsyncTensorParallel,
    ) -> Tensor:  # fmt: skip
        summed = tp.matmul_reduce_scatter_start(tp.to_chunk_order(attended.flatten(2)), out.t()).wait()
        total, normed, scales = fused.norm(summed, x.flatten(0, 1), gain, eps)
        both, gated = mlp_kernel.forward(tp.all_gather_operand(normed), gate_, up)
        ctx.save_for_backward(attended, total, scales, both if saves_gate_up else None, out, gain, gate_, up, down)
        ctx.eps, ctx.mlp_kernel, ctx.deferred, ctx.tp = eps, mlp_kernel, deferred, tp
        ctx.parameters = out, gate_, up, down  # as above

        def result() -> tuple[Tensor]:
            return (total.view_as(x) + tp.matmul_reduce_scatter_start(gated, down.t()).wait().view_as(x),)

        return cache_across_recompute(result, needed_in_backward=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = grad.contiguous().flatten(0, 1)
        grads = (_deferred_backward if ctx.deferred.open else _whole_backward)(ctx, own, grad.shape)
        return *grads, None, None, None, None, None


def _whole_backward(ctx: Any, own: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    attended, total, scales, both, out, gain, gate_, up, down = ctx.saved_tensors
    mlp_kernel, tp = ctx.mlp_kernel, ctx.tp
    gathering = tp.all_gather_start(fused.norm(total, None, gain, ctx.eps)[1]) if both is None else None
    grads = tp.all_gather_start(own)
    operand = grads.operand
    if gathering is None:
        gathering = tp.all_gather_start(fused.norm(total, None, gain, ctx.eps)[1])
    else:
        both = mlp_kernel.gate_up(gathering.operand, gate_, up)
    grad_both, gated = mlp_kernel.backward(operand, down, both)
    grad_down = grads.wait().t() @ gated
    del grads, operand, gated, both
    reduction = tp.matmul_reduce_scatter_start(grad_both, mlp_kernel.input_weight(gate_, up))
    grad_gate, grad_up = mlp_kernel.grad_weights(grad_both, gathering.wait())
    del grad_both, gathering
    grad_total, grad_gain, _ = fused.norm_backward(reduction.wait(), total, scales, gain, own)
    del reduction
    grads = tp.all_gather_start(grad_total)
    grad_attended = tp.to_sequence_order(grads @ out, len(attended)).reshape(attended.shape)
    grad_out = grads.wait().t() @ tp.to_chunk_order(attended.flatten(2))
    return grad_total.view(shape), grad_attended, grad_out, grad_gain, grad_gate, grad_up, grad_down


def _deferred_backward(ctx: Any, own: Tensor, shape: torch.Size) -> tuple[Tensor | None, ...]:
    """The input gradients. Weight gradients are queued with slices of what they need gathered."""
    attended, total, scales, both, out, gain, gate_, up, down = ctx.saved_tensors
    mlp_kernel, tp = ctx.mlp_kernel, ctx.tp
    if both is None:
        both = mlp_kernel.gate_up(tp.all_gather_operand(fused.norm(total, None, gain, ctx.eps)[1]), gate_, up)
    grad_both, gated = mlp_kernel.backward(tp.all_gather_operand(own), down, both)
    del both
    grad_normed = tp.matmul_reduce_scatter_start(grad_both, mlp_kernel.input_weight(gate_, up)).wait()
    grad_total, grad_gain, normed = fused.norm_backward(grad_normed, total, scales, gain, own)
    del grad_normed
    grad_attended = tp.to_sequence_order(tp.all_gather_operand(grad_total) @ out, len(attended)).reshape(attended.shape)

    def weight_grads() -> tuple[Tensor, ...]:
        first, second = tp.all_gather_start(own), tp.all_gather_start(normed)
        grad_down = first.wait().t() @ gated
        del first
        third = tp.all_gather_start(grad_total)
        grad_gate, grad_up = mlp_kernel.grad_weights(grad_both, second.wait())
        del second
        return third.wait().t() @ tp.to_chunk_order(attended.flatten(2)), grad_gate, grad_up, grad_down

    grad_out, *of_mlp = ctx.deferred.compute(ctx.parameters, weight_grads)
    return grad_total.view(shape), grad_attended, grad_out, grad_gain, *of_mlp
