"""Expert load balancing: the balance loss, loads over all ranks, and router biases updated by them.

Two methods, each off by default: the balance loss changes the router's gradient; a router bias, if the model has one, changes
only its choices (Wang 2024, DeepSeek-V3 section 2.1.2: no auxiliary loss interferes with the language-model loss).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ultrascale.model.moe import Router
from ultrascale.parallel import comm
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.job import Job
from ultrascale.specs.training import Training
from ultrascale.train.optimizer import Weight

WHOLE_TABLE = 4096  # layers · experts up to which a step's record has every expert


@dataclass(frozen=True)
class RouterLoads:
    """Statistics of all routers of the model in a step. On a GPU, read them only after the step's loss has been read."""

    table: Tensor
    """[MoE layers, experts + 2], in host memory or being copied there: the sum of Router.stats over all ranks"""
    sequences: int
    layers: tuple[int, ...]
    """of the model, those of the rows"""

    @property
    def tokens(self) -> Tensor:
        """[MoE layers, experts]: tokens of each expert."""
        return self.table[:, :-2]

    @property
    def balance_loss(self) -> float:
        """Mean over sequences and layers; 1 is perfectly balanced."""
        return float(self.table[:, -2].mean()) / self.sequences

    @property
    def dropped(self) -> int:
        """Choices dropped because the expert was at capacity."""
        return int(self.table[:, -1].sum())

    @property
    def broken(self) -> tuple[int, ...]:
        """Layers whose router's scores were NaN or infinite."""
        return tuple(self.layers[int(row)] for row in torch.nonzero(~self.table[:, -2].isfinite()).flatten())

    @property
    def busiest(self) -> tuple[float, ...]:
        """Per layer, the tokens of the busiest expert divided by the mean."""
        return tuple((self.tokens.amax(1) / self.tokens.mean(1)).tolist())

    @property
    def per_expert(self) -> tuple[tuple[int, ...], ...] | None:
        """Per layer, the tokens of each expert; None if that would be too much to write in every step."""
        return _rows(self.tokens) if self.tokens.numel() <= WHOLE_TABLE else None

    @property
    def quantiles(self) -> tuple[tuple[int, ...], ...] | None:
        """Per layer, minimum, quartiles and maximum of the tokens per expert, if `per_expert` is None."""
        if self.tokens.numel() <= WHOLE_TABLE:
            return None
        places = torch.linspace(0, self.tokens.shape[1] - 1, 5).round().long()
        return _rows(self.tokens.sort(dim=1).values[:, places])


def _rows(tokens: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in tokens.long().tolist())


class RouterBalance:
    """Sets the balance loss of this rank's routers, collects the loads of all ranks, and updates router biases."""

    def __init__(
        self, routers: Mapping[int, Router], weights: Sequence[Weight], job: Job, mesh: Mesh, training: Training
    ) -> None:
        moe = job.model.moe
        assert moe is not None
        self.routers, self.moe, self.job, self.mesh, self.training = routers, moe, job, mesh, training
        self.layers = tuple(filter(job.model.is_moe_layer, range(job.model.all_layers)))
        self.weights = {weight.shard.name: weight for weight in weights}
        self.balance_grad = torch.zeros((), device=mesh.device)
        for router in routers.values():
            router.enable_stats(mesh.device)
            router.capacity_factor = training.capacity_factor
            router.balance_grad = self.balance_grad if training.balance_loss else None
            router.sum_over_sequence = (lambda counts: comm.all_reduce(counts, mesh.cp)) if mesh.cp.size > 1 else None

    def set_loss_weight(self, weight: float) -> None:
        """Called before a step's first forward. `weight`: the factor of the gradients of one sequence's mean loss."""
        # The loss is a mean over sequences and layers. Each tp rank computes all of it, and their gradients are summed.
        share = self.training.balance_loss / (len(self.layers) * self.mesh.tp.size)
        self.balance_grad.fill_(share * weight)

    def take(self, sequences: int) -> RouterLoads:
        """The loads of a step with so many sequences, the same on every rank; called after its last backward."""
        table = torch.zeros(len(self.layers), self.moe.experts + 2, device=self.mesh.device)
        for layer, router in self.routers.items():
            stats = router.pop_stats()
            if self.mesh.tp.rank == 0:
                table[self.layers.index(layer)] = stats
        # Asynchronous: reading the step's loss later synchronizes with the device.
        table = comm.all_reduce(table, self.mesh.world).to("cpu", non_blocking=True)
        return RouterLoads(table, sequences, self.layers)

    @torch.no_grad()
    def update_biases(self, loads: RouterLoads) -> None:
        """Called after an update: lowers the bias of experts with more tokens than the mean, raises that of the others."""
        for layer in self.routers:
            weight = self.weights.get(bias_name(layer))
            if weight is not None:
                tokens = loads.tokens[self.layers.index(layer)]
                change = self.training.router_bias_rate * (tokens.mean() - tokens).sign()
                weight.master.add_(change.to(weight.master.device))
                weight.local.copy_(weight.master)


def bias_name(layer: int) -> str:
    return f"blocks.{layer}.mlp.router.bias"
