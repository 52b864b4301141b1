"""A gated MLP that computes its gate in the GEMM's epilogue, with quack's kernels (installed by the extra `flash`).

GEMM outputs are gated in registers: forward reads nothing twice, and in backward the gradient of the gated values never leaves
the multiprocessor. For that, gate and up of one value are adjacent in memory (interleaved), not in two halves; so are the rows
of both weights where cuBLAS continues with outputs of these kernels, for which they are copied. If quack fails in a run, plain
formulas compute the same in the same layout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ultrascale.kernels.fused import GatedMLPKernel, joined
from ultrascale.kernels.optional_kernels import QUACK

# The fastest of ten tile and cluster shapes on an H200 for 16,384 × 3072 and 32,768 × 2048 (docs/kernels/gate.md).
_FORWARD, _BACKWARD = (128, 192), (128, 128)


class GatedGemmKernel(GatedMLPKernel):
    def forward(self, x: Tensor, gate_: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        both, gated = _forward(x, joined(gate_, up))
        return both, gated

    def gate_up(self, x: Tensor, gate_: Tensor, up: Tensor) -> Tensor:
        return self.forward(x, gate_, up)[0]

    def backward(self, grad: Tensor, down: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
        grad_both, gated = _backward(grad, down, both)
        return grad_both, gated

    def input_weight(self, gate_: Tensor, up: Tensor) -> Tensor:
        return torch.stack((gate_, up), dim=1).flatten(0, 1)

    def grad_weights(self, grad_both: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        interleaved = grad_both.t() @ x
        grad_gate, grad_up = interleaved.view(-1, 2, interleaved.shape[1]).transpose(0, 1).contiguous()
        return grad_gate, grad_up


def _options(tile: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """quack's options: the measured tile on Hopper, quack's default on other GPUs."""
    from quack.gemm_config import GemmConfig  # type: ignore[import-not-found]

    known = torch.cuda.get_device_capability(device) == (9, 0)
    config = GemmConfig(tile_m=tile[0], tile_n=tile[1], is_dynamic_persistent=False) if known else None
    return {"activation": "swiglu", "config": config, "tuned": False}


@torch.library.custom_op("ultrascale::gated", mutates_args=())
def _forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, h] by the concatenated gate and up weights [2·f, h]: both outputs [n, 2·f], interleaved, and the gated [n, f]."""

    def kernel() -> tuple[Tensor, Tensor]:
        from quack.gemm_interface import gemm_gated  # type: ignore[import-not-found]

        both, gated = gemm_gated(x, weight.t(), concat_layout=("B",), **_options(_FORWARD, x.device))
        return both, gated

    def plain() -> tuple[Tensor, Tensor]:
        gate_, up = (x @ weight.t()).chunk(2, dim=-1)
        return torch.stack((gate_, up), dim=-1).flatten(-2), F.silu(gate_) * up

    return QUACK.call(kernel, plain)


@_forward.register_fake
def _(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(len(x), len(weight)), x.new_empty(len(x), len(weight) // 2)


@torch.library.custom_op("ultrascale::gated_backward", mutates_args=())
def _backward(grad: Tensor, weight: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    """From grad [n, h] and the down weight [h, f]: the gradients of gate and up, interleaved, and the gated values again."""

    def kernel() -> tuple[Tensor, Tensor]:
        from quack.gemm_interface import gemm_dgated

        grad_both, gated = gemm_dgated(grad, weight, both, **_options(_BACKWARD, grad.device))
        return grad_both, gated

    def plain() -> tuple[Tensor, Tensor]:
        gate_, up = both.reshape(len(both), -1, 2).unbind(-1)
        grad_gated, silu = grad @ weight, F.silu(gate_)
        grad_opened = torch.ops.aten.silu_backward(grad_gated * up, gate_)
        return torch.stack((grad_opened, grad_gated * silu), dim=-1).flatten(-2), silu * up

    return QUACK.call(kernel, plain)


@_backward.register_fake
def _(grad: Tensor, weight: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
    return both.new_empty(both.shape), both.new_empty(len(both), both.shape[1] // 2)


FORWARD, BACKWARD = torch.ops.ultrascale.gated, torch.ops.ultrascale.gated_backward
