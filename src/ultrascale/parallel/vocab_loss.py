"""The chunked loss (kernels/loss.py) where tensor parallelism cuts the vocabulary: no rank has all its logits in memory.

Ranks process the same tokens together, each with its rows of the head's weight. For a chunk of tokens they all-gather two
numbers per token, the log-sum-exp of a rank's logits and the target's logit. With sequence parallelism the chunk's hidden
states are gathered too, while the chunk before is computed; gradients of hidden states are summed over ranks while the weight
gradient is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ultrascale.kernels import float8, float8_block, loss
from ultrascale.kernels.float8 import CHUNKS_PER_GEMM, FACTOR, Float8Head
from ultrascale.kernels.float8_block import amax_bound
from ultrascale.kernels.float8_gemm import E4M3, E5M2, GemmOperand, multiply
from ultrascale.kernels.loss import CHUNK, ChunkedHead, LinearCrossEntropy
from ultrascale.model.transformer import Head, Transformer
from ultrascale.parallel import comm
from ultrascale.parallel.comm import AsyncCollective, Axis
from ultrascale.specs.training import FP8_TOKENS


def apply(model: Transformer, axis: Axis, sequence: bool) -> None:
    """Replaces the head, if there is one, whose linear is already cut; names and parameters stay."""
    if model.head is not None:
        model.head = VocabParallelChunkedHead(model.head, axis, sequence)


class VocabParallelChunkedHead(ChunkedHead):
    def __init__(self, plain: Head, axis: Axis, sequence: bool) -> None:
        super().__init__(plain)
        self.axis, self.sequence = axis, sequence

    def loss(self, normed: Tensor, targets: Tensor) -> Tensor:
        # One row of targets per slice of the sequence, in the order in which slices are gathered.
        ranks = self.axis.size if self.sequence else 1
        slices = torch.unflatten(targets, 1, (ranks, -1)).transpose(0, 1).flatten(1)
        rows = self.scaled(normed).flatten(0, -2)
        return vocab_parallel_cross_entropy(
            rows, self.linear.weight, slices, self.axis, function=self.function, z_loss=self.criterion.z_loss
        )


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    axis: Axis,
    chunk: int = CHUNK,
    function: type[LinearCrossEntropy] | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Summed cross-entropy, as `linear_cross_entropy`, of this rank's weight [v/ranks, h]; the same on all ranks.

    hidden [n/slices, h]: this rank's slice, or all tokens if there is one; targets [slices, n/slices]. A rank has `chunk` · v
    logits at a time, as many as without tensor parallelism.
    """
    arguments = hidden, weight, targets, (chunk, z_loss, axis), torch.is_grad_enabled()
    total: Tensor = (function or VocabParallelLinearCrossEntropy).apply(*arguments)  # type: ignore[no-untyped-call]
    return total


class VocabParallelLinearCrossEntropy(LinearCrossEntropy):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: tuple[int, float, Axis], with_grad: bool
    ) -> Tensor:
        chunk, z_loss, axis = settings
        slices = len(targets)
        length = chunk * axis.size // slices  # tokens of a slice in a chunk
        losses = loss.empty_losses(targets.numel(), hidden, z_loss)
        parts = torch.split(targets, length, dim=1), torch.split(losses, slices * length)
        chunks = _gathered(torch.split(hidden, length), axis) if slices > 1 else iter(torch.split(hidden, length))
        if not with_grad:
            for wanted, lost in zip(*parts, strict=True):
                _loss_and_gradient(next(chunks), weight, wanted.flatten(), lost, axis, z_loss)
            return loss.summed(losses)
        grad_hidden = torch.empty_like(hidden)
        trains = ctx.needs_input_grad[1]
        grad_weight = torch.empty(weight.shape, dtype=losses.dtype, device=weight.device) if trains else None
        for number, (wanted, lost, out) in enumerate(zip(*parts, torch.split(grad_hidden, length), strict=True)):
            some = next(chunks)
            gradient = _loss_and_gradient(some, weight, wanted.flatten(), lost, axis, z_loss)
            if slices > 1:
                reduction = comm.reduce_scatter_start(gradient @ weight, axis, out=out)
            else:
                reduction = comm.all_reduce_start(torch.mm(gradient, weight, out=out), axis)
            if grad_weight is not None:
                loss.accumulate_matmul(grad_weight, gradient.t(), some, fresh=number == 0)
            reduction.wait()
            del some, gradient  # before the next chunk's are allocated
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return loss.summed(losses)


def _gathered(parts: Sequence[Tensor], axis: Axis) -> Iterator[Tensor]:
    """Each part of all ranks; the next is gathered while the caller computes."""
    gathering = comm.all_gather_start(parts[0], axis)
    for part in parts[1:]:
        whole, gathering = gathering.wait(), comm.all_gather_start(part, axis)
        yield whole
        del whole
    yield gathering.wait()


def _loss_and_gradient(hidden: Tensor, weight: Tensor, targets: Tensor, losses: Tensor, axis: Axis, z_loss: float) -> Tensor:
    logits = hidden @ weight.t()
    return loss.shard_gradient(logits, targets, axis.rank * len(weight), _statistics(logits, targets, axis), losses, z_loss)


def _statistics(logits: Tensor, targets: Tensor, axis: Axis) -> Tensor:
    """[ranks, 2, n]: what `shard_statistics` finds in the logits of all ranks."""
    found = comm.all_gather(loss.shard_statistics(logits, targets, axis.rank * logits.shape[1]), axis)
    return found.view(axis.size, 2, -1)


class _VocabParallelFloat8CrossEntropy(VocabParallelLinearCrossEntropy):
    """All three GEMMs in fp8, if they support the sizes. The weight gradient sums over several chunks in one GEMM."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: tuple[int, float, Axis], with_grad: bool
    ) -> Tensor:
        chunk, z_loss, axis = settings
        slices = len(targets)
        length = chunk * axis.size // slices
        if any(slices * tokens % FP8_TOKENS["tensor"] for tokens in (length, len(hidden))):
            return VocabParallelLinearCrossEntropy.forward(ctx, hidden, weight, targets, settings, with_grad)
        of_hidden = float8_block.amax(hidden) if slices == 1 else comm.all_reduce(float8_block.amax(hidden), axis, op="max")
        own, table = float8_block.cast(hidden, of_hidden, E4M3), float8_block.cast_rows(weight)
        losses = loss.empty_losses(targets.numel(), hidden, z_loss)
        parts = list(zip(torch.split(targets, length, dim=1), torch.split(losses, slices * length), strict=True))
        narrow = torch.split(own.data.view(torch.uint8), length)
        gathered = _gathered(narrow, axis) if slices > 1 else iter(narrow)
        chunks = (GemmOperand(rows.view(E4M3), own.scale) for rows in gathered)

        def statistics(rows: GemmOperand, wanted: Tensor) -> tuple[Tensor, Tensor]:
            scales = rows.scale.expand(len(rows.data), 1).contiguous()
            logits = multiply(GemmOperand(rows.data, scales), table, hidden.dtype, fast=True)
            return logits, _statistics(logits, wanted, axis)

        def start(part: Tensor, out: Tensor) -> AsyncCollective[Tensor]:
            """Sums gradients of hidden states over ranks."""
            if slices > 1:
                return comm.reduce_scatter_start(part, axis, out=out)
            return comm.all_reduce_start(out.copy_(part), axis)

        if not with_grad:
            for wanted, lost in parts:
                loss.shard_loss(statistics(next(chunks), wanted.flatten())[1], wanted.flatten(), lost, z_loss)
            return loss.summed(losses)
        transposed, first = float8_block.cast_transposed(weight, amax_bound(table)), axis.rank * len(weight)
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        back = torch.full((), 1 / FACTOR, device=weight.device)
        outs, pending = torch.split(grad_hidden, length), comm.completed(grad_hidden, axis)
        for begin in range(0, len(parts), CHUNKS_PER_GEMM):
            group = parts[begin : begin + CHUNKS_PER_GEMM]
            tokens = sum(len(lost) for _, lost in group)
            gradients = torch.empty(len(weight), tokens, dtype=E5M2, device=weight.device)
            inputs = torch.empty(hidden.shape[1], tokens, dtype=E4M3, device=weight.device)
            columns = (torch.split(whole, slices * length, 1) for whole in (gradients, inputs))
            for (wanted, lost), of_logits, of_input, out in zip(group, *columns, outs[begin : begin + len(group)], strict=True):
                rows = next(chunks)
                float8_block.transpose(rows, of_input)
                logits, found = statistics(rows, wanted.flatten())
                del rows
                gradient = float8.shard_scaled_gradient(logits, wanted.flatten(), first, found, lost, of_logits, z_loss)
                del logits  # before the next chunk's are allocated
                part = multiply(GemmOperand(gradient, back), transposed, hidden.dtype)
                del gradient
                pending.wait()
                pending = start(part, out)
                del part
            summed = multiply(GemmOperand(gradients, back), GemmOperand(inputs, own.scale), losses.dtype)
            grad_weight = summed if grad_weight is None else grad_weight.add_(summed)
        pending.wait()
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return loss.summed(losses)


class VocabParallelFloat8Head(VocabParallelChunkedHead, Float8Head):
    """A cut, chunked head in fp8."""

    function = _VocabParallelFloat8CrossEntropy

    def __init__(self, plain: ChunkedHead) -> None:
        assert isinstance(plain, VocabParallelChunkedHead)
        super().__init__(plain, plain.axis, plain.sequence)
