"""The history of a run's folder: its launches (env.json), and roll-backs to earlier checkpoints.

env.json has the versions, command and settings of each launch, and the settings that a relaunch inherits.

`--resume RUN/checkpoints/step-000002` of a run that has step 4 and 6 abandons these two. They are moved to
`checkpoints/abandoned-001/`, and `metrics.abandoned-001.jsonl` is a copy of the metrics; `metrics.jsonl` is truncated after
step 2. `--resume RUN/checkpoints/abandoned-001/step-000006` switches back: step 4 and 6 are restored, and what the current
branch has beyond the last common step is abandoned in turn. Every metrics file is one whole history, so the last common step of
two branches is the last row that their files share.

The roll-back is recorded in `checkpoints/rollback.json` before anything is moved, and `checkpoint.newest` reads that record.
Each operation can be repeated: a run that is killed between two of them finishes the rest when it is resumed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError, os_reason
from ultrascale.specs.files import read_text, write_text
from ultrascale.specs.folders import CHECKPOINTS, ENVIRONMENT, METRICS, sync_folder
from ultrascale.specs.training import Training
from ultrascale.train.checkpoint import (
    ABANDONED,
    LATEST,
    ROLLBACK,
    Rollback,
    complete,
    complete_in,
    newest,
    pending_rollback,
    step_of,
)
from ultrascale.train.log import rows_through, step_of_row, write_rows

if TYPE_CHECKING:
    from ultrascale.train.request import Request

JOB_FIELDS = ("batch_tokens", "precision", "gradients", "ema")  # fields of the job that a resumed run may change


class LastLaunch(BaseModel):
    """The settings of the last launch of a run, as env.json has them."""

    resumed_from: str | None
    """the name of its checkpoint"""
    training: Training
    checkpoint: Checkpointing
    job: dict[str, Any]
    changed: tuple[str, ...]
    """what it was allowed to change and changed"""


def write_environment(request: Request, run: Path, launch: str, resumed: bool) -> None:
    """`launch`: the same for every attempt of one launcher. `resumed`: earlier launches stay in the file."""
    import torch

    settings = LastLaunch(
        resumed_from=request.resume.name if request.resume else None,
        training=request.training,
        checkpoint=request.checkpoint,
        job={name: getattr(request.job, name) for name in JOB_FIELDS},
        changed=request.changed,
    )
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "processes": request.layout.gpus,
        "layout": str(request.layout),
        **settings.model_dump(mode="json"),
        "command": sys.argv,
        "launch": launch,
        "earlier": _earlier(run) if resumed else [],
    }
    write_text(run / ENVIRONMENT, json.dumps(environment, indent=1) + "\n")


def launch_of(run: Path) -> str:
    """The launcher's name for the last launch; empty if there is none."""
    return str(_read_environment(run).get("launch", ""))


def last_launch(run: Path) -> LastLaunch | None:
    """The last launch; None if the file cannot be read or was written by another version."""
    data = _read_environment(run)
    try:
        return LastLaunch.model_validate(
            {**data, "job": {name: data["job"][name] for name in JOB_FIELDS if name in data["job"]}}
        )
    except (KeyError, TypeError, ValueError):
        return None


def _earlier(run: Path) -> list[Any]:
    """The earlier launches, oldest first."""
    before = _read_environment(run)
    earlier = before.pop("earlier", [])
    return [*(earlier if isinstance(earlier, list) else []), before] if before else []


def _read_environment(run: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_text(run / ENVIRONMENT))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def record_rollback(run: Path, source: Path) -> tuple[Path, Rollback | None]:
    """Records durably that the run resumes from `source`. Returns its path and the roll-back, None if none is needed.

    An earlier roll-back that was not finished may have moved the source. Nothing is moved yet unless there was one, since other
    ranks may still read the source by its name.
    """
    if (before := pending_rollback(run)) is not None:
        if source.resolve() == (newest(run) or run).resolve():
            return source, before
        source = _moved(run, before, source)
        finish_rollback(run)
    rollback = _plan_rollback(run, source)
    if rollback is not None:
        write_text(run / CHECKPOINTS / ROLLBACK, rollback.model_dump_json(indent=1) + "\n")
        sync_folder(run / CHECKPOINTS)
    return source, rollback


def finish_rollback(run: Path) -> Path | None:
    """Executes the recorded roll-back, or the rest of it; returns the checkpoint's path after it."""
    rollback = pending_rollback(run)
    if rollback is None:
        return None
    folder, metrics = run / CHECKPOINTS, run / METRICS
    try:
        if rollback.abandoned_metrics and metrics.exists() and not (run / rollback.abandoned_metrics).exists():
            write_rows(run / rollback.abandoned_metrics, metrics.read_text(encoding="utf-8", errors="replace").splitlines())
        for old, new in rollback.moves:
            # The second condition: `old` may now be another checkpoint, which has already been moved to that name.
            if (folder / old).exists() and not (folder / new).exists():
                _move(folder / old, folder / new)
        if metrics.exists() or (run / rollback.history).exists():
            write_rows(metrics, rows_through(run / rollback.history, step_of(folder / rollback.target)))
        write_text(folder / LATEST, rollback.target + "\n")
        branch = (folder / rollback.source).parent
        if branch != folder and branch.is_dir() and not any(branch.iterdir()):
            branch.rmdir()
        sync_folder(folder)
        (folder / ROLLBACK).unlink()
        sync_folder(folder)
    except OSError as error:
        reason = os_reason(error)
        raise SpecError(
            f"the roll-back of {run} to {rollback.target} could not be finished ({reason}): make {folder} writable, with free "
            f"space, and repeat ultrascale train --resume {run}"
        ) from None
    return folder / rollback.target


def describe_rollback(run: Path, rollback: Rollback) -> str:
    """One line about what is abandoned, and how to return to it."""
    names = [Path(name).name for name in rollback.abandoned]
    kept = f"its metrics in {rollback.abandoned_metrics}" if rollback.abandoned_metrics else "no metrics of its own"
    if not names:
        return f"the run returns to {rollback.source}; the branch that it leaves has no checkpoints, {kept}"
    last = run / CHECKPOINTS / rollback.abandoned[-1]
    return (
        f"{', '.join(names)} of the branch that the run leaves {'is' if len(names) == 1 else 'are'} set aside in "
        f"{last.parent}, {kept}; return to it with --resume {last}"
    )


def _plan_rollback(run: Path, source: Path) -> Rollback | None:
    folder, step = run / CHECKPOINTS, step_of(source)
    branch = source.resolve().parent.name
    returning: list[Path] = []
    shared, history, name = step, METRICS, source.name
    if ABANDONED.fullmatch(branch):
        history, name = metrics_of(branch), f"{branch}/{source.name}"
        shared = min(step, _shared_step(run / METRICS, run / history))
        returning = [one for one in complete_in(folder / branch) if shared < step_of(one) <= step]
    leaving = [one for one in complete(run) if step_of(one) > shared]
    if not leaving and not returning:
        return None
    aside = _next_branch(run)
    beyond = bool(leaving) or _last_step(run / METRICS) > shared
    moves = [(one.name, f"{aside}/{one.name}") for one in leaving]
    moves += [(f"{branch}/{one.name}", one.name) for one in returning]
    abandoned_metrics = metrics_of(aside) if beyond else None
    return Rollback(source=name, moves=tuple(moves), history=history, abandoned_metrics=abandoned_metrics)


def metrics_of(branch: str) -> str:
    """The metrics file of an abandoned branch, in the run's folder."""
    return f"metrics.{branch}.jsonl"


def _shared_step(first: Path, second: Path) -> int:
    """The last step of the common prefix of two histories; rows contain measured times, so equal rows are the same step."""
    shared = 0
    for one, other in zip(_all_rows(first), _all_rows(second), strict=False):
        if one != other:
            break
        shared = int(step_of_row(one))
    return shared


def _last_step(metrics: Path) -> int:
    return max((int(step_of_row(row)) for row in _all_rows(metrics)), default=0)


def _all_rows(metrics: Path) -> list[str]:
    return rows_through(metrics, 2**62)


def _next_branch(run: Path) -> str:
    """The first number that is used neither by a folder nor by a metrics file."""
    number = 1
    while (run / CHECKPOINTS / f"abandoned-{number:03d}").exists() or (run / metrics_of(f"abandoned-{number:03d}")).exists():
        number += 1
    return f"abandoned-{number:03d}"


def _moved(run: Path, rollback: Rollback, path: Path) -> Path:
    """The path of a checkpoint after the rest of the roll-back."""
    folder = (run / CHECKPOINTS).resolve()
    for old, new in rollback.moves:
        if path.resolve() == folder / old and not (folder / new).exists():
            return run / CHECKPOINTS / new
    return path


def _move(old: Path, new: Path) -> None:
    if not new.parent.is_dir():
        new.parent.mkdir()
        sync_folder(new.parent.parent)
    os.rename(old, new)
    sync_folder(new.parent)
    sync_folder(old.parent)
