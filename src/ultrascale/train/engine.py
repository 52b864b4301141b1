"""One training step on this rank: forward and backward by the pipeline, gradients brought together, norm, clip, update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ultrascale.parallel import comm, context
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.pipeline import Batch
from ultrascale.parallel.ranges import profile_range
from ultrascale.specs.errors import RunError
from ultrascale.specs.job import Job
from ultrascale.specs.training import Training
from ultrascale.train import attention, gate_autotune
from ultrascale.train.balance import RouterBalance, RouterLoads
from ultrascale.train.build import build
from ultrascale.train.cuda_graphs import CUDAGraphPool, recorded
from ultrascale.train.data import Batches, rows_of
from ultrascale.train.lr import learning_rate
from ultrascale.train.optimizer import LossScale, Optimizer, Weight
from ultrascale.train.prefetch import BatchPrefetcher


class NotFiniteError(RunError):
    """The loss or a gradient is no longer a number."""


@dataclass(frozen=True)
class StepResult:
    loss: float
    """mean over the tokens of the global batch"""
    grad_norm: float
    lr: float
    skipped: bool
    """fp16: gradients overflowed, the weights were left alone and the loss scale halved"""
    loads: RouterLoads | None = None
    """of experts, where the model has any"""
    stop: bool = False
    """some rank was asked to end the run"""


class Engine:
    """A job cut by a layout, as one rank runs it."""

    def __init__(self, job: Job, mesh: Mesh, training: Training, batches: Batches) -> None:
        self.job, self.mesh, self.training, self.batches = job, mesh, training, batches
        # Before there is a model: now there is memory for it.
        self.attention = None if training.document_mask else attention.fastest(job, mesh.layout, mesh.device)
        self.gates = gate_autotune.fastest(job, mesh.layout, training, mesh.device)
        built = build(job, mesh, training)
        self.pipeline, self.weights = built.pipeline, built.weights
        for chosen in (self.attention, self.gates):
            if chosen is not None:
                chosen.apply(chunk.gradients.module for chunk in self.pipeline.chunks.values())
        self.tape = CUDAGraphPool(mesh.device, training.graphs) if built.kernels.recorded else None
        """of a GPU's launches, where a step's are the same as the last one's"""
        self.optimizer = Optimizer(self.weights, job, training, mesh, built.kernels.adamw, self.tape)
        self.balance = RouterBalance(built.routers, self.weights, job, mesh, training) if job.model.moe is not None else None
        self._loads: RouterLoads | None = None
        self.scale = LossScale(training, used=job.precision == "fp16")
        self.tokens = mesh.layout.batch_tokens(job.seq)
        self.here = context.positions(job.seq, mesh.cp, mesh.layout.context_parallel)
        self.positions = self.here.to(mesh.device)
        self._ahead = BatchPrefetcher(self._host_rows, end=training.steps)
        self.asked_to_stop = False
        """set by whoever hears of it on this rank; the next step's result says so on every rank"""
        self._stop = torch.zeros(())
        self._batch: Batch | None = None
        self._passes = recorded(self._forward_and_backward, self.tape, before=self._forget)
        self._ties = [weight for weight in self.weights if job.model.tied_embeddings and _is_end(weight)]

    def step(self, number: int) -> StepResult:
        """Step `number`, counted from 0."""
        loss = self.backward(self.read(number))
        return self.update(number, loss)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Forward and backward of a step's batch; leaves the (scaled) gradients in place. Returns the mean loss."""
        self._batch = batch
        began = time.perf_counter()
        loss = self._passes()
        if self.tape is not None:
            self.tape.launched(time.perf_counter() - began)
        self._batch = None
        if self.balance is not None:
            self._loads = self.balance.take()
        return self._mean_loss(loss)

    def _forward_and_backward(self) -> torch.Tensor:
        assert self._batch is not None
        # Data ranks take the mean of their gradients: weighed so, it is the gradient of the mean over all tokens.
        weight = self.scale.value * self.mesh.data.size / self.tokens
        if self.balance is not None:
            self.balance.aim(weight)
        with profile_range("forward and backward"):
            loss = self.pipeline.step(self._batch, weight)
        with profile_range("gradients"):
            self._complete_gradients()
        return loss

    def _forget(self) -> None:
        """Lets go of the last step's gradients."""
        for chunk in self.pipeline.chunks.values():
            chunk.gradients.begin()

    def update(self, number: int, loss: torch.Tensor) -> StepResult:
        """Norm, clipping and the optimizer's step, from the gradients that `backward` left."""
        norm = self.optimizer.norm() / self.scale.value
        rate = learning_rate(self.training, number)
        began = time.perf_counter()
        mean, length, stop = torch.stack((loss, norm, self._stop)).tolist()  # together: a GPU is waited for once
        if self.tape is not None:
            self.tape.waited(time.perf_counter() - began)
        result = StepResult(mean, length, rate, skipped=False, loads=self._loads, stop=bool(stop))
        if not (_finite(result.loss) and _finite(result.grad_norm)):
            if self.scale.value <= 1.0:  # not fp16, or no smaller scale would help
                raise NotFiniteError(self._what_broke(number, result))
            self.scale.update(overflow=True)
            return replace(result, skipped=True)
        factor = 1 / self.scale.value
        if self.training.clip:
            factor *= min(1.0, self.training.clip / (result.grad_norm + 1e-6))
        self.optimizer.step(rate, factor)
        if self.balance is not None and self._loads is not None:
            self.balance.steer(self._loads)
        self.scale.update(overflow=False)
        return result

    def evaluate(self, batches: int) -> float:
        """Mean loss over so many global batches of held-out text."""
        total = torch.zeros((), device=self.mesh.device)
        for number in range(batches):
            total += self._mean_loss(self.pipeline.evaluate(self.read(number, held_out=True)))
        return float(total) / batches

    def read(self, number: int, held_out: bool = False) -> Batch:
        """This rank's part of the batch of step `number`, or of that batch of the held-out text."""
        found = self._host_rows(number, held_out=True) if held_out else self._ahead.take(number)
        if self.tape is not None and not held_out:
            cut = self.tape.hold(found)
        else:
            cut = [tuple(part.to(self.mesh.device, non_blocking=True) for part in parts) for parts in found]
        documents = (lambda k: cut[k][2]) if self.training.document_mask else None
        return Batch(lambda k: cut[k][0], lambda k: cut[k][1], self.positions, documents)

    def _host_rows(self, number: int, held_out: bool = False) -> list[tuple[torch.Tensor, ...]]:
        """Per micro-batch: inputs, targets and, where asked for, documents."""
        layout, place, batches = self.mesh.layout, self.mesh.place, self.batches
        read = batches.evaluation if held_out else batches.train
        found = []
        for k in range(layout.gas):
            rows = rows_of(layout, place.dp, k)
            parts: tuple[torch.Tensor, ...] = read(number, rows)
            if self.training.document_mask:
                parts = (*parts, batches.documents(number, rows, held_out))
            found.append(tuple(self._mine(part) for part in parts))
        return found

    def _mine(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's part of the sequences; in pinned memory for a GPU, so that nobody waits for the copy."""
        part = tokens[:, self.here]
        return part.pin_memory() if self.mesh.device.type == "cuda" else part

    def _complete_gradients(self) -> None:
        """Sums what ranks with the same parameter computed in shares: norms on slices, repeated kv heads, tied ends."""
        experts = [weight.gradient for weight in self.weights if weight.shard.rows is not None]
        if experts:  # the mean was taken over those that hold them alone, while all data ranks sent them tokens
            torch._foreach_mul_(experts, 1 / self.mesh.ep.size)
        by_axis: dict[int, tuple[Axis, list[torch.Tensor]]] = {}
        for weight in self.weights:
            axis = weight.shard.partial
            if axis is not None:
                by_axis.setdefault(id(axis.group), (axis, []))[1].append(weight.gradient)
        for axis, gradients in by_axis.values():
            _sum_together(gradients, axis)
        self._tie()

    def _tie(self) -> None:
        if self.mesh.pp.size == 1 or not self._ties:
            return
        if len(self._ties) == 2:  # a V has both ends on its first rank
            first, last = (weight.gradient for weight in self._ties)
            first += last
            last.copy_(first)
        else:
            _sum_together([self._ties[0].gradient], self.mesh.ends)

    def _mean_loss(self, total: torch.Tensor) -> torch.Tensor:
        """Only last stages have a loss; each of their tp ranks has the same. A wish to stop travels with it."""
        said = torch.stack([total, torch.full_like(total, float(self.asked_to_stop))])
        loss, self._stop = comm.all_reduce(said, self.mesh.world).unbind()
        return loss / (self.mesh.tp.size * self.tokens)

    def _what_broke(self, number: int, result: StepResult) -> str:
        mine = self.optimizer.unfinished()
        everyone: list[str | None] = [mine]
        if self.mesh.world.group is not None:
            everyone = [None] * self.mesh.world.size
            torch.distributed.all_gather_object(everyone, mine, group=self.mesh.world.group)
        broken = next((name for name in everyone if name is not None), None)
        where = f"the gradient of {broken} is not finite" if broken else "every gradient is finite"
        if result.loads is not None and result.loads.broken:
            where = f"the router of layer {result.loads.broken[0]} scored tokens with NaN; {where}"
        return (
            f"step {number + 1}: loss {result.loss}, gradient norm {result.grad_norm}; {where}. The weights are those of step "
            f"{number}. Try a lower train.lr, a longer train.warmup_steps, or a smaller train.clip"
        )


def _is_end(weight: Weight) -> bool:
    return weight.shard.name in ("embed.tokens.weight", "head.linear.weight")


def _finite(value: float) -> bool:
    return value - value == 0.0


def _sum_together(tensors: Sequence[torch.Tensor], axis: Axis) -> None:
    """One all-reduce for many small tensors."""
    flat = comm.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), axis)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
