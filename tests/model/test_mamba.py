"""Mamba-2: chunks of any length against the recurrence, token by token."""

from __future__ import annotations

import pytest
import torch

from ultrascale.model.mamba import GatedGroupNorm, state_space


def recurrence(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, step: torch.Tensor, log_decay: torch.Tensor, skip: torch.Tensor
) -> torch.Tensor:
    b, c = (one.repeat_interleave(x.shape[2] // b.shape[2], 2) for one in (b, c))
    state = x.new_zeros(x.shape[0], x.shape[2], b.shape[-1], x.shape[-1])
    outputs = []
    for token in range(x.shape[1]):
        written = torch.einsum("bhn,bhp->bhnp", b[:, token] * step[:, token, :, None], x[:, token])
        state = state * log_decay[:, token].exp()[..., None, None] + written
        outputs.append(torch.einsum("bhn,bhnp->bhp", c[:, token], state) + skip[:, None] * x[:, token])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (16, 16), (37, 8), (150, 64)])
def test_chunks_compute_the_recurrence(length: int, chunk: int) -> None:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    inputs = [draw(2, length, 6, 5), draw(2, length, 3, 7), draw(2, length, 3, 7)]
    inputs += [draw(2, length, 6).abs(), -draw(2, length, 6).abs(), draw(6)]
    mine, wanted = ([one.clone().requires_grad_() for one in inputs] for _ in range(2))
    (out, _), expected = state_space(*mine, chunk=chunk), recurrence(*wanted)
    torch.testing.assert_close(out, expected)
    gradient = draw(*out.shape)
    out.backward(gradient)
    expected.backward(gradient)
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_decays_over_a_whole_chunk_stay_finite() -> None:
    """exp of the sum of decays underflows; its inverse would overflow."""
    x, b, c = (torch.randn(1, 128, 2, 4) for _ in range(3))
    step = torch.full((1, 128, 2), 40.0, requires_grad=True)
    out, _ = state_space(x, b, c, step, -step, torch.ones(2))
    out.sum().backward()
    assert out.isfinite().all()
    assert step.grad is not None
    assert step.grad.isfinite().all()


def test_each_group_of_channels_has_its_own_mean_square() -> None:
    norm = GatedGroupNorm(12, 4, 1e-5)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(12.0))
    x, gate = torch.randn(2, 3, 12), torch.randn(2, 3, 12)
    gated = x * gate * gate.sigmoid()
    parts = [part / (part.square().mean(-1, keepdim=True) + 1e-5).sqrt() for part in gated.split(4, -1)]
    torch.testing.assert_close(norm(x, gate), torch.cat(parts, -1) * torch.arange(12.0))
