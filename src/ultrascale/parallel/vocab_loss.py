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

from ultrascale.kernels import loss
from ultrascale.kernels.loss import CHUNK, ChunkedHead, LinearCrossEntropy
from ultrascale.model.transformer import Head, Transformer
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis


def apply(model: Transformer, axis: Axis, sequence: bool) -> None:
    """Replaces the head, if there is one, whose linear is already cut; names and parameters stay."""
    if model.head is not None:
        model.head = VocabParallelChunkedHead(model.head, axis, sequence)


class VocabParallelChunkedHead(ChunkedHead):
    def __init__(self, plain: Head, axis: Axis, sequence: bool) -> None:
        super().__init__(plain)
        self.axis, self.sequence = axis, sequence

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        # One row of targets per slice of the sequence, in the order in which slices are gathered.
        ranks = self.axis.size if self.sequence else 1
        slices = torch.unflatten(targets, 1, (ranks, -1)).transpose(0, 1).flatten(1)
        return vocab_parallel_cross_entropy(hidden.flatten(0, -2), self.linear.weight, slices, self.axis)


def vocab_parallel_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, axis: Axis, chunk: int = CHUNK) -> Tensor:
    """Summed cross-entropy, as `linear_cross_entropy`, of this rank's weight [v/ranks, h]; the same on all ranks.

    hidden [n/slices, h]: this rank's slice, or all tokens if there is one; targets [slices, n/slices]. A rank has `chunk` · v
    logits at a time, as many as without tensor parallelism.
    """
    settings = chunk, axis
    total: Tensor = _VocabParallelLinearCrossEntropy.apply(hidden, weight, targets, settings, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return total


class _VocabParallelLinearCrossEntropy(LinearCrossEntropy):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: tuple[int, Axis], with_grad: bool
    ) -> Tensor:
        chunk, axis = settings
        slices, wide = len(targets), torch.promote_types(hidden.dtype, torch.float32)
        length = chunk * axis.size // slices  # tokens of a slice in a chunk
        losses = torch.empty(targets.numel(), dtype=wide, device=hidden.device)
        parts = torch.split(targets, length, dim=1), torch.split(losses, slices * length)
        chunks = _gathered(torch.split(hidden, length), axis) if slices > 1 else iter(torch.split(hidden, length))
        if not with_grad:
            for wanted, lost in zip(*parts, strict=True):
                _loss_and_gradient(next(chunks), weight, wanted.flatten(), lost, axis)
            return losses.sum()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.empty(weight.shape, dtype=wide, device=weight.device)
        for number, (wanted, lost, out) in enumerate(zip(*parts, torch.split(grad_hidden, length), strict=True)):
            some = next(chunks)
            gradient = _loss_and_gradient(some, weight, wanted.flatten(), lost, axis)
            if slices > 1:
                reduction = comm.reduce_scatter_start(gradient @ weight, axis, out=out)
            else:
                reduction = comm.all_reduce_start(torch.mm(gradient, weight, out=out), axis)
            loss.accumulate_matmul(grad_weight, gradient.t(), some, fresh=number == 0)
            reduction.wait()
            del some, gradient  # before the next chunk's are allocated
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return losses.sum()


def _gathered(parts: Sequence[Tensor], axis: Axis) -> Iterator[Tensor]:
    """Each part of all ranks; the next is gathered while the caller computes."""
    gathering = comm.all_gather_start(parts[0], axis)
    for part in parts[1:]:
        whole, gathering = gathering.wait(), comm.all_gather_start(part, axis)
        yield whole
        del whole
    yield gathering.wait()


def _loss_and_gradient(hidden: Tensor, weight: Tensor, targets: Tensor, losses: Tensor, axis: Axis) -> Tensor:
    logits, first = hidden @ weight.t(), axis.rank * len(weight)
    statistics = comm.all_gather(loss.shard_statistics(logits, targets, first), axis)
    return loss.shard_gradient(logits, targets, first, statistics.view(axis.size, 2, -1), losses)
