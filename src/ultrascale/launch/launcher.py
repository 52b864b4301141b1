"""`train`: runs a request in this process, in local processes, or as one rank of torchrun or Slurm; and its Python API."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale.cost.estimate import estimate
from ultrascale.launch.rank_info import RankInfo, rank_info_from_env
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.folders import CHECKPOINTS, LOCK, MEASUREMENT, METRICS, PLAN, free_bytes, locked
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.specs.units import GIB
from ultrascale.train import checkpoint, history, import_torch
from ultrascale.train.request import Overrides, Request, allowed_changes, from_checkpoint, from_plan

if TYPE_CHECKING:
    from ultrascale.launch.rank import RunOutcome
    from ultrascale.train.engine import Engine
    from ultrascale.train.loop import Observer

    Observe = Callable[[Engine], Observer]

LONGEST_MEASURE_S = 60.0  # limit of a CPU's measurement, which takes about two seconds on an idle machine


@dataclass(frozen=True)
class Run:
    """A finished run: its request, prediction and outcome, and its folder."""

    request: Request
    predicted: Estimate | None
    outcome: RunOutcome
    folder: Path | None

    @property
    def measured(self) -> Measurement:
        if self.outcome.measured is None:
            raise SpecError(f"the run was stopped at step {self.outcome.step} and not measured: resume it")
        return self.outcome.measured


def train(
    request: Request,
    out: Path | None = None,
    nproc: int | None = None,
    predict: Cluster | None = None,
    quiet: bool = False,
    observe: Observe | None = None,
) -> Run | None:
    """Trains and measures. `predict`: the machine, for an estimate to compare with; `observe`: creates the step hooks.

    Returns None on all ranks but the first.
    """
    env_rank = rank_info_from_env() if nproc is None else None
    rank_info = env_rank or RankInfo()
    folder = out if rank_info.rank == 0 else None  # the other ranks get what they need of it after the rendezvous
    goes_on = False
    if folder is not None:
        restart = is_restart(folder, rank_info)
        if restart and (found := checkpoint.newest(folder)) is not None:
            request = replace(request, resume=found, weights=None)
            sys.stderr.write(f"restarted: resuming from {found}\n")
        goes_on = restart or request.continues_in(folder)
        if not goes_on:
            _refuse_used(folder)
    peak = predicted = None
    if predict is not None:
        request = request.on_cluster(predict)
        # A CPU's rate was measured, but its peak is unknown, and so is the utilisation.
        peak = request.job.peak_flops if predict.gpu.name != "cpu" else None
        predicted = estimate(request.job, request.layout) if rank_info.rank == 0 else None
    if folder is not None:
        _check_disk_space(request, folder)
    with _folder(folder) if folder is not None else nullcontext():
        if folder is not None:
            # The settings first: a relaunch inherits them only if it resumes from the same checkpoint.
            _write_folder(request, predicted, folder, goes_on, rank_info.launch)
            if request.continues_in(folder):
                request = _record_rollback(request, folder)
        outcome = _start(request, out, env_rank, peak, quiet, observe)
    if outcome is None:
        return None
    if outcome.measured is not None:
        if predicted is not None and outcome.measured.batch_tokens is not None:
            predicted = estimate(*outcome.measured.of_batch(request.job, request.layout))
        if out is not None:
            outcome.measured.save(out / MEASUREMENT)
    return Run(request, predicted, outcome, out)


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """Creates and locks the run's folder; adds the last checkpoint to the message of a RunError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / LOCK).touch()
    except OSError as error:
        raise SpecError(f"--out is {out} but no folder can be made there ({error.strerror}): try runs/first") from None
    with locked(out / LOCK, f"{out} is being trained by another process: wait for it, or give another --out"):
        try:
            yield
        except RunError as error:
            if (kept := checkpoint.newest(out)) is not None:
                error.args = (f"{error}\nThe last checkpoint is {kept.name}: go on with ultrascale train --resume {out}",)
            raise


def _check_disk_space(request: Request, out: Path) -> None:
    """Raises if one checkpoint does not fit on the disk; warns if all that will be kept do not."""
    if not request.checkpoint.save:
        return
    job, settings = request.job, request.checkpoint
    each = job.model.parameters * (4 + job.state_bytes)
    last = math.inf if request.resume is None else checkpoint.step_of(request.resume)
    free, existing = free_bytes(out), sum(checkpoint.step_of(one) <= last for one in checkpoint.complete(out))
    if free < each:
        raise SpecError(
            f"a checkpoint of {job.model.name} takes {each / GIB:,.1f} GiB but {free / GIB:,.1f} GiB are free in {out}: "
            "make room, give another --out, or checkpoint.save=false"
        )
    wanted = (settings.keep or 1) + 1 - existing if settings.every else 1  # one more while it is written
    if free < wanted * each:
        sys.stderr.write(
            f"warning: {settings.keep or 'all'} checkpoints of {each / GIB:,.1f} GiB are to be kept in {out}, and one more "
            f"while it is written, but {free / GIB:,.1f} GiB are free\n"
        )


def _record_rollback(request: Request, out: Path) -> Request:
    """Records a roll-back, if resuming needs one, before anything else happens, and prints what is set aside."""
    assert request.resume is not None
    source, rolled_back = history.record_rollback(out, request.resume)
    if rolled_back is not None:
        sys.stderr.write(f"roll-back: {history.describe_rollback(out, rolled_back)}\n")
    return replace(request, resume=source)


def is_restart(out: Path, rank_info: RankInfo) -> bool:
    """Whether a launcher repeats the command that started the run in this folder: then it resumes from the last checkpoint."""
    return rank_info.restarted or bool(rank_info.launch and history.launch_of(out) == rank_info.launch)


def _start(
    request: Request,
    out: Path | None,
    env_rank: RankInfo | None,
    peak: float | None,
    quiet: bool,
    observe: Observe | None,
) -> RunOutcome | None:
    import_torch()
    from ultrascale.launch import local, rank
    from ultrascale.launch.heartbeat import SharedMemoryHeartbeat
    from ultrascale.train.loop import Observer

    observe = observe or Observer
    if env_rank is not None or request.layout.gpus == 1:
        return rank.run_rank(request, env_rank or RankInfo(), out, peak, quiet, observe=observe)
    heartbeat = SharedMemoryHeartbeat(request.layout.gpus)

    def run_local_rank(number: int, world: int, store: str) -> RunOutcome | None:
        rank_info = RankInfo(number, world, number, world, store)
        return rank.run_rank(request, rank_info, out, peak, quiet, heartbeat, local.report, observe)

    describe = partial(rank.describe_rank, request.layout)
    last_s = 2 * request.training.timeout_s  # a rank stopped after its last collective blocks no other, so no watchdog fires
    results: list[RunOutcome | None] = local.run(
        run_local_rank, request.layout.gpus, heartbeat=heartbeat, describe=describe, stoppable=True, last_s=last_s
    )
    return results[0]


def _refuse_used(out: Path) -> None:
    for used in (METRICS, CHECKPOINTS):
        if (out / used).exists():
            kept = checkpoint.newest(out) is not None
            other = f"go on with it: --resume {out}" if kept else "delete it: it has no checkpoint to resume from"
            raise SpecError(
                f"--out is {out} but that folder holds a run already ({used}): try another, such as {out}-2, or {other}"
            )


def _write_folder(request: Request, predicted: Estimate | None, out: Path, goes_on: bool, launch: str) -> None:
    # If this machine's rates are unknown, the plan has the estimate for the cluster that it was made for.
    plan = Plan(job=request.job, layout=request.layout, estimate=predicted or estimate(request.job, request.layout))
    plan.save(out / PLAN)
    import_torch()
    history.write_environment(request, out, launch, goes_on)


def has_gpu() -> bool:
    """Whether there is a GPU, without initializing CUDA: processes are forked later."""
    from ultrascale.launch.machine import gpu_names

    return bool(gpu_names())


def local_devices() -> int:
    """GPUs of this machine, or cores of its CPU."""
    from ultrascale.launch.machine import cores, gpu_names

    return len(gpu_names()) or cores()


def detect_cluster(world: int, precision: str, timeout_s: float = 600.0) -> Cluster | None:
    """This machine, for a prediction; None if its kind is unknown or has no peak for that precision.

    Any error is only a note: a run does not fail for lack of a prediction. `timeout_s`: of the run, whose other ranks may be
    waiting.
    """
    import_torch()
    from ultrascale.launch.machine import detect

    try:
        cluster = detect(world, min(LONGEST_MEASURE_S, timeout_s / 4))
    except SpecError:
        return None
    except Exception as error:
        reason = str(error).splitlines()[-1] if str(error) else type(error).__name__
        sys.stderr.write(f"note: no prediction to compare with, since this machine could not be measured: {reason:.300}\n")
        return None
    return cluster if precision in cluster.gpu.peak_tflops else None


class Trainer:
    """`Trainer(plan).run()` runs a plan, as the command line does.

    `processes` are started here; under torchrun or srun they already exist.
    They are forked: create them before this process has computed with torch or used a GPU, as a notebook may have. The children
    do not inherit torch's threads, and may wait for them for ever on a machine with several cores per process.
    """

    def __init__(
        self,
        plan: Plan,
        training: Training | None = None,
        processes: int | None = None,
        checkpoint: Checkpointing | None = None,
    ) -> None:
        env_rank = rank_info_from_env()
        if env_rank is not None and processes not in (None, env_rank.world):
            raise SpecError(f"processes is {processes} but torchrun or srun started {env_rank.world}: leave it out")
        self.world = env_rank.world if env_rank is not None else processes or plan.layout.gpus
        self.nproc = None if env_rank is not None else self.world
        request = from_plan(plan, Overrides(), self.world, training, gpu=has_gpu())
        self.request = replace(request, checkpoint=checkpoint or Checkpointing())

    @classmethod
    def resume(cls, run: str | Path, processes: int | None = None, allow_changed: str | None = None, **layout: Any) -> Trainer:
        """Resumes a run from its newest checkpoint (or from the checkpoint given), in the same or another layout.

        `allow_changed`: "data" if the data may differ from that of the run so far, like `train --allow-changed data`.
        """
        trainer, env_rank = cls.__new__(cls), rank_info_from_env()
        world = env_rank.world if env_rank is not None else processes
        first = env_rank is None or env_rank.rank == 0
        allowed = allowed_changes(allow_changed, Path(run))
        trainer.request = from_checkpoint(
            checkpoint.resolve(Path(run)), Overrides(layout=layout), world, gpu=has_gpu(), allowed=allowed, first=first
        )
        trainer.world = trainer.request.layout.gpus
        trainer.nproc = None if env_rank is not None else trainer.world
        return trainer

    def run(self, out: str | Path | None = None, quiet: bool = False) -> Run | None:
        """Trains, measures and compares; None on every rank of torchrun but the first. A resumed run stays in its folder."""
        if out is None and self.request.resume is not None:
            out = checkpoint.run_of(self.request.resume)
        machine = detect_cluster(self.request.layout.gpus, self.request.job.precision, self.request.training.timeout_s)
        return train(self.request, None if out is None else Path(out), self.nproc, machine, quiet)
