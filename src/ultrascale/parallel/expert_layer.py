"""Experts as parallelism needs them: matrices stored in slices, deferred weight gradients, rows that are still on their way.

The plain module is `Experts` of model/moe.py. Parameters keep their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.kernels.deferred import add_gradient
from ultrascale.model.moe import Experts, MixtureOfExperts, grouped_bias_grad, grouped_gemms, grouped_weight_grad

Sorted = tuple[Tensor, Tensor]
"""rows sorted by expert, and the number of rows of each expert"""

PushDeferred = Callable[[Callable[[], None]], bool]
"""queues a function that computes a weight gradient; returns False if the caller must compute it now"""

PendingGrads = list[tuple[Tensor, Tensor, Tensor]]
"""output gradients, rows and counts of GEMMs whose weight gradient is not computed yet"""


class ParallelExperts(Experts):
    """Experts whose matrices may be stored in slices of their rows, and whose weight gradients may be computed later."""

    def __init__(self, plain: Experts) -> None:
        nn.Module.__init__(self)  # not Experts': the plain module's parameters are taken over
        self.inner, self.activation = plain.inner, plain.activation
        self.has_bias, self.output_bias_share = plain.has_bias, plain.output_bias_share
        for name, parameter in plain.named_parameters():
            self.register_parameter(name, parameter)
        self.push_deferred: PushDeferred | None = None
        """set by schedules with a split backward"""
        self.slices = 1

    @classmethod
    def of(cls, mlp: MixtureOfExperts) -> ParallelExperts:
        """The layer's experts, which are replaced if they are plain."""
        if not isinstance(mlp.experts, ParallelExperts):
            mlp.experts = cls(mlp.experts)
        return mlp.experts

    def slice(self, slices: int) -> None:
        """Stores each matrix in slices, [experts · slices, out / slices, in], to shard experts over more ranks than experts."""
        for name, weight in list(self.named_parameters()):
            experts, out, *into = weight.shape
            stored = weight.data.view(experts * slices, out // slices, *into)
            setattr(self, name, nn.Parameter(stored, weight.requires_grad))
        self.slices = slices

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape [experts, out, in] of the matrices, or [experts, out] of biases, however they are stored."""
        stored, out, *into = self.get_parameter(name).shape
        return stored // self.slices, out * self.slices, *into

    def bias(self, name: str) -> Tensor | None:
        bias = super().bias(name)
        return None if bias is None else bias.view(self.shape(f"{name}_bias"))

    def forward(
        self,
        rows: Tensor,
        counts: Tensor | None = None,
        receive: Callable[[Tensor], Sorted] | None = None,
        local_rows: Sorted | None = None,
    ) -> Any:
        """The outputs for sorted rows; without counts, for rows that are still being dispatched, for which `receive` waits.

        With `receive`, weight gradients are computed while the gradients of the rows are sent back. `local_rows` are computed
        before the wait, and their outputs are returned first. All in one call, so that ZeRO gathers the matrices once.
        """
        names = (*self.inner, "down")
        if receive is None:
            assert counts is not None
            views = {name: self.get_parameter(name).view(self.shape(name)) for name in names}
            return self._run(rows, counts, views, {})
        pending: dict[str, PendingGrads] = {name: [] for name in names}
        views = {name: _DeferWeightGrad.apply(self.get_parameter(name), self.shape(name), pending[name]) for name in names}  # type: ignore[no-untyped-call]
        local_out = None if local_rows is None else self._run(*local_rows, views, pending)
        remote_out = self._run(*receive(rows), views, pending)
        return remote_out if local_out is None else (local_out, remote_out)

    def _run(self, rows: Tensor, counts: Tensor, views: dict[str, Tensor], pending: dict[str, PendingGrads]) -> Tensor:
        def gemm(x: Tensor, name: str) -> Tensor:
            leaf = self.get_parameter(name)
            out: Tensor = _DeferredGroupedGemm.apply(  # type: ignore[no-untyped-call]
                x, views[name], counts, self.bias(name), self.push_deferred, leaf, pending.get(name)
            )
            return out

        return gemm(self.activation(*(gemm(rows, name) for name in self.inner)), "down")


class _DeferWeightGrad(torch.autograd.Function):
    """A view of a weight whose gradient is computed when backward reaches this node, not together with the rows'.

    Autograd runs nodes in reverse order of creation: the backward of everything created after this node runs before.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: tuple[int, ...], pending: PendingGrads) -> Tensor:
        ctx.stored, ctx.pending = weight.shape, pending
        ctx.set_materialize_grads(False)  # the GEMMs return no gradient; they append its operands to `pending`
        return weight.view(shape)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None, None]:
        total: Tensor | None = None
        while ctx.pending:
            part = grouped_weight_grad(*ctx.pending.pop())
            total = part if total is None else total.add_(part)
        return None if total is None else total.view(ctx.stored), None, None


class _DeferredGroupedGemm(torch.autograd.Function):
    """Like `grouped_gemm`, with a weight gradient that is queued, appended to `pending`, or computed at once. That of biases is
    never late.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        bias: Tensor | None,
        push_deferred: PushDeferred | None,
        leaf: Tensor,
        pending: PendingGrads | None,
    ) -> Tensor:
        ctx.save_for_backward(x if leaf.requires_grad else None, weight, counts)
        # The leaf itself: checkpointing unpacks a copy whose .grad is lost.
        ctx.leaf, ctx.push_deferred, ctx.pending = leaf, push_deferred, pending
        return grouped_gemms(x, weight.transpose(1, 2), counts, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad = grads[0].contiguous()  # the kernel rejects expanded tensors
        dx = grouped_gemms(grad, weight, counts) if ctx.needs_input_grad[0] else None
        dw = None
        late = ctx.push_deferred is not None and ctx.leaf.requires_grad
        late = late and ctx.push_deferred(_add_weight_gradient(grad, x, counts, ctx.leaf))
        if ctx.leaf.requires_grad and not late:
            if ctx.pending is None:
                dw = grouped_weight_grad(grad, x, counts)
            else:
                ctx.pending.append((grad, x, counts))
        bias_grad = grouped_bias_grad(grad, counts) if ctx.needs_input_grad[3] else None
        return dx, dw, None, bias_grad, None, None, None


def _add_weight_gradient(grad: Tensor, x: Tensor, counts: Tensor, parameter: Tensor) -> Callable[[], None]:
    @torch.no_grad()
    def run() -> None:
        add_gradient(parameter, grouped_weight_grad(grad, x, counts).view(parameter.shape))

    return run
