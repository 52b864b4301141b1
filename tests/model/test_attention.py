"""Attention with its log-sum-exp against the textbook formula, in every layout that callers use."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ultrascale.model import attention
from ultrascale.model.attention import attend, attend_backward, causal_attention
from ultrascale.model.self_attention import window_bias

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


def replace_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fp32 takes on a GPU, in place of the CPU's kernel."""
    forward, backward, kernel = attention._plain, attention._plain_backward, "_scaled_dot_product_flash_attention_for_cpu"
    monkeypatch.setattr(attention.aten, kernel, lambda *x, attn_mask, scale: forward(*x[:3], x[4], scale, attn_mask))
    monkeypatch.setattr(
        attention.aten, f"{kernel}_backward", lambda *x, attn_mask, scale: backward(*x[:6], x[7], scale, attn_mask)
    )


@pytest.mark.parametrize("path", ["cpu kernel", "plain"])
@pytest.mark.parametrize(("causal", "queries", "keys", "heads", "kv_heads"), SHAPES)
def test_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, path: str, causal: bool, queries: int, keys: int, heads: int, kv_heads: int
) -> None:
    if path == "plain":
        replace_kernel(monkeypatch)
    inputs = draw(queries, keys, heads, kv_heads)
    expected, expected_lse = textbook(*inputs, causal, 0.3)
    grad_out = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, grad_out)
    with torch.no_grad():
        out, lse = attend(*inputs, causal, 0.3)
        given = attend_backward(grad_out, *inputs, out, lse.contiguous(), causal, 0.3)
    for left, right in zip((out, lse, *given), (expected, expected_lse, *wanted), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("path", ["cpu kernel", "plain"])
@pytest.mark.parametrize("window", [None, 5])
def test_sinks_join_the_softmax_of_their_head(monkeypatch: pytest.MonkeyPatch, path: str, window: int | None) -> None:
    """Each row of scores has one more column, whose probability is dropped."""
    if path == "plain":
        replace_kernel(monkeypatch)
    length = 20
    q, k, v = draw(length, length, 4, 2)
    sinks = torch.randn(4, dtype=q.dtype, requires_grad=True)
    bias = window_bias(length, window or length, q.dtype, q.device)
    keys, values = (one.repeat_interleave(2, 2).transpose(1, 2) for one in (k, v))
    scores = q.transpose(1, 2) @ keys.mT * 0.3 + bias
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    expected = (torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ values).transpose(1, 2)
    out = causal_attention(q, k, v, 0.3, None if window is None else bias, sinks)
    grad_out = torch.randn_like(expected)
    torch.testing.assert_close(out, expected)
    found, wanted = (torch.autograd.grad(one, (q, k, v, sinks), grad_out) for one in (out, expected))
    for left, right in zip(found, wanted, strict=True):
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
