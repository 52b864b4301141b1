"""The fused block (kernels/fused.py) where tensor parallelism cuts its layers, with sequence parallelism.

Norms, residual sums and their gradients run on this rank's slice of the sequence, GEMMs on all tokens and this rank's columns
or rows. What a GEMM needs whole is gathered, what it yields in parts is summed and scattered. In backward both overlap with a
GEMM: the norm's output is gathered while the input gradient is computed, which is scattered while weight gradients are.
A split backward keeps slices for the weight gradients, of output gradients too, and gathers them when it computes these.
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
from ultrascale.model.transformer import Block, Transformer
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.tensor import GatheredInput

ATTENTION_INPUT = GatheredInput(reorder=True)


def apply(model: Transformer, axis: Axis, deferred: DeferredWeightGrads | None = None) -> None:
    """Replaces all blocks, whose linears are already cut, by fused ones; names and parameters stay."""
    for name, block in model.blocks.items():
        model.blocks[name] = TensorParallelFusedBlock(cast(Block, block), axis, deferred)


class TensorParallelFusedBlock(FusedBlock):
    def __init__(self, plain: Block, axis: Axis, deferred: DeferredWeightGrads | None = None) -> None:
        super().__init__(plain, deferred)
        self.axis = axis

    def qkv_rotary(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _TensorParallelQKV.apply(*arguments, self.deferred, self.axis)  # type: ignore[no-untyped-call, no-any-return]

    def out_mlp(self, *arguments: Any) -> Tensor:
        settings = self.mlp_kernel, self.saves_gate_up, self.deferred, self.axis
        return _TensorParallelOutputAndMLP.apply(*arguments, *settings)  # type: ignore[no-untyped-call, no-any-return]


class _TensorParallelQKV(torch.autograd.Function):
    """Norm, QKV projection and rotary embedding; also returns the input, so that its gradients are summed in one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, eps: float, dim: int,
        deferred: DeferredWeightGrads, axis: Axis,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        _, normed, scales = fused.norm(x.flatten(0, 1), None, gain, eps)
        parts = comm.all_gather(normed, axis) @ joined(q, k, v).t()
        joint = ATTENTION_INPUT.to_sequence_order(parts.view(-1, x.shape[1], parts.shape[1]), axis).reshape(len(parts), -1, dim)
        heads, kv_heads = len(q) // dim, len(k) // dim
        fused.rotate_(joint, heads, kv_heads, (cos, sin))
        ctx.save_for_backward(x, scales, gain, q, k, v, cos, sin)
        ctx.eps, ctx.deferred, ctx.axis = eps, deferred, axis
        ctx.parameters = q, k, v  # the leaves: checkpointing unpacks copies, whose .grad is lost
        whole = joint.view(len(x), -1, *joint.shape[1:])
        rotated_q, rotated_k, values = torch.split(whole, [heads, kv_heads, kv_heads], dim=2)
        return x.view_as(x), rotated_q, rotated_k, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scales, gain, q, k, v, cos, sin = ctx.saved_tensors
        axis, deferred, rows = ctx.axis, ctx.deferred, x.flatten(0, 1)
        gathering = None if deferred.open else comm.all_gather_start(fused.norm(rows, None, gain, ctx.eps)[1], axis)
        grad_q, grad_k, grad_v = (grad.contiguous().flatten(0, 1) for grad in grads)
        joint = fused.rotate_back(grad_q, grad_k, grad_v, (cos, sin)).flatten(1)
        joint = ATTENTION_INPUT.to_rank_order(joint.view(len(x), -1, joint.shape[1]), axis).reshape(joint.shape)
        reduction = comm.reduce_scatter_start(joint @ joined(q, k, v), axis)
        of_weights = fused.qkv_weight_grads((q, k, v))
        grad_weights = None if gathering is None else of_weights(joint, gathering.wait())
        grad_x, grad_gain, normed = fused.norm_backward(reduction.wait(), rows, scales, gain, past.flatten(0, 1))
        if grad_weights is None:
            grad_weights = deferred.compute(ctx.parameters, lambda: of_weights(joint, comm.all_gather(normed, axis)))
        return grad_x.view_as(x), grad_gain, *grad_weights, None, None, None, None, None, None


class _TensorParallelOutputAndMLP(torch.autograd.Function):
    """Output projection, residual sum with the norm, and the gated MLP."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, out: Tensor, gain: Tensor, gate_: Tensor, up: Tensor, down: Tensor, eps: float,
        mlp_kernel: GatedMLPKernel, saves_gate_up: bool, deferred: DeferredWeightGrads, axis: Axis,
    ) -> Tensor:  # fmt: skip
        summed = comm.reduce_scatter(_attended_rows(attended, axis) @ out.t(), axis)
        total, normed, scales = fused.norm(summed, x.flatten(0, 1), gain, eps)
        both, gated = mlp_kernel.forward(comm.all_gather(normed, axis), gate_, up)
        ctx.save_for_backward(attended, total, scales, both if saves_gate_up else None, out, gain, gate_, up, down)
        ctx.eps, ctx.mlp_kernel, ctx.deferred, ctx.axis = eps, mlp_kernel, deferred, axis
        ctx.parameters = out, gate_, up, down  # as above

        def result() -> tuple[Tensor]:
            return (total.view_as(x) + comm.reduce_scatter(gated @ down.t(), axis).view_as(x),)

        return cache_across_recompute(result, needed_in_backward=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        own = grad.contiguous().flatten(0, 1)
        grads = (_deferred_backward if ctx.deferred.open else _whole_backward)(ctx, own, grad.shape)
        return *grads, None, None, None, None, None


def _whole_backward(ctx: Any, own: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    attended, total, scales, both, out, gain, gate_, up, down = ctx.saved_tensors
    mlp_kernel, axis = ctx.mlp_kernel, ctx.axis
    gathering = comm.all_gather_start(fused.norm(total, None, gain, ctx.eps)[1], axis) if both is None else None
    whole = comm.all_gather(own, axis)
    if gathering is None:
        gathering = comm.all_gather_start(fused.norm(total, None, gain, ctx.eps)[1], axis)
    else:
        both = mlp_kernel.gate_up(gathering.wait(), gate_, up)
    grad_both, gated = mlp_kernel.backward(whole, down, both)
    grad_down = whole.t() @ gated
    del whole, gated, both
    reduction = comm.reduce_scatter_start(mlp_kernel.grad_input(grad_both, gate_, up), axis)
    grad_gate, grad_up = mlp_kernel.grad_weights(grad_both, gathering.wait())
    del grad_both, gathering
    grad_total, grad_gain, _ = fused.norm_backward(reduction.wait(), total, scales, gain, own)
    del reduction
    whole = comm.all_gather(grad_total, axis)
    grad_attended = _to_attended(whole @ out, attended, axis)
    grad_out = whole.t() @ _attended_rows(attended, axis)
    return grad_total.view(shape), grad_attended, grad_out, grad_gain, grad_gate, grad_up, grad_down


def _deferred_backward(ctx: Any, own: Tensor, shape: torch.Size) -> tuple[Tensor | None, ...]:
    """The input gradients. Weight gradients are queued with slices of what they need gathered."""
    attended, total, scales, both, out, gain, gate_, up, down = ctx.saved_tensors
    mlp_kernel, axis = ctx.mlp_kernel, ctx.axis
    if both is None:
        both = mlp_kernel.gate_up(comm.all_gather(fused.norm(total, None, gain, ctx.eps)[1], axis), gate_, up)
    grad_both, gated = mlp_kernel.backward(comm.all_gather(own, axis), down, both)
    del both
    grad_normed = comm.reduce_scatter(mlp_kernel.grad_input(grad_both, gate_, up), axis)
    grad_total, grad_gain, normed = fused.norm_backward(grad_normed, total, scales, gain, own)
    del grad_normed
    grad_attended = _to_attended(comm.all_gather(grad_total, axis) @ out, attended, axis)

    def weight_grads() -> tuple[Tensor, ...]:
        first, second = comm.all_gather_start(own, axis), comm.all_gather_start(normed, axis)
        grad_down = first.wait().t() @ gated
        del first
        third = comm.all_gather_start(grad_total, axis)
        grad_gate, grad_up = mlp_kernel.grad_weights(grad_both, second.wait())
        del second
        return third.wait().t() @ _attended_rows(attended, axis), grad_gate, grad_up, grad_down

    grad_out, *of_mlp = ctx.deferred.compute(ctx.parameters, weight_grads)
    return grad_total.view(shape), grad_attended, grad_out, grad_gain, *of_mlp


def _to_attended(rows: Tensor, attended: Tensor, axis: Axis) -> Tensor:
    """The inverse of `_attended_rows`."""
    parts = rows.view(-1, attended.shape[1] // axis.size, rows.shape[1])
    return ATTENTION_INPUT.to_sequence_order(parts, axis).reshape(attended.shape)


def _attended_rows(attended: Tensor, axis: Axis) -> Tensor:
    """Attention's output [b, s, heads, d] as rows [n, heads·d], one rank's slices of sequences after another's."""
    return ATTENTION_INPUT.to_rank_order(attended.flatten(2), axis).flatten(0, 1)
