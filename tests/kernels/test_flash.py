"""FlashAttention 4 as operators of torch: its kernels run on a GPU alone, so that torch's own stand in for them here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.harness import job_of
from ultrascale.kernels import flash, fused, optional_kernels
from ultrascale.kernels.optional_kernels import FLASH_ATTENTION_4
from ultrascale.measure import rehearse_tracker as operator_tracker
from ultrascale.model.attention import attend, attend_backward, causal_attention
from ultrascale.model.self_attention import CausalAttention
from ultrascale.model.transformer import Transformer
from ultrascale.parallel import recompute


class Package:
    """What `flash_attn.cute.interface` has of use here, with the arguments that it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _flash_attn_fwd(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool) -> tuple[Tensor | None, ...]:
        assert causal
        assert return_lse
        self.calls.append("forward")
        out, sums = attend(q, k, v, True, q.shape[-1] ** -0.5)
        return out.contiguous(), sums, None, None, None

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad: Tensor, sums: Tensor, *, causal: bool, deterministic: bool,
        dq: Tensor, dk: Tensor, dv: Tensor,
    ) -> None:  # fmt: skip
        assert causal
        assert grad.is_contiguous()
        self.calls.append("backward, the same every time" if deterministic else "backward")
        for into, found in zip((dq, dk, dv), attend_backward(grad, q, k, v, out, sums, True, q.shape[-1] ** -0.5), strict=True):
            into.copy_(found)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Package:
    fake = Package()
    monkeypatch.setattr(flash, "_package", lambda: fake)
    return fake


def numbers(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 24, heads, 16, generator=generator).to(dtype).requires_grad_() for heads in (4, 2, 2)]


def results(attention: Any, inputs: list[Tensor]) -> list[Tensor]:
    out = attention(*inputs)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad(out, inputs, grad.transpose(1, 2).contiguous().transpose(1, 2))]  # of any layout


def test_output_and_gradients_are_those_of_plain_attention(package: Package) -> None:
    plain = results(lambda q, k, v: causal_attention(q, k, v, 16**-0.5), numbers())
    for found, wanted in zip(results(flash.attend, numbers()), plain, strict=True):
        torch.testing.assert_close(found, wanted)
    assert package.calls == ["forward", "backward"]


def test_torch_agrees_that_these_are_operators(package: Package) -> None:
    """Their shapes without numbers, their gradients' registration, and that they change nothing they are given."""
    torch.library.opcheck(flash._forward, tuple(numbers()))


def test_it_compiles_without_graph_breaks(package: Package) -> None:
    compiled = torch.compile(flash.attend, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(results(compiled, numbers()), results(flash.attend, numbers()), strict=True):
        torch.testing.assert_close(found, wanted)


def test_torchs_deterministic_mode_is_respected(package: Package) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        results(flash.attend, numbers())
    finally:
        torch.use_deterministic_algorithms(False)
    assert package.calls[-1] == "backward, the same every time"


@pytest.mark.parametrize(
    ("blocks", "policy"), [("plain", "none"), ("plain", "selective"), ("plain", "full"), ("fused", "none")]
)
def test_a_model_with_flash_attention_trains_equally(package: Package, blocks: str, policy: Any) -> None:
    """And selective recomputation keeps its output: attention runs once."""
    spec = job_of("llama").model

    def gradients(kernel: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = Transformer(spec)
        if blocks == "fused":
            fused.apply(model)
        for module in model.modules():
            if isinstance(module, CausalAttention):
                module.kernel = kernel
        recompute.apply(model, policy)
        tokens = torch.randint(spec.vocab, (2, 24), generator=torch.Generator().manual_seed(2))
        loss = model(tokens, torch.arange(24)).square().mean()
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    wanted = gradients(None)
    for found, other in zip(gradients(flash.attend), wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-6)
    assert package.calls.count("forward") == spec.layers * (2 if policy == "full" else 1)
    assert package.calls.count("backward") == spec.layers


def test_only_causal_attention_uses_the_kernel(package: Package) -> None:
    core = CausalAttention()
    core.kernel = flash.attend
    q, k, v = (x.to("meta") for x in numbers(torch.bfloat16))
    assert core(q, k, v).shape == q.shape
    assert core(q, k, v, torch.zeros(1, 1, 24, 24, device="meta")).shape == q.shape
    windowed = CausalAttention(sliding_window=4)
    windowed.kernel = flash.attend
    assert windowed(q, k, v).shape == q.shape
    assert package.calls == []


def test_its_flops_count_as_those_of_any_attention(package: Package) -> None:
    class FlopCounter(TorchDispatchMode):
        flops = 0.0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func._overloadpacket in operator_tracker._ATTENTION:
                formula = operator_tracker._formula(func)
                assert formula is not None
                self.flops += formula(args, kwargs or {}, out)
            return out

    counts = []
    for attention in (flash.attend, lambda q, k, v: causal_attention(*(x for x in (q, k, v)), 16**-0.5)):
        with FlopCounter() as counter:
            results(attention, numbers())
        counts.append(counter.flops)
    forward = 2 * 2 * 4 * 24 * 24 * 16  # two matmuls over half of the pairs
    assert counts == [2 * forward + forward] * 2


def test_reasons_not_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_kernels, "installed", lambda _: False)
    assert FLASH_ATTENTION_4.why_not(torch.bfloat16) == "flash-attn-4 is not installed"
    monkeypatch.setattr(optional_kernels, "installed", lambda _: True)
    assert FLASH_ATTENTION_4.why_not(torch.bfloat16) is None
    assert "float32" in (FLASH_ATTENTION_4.why_not(torch.float32) or "")
