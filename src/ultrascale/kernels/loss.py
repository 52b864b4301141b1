"""Chunked cross-entropy of a linear head: the logits of a whole micro-batch are never in memory.

Forward computes a chunk's logits, their loss and, in the same memory, their gradient, and from it at once the gradients of the
hidden states and of the head's weight. Those two gradients are saved for backward, which only scales them. The cost model is
cost/memory/activations.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.model.transformer import IGNORE_INDEX, Head, Transformer

CHUNK = 4096  # tokens: 1 GiB of bf16 logits for a vocabulary of 128 thousand (benchmarks/gpu)


def apply(model: Transformer) -> None:
    """Replaces the head, if there is one, by a chunked one; names and parameters stay."""
    if model.head is not None:
        model.head = ChunkedHead(model.head)


class ChunkedHead(Head):
    """A head that computes the losses from the hidden states in chunks."""

    function: type[LinearCrossEntropy] | None = None

    def __init__(self, plain: Head) -> None:
        nn.Module.__init__(self)  # not Head's: the plain module's parameters are taken over
        self.norm, self.linear, self.criterion = plain.norm, plain.linear, plain.criterion
        self.scale, self.softcap = plain.scale, plain.softcap

    def loss(self, normed: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(
            self.scaled(normed).flatten(0, -2),
            self.linear.weight,
            targets.flatten(),
            function=self.function,
            z_loss=self.criterion.z_loss,
        )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int = CHUNK,
    function: type[LinearCrossEntropy] | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Summed cross-entropy in fp32 of hidden [n, h] · weight [v, h]ᵀ; targets [n]: `IGNORE_INDEX` ones have no loss.

    `function`: a subclass with other GEMMs. `z_loss`: as in `CrossEntropy`, with one gradient for both losses.
    """
    arguments = hidden, weight, targets, (chunk, z_loss), torch.is_grad_enabled()
    loss: Tensor = (function or LinearCrossEntropy).apply(*arguments)  # type: ignore[no-untyped-call]
    return loss


def empty_losses(tokens: int, hidden: Tensor, z_loss: float) -> Tensor:
    """For each token's cross-entropy [n], or that and its z-loss [n, 2], in at least fp32."""
    return torch.empty((tokens, 2) if z_loss else tokens, dtype=_wide(hidden.dtype), device=hidden.device)


def summed(losses: Tensor) -> Tensor:
    """Over tokens."""
    return losses.sum() if losses.dim() == 1 else losses.sum(dim=0)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: tuple[int, float], with_grad: bool
    ) -> Tensor:
        chunk, z_loss = settings
        losses = empty_losses(len(hidden), hidden, z_loss)
        parts = [torch.split(part, chunk) for part in (hidden, targets, losses)]
        if not with_grad:
            for some, wanted, lost in zip(*parts, strict=True):
                loss_and_gradient(some @ weight.t(), wanted, lost, z_loss)
            return summed(losses)
        grad_hidden = torch.empty_like(hidden)
        trains = ctx.needs_input_grad[1]  # a head beside adapters is frozen
        grad_weight = torch.empty(weight.shape, dtype=_wide(weight.dtype), device=weight.device) if trains else None
        for number, (some, wanted, lost, out) in enumerate(zip(*parts, torch.split(grad_hidden, chunk), strict=True)):
            gradient = loss_and_gradient(some @ weight.t(), wanted, lost, z_loss)
            torch.mm(gradient, weight, out=out)
            if grad_weight is not None:
                accumulate_matmul(grad_weight, gradient.t(), some, fresh=number == 0)
            del gradient  # before the next chunk's logits are allocated
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtype = weight.dtype
        return summed(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        grad = grad.view(-1)[0]  # of the sum of both losses: that of the z-loss is the same
        of_weight = None if grad_weight is None else scaled(grad_weight, grad, ctx.dtype)
        return grad_hidden * grad, of_weight, None, None, None


def loss_and_gradient(logits: Tensor, targets: Tensor, losses: Tensor, z_loss: float = 0.0) -> Tensor:
    """Writes each token's losses; returns the gradient of their sum, on a GPU in the memory of the logits."""
    if logits.is_cuda:
        from ultrascale.kernels import loss_triton

        loss_triton.loss_and_gradient_(logits, targets, losses, z_loss)
        return logits
    return shard_gradient(logits, targets, 0, shard_statistics(logits, targets, 0).unsqueeze(0), losses, z_loss)


def shard_statistics(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """[2, n]: each token's log-sum-exp over these columns of the vocabulary, from `first` on, and its target's logit.

    The latter is 0 where the target is in other columns or ignored.
    """
    if logits.is_cuda:
        from ultrascale.kernels import loss_triton

        return loss_triton.shard_statistics(logits, targets, first)
    wide = logits.to(_wide(logits.dtype))
    local, here = _local(targets, first, logits.shape[1])
    return torch.stack((wide.logsumexp(dim=-1), wide.gather(-1, local).squeeze(-1) * here))


def shard_gradient(
    logits: Tensor, targets: Tensor, first: int, statistics: Tensor, losses: Tensor, z_loss: float = 0.0
) -> Tensor:
    """As `loss_and_gradient`, of these columns of the vocabulary; statistics [shards, 2, n]: those of all columns."""
    if logits.is_cuda:
        from ultrascale.kernels import loss_triton

        loss_triton.shard_gradient_(logits, targets, first, statistics, losses, z_loss)
        return logits
    log_sum, counts = shard_loss(statistics, targets, losses, z_loss), targets != IGNORE_INDEX
    gradient = (logits.to(losses.dtype) - log_sum.unsqueeze(-1)).exp_()
    if z_loss:
        gradient *= (1 + 2 * z_loss * log_sum).unsqueeze(-1)
    local, here = _local(targets, first, logits.shape[1])
    gradient.scatter_add_(-1, local, -here.to(gradient.dtype).unsqueeze(-1))
    return (gradient * counts.unsqueeze(-1)).to(logits.dtype)


def shard_loss(statistics: Tensor, targets: Tensor, losses: Tensor, z_loss: float = 0.0) -> Tensor:
    """Writes each token's losses, from the statistics of all shards; returns the log-sum-exp of all its logits."""
    log_sum, counts = statistics[:, 0].logsumexp(dim=0), targets != IGNORE_INDEX
    loss = (log_sum - statistics[:, 1].sum(dim=0)) * counts
    losses.copy_(torch.stack((loss, z_loss * log_sum.square() * counts), dim=-1) if z_loss else loss)
    return log_sum


def _local(targets: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Each target's column [n, 1], 0 where it has none, and whether it has one [n]."""
    local = targets - first
    here = (local >= 0) & (local < columns)
    return local.masked_fill(~here, 0).unsqueeze(-1), here


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x · factor, rounded to `dtype`."""
    if x.is_cuda:
        from ultrascale.kernels import loss_triton

        return loss_triton.scaled(x, factor, dtype)
    return (x * factor).to(dtype)


def accumulate_matmul(total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """total += left · right, accumulated in the dtype of `total`; a fresh total is overwritten."""
    beta = 0 if fresh else 1
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, out=total)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)
    else:
        torch.addmm(total, left.to(total.dtype), right.to(total.dtype), beta=beta, out=total)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
