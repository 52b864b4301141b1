"""The head and its chunked loss, as in kernels/loss.py, with all three GEMMs in fp8.

The gradient of logits is between -1 and 1, so that its scale is known beforehand. fp8 GEMMs cannot accumulate into an existing
output: the weight gradient is computed from several chunks at once, whose logit gradients are stored in fp8 until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ultrascale.kernels import loss
from ultrascale.kernels.float8_block import cast_rows, cast_turned, of_rows
from ultrascale.kernels.float8_gemm import WIDE, GemmOperand, multiply
from ultrascale.kernels.loss import ChunkedHead, LinearCrossEntropy
from ultrascale.specs.training import FP8_TOKENS

CHUNKS_PER_GEMM = 4  # chunks in one GEMM for the weight gradient: 2 GiB of fp8 for a vocabulary of 128 thousand
FACTOR = 2.0**15  # the power of two that scales 1 to just below e5m2's maximum


class _LinearCrossEntropy(LinearCrossEntropy):
    """For hidden [n, h] and weight [v, h] with h and v supported by fp8 GEMMs."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, with_grad: bool) -> Tensor:
        if len(hidden) % FP8_TOKENS["tensor"]:
            return LinearCrossEntropy.forward(ctx, hidden, weight, targets, chunk, with_grad)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        narrow, table = cast_rows(hidden), cast_rows(weight)
        parts = *narrow, targets, losses
        if not with_grad:
            for data, scale, wanted, lost in _split(parts, chunk):
                loss.loss_and_gradient(multiply(GemmOperand(data, scale), table, hidden.dtype, fast=True), wanted, lost)
            return losses.sum()
        turned, of_hidden = cast_turned(weight, of_rows(table)), of_rows(narrow)
        to_hidden, to_weight = torch.empty_like(hidden), None
        back = torch.full((), 1 / FACTOR, device=weight.device)
        for rows, *group in _split((hidden, *parts, to_hidden), CHUNKS_PER_GEMM * chunk):
            gradients = torch.empty(len(weight), len(rows), dtype=WIDE, device=weight.device)
            for columns, (data, scale, wanted, lost, out) in zip(
                torch.split(gradients, chunk, 1), _split(group, chunk), strict=True
            ):
                logits = multiply(GemmOperand(data, scale), table, hidden.dtype, fast=True)
                gradient = scaled_gradient(logits, wanted, lost, columns)
                del logits  # before the next chunk's are allocated
                out.copy_(multiply(GemmOperand(gradient, back), turned, hidden.dtype))
            part = multiply(GemmOperand(gradients, back), cast_turned(rows, of_hidden), wide)
            to_weight = part if to_weight is None else to_weight.add_(part)
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.dtype = weight.dtype
        return losses.sum()


linear_cross_entropy = partial(loss.linear_cross_entropy, function=_LinearCrossEntropy)


class Float8Head(ChunkedHead):
    """A chunked head in fp8."""

    function = _LinearCrossEntropy


def scaled_gradient(logits: Tensor, targets: Tensor, losses: Tensor, turned: Tensor) -> Tensor:
    """The gradient of the summed loss times FACTOR, in fp8, also written transposed to `turned`; writes each token's loss."""
    if logits.is_cuda:
        from ultrascale.kernels import loss_triton

        return loss_triton.loss_and_scaled_gradient(logits, targets, losses, FACTOR, turned)
    narrow = (loss.loss_and_gradient(logits, targets, losses) * FACTOR).to(turned.dtype)
    turned.copy_(narrow.t())
    return narrow


def _split(parts: Iterable[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(part, size) for part in parts), strict=True)
