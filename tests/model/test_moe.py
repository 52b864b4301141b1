"""Routers, experts and router statistics: against the plain formulas, written out token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from model.builders import initialize
from ultrascale.model.moe import (
    ExpertPermutation,
    MixtureOfExperts,
    _BF16GemmToFP32,
    grouped_gemm,
    has_grouped_kernel,
    why_not_grouped,
)
from ultrascale.model.transformer import Transformer
from ultrascale.specs.blocks import MoE
from ultrascale.specs.model import Model

SHAPE: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 32, "ffn": 24}


def layer(**moe: Any) -> MixtureOfExperts:
    model = Model(name="x", **SHAPE, moe={"experts": 6, "top_k": 2, "expert_ffn": 12, **moe})
    module = Transformer(model)
    initialize(module, 3, model)
    mlp = module.each_block()[0].mlp
    assert isinstance(mlp, MixtureOfExperts)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.mul_(20)  # far from ties, and no output lost in rounding
        if mlp.router.bias is not None:
            mlp.router.bias.copy_(torch.tensor([0.9, -0.9, 0.5, 0.0, -0.5, 0.1]))
    mlp.double()
    mlp.router.enable_stats(torch.device("cpu"))
    return mlp


def tokens(batch: int = 3, length: int = 7) -> Tensor:
    return torch.randn(batch, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def by_hand(mlp: MixtureOfExperts, x: Tensor) -> Tensor:
    """One token after the other."""
    moe, router, experts = mlp.router.moe, mlp.router, mlp.experts
    rows = []
    for token in x.flatten(0, 1):
        logits = router.weight @ token
        scores = logits.sigmoid() if moe.router == "sigmoid" else logits.softmax(0)
        selected = (scores if router.bias is None else scores + router.bias).topk(moe.top_k).indices.tolist()
        weights = scores[selected] / scores[selected].sum() if moe.renormalize else scores[selected]
        out = torch.zeros_like(token)
        for weight, expert in zip(weights, selected, strict=True):
            gate, up = (experts.get_parameter(name)[expert] @ token for name in ("gate", "up"))
            out = out + weight * (experts.down[expert] @ (torch.nn.functional.silu(gate) * up))
        if mlp.shared is not None:
            shared = mlp.shared(token.view(1, 1, -1)).flatten()
            out = out + (shared if mlp.shared_gate is None else shared * (mlp.shared_gate.weight @ token).sigmoid())
        rows.append(out)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(
    "moe",
    [
        {},
        {"top_k": 1},
        {"top_k": 6},
        {"renormalize": False},
        {"router": "sigmoid"},
        {"router": "sigmoid", "renormalize": False},
        {"router": "sigmoid", "router_bias": True, "shared_experts": 2},
        {"shared_experts": 1, "shared_expert_ffn": 20, "shared_gate": True},
    ],
)
def test_outputs_and_gradients_are_those_of_the_formula(moe: dict[str, Any]) -> None:
    mlp = layer(**moe)
    results = []
    for compute in (mlp, lambda x: by_hand(mlp, x)):
        x = tokens().requires_grad_()
        out = compute(x)
        mlp.zero_grad()
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
        results.append([out.detach(), x.grad, *(parameter.grad.clone() for parameter in mlp.parameters())])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)


def test_the_bias_changes_the_choice_and_not_the_weights() -> None:
    mlp = layer(router="sigmoid", router_bias=True, top_k=1, renormalize=False)
    assert mlp.router.bias is not None
    mlp.router.bias.copy_(torch.tensor([0.0, 0.0, 0.0, 5.0, 0.0, 0.0]))
    x = tokens()
    routes = mlp.router(x)
    assert (routes.experts == 3).all()
    torch.testing.assert_close(routes.weights, (x @ mlp.router.weight[3]).sigmoid().unsqueeze(-1))


def test_a_group_without_rows_gets_no_gradient() -> None:
    weight = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([2, 0, 4])
    assert torch.autograd.gradcheck(lambda x, weight: grouped_gemm(x, weight, counts), (x, weight))
    grouped_gemm(x, weight, counts).sum().backward()
    assert weight.grad is not None
    assert not weight.grad[1].any()
    assert weight.grad[0].any()


def test_a_missing_kernel_is_reported_with_a_reason() -> None:
    assert why_not_grouped(torch.bfloat16, 2048, 4096) is None
    assert why_not_grouped(torch.float32, 2048, 4096) == "the grouped kernel multiplies bf16, not float32"
    assert why_not_grouped(torch.bfloat16, 2048, 100) == "the grouped kernel wants widths that are multiples of 8, not 100"
    assert not has_grouped_kernel(torch.zeros(1, 8, dtype=torch.bfloat16), 8, 8)  # on a CPU


def balance_of(mlp: MixtureOfExperts, x: Tensor) -> Tensor:
    """Experts · Σ fraction · mean probability, summed over sequences; differentiable."""
    moe = mlp.router.moe
    scores = x @ mlp.router.weight.t()
    scores = scores.sigmoid() if moe.router == "sigmoid" else scores.softmax(-1)
    probabilities = scores / scores.sum(-1, keepdim=True)
    selected = torch.nn.functional.one_hot(mlp.router(x).experts, moe.experts).sum(2).double()
    fractions = selected.mean(1) / moe.top_k
    return moe.experts * (fractions * probabilities.mean(1)).sum()


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_balance_loss_is_reported_and_has_a_gradient(router: str) -> None:
    mlp, x = layer(router=router), tokens()
    mlp.router.balance_grad = torch.tensor(0.3)
    mlp(x).sum().backward()
    assert mlp.router.weight.grad is not None
    pulled = mlp.router.weight.grad.clone()
    stats = mlp.router.pop_stats()
    wanted = balance_of(mlp, x)
    assert stats[-2].item() == pytest.approx(wanted.item(), rel=1e-6)
    assert stats[:-2].sum() == 3 * 7 * 2
    mlp.zero_grad()
    mlp.router.balance_grad = None
    (mlp(x).sum() + 0.3 * wanted).backward()
    torch.testing.assert_close(pulled, mlp.router.weight.grad, rtol=1e-6, atol=1e-9)


def test_even_choices_have_a_balance_loss_of_one() -> None:
    mlp = layer(top_k=6)  # every expert is selected
    mlp(tokens()).sum().backward()
    assert mlp.router.pop_stats()[-2].item() == pytest.approx(3.0)  # three sequences


def test_recomputed_forwards_and_evaluations_are_not_counted() -> None:
    mlp, x = layer(), tokens()
    with torch.no_grad():
        mlp(x)
    assert not mlp.router.pop_stats().any()
    torch.utils.checkpoint.checkpoint(mlp, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert mlp.router.pop_stats()[:-2].sum() == 3 * 7 * 2
    assert not mlp.router.pop_stats().any()


def test_a_full_expert_drops_the_later_tokens() -> None:
    """A factor of 0.5 gives each of 6 experts one of a sequence's 7 · 2 choices."""
    mlp, x = layer(), tokens()
    assert mlp.router.moe.capacity(7, 0.5) == 1
    mlp.router.capacity_factor = 0.5
    routes = mlp.router(x)
    assert routes.kept is not None
    for experts, kept in zip(routes.experts.flatten(1).tolist(), routes.kept.flatten(1).tolist(), strict=True):
        assert kept == [expert not in experts[:place] for place, expert in enumerate(experts)]
    out = mlp(x)
    out.sum().backward()
    assert mlp.router.pop_stats()[-1] == (~routes.kept).sum() > 0
    dropped = ~routes.kept.any(-1)
    assert dropped.any()
    assert not out[dropped].any()
    mlp.router.capacity_factor = 6.0  # room for everybody
    wide = mlp(x)
    mlp.router.capacity_factor = None
    torch.testing.assert_close(wide, mlp(x))


def test_a_dropped_choice_dispatches_no_token() -> None:
    """Rows, sums and both gradients against a loop over what is kept."""
    generator = torch.Generator().manual_seed(2)
    experts = torch.randint(0, 3, (5, 2), generator=generator)
    kept = torch.rand(5, 2, generator=generator) < 0.7
    assert 0 < kept.sum() < 10
    tokens = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    order = ExpertPermutation.sort(experts, kept, 3)
    names = experts.flatten()[order.sorted].tolist()
    assert names == sorted(names)
    assert len(names) == kept.sum()
    found = order.unpermute(order.permute(tokens) * 3, weights)
    wanted = 3 * tokens * (weights * kept).sum(1, keepdim=True)
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(out.sin().sum(), (tokens, weights)) for out in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_bf16_tokens_are_scored_in_fp32_without_a_copy_in_fp32() -> None:
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    found, wanted = _BF16GemmToFP32.apply(x, weight), x.float() @ weight.float().t()  # type: ignore[no-untyped-call]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted)
    for mine, plain in zip(*(torch.autograd.grad(out.sin().sum(), (x, weight)) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(mine.float(), plain.float(), rtol=2**-7, atol=2**-7)


def test_gradients_of_scores_are_not_rounded_to_bf16() -> None:
    """(1 + 2⁻⁹) · 1 − 1 · 1: in bf16 the two factors are equal."""
    x = torch.tensor([[1.0], [-1.0]]).bfloat16()
    weight = torch.ones(1, 1).bfloat16().requires_grad_()
    (gradient,) = torch.autograd.grad(_BF16GemmToFP32.apply(x, weight), weight, torch.tensor([[1 + 2**-9], [1.0]]))  # type: ignore[no-untyped-call]
    assert gradient.item() == 2**-9


def test_half_precision_routes_in_single() -> None:
    mlp = layer().bfloat16()
    out = mlp(tokens().bfloat16())
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert mlp.router.pop_stats().dtype == torch.float32


def test_the_capacity_rounds_down() -> None:
    moe = MoE(experts=8, top_k=2, expert_ffn=4)
    assert [moe.capacity(64, factor) for factor in (1.0, 1.3, 0.01)] == [16, 20, 0]
