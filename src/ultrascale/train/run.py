"""The training loop of one rank, top to bottom: build, step, evaluate, record, measure.

Rank 0 writes; all ranks compute the same numbers. What comes back is what was measured, on rank 0.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ultrascale.cost import flops
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.measurement import MeasuredMemory, MeasuredStage, MeasuredTime, Measurement
from ultrascale.specs.units import GIB
from ultrascale.train.account import account
from ultrascale.train.data import Batches, corpus
from ultrascale.train.engine import Engine, StepResult
from ultrascale.train.log import MetricsLog, Progress, StepRecord, open_sinks
from ultrascale.train.request import Request
from ultrascale.train.world import Seat

TIMEOUT = timedelta(minutes=10)  # of a collective; longer than any step, shorter than a night


@dataclass
class Watch:
    """What this rank saw of its steps."""

    step_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    data_s: list[float] = field(default_factory=list)
    waits_s: list[dict[str, float]] = field(default_factory=list)
    memory: MeasuredMemory | None = None


def run_rank(
    request: Request, seat: Seat, out: Path | None, peak_flops: float | None, quiet: bool = False
) -> Measurement | None:
    """Trains; the measurement on rank 0, None on the others. `peak_flops`: of one GPU, where it is known."""
    device = join(seat)
    try:
        mesh = Mesh.build(request.layout, request.job.model.kv_heads, seat.rank, device)
        training, job, layout = request.training, request.job, request.layout
        batches = Batches(corpus(training, job.model.vocab), job.seq, layout.mbs * layout.dp * layout.gas, training.seed)
        engine = Engine(job, mesh, training, batches)
        recorder = Recorder(request, out, peak_flops, quiet) if seat.rank == 0 else None
        try:
            watch = _loop(engine, recorder)
        finally:
            if recorder is not None:
                recorder.close()
        return _measurement(engine, watch, peak_flops)
    finally:
        leave()


def join(seat: Seat) -> torch.device:
    """Takes this process's seat in the world and a device of its own."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", seat.local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        from ultrascale.train.machine import cores

        torch.set_num_threads(max(1, cores() // seat.local_world))
    if seat.world > 1:
        backend = "cuda:nccl,cpu:gloo" if cuda else "gloo"
        dist.init_process_group(
            backend,
            init_method=seat.address,
            rank=seat.rank,
            world_size=seat.world,
            timeout=TIMEOUT,
            device_id=device if cuda else None,
        )
    return device


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _loop(engine: Engine, recorder: Recorder | None) -> Watch:
    training, watch = engine.training, Watch()
    # The second step is the first with everything in place: states exist, buffers have been made.
    accounted = min(1, training.steps - 1)
    for number in range(training.steps):
        if number == accounted:
            slowed = Watch()  # by being followed: its times are no measurement
            watch.memory, result = account(engine, partial(_step, engine, number, slowed))
        else:
            result = _step(engine, number, watch)
        seen = slowed if number == accounted else watch
        held_out = None
        if training.eval_every and (number + 1) % training.eval_every == 0:
            held_out = engine.evaluate(training.eval_batches)
        if recorder is not None:
            recorder.record(number, result, seen, held_out, engine.scale.value if engine.scale.used else None)
    return watch if watch.step_s else replace(slowed, memory=watch.memory)  # one step alone is all there is


def _step(engine: Engine, number: int, watch: Watch) -> StepResult:
    engine.mesh.clock.take()
    start = time.perf_counter()
    batch = engine.read(number)
    read = time.perf_counter()
    loss = engine.backward(batch)
    backward = time.perf_counter()
    waits = engine.mesh.clock.take()
    result = engine.update(number, loss)
    end = time.perf_counter()
    watch.step_s.append(end - start)
    watch.data_s.append(read - start)
    watch.optimizer_s.append(end - backward)
    watch.waits_s.append(waits)
    return result


class Recorder:
    """Rank 0's book: metrics.jsonl, other sinks, the line on the screen."""

    def __init__(self, request: Request, out: Path | None, peak_flops: float | None, quiet: bool) -> None:
        self.request = request
        layout, job = request.layout, request.job
        self.tokens = layout.batch_tokens(job.seq)
        per_token = flops.model_flops(job.model, job.seq)
        self.mfu: Callable[[float], float | None] = lambda rate: rate * per_token / peak_flops if peak_flops else None
        sinks = open_sinks(request.training.log, out, {"layout": str(layout), "model": job.model.name}) if out else []
        self.log = MetricsLog(out, sinks=sinks) if out else None
        self.progress = None if quiet else Progress(sys.stderr, request.training.steps)

    def record(self, number: int, result: StepResult, seen: Watch, eval_loss: float | None, loss_scale: float | None) -> None:
        step_s, data_s = seen.step_s[-1], seen.data_s[-1]
        rate = self.tokens / step_s / self.request.layout.gpus
        record = StepRecord(
            step=number + 1,
            tokens=(number + 1) * self.tokens,
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
        )
        if self.log is not None and (number + 1) % self.request.training.log_every == 0:
            self.log.write(record)
        if self.progress is not None:
            self.progress.show(record)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def peak_bytes() -> int:
    """The most this process has held: of the GPU's memory, or resident in the host's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _measurement(engine: Engine, watch: Watch, peak_flops: float | None) -> Measurement | None:
    """All ranks tell rank 0 what they saw."""
    mesh, job, layout = engine.mesh, engine.job, engine.mesh.layout
    everyone: list[tuple[Watch, int, int]] = [(watch, mesh.place.pp, _layers(engine))]
    if mesh.world.size > 1:
        everyone = [everyone[0]] * mesh.world.size
        dist.all_gather_object(everyone, (watch, mesh.place.pp, _layers(engine)))
    if mesh.rank:
        return None
    settled = watch.step_s[1:] or watch.step_s  # the first step pays for compiling and first touches
    step_s = statistics.median(settled)
    tokens = layout.batch_tokens(job.seq)
    rate = tokens / step_s
    per_token = flops.model_flops(job.model, job.seq)
    stages = _stages(everyone)
    fullest = max(stages, key=lambda stage: stage.memory.total)

    def utilisation(flops_per_token: float) -> float | None:
        return rate / layout.gpus * flops_per_token / peak_flops if peak_flops else None

    return Measurement(
        step_time_s=step_s,
        tokens_per_s=rate,
        tokens_per_s_per_gpu=rate / layout.gpus,
        mfu=utilisation(per_token),
        hfu=utilisation(flops.hardware_flops(job.model, job.seq, layout.recompute, job.attention)),
        mfu_causal=utilisation(flops.model_flops(job.model, job.seq, causal=True)),
        hfu_causal=utilisation(flops.hardware_flops(job.model, job.seq, layout.recompute, job.attention, causal=True)),
        model_tflops_per_gpu=rate / layout.gpus * per_token / 1e12,
        peak_gib=fullest.memory.total / GIB,
        capacity_gib=job.cluster.gpu.memory_gib,
        peak_stage=fullest.stage,
        memory=tuple(stages),
        time=_time([one[0] for one in everyone], step_s, mesh.device.type == "cpu"),
        steps=len(settled),
        processes=layout.gpus,
        device=torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
    )


def _layers(engine: Engine) -> int:
    return len({weight.shard.name.split(".")[1] for weight in engine.weights if weight.shard.name.startswith("blocks.")})


def _stages(everyone: list[tuple[Watch, int, int]]) -> list[MeasuredStage]:
    """The fullest rank of each pipeline stage."""
    fullest: dict[int, MeasuredStage] = {}
    for watch, stage, layers in everyone:
        assert watch.memory is not None
        seen = MeasuredStage(stage=stage, layers=layers, memory=watch.memory)
        if stage not in fullest or fullest[stage].memory.total < seen.memory.total:
            fullest[stage] = seen
    return [fullest[stage] for stage in sorted(fullest)]


def _time(watches: list[Watch], step_s: float, waits_seen: bool) -> MeasuredTime:
    def typical(values: Callable[[Watch], list[float]]) -> float:
        return statistics.mean(statistics.median(values(watch)) for watch in watches)

    optimizer_s, data_s = typical(lambda watch: watch.optimizer_s), typical(lambda watch: watch.data_s)
    if not waits_seen:  # on a GPU the host does not wait where the device does
        return MeasuredTime(overhead_s=data_s)
    waits = {axis: typical(lambda watch: [one.get(axis, 0.0) for one in watch.waits_s]) for axis in ("tp", "cp", "dp", "pp")}  # noqa: B023
    computing = step_s - sum(waits.values()) - optimizer_s - data_s
    return MeasuredTime(
        computing_s=max(0.0, computing),
        tensor_s=waits["tp"],
        context_s=waits["cp"],
        data_s=waits["dp"],
        bubble_s=waits["pp"],
        optimizer_s=optimizer_s,
        overhead_s=data_s,
    )
