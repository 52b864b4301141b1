"""The optimizer on this rank's part of the weights: fp32 masters, global norm, clipping, learning rate, loss scale.

Every layout ends here with the same thing: a list of local tensors, their gradients, and the axis over which norms add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ultrascale.kernels import split_master
from ultrascale.parallel import comm
from ultrascale.parallel.data import GradientReducer
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.shards import Shard
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.training import Training
from ultrascale.train.cuda_graphs import CUDAGraphPool, recorded


@dataclass
class Weight:
    """One parameter as this rank steps it."""

    shard: Shard
    parameter: nn.Parameter
    local: torch.Tensor
    """what computes, or its shard"""
    master: torch.Tensor
    """what the optimizer steps: `local` itself in fp32, a copy of its own, or the lower halves of numbers whose upper is it"""
    owner: GradientReducer
    offsets: tuple[int, ...]
    """where `local` begins in the whole parameter"""
    counted: bool
    """in the norm: one of equal copies is"""

    @property
    def gradient(self) -> torch.Tensor:
        return self.owner.grad_for(self.parameter)

    @property
    def is_split(self) -> bool:
        return self.master.dtype == torch.int16

    def exact(self) -> torch.Tensor:
        """The fp32 values: the master itself where it is whole."""
        return split_master.join(self.local, self.master) if self.is_split else self.master

    @torch.no_grad()
    def set(self, values: torch.Tensor) -> None:
        """Master and copy become these fp32 values."""
        if self.is_split:
            upper, rest = split_master.split(values.to(self.local.device))
            self.local.copy_(upper)
            self.master.copy_(rest)
            return
        self.master.copy_(values)
        if self.master is not self.local:
            self.local.copy_(self.master)


# What each optimizer keeps beside the weights, by the names that torch gives it.
MOMENTS: dict[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd-momentum": ("momentum_buffer",),
    "sgd": (),
}
SUPPORTED = tuple(MOMENTS)


class Optimizer:
    def __init__(
        self,
        weights: Sequence[Weight],
        job: Job,
        training: Training,
        mesh: Mesh,
        in_one_pass: bool = False,
        tape: CUDAGraphPool | None = None,
    ) -> None:
        self.weights, self.training, self.mesh = list(weights), training, mesh
        self.inner = None if in_one_pass else _inner(self.weights, job, training)
        """torch's optimizer; None: our own kernel steps"""
        self.moments = MOMENTS[job.optimizer]
        self.state: MutableMapping[torch.Tensor, dict[str, Any]] = defaultdict(dict) if self.inner is None else self.inner.state
        self.updates = 0
        self.norm = recorded(self._norm, tape)
        self._now = torch.zeros(4, device=mesh.device)
        """what our own kernel reads anew in each step"""
        self._pass = recorded(self._one_pass, tape)

    def _norm(self) -> torch.Tensor:
        """The norm of the whole gradient, the same number on every rank of every layout."""
        counted = [weight.gradient for weight in self.weights if weight.counted and weight.gradient.numel()]
        squares = torch.zeros((), device=self.mesh.device)
        if counted and self.inner is None:
            from ultrascale.kernels import adamw_triton

            squares = adamw_triton.sum_of_squares([gradient.contiguous() for gradient in counted])
        elif counted:
            squares = torch.stack(torch._foreach_norm(counted, dtype=torch.float32)).to(self.mesh.device).square().sum()
        return comm.all_reduce(squares, self.mesh.parts).sqrt()

    def scale_gradients(self, factor: float) -> None:
        torch._foreach_mul_([weight.gradient for weight in self.weights], factor)

    def step(self, learning_rate: float, factor: float = 1.0) -> None:
        """One update with the gradients times `factor`."""
        if self.inner is None:
            self._step_in_one_pass(learning_rate, factor)
            return
        if factor != 1.0:
            self.scale_gradients(factor)
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        for portion in self._portions():
            for weight in portion:
                weight.master.grad = weight.gradient.to(weight.master)
            self.inner.step()  # of those that have a gradient
            for weight in portion:
                weight.master.grad = None
        self.updates += 1
        apart = [weight for weight in self.weights if weight.master is not weight.local]
        if apart:
            with torch.no_grad():
                torch._foreach_copy_([weight.local for weight in apart], [weight.master for weight in apart])

    def _portions(self) -> list[list[Weight]]:
        """All weights, or where gradients are not in their masters' format as many at a time as the largest has elements:
        copies of all would be as large as the masters.
        """
        if all(weight.gradient.dtype == weight.master.dtype for weight in self.weights):
            return [self.weights]
        most = max(weight.master.numel() for weight in self.weights)
        portions, size = [list[Weight]()], 0
        for weight in self.weights:
            size += weight.master.numel()
            if portions[-1] and size > most:
                portions.append([])
                size = weight.master.numel()
            portions[-1].append(weight)
        return portions

    def _step_in_one_pass(self, learning_rate: float, factor: float) -> None:
        from ultrascale.kernels import adamw_triton

        self.updates += 1
        now = adamw_triton.changing(factor, learning_rate, (self.training.beta1, self.training.beta2), self.updates)
        self._now.copy_(now.pin_memory() if self._now.is_cuda else now, non_blocking=True)
        self._pass()

    def _one_pass(self) -> None:
        from ultrascale.kernels import adamw_triton

        training = self.training
        for weight in self.weights:
            moments = self.state[weight.master]
            if not moments:
                moments.update(self._nothing(weight))
            adamw_triton.step(
                weight.master,
                weight.gradient.contiguous(),
                moments["exp_avg"],
                moments["exp_avg_sq"],
                weight.local if weight.master is not weight.local else None,
                self._now,
                decay=training.weight_decay if weight.shard.decays else 0.0,
                betas=(training.beta1, training.beta2),
                eps=training.eps,
            )

    def _nothing(self, weight: Weight) -> dict[str, torch.Tensor]:
        """Moments before the first update, in fp32 beside masters of either kind."""
        return {name: torch.zeros_like(weight.master, dtype=torch.float32) for name in self.moments}

    def moment(self, weight: Weight, name: str) -> torch.Tensor:
        moment = self.state[weight.master][name]
        assert isinstance(moment, torch.Tensor)
        return moment

    def continued(self, updates: int) -> None:
        """As after so many updates, with moments of zero for whoever fills them."""
        self.updates = updates
        if not updates:
            return
        for weight in self.weights:
            state = self.state[weight.master]
            state.update(self._nothing(weight))
            if "exp_avg" in self.moments:
                state["step"] = torch.tensor(float(updates), device=weight.master.device)

    @torch.no_grad()
    def fill(self) -> None:
        """Brings what computes up to its masters."""
        for weight in self.weights:
            if weight.master is not weight.local and not weight.is_split:
                weight.local.copy_(weight.master)

    def state_tensors(self) -> list[torch.Tensor]:
        """Moments, for the account of memory."""
        states = self.state.values()
        return [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]

    def unfinished(self) -> str | None:
        """The first parameter whose gradient is not finite."""
        return next((w.shard.name for w in self.weights if not bool(torch.isfinite(w.gradient).all())), None)


def _inner(weights: list[Weight], job: Job, training: Training) -> torch.optim.Optimizer:
    groups = [
        {"params": [w.master for w in weights if w.shard.decays == decays], "weight_decay": decay}
        for decays, decay in ((True, training.weight_decay), (False, 0.0))
    ]
    groups = [group for group in groups if group["params"]]
    if job.optimizer == "adamw":
        betas = (training.beta1, training.beta2)
        # Fused on either device: twice as fast, and without copies of every weight on the way.
        return torch.optim.AdamW(groups, lr=training.lr, betas=betas, eps=training.eps, fused=True)
    if job.optimizer in ("sgd", "sgd-momentum"):
        momentum = training.beta1 if job.optimizer == "sgd-momentum" else 0.0
        return torch.optim.SGD(groups, lr=training.lr, momentum=momentum)
    raise SpecError(f"job.optimizer is {job.optimizer} but the engine steps with {', '.join(SUPPORTED)}: try adamw")


class LossScale:
    """fp16's range ends at 6·10⁻⁸: the loss is scaled up so that small gradients survive, down when large ones overflow."""

    def __init__(self, training: Training, used: bool) -> None:
        self.value = training.loss_scale if used else 1.0
        self.used, self.window, self.good = used, training.loss_scale_window, 0

    def update(self, overflow: bool) -> None:
        if not self.used:
            return
        if overflow:
            self.value, self.good = max(1.0, self.value / 2), 0
            return
        self.good += 1
        if self.good == self.window:
            self.value, self.good = self.value * 2, 0
