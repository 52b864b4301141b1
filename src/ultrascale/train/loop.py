"""The training loop of one rank: read, forward and backward, update, evaluate, record, save.

Only rank 0 writes metrics; all ranks compute the same values.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ultrascale.cost import flops
from ultrascale.parallel.ranges import profile_range
from ultrascale.specs.measurement import MeasuredMemory
from ultrascale.specs.units import GIB
from ultrascale.train import checkpoint, heap
from ultrascale.train.async_checkpoint import CheckpointManager
from ultrascale.train.engine import Engine, NotFiniteError, StepResult
from ultrascale.train.log import MetricsLog, ProgressLine, StepRecord, open_sinks
from ultrascale.train.memory_owners import account
from ultrascale.train.request import Request
from ultrascale.train.stop import StopSignals
from ultrascale.train.watchdog import Watchdog


@dataclass
class StepStats:
    """Times and memory of this rank's steps."""

    step_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    data_s: list[float] = field(default_factory=list)
    waits_s: list[dict[str, float]] = field(default_factory=list)
    memory: MeasuredMemory | None = None


class Observer:
    """Hooks called around each step. This one records peak memory; measure/profile/ records more."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def account(self, step: Callable[[], StepResult]) -> tuple[MeasuredMemory, StepResult]:
        """Runs the one step whose memory is measured."""
        return account(self.engine, step)

    def phase(self, step: int, doing: str) -> None:
        """Called when a phase of a step begins: reading, forward and backward, update, saving or evaluating."""

    def stepped(self) -> None:
        """Called after each step."""

    def report(self) -> Any:
        """Called on every rank after the last step; rank 0's result is returned to the process that started the run."""


class Loop:
    """Runs steps until the last or until a stop signal; saves checkpoints on the way and at the end."""

    def __init__(
        self,
        engine: Engine,
        recorder: MetricsRecorder | None,
        checkpoints: CheckpointManager | None,
        signals: StopSignals,
        watchdog: Watchdog,
        observer: Observer | None = None,
    ) -> None:
        self.observer = observer or Observer(engine)
        self.engine, self.recorder, self.checkpoints = engine, recorder, checkpoints
        self.signals, self.watchdog = signals, watchdog
        self.watch = StepStats()
        self.done = 0
        if checkpoints is not None:
            checkpoints.moving = lambda: watchdog.waits_for_disk(self.done, "saving")
        self.stopped: str | None = None
        self._stalled = 0.0

    def at(self, step: int, doing: str) -> None:
        """Reports that this rank begins a phase of a step."""
        self.watchdog.at(step, doing)
        self.observer.phase(step, doing)

    def run(self, start: int) -> None:
        training = self.engine.training
        self.done = start
        # The second step is the first with all memory allocated: optimizer states and buffers exist.
        accounted = min(start + 1, training.steps - 1)
        slowed = StepStats()  # of the step slowed by memory tracking: its times are discarded
        for number in range(start, training.steps):
            self.engine.asked_to_stop = self.signals.received is not None
            if number == accounted:
                self.watch.memory, result = self.observer.account(partial(self._step, number, slowed))
            else:
                result = self._step(number, self.watch)
            self.done = number + 1
            self._after(result, slowed if number == accounted else self.watch)
            self.observer.stepped()
            if result.stop:
                self.stopped = self.signals.received or "another rank's signal"
                break
        if not self.watch.step_s:  # the run has only one step
            self.watch = replace(slowed, memory=self.watch.memory)
        if self.checkpoints is not None and self.done > start:
            self.at(self.done, "saving")
            if self.recorder is not None:
                self.recorder.sync()
            self.checkpoints.save_final(self.done)

    def _after(self, result: StepResult, stats: StepStats) -> None:
        training = self.engine.training
        held_out = None
        if training.eval_every and self.done % training.eval_every == 0:
            self.at(self.done, "evaluating")
            held_out = self.engine.evaluate(training.eval_batches)
        if self.recorder is not None:
            scale = self.engine.scale.value if self.engine.scale.used else None
            self.recorder.record(self.done, result, stats, held_out, scale, self._stalled or None)
        self._stalled = 0.0
        # After this step's row is written: a run that is killed after the checkpoint resumes behind it and repeats no step.
        if (
            self.checkpoints is not None
            and self.checkpoints.settings.due(self.done)
            and self.done < training.steps
            and not result.stop
        ):
            self.at(self.done, "saving")
            if self.recorder is not None:
                self.recorder.sync()
            self._stalled += self.checkpoints.save(self.done)
        if self.engine.mesh.device.type == "cpu" and self.done % heap.EVERY == 0:
            heap.give_back()

    def _step(self, number: int, watch: StepStats) -> StepResult:
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
        watch.step_s.append(end - start)
        watch.data_s.append(read - start)
        watch.optimizer_s.append(end - backward - stalled)
        watch.waits_s.append(waits)
        return result

    def _update(self, number: int, loss: torch.Tensor) -> StepResult:
        try:
            return self.engine.update(number, loss)
        except NotFiniteError as error:
            if self.checkpoints is None or number == 0:
                raise
            self.checkpoints.save_final(number)  # the weights are still finite
            raise NotFiniteError(f"{error}. They are kept in {checkpoint.newest(self.checkpoints.run)}") from None


class MetricsRecorder:
    """Writes rank 0's metrics: metrics.jsonl, other sinks, the progress line."""

    def __init__(self, request: Request, out: Path | None, peak_flops: float | None, quiet: bool, start: int = 0) -> None:
        """`start`: steps done before this launch."""
        self.request = request
        layout, job = request.layout, request.job
        self.tokens = layout.batch_tokens(job.seq)
        per_token = flops.model_flops(job.model, job.seq)
        self.mfu: Callable[[float], float | None] = lambda rate: rate * per_token / peak_flops if peak_flops else None
        sinks = open_sinks(request.training.log, out, {"layout": str(layout), "model": job.model.name}) if out else []
        self.log = MetricsLog(out, start if request.goes_on_in(out) else None, sinks) if out else None
        self.progress = None if quiet else ProgressLine(sys.stderr, request.training.steps)

    def record(
        self,
        done: int,
        result: StepResult,
        stats: StepStats,
        eval_loss: float | None,
        loss_scale: float | None,
        checkpoint_s: float | None,
    ) -> None:
        step_s, data_s, loads = stats.step_s[-1], stats.data_s[-1], result.loads
        rate = self.tokens / step_s / self.request.layout.gpus
        record = StepRecord(
            step=done,
            tokens=done * self.tokens,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens_per_s_per_gpu=rate,
            mfu=self.mfu(rate),
            peak_gib=peak_bytes() / GIB,
            data_wait_s=data_s,
            step_time_s=step_s,
            skipped=result.skipped or None,
            loss_scale=loss_scale,
            eval_loss=eval_loss,
            checkpoint_s=checkpoint_s,
            balance_loss=loads.balance_loss if loads else None,
            expert_load=loads.busiest if loads else None,
            expert_tokens=loads.per_expert if loads else None,
            expert_quantiles=loads.quantiles if loads else None,
            dropped_tokens=loads.dropped if loads else None,
        )
        if self.log is not None and done % self.request.training.log_every == 0:
            self.log.write(record)
        if self.progress is not None:
            self.progress.show(record)

    def sync(self) -> None:
        if self.log is not None:
            self.log.sync()

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def peak_bytes() -> int:
    """Peak memory of this process: allocated on the GPU, or resident on the host."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
