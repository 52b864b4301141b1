"""Expert parallelism: each rank of the ep axis holds some of the experts, and tokens travel to theirs and back (travel.py).

Shared experts compute while rows travel, their first products on the way there and their last on the way back, in backward
alike; and so may the experts themselves (parted.py). The ep axis runs over data ranks: they bring different
tokens, and an expert's gradient is complete on its rank but for those ranks that hold the same experts. The law is
cost/expert.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from ultrascale.model.moe import MixtureOfExperts
from ultrascale.model.transformer import Transformer
from ultrascale.parallel.data import Gradients
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.parted import Behind, Parted
from ultrascale.parallel.shards import Shard
from ultrascale.parallel.travel import Travel
from ultrascale.specs.training import ExpertOverlap

TRAVELS: dict[ExpertOverlap, type[Travel]] = {"none": Travel, "gradients": Behind, "rows": Parted}


def apply(model: Transformer, mesh: Mesh, shards: dict[str, Shard], overlap: ExpertOverlap) -> None:
    """Leaves each rank its experts, in place; tells so in `shards`. `overlap`: what they compute while rows travel."""
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
        block.mlp.visit = partial(TRAVELS[overlap], axis)


def experts_of(model: Transformer) -> list[nn.Parameter]:
    found = [block.mlp.experts for block in model.each_block() if isinstance(block.mlp, MixtureOfExperts)]
    return [parameter for experts in found for parameter in experts.parameters()]


class Apart(Gradients):
    """Experts meet over other ranks than the rest does."""

    def __init__(self, module: nn.Module, experts: Gradients, rest: Gradients) -> None:
        super().__init__(module)
        self.both = (experts, rest)
        self.owner = {parameter: part for part in self.both for parameter in part.module.parameters()}

    def begin(self) -> None:
        for part in self.both:
            part.begin()

    def before_backward(self, last: bool, split: bool) -> None:
        for part in self.both:
            part.before_backward(last, split)

    def after_backward(self, last: bool, split: bool) -> None:
        for part in self.both:
            part.after_backward(last, split)

    def finish(self) -> None:
        for part in self.both:
            part.finish()

    def of(self, parameter: nn.Parameter) -> Tensor:
        return self.owner[parameter].of(parameter)

    def held(self) -> list[Tensor]:
        return [tensor for part in self.both for tensor in part.held()]
