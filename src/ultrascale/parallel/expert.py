"""Expert parallelism: each rank of the ep axis holds some of the experts; an all-to-all dispatches tokens to them.

Shared experts overlap with the all-to-all: their first GEMMs with the dispatch, their last with the combine, in forward and in
backward. Routed experts can overlap too (token_dispatch.py). The ep axis runs over data ranks, which have different tokens:
the gradient of an expert is complete on its rank, except for the ranks that hold the same experts. The cost model is
cost/communication.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.model.moe import MixtureOfExperts, RoutingResult
from ultrascale.model.transformer import Transformer
from ultrascale.parallel.data import GradientReducer
from ultrascale.parallel.expert_layer import ParallelExperts
from ultrascale.parallel.mesh import Mesh, Shard
from ultrascale.parallel.tensor import TensorParallelExperts
from ultrascale.parallel.token_dispatch import LocalTokensFirst, OverlapWeightGrads, TokenDispatcher
from ultrascale.specs.training import ExpertOverlap

DISPATCHERS: dict[ExpertOverlap, type[TokenDispatcher]] = {
    "none": TokenDispatcher,
    "gradients": OverlapWeightGrads,
    "rows": LocalTokensFirst,
}


def apply(model: Transformer, mesh: Mesh, shards: dict[str, Shard], overlap: ExpertOverlap) -> None:
    """Keeps only this rank's experts, in place, and records them in `shards`. `overlap`: what runs during the all-to-all."""
    axis = mesh.ep
    if axis.size == 1:
        return
    for index, block in zip(model.blocks, model.each_block(), strict=True):
        if not isinstance(block.mlp, MixtureOfExperts):
            continue
        experts = ParallelExperts.of(block.mlp)
        for leaf, parameter in list(experts.named_parameters()):
            name = f"blocks.{index}.mlp.experts.{leaf}"
            each = parameter.shape[0] // axis.size
            shards[name] = replace(shards[name], rows=(axis.rank * each, each))
            setattr(experts, leaf, nn.Parameter(parameter.data.narrow(0, axis.rank * each, each).contiguous()))
        forward = partial(dispatched_forward, block.mlp, partial(DISPATCHERS[overlap], axis))
        if isinstance(block.mlp, TensorParallelExperts):
            block.mlp.local_forward = forward
        else:
            block.mlp.forward = forward  # type: ignore[method-assign]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the numbers of rows are read by the host
def dispatched_forward(mlp: MixtureOfExperts, dispatch: Callable[[Tensor, Tensor], TokenDispatcher], x: Tensor) -> Tensor:
    """The forward of an MoE layer with its experts on several ranks.

    The shared experts are computed in two halves: one overlaps with the dispatch, the other with the combine.
    """
    routes: RoutingResult = mlp.router(x)
    order = routes.order()
    dispatcher = dispatch(order.permute(x.flatten(0, 1)), routes.counts)
    shared: Any = mlp.shared
    inner = None if shared is None else shared.activation(*shared.inputs(x))
    dispatcher.run_experts(mlp.experts)
    shared_out = None if inner is None else mlp.gate_shared(shared.down(inner), x)
    out = order.unpermute(dispatcher.combine(), routes.weights.flatten(0, 1)).view_as(x)
    return out if shared_out is None else out + shared_out


def experts_of(model: Transformer) -> list[nn.Parameter]:
    found = [block.mlp.experts for block in model.each_block() if isinstance(block.mlp, MixtureOfExperts)]
    return [parameter for experts in found for parameter in experts.parameters()]


class ExpertDenseGrads(GradientReducer):
    """Gradients of experts and of all other parameters, which are reduced over different ranks."""

    def __init__(self, module: nn.Module, experts: GradientReducer, rest: GradientReducer) -> None:
        super().__init__(module)
        self.parts = (experts, rest)
        self.owner = {parameter: part for part in self.parts for parameter in part.module.parameters()}

    def begin(self) -> None:
        for part in self.parts:
            part.begin()

    def before_backward(self, last: bool, split: bool) -> None:
        for part in self.parts:
            part.before_backward(last, split)

    def after_backward(self, last: bool, split: bool) -> None:
        for part in self.parts:
            part.after_backward(last, split)

    def finish(self) -> None:
        for part in self.parts:
            part.finish()

    def grad_for(self, parameter: nn.Parameter) -> Tensor:
        return self.owner[parameter].grad_for(parameter)

    def held(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.held()]
