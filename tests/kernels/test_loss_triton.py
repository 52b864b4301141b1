"""The loss's Triton kernels against their plain twins, by Triton's interpreter where there is no GPU."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from ultrascale.kernels import loss
from ultrascale.model.transformer import IGNORE_INDEX

# Before anything imports Triton: test_interpreted.py starts this file so.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="no GPU, and Triton does not interpret")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("ultrascale.kernels.loss_triton")
    monkeypatch.setattr(module, "BLOCK", 64)
    return module


def plain_losses(logits: torch.Tensor, targets: torch.Tensor, z_loss: float) -> torch.Tensor:
    """Of each token."""
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="none")
    squares = logits.logsumexp(-1).square() * (targets != IGNORE_INDEX)
    return torch.stack((loss, z_loss * squares), dim=-1) if z_loss else loss


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("vocab", [2, 64, 150])
def test_loss_and_gradient(vocab: int, z_loss: float, kernel: ModuleType) -> None:
    """Rows of less than a block, of one, and of two and a part; targets at both ends, and one that is ignored."""
    logits = (torch.randn(4, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(DEVICE)
    targets = torch.tensor([0, vocab - 1, IGNORE_INDEX, vocab // 2], device=DEVICE)
    reference = logits.clone().requires_grad_()
    wanted = plain_losses(reference, targets, z_loss)
    wanted.sum().backward()
    losses = torch.empty_like(wanted)
    kernel.loss_and_gradient_(logits, targets, losses, z_loss)
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits, reference.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("vocab", [6, 64 * 3, 150 * 3])
def test_statistics_and_gradient_of_a_cut_vocabulary(vocab: int, z_loss: float, kernel: ModuleType) -> None:
    """Three parts; targets in each of them, and one that is ignored."""
    logits = (torch.randn(4, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(DEVICE)
    targets = torch.tensor([0, vocab - 1, IGNORE_INDEX, vocab // 2], device=DEVICE)
    parts, width = [part.contiguous() for part in logits.chunk(3, dim=1)], vocab // 3
    plain = [loss.shard_statistics(part.cpu(), targets.cpu(), first * width) for first, part in enumerate(parts)]
    found = [kernel.shard_statistics(part, targets, first * width) for first, part in enumerate(parts)]
    reference = logits.clone().requires_grad_()
    wanted = plain_losses(reference, targets, z_loss)
    wanted.sum().backward()
    for first, part in enumerate(parts):
        torch.testing.assert_close(found[first].cpu(), plain[first], rtol=1e-6, atol=1e-6)
        losses = torch.empty_like(wanted)
        kernel.shard_gradient_(part, targets, first * width, torch.stack(found), losses, z_loss)
        torch.testing.assert_close(losses, wanted.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(part, reference.grad.chunk(3, dim=1)[first], rtol=1e-6, atol=1e-6)  # type: ignore[union-attr]


def test_scaled(kernel: ModuleType) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    torch.testing.assert_close(kernel.scaled(x, torch.tensor(0.3, device=DEVICE), torch.float32), 0.3 * x)
