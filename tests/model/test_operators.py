"""The lean operators: their values and gradients equal the plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ultrascale.model.operators import LayerNorm, RMSNorm, clamped_swiglu, geglu, geglu_exact, rms_norm, swiglu


def plain_norm(x: Tensor, weight: Tensor, eps: float = 1e-3) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


OPERATORS: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = [
    (lambda x, weight: rms_norm(x, weight, 1e-3), plain_norm, [(2, 3, 7), (7,)]),
    (lambda x, weight: rms_norm(x, weight, 1e-3), plain_norm, [(2, 3, 4, 6), (6,)]),
    (swiglu, lambda gate, up: gate * torch.sigmoid(gate) * up, [(2, 3, 5), (2, 3, 5)]),
    (geglu, lambda gate, up: F.gelu(gate, approximate="tanh") * up, [(2, 3, 5), (2, 3, 5)]),
    (
        partial(clamped_swiglu, limit=0.5),
        lambda gate, up: (low := gate.clamp(max=0.5)) * torch.sigmoid(1.702 * low) * (up.clamp(-0.5, 0.5) + 1),
        [(2, 3, 5), (2, 3, 5)],
    ),
    (geglu_exact, lambda gate, up: gate * torch.special.ndtr(gate) * up, [(2, 3, 5), (2, 3, 5)]),
]


@pytest.mark.parametrize(("operator", "plain", "shapes"), OPERATORS)
def test_values_and_gradients(
    operator: Callable[..., Tensor], plain: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(operator, inputs)
    out, expected = operator(*inputs), plain(*inputs)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    given, wanted = torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    for left, right in zip(given, wanted, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_compute_in_fp32_and_keep_the_inputs_dtype(kind: type[RMSNorm] | type[LayerNorm]) -> None:
    x = 300 * torch.randn(4, 4096, generator=torch.Generator().manual_seed(0))  # its squares overflow fp16
    norm = kind(4096, 1e-5)
    exact = norm(x)
    for dtype in (torch.bfloat16, torch.float16):
        out = norm(x.to(dtype))
        assert out.dtype == dtype
        torch.testing.assert_close(out.float(), exact, rtol=2e-2, atol=2e-2)
