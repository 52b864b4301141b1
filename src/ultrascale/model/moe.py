"""Mixture of experts: a router that sends each token to its top k experts, stacked expert weights, shared experts.

Dropless unless a capacity is set. There is no communication here: expert parallelism sets `make_dispatcher`, tensor
parallelism shards the width of the experts, and the trainer sets `balance_grad`, `stats` and `sum_over_sequence` of each
router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.grouped import DeferredWeightGrad, PushDeferred, grouped_gemm, has_kernel
from ultrascale.model.operators import ACTIVATIONS
from ultrascale.model.permute import ExpertPermutation
from ultrascale.model.route import RouterStats, choose, counts_of, first, logits_of
from ultrascale.specs.model import Model, MoE

Sorted = tuple[Tensor, Tensor]
"""rows sorted by expert, and the number of rows of each expert"""


@dataclass(frozen=True)
class RoutingResult:
    """The experts of the tokens of [b, s, …]."""

    experts: Tensor
    """[b, s, k]"""
    weights: Tensor
    """[b, s, k], in the dtype of the tokens"""
    counts: Tensor
    """[experts]: tokens of each expert"""
    kept: Tensor | None
    """[b, s, k]; False: dropped, because the expert was at capacity"""


class Router(nn.Module):
    """Scores every expert for every token in at least fp32 and chooses the top k."""

    bias: Tensor | None

    def __init__(self, model: Model, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, model.hidden))
        # A buffer: it affects the choice but not the weights, so it gets no gradient (DeepSeek-V3, section 2.1.2).
        self.register_buffer("bias", torch.zeros(moe.experts) if moe.router_bias else None)
        self.capacity_factor: float | None = None
        self.balance_grad: Tensor | None = None
        """gradient of the objective by one sequence's balance loss in this layer; None: no balance loss"""
        self.sum_over_sequence: Callable[[Tensor], Tensor] | None = None
        """sums counts over the ranks that hold other slices of the same sequences; None: there are none"""
        self.stats: Tensor | None = None
        """[experts + 2], whose gradient accumulates the tokens of each expert, balance losses and dropped tokens"""

    def forward(self, x: Tensor) -> RoutingResult:
        moe = self.moe
        logits = logits_of(x, self.weight)
        scores = logits.softmax(-1) if moe.router == "softmax" else logits.sigmoid()
        probabilities = scores if moe.router == "softmax" else scores / scores.sum(-1, keepdim=True)
        with torch.no_grad():
            experts = choose(scores if self.bias is None else scores + self.bias, moe)
            counts = counts_of(experts.flatten(1), moe.experts)
            kept = None if self.capacity_factor is None else first(experts, moe.capacity(x.shape[1], self.capacity_factor))
            dropped = torch.zeros((), device=x.device) if kept is None else (~kept).sum()
            kept_counts = counts if kept is None else _kept_counts(experts, kept, moe.experts)
        if torch.is_grad_enabled() and self.stats is not None:
            scores = RouterStats.apply(  # type: ignore[no-untyped-call]
                scores, probabilities.sum(1), self.stats, counts, dropped, self.balance_grad, moe.top_k, self.sum_over_sequence
            )
        weights = scores.gather(-1, experts)
        if moe.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return RoutingResult(experts, (weights * moe.scaling).to(x.dtype), kept_counts.sum(0).long(), kept)

    def enable_stats(self, device: torch.device) -> None:
        """Makes backward accumulate statistics, on the compute device."""
        self.stats = torch.zeros(self.moe.experts + 2, device=device, requires_grad=True)

    def pop_stats(self) -> Tensor:
        """Returns and clears the statistics since the last call: the gradient of `stats`."""
        assert self.stats is not None
        found = torch.zeros_like(self.stats.detach()) if self.stats.grad is None else self.stats.grad
        self.stats.grad = None
        return found


def _kept_counts(experts: Tensor, kept: Tensor, number: int) -> Tensor:
    """Like `counts_of`, without dropped tokens."""
    return counts_of(experts.masked_fill(~kept, number).flatten(1), number + 1)[:, :number]


class LocalDispatcher:
    """Runs the experts on rows sorted by expert if all experts are local. Subclasses send rows to other ranks."""

    def __init__(self, rows: Tensor, counts: Tensor) -> None:
        """Starts to dispatch rows, which are sorted by expert; counts: number of rows of each expert."""
        self.rows, self.counts = rows, counts

    def run_experts(self, experts: nn.Module) -> None:
        """Runs the local experts on their rows, and starts to send back their outputs."""
        self.rows = experts(self.rows, self.counts)

    def combine(self) -> Tensor:
        """The outputs, in the order of the dispatched rows."""
        return self.rows


class Experts(nn.Module):
    """The matrices of all experts, stacked: [experts, out, in]; optionally stored in slices of their rows."""

    def __init__(self, model: Model, moe: MoE) -> None:
        super().__init__()
        self.inner = ("gate", "up") if model.gated else ("up",)
        for name in self.inner:
            self.register_parameter(name, nn.Parameter(torch.empty(moe.experts, moe.expert_ffn, model.hidden)))
        self.down = nn.Parameter(torch.empty(moe.experts, model.hidden, moe.expert_ffn))
        self.activation = ACTIVATIONS[model.activation]
        self.push_deferred: PushDeferred | None = None
        self.slices = 1

    def slice(self, slices: int) -> None:
        """Stores each matrix in slices, [experts · slices, out / slices, in], to shard experts over more ranks than experts."""
        for name, weight in list(self.named_parameters()):
            experts, out, into = weight.shape
            setattr(self, name, nn.Parameter(weight.data.view(experts * slices, out // slices, into)))
        self.slices = slices

    def shape(self, name: str) -> tuple[int, int, int]:
        """The shape [experts, out, in] of the matrices, however they are stored."""
        stored, out, into = self.get_parameter(name).shape
        return stored // self.slices, out * self.slices, into

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
        if receive is None:
            assert counts is not None
            return self._run(rows, counts, {})
        deferred = {name: DeferredWeightGrad(self.get_parameter(name), self.shape(name)) for name in (*self.inner, "down")}
        local_out = None if local_rows is None else self._run(*local_rows, deferred)
        remote_out = self._run(*receive(rows), deferred)
        return remote_out if local_out is None else (local_out, remote_out)

    def _run(self, rows: Tensor, counts: Tensor, deferred: dict[str, DeferredWeightGrad]) -> Tensor:
        def gemm(x: Tensor, name: str) -> Tensor:
            if name in deferred:
                return deferred[name].gemm(x, counts, self.push_deferred)
            weight = self.get_parameter(name)
            return grouped_gemm(x, weight.view(self.shape(name)), counts, self.push_deferred, weight)

        return gemm(self.activation(*(gemm(rows, name) for name in self.inner)), "down")


class MixtureOfExperts(nn.Module):
    """Replaces a dense MLP: x [b, s, hidden] -> [b, s, hidden]."""

    def __init__(self, model: Model, moe: MoE, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(model, moe)
        self.experts = Experts(model, moe)
        self.shared = shared
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if moe.shared_gate else None
        self.make_dispatcher: Callable[[Tensor, Tensor], LocalDispatcher] = LocalDispatcher

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x) if self._has_static_shapes(x) else self._forward_uncompiled(x)

    def _has_static_shapes(self, x: Tensor) -> bool:
        """Whether no shape depends on the routing: then torch.compile compiles the block as one graph."""
        whole = (
            self.make_dispatcher is LocalDispatcher
            and self.router.capacity_factor is None
            and self.experts.push_deferred is None
        )
        return whole and has_kernel(x, *self.experts.shape("down")[1:])

    def _forward(self, x: Tensor) -> Tensor:
        routes = self.router(x)
        order = ExpertPermutation.sort(routes.experts.flatten(0, 1), _flat(routes.kept), self.router.moe.experts)
        dispatcher = self.make_dispatcher(order.permute(x.flatten(0, 1)), routes.counts)
        inner = None if self.shared is None else _inner(self.shared, x)
        dispatcher.run_experts(self.experts)
        shared = None if inner is None else self._shared(inner, x)
        out = order.unpermute(dispatcher.combine(), routes.weights.flatten(0, 1)).view_as(x)
        return out if shared is None else out + shared

    _forward_uncompiled = torch.compiler.disable(_forward)  # type: ignore[no-untyped-call]

    def _shared(self, inner: Tensor, x: Tensor) -> Tensor:
        out = _outer(self.shared, inner)
        return out if self.shared_gate is None else out * self.shared_gate(x).sigmoid()


# A dense MLP in two halves: one overlaps with the dispatch, the other with the combine.
def _inner(mlp: Any, x: Tensor) -> Tensor:
    out: Tensor = mlp.activation(*mlp.inputs(x))
    return out


def _outer(mlp: Any, inner: Tensor) -> Tensor:
    out: Tensor = mlp.down(inner)
    return out


def _flat(kept: Tensor | None) -> Tensor | None:
    return None if kept is None else kept.flatten(0, 1)
