"""The head and its loss in chunks, as in kernels/loss.py, with logits and the gradient of hidden states in fp8.

One scale per tensor. The gradient of logits lies between -1 and 1, so that its scale is known beforehand. The weight's gradient
adds up over chunks, which fp8 products cannot, and stays in bf16.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ultrascale.kernels import loss
from ultrascale.kernels.float8_products import NARROW, WIDE, Operand, factor_below, multiply
from ultrascale.kernels.loss import ChunkedHead, LinearCrossEntropy


class _LinearCrossEntropy(LinearCrossEntropy):
    """For hidden [n, h] and weight [v, h] whose h and v fp8 products take."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, kept: bool) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        narrow, table = _narrow(hidden), _narrow(weight)
        parts = [torch.split(part, chunk) for part in (narrow.data, targets, losses)]
        if not kept:
            for some, wanted, lost in zip(*parts, strict=True):
                loss.loss_and_gradient(multiply(Operand(some, narrow.scale), table, hidden.dtype, fast=True), wanted, lost)
            return losses.sum()
        turned = Operand(table.data.t().contiguous(), table.scale)
        to_hidden, to_weight = torch.empty_like(hidden), torch.empty(weight.shape, dtype=wide, device=weight.device)
        factor = factor_below(torch.ones((), device=weight.device), WIDE)
        parts += [torch.split(part, chunk) for part in (hidden, to_hidden)]
        for number, (some, wanted, lost, rows, out) in enumerate(zip(*parts, strict=True)):
            logits = multiply(Operand(some, narrow.scale), table, hidden.dtype, fast=True)
            gradient = loss.loss_and_gradient(logits, wanted, lost)
            left = Operand(loss.scaled(gradient, factor, WIDE), factor.reciprocal())
            out.copy_(multiply(left, turned, hidden.dtype))
            loss.add_product(to_weight, gradient.t(), rows, fresh=number == 0)
            del logits, gradient  # or the next chunk's would be made beside them
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.dtype = weight.dtype
        return losses.sum()


linear_cross_entropy = partial(loss.linear_cross_entropy, function=_LinearCrossEntropy)


class Float8Head(ChunkedHead):
    """A chunked head, two of whose three products are in fp8."""

    function = _LinearCrossEntropy


def _narrow(x: Tensor) -> Operand:
    """x with one scale, in two passes: no compiler fuses what is done between chunks."""
    low, high = torch.aminmax(x)
    factor = factor_below(torch.maximum(-low, high), NARROW)
    return Operand(loss.scaled(x, factor, NARROW), factor.reciprocal())
