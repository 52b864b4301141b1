"""One rank of a run: rendezvous, build, restore, training loop, measurement."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from ultrascale.cost import flops
from ultrascale.model import flex, grouped
from ultrascale.parallel.data import BucketedGrads
from ultrascale.parallel.expert import ExpertDenseGrads
from ultrascale.parallel.mesh import Mesh, RankCoordinates
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import MeasuredStage, MeasuredTime, Measurement
from ultrascale.specs.units import GIB
from ultrascale.train import checkpoint, rollback
from ultrascale.train.async_checkpoint import CheckpointManager, restore
from ultrascale.train.build import compute_format
from ultrascale.train.data import Batches, corpus
from ultrascale.train.engine import Engine
from ultrascale.train.heartbeat import Heartbeat, SharedMemoryHeartbeat, StoreHeartbeat
from ultrascale.train.kernels import why_not_fused
from ultrascale.train.loop import Loop, MetricsRecorder, Observer, StepStats
from ultrascale.train.memory_advice import current_memory, is_out_of_memory, out_of_memory
from ultrascale.train.outcome import RunOutcome
from ultrascale.train.rank_info import RankInfo
from ultrascale.train.rendezvous import group_timeout_s, init
from ultrascale.train.request import Request
from ultrascale.train.stop import StopSignals
from ultrascale.train.watchdog import Watchdog, lost_a_peer

UNSEEN = "what data ranks exchange is torch's own here (FSDP2 or DDP) and was not timed apart: it is part of computing"
RECORDED = "a step's kernels were recorded and launched as one"


def run_rank(
    request: Request,
    rank_info: RankInfo,
    out: Path | None,
    peak_flops: float | None,
    quiet: bool = False,
    heartbeat: Heartbeat | None = None,
    on_stuck: Callable[[str], None] | None = None,
    observe: Callable[[Engine], Observer] = Observer,
) -> RunOutcome | None:
    """Trains; returns the outcome on rank 0, None on the others.

    `peak_flops`: of one GPU, if known. `heartbeat` and `on_stuck`: where local ranks report their status, and that they hang;
    by default torch's store and the error stream. `observe`: creates the hooks called around each step.
    """
    threads = torch.get_num_threads()
    limit_s, describe = request.training.timeout_s, partial(described, request.layout)
    # Without a shared heartbeat, a local one until there is a store.
    watchdog = Watchdog(
        heartbeat or SharedMemoryHeartbeat(rank_info.world), rank_info.rank, rank_info.world, limit_s, describe, on_stuck
    )
    device = device_of(rank_info)
    try:
        with watchdog:
            watchdog.at(0, "joining")
            join(
                rank_info,
                limit_s,
                None if heartbeat is not None else lambda store: watchdog.use(StoreHeartbeat(store, rank_info.world)),
            )
            watchdog.at(0, "agreeing on the checkpoint to resume from")
            outcome = _train(
                _share_resume(request, rank_info, out),
                rank_info,
                out,
                peak_flops,
                quiet,
                device,
                watchdog,
                observe,
            )
            watchdog.at(watchdog.step, "leaving")
            leave()
            return outcome
    except (SpecError, RunError):
        raise
    except Exception as error:
        if lost_a_peer(error):
            raise RunError(watchdog.explain(error)) from error
        if is_out_of_memory(error):
            place = RankCoordinates.of(request.layout, rank_info.rank)
            raise RunError(out_of_memory(request, watchdog.step, str(error), current_memory(device), place)) from error
        error.add_note(
            f"This was rank {rank_info.rank}{f' ({where})' if (where := describe(rank_info.rank)) else ''}, {watchdog}"
        )
        raise
    finally:
        leave()
        torch.set_num_threads(threads)  # restores the setting of a caller that runs in this process


def described(layout: Layout, rank: int) -> str:
    return RankCoordinates.of(layout, rank).words(layout)


def _train(
    request: Request,
    rank_info: RankInfo,
    out: Path | None,
    peak_flops: float | None,
    quiet: bool,
    device: torch.device,
    watchdog: Watchdog,
    observe: Callable[[Engine], Observer],
) -> RunOutcome | None:
    training, job, layout = request.training, request.job, request.layout
    watchdog.at(0, "building")
    mesh = Mesh.build(layout, job.model.kv_heads, rank_info.rank, device, group_timeout_s(training.timeout_s))
    batches = Batches(corpus(training, job.model.vocab), job.seq, layout.mbs * layout.dp * layout.gas, training.seed)
    engine = Engine(job, mesh, training, batches)
    watchdog.at(0, "restoring")
    start = _restore(engine, request, lambda: watchdog.at(0, "restoring"))
    watchdog.at(start, "preparing checkpoints")
    checkpoints = None
    if out is not None and request.checkpoint.save:
        checkpoints = CheckpointManager(engine, out, request.checkpoint)
        if request.goes_on_in(out):
            checkpoints.saved = start
    if rank_info.rank == 0 and not quiet:
        sys.stderr.writelines(f"note: {line}\n" for line in _notes(engine))
    recorder = MetricsRecorder(request, out, peak_flops, quiet, start) if rank_info.rank == 0 else None
    with StopSignals() as signals:
        loop = Loop(engine, recorder, checkpoints, signals, watchdog, observe(engine))
        try:
            loop.run(start)
        finally:
            if recorder is not None:
                recorder.close()
    watchdog.at(loop.done, "gathering measurements")
    measured = None if loop.stopped or loop.watch.memory is None else _measurement(engine, loop.watch, peak_flops)
    kept = None if checkpoints is None or out is None else checkpoint.newest(out)
    observed = loop.observer.report()
    return RunOutcome(loop.done, measured, loop.stopped, kept, observed) if rank_info.rank == 0 else None


def _notes(engine: Engine) -> list[str]:
    """Notes, printed once on a GPU, about the kernels that run and those that cannot."""
    job, mesh, training = engine.job, engine.mesh, engine.training
    if mesh.device.type != "cuda":
        return []
    lines = [str(selected) for selected in (engine.attention, engine.gates) if selected is not None]
    if why := why_not_fused(job, mesh.layout, training):
        lines.append(f"blocks are not fused: {why}")
    window = job.model.sliding_window
    masked = training.document_mask or (window is not None and window < job.seq)
    if masked and (why := flex.why_not(job.model.head_dim, compute_format(job, mesh))):
        lines.append(f"attention's mask is dense: {why}")
    moe = job.model.moe
    if moe is not None and (
        why := grouped.why_not(compute_format(job, mesh), job.model.hidden, moe.expert_ffn // mesh.tp.size)
    ):
        lines.append(f"experts compute one after the other: {why}")
    return lines


def _share_resume(request: Request, rank_info: RankInfo, out: Path | None) -> Request:
    """The request with rank 0's checkpoint: only rank 0 looks for it, and finishes a roll-back after all ranks have joined."""
    if rank_info.rank == 0 and out is not None and request.goes_on_in(out) and (moved := rollback.finish(out)) is not None:
        request = replace(request, resume=moved)
    if rank_info.world == 1:
        return request
    sent = [(request.resume, request.weights)]
    dist.broadcast_object_list(sent, src=0)
    return replace(request, resume=sent[0][0], weights=sent[0][1])


def _restore(engine: Engine, request: Request, moving: Callable[[], None]) -> int:
    """Loads the checkpoint or weights of the request; returns the first step."""
    if request.weights is not None:
        restore(engine, checkpoint.open_checkpoint(request.weights), weights_alone=True, moving=moving)
    if request.resume is None:
        return 0
    source = checkpoint.open_checkpoint(request.resume)
    restore(engine, source, moving=moving)
    return source.step


def device_of(rank_info: RankInfo) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", rank_info.local_rank % torch.cuda.device_count())
    return torch.device("cpu")


def join(rank_info: RankInfo, timeout_s: float, on_store: Callable[[Store], None] | None = None) -> torch.device:
    """Joins the process group and selects a device; `on_store` is called with the store of the rendezvous."""
    device = device_of(rank_info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        from ultrascale.train.rates import cores

        torch.set_num_threads(max(1, cores() // rank_info.local_world))
    if rank_info.world > 1:
        init(rank_info, device, timeout_s, on_store)
    return device


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _measurement(engine: Engine, watch: StepStats, peak_flops: float | None) -> Measurement | None:
    """Gathers the statistics of all ranks; returns the measurement on rank 0."""
    mesh, job, layout = engine.mesh, engine.job, engine.mesh.layout
    everyone: list[tuple[StepStats, int, int]] = [(watch, mesh.place.pp, _layers(engine))]
    if mesh.world.size > 1:
        everyone = [everyone[0]] * mesh.world.size
        dist.all_gather_object(everyone, (watch, mesh.place.pp, _layers(engine)))
    if mesh.rank:
        return None
    warm = watch.step_s[1:] or watch.step_s  # the first step includes compilation and first touches of memory
    step_s = statistics.median(warm)
    tokens = layout.batch_tokens(job.seq)
    rate = tokens / step_s
    per_token = flops.model_flops(job.model, job.seq)
    stages = _stages(everyone)
    fullest = max(stages, key=lambda stage: stage.memory.total)
    on_cpu = mesh.device.type == "cpu"
    chunks = engine.pipeline.chunks.values()
    untimed = mesh.data.size > 1 and not all(isinstance(chunk.gradients, BucketedGrads | ExpertDenseGrads) for chunk in chunks)

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
        time=_time([one[0] for one in everyone], step_s, on_cpu, not untimed),
        steps=len(warm),
        processes=layout.gpus,
        device=torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
        notes=tuple(_measurement_notes(engine, on_cpu and untimed)),
    )


def _measurement_notes(engine: Engine, untimed: bool) -> Iterator[str]:
    if untimed:
        yield UNSEEN
    yield from (str(selected) for selected in (engine.attention, engine.gates) if selected is not None)
    if engine.tape is not None and engine.tape.used:
        yield RECORDED


def _layers(engine: Engine) -> int:
    return len({weight.shard.name.split(".")[1] for weight in engine.weights if weight.shard.name.startswith("blocks.")})


def _stages(everyone: list[tuple[StepStats, int, int]]) -> list[MeasuredStage]:
    """The rank with the highest peak memory of each pipeline stage."""
    fullest: dict[int, MeasuredStage] = {}
    for watch, stage, layers in everyone:
        assert watch.memory is not None
        measured = MeasuredStage(stage=stage, layers=layers, memory=watch.memory)
        if stage not in fullest or fullest[stage].memory.total < measured.memory.total:
            fullest[stage] = measured
    return [fullest[stage] for stage in sorted(fullest)]


def _time(watches: list[StepStats], step_s: float, waits_seen: bool, exchange_seen: bool) -> MeasuredTime:
    def typical(values: Callable[[StepStats], list[float]]) -> float:
        return statistics.mean(statistics.median(values(watch)) for watch in watches)

    optimizer_s, data_s = typical(lambda watch: watch.optimizer_s), typical(lambda watch: watch.data_s)
    if not waits_seen:  # on a GPU the host does not block when the device waits
        return MeasuredTime(overhead_s=data_s)
    axes = ("tp", "cp", "ep", "pp", "dp") if exchange_seen else ("tp", "cp", "ep", "pp")
    waits = {axis: typical(lambda watch: [one.get(axis, 0.0) for one in watch.waits_s]) for axis in axes}  # noqa: B023
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
