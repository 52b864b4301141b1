"""Activation recomputation: what a block drops after its forward and recomputes in backward.

Full saves only a block's input. Selective saves what is expensive, the outputs of GEMMs and attention, and recomputes norms,
rotary embeddings and gates; in fused blocks, which never save those, the outputs of gate and up. The cost model is
cost/memory/activations.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ultrascale.kernels import flash
from ultrascale.kernels.compile import checkpointed_from_outside
from ultrascale.kernels.fused import FusedBlock
from ultrascale.kernels.recompute_cache import RecomputeRegion
from ultrascale.model.adapters import Adapters
from ultrascale.model.linear_attention import GatedDeltaNet
from ultrascale.model.mamba import Mamba2Mixer
from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.rotary import Rope
from ultrascale.model.self_attention import Mask
from ultrascale.model.transformer import MLP, Block, PredictionBlock, Transformer
from ultrascale.parallel.tensor import RowParallelLinear
from ultrascale.parallel.torch_private import TorchDispatchMode
from ultrascale.specs.layout import Recompute

Forward = Callable[..., Tensor]
HasFactor = Callable[[Tensor], bool]
"""whether the second operand of a GEMM is one whose output is not saved"""

_GEMMS = {
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
_SAVED = _GEMMS | _ATTENTION


class _SavedOpsMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes saved operators to torch's selective-checkpoint mode and runs all others directly.

    FSDP2 gathers experts within a region, with other operators in backward than in forward, which torch would report as a
    region that differs between the two passes. `region`: GEMMs whose output is cached after its collective
    (kernels/recompute_cache.py) are not saved again.
    """

    def __init__(self, mode: Any, region: RecomputeRegion | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.region = mode, region

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # as torch's modes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _SAVED or (self.region is not None and self.region.computing):
            return func(*args, **(kwargs or {}))
        return self.mode.__torch_dispatch__(func, types, args, kwargs)


def apply(model: Transformer, policy: Recompute, layers: int | None = None, compiled: bool = False) -> None:
    """Wraps the forward of the first blocks, or of all; names and modules stay. Blocks that will be compiled must be wrapped
    alike.
    """
    if policy == "none":
        return
    if compiled:  # torch warns of operators in place, of which blocks have none
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for block in islice(model.each_block(), layers):
        # There is no dropout: no RNG state needs to be restored.
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if isinstance(block, FusedBlock):
            block.saves_gate_up = policy != "selective"
            if policy == "full":
                options["context_fn"] = partial(_parallel_contexts, None)
                block.forward = _checkpointed(block.forward, options)  # type: ignore[method-assign]
            continue
        parallel = any(isinstance(module, RowParallelLinear) for module in block.modules())
        if parallel and isinstance(last := _last(block), RowParallelLinear):
            last.result = "recomputed" if isinstance(block.mlp, MixtureOfExperts) else "unused"
        if policy == "selective":
            contexts = partial(_contexts, list(_not_saved(block, compiled)), isinstance(block.mlp, MixtureOfExperts))
            options["context_fn"] = partial(_parallel_contexts, contexts) if parallel else contexts
        elif parallel:
            options["context_fn"] = partial(_parallel_contexts, None)
        forward: Forward = (
            torch.compile(block.forward) if compiled and checkpointed_from_outside(block, policy) else block.forward
        )
        block.forward = _checkpointed(forward, options)  # type: ignore[method-assign]


def _checkpointed(forward: Forward, options: dict[str, Any]) -> Forward:
    # A function and not a `partial` of `checkpoint`: torch.compile skips torch's own frames and would skip the block.
    def recomputed(x: Tensor, rope: Rope | None, *others: Mask | Tensor | None) -> Tensor:
        out: Tensor = checkpoint(forward, x, rope, *others, **options)
        return out

    return recomputed


def _last(block: Block) -> nn.Linear | None:
    """The last linear of a block, whose output is only the next block's input: this block's backward never needs it.

    In an MoE block, that of the shared experts: the gradient of a routing weight needs the output of the routed experts. None
    where a norm follows, whose backward needs it.
    """
    mlp = block.mlp
    if block.mlp_post_norm is not None or isinstance(block, PredictionBlock):
        return None
    if mlp is None:
        return None if block.attention is None else block.attention.out
    if isinstance(mlp, MLP):
        return mlp.down
    return mlp.shared.down if isinstance(mlp.shared, MLP) else None


def _contexts(not_saved: list[HasFactor], experts: bool) -> Any:
    first, again = create_selective_checkpoint_contexts(partial(_policy, not_saved))  # type: ignore[no-untyped-call]
    return first, _SavedOpsMode(again) if experts else again


def _parallel_contexts(contexts: Callable[[], Any] | None) -> Any:
    """The contexts of tensor-parallel layers, in which a GEMM and its collective are saved or recomputed together."""
    region = RecomputeRegion(saves=contexts is not None)
    passes = [region.run_pass(again) for again in (False, True)]
    if contexts is None:
        return passes
    first, again = contexts()
    return _both(_SavedOpsMode(first, region), passes[0]), _both(_SavedOpsMode(again), passes[1])


@contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


def _policy(not_saved: list[HasFactor], _: Any, operator: Any, *arguments: Any, **__: Any) -> CheckpointPolicy:
    if operator in _ATTENTION or operator is torch.ops.aten._grouped_mm.default:
        return CheckpointPolicy.MUST_SAVE
    if operator in _GEMMS:
        factor = arguments[2 if operator is torch.ops.aten.addmm.default else 1]
        drops = any(has_factor(factor) for has_factor in not_saved)
        return CheckpointPolicy.PREFER_RECOMPUTE if drops else CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _not_saved(block: Block, compiled: bool) -> Iterator[HasFactor]:
    """Tests for the last weight, by its storage, and for the matrices that adapters widen with, by the rank that they contract.

    Under torch.compile, which exposes neither the model's tensors nor their memory, the last weight is known by its contracted
    dimension too, unless other GEMMs contract as many.
    """
    last = _last(block)
    if last is not None and not compiled:
        yield partial(_has_storage_of, last)
    elif last is not None and last.weight.shape[1] != last.weight.shape[0]:
        yield partial(_contracts, last.weight.shape[1])
    if isinstance(block.attention, GatedDeltaNet | Mamba2Mixer):
        yield _is_batched
    for rank in {module.rank for module in block.modules() if isinstance(module, Adapters)}:
        yield partial(_contracts, rank)


def _has_storage_of(last: nn.Linear, factor: Tensor) -> bool:
    return factor.untyped_storage() is last.weight.untyped_storage()


def _is_batched(factor: Tensor) -> bool:
    """Of the GEMMs of a delta rule or a state space, whose output alone would have to be saved."""
    return factor.dim() == 3


def _contracts(width: int, factor: Tensor) -> bool:
    return factor.shape[-2] == width
