"""Low-rank adapters (LoRA, Hu 2021): beside frozen linear layers, down to a small rank and up again; they alone are trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ultrascale.specs.job import AdapterTargets

if TYPE_CHECKING:
    from ultrascale.model.moe import MixtureOfExperts
    from ultrascale.model.self_attention import Attention
    from ultrascale.model.transformer import MLP, Transformer

ADAPTERS = "adapters"
"""the child of an attention or an MLP that holds its adapters"""


class Adapter(nn.Module):
    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, linear.in_features))
        self.up = nn.Parameter(torch.empty(linear.out_features, rank))


class Adapters(nn.Module):
    """Those of one attention or MLP, by the names of its linear layers: several with one input, and perhaps the output's."""

    def __init__(self, inputs: Mapping[str, nn.Linear], output: Mapping[str, nn.Linear], rank: int, scale: float) -> None:
        super().__init__()
        self.inputs, self.output, self.rank, self.scale = tuple(inputs), next(iter(output), None), rank, scale
        for name, linear in {**inputs, **output}.items():
            self.add_module(name, Adapter(linear, rank))

    def add_to_inputs(self, x: Tensor, products: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The products of the linear layers that read x, each with its adapter's."""
        adapters = [self.adapter(name) for name in self.inputs]
        narrow = self._narrow_input(x, torch.cat([adapter.down for adapter in adapters]))
        parts = torch.split(narrow, self.rank, -1)
        return tuple(
            product + self._wide_input(part, adapter.up)
            for product, part, adapter in zip(products, parts, adapters, strict=True)
        )

    def output_with(self, x: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
        """The product of the output's linear layer with its adapter's; this comes first, and recomputation ends before that."""
        if self.output is None:
            return linear(x)
        adapter = self.adapter(self.output)
        added = F.linear(self._narrow_output(x, adapter.down) * self.scale, adapter.up)
        return linear(x) + added

    def adapter(self, name: str) -> Adapter:
        found = self.get_submodule(name)
        assert isinstance(found, Adapter)
        return found

    # Replaced by tensor parallelism.

    def _narrow_input(self, x: Tensor, down: Tensor) -> Tensor:
        return F.linear(x, down) * self.scale

    def _wide_input(self, narrow: Tensor, up: Tensor) -> Tensor:
        return F.linear(narrow, up)

    def _narrow_output(self, x: Tensor, down: Tensor) -> Tensor:
        return F.linear(x, down)


def attach(model: Transformer, rank: int, targets: AdapterTargets, alpha: float) -> None:
    """Freezes the model and puts adapters beside its linear layers."""
    from ultrascale.model.latent_attention import LatentAttention

    model.requires_grad_(False)
    scale, everywhere = alpha / rank, targets == "all"
    for block in model.each_block():
        attention, mlp = block.attention, cast("MLP | MixtureOfExperts", block.mlp)
        if isinstance(attention, LatentAttention):
            inputs = {"down": attention.down, "q_up": attention.q_up, "kv_up": attention.kv_up}
            parts = {name: Adapters(_linears(linears), {}, rank, scale) for name, linears in inputs.items()}
            if everywhere:
                parts["out"] = Adapters({}, {"out": attention.out}, rank, scale)
            attention.adapters = nn.ModuleDict(parts)
        else:
            attention = cast("Attention", attention)
            attention.adapters = Adapters(_linears(attention.qkv), {"out": attention.out} if everywhere else {}, rank, scale)
        dense = cast("MLP | None", getattr(mlp, "shared", mlp))  # routed experts and their router have none
        if everywhere and dense is not None:
            dense.adapters = Adapters(_linears(dense.inputs), {"down": dense.down}, rank, scale)


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {name: linear for name, linear in module.named_children() if isinstance(linear, nn.Linear)}


def is_adapter(name: str) -> bool:
    """Whether a parameter, by its name in the model, is an adapter's."""
    return f".{ADAPTERS}." in name


_PLACES = {
    **{name: f"qkv.{name}" for name in ("q", "k", "v")},
    **{name: f"inputs.{name}" for name in ("gate", "up")},
    "out.out": "out",
}
"""where linear layers are, by their adapter's name, if not there"""


def adapted(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Names of the weights that have adapters -> those of the adapter's two matrices, down and up."""
    found = {}
    for name in names:
        if is_adapter(name) and name.endswith(".down"):
            path = name.removesuffix(".down")
            parent, _, linear = path.rpartition(f".{ADAPTERS}.")
            found[f"{parent}.{_PLACES.get(linear, linear)}.weight"] = (f"{path}.down", f"{path}.up")
    return found


def initialize(name: str, values: Tensor, generator: torch.Generator) -> Tensor:
    """As PEFT does: uniform in the down-projection, zero in the up-projection, so that the model starts as it was."""
    bound = 1 / math.sqrt(values.shape[1])
    return values.zero_() if name.endswith(".up") else values.uniform_(-bound, bound, generator=generator)
