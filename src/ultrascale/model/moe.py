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
from torch.autograd.function import once_differentiable

from ultrascale.model.operators import activation_of, at_least_fp32
from ultrascale.specs.blocks import MoE
from ultrascale.specs.model import Model

ROW_ALIGNMENT_BYTES = 16  # of rows, which the grouped kernel requires


def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] by weight [experts, out, in]: the first counts[0] rows by weight[0], the next counts[1] by weight[1] …

    `bias` [experts, out] is added to the rows of each expert.
    """
    out: Tensor = _GroupedGemm.apply(x, weight, counts, bias)  # type: ignore[no-untyped-call]
    return out


class _GroupedGemm(torch.autograd.Function):
    """torch's grouped kernel on a GPU, a loop of matmuls elsewhere.

    Hand-written: autograd would allocate a gradient as large as all experts for each expert.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight, counts)  # experts beside adapters are frozen
        return grouped_gemms(x, weight.transpose(1, 2), counts, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts = ctx.saved_tensors
        grad = grads[0].contiguous()  # the kernel rejects expanded tensors
        dx = grouped_gemms(grad, weight, counts) if ctx.needs_input_grad[0] else None
        dw = grouped_weight_grad(grad, x, counts) if ctx.needs_input_grad[1] else None
        bias_grad = grouped_bias_grad(grad, counts) if ctx.needs_input_grad[3] else None
        return dx, dw, None, bias_grad


def grouped_gemms(x: Tensor, matrices: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies the rows of x by the matrix [in, out] of their expert and adds its bias."""
    if has_grouped_kernel(x, x.shape[1], matrices.shape[2]):
        out = F.grouped_mm(x, matrices, offs=_ends(counts))
        return out if bias is None else out + bias.repeat_interleave(counts, 0, output_size=len(x))
    parts = torch.split(x, counts.tolist())
    if bias is not None:
        return torch.cat([torch.addmm(*one) for one in zip(bias, parts, matrices, strict=True)])
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def grouped_bias_grad(grad: Tensor, counts: Tensor) -> Tensor:
    """The gradient [experts, out] of biases: each expert's sum of rows."""
    if has_grouped_kernel(grad, grad.shape[1]):
        ones = grad.new_ones(len(grad), ROW_ALIGNMENT_BYTES // grad.itemsize)  # the narrowest matrix of the kernel
        return grouped_weight_grad(grad, ones, counts)[..., 0]
    return torch.stack([part.sum(0) for part in torch.split(grad, counts.tolist())])


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
    odd = [width for width in widths if width * dtype.itemsize % ROW_ALIGNMENT_BYTES]
    if odd:
        return f"the grouped kernel wants widths that are multiples of {ROW_ALIGNMENT_BYTES // dtype.itemsize}, not {odd[0]}"
    return None


BF16_MASK = -(2**16)  # mask of the fp32 bits that bf16 has too


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """x [b, s, h] by weight [experts, h], in at least fp32."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        wide: Tensor = _BF16GemmToFP32.apply(x.flatten(0, 1), weight)  # type: ignore[no-untyped-call]
        return wide.view(*x.shape[:2], -1)
    wide = at_least_fp32(x)
    return F.linear(wide, weight.to(wide.dtype))


class _BF16GemmToFP32(torch.autograd.Function):
    """A GEMM of bf16 operands with fp32 output, without an fp32 copy of the tokens: bf16 products are exact in fp32.

    Backward splits the gradient of the logits into two bf16 tensors, which together have 16 of its 24 bits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _gemm_to_fp32(x, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        # By bit mask: a compiler would remove a cast to bf16 and back.
        high = (grad.contiguous().view(torch.int32) & BF16_MASK).view(torch.float32)
        high_low = torch.cat([high, grad - high], 1).to(x.dtype)
        grad_weight = _gemm_to_fp32(high_low.t(), x).view(2, *weight.shape).sum(0)
        return high_low @ torch.cat([weight, weight]), grad_weight.to(weight.dtype)


def _gemm_to_fp32(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def choose(scores: Tensor, moe: MoE) -> Tensor:
    """Scores […, experts] -> indices of the top k, […, k]; with groups, among the experts of the best groups."""
    if moe.groups > moe.top_groups:
        grouped = scores.view(*scores.shape[:-1], moe.groups, -1)
        # The score of a group is the sum of its two best experts (DeepSeek-V3, section 2.1.2), in V2 its best one.
        per_group = min(2 if moe.router == "sigmoid" else 1, grouped.shape[-1])
        best = grouped.topk(per_group, dim=-1).values.sum(-1).topk(moe.top_groups, dim=-1).indices
        excluded = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter(-1, best, False)
        scores = grouped.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.topk(moe.top_k, dim=-1).indices


def counts_of(experts: Tensor, number: int) -> Tensor:
    """[b, n] -> how often each of `number` experts occurs in each row, [b, number]."""
    if torch.compiler.is_compiling():  # compare and sum fuse into one pass; atomic adds to one address would serialize
        return (experts.unsqueeze(-1) == torch.arange(number, device=experts.device)).sum(1, dtype=torch.float32)
    counts = torch.zeros(experts.shape[0], number, device=experts.device)
    return counts.scatter_add_(1, experts, torch.ones_like(experts, dtype=counts.dtype))


def first(experts: Tensor, capacity: int) -> Tensor:
    """[b, s, k]: whether the token is among the first `capacity` of its sequence that chose the expert.

    By position, not by score: otherwise whether a token is dropped would depend on later tokens.
    """
    selected = experts.flatten(1)
    order = selected.argsort(dim=1, stable=True)
    sorted_ = selected.gather(1, order)
    starts = torch.searchsorted(sorted_, sorted_)  # where the run of equal experts begins
    rank = torch.arange(selected.shape[1], device=selected.device) - starts
    return torch.empty_like(selected).scatter_(1, order, rank).lt(capacity).view_as(experts)


class RouterStats(torch.autograd.Function):
    """The identity on scores; its backward accumulates routing statistics as the gradient of `stats` and adds the balance loss.

    A gradient, because backward runs once per micro-batch, even if its forward is recomputed. The balance loss of a sequence
    is experts · Σ fraction · probability (Fedus 2021, equation 4; per sequence as DeepSeek-V3, section 2.1.2, so that it does
    not depend on how a batch is sharded), 1 if all experts are chosen equally often. `totals` [b, experts] are the sums of the
    probabilities over each sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        totals: Tensor,
        stats: Tensor,
        counts: Tensor,
        dropped: Tensor,
        balance_grad: Tensor | None,
        top_k: int,
        sum_over_sequence: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        ctx.save_for_backward(totals, counts, dropped, balance_grad)
        ctx.top_k, ctx.sum_over_sequence = top_k, sum_over_sequence
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        totals, counts, dropped, balance_grad = ctx.saved_tensors
        whole = counts if ctx.sum_over_sequence is None else ctx.sum_over_sequence(counts.clone())  # [b, experts]
        routed = whole.sum(1, keepdim=True)  # tokens of the sequence · k
        slope = whole.shape[1] * ctx.top_k * whole / routed.square()  # of the loss by one probability
        found = torch.cat([counts.sum(0), (slope * totals).sum().float().view(1), dropped.float().view(1)])
        totals_grad = None if balance_grad is None else (balance_grad * slope).to(totals.dtype)
        return grad, totals_grad, found, None, None, None, None, None


@dataclass(frozen=True)
class ExpertPermutation:
    """The k choices of each of t tokens, sorted by expert. Gathers in forward and backward: autograd would use index_add."""

    sorted: Tensor
    """[n ≤ t · k]: the choices that are not dropped, by expert and then by token"""
    positions: Tensor
    """[t, k]: the index of each choice in `sorted`; 0 for a dropped one"""
    kept: Tensor | None
    """[t, k]; None: no choice is dropped"""

    @classmethod
    def sort(cls, experts: Tensor, kept: Tensor | None, number: int) -> ExpertPermutation:
        """`experts` [t, k]: indices of experts; `number`: how many experts there are."""
        keys = experts.flatten().to(torch.int16 if number < 2**15 else torch.int32)  # a radix sort has one pass per byte
        sorted_ = keys.argsort(stable=True)
        if kept is not None:
            sorted_ = sorted_[kept.flatten()[sorted_]]
        ranks = torch.arange(len(sorted_), device=experts.device)
        positions = torch.zeros(experts.numel(), dtype=ranks.dtype, device=experts.device).scatter(0, sorted_, ranks)
        return cls(sorted_, positions.view_as(experts), kept)

    def permute(self, tokens: Tensor, weights: Tensor | None = None) -> Tensor:
        """Tokens [t, h] -> one row per choice, sorted by expert: [n, h]; with weights [t, k], each times its own."""
        if weights is not None:
            scaled: Tensor = _PermuteScaledRows.apply(tokens, weights, self.sorted, self.positions, self.kept)  # type: ignore[no-untyped-call]
            return scaled
        rows: Tensor = _PermuteRows.apply(tokens, self.sorted, self.positions, self.kept)  # type: ignore[no-untyped-call]
        return rows

    def unpermute(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Sorted rows [n, h] -> each token's sum of its rows weighted by weights [t, k]: [t, h]; without, the plain sum."""
        outputs: Tensor = _UnpermuteRows.apply(rows, self.sorted, self.positions)  # type: ignore[no-untyped-call]
        if weights is None:
            return (outputs if self.kept is None else outputs * self.kept.unsqueeze(-1)).sum(-2)
        if self.kept is not None:
            weights = weights * self.kept
        return (outputs * weights.unsqueeze(-1)).sum(-2)


class _PermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sorted_: Tensor, positions: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(positions, kept)
        return tokens[sorted_ // positions.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        positions, kept = ctx.saved_tensors
        each = grad[positions]
        if kept is not None:
            each = each * kept.unsqueeze(-1)
        return each.sum(-2), None, None, None


class _PermuteScaledRows(torch.autograd.Function):
    """Saves the tokens, which others save too, instead of their rows."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, sorted_: Tensor, positions: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens, weights, positions, kept)
        return tokens[sorted_ // positions.shape[1]].mul_(weights.flatten()[sorted_].unsqueeze(-1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        tokens, weights, positions, kept = ctx.saved_tensors
        each = grad[positions]
        if kept is not None:
            each = each * kept.unsqueeze(-1)
        grad_weights = (each * tokens.unsqueeze(-2)).sum(-1)
        return each.mul_(weights.unsqueeze(-1)).sum(-2), grad_weights, None, None, None


class _UnpermuteRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sorted_: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(sorted_)
        return rows[positions]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (sorted_,) = ctx.saved_tensors
        return grad.flatten(0, 1)[sorted_], None, None


@dataclass(frozen=True)
class RoutingResult:
    """The experts of the tokens of [b, s, …]."""

    experts: Tensor
    """[b, s, k]"""
    weights: Tensor
    """[b, s, k], in the dtype of the tokens"""
    scale_inputs: bool
    """the weights multiply the inputs of experts instead of their outputs"""
    counts: Tensor
    """[experts]: tokens of each expert"""
    kept: Tensor | None
    """[b, s, k]; False: dropped, because the expert was at capacity"""
    number: int
    """of experts"""

    def order(self) -> ExpertPermutation:
        kept = None if self.kept is None else self.kept.flatten(0, 1)
        return ExpertPermutation.sort(self.experts.flatten(0, 1), kept, self.number)

    def permute(self, order: ExpertPermutation, x: Tensor) -> Tensor:
        """The experts' inputs, from x [b, s, h]."""
        return order.permute(x.flatten(0, 1), self.weights.flatten(0, 1) if self.scale_inputs else None)

    def unpermute(self, order: ExpertPermutation, rows: Tensor) -> Tensor:
        """[b·s, h], from the experts' outputs."""
        return order.unpermute(rows, None if self.scale_inputs else self.weights.flatten(0, 1))


class Router(nn.Module):
    """Scores every expert for every token in at least fp32 and chooses the top k."""

    bias: Tensor | None

    def __init__(self, model: Model, moe: MoE) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, model.hidden))
        self.logits_bias = nn.Parameter(torch.empty(moe.experts)) if moe.logits_bias else None
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
        logits = logits if self.logits_bias is None else logits + self.logits_bias
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
        weights = (weights * moe.scaling).to(x.dtype)
        return RoutingResult(experts, weights, moe.scale_inputs, kept_counts.sum(0).long(), kept, moe.experts)

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
    """The matrices of all experts, stacked: [experts, out, in], and their biases [experts, out]."""

    down: nn.Parameter

    def __init__(self, model: Model, moe: MoE) -> None:
        super().__init__()
        self.inner = ("gate", "up") if model.gated else ("up",)
        shapes = {**dict.fromkeys(self.inner, (moe.expert_ffn, model.hidden)), "down": (model.hidden, moe.expert_ffn)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(moe.experts, *shape)))
            if model.mlp_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(moe.experts, shape[0])))
        self.has_bias = model.mlp_bias
        self.output_bias_share = 1.0
        """of the last bias that these experts add, where ranks have parts of each expert and their outputs are summed"""
        self.activation = activation_of(model)

    def bias(self, name: str) -> Tensor | None:
        """What is added to the product with the matrices of that name."""
        if not self.has_bias:
            return None
        bias = self.get_parameter(f"{name}_bias")
        return bias if name != "down" or self.output_bias_share == 1 else bias * self.output_bias_share

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The outputs for rows sorted by expert; counts: number of rows of each expert."""

        def gemm(x: Tensor, name: str) -> Tensor:
            return grouped_gemm(x, self.get_parameter(name), counts, self.bias(name))

        return gemm(self.activation(*(gemm(rows, name) for name in self.inner)), "down")


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
        rows = routes.permute(order, x)
        shared = None if self.shared is None else self.gate_shared(self.shared(x), x)
        out = routes.unpermute(order, self.experts(rows, routes.counts)).view_as(x)
        return out if shared is None else out + shared

    def gate_shared(self, out: Tensor, x: Tensor) -> Tensor:
        """Weighs the output of the shared experts, in models that have a gate for it."""
        return out if self.shared_gate is None else out * self.shared_gate(x).sigmoid()
