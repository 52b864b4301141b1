"""How evenly tokens fall on experts: the pull of the balance loss, loads over all ranks, and biases that follow them.

Two ways to keep experts in use, each off unless asked for: the balance loss changes the router's gradient; a bias, where the
model has one, changes only its choices (Wang 2024, DeepSeek-V3 section 2.1.2: no loss interferes with the language's).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ultrascale.model.moe import Router
from ultrascale.parallel import comm
from ultrascale.parallel.data import GradientReducer
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.job import Job
from ultrascale.specs.training import Training
from ultrascale.train.optimizer import Weight

WHOLE_TABLE = 4096  # layers · experts up to which a step's record holds every expert


class ZeroGradient(GradientReducer):
    """Of what no gradient moves: the router's bias. Always zero."""

    def __init__(self, module: nn.Module, like: Tensor) -> None:
        super().__init__(module)
        self.zero = torch.zeros_like(like)

    def begin(self) -> None:
        pass

    def before_backward(self, last: bool, split: bool) -> None:
        pass

    def grad_for(self, parameter: nn.Parameter) -> Tensor:
        return self.zero


@dataclass(frozen=True)
class RouterLoads:
    """What the routers of the whole model did in a step. On a GPU, to be read once the step's loss has been read."""

    table: Tensor
    """[layers with experts, experts + 2], in the host's memory or on its way there: as routers tell it, of all ranks"""
    sequences: int
    dense_layers: int
    """layers before the first with experts"""

    @property
    def tokens(self) -> Tensor:
        """[layers with experts, experts]: how often each expert was chosen."""
        return self.table[:, :-2]

    @property
    def balance_loss(self) -> float:
        """Mean over sequences and layers; 1 is even."""
        return float(self.table[:, -2].mean()) / self.sequences

    @property
    def dropped(self) -> int:
        """Choices that met a full expert."""
        return int(self.table[:, -1].sum())

    @property
    def broken(self) -> tuple[int, ...]:
        """Layers whose router's scores were no numbers."""
        return tuple(self.dense_layers + int(row) for row in torch.nonzero(~self.table[:, -2].isfinite()).flatten())

    @property
    def busiest(self) -> tuple[float, ...]:
        """Per layer, the tokens of the busiest expert over the mean."""
        return tuple((self.tokens.amax(1) / self.tokens.mean(1)).tolist())

    @property
    def per_expert(self) -> tuple[tuple[int, ...], ...] | None:
        """Per layer, the tokens of each expert; None where that were too much to write in every step."""
        return _rows(self.tokens) if self.tokens.numel() <= WHOLE_TABLE else None

    @property
    def quantiles(self) -> tuple[tuple[int, ...], ...] | None:
        """Per layer, the tokens of the idlest expert, at the quartiles and of the busiest, where there is no whole table."""
        if self.tokens.numel() <= WHOLE_TABLE:
            return None
        places = torch.linspace(0, self.tokens.shape[1] - 1, 5).round().long()
        return _rows(self.tokens.sort(dim=1).values[:, places])


def _rows(tokens: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in tokens.long().tolist())


class RouterBalance:
    """The routers on this rank, by layer, and what all ranks' routers saw."""

    def __init__(
        self, routers: Mapping[int, Router], weights: Sequence[Weight], job: Job, mesh: Mesh, training: Training
    ) -> None:
        moe = job.model.moe
        assert moe is not None
        self.routers, self.moe, self.job, self.mesh, self.training = routers, moe, job, mesh, training
        self.biases = {weight.shard.name: weight for weight in weights if isinstance(weight.owner, ZeroGradient)}
        self.pull = torch.zeros((), device=mesh.device)
        for router in routers.values():
            router.enable_stats(mesh.device)
            router.capacity_factor = training.capacity_factor
            router.balance_grad = self.pull if training.balance_loss else None
            router.sum_over_sequence = (lambda counts: comm.all_reduce(counts, mesh.cp)) if mesh.cp.size > 1 else None

    def aim(self, weight: float) -> None:
        """Before a step's first forward. `weight`: what the gradients of one token's loss are multiplied by."""
        # The loss is a mean over sequences and layers. Each tp rank computes it whole, and their gradients are added up.
        share = self.training.balance_loss / (self.job.model.moe_layers * self.mesh.tp.size)
        self.pull.fill_(share * weight * self.job.seq)

    def take(self) -> RouterLoads:
        """After a step's last backward; the same on every rank."""
        moe, layers = self.moe, self.job.model.moe_layers
        table = torch.zeros(layers, moe.experts + 2, device=self.mesh.device)
        for layer, router in self.routers.items():
            seen = router.pop_stats()
            if self.mesh.tp.rank == 0:
                table[layer - moe.dense_layers] = seen
        sequences = self.mesh.layout.dp * self.mesh.layout.mbs * self.mesh.layout.gas
        # Nobody waits here: who reads the step's loss has waited long enough.
        table = comm.all_reduce(table, self.mesh.world).to("cpu", non_blocking=True)
        return RouterLoads(table, sequences, moe.dense_layers)

    @torch.no_grad()
    def steer(self, loads: RouterLoads) -> None:
        """After an update: experts that had more than the mean become a little less likely to be chosen, others more."""
        for layer in self.routers:
            weight = self.biases.get(bias_name(layer))
            if weight is not None:
                tokens = loads.tokens[layer - self.moe.dense_layers]
                change = self.training.router_bias_rate * (tokens.mean() - tokens).sign()
                weight.master.add_(change.to(weight.master.device))
                weight.local.copy_(weight.master)


def bias_name(layer: int) -> str:
    return f"blocks.{layer}.mlp.router.bias"
