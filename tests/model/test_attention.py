"""Attention with its log-sum-exp against the textbook formula, in every layout that callers use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ultrascale.model import attention
from ultrascale.model.attention import attend, attend_backward, causal_attention

SHAPES = [(True, 70, 70, 8, 2), (True, 5, 5, 3, 3), (False, 37, 11, 4, 1), (False, 8, 130, 6, 2)]


def textbook(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if causal:
        scores = scores + torch.full_like(scores, float("-inf")).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


def draw(queries: int, keys: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, queries, heads, 16), (2, keys, kv_heads, 16), (2, keys, kv_heads, 16)]
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("path", ["cpu kernel", "plain"])
@pytest.mark.parametrize(("causal", "queries", "keys", "heads", "kv_heads"), SHAPES)
def test_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, path: str, causal: bool, queries: int, keys: int, heads: int, kv_heads: int
) -> None:
    if path == "plain":  # what fp32 takes on a GPU, here in place of the CPU's kernel
        forward, backward = attention._plain, attention._plain_backward
        kernel = "_scaled_dot_product_flash_attention_for_cpu"
        monkeypatch.setattr(attention.aten, kernel, lambda *x, scale: forward(*x[:3], x[4], scale))
        monkeypatch.setattr(attention.aten, f"{kernel}_backward", lambda *x, scale: backward(*x[:6], x[7], scale))
    inputs = draw(queries, keys, heads, kv_heads)
    expected, expected_lse = textbook(*inputs, causal, 0.3)
    grad_out = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, grad_out)
    with torch.no_grad():
        out, lse = attend(*inputs, causal, 0.3)
        given = attend_backward(grad_out, *inputs, out, lse.contiguous(), causal, 0.3)
    for left, right in zip((out, lse, *given), (expected, expected_lse, *wanted), strict=True):
        torch.testing.assert_close(left, right)


def test_partial_outputs_merge_by_their_log_sum_exp() -> None:
    q, k, v = draw(6, 20, 4, 2)
    whole, lse = textbook(q, k, v, False, 0.25)
    with torch.no_grad():
        parts = [attend(q, k[:, cut], v[:, cut], False, 0.25) for cut in (slice(0, 7), slice(7, 20))]
        joined_lse = torch.stack([part for _, part in parts]).logsumexp(0)
        joined = sum(out * (part - joined_lse).exp().transpose(1, 2).unsqueeze(-1) for out, part in parts)
        torch.testing.assert_close(joined_lse, lse)
        torch.testing.assert_close(joined, whole)
        grad_out = torch.randn_like(whole)
        pieces = [
            attend_backward(grad_out, q, k[:, cut], v[:, cut], joined, joined_lse, False, 0.25)
            for cut in (slice(0, 7), slice(7, 20))
        ]
    dq, dk, dv = torch.autograd.grad(whole, (q, k, v), grad_out)
    torch.testing.assert_close(pieces[0][0] + pieces[1][0], dq)
    torch.testing.assert_close(torch.cat((pieces[0][1], pieces[1][1]), 1), dk)
    torch.testing.assert_close(torch.cat((pieces[0][2], pieces[1][2]), 1), dv)


def test_log_sum_exp_is_fp32_in_half_precision() -> None:
    q, k, v = draw(4, 4, 4, 2, torch.bfloat16)
    out, lse = attend(q.detach(), k.detach(), v.detach(), True, 0.25)
    assert (out.dtype, lse.dtype, lse.shape) == (torch.bfloat16, torch.float32, (2, 4, 4))


def test_causal_attention_passes_a_gradient_check() -> None:
    inputs = [x[:1, :, :, :2].detach().requires_grad_() for x in draw(5, 5, 4, 2)]
    assert torch.autograd.gradcheck(lambda q, k, v: causal_attention(q, k, v, 0.5), inputs)
