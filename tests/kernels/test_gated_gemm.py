"""Gates within matmuls: quack runs on a GPU alone, so that plain formulas of what it promises stand in for it here."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.test_fused import built, train_alike
from ultrascale.kernels import fused, gated_gemm, optional_kernels
from ultrascale.kernels.optional_kernels import QUACK
from ultrascale.measure import rehearse_tracker as operator_tracker


class Quack:
    """Its two matmuls, and the arguments of their calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def gemm_gated(
        self, x: Tensor, weight: Tensor, *, activation: str, concat_layout: tuple[str, ...], config: Any, tuned: bool
    ) -> tuple[Tensor, Tensor]:
        """Of a weight [h, 2·f] whose gates come before its ups."""
        assert (activation, concat_layout, tuned) == ("swiglu", ("B",), False)
        self.calls.append(("forward", config))
        opened, up = (x @ weight).chunk(2, dim=-1)
        return torch.stack((opened, up), dim=-1).flatten(-2), F.silu(opened) * up

    def gemm_dgated(
        self, grad: Tensor, weight: Tensor, both: Tensor, *, activation: str, config: Any, tuned: bool
    ) -> tuple[Tensor, Tensor]:
        assert (activation, tuned) == ("swiglu", False)
        self.calls.append(("backward", config))
        opened, up = both.unflatten(-1, (-1, 2)).unbind(-1)
        to_gated = grad @ weight
        to_opened = torch.ops.aten.silu_backward(to_gated * up, opened)
        return torch.stack((to_opened, to_gated * F.silu(opened)), dim=-1).flatten(-2), F.silu(opened) * up


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Quack:
    fake = Quack()
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", fake)
    monkeypatch.setitem(sys.modules, "quack.gemm_config", SimpleNamespace(GemmConfig=lambda **fields: fields))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return fake


@pytest.mark.parametrize("joined", [False, True])
def test_a_block_with_gated_gemms_equals_the_plain_block(quack: Quack, joined: bool) -> None:
    """In float64: losses and every gradient."""
    plain, ours = built(), built()
    fused.apply(ours)
    if joined:
        fused.join(ours)
    for block in ours.each_block():
        assert isinstance(block, fused.FusedBlock)
        block.mlp_kernel = gated_gemm.GatedGemmKernel()
    train_alike(plain, ours)
    assert [direction for direction, _ in quack.calls] == ["forward"] * 2 + ["backward"] * 2


def test_gradients_of_both_weights_are_contiguous(quack: Quack) -> None:
    """As one-pass AdamW reads them."""
    gates, numbers = gated_gemm.GatedGemmKernel(), torch.Generator().manual_seed(0)
    x, to_both = (torch.randn(5, width, generator=numbers) for width in (8, 12))
    to_gate, to_up = gates.grad_weights(to_both, x)
    assert to_gate.is_contiguous()
    assert to_up.is_contiguous()
    torch.testing.assert_close(to_gate, to_both[:, ::2].t() @ x)
    torch.testing.assert_close(to_up, to_both[:, 1::2].t() @ x)


def test_tile_sizes_are_measured_on_hopper_and_quacks_default_elsewhere(quack: Quack, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 8), torch.randn(12, 8)
    both, _ = gated_gemm._forward(x, weight)
    gated_gemm._backward(x, torch.randn(8, 6), both)
    assert [(config["tile_m"], config["tile_n"]) for _, config in quack.calls] == [(128, 192), (128, 128)]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    gated_gemm._forward(x, weight)
    assert quack.calls[-1] == ("forward", None)


def test_torch_agrees_that_these_are_operators(quack: Quack) -> None:
    x, weight = torch.randn(4, 8), torch.randn(12, 8)
    torch.library.opcheck(gated_gemm._forward, (x, weight))
    torch.library.opcheck(gated_gemm._backward, (x, torch.randn(8, 6), torch.randn(4, 12)))


def test_flops_are_those_of_the_matmuls(quack: Quack) -> None:
    x, weight, down, both = torch.randn(4, 8), torch.randn(12, 8), torch.randn(8, 6), torch.randn(4, 12)
    forward, backward = (operator_tracker._formula(packet.default) for packet in (gated_gemm.FORWARD, gated_gemm.BACKWARD))
    assert forward is not None
    assert backward is not None
    assert forward((x, weight), {}, None) == 2 * 4 * 8 * 12
    assert backward((x, down, both), {}, None) == 2 * 4 * 8 * 6


def test_reasons_not_to_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional_kernels, "installed", lambda _: False)
    assert QUACK.why_not(torch.bfloat16) == "quack-kernels is not installed"
    monkeypatch.setattr(optional_kernels, "installed", lambda _: True)
    assert QUACK.why_not(torch.bfloat16) is None
    assert "float32" in (QUACK.why_not(torch.float32) or "")
