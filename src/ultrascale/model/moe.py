"""Mixture of experts: a router that sends each token to its top k experts, stacked expert weights, shared experts.

Dropless unless a capacity is set. There is no communication here. The trainer sets `balance_grad`, `stats` and
`sum_over_sequence` of each router.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ultrascale.model.operators import ACTIVATIONS
from ultrascale.model.route import ExpertPermutation, RouterStats, choose, counts_of, first, logits_of
from ultrascale.specs.model import Model, MoE

ALIGNED = 16  # bytes: the row alignment that the grouped kernel requires


def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [n, in] by weight [experts, out, in]: the first counts[0] rows by weight[0], the next counts[1] by weight[1] …"""
    out: Tensor = _GroupedGemm.apply(x, weight, counts)  # type: ignore[no-untyped-call]
    return out


class _GroupedGemm(torch.autograd.Function):
    """torch's grouped kernel on a GPU, a loop of matmuls elsewhere.

    Hand-written: autograd would allocate a gradient as large as all experts for each expert.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        return grouped_gemms(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad = grads[0].contiguous()  # the kernel rejects expanded tensors
        dx = grouped_gemms(grad, weight, counts) if ctx.needs_input_grad[0] else None
        return dx, grouped_weight_grad(grad, x, counts), None


def grouped_gemms(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Multiplies the rows of x by the matrix [in, out] of their expert."""
    if has_grouped_kernel(x, x.shape[1], matrices.shape[2]):
        return F.grouped_mm(x, matrices, offs=_ends(counts))
    parts = torch.split(x, counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def grouped_weight_grad(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """The gradient [experts, out, in] of all matrices, from the gradient of the output."""
    if has_grouped_kernel(x, x.shape[1], grad.shape[1]):
        return F.grouped_mm(grad.t(), x, offs=_ends(counts))
    sizes = counts.tolist()
    return torch.stack([g.t() @ part for g, part in zip(torch.split(grad, sizes), torch.split(x, sizes), strict=True)])


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)


def has_grouped_kernel(x: Tensor, *widths: int) -> bool:
    """Whether the grouped kernel supports such rows and matrices of these widths."""
    return x.is_cuda and why_not_grouped(x.dtype, *widths) is None


def why_not_grouped(dtype: torch.dtype, *widths: int) -> str | None:
    """Why the grouped kernel cannot be used, so that experts are multiplied one by one; None if it can."""
    if dtype != torch.bfloat16:
        return f"the grouped kernel multiplies bf16, not {str(dtype).removeprefix('torch.')}"
    odd = [width for width in widths if width * dtype.itemsize % ALIGNED]
    return f"the grouped kernel wants widths that are multiples of {ALIGNED // dtype.itemsize}, not {odd[0]}" if odd else None


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
    number: int
    """of experts"""

    def order(self) -> ExpertPermutation:
        kept = None if self.kept is None else self.kept.flatten(0, 1)
        return ExpertPermutation.sort(self.experts.flatten(0, 1), kept, self.number)


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
        return RoutingResult(experts, (weights * moe.scaling).to(x.dtype), kept_counts.sum(0).long(), kept, moe.experts)

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


class Experts(nn.Module):
    """The matrices of all experts, stacked: [experts, out, in]."""

    def __init__(self, model: Model, moe: MoE) -> None:
        super().__init__()
        self.inner = ("gate", "up") if model.gated else ("up",)
        for name in self.inner:
            self.register_parameter(name, nn.Parameter(torch.empty(moe.experts, moe.expert_ffn, model.hidden)))
        self.down = nn.Parameter(torch.empty(moe.experts, model.hidden, moe.expert_ffn))
        self.activation = ACTIVATIONS[model.activation]

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The outputs for rows sorted by expert; counts: number of rows of each expert."""
        inner = self.activation(*(grouped_gemm(rows, self.get_parameter(name), counts) for name in self.inner))
        return grouped_gemm(inner, self.down, counts)


class MixtureOfExperts(nn.Module):
    """Replaces a dense MLP: x [b, s, hidden] -> [b, s, hidden]. `shared`: an MLP for every token."""

    def __init__(self, model: Model, moe: MoE, shared: nn.Module | None) -> None:
        super().__init__()
        self.router = Router(model, moe)
        self.experts = Experts(model, moe)
        self.shared = shared
        self.shared_gate = nn.Linear(model.hidden, 1, bias=False) if moe.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        routes: RoutingResult = self.router(x)
        order = routes.order()
        rows = order.permute(x.flatten(0, 1))
        shared = None if self.shared is None else self.gate_shared(self.shared(x), x)
        out = order.unpermute(self.experts(rows, routes.counts), routes.weights.flatten(0, 1)).view_as(x)
        return out if shared is None else out + shared

    def gate_shared(self, out: Tensor, x: Tensor) -> Tensor:
        """Weighs the output of the shared experts, in models that have a gate for it."""
        return out if self.shared_gate is None else out * self.shared_gate(x).sigmoid()
