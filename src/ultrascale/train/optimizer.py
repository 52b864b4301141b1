"""The optimizer on this rank's shards: fp32 masters, global norm, learning-rate schedule, loss scale.

Its input is the same in every layout: a list of local tensors, their gradients, and the axis over which norms are summed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ultrascale.kernels import split_master
from ultrascale.kernels.cuda_graphs import CUDAGraphPool, graphed
from ultrascale.model.transformer import copy_of_embedding
from ultrascale.parallel import comm
from ultrascale.parallel.data import GradientReducer
from ultrascale.parallel.mesh import Mesh, Shard
from ultrascale.parallel.torch_private import foreach_copy_, foreach_mul_, foreach_norm
from ultrascale.specs.job import EMA, OPTIMIZERS, Job
from ultrascale.specs.training import Training
from ultrascale.specs.units import groups_up_to
from ultrascale.train.elementwise import BF16Moments, E4M3Moments, Lion, RoundedAdamW, row_chunks
from ultrascale.train.muon import Muon
from ultrascale.train.mup import lr_scale

if TYPE_CHECKING:
    from ultrascale.kernels.adamw_triton import MultiTensorAdamW


@dataclass
class Weight:
    """One parameter's shard on this rank, with master and gradient."""

    shard: Shard
    parameter: nn.Parameter
    local: torch.Tensor
    """the tensor used in forward, or its ZeRO shard"""
    master: torch.Tensor
    """what the optimizer steps: `local` itself in fp32, an fp32 copy, or the lower halves of fp32 values, `local` the upper"""
    owner: GradientReducer
    frozen: bool = False
    """beside adapters: no gradient, and no master but `local`"""

    @property
    def gradient(self) -> torch.Tensor:
        return self.owner.grad_for(self.parameter)

    @property
    def is_split(self) -> bool:
        return self.master.dtype == torch.int16

    def exact(self) -> torch.Tensor:
        """The fp32 values: the master itself unless it is split."""
        return split_master.join(self.local, self.master) if self.is_split else self.master

    @torch.no_grad()
    def set(self, values: torch.Tensor) -> None:
        """Sets master and `local` to these fp32 values."""
        if self.is_split:
            upper, rest = split_master.split(values.to(self.local.device))
            self.local.copy_(upper)
            self.master.copy_(rest)
            return
        self.master.copy_(values)
        if self.master is not self.local:
            self.local.copy_(self.master)


class Optimizer:
    def __init__(
        self,
        weights: Sequence[Weight],
        job: Job,
        training: Training,
        mesh: Mesh,
        fused: bool = False,
        graphs: CUDAGraphPool | None = None,
    ) -> None:
        self.weights, self.job, self.training, self.mesh = list(weights), job, training, mesh
        self.spec = OPTIMIZERS[job.optimizer]
        matrices = [weight for weight in self.weights if self._is_matrix(weight)]
        self.muon = Muon(matrices, job, training, mesh) if matrices else None
        self.others = [weight for weight in self.weights if not self._is_matrix(weight)]
        """what Muon does not step"""
        self.inner = None if fused else _inner(self.others, job, training)
        """torch's optimizer; None: the fused AdamW kernel steps"""
        self._states: MutableMapping[torch.Tensor, dict[str, Any]] = (
            defaultdict(dict) if self.inner is None else self.inner.state
        )
        averaged = self.weights if job.ema else []
        self.ema = {weight.master: torch.empty_like(weight.master, dtype=torch.float32) for weight in averaged}
        """by master, the moving mean of each weight"""
        self.start_ema()
        self.update_ema = graphed(self._update_ema, graphs if job.ema else None)
        self.updates = 0
        self.norm = graphed(self._norm, graphs)
        self._step_inputs = torch.zeros(4, device=mesh.device)
        """inputs of the fused kernel that change in each step"""
        self._fused_step = graphed(self._launch_fused_step, graphs)

    def _norm(self) -> torch.Tensor:
        """The norm of the whole gradient, the same value on every rank of every layout."""
        gradients = [weight.gradient for weight in self.weights if weight.shard.is_primary and weight.gradient.numel()]
        squares = torch.zeros((), device=self.mesh.device)
        if gradients and self.inner is None:
            squares = self._kernel.sum_of_squares([gradient.contiguous() for gradient in gradients])
        elif gradients:
            squares = torch.stack(foreach_norm(gradients, dtype=torch.float32)).to(self.mesh.device).square().sum()
        return comm.all_reduce(squares, self.mesh.parts).sqrt()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        foreach_mul_([weight.gradient for weight in self.weights], factor)

    def _clip_values(self, factor: float | torch.Tensor = 1.0) -> None:
        """Limits each element of the gradients times `factor`; a NaN factor makes them NaN."""
        if self.training.clip_value:
            highest: Any = self.training.clip_value / factor
            for weight in self.weights:
                weight.gradient.clamp_(-highest, highest)

    def step(self, learning_rate: float, factor: float | torch.Tensor = 1.0) -> None:
        """One update with the gradients times `factor`: for the fused kernel a tensor, where NaN updates nothing."""
        if self.inner is None:
            self._step_fused(learning_rate, factor)
            return
        if factor != 1.0:
            self.scale_gradients(factor)
        self._clip_values()
        for group in self.inner.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]
        if isinstance(self.inner, RoundedAdamW):
            self.inner.updates = self.updates + 1
        for weights in self._groups():
            for weight in weights:
                weight.master.grad = weight.gradient.to(weight.master)
            self.inner.step()  # skips weights without a gradient
            for weight in weights:
                weight.master.grad = None
        if self.muon is not None:
            self.muon.step(learning_rate)
        self.updates += 1
        copied = [weight for weight in self.weights if weight.master is not weight.local]
        if copied:
            with torch.no_grad():
                foreach_copy_([weight.local for weight in copied], [weight.master for weight in copied])

    @torch.no_grad()
    def start_ema(self) -> None:
        """Sets the mean of the weights to their values now."""
        for weight in self.weights if self.ema else ():
            self.ema[weight.master].copy_(weight.exact())

    @torch.no_grad()
    def _update_ema(self) -> None:
        """Moves the mean of the weights towards their values, by chunks of rows where those have to be joined."""
        share = 1 - self.training.ema_decay
        for weight in self.weights if self.ema else ():
            mean = self.ema[weight.master]
            if not weight.is_split:
                mean.lerp_(weight.master, share)
                continue
            for rows in row_chunks(mean):
                mean[rows].lerp_(split_master.join(weight.local[rows], weight.master[rows]), share)

    def _groups(self) -> list[list[Weight]]:
        """Groups of weights to step together: all, or, if gradients need a cast to fp32, as many as the largest has elements.

        Casts of all gradients at once would take as much memory as the masters.
        """
        if all(weight.gradient.dtype == weight.master.dtype for weight in self.others):
            return [self.others]
        largest = max(weight.master.numel() for weight in self.others)
        return groups_up_to(largest, self.others, lambda weight: weight.master.numel())

    def _step_fused(self, learning_rate: float, factor: float | torch.Tensor) -> None:
        from ultrascale.kernels import adamw_triton

        self.updates += 1
        inputs = adamw_triton.step_inputs(learning_rate, (self.training.beta1, self.training.beta2), self.updates)
        self._step_inputs[1:].copy_(inputs.pin_memory() if self._step_inputs.is_cuda else inputs, non_blocking=True)
        self._step_inputs[0] = factor
        self._fused_step()

    @cached_property
    def _kernel(self) -> MultiTensorAdamW:
        from ultrascale.kernels import adamw_triton

        return adamw_triton.MultiTensorAdamW(self.mesh.device)

    def _launch_fused_step(self) -> None:
        from ultrascale.kernels import adamw_triton

        self._clip_values(self._step_inputs[0])
        training, weights = self.training, []
        for weight in self.weights:
            moments = self._states[weight.master]
            if not moments:
                moments.update(self._zero_moments(weight))
            tensors = weight.master, weight.gradient.contiguous(), moments["exp_avg"], moments["exp_avg_sq"]
            copy = weight.local if weight.master is not weight.local else None
            rates = weight_decay(weight, training), lr_scale(weight.shard, self.job, training)
            weights.append(adamw_triton.AdamWTensors(*tensors, copy, *rates))
        self._kernel.step(weights, self._step_inputs, (training.beta1, training.beta2), training.eps)

    def _zero_moments(self, weight: Weight) -> dict[str, torch.Tensor]:
        """Moments before the first update."""
        names = [name for name in self.moments(weight) if name != EMA]
        if isinstance(self.inner, RoundedAdamW):
            each = [self.inner.moments.zero(weight.master, name) for name in names]
            return {key: value for found in each for key, value in found.items()}
        return {name: torch.zeros_like(weight.master, dtype=torch.float32) for name in names}

    def _is_matrix(self, weight: Weight) -> bool:
        """Whether Muon steps it."""
        return self.spec.matrices is not None and weight.shard.is_hidden_matrix

    def moments(self, weight: Weight) -> tuple[str, ...]:
        """The names of its states, and of the mean of its values."""
        return (*self.spec.of(self._is_matrix(weight)).moments, *((EMA,) if self.ema else ()))

    @property
    def all_moments(self) -> tuple[str, ...]:
        return (*self.spec.all_moments, *((EMA,) if self.ema else ()))

    def _state(self, weight: Weight) -> dict[str, Any]:
        states = self.muon.state if self.muon is not None and self._is_matrix(weight) else self._states
        return states[weight.master]

    def moment(self, weight: Weight, name: str) -> torch.Tensor:
        """In fp32; a copy if it is kept in fewer bits."""
        if isinstance(self.inner, RoundedAdamW) and name != EMA:
            return self.inner.moments.read(self._state(weight), name)
        moment = self.ema[weight.master] if name == EMA else self._state(weight)[name]
        assert isinstance(moment, torch.Tensor)
        return moment

    def set_moment(self, weight: Weight, name: str, values: torch.Tensor) -> None:
        """To values that its format has, as a checkpoint holds them."""
        if isinstance(self.inner, RoundedAdamW) and name != EMA:
            none = torch.zeros((), dtype=torch.int32, device=weight.master.device)
            self.inner.moments.write(self._state(weight), name, values.to(none.device), none)
            return
        (self.ema[weight.master] if name == EMA else self._state(weight)[name]).copy_(values)

    def continued(self, updates: int) -> None:
        """Sets the state to that after `updates` updates, with zero moments for the caller to fill."""
        self.updates = updates
        if not updates:
            return
        for weight in self.weights:
            state = self._state(weight)
            state.update(self._zero_moments(weight))
            if "exp_avg" in state:
                state["step"] = torch.tensor(float(updates), device=weight.master.device)

    @torch.no_grad()
    def fill(self) -> None:
        """Copies the masters to the tensors used in forward."""
        for weight in self.weights:
            if weight.master is not weight.local and not weight.is_split:
                weight.local.copy_(weight.master)

    def state_tensors(self) -> list[torch.Tensor]:
        """The moments and the mean of the weights, for the memory report."""
        states = [*self._states.values(), *(self.muon.state.values() if self.muon is not None else ())]
        moments = [value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        return [*moments, *self.ema.values()]

    def first_not_finite(self) -> str | None:
        """The first parameter whose gradient is not finite."""
        return next((w.shard.name for w in self.weights if not bool(torch.isfinite(w.gradient).all())), None)


def weight_decay(weight: Weight, training: Training) -> float:
    """Of matrices; not of norms and biases."""
    decays = weight.shard.is_matrix and (training.decay_embeddings or weight.shard.is_in_layer)
    return training.weight_decay if decays else 0.0


def _inner(weights: list[Weight], job: Job, training: Training) -> torch.optim.Optimizer:
    alike: dict[tuple[float, float], list[torch.Tensor]] = {}
    for weight in weights:
        rates = weight_decay(weight, training), lr_scale(weight.shard, job, training)
        alike.setdefault(rates, []).append(weight.master)
    groups: list[dict[str, Any]] = [
        {"params": masters, "weight_decay": decay, "lr_scale": scale} for (decay, scale), masters in sorted(alike.items())[::-1]
    ]
    if job.optimizer in ("adamw", "muon"):
        betas = (training.beta1, training.beta2)
        # Fused on either device: twice as fast, and without temporary copies of every weight.
        return torch.optim.AdamW(groups, lr=training.lr, betas=betas, eps=training.eps, fused=True)
    if job.optimizer in ("adamw-bf16", "adamw-8bit"):
        betas, copy = (training.beta1, training.beta2), copy_of_embedding(job.model)
        moments = BF16Moments() if job.optimizer == "adamw-bf16" else E4M3Moments()
        return RoundedAdamW(groups, training.lr, betas, training.eps, weights, copy, moments)
    if job.optimizer == "lion":
        return Lion(groups, training.lr, (training.beta1, training.beta2))
    assert job.optimizer in ("sgd", "sgd-momentum")
    return torch.optim.SGD(groups, lr=training.lr, momentum=training.beta1 if job.optimizer == "sgd-momentum" else 0.0)


class LossScale:
    """Dynamic loss scale: fp16's smallest value is 6·10⁻⁸, so the loss is scaled up for small gradients, down on overflow."""

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


def learning_rate(training: Training, step: int) -> float:
    """The learning rate of step `step`, counted from 0: linear warm-up, then the schedule down to lr × min_lr_ratio.

    Warm-up begins at lr / warmup, not at 0, so that no step is wasted. The last step has the lowest rate.
    """
    if step < training.warmup:
        return training.lr * (step + 1) / training.warmup
    lowest = training.min_lr_ratio
    return training.lr * (lowest + (1 - lowest) * _lr_height(training, min(step, training.steps - 1)))


def _lr_height(training: Training, step: int) -> float:
    """1 at the highest rate, 0 at the lowest, for a step after warm-up."""
    last = training.steps - 1
    if training.lr_schedule == "constant":
        return 1.0
    if training.lr_schedule == "wsd":
        left = last - step  # MiniCPM's third phase, linear: each of its steps falls by the same amount
        return min(1.0, left / training.decay_steps) if training.decay_steps else 1.0
    # A single step after warm-up stays at the top.
    progress = (step - training.warmup) / max(1, last - training.warmup)
    return 0.5 * (1 + math.cos(math.pi * progress)) if training.lr_schedule == "cosine" else 1 - progress
