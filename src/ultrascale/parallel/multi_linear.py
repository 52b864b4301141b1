"""Linear layers that share one input, with a backward that gathers the input again and can defer weight gradients.

With sequence parallelism the gathered input is not saved: backward gathers it again (Korthikanti 2022, section 4.2.2) while
it computes the input gradient. Schedules with a split backward defer the weight gradients (`DeferredWeightGrads`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ultrascale.kernels.float8_gemm import PlainGemms
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.recompute_cache import cache_across_recompute

SEQUENCE = 1  # the dimension of [batch, sequence, hidden] that sequence parallelism shards

ALONE = Axis("alone", None, 0, 1, (0,))
Result = Literal["saved", "recomputed", "unused"]


@dataclass
class DeferredWeightGrads:
    """A queue of weight gradients: while `open`, backward pushes functions that compute them instead of computing them."""

    used: bool
    """whether the schedule splits its backward"""
    open: bool = False
    pending: list[Callable[[], None]] = field(default_factory=list)

    def push(self, run: Callable[[], None]) -> bool:
        """Queues a weight gradient if open. Returns False if the caller must compute it now."""
        if self.open:
            self.pending.append(run)
        return self.open

    def pop(self) -> list[Callable[[], None]]:
        pending, self.pending = self.pending, []
        return pending


class _MultiLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, sequence, deferred, gemms, count, *tensors):  # type: ignore[no-untyped-def]
        weights, biases = tensors[:count], tensors[count:]

        def compute() -> tuple[torch.Tensor, ...]:
            whole = comm.all_gather(x, axis, SEQUENCE) if sequence else x
            return tuple(gemms.forward(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

        ctx.axis, ctx.sequence, ctx.deferred, ctx.gemms = axis, sequence, deferred, gemms
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.parameters = weights  # the leaves themselves: checkpointing unpacks a copy whose .grad is lost
        ctx.save_for_backward(x, *weights)
        return cache_across_recompute(compute)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x, *weights = ctx.saved_tensors
        axis, deferred, gemms = ctx.axis, ctx.deferred, ctx.gemms
        # A deferred gradient gathers its input when it runs: until then only the slice stays in memory.
        gathering = comm.all_gather_start(x, axis, SEQUENCE) if ctx.sequence and not deferred.open else None
        dx = None
        if ctx.needs_input_grad[0]:
            dx = gemms.to_input(grads[0], weights[0])
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                dx += gemms.to_input(grad, weight)
        whole = gathering.wait() if gathering is not None else x
        reduction = None
        if dx is not None:
            reduction = comm.reduce_scatter_start(dx, axis, SEQUENCE) if ctx.sequence else comm.all_reduce_start(dx, axis)
        if deferred.open:
            deferred.pending.append(_deferred_grads(x, axis if ctx.sequence else ALONE, grads, ctx.parameters, gemms))
            dw: list[torch.Tensor | None] = [None] * len(weights)
        else:
            dw = [gemms.to_weight(grad, whole) for grad in grads]
        db = [grad.flatten(0, -2).sum(0) if has else None for grad, has in zip(grads, ctx.has_bias, strict=True)]
        if reduction is not None:
            dx = reduction.wait()
        return dx, None, None, None, None, None, *dw, *db


class _RowParallelFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, axis, sequence, deferred, gemms, result):  # type: ignore[no-untyped-def]
        def compute() -> tuple[torch.Tensor, ...]:
            part = gemms.forward(x, weight)
            return (comm.reduce_scatter(part, axis, SEQUENCE) if sequence else comm.all_reduce(part, axis),)

        ctx.axis, ctx.sequence, ctx.deferred, ctx.gemms = axis, sequence, deferred, gemms
        ctx.parameter = weight
        ctx.save_for_backward(x, weight)
        (out,) = compute() if result == "recomputed" else cache_across_recompute(compute, needed_in_backward=result == "saved")
        return out

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        gemms, deferred = ctx.gemms, ctx.deferred
        grad = comm.all_gather(grads[0], ctx.axis, SEQUENCE) if ctx.sequence else grads[0]
        dx = gemms.to_input(grad, weight) if ctx.needs_input_grad[0] else None
        if deferred.open:
            deferred.pending.append(_deferred_grads(x, ALONE, [grad], [ctx.parameter], gemms))
        dw = None if deferred.open else gemms.to_weight(grad, x)
        return dx, dw, None, None, None, None, None


def _deferred_grads(
    x: torch.Tensor, axis: Axis, grads: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], gemms: PlainGemms
) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        whole = comm.all_gather(x, axis, SEQUENCE)
        for grad, parameter in zip(grads, parameters, strict=True):
            gradient = gemms.to_weight(grad, whole)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient

    return run


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    axis: Axis,
    sequence: bool,
    deferred: DeferredWeightGrads,
    gemms: PlainGemms,
    result: Result,
) -> torch.Tensor:
    """x·wᵀ for an input sharded over the axis, all-reduced over it, or reduce-scattered along the sequence.

    `result`: under activation recomputation the output is saved, recomputed, or unused in backward.
    """
    out: torch.Tensor = _RowParallelFunction.apply(x, weight, axis, sequence, deferred, gemms, result)  # type: ignore[no-untyped-call]
    return out


def multi_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    deferred: DeferredWeightGrads,
    axis: Axis,
    sequence: bool,
    gemms: PlainGemms,
) -> tuple[torch.Tensor, ...]:
    """x·wᵀ + b for each weight. The input is replicated over the axis, or sharded along the sequence; dx is reduced over it."""
    settings = axis, sequence, deferred, gemms, len(weights)
    out: tuple[torch.Tensor, ...] = _MultiLinearFunction.apply(x, *settings, *weights, *biases)  # type: ignore[no-untyped-call]
    return out
