"""Mixture of experts: a router that sends each token to a few experts, their weights in one tensor each, shared experts.

Dropless unless a capacity is set. Nothing here exchanges: expert parallelism sets `exchange`, tensor parallelism cuts the
experts' width, and whoever trains reads from each router what it saw and sets how strongly it is pulled towards balance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.model.grouped import Owe, grouped_product
from ultrascale.model.operators import ACTIVATIONS
from ultrascale.specs.model import Model, MoE


@dataclass(frozen=True)
class Routes:
    """Where the tokens of [b, s, …] go."""

    experts: Tensor
    """[b, s, k]"""
    weights: Tensor
    """[b, s, k], in the type of the tokens"""
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
        self.pull = 0.0
        """gradient of the objective by one sequence's balance loss in this layer"""
        self.over_sequence: Callable[[Tensor], Tensor] = lambda counts: counts
        """sums counts over those who hold other parts of the same sequences"""
        self.seen: Tensor | None = None
        """[experts + 2]: tokens that each expert was chosen for, balance losses and dropped tokens, summed until taken"""

    def forward(self, x: Tensor) -> Routes:
        moe = self.moe
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        scores = logits.softmax(-1) if moe.router == "softmax" else logits.sigmoid()
        probabilities = scores if moe.router == "softmax" else scores / scores.sum(-1, keepdim=True)
        with torch.no_grad():
            wanted = scores if self.bias is None else scores + self.bias
            experts = wanted.topk(moe.top_k, dim=-1).indices
            counts = _counts(experts.flatten(1), moe.experts)
            kept = None if self.capacity_factor is None else _first(experts, moe.capacity(x.shape[1], self.capacity_factor))
            dropped = torch.zeros((), device=x.device) if kept is None else (~kept).sum()
        if torch.is_grad_enabled():
            scores = _Seen.apply(scores, probabilities, counts, dropped, self)  # type: ignore[no-untyped-call]
        weights = scores.gather(-1, experts)
        if moe.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routes(experts, weights.to(x.dtype), kept)

    def take(self) -> Tensor:
        """What was seen since the last call."""
        seen = self.seen if self.seen is not None else self.weight.new_zeros(self.moe.experts + 2, dtype=torch.float32)
        self.seen = None
        return seen


class _Seen(torch.autograd.Function):
    """Counts in backward, which passes every micro-batch once even where its forward is recomputed; adds the balance's pull.

    The balance loss of a sequence is experts · Σ fraction · probability (Fedus 2021, equation 4; per sequence as DeepSeek-V3,
    section 2.1.2, so that it does not depend on how a batch is cut), 1 where all experts are chosen alike.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, probabilities: Tensor, counts: Tensor, dropped: Tensor, router: Router) -> Tensor:
        ctx.save_for_backward(probabilities.sum(1), counts, dropped)
        ctx.router, ctx.shape = router, probabilities.shape
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        totals, counts, dropped = ctx.saved_tensors
        router: Router = ctx.router
        whole = router.over_sequence(counts.clone())  # [b, experts]
        routed = whole.sum(1, keepdim=True)  # tokens of the sequence · k
        slope = router.moe.experts * router.moe.top_k * whole / routed.square()  # of the loss by one probability
        seen = torch.cat([counts.sum(0), (slope * totals).sum().float().view(1), dropped.float().view(1)])
        router.seen = seen if router.seen is None else router.seen + seen
        pull = (router.pull * slope).to(totals.dtype).unsqueeze(1).expand(ctx.shape) if router.pull else None
        return grad, pull, None, None, None


class Exchange:
    """Where sorted rows meet their experts: here, all of them. Begun early, so that other work can be done meanwhile."""

    def begin(self, rows: Tensor, counts: Tensor) -> None:
        """Rows sorted by expert, and how many each expert gets."""
        self.rows, self.counts = rows, counts

    def arrived(self) -> tuple[Tensor, Tensor]:
        """Rows for the experts here, sorted, and their counts."""
        rows, counts = self.rows, self.counts
        del self.rows, self.counts
        return rows, counts

    def back(self, rows: Tensor) -> Tensor:
        """What the experts made, in the order of the rows that were given."""
        return rows


class Experts(nn.Module):
    """Every expert's matrices stacked: [experts, out, in]."""

    def __init__(self, model: Model, moe: MoE) -> None:
        super().__init__()
        self.inner = ("gate", "up") if model.gated else ("up",)
        for name in self.inner:
            self.register_parameter(name, nn.Parameter(torch.empty(moe.experts, moe.expert_ffn, model.hidden)))
        self.down = nn.Parameter(torch.empty(moe.experts, model.hidden, moe.expert_ffn))
        self.activation = ACTIVATIONS[model.activation]
        self.owe: Owe | None = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        inner = [grouped_product(rows, self.get_parameter(name), counts, self.owe) for name in self.inner]
        return grouped_product(self.activation(*inner), self.down, counts, self.owe)


class MixtureOfExperts(nn.Module):
    """In the place of a dense MLP: x [b, s, hidden] -> [b, s, hidden]."""

    def __init__(self, model: Model, moe: MoE, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(model, moe)
        self.experts = Experts(model, moe)
        self.shared = shared
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if moe.shared_gate else None
        self.exchange = Exchange()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        routes = self.router(x)
        tokens = x.flatten(0, 1)
        assignments = routes.experts.numel()
        order = routes.experts.flatten().argsort(stable=True)
        if routes.kept is not None:
            order = order[routes.kept.flatten()[order]]
        counts = _counts(routes.experts.flatten()[order].unsqueeze(0), self.router.moe.experts)[0].long()
        self.exchange.begin(tokens[order // self.router.moe.top_k], counts)
        shared = None if self.shared is None else self._shared(x)
        made = self.exchange.back(self.experts(*self.exchange.arrived()))
        # Each row back to its place, so that the sum over a token's experts has one order, and gradients no collisions.
        places = torch.zeros(assignments, x.shape[-1], dtype=made.dtype, device=made.device).index_copy(0, order, made)
        out: Tensor = (places.view(*routes.weights.shape, -1) * routes.weights.unsqueeze(-1)).sum(-2)
        return out if shared is None else out + shared

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        out: Tensor = self.shared(x)
        return out if self.shared_gate is None else out * self.shared_gate(x).sigmoid()


def _counts(experts: Tensor, of: int) -> Tensor:
    """[b, n] -> how often each row names each expert, [b, experts]."""
    counts = torch.zeros(experts.shape[0], of, device=experts.device)
    return counts.scatter_add_(1, experts, torch.ones_like(experts, dtype=counts.dtype))


def _first(experts: Tensor, capacity: int) -> Tensor:
    """[b, s, k]: is the token among the first `capacity` of its sequence that chose the expert?

    In the order of positions: were the best scores kept instead, a token's fate would depend on later ones.
    """
    chosen = experts.flatten(1)
    order = chosen.argsort(dim=1, stable=True)
    sorted_ = chosen.gather(1, order)
    starts = torch.searchsorted(sorted_, sorted_)  # where the run of equal experts begins
    rank = torch.arange(chosen.shape[1], device=chosen.device) - starts
    return torch.empty_like(chosen).scatter_(1, order, rank).lt(capacity).view_as(experts)
