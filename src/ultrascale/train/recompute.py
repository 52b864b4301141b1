"""Recomputation: what a block drops after its forward and computes again in backward. The law is cost/activations.py.

Full keeps a block's input alone. Selective keeps what is expensive to make, the products of matrices and attention, and
makes norms, rotations and gates again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.rotary import Rope
from ultrascale.model.transformer import MLP, Transformer
from ultrascale.specs.layout import Recompute

Forward = Callable[..., Tensor]

_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,
    torch.ops.aten._scaled_mm.default,
}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
}


class _SavedOnly(_CachedTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks only for what was saved. FSDP2 gathers experts within the region, in backward by other steps than in forward, which
    torch would take for a region that is not the same twice.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _PRODUCTS | _ATTENTION:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def apply(model: Transformer, policy: Recompute) -> None:
    """Wraps the forward of every block; names and modules stay."""
    if policy == "none":
        return
    for block in model.each_block():
        # No dropout anywhere: there is no random state to restore.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if policy == "selective":
            alike = block.attention.out.weight.shape[0]
            options["context_fn"] = partial(_contexts, _last(block.mlp), alike, isinstance(block.mlp, MixtureOfExperts))
        block.forward = _again(block.forward, options)  # type: ignore[method-assign]


def _again(forward: Forward, options: dict[str, Any]) -> Forward:
    # Written out and no `partial` of `checkpoint`: torch.compile passes over torch's own frames and would skip the block.
    def recomputed(x: Tensor, rope: Rope | None, bias: Tensor | None = None) -> Tensor:
        out: Tensor = checkpoint(forward, x, rope, bias, **options)
        return out

    return recomputed


def _last(mlp: MLP | MixtureOfExperts) -> nn.Linear | None:
    """The last product of a block, which is only the next block's input: backward of this one never asks for it.

    With experts that of shared ones: the gradient of a routing weight asks for what the routed ones made.
    """
    if isinstance(mlp, MLP):
        return mlp.down
    return mlp.shared.down if isinstance(mlp.shared, MLP) else None


def _contexts(last: nn.Linear | None, alike: int, experts: bool) -> Any:
    first, again = create_selective_checkpoint_contexts(partial(_policy, last, alike))  # type: ignore[no-untyped-call]
    if experts:
        again.__class__ = _SavedOnly
    return first, again


def _policy(last: nn.Linear | None, alike: int, _: Any, operator: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
    if operator in _ATTENTION or operator is torch.ops.aten._grouped_mm.default:
        return CheckpointPolicy.MUST_SAVE
    if operator in _PRODUCTS:
        factor = arguments[2 if operator is torch.ops.aten.addmm.default else 1]
        again = last is not None and _is(factor, last.weight, alike)
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _is(factor: Tensor, weight: Tensor, alike: int) -> bool:
    """Is a product's second factor this weight? A compiler shows neither tensors nor memory of the model's: it is known there
    by what it contracts, unless that is as much as other products do (`alike`).
    """
    if type(factor) is not type(weight.data):
        return factor.shape[-2] == weight.shape[1] != alike
    return bool(factor.untyped_storage()._cdata == weight.untyped_storage()._cdata)
