"""Mixture of experts: a router that sends each token to a few experts, their weights in one tensor each, shared experts.

Dropless unless a capacity is set. There is no communication here: expert parallelism sets `make_dispatcher`, tensor
parallelism shards the width of the experts, and the trainer sets `pull`, `tally` and `over_sequence` of each router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.grouped import DeferredWeightGrad, PushDeferred, grouped_product, has_kernel
from ultrascale.model.operators import ACTIVATIONS
from ultrascale.model.permute import ExpertPermutation
from ultrascale.model.route import RouterStats, choose, counts_of, first, logits_of
from ultrascale.specs.model import Model, MoE

Sorted = tuple[Tensor, Tensor]
"""rows in the order of their experts, and how many each expert gets"""


@dataclass(frozen=True)
class RoutingResult:
    """Where the tokens of [b, s, …] go."""

    experts: Tensor
    """[b, s, k]"""
    weights: Tensor
    """[b, s, k], in the type of the tokens"""
    counts: Tensor
    """[experts]: tokens that each takes"""
    kept: Tensor | None
    """[b, s, k]; False: the expert was full"""


class Router(nn.Module):
    """Scores every expert for every token in at least fp32 and chooses the top k."""

    bias: Tensor | None

    def __init__(self, model: Model, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, model.hidden))
        # A buffer: it chooses but does not weigh, so no gradient reaches it (DeepSeek-V3, section 2.1.2).
        self.register_buffer("bias", torch.zeros(moe.experts) if moe.router_bias else None)
        self.capacity_factor: float | None = None
        self.pull: Tensor | None = None
        """gradient of the objective by one sequence's balance loss in this layer, where it shall be pulled"""
        self.over_sequence: Callable[[Tensor], Tensor] | None = None
        """sums counts over those who hold other parts of the same sequences, where there are any"""
        self.tally: Tensor | None = None
        """[experts + 2], whose gradient tells how often each expert was chosen, balance losses and dropped tokens"""

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
            taken = counts if kept is None else _taken(experts, kept, moe.experts)
        if torch.is_grad_enabled() and self.tally is not None:
            scores = RouterStats.apply(  # type: ignore[no-untyped-call]
                scores, probabilities.sum(1), self.tally, counts, dropped, self.pull, moe.top_k, self.over_sequence
            )
        weights = scores.gather(-1, experts)
        if moe.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return RoutingResult(experts, (weights * moe.scaling).to(x.dtype), taken.sum(0).long(), kept)

    def count(self, device: torch.device) -> None:
        """From now on, backward counts, on the device that computes."""
        self.tally = torch.zeros(self.moe.experts + 2, device=device, requires_grad=True)

    def take(self) -> Tensor:
        """What was seen since the last call: the tally's gradient."""
        assert self.tally is not None
        seen = torch.zeros_like(self.tally.detach()) if self.tally.grad is None else self.tally.grad
        self.tally.grad = None
        return seen


def _taken(experts: Tensor, kept: Tensor, of: int) -> Tensor:
    """As `counts_of`, of those that are kept."""
    return counts_of(experts.masked_fill(~kept, of).flatten(1), of + 1)[:, :of]


class LocalDispatcher:
    """Runs the experts on rows sorted by expert, where all experts are local. Subclasses send rows to other ranks."""

    def __init__(self, rows: Tensor, counts: Tensor) -> None:
        """Starts to dispatch rows, which are sorted by expert; counts: rows of each expert."""
        self.rows, self.counts = rows, counts

    def run_experts(self, experts: nn.Module) -> None:
        """Runs the local experts on their rows, and starts to send back their outputs."""
        self.rows = experts(self.rows, self.counts)

    def combine(self) -> Tensor:
        """The outputs, in the order of the dispatched rows."""
        return self.rows


class Experts(nn.Module):
    """Every expert's matrices stacked: [experts, out, in]; stored in slices of their rows where that is asked for."""

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
        """Store each matrix as so many, [experts · slices, out / slices, in]: more ranks than experts can share them then."""
        for name, weight in list(self.named_parameters()):
            experts, out, into = weight.shape
            setattr(self, name, nn.Parameter(weight.data.view(experts * slices, out // slices, into)))
        self.slices = slices

    def shape(self, name: str) -> tuple[int, int, int]:
        """Of the matrices, however they are stored."""
        stored, out, into = self.get_parameter(name).shape
        return stored // self.slices, out * self.slices, into

    def forward(
        self,
        rows: Tensor,
        counts: Tensor | None = None,
        receive: Callable[[Tensor], Sorted] | None = None,
        local_rows: Sorted | None = None,
    ) -> Any:
        """What becomes of sorted rows; without counts, of rows on their splits, for which `receive` waits.

        Gradients of the matrices are then made while those of the rows travel home. Rows that are `local_rows` are multiplied
        before the wait; what becomes of them comes first. All in one call: who gathers the matrices for it does so once.
        """
        if receive is None:
            assert counts is not None
            return self._made(rows, counts, {})
        late = {name: DeferredWeightGrad(self.get_parameter(name), self.shape(name)) for name in (*self.inner, "down")}
        local_out = None if local_rows is None else self._made(*local_rows, late)
        made = self._made(*receive(rows), late)
        return made if local_out is None else (local_out, made)

    def _made(self, rows: Tensor, counts: Tensor, late: dict[str, DeferredWeightGrad]) -> Tensor:
        def product(x: Tensor, name: str) -> Tensor:
            if name in late:
                return late[name].product(x, counts, self.push_deferred)
            weight = self.get_parameter(name)
            return grouped_product(x, weight.view(self.shape(name)), counts, self.push_deferred, weight)

        return product(self.activation(*(product(rows, name) for name in self.inner)), "down")


class MixtureOfExperts(nn.Module):
    """In the place of a dense MLP: x [b, s, hidden] -> [b, s, hidden]."""

    def __init__(self, model: Model, moe: MoE, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(model, moe)
        self.experts = Experts(model, moe)
        self.shared = shared
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if moe.shared_gate else None
        self.make_dispatcher: Callable[[Tensor, Tensor], LocalDispatcher] = LocalDispatcher

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(x) if self._of_known_sizes(x) else self._forward_uncompiled(x)

    def _of_known_sizes(self, x: Tensor) -> bool:
        """Does no shape depend on where tokens go? Then a block with experts is one graph for the compiler."""
        whole = (
            self.make_dispatcher is LocalDispatcher
            and self.router.capacity_factor is None
            and self.experts.push_deferred is None
        )
        return whole and has_kernel(x, *self.experts.shape("down")[1:])

    def _forward(self, x: Tensor) -> Tensor:
        routes = self.router(x)
        order = ExpertPermutation.of(routes.experts.flatten(0, 1), _flat(routes.kept), self.router.moe.experts)
        dispatcher = self.make_dispatcher(order.spread(x.flatten(0, 1)), routes.counts)
        inner = None if self.shared is None else _inner(self.shared, x)
        dispatcher.run_experts(self.experts)
        shared = None if inner is None else self._shared(inner, x)
        out = order.collect(dispatcher.combine(), routes.weights.flatten(0, 1)).view_as(x)
        return out if shared is None else out + shared

    _forward_uncompiled = torch.compiler.disable(_forward)  # type: ignore[no-untyped-call]

    def _shared(self, inner: Tensor, x: Tensor) -> Tensor:
        out = _outer(self.shared, inner)
        return out if self.shared_gate is None else out * self.shared_gate(x).sigmoid()


# A dense MLP in two, so that each half has a way of the rows to compute in.
def _inner(mlp: Any, x: Tensor) -> Tensor:
    out: Tensor = mlp.activation(*mlp.inputs(x))
    return out


def _outer(mlp: Any, inner: Tensor) -> Tensor:
    out: Tensor = mlp.down(inner)
    return out


def _flat(kept: Tensor | None) -> Tensor | None:
    return None if kept is None else kept.flatten(0, 1)
