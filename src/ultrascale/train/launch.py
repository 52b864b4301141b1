"""`train`: from a request to a finished run, in this process, in local ones, or as one rank of many."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale.cost.estimate import estimate
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.files import read_text, write_text
from ultrascale.specs.folders import alone, free_bytes
from ultrascale.specs.job import OPTIMIZER_STATE_BYTES
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB
from ultrascale.train import checkpoint
from ultrascale.train.outcome import Outcome
from ultrascale.train.request import Request
from ultrascale.train.world import Seat, seat

if TYPE_CHECKING:
    from ultrascale.train.board import Board
    from ultrascale.train.engine import Engine
    from ultrascale.train.loop import Observer

    Observe = Callable[[Engine], Observer]

PLAN, ENVIRONMENT, MEASUREMENT, METRICS = "plan.yaml", "env.json", "measurement.json", "metrics.jsonl"
LOCK = ".lock"


@dataclass(frozen=True)
class Run:
    """A run that ended: what was asked, what was predicted, what was seen, and the folder that holds all of it."""

    request: Request
    predicted: Estimate | None
    outcome: Outcome
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
    """Trains and measures. `predict`: the machine, for an estimate to compare with; `observe`: makes who looks on.

    None on all ranks but the first.
    """
    mine = seat() if nproc is None else None
    here = mine or Seat()
    goes_on = False
    if here.rank == 0 and out is not None:  # the others hear of it when they have met
        again = _again(out, here)
        if again and (found := checkpoint.newest(out)) is not None:
            request = replace(request, resume=found, weights=None)
            sys.stderr.write(f"started anew: going on from {found}\n")
        goes_on = again or request.goes_on_in(out)
        if not goes_on:
            _refuse_used(out)
    peak = predicted = None
    if predict is not None:
        request = request.on(predict)
        # A CPU's rate was measured, its peak is not known: utilisation would be of a guess.
        peak = request.job.peak_flops if predict.gpu.name != "cpu" else None
        predicted = estimate(request.job, request.layout) if here.rank == 0 else None
    if here.rank == 0 and out is not None:
        _room(request, out)
    with _folder(out) if here.rank == 0 and out is not None else nullcontext():
        if here.rank == 0 and out is not None:
            _write_folder(request, predicted, out, goes_on, here.launch)
        outcome = _start(request, out, nproc, mine, peak, quiet, observe)
    if outcome is None:
        return None
    if out is not None and outcome.measured is not None:
        outcome.measured.save(out / MEASUREMENT)
    return Run(request, predicted, outcome, out)


@contextmanager
def _folder(out: Path) -> Iterator[None]:
    """The run's folder, for this launch alone; an error on the way says what the run can go on from."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / LOCK).touch()
    except OSError as error:
        raise SpecError(f"--out is {out} but no folder can be made there ({error.strerror}): try runs/first") from None
    with alone(out / LOCK, f"{out} is being trained by another process: wait for it, or give another --out"):
        try:
            yield
        except RunError as error:
            if (kept := checkpoint.newest(out)) is not None:
                error.args = (f"{error}\nThe last checkpoint is {kept.name}: go on with ultrascale train --resume {out}",)
            raise


def _room(request: Request, out: Path) -> None:
    """Refuses a disk that cannot hold one checkpoint, and warns of one that cannot hold all that are to be kept."""
    if not request.checkpoint.save:
        return
    job, settings = request.job, request.checkpoint
    each = job.model.parameters * (4 + OPTIMIZER_STATE_BYTES[job.optimizer])
    free, here = free_bytes(out), len(checkpoint.complete(out))
    if free < each:
        raise SpecError(
            f"a checkpoint of {job.model.name} takes {each / GIB:,.1f} GiB but {free / GIB:,.1f} GiB are free in {out}: "
            "make room, give another --out, or checkpoint.save=false"
        )
    wanted = (settings.keep or 1) + 1 - here if settings.every else 1  # one more while it is written
    if free < wanted * each:
        sys.stderr.write(
            f"warning: {settings.keep or 'all'} checkpoints of {each / GIB:,.1f} GiB are to be kept in {out}, and one more "
            f"while it is written, but {free / GIB:,.1f} GiB are free\n"
        )


def _again(out: Path, here: Seat) -> bool:
    """Whether a launcher repeats the command that began the run in this folder: it goes on from what was kept."""
    if here.restarted:
        return True
    try:
        before = json.loads(read_text(out / ENVIRONMENT))
        return bool(here.launch) and before.get("launch") == here.launch
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _start(
    request: Request,
    out: Path | None,
    nproc: int | None,
    mine: Seat | None,
    peak: float | None,
    quiet: bool,
    observe: Observe | None,
) -> Outcome | None:
    import_torch()
    from ultrascale.parallel import local
    from ultrascale.train.board import SharedBoard
    from ultrascale.train.loop import Observer
    from ultrascale.train.run import described, run_rank

    if mine is not None or request.layout.gpus == 1:
        return run_rank(request, mine or Seat(), out, peak, quiet, observe=observe or Observer)
    world = request.layout.gpus
    board = SharedBoard(world)
    arguments = (request, out, peak, quiet, board, observe or Observer)
    describe = partial(described, request.layout)
    results: list[Outcome | None] = local.run(_local_rank, world, *arguments, board=board, describe=describe, stoppable=True)
    return results[0]


def _local_rank(
    rank: int,
    nproc: int,
    store: str,
    request: Request,
    out: Path | None,
    peak: float | None,
    quiet: bool,
    board: Board,
    observe: Observe,
) -> Outcome | None:
    from ultrascale.parallel import local
    from ultrascale.train.run import run_rank

    return run_rank(request, Seat(rank, nproc, rank, nproc, store), out, peak, quiet, board, local.report, observe)


def import_torch() -> None:
    """Before processes fork, so that none of them has to; a clear word where torch is missing."""
    try:
        import torch._dynamo
        import torch.distributed.checkpoint  # noqa: F401
    except ModuleNotFoundError as missing:
        raise SpecError(
            f"training needs torch, and {missing.name} is not installed: try pip install 'ultrascale[train]'"
        ) from None


def _refuse_used(out: Path) -> None:
    for used in (METRICS, checkpoint.FOLDER):
        if (out / used).exists():
            raise SpecError(
                f"--out is {out} but that folder holds a run already ({used}): try another, such as {out}-2, "
                f"or go on with it: --resume {out}"
            )


def _write_folder(request: Request, predicted: Estimate | None, out: Path, goes_on: bool, launch: str) -> None:
    # Where this machine's rates are not known, the plan keeps the estimate for the cluster it was made for.
    plan = Plan(job=request.job, layout=request.layout, estimate=predicted or estimate(request.job, request.layout))
    plan.save(out / PLAN)
    earlier = _earlier(out / ENVIRONMENT) if goes_on else []
    environment = {**_environment(request), "launch": launch, "earlier": earlier}
    write_text(out / ENVIRONMENT, json.dumps(environment, indent=1) + "\n")


def _environment(request: Request) -> dict[str, Any]:
    import_torch()
    import torch

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "processes": request.layout.gpus,
        "layout": str(request.layout),
        "resumed_from": request.resume.name if request.resume else None,
        "training": request.training.model_dump(mode="json"),
        "command": sys.argv,
    }


def _earlier(file: Path) -> list[Any]:
    """The circumstances of the run until now, oldest first."""
    try:
        before = json.loads(read_text(file))
        return [*before.pop("earlier", []), before]
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return []


def has_gpu() -> bool:
    """Without touching it: processes are forked later."""
    from ultrascale.train.machine import gpu_names

    return bool(gpu_names())


def machine(world: int, precision: str) -> Cluster | None:
    """This machine, for a prediction; None where its kind is unknown or has no number for that precision."""
    import_torch()
    from ultrascale.train.machine import detect

    try:
        cluster = detect(world)
    except SpecError:
        return None
    return cluster if precision in cluster.gpu.peak_tflops else None
