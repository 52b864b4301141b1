"""The gated delta rule: chunks of any length against its recurrence, token by token."""

from __future__ import annotations

import pytest
import torch

from ultrascale.model.linear_attention import NORM_EPS, gated_delta_rule


def recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    repeats = v.shape[2] // q.shape[2]
    q, k = (one / (one.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for one in (q, k))
    q, k = (one.repeat_interleave(repeats, 2) for one in (q * q.shape[-1] ** -0.5, k))
    state = v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    outputs = []
    for token in range(v.shape[1]):
        state = state * log_decay[:, token].exp()[..., None, None]
        answer = torch.einsum("bhk,bhkv->bhv", k[:, token], state)
        change = step[:, token, :, None] * (v[:, token] - answer)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, token], change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, token], state))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(("length", "chunk"), [(1, 64), (16, 16), (37, 8), (150, 64)])
def test_chunks_compute_the_recurrence(length: int, chunk: int) -> None:
    generator = torch.Generator().manual_seed(length)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    inputs = [draw(2, length, 3, 5), draw(2, length, 3, 5), draw(2, length, 6, 7)]
    inputs += [-draw(2, length, 6).abs(), draw(2, length, 6).sigmoid()]
    mine, wanted = ([one.clone().requires_grad_() for one in inputs] for _ in range(2))
    out, expected = gated_delta_rule(*mine, chunk=chunk), recurrence(*wanted)
    torch.testing.assert_close(out, expected)
    gradient = draw(*out.shape)
    out.backward(gradient)
    expected.backward(gradient)
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_decays_over_a_whole_chunk_stay_finite() -> None:
    """exp of the sum of decays underflows; its inverse would overflow."""
    q, k, v = (torch.randn(1, 128, 2, 4) for _ in range(3))
    log_decay = torch.full((1, 128, 2), -40.0, requires_grad=True)
    out = gated_delta_rule(q, k, v, log_decay, torch.full((1, 128, 2), 0.5))
    out.sum().backward()
    assert out.isfinite().all()
    assert log_decay.grad is not None
    assert log_decay.grad.isfinite().all()
