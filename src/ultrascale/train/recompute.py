"""Recomputation: what a block drops after its forward and computes again in backward. The law is cost/activations.py.

Full keeps a block's input alone. Selective keeps what is expensive to make, the products of matrices and attention, and
makes norms, rotations and gates again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ultrascale.model.rotary import Rope
from ultrascale.model.transformer import Transformer
from ultrascale.specs.layout import Recompute

Forward = Callable[..., Tensor]

_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def apply(model: Transformer, policy: Recompute) -> None:
    """Wraps the forward of every block; names and modules stay."""
    if policy == "none":
        return
    for block in model.each_block():
        # No dropout anywhere: there is no random state to restore.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if policy == "selective":
            options["context_fn"] = partial(_contexts, block.mlp.down.weight.shape[1])
        block.forward = _again(block.forward, options)  # type: ignore[method-assign]


def _again(forward: Forward, options: dict[str, Any]) -> Forward:
    # Written out and no `partial` of `checkpoint`: torch.compile passes over torch's own frames and would skip the block.
    def recomputed(x: Tensor, rope: Rope | None, bias: Tensor | None = None) -> Tensor:
        out: Tensor = checkpoint(forward, x, rope, bias, **options)
        return out

    return recomputed


def _contexts(ffn: int) -> Any:
    return create_selective_checkpoint_contexts(partial(_policy, ffn))  # type: ignore[no-untyped-call]


def _policy(ffn: int, _: Any, operator: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
    if operator in _ATTENTION:
        return CheckpointPolicy.MUST_SAVE
    if operator in _PRODUCTS:
        # The last product of a block is only the next block's input: backward of this one never asks for it.
        contracted = arguments[-1].shape[-2]
        return CheckpointPolicy.PREFER_RECOMPUTE if contracted == ffn else CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
