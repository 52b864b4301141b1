"""A GPU's kernels as tensors without memory see them: what they read, write and leave, and nothing computed.

Where there is no GPU a rehearsal runs the engine as one would run it: fused blocks, the loss in chunks, AdamW in one pass.
Each kernel of ours stands here as the tensors that it makes; attention keeps keys and values with their own few heads, and
norms are one kernel. What torch.compile would fuse runs operator by operator, which keeps as much and holds more for a moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import ultrascale.kernels
from ultrascale.kernels import fused, loss, selection
from ultrascale.measure.rehearse.world import replaced
from ultrascale.model import attention, operators
from ultrascale.model.rotary import Rope
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Engines built here have the kernels that they would have on a GPU."""
    choose = selection.choose

    def chosen(job: Job, layout: Layout, training: Training, _: str) -> selection.Kernels:
        return replace(choose(job, layout, training, "cuda"), compiled=False, recorded=False)

    with ExitStack() as stack:
        for owner, name, value in (
            (selection, "choose", chosen),
            *((fused, one.__name__, one) for one in (norm, norm_backward, turn_, rotate_back, gate, gate_backward)),
            *((loss, one.__name__, one) for one in (loss_and_gradient, scaled, add_product)),
            (operators, "rms_norm", rms_norm),
            (attention, "_expand", _few_heads),
            (attention, "_gather", _few_heads),
            (ultrascale.kernels, "adamw_triton", SimpleNamespace(changing=_nothing, step=_nothing, sum_of_squares=_nothing)),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


def norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    total = x if added is None else torch.empty_like(x)
    return total, torch.empty_like(x), torch.empty(len(x), dtype=torch.float32)


def norm_backward(grad: Tensor, x: Tensor, scales: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(x)


def turn_(qkv: Tensor, heads: int, kv_heads: int, rope: Rope) -> None:
    pass  # in place


def rotate_back(q: Tensor, k: Tensor, v: Tensor, rope: Rope) -> Tensor:
    return q.new_empty(len(q), q.shape[1] + 2 * k.shape[1], q.shape[2])


def gate(both: Tensor) -> Tensor:
    return both.new_empty(len(both), both.shape[1] // 2)


def gate_backward(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(both), torch.empty_like(grad)


def loss_and_gradient(logits: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
    return logits


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


def add_product(total: Tensor, left: Tensor, right: Tensor, fresh: bool) -> None:
    """A product whose sum is `total` itself; of the same FLOPs, into as much of its memory as its own format takes."""
    torch.mm(left, right, out=total.view(left.dtype)[:, : total.shape[1]])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _Norm.apply(x, weight)  # type: ignore[no-untyped-call, no-any-return]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _few_heads(x: Tensor, groups: int) -> Tensor:
    """[b, s, heads, d] to [b, heads, s, d] or back: a GPU's kernels take fewer keys than queries."""
    return x.transpose(1, 2)


def _nothing(*_: object, **__: object) -> Tensor:
    return torch.zeros(())
