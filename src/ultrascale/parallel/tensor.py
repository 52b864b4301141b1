"""Tensor and sequence parallelism: column- and row-parallel linears, vocab-parallel embedding, head and loss.

Megatron's pairs (Shoeybi 2019, Korthikanti 2022) applied to a plain model from outside: parameters are replaced by this rank's
shard, and the modules around a sharded region by ones that communicate. With sequence parallelism, norms run on slices of the
sequence. The cost model is cost/communication.py.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from ultrascale.kernels.float8_gemm import CustomGemmModule
from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.transformer import IGNORED, MLP, CrossEntropy, Embedding, MultiLinear, Transformer
from ultrascale.parallel import comm
from ultrascale.parallel.autograd_collectives import copy_to, gather_from, reduce_from, scatter_to
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.multi_linear import ALONE, SEQUENCE, DeferredWeightGrads, Result, multi_linear, row_parallel_linear
from ultrascale.parallel.shards import Shard


class _TensorParallelModule(nn.Module):
    """Base of modules that take over a plain module's parameters; `extra_repr` shows this rank's shard."""

    sparse = False  # torch's DDP reads it on every embedding
    weight: torch.Tensor
    axis: Axis

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, part {self.axis.rank + 1} of {self.axis.size}"


class ColumnParallelLinear(CustomGemmModule, MultiLinear):
    """Linears with sharded outputs; with sequence parallelism their common input is sharded and gathered once for all."""

    def __init__(self, plain: MultiLinear, axis: Axis, sequence: bool, deferred: DeferredWeightGrads) -> None:
        nn.Module.__init__(self)  # not MultiLinear's: the plain module's parameters are taken over
        for name, linear in plain.named_children():
            self.add_module(name, linear)
        self.axis, self.sequence, self.deferred = axis, sequence, deferred

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        linears = cast(list[nn.Linear], list(self.children()))
        weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
        return multi_linear(x, weights, biases, self.deferred, self.axis, self.sequence, self.gemms)


class RowParallelLinear(CustomGemmModule, _TensorParallelModule, nn.Linear):
    """A linear with a sharded input: partial outputs are all-reduced over tp, or reduce-scattered along the sequence."""

    def __init__(self, plain: nn.Linear, axis: Axis, sequence: bool, deferred: DeferredWeightGrads) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = plain.weight, plain.bias
        self.axis, self.sequence, self.deferred = axis, sequence, deferred
        self.result: Result = "saved"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        y = row_parallel_linear(input, self.weight, self.axis, self.sequence, self.deferred, self.gemms, self.result)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(_TensorParallelModule, nn.Embedding):
    """An embedding with rows sharded over tp: each rank looks up the tokens of its rows, others are zero; ranks are summed."""

    def __init__(self, plain: nn.Embedding, axis: Axis, sequence: bool) -> None:
        nn.Module.__init__(self)
        self.weight = plain.weight
        self.axis, self.sequence = axis, sequence

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.weight.shape[0]
        local = input - self.axis.rank * rows
        absent = (local < 0) | (local >= rows)
        part = F.embedding(local.masked_fill(absent, 0), self.weight).masked_fill(absent.unsqueeze(-1), 0)
        return scatter_to(part, self.axis, SEQUENCE) if self.sequence else reduce_from(part, self.axis)


class SequenceParallelPositions(_TensorParallelModule, nn.Embedding):
    """Learned position embeddings, looked up only for this rank's slice of the sequence."""

    def __init__(self, plain: nn.Embedding, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight, self.axis = plain.weight, axis

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.embedding(input.chunk(self.axis.size)[self.axis.rank], self.weight)


class VocabParallelLinear(CustomGemmModule, _TensorParallelModule, nn.Linear):
    """The head: each rank computes the logits of its rows of the vocabulary."""

    def __init__(self, plain: nn.Linear, axis: Axis, sequence: bool, deferred: DeferredWeightGrads) -> None:
        nn.Module.__init__(self)
        self.weight = plain.weight
        self.axis, self.sequence, self.deferred = axis, sequence, deferred

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        (logits,) = multi_linear(input, [self.weight], [None], self.deferred, self.axis, self.sequence, self.gemms)
        return logits


class VocabParallelCrossEntropy(CrossEntropy):
    """Cross-entropy of logits sharded by vocabulary: all-reduces a maximum and two sums per token, never the logits."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = _VocabParallelCrossEntropy.apply(logits, targets, self.axis)  # type: ignore[no-untyped-call]
        return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor, axis: Axis) -> torch.Tensor:  # type: ignore[no-untyped-def]
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
        counts = targets != IGNORED
        shares.div_(total.unsqueeze(-1))
        ctx.save_for_backward(shares, local, here, counts)
        ctx.dtype = logits.dtype
        return ((total.log() + top - target_score) * counts).sum()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[no-untyped-def]
        shares, local, here, counts = ctx.saved_tensors
        # The softmax is not needed again: the gradient is written into its memory.
        shares.scatter_add_(-1, local.unsqueeze(-1), -here.to(shares.dtype).unsqueeze(-1))
        return shares.mul_((counts * grad).unsqueeze(-1)).to(ctx.dtype), None, None


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
        self.make_dispatcher, self.axis, self.sequence = plain.make_dispatcher, axis, sequence

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence:
            return scatter_to(super().forward(gather_from(x, self.axis, SEQUENCE)), self.axis, SEQUENCE)
        return reduce_from(super().forward(copy_to(x, self.axis)), self.axis)


def apply(model: Transformer, mesh: Mesh, deferred: DeferredWeightGrads) -> dict[str, Shard]:
    """Shards the model (built on the meta device) in place; returns this rank's shard of each parameter."""
    axis, sequence = mesh.tp, mesh.layout.sequence_parallel and mesh.tp.size > 1
    shards = {name: _shard(name, tuple(weight.shape), mesh, sequence) for name, weight in model.named_parameters()}
    for name, shard in shards.items():
        if shard.dim is not None:
            _shrink(model, name, shard)
    model.tie()
    if axis.size > 1 or deferred.used:
        _replace_modules(model, axis, sequence, deferred)
    return shards


def _shard(name: str, shape: tuple[int, ...], mesh: Mesh, sequence: bool) -> Shard:
    """Rows of column-parallel weights and biases, columns of row-parallel weights, the whole of all other parameters."""
    axis, kv, path = mesh.tp, mesh.kv, name.split(".")
    if axis.size == 1:
        return Shard(name, shape)
    if path[-3:-1] in (["qkv", "k"], ["qkv", "v"]):
        length = shape[0] * kv.size // axis.size
        partial = kv if kv.size > 1 else None
        return Shard(name, shape, 0, axis.rank // kv.size * length, length, partial, kv.rank == 0)
    if path[-2] in ("router", "shared_gate"):
        return Shard(name, shape, partial=axis, counted=axis.rank == 0)
    if path[-2] == "experts":
        dim = 2 if path[-1] == "down" else 1
        length = shape[dim] // axis.size
        return Shard(name, shape, dim, axis.rank * length, length)
    if "qkv" in path or "inputs" in path or name in ("embed.tokens.weight", "head.linear.weight"):
        length = shape[0] // axis.size
        return Shard(name, shape, 0, axis.rank * length, length)
    if path[-2:] in (["out", "weight"], ["down", "weight"]):
        length = shape[1] // axis.size
        return Shard(name, shape, 1, axis.rank * length, length)
    # Norms of queries and keys process only this rank's heads; all others its slice of the sequence under sequence parallelism.
    partial_input = sequence or path[-2] in ("q_norm", "k_norm")
    return Shard(name, shape, partial=axis if partial_input else None, counted=axis.rank == 0)


def _shrink(model: Transformer, name: str, shard: Shard) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, leaf, nn.Parameter(shard.model_parallel_part(module.get_parameter(leaf).data).contiguous()))


def _replace_modules(model: Transformer, axis: Axis, sequence: bool, deferred: DeferredWeightGrads) -> None:
    for block in model.each_block():
        attention = block.attention
        attention.qkv = ColumnParallelLinear(attention.qkv, axis, sequence, deferred)
        attention.out = RowParallelLinear(attention.out, axis, sequence, deferred)
        block.mlp = _parallel_mlp(block.mlp, axis, sequence, deferred)
    if model.embed is not None and axis.size > 1:
        embed: Embedding = model.embed
        embed.tokens = VocabParallelEmbedding(embed.tokens, axis, sequence)
        if embed.positions is not None and sequence:
            embed.positions = SequenceParallelPositions(embed.positions, axis)
    if model.head is not None and axis.size > 1:
        # The head's weight gradient is never deferred: the gradient of all logits would stay allocated until it runs.
        model.head.linear = VocabParallelLinear(model.head.linear, axis, sequence, DeferredWeightGrads(used=False))
        model.head.criterion = VocabParallelCrossEntropy(axis)


def _parallel_mlp(
    mlp: MLP | MixtureOfExperts, axis: Axis, sequence: bool, deferred: DeferredWeightGrads
) -> MLP | MixtureOfExperts:
    if isinstance(mlp, MLP):
        mlp.inputs = ColumnParallelLinear(mlp.inputs, axis, sequence, deferred)
        mlp.down = RowParallelLinear(mlp.down, axis, sequence, deferred)
        return mlp
    if deferred.used:
        mlp.experts.push_deferred = deferred.push
        if isinstance(mlp.shared, MLP):
            mlp.shared = cast(MLP, _parallel_mlp(mlp.shared, ALONE, False, deferred))
    return TensorParallelExperts(mlp, axis, sequence) if axis.size > 1 else mlp
