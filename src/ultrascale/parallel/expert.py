"""Expert parallelism: each rank of the ep axis holds some of the experts; an all-to-all dispatches tokens to them.

Shared experts overlap with the all-to-all: their first GEMMs with the dispatch, their last with the combine, in forward and in
backward. Routed experts can overlap too (dispatch_overlap.py). The ep axis runs over data ranks, which have different tokens:
the gradient of an expert is complete on its rank, except for the ranks that hold the same experts. The cost model is
cost/communication.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.transformer import Transformer
from ultrascale.parallel.data import GradientReducer
from ultrascale.parallel.dispatch_overlap import LocalTokensFirst, OverlapWeightGrads
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.shards import Shard
from ultrascale.parallel.token_dispatch import TokenDispatcher
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
        experts = block.mlp.experts
        for leaf, parameter in list(experts.named_parameters()):
            name = f"blocks.{index}.mlp.experts.{leaf}"
            each = parameter.shape[0] // axis.size
            shards[name] = replace(shards[name], rows=(axis.rank * each, each))
            setattr(experts, leaf, nn.Parameter(parameter.data.narrow(0, axis.rank * each, each).contiguous()))
        block.mlp.make_dispatcher = partial(DISPATCHERS[overlap], axis)


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
