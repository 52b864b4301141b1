"""A gated MLP whose gates are computed by the products themselves, in quack's kernels (they come with the extra `flash`).

A product's numbers are gated while they are in registers: forward reads nothing twice, and in backward the gated numbers'
gradient never leaves the multiprocessor. For that a number's gate and up lie side by side in memory, woven, and not one half
after the other; so do the rows of both weights where cuBLAS goes on with what these kernels made, which are copied for it.
Where quack fails in a run, plain formulas compute the same in the same layout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ultrascale.kernels.fused import GatedMLPKernel, joined
from ultrascale.kernels.optional_kernels import QUACK

# Tiles and clusters that were the fastest of ten on an H200 for 16,384 × 3072 and 32,768 × 2048 (docs/kernels/gate.md).
_FORWARD, _BACKWARD = (128, 192), (128, 128)


def why_not(dtype: torch.dtype) -> str | None:
    """Why it is not asked; None: it is."""
    return QUACK.why_not(dtype)


class GatedGemmKernel(GatedMLPKernel):
    def forward(self, x: Tensor, gate_: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        both, gated = _forward(x, joined(gate_, up))
        return both, gated

    def backward(self, grad: Tensor, down: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
        to_both, gated = _backward(grad, down, both)
        return to_both, gated

    def to_input(self, to_both: Tensor, gate_: Tensor, up: Tensor) -> Tensor:
        return to_both @ torch.stack((gate_, up), dim=1).flatten(0, 1)

    def to_weights(self, to_both: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        woven = to_both.t() @ x
        to_gate, to_up = woven.view(-1, 2, woven.shape[1]).transpose(0, 1).contiguous()
        return to_gate, to_up


def _options(tile: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """What is known of Hopper; on others quack has a choice of its own."""
    from quack.gemm_config import GemmConfig  # type: ignore[import-not-found]

    known = torch.cuda.get_device_capability(device) == (9, 0)
    config = GemmConfig(tile_m=tile[0], tile_n=tile[1], is_dynamic_persistent=False) if known else None
    return {"activation": "swiglu", "config": config, "tuned": False}


@torch.library.custom_op("ultrascale::gated", mutates_args=())
def _forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, h] by gate's rows and up's after them [2·f, h]: both products [n, 2·f], woven, and the gated numbers [n, f]."""

    def kernel() -> tuple[Tensor, Tensor]:
        from quack.gemm_interface import gemm_gated  # type: ignore[import-not-found]

        both, gated = gemm_gated(x, weight.t(), concat_layout=("B",), **_options(_FORWARD, x.device))
        return both, gated

    def plain() -> tuple[Tensor, Tensor]:
        opened, up = (x @ weight.t()).chunk(2, dim=-1)
        return torch.stack((opened, up), dim=-1).flatten(-2), F.silu(opened) * up

    return QUACK.call(kernel, plain)


@_forward.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight) // 2)


@torch.library.custom_op("ultrascale::gated_backward", mutates_args=())
def _backward(grad: Tensor, weight: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """grad [n, h] by the last weight [h, f] is the gated numbers' gradient; given are those of both, woven, and the numbers."""

    def kernel() -> tuple[Tensor, Tensor]:
        from quack.gemm_interface import gemm_dgated

        to_both, gated = gemm_dgated(grad, weight, both, **_options(_BACKWARD, grad.device))
        return to_both, gated

    def plain() -> tuple[Tensor, Tensor]:
        opened, up = both.reshape(len(both), -1, 2).unbind(-1)
        to_gated, silu = grad @ weight, F.silu(opened)
        to_opened = torch.ops.aten.silu_backward(to_gated * up, opened)
        return torch.stack((to_opened, to_gated * silu), dim=-1).flatten(-2), silu * up

    return QUACK.call(kernel, plain)


@_backward.register_fake
def _(grad: Tensor, weight: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    return both.new_empty(both.shape), both.new_empty(len(both), both.shape[1] // 2)


FORWARD, BACKWARD = torch.ops.ultrascale.gated, torch.ops.ultrascale.gated_backward
