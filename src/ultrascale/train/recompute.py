"""Recomputation: what a block drops after its forward and computes again in backward. The law is cost/activations.py.

Full keeps a block's input alone. Selective keeps what is expensive to make, the products of matrices and attention, and
makes norms, rotations and gates again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ultrascale.kernels import flash
from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.rotary import Rope
from ultrascale.model.transformer import MLP, Block, Transformer
from ultrascale.parallel.recompute_cache import RecomputeRegion
from ultrascale.parallel.tensor import RowParallelLinear
from ultrascale.specs.layout import Recompute

Forward = Callable[..., Tensor]
Tells = Callable[[Tensor], bool]
"""is a product's second factor the weight of the block's last?"""

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
    flash.FORWARD.default,
    torch.ops.higher_order.flex_attention,
}
_SAVED = _PRODUCTS | _ATTENTION


class _FirstPass(_CachingTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Saves none of the products whose result is kept with its exchange (parallel/recompute_cache.py)."""

    region: RecomputeRegion

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.region.computing or func not in _SAVED:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


class _RecomputePass(_CachedTorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks only for what was saved. FSDP2 gathers experts within the region, in backward by other steps than in forward, which
    torch would take for a region that is not the same twice.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SAVED:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def apply(model: Transformer, policy: Recompute, compiled: bool = False) -> None:
    """Wraps the forward of every block; names and modules stay. One that will be compiled must not differ from the others."""
    if policy == "none":
        return
    for block in model.each_block():
        # No dropout anywhere: there is no random state to restore.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        by_hand = isinstance(block.attention.out, RowParallelLinear)
        if by_hand and isinstance(last := _last(block.mlp), RowParallelLinear):
            last.result = "unused" if isinstance(block.mlp, MLP) else "recomputed"
        if policy == "selective":
            selects = partial(_contexts, _tells(block, compiled), isinstance(block.mlp, MixtureOfExperts))
            options["context_fn"] = partial(_with_results, selects) if by_hand else selects
        elif by_hand:
            options["context_fn"] = partial(_with_results, None)
        forward: Forward = torch.compile(block.forward) if compiled and from_outside(block, policy) else block.forward
        block.forward = _again(forward, options)  # type: ignore[method-assign]


def from_outside(block: Block, policy: Recompute) -> bool:
    """Is a compiled block recomputed as it is, and not compiled with its recomputation?

    Before torch 2.13 the compiler keeps what operators with a backward of their own made in a region that shall keep nothing.
    Experts are of such operators: 17 of 72 GiB in a step. From outside, the block's last product is repeated too.
    """
    return policy == "full" and isinstance(block.mlp, MixtureOfExperts) and TorchVersion(torch.__version__) < "2.13"


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


def _contexts(tells: Tells | None, experts: bool) -> Any:
    first, again = create_selective_checkpoint_contexts(partial(_policy, tells))  # type: ignore[no-untyped-call]
    if experts:
        again.__class__ = _RecomputePass
    return first, again


def _with_results(selects: Callable[[], Any] | None) -> Any:
    """The same of layers whose products stand with their exchanges, and which keep or leave out both together."""
    region = RecomputeRegion(saves=selects is not None)
    passes = [region.run_pass(again) for again in (False, True)]
    if selects is None:
        return passes
    first, again = selects()
    first.__class__, first.region, again.__class__ = _FirstPass, region, _RecomputePass
    return _both(first, passes[0]), _both(again, passes[1])


@contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


def _policy(tells: Tells | None, _: Any, operator: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
    if operator in _ATTENTION or operator is torch.ops.aten._grouped_mm.default:
        return CheckpointPolicy.MUST_SAVE
    if operator in _PRODUCTS:
        factor = arguments[2 if operator is torch.ops.aten.addmm.default else 1]
        again = tells is not None and tells(factor)
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _tells(block: Block, compiled: bool) -> Tells | None:
    """By the weight itself; to a compiler, which shows neither tensors nor memory of the model's, by what it contracts, unless
    other products contract as much.
    """
    last = _last(block.mlp)
    if last is None:
        return None
    if not compiled:
        return partial(_is, last)
    width = last.weight.shape[1]
    return None if width == block.attention.out.weight.shape[0] else partial(_contracts, width)


def _is(last: nn.Linear, factor: Tensor) -> bool:
    return bool(factor.untyped_storage()._cdata == last.weight.untyped_storage()._cdata)


def _contracts(width: int, factor: Tensor) -> bool:
    return factor.shape[-2] == width
