"""Causal attention with FlashAttention 4, if its package is installed (the extra `flash`).

Its kernels are written in Python and compiled just in time for the GPU and the shape. Here they are two torch operators, so
that blocks with them compile, FLOPs are counted, and selective recomputation can save their outputs. If the package fails in a
run, both fall back to torch's kernels.
"""

from __future__ import annotations

import os
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ultrascale.kernels.optional_kernels import FLASH_ATTENTION_4
from ultrascale.model import attention


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [b, s, heads, d], k and v [b, s, kv_heads, d] -> [b, s, heads, d]."""
    out: Tensor = _forward(q, k, v)[0]
    return out


@cache
def _package() -> ModuleType:
    # Compiled kernels are cached on disk, so that the next run starts without ten seconds of compilation.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    package: ModuleType = interface
    return package


@torch.library.custom_op("ultrascale::flash", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output and its log-sum-exp, [b, heads, s] in fp32, which backward needs."""

    def kernel() -> tuple[Tensor, Tensor]:
        out, lse, *_ = _package()._flash_attn_fwd(q, k, v, causal=True, return_lse=True)
        return out, lse.contiguous()

    def plain() -> tuple[Tensor, Tensor]:
        out, lse = attention.attend(q, k, v, True, q.shape[-1] ** -0.5)
        return out.contiguous(), lse.contiguous()

    return FLASH_ATTENTION_4.call(kernel, plain)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=torch.float32)


@torch.library.custom_op("ultrascale::flash_backward", mutates_args=())
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def kernel() -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
        _package()._flash_attn_bwd(
            q, k, v, out, grad.contiguous(), lse, causal=True, dq=grad_q, dk=grad_k, dv=grad_v,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return grad_q, grad_k, grad_v

    def plain() -> tuple[Tensor, Tensor, Tensor]:
        grads = attention.attend_backward(grad.contiguous(), q, k, v, out, lse, True, q.shape[-1] ** -0.5)
        grad_q, grad_k, grad_v = (one.contiguous() for one in grads)
        return grad_q, grad_k, grad_v

    return FLASH_ATTENTION_4.call(kernel, plain)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, ...]:
    grads: tuple[Tensor, ...] = _backward(grad, *ctx.saved_tensors)
    return grads


_forward.register_autograd(_gradients, setup_context=_setup_context)
FORWARD, BACKWARD = torch.ops.ultrascale.flash, torch.ops.ultrascale.flash_backward
