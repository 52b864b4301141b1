"""The fp8 block's Triton kernels against their plain twins, by Triton's interpreter where there is no GPU.

The interpreter (3.7.1) loses the carry when it rounds to fp8, so there the kernels write fp16: what they read, scale, clamp,
transpose and leave out is the same.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ultrascale.kernels import float8, float8_block, float8_gemm, loss
from ultrascale.model.transformer import IGNORE_INDEX

# Before anything imports Triton: test_interpreted.py starts this file so.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
NARROW, WIDE = (float8_gemm.E4M3, float8_gemm.E5M2) if DEVICE == "cuda" else (torch.float16, torch.float16)
# What a GPU compiles differs by what it reads; the last size has full tiles alone, as a model's.
KINDS = (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,)
TILES = [(32, 64), (40, 48), *([(256, 512)] if DEVICE == "cuda" else [])]
FEW = {torch.float32: 0.01, torch.bfloat16: 0.05}  # in bf16 the reference rounds between its operators, too
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="no GPU, and Triton does not interpret")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("ultrascale.kernels.float8_triton")
    if DEVICE == "cpu":  # several tiles of small matrices; a GPU compiles those that training runs
        for name, size in {"ROWS": 16, "COLUMNS": 32}.items():
            monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(float8_block, "E4M3", NARROW)
    monkeypatch.setattr(float8_block, "E5M2", WIDE)
    return module


def numbers(*shape: int, seed: int = 0, size: float = 1.0, kind: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(kind)


def there(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def same(found: Tensor, wanted: Tensor, few: float = 0.01) -> None:
    """But for a few numbers that are neighbours, where the last bit before rounding differed."""
    actual, exact = found.cpu().float(), wanted.float()
    assert actual.shape == exact.shape
    assert (actual != exact).float().mean() < few
    torch.testing.assert_close(actual, exact, rtol=2 * torch.finfo(wanted.dtype).eps, atol=1e-3)


def same_operand(data: Tensor, scale: Tensor, wanted: float8_gemm.GemmOperand, few: float = 0.01) -> None:
    same(data, wanted.data, few)
    assert torch.equal(scale.cpu(), wanted.scale)


@pytest.mark.parametrize("width", [64, 48])
def test_cast_rows(width: int, kernels: ModuleType) -> None:
    x = numbers(7, width) * torch.logspace(-6, 3, 7).unsqueeze(1)
    same_operand(*kernels.cast_rows(x.to(DEVICE), NARROW), float8_block.cast_rows(x))


@pytest.mark.parametrize("width", [64, 48])
@pytest.mark.parametrize("adds", [True, False])
def test_norm_cast(width: int, adds: bool, kernels: ModuleType) -> None:
    x, gain, added = numbers(7, width), numbers(width, seed=1), numbers(7, width, seed=2) if adds else None
    other = None if added is None else added.to(DEVICE)
    total, out, scale, roots = kernels.norm_cast(x.to(DEVICE), other, gain.to(DEVICE), 1e-5, NARROW)
    wanted = float8_block.norm_cast(x, added, gain, 1e-5)
    same_operand(out, scale, wanted[1])
    torch.testing.assert_close(total.cpu(), wanted[0])
    torch.testing.assert_close(roots.cpu(), wanted[2])


@pytest.mark.parametrize("width", [64, 48])
def test_gate_cast(width: int, kernels: ModuleType) -> None:
    both = numbers(7, 2 * width, size=3.0)
    out, scale, inputs = kernels.gate_cast(both.to(DEVICE), NARROW)
    wanted, of_both = float8_block.gate_cast(both)
    same_operand(out, scale, wanted)
    assert float(inputs.amax()) == float(of_both)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_casts_of_tiles(rows: int, columns: int, kind: torch.dtype, kernels: ModuleType) -> None:
    x = numbers(rows, columns, size=3e-4, kind=kind)
    largest = float8_block.amax(x)
    same_operand(*kernels.cast_transposed(*there(x, largest), NARROW), float8_block.cast_transposed(x, largest))
    out, turned, scale = kernels.cast_and_transpose(*there(x, largest), WIDE)
    kept, other = float8_block.cast_and_transpose(x)
    same_operand(out, scale, kept)
    same_operand(turned, scale, other)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_a_norm_is_recomputed_transposed(rows: int, columns: int, kind: torch.dtype, kernels: ModuleType) -> None:
    x, gain = numbers(rows, columns, kind=kind), numbers(columns, seed=1, kind=kind)
    _, normed, roots = float8_block.norm_cast(x, None, gain, 1e-5)
    largest = float8_block.amax_bound(normed)
    turned, scale = kernels.cast_transposed(*there(x, largest), NARROW, norm=tuple(there(roots, gain)))
    _, _, wanted = float8_block.norm_backward_cast(torch.zeros_like(x), x, roots, gain, x, largest)
    same_operand(turned, scale, wanted, FEW[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), TILES)
def test_a_cast_that_is_not_transposed(rows: int, columns: int, kind: torch.dtype, kernels: ModuleType) -> None:
    """Of a gradient, and of a norm that is computed again."""
    x, gain = numbers(rows, columns, kind=kind), numbers(columns, seed=1, kind=kind)
    _, normed, roots = float8_block.norm_cast(x, None, gain, 1e-5)
    for largest, dtype, norm in ((float8_block.amax(x), WIDE, None), (float8_block.amax_bound(normed), NARROW, (roots, gain))):
        on_device = None if norm is None else tuple(there(*norm))
        found = kernels.cast(*there(x, largest), dtype, on_device)
        same_operand(*found, float8_block.cast(x, largest, dtype, norm), FEW[kind] if norm else 0.01)


@pytest.mark.parametrize(("rows", "columns"), [*TILES, (130, 129)])
def test_transpose(rows: int, columns: int, kernels: ModuleType) -> None:
    """To columns of a matrix, whose others stay as they are."""
    x = torch.randint(256, (rows, columns), dtype=torch.uint8)
    whole = torch.full((columns, rows + 7), 3, dtype=torch.uint8, device=DEVICE)
    kernels.transpose(x.to(DEVICE), whole[:, 2 : 2 + rows])
    assert torch.equal(whole[:, 2 : 2 + rows].cpu(), x.t())
    assert bool((whole[:, :2] == 3).all())
    assert bool((whole[:, 2 + rows :] == 3).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "width"), TILES)
def test_gate_backward_cast(rows: int, width: int, kind: torch.dtype, kernels: ModuleType) -> None:
    grad, both = numbers(rows, width, size=1e-5, kind=kind), numbers(rows, 2 * width, seed=1, kind=kind)
    gated, of_both = float8_block.gate_cast(both)
    scales = float8_block.amax(grad), of_both, float8_block.amax_bound(gated)
    kept, turned, again, scale, gated_scale = kernels.gate_backward_cast(*there(grad, both, *scales), (WIDE, NARROW))
    wanted = float8_block.gate_backward_cast(grad, both, *scales[1:])
    for data, of_data, operand in zip((kept, turned, again), (scale, scale, gated_scale), wanted, strict=True):
        same_operand(data, of_data, operand, FEW[kind])


def test_nan_propagates(kernels: ModuleType) -> None:
    x = numbers(16, 32)
    x[3, 5], x[4, 6] = float("nan"), float("inf")
    (x,) = there(x)
    rows, scale = kernels.cast_rows(x, NARROW)
    broken = torch.zeros(16, 32, dtype=torch.bool, device=DEVICE)
    broken[3, 5] = broken[4] = True
    assert torch.equal(~torch.isfinite(rows.float() * scale), broken)
    turned, _ = kernels.cast_transposed(x, torch.ones((), device=DEVICE), NARROW)
    assert torch.isnan(turned.float()[5, 3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [32, 80, *([512] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_gradient_of_logits(z_loss: float, vocab: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the columns of others' gradients, which stay as they are."""
    module = importlib.import_module("ultrascale.kernels.loss_triton")
    if DEVICE == "cpu":
        for name, size in {"BLOCK": 64, "ROWS": 16, "COLUMNS": 32}.items():
            monkeypatch.setattr(module, name, size)
    logits, targets = numbers(24, vocab, size=3.0, kind=kind), torch.arange(24)
    targets[[3, 7]] = IGNORE_INDEX
    turned, wanted_turned = (torch.ones(vocab, 56, dtype=WIDE, device=device) for device in (DEVICE, "cpu"))
    wanted_losses = loss.empty_losses(24, torch.empty(0), z_loss)
    losses = torch.empty_like(wanted_losses, device=DEVICE)
    # fp16 holds numbers up to twice the factor, as e5m2 does.
    found = module.loss_and_scaled_gradient(*there(logits, targets), losses, float8.FACTOR, turned[:, 16:40], z_loss)
    wanted = float8.scaled_gradient(logits, targets, wanted_losses, wanted_turned[:, 16:40], z_loss)
    torch.testing.assert_close(losses.cpu(), wanted_losses)
    same(found, wanted, FEW[kind])
    same(turned, wanted_turned, FEW[kind])
    assert not found[[3, 7]].float().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [96, *([512] if DEVICE == "cuda" else [])])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_gradient_of_logits_of_a_cut_vocabulary(
    z_loss: float, vocab: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts; targets in each of them, and two that are ignored."""
    module = importlib.import_module("ultrascale.kernels.loss_triton")
    if DEVICE == "cpu":
        for name, size in {"BLOCK": 64, "ROWS": 16, "COLUMNS": 32}.items():
            monkeypatch.setattr(module, name, size)
    logits, targets = numbers(24, vocab, size=3.0, kind=kind), torch.arange(24) * (vocab // 24)
    targets[[3, 7]] = IGNORE_INDEX
    parts, width = [part.contiguous() for part in logits.chunk(2, dim=1)], vocab // 2
    statistics = torch.stack([loss.shard_statistics(part, targets, number * width) for number, part in enumerate(parts)])
    for number, part in enumerate(parts):
        first, wanted_losses, wanted_turned = (
            number * width,
            loss.empty_losses(24, statistics, z_loss),
            torch.ones(width, 56, dtype=WIDE),
        )
        wanted = float8.shard_scaled_gradient(part, targets, first, statistics, wanted_losses, wanted_turned[:, 16:40], z_loss)
        here, statistics_here = there(targets, statistics)
        losses, turned = torch.empty_like(wanted_losses, device=DEVICE), torch.ones(width, 56, dtype=WIDE, device=DEVICE)
        log_sum = loss.shard_loss(statistics_here, here, losses, z_loss)
        counts, columns = here != IGNORE_INDEX, turned[:, 16:40]
        found = module.scaled_gradient(part.to(DEVICE), here - first, log_sum, counts, float8.FACTOR, columns, z_loss)
        torch.testing.assert_close(losses.cpu(), wanted_losses)
        same(found, wanted, FEW[kind])
        same(turned, wanted_turned, FEW[kind])
        assert not found[[3, 7]].float().any()
