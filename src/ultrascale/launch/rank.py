"""One rank of a run: rendezvous, build, restore, training loop, measurement."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ultrascale.data.corpora import corpus
from ultrascale.kernels import selection
from ultrascale.launch.heartbeat import Heartbeat, SharedMemoryHeartbeat, StoreHeartbeat
from ultrascale.launch.out_of_memory import current_memory, is_out_of_memory, out_of_memory
from ultrascale.launch.rank_info import RankInfo
from ultrascale.launch.rendezvous import device_of, join, leave
from ultrascale.launch.signals import StopSignals
from ultrascale.launch.watchdog import Watchdog, lost_a_peer
from ultrascale.model import flex
from ultrascale.model.moe import why_not_grouped
from ultrascale.parallel.mesh import Mesh, RankCoordinates, group_timeout_s
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import Measurement
from ultrascale.train import checkpoint, history
from ultrascale.train.async_checkpoint import CheckpointManager, restore
from ultrascale.train.build import build_engine, compute_format
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine
from ultrascale.train.log import MetricsRecorder
from ultrascale.train.loop import Loop, Observer, measurement
from ultrascale.train.request import Request


@dataclass(frozen=True)
class RunOutcome:
    """The last step, the measurement and the last checkpoint of a run, sent from rank 0 to the process that started it."""

    step: int
    """steps done"""
    measured: Measurement | None
    """None if the run was stopped"""
    stopped: str | None = None
    """the signal that asked it to end"""
    kept: Path | None = None
    """the checkpoint of that step"""
    reached_loss: float | None = None
    """the loss at which train.stop_at_loss ended the run"""
    observed: Any = None
    """the result of `Observer.report`"""


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
    limit_s, describe = request.training.timeout_s, partial(describe_rank, request.layout)
    # Without a shared heartbeat, a local one until there is a store.
    watchdog = Watchdog(
        heartbeat or SharedMemoryHeartbeat(rank_info.world), rank_info.rank, rank_info.world, limit_s, describe, on_stuck
    )
    device = device_of(rank_info)
    try:
        with watchdog:
            watchdog.at(0, "joining")
            use_store = None if heartbeat is not None else lambda store: watchdog.use(StoreHeartbeat(store, rank_info.world))
            join(rank_info, limit_s, use_store)
            watchdog.at(0, "agreeing on the checkpoint to resume from")
            request = _share_resume(request, rank_info, out)
            outcome = _train(request, rank_info, out, peak_flops, quiet, device, watchdog, observe)
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


def describe_rank(layout: Layout, rank: int) -> str:
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
    sequences = layout.mbs * layout.dp * layout.gas
    batches = Batches(corpus(training, job.model.vocab), job.seq, sequences, training.seed, training.batch_ramp)
    engine = build_engine(job, mesh, training, batches)
    watchdog.at(0, "restoring")
    start, reached_loss = _restore(engine, request, lambda: watchdog.at(0, "restoring"))
    watchdog.at(start, "preparing checkpoints")
    checkpoints = None
    if out is not None and request.checkpoint.save:
        checkpoints = CheckpointManager(engine, out, request.checkpoint)
        if request.continues_in(out):
            checkpoints.saved = start
    if rank_info.rank == 0 and not quiet:
        sys.stderr.writelines(f"note: {line}\n" for line in _notes(engine))
    recorder = MetricsRecorder(request, out, peak_flops, quiet, start) if rank_info.rank == 0 else None
    with StopSignals() as signals:
        loop = Loop(engine, recorder, checkpoints, lambda: signals.received, watchdog, observe(engine))
        loop.reached_loss = reached_loss
        try:
            loop.run(start)
        finally:
            if recorder is not None:
                recorder.close()
    watchdog.at(loop.done, "gathering measurements")
    measured = None if loop.stopped or loop.stats.memory is None else measurement(engine, loop.stats, peak_flops)
    kept = None if checkpoints is None or out is None else checkpoint.newest(out)
    observed = loop.observer.report()
    return RunOutcome(loop.done, measured, loop.stopped, kept, loop.reached_loss, observed) if rank_info.rank == 0 else None


def _notes(engine: Engine) -> list[str]:
    """Notes, printed once, about the kernels that a GPU runs and those that cannot run, and settings without effect."""
    job, mesh, training = engine.job, engine.mesh, engine.training
    lines = [str(times) for times in engine.autotuned]
    if training.tp_chunks > 1 and (why := selection.why_not_chunked(job, mesh.layout, training, mesh.device.type)):
        lines.append(f"train.tp_chunks = {training.tp_chunks} has no effect: {why}")
    if mesh.device.type != "cuda":
        return lines
    if why := selection.why_not_fused(job, mesh.layout, training):
        lines.append(f"blocks are not fused: {why}")
    masked = training.document_mask or job.model.masked_window(job.seq) is not None
    if masked and (why := flex.why_not(job.model.head_dim, compute_format(job, mesh))):
        lines.append(f"attention's mask is dense: {why}")
    moe = job.model.moe
    if moe is not None and (
        why := why_not_grouped(compute_format(job, mesh), job.model.hidden, moe.expert_ffn // mesh.tp.size)
    ):
        lines.append(f"experts compute one after the other: {why}")
    return lines


def _share_resume(request: Request, rank_info: RankInfo, out: Path | None) -> Request:
    """The request with rank 0's checkpoint: only rank 0 looks for it, and finishes a roll-back after all ranks have joined."""
    if (
        rank_info.rank == 0
        and out is not None
        and request.continues_in(out)
        and (moved := history.finish_rollback(out)) is not None
    ):
        request = replace(request, resume=moved)
    if rank_info.world == 1:
        return request
    sent = [(request.resume, request.weights)]
    dist.broadcast_object_list(sent, src=0)
    return replace(request, resume=sent[0][0], weights=sent[0][1])


def _restore(engine: Engine, request: Request, moving: Callable[[], None]) -> tuple[int, float | None]:
    """Loads the checkpoint or weights of the request; returns the first step, and the loss that has reached the goal."""
    if request.weights is not None:
        restore(engine, checkpoint.open_checkpoint(request.weights), weights_alone=True, moving=moving)
    if request.resume is None:
        return 0, None
    source = checkpoint.open_checkpoint(request.resume)
    restore(engine, source, moving=moving)
    return source.step, source.reached_loss if source.reaches_goal(engine.training) else None
