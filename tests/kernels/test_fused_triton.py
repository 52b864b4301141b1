"""The fused block's Triton kernels against their plain twins, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ultrascale.kernels import fused

# Before anything imports Triton: test_interpreted.py starts this file so.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="no GPU, and Triton does not interpret")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("ultrascale.kernels.fused_triton")
    monkeypatch.setattr(module, "BLOCK", 32)
    return module


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [64, 48])
@pytest.mark.parametrize("adds", [True, False])
def test_norm(width: int, adds: bool, kernels: ModuleType) -> None:
    x, weight = numbers(7, width), numbers(width, seed=1)
    added = numbers(7, width, seed=2) if adds else None
    found = kernels.norm(x.to(DEVICE), None if added is None else added.to(DEVICE), weight.to(DEVICE), 1e-5)
    same(found, fused.norm(x, added, weight, 1e-5))


@pytest.mark.parametrize(("rows", "width"), [(64, 64), (21, 48), (3, 48)])
def test_norm_backward(rows: int, width: int, kernels: ModuleType) -> None:
    """As many rows for each program, some with fewer, and fewer rows than programs."""
    grad, x, residual = (numbers(rows, width, seed=seed) for seed in range(3))
    weight, scales = numbers(width, seed=3), numbers(rows, seed=4).abs()
    arguments = (grad, x, scales, weight, residual)
    same(kernels.norm_backward(*(one.to(DEVICE) for one in arguments)), fused.norm_backward(*arguments))


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1)])
def test_rotation(heads: int, kv_heads: int, factor: float, kernels: ModuleType) -> None:
    """Also by tables that YaRN's attention factor makes larger."""
    angles = numbers(5, 8).repeat(1, 2)
    rope = factor * angles.cos(), factor * angles.sin()
    there = tuple(table.to(DEVICE) for table in rope)
    qkv = numbers(10, heads + 2 * kv_heads, 16)
    wanted, found = qkv.clone(), qkv.to(DEVICE, copy=True)
    fused.rotate_(wanted, heads, kv_heads, rope)
    kernels.rotate_(found, heads, kv_heads, *there)
    same((found,), (wanted,))
    assert not torch.equal(wanted, qkv)
    parts = [part.contiguous() for part in torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)]
    same((kernels.rotate_back(*(part.to(DEVICE) for part in parts), *there),), (fused.rotate_back(*parts, rope),))


@pytest.mark.parametrize("width", [64, 80])
def test_gate(width: int, kernels: ModuleType) -> None:
    both, grad = 2 * numbers(5, 2 * width), numbers(5, width, seed=1)
    same((kernels.gate(both.to(DEVICE)),), (fused.gate(both),))
    same(kernels.gate_backward(grad.to(DEVICE), both.to(DEVICE)), fused.gate_backward(grad, both))


@pytest.mark.parametrize(("length", "dim"), [(40, 16), (33, 24)])
def test_merged_attention(length: int, dim: int, kernels: ModuleType) -> None:
    """Rows in the middle of a longer sequence; the tile's output is a transposed tensor, as attention returns it."""
    rows = slice(5, 5 + length)
    out, lse = numbers(2, length + 9, 3, dim), numbers(2, 3, length + 9, seed=1)
    tile, tile_lse = numbers(2, 3, length, dim, seed=2).transpose(1, 2), numbers(2, 3, length, seed=3)
    mine, my_lse = out.clone().to(DEVICE), lse.clone().to(DEVICE)
    kernels.merge_attention_(mine[:, rows], my_lse[:, :, rows], tile.to(DEVICE), tile_lse.to(DEVICE))
    fused.merge_attention_(out[:, rows], lse[:, :, rows], tile, tile_lse)
    same((mine, my_lse), (out, lse))
