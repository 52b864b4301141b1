"""torch.compile on a GPU: every block, and the head with its loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ultrascale.kernels.fused import FusedBlock
from ultrascale.kernels.loss import ChunkedHead
from ultrascale.model.moe import MixtureOfExperts, has_grouped_kernel
from ultrascale.model.transformer import Block, Transformer
from ultrascale.specs.layout import Recompute


def apply(model: Transformer, policy: Recompute = "none") -> None:
    """Compiles one graph for all equal blocks, including recomputation, and one for the head, without fp32 logits in memory."""
    for block in model.each_block():
        if isinstance(block.mlp, MixtureOfExperts):
            _exclude_dynamic_shapes(block.mlp)
        checkpointed = "forward" in vars(block)  # some blocks may recompute and others not
        if not isinstance(block, FusedBlock) and not (checkpointed and checkpointed_from_outside(block, policy)):
            block.compile()
    if isinstance(model.head, ChunkedHead):
        model.head.norm.compile()  # its loss is already one kernel
    elif model.head is not None and model.model.mtp_depth:  # which runs blocks between norm and losses
        model.head.norm.compile()
        model.head.loss = torch.compile(model.head.loss)  # type: ignore[method-assign]
    elif model.head is not None:
        model.head.compile()


def _exclude_dynamic_shapes(mlp: MixtureOfExperts) -> None:
    """Runs an MoE layer eagerly where shapes depend on the routing; otherwise the block is compiled as one graph."""
    if "forward" in vars(mlp):
        return  # expert parallelism has replaced it, and excludes it itself
    forward, eager = mlp.forward, torch.compiler.disable(mlp.forward)  # type: ignore[no-untyped-call]

    def either(x: Tensor) -> Tensor:
        static = mlp.router.capacity_factor is None and has_grouped_kernel(x, x.shape[-1], mlp.router.moe.expert_ffn)
        out: Tensor = forward(x) if static else eager(x)
        return out

    mlp.forward = either  # type: ignore[method-assign]


def checkpointed_from_outside(block: Block, policy: Recompute) -> bool:
    """Whether checkpointing wraps a compiled block, instead of being compiled with it.

    Before torch 2.13 the compiler saves the outputs of operators with a custom backward in a region that should save nothing.
    Experts consist of such operators: 17 of 72 GiB in a step. Wrapped, the block's last GEMM is recomputed too.
    """
    return policy == "full" and isinstance(block.mlp, MixtureOfExperts) and TorchVersion(torch.__version__) < "2.13"
