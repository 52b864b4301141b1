"""Tensor and sequence parallelism: column- and row-parallel linears, vocab-parallel embedding, head and loss.

Megatron's pairs (Shoeybi 2019, Korthikanti 2022) applied to a plain model from outside: parameters are replaced by this rank's
shard, and the modules around a sharded region by ones that communicate. With sequence parallelism, norms run on slices of the
sequence, and the gathered input of a linear is not saved: backward gathers it again while it computes the input gradient
(Korthikanti 2022, section 4.2.2). Schedules with a split backward defer weight gradients. The cost
model is cost/communication.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from ultrascale.kernels.deferred import DeferredWeightGrads, add_gradient
from ultrascale.kernels.float8_gemm import CustomGemmModule, PlainGemms
from ultrascale.kernels.recompute_cache import cache_across_recompute
from ultrascale.model.adapters import ADAPTERS, Adapters
from ultrascale.model.latent_attention import LatentAttention
from ultrascale.model.linear_attention import GatedDeltaNet
from ultrascale.model.mamba import Mamba2Mixer
from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.operators import RMSNorm, at_least_fp32
from ultrascale.model.self_attention import MultiLinear
from ultrascale.model.transformer import IGNORE_INDEX, MLP, CrossEntropy, PredictionBlock, Transformer
from ultrascale.parallel import comm
from ultrascale.parallel.comm import SINGLE_RANK, Axis, copy_to, gather_from, reduce_from, scatter_to
from ultrascale.parallel.expert_layer import ParallelExperts
from ultrascale.parallel.mesh import Mesh, Shard

VOCABULARY = ("embed.tokens.weight", "embed_ahead.tokens.weight", "head.linear.weight")
"""matrices with a row for each token of the vocabulary"""
SEQUENCE = 1  # the dimension of [batch, sequence, hidden] that sequence parallelism shards
BATCH = 0  # slices gathered along this dimension stay in the order of ranks, as they arrive: nothing is copied

Result = Literal["saved", "recomputed", "unused"]


@dataclass(frozen=True)
class GatheredInput:
    """How sequence parallelism gathers the input of a linear, and in which order its rows are.

    Most operators do not depend on the order of tokens, so slices stay as they arrive. Attention does: q, k, v and its output,
    which are narrower than the gathered input, are copied into the order of the sequence and back.
    """

    dim: int = BATCH
    reorder: bool = False
    """the linear's other side is attention's, in the order of the sequence"""

    def to_sequence_order(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """[ranks·b, s/ranks, n] as [b, s, n]; a view if b is 1."""
        return torch.unflatten(x, 0, (axis.size, -1)).transpose(0, 1).flatten(1, 2) if self.reorder else x

    def to_rank_order(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """The inverse."""
        return torch.unflatten(x, 1, (axis.size, -1)).transpose(0, 1).flatten(0, 1) if self.reorder else x


class _MultiLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, sequence, deferred, gemms, count, *tensors):  # type: ignore[no-untyped-def]
        weights, biases = tensors[:count], tensors[count:]

        def compute() -> tuple[torch.Tensor, ...]:
            whole = comm.all_gather(x, axis, sequence.dim) if sequence else x
            products = (gemms.forward(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))
            return tuple(sequence.to_sequence_order(product, axis) if sequence else product for product in products)

        ctx.axis, ctx.sequence, ctx.deferred, ctx.gemms = axis, sequence, deferred, gemms
        ctx.has_bias = [bias is not None and bias.requires_grad for bias in biases]
        ctx.trained = any(weight.requires_grad for weight in weights)
        ctx.parameters = weights  # the leaves themselves: checkpointing unpacks a copy whose .grad is lost
        ctx.save_for_backward(x if ctx.trained else None, *weights)
        return cache_across_recompute(compute)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x, *weights = ctx.saved_tensors
        axis, sequence, deferred, gemms = ctx.axis, ctx.sequence, ctx.deferred, ctx.gemms
        # A deferred gradient gathers its input when it runs: until then only the slice stays in memory.
        gathers = sequence and ctx.trained and not deferred.open
        gathering = comm.all_gather_start(x, axis, sequence.dim) if gathers else None
        grads = tuple(sequence.to_rank_order(grad, axis) for grad in grads) if sequence else grads
        dx = None
        if ctx.needs_input_grad[0]:
            dx = gemms.grad_input(grads[0], weights[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                dx += gemms.grad_input(grad, weight)
        whole = gathering.wait() if gathering is not None else x
        reduction = None
        if dx is not None:
            reduction = comm.reduce_scatter_start(dx, axis, sequence.dim) if sequence else comm.all_reduce_start(dx, axis)
        dw: list[torch.Tensor | None] = [None] * len(weights)
        if deferred.open and ctx.trained:

            def gathered() -> torch.Tensor:
                return comm.all_gather(x, axis, sequence.dim) if sequence else x

            deferred.pending.append(_deferred_grads(gathered, grads, ctx.parameters, gemms))
        elif ctx.trained:
            dw = [gemms.grad_weight(grad, whole) for grad in grads]
        db = [grad.flatten(0, -2).sum(0) if has else None for grad, has in zip(grads, ctx.has_bias, strict=True)]
        if reduction is not None:
            dx = reduction.wait()
        return dx, None, None, None, None, None, *dw, *db


class _RowParallelFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, axis, sequence, deferred, gemms, result):  # type: ignore[no-untyped-def]
        def compute() -> tuple[torch.Tensor, ...]:
            part = gemms.forward(sequence.to_rank_order(x, axis) if sequence else x, weight)
            return (comm.reduce_scatter(part, axis, sequence.dim) if sequence else comm.all_reduce(part, axis),)

        ctx.axis, ctx.sequence, ctx.deferred, ctx.gemms = axis, sequence, deferred, gemms
        ctx.parameter, ctx.trained = weight, weight.requires_grad
        ctx.save_for_backward(x if ctx.trained else None, weight)
        (out,) = compute() if result == "recomputed" else cache_across_recompute(compute, needed_in_backward=result == "saved")
        return out

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        axis, sequence, gemms, deferred = ctx.axis, ctx.sequence, ctx.gemms, ctx.deferred
        grad = comm.all_gather(grads[0], axis, sequence.dim) if sequence else grads[0]
        dx = gemms.grad_input(grad, weight) if ctx.needs_input_grad[0] else None
        if dx is not None and sequence:
            dx = sequence.to_sequence_order(dx, axis)

        def ordered() -> torch.Tensor:
            rows: torch.Tensor = sequence.to_rank_order(x, axis) if sequence else x
            return rows

        if deferred.open and ctx.trained:
            deferred.pending.append(_deferred_grads(ordered, [grad], [ctx.parameter], gemms))
        dw = gemms.grad_weight(grad, ordered()) if ctx.trained and not deferred.open else None
        return dx, dw, None, None, None, None, None


def _deferred_grads(
    inputs: Callable[[], torch.Tensor], grads: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], gemms: PlainGemms
) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        x = inputs()
        for grad, parameter in zip(grads, parameters, strict=True):
            add_gradient(parameter, gemms.grad_weight(grad, x))

    return run


def multi_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    deferred: DeferredWeightGrads,
    axis: Axis,
    sequence: GatheredInput | None,
    gemms: PlainGemms,
) -> tuple[torch.Tensor, ...]:
    """x·wᵀ + b for each weight. The input is replicated over the axis, or sharded along the sequence; dx is reduced over it."""
    settings = axis, sequence, deferred, gemms, len(weights)
    out: tuple[torch.Tensor, ...] = _MultiLinearFunction.apply(x, *settings, *weights, *biases)  # type: ignore[no-untyped-call]
    return out


class _TensorParallelModule(nn.Module):
    """Base of modules that take over a plain module's parameters; `extra_repr` shows this rank's shard."""

    sparse = False  # torch's DDP reads it on every embedding
    weight: torch.Tensor

    def __init__(
        self,
        plain: nn.Module,
        axis: Axis,
        sequence: GatheredInput | None = None,
        deferred: DeferredWeightGrads | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not that of the plain class, which would create parameters
        for name in ("weight", "bias"):
            if hasattr(plain, name):
                setattr(self, name, getattr(plain, name))
        for name, module in plain.named_children():
            self.add_module(name, module)
        self.axis, self.sequence, self.deferred = axis, sequence, deferred or DeferredWeightGrads(used=False)

    def extra_repr(self) -> str:
        shapes = ", ".join(str(tuple(weight.shape)) for weight in self.parameters())
        return f"{shapes}, part {self.axis.rank + 1} of {self.axis.size}"


class ColumnParallelLinear(CustomGemmModule, _TensorParallelModule, MultiLinear):
    """Linears with sharded outputs; with sequence parallelism their common input is sharded and gathered once for all."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        linears = cast(list[nn.Linear], list(self.children()))
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        return multi_linear(x, weights, biases, self.deferred, self.axis, self.sequence, self.gemms)


class RowParallelLinear(CustomGemmModule, _TensorParallelModule, nn.Linear):
    """A linear with a sharded input: partial outputs are all-reduced over tp, or reduce-scattered along the sequence.

    `result`: under activation recomputation the output is saved, recomputed, or unused in backward.
    """

    result: Result = "saved"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        settings = self.axis, self.sequence, self.deferred, self.gemms, self.result
        y: torch.Tensor = _RowParallelFunction.apply(input, self.weight, *settings)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias


class TensorParallelAdapters(Adapters):
    """Adapters cut as the linear layers beside them: `up` of inputs by rows, `down` of the output by columns. What travels is
    as wide as the rank.
    """

    def __init__(self, plain: Adapters, axis: Axis, sequence: GatheredInput | None) -> None:
        nn.Module.__init__(self)
        for name, adapter in plain.named_children():
            self.add_module(name, adapter)
        self.inputs, self.output, self.rank, self.scale = plain.inputs, plain.output, plain.rank, plain.scale
        self.axis, self.sequence = axis, sequence

    def _narrow_input(self, x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        narrow = super()._narrow_input(x, down)
        return gather_from(narrow, self.axis, self.sequence.dim) if self.sequence else copy_to(narrow, self.axis)

    def _wide_input(self, narrow: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        product = super()._wide_input(narrow, up)
        return self.sequence.to_sequence_order(product, self.axis) if self.sequence else product

    def _narrow_output(self, x: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        partial = super()._narrow_output(x, down)
        if not self.sequence:
            return reduce_from(partial, self.axis)
        return scatter_to(self.sequence.to_rank_order(partial, self.axis), self.axis, self.sequence.dim)


class SharedKey(nn.Module):
    """The rotated key that all heads of latent attention share: each rank has it whole, and the gradients of its own heads."""

    def __init__(self, axis: Axis, sequence: bool) -> None:
        super().__init__()
        self.axis, self.sequence = axis, sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gather_from(x, self.axis, SEQUENCE) if self.sequence else copy_to(x, self.axis)


class TensorParallelRMSNorm(RMSNorm):
    """An RMSNorm over all heads, of which each rank has its own: one sum per token is all-reduced in forward and backward."""

    def __init__(self, plain: RMSNorm, axis: Axis) -> None:
        nn.Module.__init__(self)  # not RMSNorm's: the plain module's parameter is taken over
        self.weight, self.eps, self.axis = plain.weight, plain.eps, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        out: torch.Tensor = _TensorParallelRMSNorm.apply(x, self.weight, self.eps, self.axis)  # type: ignore[no-untyped-call]
        return out


class _TensorParallelRMSNorm(torch.autograd.Function):
    """Saves its input and one scale per token, as the plain norm."""

    @staticmethod
    def forward(ctx, x, weight, eps, axis):  # type: ignore[no-untyped-def]
        wide = at_least_fp32(x)
        # Of all ranks' heads, of which several ranks may have the same.
        elements = x.shape[-1] * axis.size
        total = comm.all_reduce(wide.square().sum(-1, keepdim=True), axis)
        scale = torch.rsqrt(total / elements + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.axis, ctx.elements = axis, elements
        return (wide * scale * at_least_fp32(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        x, weight, scale = ctx.saved_tensors
        unit, wide_grad = at_least_fp32(x) * scale, at_least_fp32(grad)
        grad_weight = (wide_grad * unit).flatten(0, -2).sum(0)
        grad_unit = wide_grad * at_least_fp32(weight)
        mean = comm.all_reduce((grad_unit * unit).sum(-1, keepdim=True), ctx.axis) / ctx.elements
        return (scale * (grad_unit - unit * mean)).to(x.dtype), grad_weight.to(weight.dtype), None, None


class VocabParallelEmbedding(_TensorParallelModule, nn.Embedding):
    """An embedding with rows sharded over tp: each rank looks up the tokens of its rows, others are zero; ranks are summed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.weight.shape[0]
        local = input - self.axis.rank * rows
        absent = (local < 0) | (local >= rows)
        part = F.embedding(local.masked_fill(absent, 0), self.weight).masked_fill(absent.unsqueeze(-1), 0)
        return scatter_to(part, self.axis, SEQUENCE) if self.sequence else reduce_from(part, self.axis)


class SequenceParallelPositions(_TensorParallelModule, nn.Embedding):
    """Learned position embeddings, looked up only for this rank's slice of the sequence."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.embedding(input.chunk(self.axis.size)[self.axis.rank], self.weight)


class VocabParallelLinear(CustomGemmModule, _TensorParallelModule, nn.Linear):
    """The head: each rank computes the logits of its rows of the vocabulary."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (logits,) = multi_linear(input, [self.weight], [None], self.deferred, self.axis, self.sequence, self.gemms)
        return logits


class VocabParallelCrossEntropy(CrossEntropy):
    """Cross-entropy of logits sharded by vocabulary: all-reduces a maximum and two sums per token, never the logits."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, targets, self.axis, self.z_loss)  # type: ignore[no-untyped-call]
        return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, logits: torch.Tensor, targets: torch.Tensor, axis: Axis, z_loss: float
    ) -> torch.Tensor:
        scores = logits.float()
        top = comm.all_reduce(scores.amax(dim=-1), axis, op="max")
        shares = (scores - top.unsqueeze(-1)).exp_()
        rows = logits.shape[-1]
        local = targets - axis.rank * rows
        here = (local >= 0) & (local < rows)
        local = local.masked_fill(~here, 0)
        own = scores.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
        sums = comm.all_reduce(torch.stack((shares.sum(dim=-1), own)), axis)
        total, target_score = sums.unbind()
        counts = targets != IGNORE_INDEX
        shares.div_(total.unsqueeze(-1))
        log_sum = total.log() + top
        ctx.save_for_backward(shares, local, here, counts, log_sum if z_loss else None)
        ctx.dtype, ctx.z_loss = logits.dtype, z_loss
        loss = ((log_sum - target_score) * counts).sum()
        return torch.stack((loss, z_loss * (log_sum.square() * counts).sum())) if z_loss else loss

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        shares, local, here, counts, log_sum = ctx.saved_tensors
        if log_sum is not None:
            grad = grad[0]  # of the sum of both: that of the other is the same
            shares.mul_((1 + 2 * ctx.z_loss * log_sum).unsqueeze(-1))
        # The softmax is not needed again: the gradient is written into its memory.
        shares.scatter_add_(-1, local.unsqueeze(-1), -here.to(shares.dtype).unsqueeze(-1))
        return shares.mul_((counts * grad).unsqueeze(-1)).to(ctx.dtype), None, None, None


class TensorParallelExperts(MixtureOfExperts):
    """Experts sharded along their width: every rank routes all tokens alike, and partial outputs are summed at the end.

    The output is linear in the sharded outputs, so each rank has partial sums of the gradients of router and gates.
    """

    def __init__(self, plain: MixtureOfExperts, axis: Axis, sequence: bool) -> None:
        nn.Module.__init__(self)
        for name, module in plain.named_children():
            self.add_module(name, module)
        for name in ("shared", "shared_gate"):
            if getattr(plain, name) is None:
                setattr(self, name, None)
        plain.experts.output_bias_share /= axis.size
        self.axis, self.sequence = axis, sequence
        self.local_forward: Callable[[torch.Tensor], torch.Tensor] = super().forward
        """replaced by expert parallelism"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence:
            return scatter_to(self.local_forward(gather_from(x, self.axis, SEQUENCE)), self.axis, SEQUENCE)
        return reduce_from(self.local_forward(copy_to(x, self.axis)), self.axis)


def apply(model: Transformer, mesh: Mesh, deferred: DeferredWeightGrads) -> dict[str, Shard]:
    """Shards the model (built on the meta device) in place; returns this rank's shard of each parameter."""
    axis, sequence = mesh.tp, mesh.layout.sequence_parallel and mesh.tp.size > 1
    cuts_qk_norms = model.model.qk_norm_over == "all"
    shards = {
        name: _shard(name, tuple(weight.shape), mesh, sequence, cuts_qk_norms) for name, weight in model.named_parameters()
    }
    for name, shard in shards.items():
        if shard.dim is not None:
            _shrink(model, name, shard)
    model.tie()
    if axis.size > 1 or deferred.used:
        _replace_modules(model, axis, sequence, deferred)
    return shards


def _shard(name: str, shape: tuple[int, ...], mesh: Mesh, sequence: bool, cuts_qk_norms: bool) -> Shard:
    """Rows of column-parallel weights and biases, columns of row-parallel weights, the whole of all other parameters.

    `cuts_qk_norms`: those of queries and keys are over all heads together, and cut with them.
    """
    axis, kv, path = mesh.tp, mesh.kv, name.split(".")
    if axis.size == 1:
        return Shard(name, shape)
    if ADAPTERS in path:
        return _adapter_shard(name, shape, mesh, sequence)
    if path[-3:-1] in (["qkv", "k"], ["qkv", "v"]) or (cuts_qk_norms and path[-2] == "k_norm"):
        length = shape[0] * kv.size // axis.size
        partial = kv if kv.size > 1 else None
        return Shard(name, shape, 0, axis.rank // kv.size * length, length, partial, kv.rank == 0)
    if path[-2] in ("router", "shared_gate"):
        return Shard(name, shape, partial=axis, is_primary=axis.rank == 0)
    if path[-1] == "down_bias" and path[-2] == "experts":  # each rank adds its share of it
        return Shard(name, shape, partial=axis, is_primary=axis.rank == 0)
    if path[-2] == "experts":
        dim = 2 if path[-1] == "down" else 1
        length = shape[dim] // axis.size
        return Shard(name, shape, dim, axis.rank * length, length)
    is_cut_norm = cuts_qk_norms and path[-2] == "q_norm"
    if _CUT_BY_ROWS & set(path) or is_cut_norm or name in VOCABULARY:
        length = shape[0] // axis.size
        return Shard(name, shape, 0, axis.rank * length, length)
    if path[-2:] in (["out", "weight"], ["down", "weight"]):
        length = shape[1] // axis.size
        return Shard(name, shape, 1, axis.rank * length, length)
    # Norms of queries and keys process only this rank's heads; all others its slice of the sequence under sequence parallelism.
    partial_input = sequence or path[-2] in ("q_norm", "k_norm", "output_norm")
    return Shard(name, shape, partial=axis if partial_input else None, is_primary=axis.rank == 0)


_CUT_BY_ROWS = {
    *("qkv", "inputs", "q_up", "kv_up", "sinks", "conv", "log_decay", "decay_bias"),
    *("step_bias", "log_rate", "skip", "gated_norm"),
}


def _adapter_shard(name: str, shape: tuple[int, ...], mesh: Mesh, sequence: bool) -> Shard:
    """With sequence parallelism the matrix that is whole on every rank sees its slice of the tokens; that of a shared expert
    sees what the rank has of the expert.
    """
    axis, kv = mesh.tp, mesh.kv
    beside, leaf = name.partition(f".{ADAPTERS}.")[2].rsplit(".", 1)
    linear, to_latents = beside.rpartition(".")[2], beside.startswith("down.")
    of_output = linear in ("out", "down")
    sequence = sequence or ".mlp.shared." in name
    if to_latents or (leaf == "up") == of_output:
        return Shard(name, shape, partial=axis if sequence else None, is_primary=axis.rank == 0)
    dim, copies = (1, 1) if of_output else (0, kv.size if linear in ("k", "v") else 1)
    length = shape[dim] * copies // axis.size
    partial = kv if copies > 1 else None
    return Shard(name, shape, dim, axis.rank // copies * length, length, partial, copies == 1 or kv.rank == 0)


def _shrink(model: Transformer, name: str, shard: Shard) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    whole = module.get_parameter(leaf)
    setattr(module, leaf, nn.Parameter(shard.model_parallel_part(whole.data).contiguous(), whole.requires_grad))


def _replace_modules(model: Transformer, axis: Axis, sequence: bool, deferred: DeferredWeightGrads) -> None:
    in_sequence_order = GatheredInput(SEQUENCE) if sequence else None
    for block in model.each_block():
        attention, gathered = block.attention, GatheredInput(reorder=True) if sequence else None
        if isinstance(block, PredictionBlock):  # every rank projects its slice of the sequence
            block.projection = RowParallelLinear(block.projection, SINGLE_RANK, None, deferred)
        if block.mlp is not None:
            block.mlp = _parallel_mlp(block.mlp, axis, sequence, deferred)
        if attention is None:
            continue
        if isinstance(attention, LatentAttention):
            # Every rank projects to the latents, of its slice of the sequence; the latents are gathered, which are narrow.
            attention.down = ColumnParallelLinear(attention.down, SINGLE_RANK, None, deferred)
            attention.q_up = ColumnParallelLinear(attention.q_up, axis, gathered, deferred)
            attention.kv_up = ColumnParallelLinear(attention.kv_up, axis, gathered, deferred)
            attention.shared_key = SharedKey(axis, sequence)
            beside = attention.adapters if axis.size > 1 else None
            for name in ("q_up", "kv_up", "out"):
                if beside is not None and name in beside:
                    beside[name] = TensorParallelAdapters(cast(Adapters, beside[name]), axis, gathered)
        elif isinstance(attention, GatedDeltaNet | Mamba2Mixer):
            attention.inputs = ColumnParallelLinear(attention.inputs, axis, gathered, deferred)
        else:
            attention.qkv = ColumnParallelLinear(attention.qkv, axis, gathered, deferred)
            if not attention.norms_heads and axis.size > 1:
                norms = (attention.q_norm, attention.k_norm)
                attention.q_norm, attention.k_norm = (
                    None if one is None else TensorParallelRMSNorm(one, axis) for one in norms
                )
            if attention.adapters is not None and axis.size > 1:
                attention.adapters = TensorParallelAdapters(attention.adapters, axis, gathered)
        attention.out = RowParallelLinear(attention.out, axis, gathered, deferred)
    if model.embedding is not None and axis.size > 1:
        embed = model.embedding
        embed.tokens = VocabParallelEmbedding(embed.tokens, axis, in_sequence_order)
        if embed.positions is not None and sequence:
            embed.positions = SequenceParallelPositions(embed.positions, axis)
    if model.head is not None and axis.size > 1:
        # The head's weight gradient is never deferred: the gradient of all logits would stay allocated until it runs.
        model.head.linear = VocabParallelLinear(model.head.linear, axis, in_sequence_order)
        model.head.criterion = VocabParallelCrossEntropy(axis)


def _parallel_mlp(
    mlp: MLP | MixtureOfExperts, axis: Axis, sequence: bool, deferred: DeferredWeightGrads
) -> MLP | MixtureOfExperts:
    if isinstance(mlp, MLP):
        gathered = GatheredInput() if sequence else None
        mlp.inputs = ColumnParallelLinear(mlp.inputs, axis, gathered, deferred)
        mlp.down = RowParallelLinear(mlp.down, axis, gathered, deferred)
        if mlp.adapters is not None and axis.size > 1:
            mlp.adapters = TensorParallelAdapters(mlp.adapters, axis, gathered)
        return mlp
    if deferred.used:
        ParallelExperts.of(mlp).push_deferred = deferred.push
        if isinstance(mlp.shared, MLP):
            mlp.shared = cast(MLP, _parallel_mlp(mlp.shared, SINGLE_RANK, False, deferred))
    return TensorParallelExperts(mlp, axis, sequence) if axis.size > 1 else mlp
