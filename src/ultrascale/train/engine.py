"""The training step of one rank: forward and backward by the pipeline, gradient reduction, norm, clipping, update."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ultrascale.kernels.autotune import AttentionTimes, DeltaRuleCheck, MLPTimes
from ultrascale.kernels.cuda_graphs import CUDAGraphPool, graphed
from ultrascale.kernels.selection import Kernels
from ultrascale.model.moe import Router
from ultrascale.model.multi_token import tokens_ahead
from ultrascale.model.transformer import EMBEDDING, copy_of_embedding
from ultrascale.parallel import comm, context
from ultrascale.parallel.comm import Axis, profile_range
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.pipeline import Batch, Pipeline
from ultrascale.parallel.torch_private import foreach_mul_
from ultrascale.specs.batch_ramp import BatchRamp
from ultrascale.specs.errors import RunError
from ultrascale.specs.job import Job
from ultrascale.specs.training import Training
from ultrascale.train.balance import RouterBalance, RouterLoads
from ultrascale.train.data import Batches, BatchPrefetcher, rows_of
from ultrascale.train.optimizer import LossScale, Optimizer, Weight, learning_rate


class NotFiniteError(RunError):
    """The loss or a gradient is NaN or infinite."""


@dataclass(frozen=True)
class StepResult:
    loss: float
    """mean over the tokens of the global batch that have one"""
    grad_norm: float
    lr: float
    skipped: bool
    """fp16: gradients overflowed; the weights were not updated and the loss scale was halved"""
    loads: RouterLoads | None = None
    """loads of the experts; None for a dense model"""
    z_loss: float | None = None
    """with train.z_loss: what is added to the loss; the mean over the same tokens"""
    mtp_loss: float | None = None
    """with model.mtp_depth: the mean cross-entropy of the tokens after the next, over depths and the same tokens"""
    stop: bool = False
    """some rank received a signal to end the run"""


class AsyncHostCopy:
    """A copy of a small tensor on the host, which does not wait for work that is queued after it."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._copied = values, None
        if values.is_cuda:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class Engine:
    """One rank's model, optimizer and data of a job in a layout; train/build.py creates it."""

    def __init__(
        self,
        job: Job,
        mesh: Mesh,
        training: Training,
        batches: Batches,
        pipeline: Pipeline,
        weights: list[Weight],
        frozen: list[Weight],
        routers: dict[int, Router],
        kernels: Kernels,
        autotuned: tuple[AttentionTimes | MLPTimes | DeltaRuleCheck, ...] = (),
    ) -> None:
        """`weights`: those that are trained. `routers`: of MoE layers, by layer index in the whole model. `autotuned`: measured
        to select kernels, on a GPU.
        """
        self.job, self.mesh, self.training, self.batches = job, mesh, training, batches
        self.pipeline, self.weights, self.frozen, self.autotuned = pipeline, weights, frozen, autotuned
        self.kernels = kernels
        self.base: Path | None = None
        """the checkpoint that the frozen weights are of"""
        self.cuda_graphs: CUDAGraphPool | None = None
        """CUDA graphs of the step, if every step launches the same kernels"""
        if kernels.cuda_graphs:
            all_reduce_max = None if mesh.world.size == 1 else partial(comm.all_reduce, axis=mesh.world, op="max")
            self.cuda_graphs = CUDAGraphPool(mesh.device, training.graphs, all_reduce_max)
        self.optimizer = Optimizer(self.weights, job, training, mesh, kernels.adamw, self.cuda_graphs)
        self.balance = RouterBalance(routers, self.weights, job, mesh, training) if job.model.moe is not None else None
        self._loads: RouterLoads | None = None
        self.scale = LossScale(training, used=job.precision == "fp16")
        layout = mesh.layout
        sequences = layout.mbs * layout.dp * layout.gas
        self.ramp = BatchRamp.of(training.batch_ramp, job.seq, sequences, training.seq_stages)
        lengths = {job.seq, *(stage.seq for stage in self.ramp.stages)}
        self.here = {seq: context.positions(seq, mesh.cp, layout.context_parallel) for seq in lengths}
        """positions of this rank's slice of a sequence, by its length"""
        self.positions = {seq: here.to(mesh.device) for seq, here in self.here.items()}
        self._prefetcher = BatchPrefetcher(self._host_rows, end=training.steps)
        self.stop_requested = False
        """set on a rank that received a stop signal; the result of the next step has `stop` on every rank"""
        self._stop = torch.zeros(())
        self._batch: Batch | None = None
        self._loss_weight = torch.ones((), dtype=torch.float64, device=mesh.device)
        """what each token's loss is multiplied by in backward: a tensor, since CUDA graphs keep numbers"""
        self._passes = graphed(self._forward_and_backward, self.cuda_graphs, before=self._clear_gradients)
        copy = copy_of_embedding(job.model)
        copies = () if copy is None else (EMBEDDING, copy)
        self._copies = [weight for weight in self.weights if weight.shard.name in copies]

    def step(self, number: int) -> StepResult:
        """Step `number`, counted from 0."""
        loss = self.backward(self.read(number))
        return self.update(number, loss)

    def backward(self, batch: Batch) -> torch.Tensor:
        """Runs forward and backward of a step's batch; leaves the (scaled) gradients in place.

        Returns the means of cross-entropy and, if there are such, of z-loss and of the weighted losses of further tokens.
        """
        self._batch = batch
        # Data ranks average their gradients: with this weight, the average is the gradient of the mean over all losses.
        self._loss_weight.fill_(self.scale.value * self.mesh.data.size / batch.losses)
        began = time.perf_counter()
        loss = self._passes()
        if self.cuda_graphs is not None:
            self.cuda_graphs.launched(time.perf_counter() - began)
        self._batch = None
        if self.balance is not None:
            self._loads = self.balance.take(self._sequences(batch))
        return self._sum_of_losses(loss) / batch.losses

    def _forward_and_backward(self) -> torch.Tensor:
        assert self._batch is not None
        if self.balance is not None:
            sequences = self._sequences(self._batch)
            self.balance.set_loss_weight(self.scale.value * self.mesh.data.size / sequences)
        with profile_range("forward and backward"):
            loss = self.pipeline.step(self._batch, self._loss_weight)
        with profile_range("gradients"):
            self._complete_gradients()
        return loss

    def _clear_gradients(self) -> None:
        """Frees the last step's gradients."""
        for chunk in self.pipeline.chunks.values():
            chunk.gradients.begin()

    def update(self, number: int, loss: torch.Tensor) -> StepResult:
        """Norm, clipping and optimizer step, from the gradients of `backward`."""
        norm = self.optimizer.norm() / self.scale.value
        rate = learning_rate(self.training, number)
        values = AsyncHostCopy(torch.cat((loss, torch.stack((norm, self._stop)))))  # stacked: one device-to-host sync
        queued = self.optimizer.inner is None
        if queued:  # before the host has read the values, so that the GPU does not wait for it
            factor = self._clip_factor(norm)
            self.optimizer.step(rate, torch.where(torch.isfinite(loss[0]) & torch.isfinite(norm), factor, torch.nan))
        began = time.perf_counter()
        mean, *others, length, stop = values.wait()
        mtp_loss = others.pop() / self.training.mtp_weight if self.job.model.mtp_depth else None
        if self.cuda_graphs is not None:
            self.cuda_graphs.waited(time.perf_counter() - began)
        result = StepResult(
            mean,
            length,
            rate,
            skipped=False,
            loads=self._loads,
            z_loss=next(iter(others), None),
            mtp_loss=mtp_loss,
            stop=bool(stop),
        )
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            if queued:
                self.optimizer.updates -= 1  # it changed nothing
            if self.scale.value <= 1.0:  # not fp16, or a smaller scale would not help
                raise NotFiniteError(self._not_finite_message(number, result))
            self.scale.update(overflow=True)
            return replace(result, skipped=True)
        if not queued:
            self.optimizer.step(rate, float(self._clip_factor(torch.tensor(length, dtype=torch.float64))))
        if self.balance is not None and self._loads is not None:
            self.balance.update_biases(self._loads)
        self.optimizer.update_ema()
        self.scale.update(overflow=False)
        return result

    def _clip_factor(self, norm: torch.Tensor) -> torch.Tensor:
        """What gradients are multiplied by: clipping, and the inverse of fp16's loss scale."""
        clipped = (self.training.clip / (norm + 1e-6)).clamp(max=1.0) if self.training.clip else torch.ones_like(norm)
        return clipped / self.scale.value

    def evaluate(self, batches: int) -> float:
        """Mean loss over `batches` global batches of held-out text."""
        total, losses = torch.zeros((), device=self.mesh.device), 0
        for number in range(batches):
            batch = self.read(number, held_out=True)
            total += self._sum_of_losses(self.pipeline.evaluate(batch))[0]
            losses += batch.losses
        for chunk in self.pipeline.chunks.values():
            chunk.gradients.reshard()
        return float(total) / losses

    def read(self, number: int, held_out: bool = False) -> Batch:
        """This rank's part of the batch of step `number`, or of batch `number` of the held-out text."""
        found, losses = self._host_rows(number, held_out=True) if held_out else self._prefetcher.take(number)
        has_ahead = self.job.model.mtp_depth > 0 and not held_out
        positions = self.positions[self.job.seq if held_out else self.ramp.at(number).seq]
        if self.cuda_graphs is not None and not held_out:
            self.cuda_graphs.paused = number < self.ramp.end
            if not self.cuda_graphs.paused:
                return Batch(self.cuda_graphs.copy_rows(found), positions, losses, has_ahead)
        microbatches = [tuple(part.to(self.mesh.device, non_blocking=True) for part in parts) for parts in found]
        return Batch(microbatches, positions, losses, has_ahead)

    def _host_rows(self, number: int, held_out: bool = False) -> tuple[list[tuple[torch.Tensor, ...]], int]:
        """Per micro-batch, inputs, targets, with a document mask document indices, in training what multi-token prediction
        reads and predicts; and the losses of the global batch.
        """
        layout, place, batches, depth = self.mesh.layout, self.mesh.place, self.batches, self.job.model.mtp_depth
        read = batches.evaluation if held_out else batches.train
        found = []
        gas = layout.gas if held_out else self.ramp.sequences(number) // (layout.mbs * layout.dp)
        seq = self.job.seq if held_out else self.ramp.at(number).seq
        for k in range(gas):
            rows = rows_of(layout, place.dp, k)
            parts: tuple[torch.Tensor, ...] = read(number, rows)
            if self.training.document_mask:
                parts = (*parts, batches.documents(number, rows, held_out))
            if depth and not held_out:
                parts = (*parts, tokens_ahead(parts[0], parts[1], depth, *parts[2:]))
            found.append(tuple(self._own_slice(part, seq) for part in parts))
        return found, batches.losses(number, held_out)

    def _sequences(self, batch: Batch) -> int:
        """Of the global batch, over all ranks."""
        return sum(len(parts[0]) for parts in batch.microbatches) * self.mesh.layout.dp

    def _own_slice(self, tokens: torch.Tensor, seq: int) -> torch.Tensor:
        """This rank's slice of the sequences, cut into those of `seq` tokens; in pinned memory for a GPU, so that the copy is
        asynchronous.
        """
        part = torch.unflatten(tokens, 1, (-1, seq)).flatten(0, 1)[:, self.here[seq]]
        return part.pin_memory() if self.mesh.device.type == "cuda" else part

    def _complete_gradients(self) -> None:
        """Sums partial gradients of ranks with the same parameter: norms on slices, replicated kv heads, embeddings."""
        experts = [weight.gradient for weight in self.weights if weight.shard.rows is not None]
        if experts:  # they were averaged over the ranks that hold them, but got tokens from all data ranks
            foreach_mul_(experts, 1 / self.mesh.ep.size)
        by_axis: dict[int, tuple[Axis, list[torch.Tensor]]] = {}
        for weight in self.weights:
            axis = weight.shard.partial
            if axis is not None:
                by_axis.setdefault(id(axis.group), (axis, []))[1].append(weight.gradient)
        for axis, gradients in by_axis.values():
            _all_reduce_flat(gradients, axis)
        self._sum_gradients_of_embedding()

    def _sum_gradients_of_embedding(self) -> None:
        """With its copy's."""
        if self.mesh.pp.size == 1 or not self._copies:
            return
        if len(self._copies) == 2:  # a V schedule has the first and last stage on its first rank
            first, last = (weight.gradient for weight in self._copies)
            first += last
            last.copy_(first)
        else:
            comm.all_reduce(self._copies[0].gradient, self.mesh.ends)

    def _sum_of_losses(self, total: torch.Tensor) -> torch.Tensor:
        """All-reduces losses and stop request. Only last stages have a loss, which is the same on each of their tp ranks."""
        losses = total.view(-1)
        sent = comm.all_reduce(torch.cat((losses, losses.new_full((1,), float(self.stop_requested)))), self.mesh.world)
        self._stop = sent[-1]
        return sent[:-1] / self.mesh.tp.size

    def _not_finite_message(self, number: int, result: StepResult) -> str:
        own = self.optimizer.first_not_finite()
        everyone: list[str | None] = [own]
        if self.mesh.world.group is not None:
            everyone = [None] * self.mesh.world.size
            torch.distributed.all_gather_object(everyone, own, group=self.mesh.world.group)
        broken = next((name for name in everyone if name is not None), None)
        where = f"the gradient of {broken} is not finite" if broken else "every gradient is finite"
        if result.loads is not None and result.loads.broken:
            where = f"the router of layer {result.loads.broken[0]} scored tokens with NaN; {where}"
        return (
            f"step {number + 1}: loss {result.loss}, gradient norm {result.grad_norm}; {where}. The weights are those of step "
            f"{number}. Try a lower train.lr, a longer train.warmup_steps, or a smaller train.clip"
        )


def _all_reduce_flat(tensors: Sequence[torch.Tensor], axis: Axis) -> None:
    """Sums many small tensors with one all-reduce."""
    flat = comm.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), axis)
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
