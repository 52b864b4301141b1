"""A fused dense block for a GPU: joined GEMMs, fused kernels between them, and fewer saved activations.

The plain block saves the outputs of its norms and its gate, because the following GEMMs need them in backward. Here the
backward kernels, which have the inputs in registers, write these outputs again: a third less is saved, no GEMM is recomputed.
Query, key and value are one GEMM, gate and up another, so that the gradients of their inputs need no sum. A split backward
defers weight gradients and keeps only their operands: outputs of norms and gate instead of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.kernels.deferred import DeferredWeightGrads
from ultrascale.kernels.recompute_cache import cache_across_recompute
from ultrascale.model.operators import RMSNorm, at_least_fp32, swiglu
from ultrascale.model.rotary import Rope, rotate
from ultrascale.model.self_attention import Attention, Mask, MultiLinear
from ultrascale.model.transformer import MLP, Block, Transformer


def apply(model: Transformer, deferred: DeferredWeightGrads | None = None) -> None:
    """Replaces all blocks by fused ones; names and parameters stay."""
    for name, block in model.blocks.items():
        model.blocks[name] = FusedBlock(cast(Block, block), deferred)


def join(model: Transformer) -> None:
    """Makes the weights of each joined GEMM contiguous; otherwise every GEMM would concatenate its matrices.

    Called after the weights have been moved to their device.
    """
    for block in model.each_block():
        if isinstance(block, FusedBlock):
            block.join()


class GatedMLPKernel:
    """The gate and up GEMMs of a gated MLP and its gate, forward and backward, with a Triton kernel between the GEMMs.

    kernels/gated_gemm.py computes the gate in the epilogue of the GEMM.
    """

    def forward(self, x: Tensor, gate_: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of both GEMMs [n, 2·f], which are saved for backward, and silu(x · gate) · (x · up) [n, f]."""
        both = self.gate_up(x, gate_, up)
        return both, gate(both)

    def gate_up(self, x: Tensor, gate_: Tensor, up: Tensor) -> Tensor:
        """The outputs of both GEMMs once more."""
        return x @ joined(gate_, up).t()

    def backward(self, grad: Tensor, down: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
        """From the gradient of the MLP's output: the gradient of `both`, and the recomputed output of the gate."""
        return gate_backward(grad @ down, both)

    def grad_input(self, grad_both: Tensor, gate_: Tensor, up: Tensor) -> Tensor:
        return grad_both @ self.input_weight(gate_, up)

    def input_weight(self, gate_: Tensor, up: Tensor) -> Tensor:
        """Both weights as one [2·f, h], with rows in the order of the columns of `both`."""
        return joined(gate_, up)

    def grad_weights(self, grad_both: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grad_gate, grad_up = (grad_both.t() @ x).chunk(2)
        return grad_gate, grad_up


class FusedBlock(Block):
    def __init__(self, plain: Block, deferred: DeferredWeightGrads | None = None) -> None:
        nn.Module.__init__(self)  # not Block's: the plain module's parameters are taken over
        self.attention_norm, self.attention = plain.attention_norm, plain.attention
        self.mlp_norm, self.mlp = plain.mlp_norm, plain.mlp
        self.mlp_kernel, self.deferred = GatedMLPKernel(), deferred or DeferredWeightGrads(used=False)
        self.saves_gate_up = True
        """False: backward recomputes the outputs of gate and up, which are the widest (selective recomputation)"""

    def join(self) -> None:
        """Makes the weights of each joined GEMM contiguous in memory."""
        for multi_linear in self.joined_linears():
            weights = list(multi_linear.parameters())
            contiguous = torch.cat([weight.data for weight in weights])
            for weight, part in zip(weights, torch.split(contiguous, [len(weight) for weight in weights]), strict=True):
                weight.data = part

    def joined_linears(self) -> tuple[MultiLinear, MultiLinear]:
        """The linears that are computed as one GEMM each."""
        assert isinstance(self.mlp, MLP)
        assert isinstance(self.attention, Attention)
        return self.attention.qkv, self.mlp.inputs

    def qkv_rotary(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The part of the block before attention, with a custom backward."""
        return _FusedQKV.apply(*arguments, self.deferred)  # type: ignore[no-untyped-call, no-any-return]

    def out_mlp(self, *arguments: Any) -> Tensor:
        """The part of the block after attention."""
        settings = self.mlp_kernel, self.saves_gate_up, self.deferred
        return _FusedOutputAndMLP.apply(*arguments, *settings)  # type: ignore[no-untyped-call, no-any-return]

    def forward(self, x: Tensor, rope: Rope | Tensor | None, bias: Mask | None = None) -> Tensor:
        assert isinstance(rope, tuple)  # kernel selection leaves blocks without rotary positions plain
        attention, (qkv, inputs) = cast(Attention, self.attention), self.joined_linears()
        first, second = cast(RMSNorm, self.attention_norm), cast(RMSNorm, self.mlp_norm)
        weights = (*qkv.parameters(), *inputs.parameters())  # without biases: one matrix each
        x, q, k, v = self.qkv_rotary(x, first.weight, *weights[:3], *rope, first.eps, attention.head_dim)
        attended = attention.core(q, k, v) if bias is None else attention.core(q, k, v, bias)
        assert isinstance(self.mlp, MLP)
        return self.out_mlp(x, attended, attention.out.weight, second.weight, *weights[3:], self.mlp.down.weight, second.eps)


class _FusedQKV(torch.autograd.Function):
    """Norm, QKV projection and rotary embedding; also returns the input, so that its gradients are summed in one kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, eps: float, dim: int,
        deferred: DeferredWeightGrads,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        _, normed, scales = norm(x.flatten(0, 1), None, gain, eps)
        joint = (normed @ joined(q, k, v).t()).view(len(normed), -1, dim)
        heads, kv_heads = len(q) // dim, len(k) // dim
        rotate_(joint, heads, kv_heads, (cos, sin))
        ctx.save_for_backward(x, scales, gain, q, k, v, cos, sin)
        ctx.deferred, ctx.parameters = deferred, (q, k, v)  # the leaves: checkpointing unpacks copies, whose .grad is lost
        rotated_q, rotated_k, values = torch.split(joint.view(*x.shape[:2], -1, dim), [heads, kv_heads, kv_heads], dim=2)
        return x.view_as(x), rotated_q, rotated_k, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, past: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scales, gain, q, k, v, cos, sin = ctx.saved_tensors
        grad_q, grad_k, grad_v = (grad.contiguous().flatten(0, 1) for grad in grads)
        joint = rotate_back(grad_q, grad_k, grad_v, (cos, sin)).flatten(1)
        grad_normed = joint @ joined(q, k, v)
        grad_x, grad_gain, normed = norm_backward(grad_normed, x.flatten(0, 1), scales, gain, past.flatten(0, 1))
        grad_weights = ctx.deferred.compute(ctx.parameters, qkv_weight_grads((q, k, v)), joint, normed)
        return grad_x.view_as(x), grad_gain, *grad_weights, None, None, None, None, None


class _FusedOutputAndMLP(torch.autograd.Function):
    """Output projection, residual sum with the norm, and the gated MLP."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, out: Tensor, gain: Tensor, gate_: Tensor, up: Tensor, down: Tensor, eps: float,
        mlp_kernel: GatedMLPKernel, saves_gate_up: bool, deferred: DeferredWeightGrads,
    ) -> Tensor:  # fmt: skip
        total, normed, scales = norm(_rows(attended) @ out.t(), x.flatten(0, 1), gain, eps)
        both, gated = mlp_kernel.forward(normed, gate_, up)
        # Not its rows: in a rehearsal, whose tensors are fake, a view keeps the graph of what is recomputed.
        ctx.save_for_backward(attended, total, scales, both if saves_gate_up else None, out, gain, gate_, up, down)
        ctx.eps, ctx.mlp_kernel, ctx.deferred = eps, mlp_kernel, deferred
        ctx.parameters = out, gate_, up, down  # the leaves: checkpointing unpacks copies, whose .grad is lost

        def result() -> tuple[Tensor]:
            return (total.view_as(x) + (gated @ down.t()).view_as(x),)  # not a view: FSDP2 registers its hook on it

        return cache_across_recompute(result, needed_in_backward=False)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attended, total, scales, both, out, gain, gate_, up, down = ctx.saved_tensors
        flat, mlp_kernel, deferred = grad.contiguous().flatten(0, 1), ctx.mlp_kernel, ctx.deferred
        of_out, *of_inputs, of_down = ctx.parameters
        if both is None:
            both = mlp_kernel.gate_up(norm(total, None, gain, ctx.eps)[1], gate_, up)
        grad_both, gated = mlp_kernel.backward(flat, down, both)
        del both
        (grad_down,) = deferred.compute((of_down,), weight_grad, flat, gated)
        del gated
        grad_total, grad_gain, normed = norm_backward(mlp_kernel.grad_input(grad_both, gate_, up), total, scales, gain, flat)
        grad_gate, grad_up = deferred.compute(of_inputs, mlp_kernel.grad_weights, grad_both, normed)
        del grad_both, normed
        grad_inputs = grad_total.view_as(grad), (grad_total @ out).view(attended.shape)
        (grad_out,) = deferred.compute((of_out,), weight_grad, grad_total, _rows(attended))
        return *grad_inputs, grad_out, grad_gain, grad_gate, grad_up, grad_down, None, None, None, None


def _rows(attended: Tensor) -> Tensor:
    """Attention's output [b, s, heads, d] as [n, heads·d]."""
    return attended.flatten(2).flatten(0, 1)


def weight_grad(grad: Tensor, x: Tensor) -> tuple[Tensor]:
    return (grad.t() @ x,)


def qkv_weight_grads(weights: Sequence[Tensor]) -> Callable[[Tensor, Tensor], Sequence[Tensor]]:
    rows = [len(weight) for weight in weights]
    return lambda grad, x: torch.split(grad.t() @ x, rows)


def joined(*weights: Tensor) -> Tensor:
    """Concatenates matrices [out, in] along their rows: a view if they are contiguous in memory, else a copy."""
    first, end = weights[0], weights[0].storage_offset()
    for weight in weights:
        if (
            weight.storage_offset() != end
            or not weight.is_contiguous()
            or weight.untyped_storage() is not first.untyped_storage()
        ):
            return torch.cat(weights)
        end += weight.numel()
    return first.as_strided((sum(len(weight) for weight in weights), first.shape[1]), first.stride())


def norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, h] + added, its RMSNorm, and the norm's scale of each row [n]."""
    if x.is_cuda:
        from ultrascale.kernels import fused_triton

        return fused_triton.norm(x, added, weight, eps)
    total = x if added is None else x + added
    wide = at_least_fp32(total)
    scales = torch.rsqrt(wide.square().mean(-1) + eps)
    return total, (wide * scales.unsqueeze(-1) * at_least_fp32(weight)).to(x.dtype), scales


def norm_backward(grad: Tensor, x: Tensor, scales: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, with `residual` added, and of the weight; and the recomputed output of the norm."""
    if x.is_cuda:
        from ultrascale.kernels import fused_triton

        return fused_triton.norm_backward(grad, x, scales, weight, residual)
    unit, wide = at_least_fp32(x) * scales.unsqueeze(-1), at_least_fp32(grad)
    grad_unit = wide * at_least_fp32(weight)
    grad_x = scales.unsqueeze(-1) * (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True))
    out = (unit * at_least_fp32(weight)).to(x.dtype)
    return (at_least_fp32(residual) + grad_x).to(x.dtype), (wide * unit).sum(0).to(weight.dtype), out


def rotate_(qkv: Tensor, heads: int, kv_heads: int, rope: Rope) -> None:
    """Rotates the queries and keys of qkv [n, heads + 2·kv_heads, d] in place; rows are whole sequences."""
    if qkv.is_cuda:
        from ultrascale.kernels import fused_triton

        fused_triton.rotate_(qkv, heads, kv_heads, *rope)
        return
    rotated = qkv.view(-1, len(rope[0]), *qkv.shape[1:])[:, :, : heads + kv_heads]
    rotated.copy_(rotate(rotated, rope))


def rotate_back(q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
    """Gradients of q, k and v [n, heads, d] as one [n, heads + 2·kv_heads, d], before the rotation."""
    if q.is_cuda:
        from ultrascale.kernels import fused_triton

        return fused_triton.rotate_back(q, k, v, *rope)
    cos, sin = rope
    both = torch.cat((q, k), dim=1)
    rotated = both.view(-1, len(cos), *both.shape[1:])
    return torch.cat((rotate(rotated, (cos, -sin)).flatten(0, 1), v), dim=1)


def gate(both: Tensor) -> Tensor:
    """silu(gate) · up of both [n, 2·f]."""
    if both.is_cuda:
        from ultrascale.kernels import fused_triton

        return fused_triton.gate(both)
    return swiglu(*both.chunk(2, dim=-1))


def gate_backward(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of both, and the recomputed output of the gate."""
    if both.is_cuda:
        from ultrascale.kernels import fused_triton

        return fused_triton.gate_backward(grad, both)
    gate_, up = both.chunk(2, dim=-1)
    silu = F.silu(gate_)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate_), grad * silu), dim=-1), silu * up


def merge_attention_(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merges attention over more keys into `out` [b, s, heads, d] and `lse` [b, heads, s], in place.

    The sums are in fp32 or wider; both outputs are weighted by their share of the exponentials.
    """
    if out.is_cuda and out.dtype == torch.float32:
        from ultrascale.kernels import fused_triton

        fused_triton.merge_attention_(out, lse, tile_out, tile_lse)
        return
    share = torch.sigmoid(tile_lse - lse).transpose(1, 2).unsqueeze(-1)  # of the new keys, [b, s, heads, 1]
    out.lerp_(at_least_fp32(tile_out), share)
    lse.copy_(torch.logaddexp(lse, tile_lse))
