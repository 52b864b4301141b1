"""The training loop of one rank (read, forward and backward, update, evaluate, record, save) and its measurement.

Only rank 0 writes metrics; all ranks compute the same values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ultrascale.cost import flops
from ultrascale.cost.stages import recomputed_fraction
from ultrascale.parallel.comm import profile_range
from ultrascale.parallel.data import BucketedGrads
from ultrascale.specs.measurement import MeasuredMemory, MeasuredStage, MeasuredTime, Measurement
from ultrascale.specs.units import GIB
from ultrascale.train import checkpoint, memory
from ultrascale.train.async_checkpoint import CheckpointManager
from ultrascale.train.engine import Engine, NotFiniteError, StepResult
from ultrascale.train.log import MetricsRecorder

UNTIMED = "communication between data ranks is torch's own here (FSDP2 or DDP) and was not timed apart: it is part of computing"
GRAPHED = "a step's kernels were recorded and launched as one"


@dataclass
class StepStats:
    """Times and memory of this rank's steps."""

    step_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    data_s: list[float] = field(default_factory=list)
    waits_s: list[dict[str, float]] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)
    """tokens of each step, and of its sequences"""
    memory: MeasuredMemory | None = None

    def of_batch(self, wanted: tuple[int, int]) -> StepStats:
        """Only the steps with such a batch; with the largest, if none has."""
        wanted = wanted if wanted in self.batches else max(self.batches, default=wanted)
        of = [batch == wanted for batch in self.batches]
        step_s, optimizer_s, data_s = (list(compress(one, of)) for one in (self.step_s, self.optimizer_s, self.data_s))
        return StepStats(
            step_s, optimizer_s, data_s, list(compress(self.waits_s, of)), list(compress(self.batches, of)), self.memory
        )


class Observer:
    """Hooks called around each step. This one records peak memory; measure/profile/ records more."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def account(self, step: Callable[[], StepResult]) -> tuple[MeasuredMemory, StepResult]:
        """Runs the one step whose memory is measured."""
        return memory.account(self.engine, step)

    def phase(self, step: int, doing: str) -> None:
        """Called when a phase of a step begins: reading, forward and backward, update, saving or evaluating."""

    def on_step_end(self) -> None:
        """Called after each step."""

    def report(self) -> Any:
        """Called on every rank after the last step; rank 0's result is returned to the process that started the run."""


class PhaseListener(Protocol):
    """Is told what a rank is doing; the watchdog of launch/ is one."""

    def at(self, step: int, doing: str) -> None: ...

    def waits_for_disk(self, step: int, doing: str) -> None: ...


class Loop:
    """Runs steps until the last, train.stop_at_loss or a stop signal; saves checkpoints on the way and at the end.

    `stop_signal`: returns the name of a received signal.
    """

    def __init__(
        self,
        engine: Engine,
        recorder: MetricsRecorder | None,
        checkpoints: CheckpointManager | None,
        stop_signal: Callable[[], str | None],
        watchdog: PhaseListener,
        observer: Observer | None = None,
    ) -> None:
        self.observer = observer or Observer(engine)
        self.engine, self.recorder, self.checkpoints = engine, recorder, checkpoints
        self.stop_signal, self.watchdog = stop_signal, watchdog
        self.stats = StepStats()
        self.done = 0
        if checkpoints is not None:
            checkpoints.moving = lambda: watchdog.waits_for_disk(self.done, "saving")
        self.stopped: str | None = None
        self.reached_loss: float | None = None
        """the loss that is low enough for train.stop_at_loss"""
        self._stalled = 0.0

    def at(self, step: int, doing: str) -> None:
        """Reports that this rank begins a phase of a step."""
        self.watchdog.at(step, doing)
        self.observer.phase(step, doing)

    def run(self, start: int) -> None:
        training = self.engine.training
        self.done = start
        if self.reached_loss is not None:
            return
        # The second step is the first with all memory allocated: optimizer states and buffers exist.
        # In a batch-size ramp it is accounted for again in the first step with the batch that is measured.
        measured = self.engine.ramp.first_measured(start, training.steps)
        accounted = {min(start + 1, training.steps - 1), *([measured] if measured > start else [])}
        slowed = StepStats()  # of steps slowed by memory tracking: their times are discarded
        for number in range(start, training.steps):
            self.engine.stop_requested = self.stop_signal() is not None
            if number in accounted:
                self.stats.memory, result = self.observer.account(partial(self._step, number, slowed))
            else:
                result = self._step(number, self.stats)
            self.done = number + 1
            self._after(result, slowed if number in accounted else self.stats)
            self.observer.on_step_end()
            if self.reached_loss is not None:
                break
            if result.stop:
                self.stopped = self.stop_signal() or "another rank's signal"
                break
        if not self.stats.step_s:  # the run has only one step
            self.stats = replace(slowed, memory=self.stats.memory)
        self.stats = self.stats.of_batch(self._batch(measured))
        if self.checkpoints is not None and self.done > start:
            self.at(self.done, "saving")
            if self.recorder is not None:
                self.recorder.sync()
            self.checkpoints.reached_loss = self.reached_loss
            self.checkpoints.save_final(self.done)

    def _batch(self, number: int) -> tuple[int, int]:
        """Tokens of a step, and of its sequences."""
        ramp = self.engine.ramp
        return ramp.tokens(number), ramp.at(number).seq

    def _after(self, result: StepResult, stats: StepStats) -> None:
        training = self.engine.training
        held_out = None
        if training.eval_every and self.done % training.eval_every == 0:
            self.at(self.done, "evaluating")
            held_out = self.engine.evaluate(training.eval_batches)
        if self.recorder is not None:
            scale = self.engine.scale.value if self.engine.scale.used else None
            self.recorder.record(self.done, result, stats.step_s[-1], stats.data_s[-1], held_out, scale, self._stalled or None)
        self._stalled = 0.0
        goal, loss = training.stop_at_loss, held_out if training.eval_every else result.loss
        if goal is not None and loss is not None and loss <= goal:  # the same number on every rank
            self.reached_loss = loss
        # After this step's row is written: a run that is killed after the checkpoint resumes behind it and repeats no step.
        if (
            self.checkpoints is not None
            and self.checkpoints.settings.due(self.done)
            and self.done < training.steps
            and not (result.stop or self.reached_loss is not None)
        ):
            self.at(self.done, "saving")
            if self.recorder is not None:
                self.recorder.sync()
            self._stalled += self.checkpoints.save(self.done)
        if self.engine.mesh.device.type == "cpu" and self.done % memory.TRIM_EVERY == 0:
            memory.trim_heap()

    def _step(self, number: int, stats: StepStats) -> StepResult:
        engine = self.engine
        engine.mesh.clock.take()
        start = time.perf_counter()
        self.at(number + 1, "reading")
        with profile_range("reading"):
            batch = engine.read(number)
        read = time.perf_counter()
        self.at(number + 1, "forward and backward")
        loss = engine.backward(batch)
        backward = time.perf_counter()
        waits = engine.mesh.clock.take()
        stalled = self.checkpoints.wait_for_copy() if self.checkpoints is not None else 0.0
        self.at(number + 1, "update")
        with profile_range("optimizer"):
            result = self._update(number, loss)
        end = time.perf_counter()
        self._stalled += stalled
        stats.batches.append(self._batch(number))
        stats.step_s.append(end - start)
        stats.data_s.append(read - start)
        stats.optimizer_s.append(end - backward - stalled)
        stats.waits_s.append(waits)
        return result

    def _update(self, number: int, loss: torch.Tensor) -> StepResult:
        try:
            return self.engine.update(number, loss)
        except NotFiniteError as error:
            if self.checkpoints is None or number == 0:
                raise
            self.checkpoints.save_final(number)  # the weights are still finite
            raise NotFiniteError(f"{error}. They are kept in {checkpoint.newest(self.checkpoints.run)}") from None


def measurement(engine: Engine, stats: StepStats, peak_flops: float | None) -> Measurement | None:
    """Gathers the statistics of all ranks; returns the measurement on rank 0."""
    mesh, job, layout = engine.mesh, engine.job, engine.mesh.layout
    everyone: list[tuple[StepStats, int, int]] = [(stats, mesh.place.pp, _layers(engine))]
    if mesh.world.size > 1:
        everyone = [everyone[0]] * mesh.world.size
        dist.all_gather_object(everyone, (stats, mesh.place.pp, _layers(engine)))
    if mesh.rank:
        return None
    warm = stats.step_s[1:] or stats.step_s  # the first step includes compilation and first touches of memory
    step_s = statistics.median(warm)
    tokens, seq = stats.batches[-1]
    rate = tokens / step_s
    per_token = flops.model_flops(job.model, seq)
    hardware = partial(
        flops.hardware_flops, job.model, seq, layout.recompute, job.attention, recomputed=recomputed_fraction(job, layout),
        fused=engine.kernels.fused,
    )  # fmt: skip
    stages = _stages(everyone)
    fullest = max(stages, key=lambda stage: stage.memory.total)
    on_cpu = mesh.device.type == "cpu"
    chunks = engine.pipeline.chunks.values()
    untimed = mesh.data.size > 1 and not all(isinstance(chunk.gradients, BucketedGrads) for chunk in chunks)

    def utilisation(flops_per_token: float) -> float | None:
        return rate / layout.gpus * flops_per_token / peak_flops if peak_flops else None

    return Measurement(
        step_time_s=step_s,
        tokens_per_s=rate,
        tokens_per_s_per_gpu=rate / layout.gpus,
        mfu=utilisation(per_token),
        hfu=utilisation(hardware()),
        mfu_causal=utilisation(flops.model_flops(job.model, seq, causal=True)),
        hfu_causal=utilisation(hardware(causal=True)),
        model_tflops_per_gpu=rate / layout.gpus * per_token / 1e12,
        peak_gib=fullest.memory.total / GIB,
        capacity_gib=job.cluster.gpu.memory_gib,
        peak_stage=fullest.stage,
        memory=tuple(stages),
        time=_time([one[0] for one in everyone], step_s, on_cpu, not untimed),
        steps=len(warm),
        batch_tokens=tokens if (tokens, seq) != (layout.batch_tokens(job.seq), job.seq) else None,
        seq=seq if seq != job.seq else None,
        processes=layout.gpus,
        device=torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
        notes=tuple(_notes(engine, on_cpu and untimed)),
    )


def _notes(engine: Engine, untimed: bool) -> Iterator[str]:
    if untimed:
        yield UNTIMED
    yield from map(str, engine.autotuned)
    if engine.cuda_graphs is not None and engine.cuda_graphs.used:
        yield GRAPHED


def _layers(engine: Engine) -> int:
    return len({weight.shard.name.split(".")[1] for weight in engine.weights if weight.shard.name.startswith("blocks.")})


def _stages(everyone: list[tuple[StepStats, int, int]]) -> list[MeasuredStage]:
    """The rank with the highest peak memory of each pipeline stage."""
    fullest: dict[int, MeasuredStage] = {}
    for stats, stage, layers in everyone:
        assert stats.memory is not None
        measured = MeasuredStage(stage=stage, layers=layers, memory=stats.memory)
        if stage not in fullest or fullest[stage].memory.total < measured.memory.total:
            fullest[stage] = measured
    return [fullest[stage] for stage in sorted(fullest)]


def _time(ranks: list[StepStats], step_s: float, waits_timed: bool, data_timed: bool) -> MeasuredTime:
    def typical(values: Callable[[StepStats], list[float]]) -> float:
        return statistics.mean(statistics.median(values(stats)) for stats in ranks)

    optimizer_s, data_s = typical(lambda stats: stats.optimizer_s), typical(lambda stats: stats.data_s)
    if not waits_timed:  # on a GPU the host does not block when the device waits
        return MeasuredTime(overhead_s=data_s)
    axes = ("tp", "cp", "ep", "pp", "dp") if data_timed else ("tp", "cp", "ep", "pp")
    waits = {axis: typical(lambda stats: [one.get(axis, 0.0) for one in stats.waits_s]) for axis in axes}  # noqa: B023
    computing = step_s - sum(waits.values()) - optimizer_s - data_s
    return MeasuredTime(
        computing_s=max(0.0, computing),
        tensor_s=waits["tp"],
        context_s=waits["cp"],
        expert_s=waits["ep"],
        data_s=waits.get("dp"),
        bubble_s=waits["pp"],
        optimizer_s=optimizer_s,
        overhead_s=data_s,
    )
