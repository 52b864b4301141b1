"""Roll-backs: resuming from an earlier checkpoint of a run, or from an abandoned one, without mixing two histories.

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
from dataclasses import asdict
from pathlib import Path

from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import write_text
from ultrascale.specs.folders import sync_folder
from ultrascale.train.checkpoint import (
    ABANDONED,
    FOLDER,
    LATEST,
    ROLLBACK,
    Rollback,
    complete,
    complete_in,
    newest,
    pending_rollback,
    step_of,
)
from ultrascale.train.log import FILE, rows_through, step_of_row, write_rows


def record(run: Path, source: Path) -> tuple[Path, Rollback | None]:
    """Records durably that the run resumes from `source`. Returns its path and the roll-back, None if none is needed.

    An earlier roll-back that was not finished may have moved the source. Nothing is moved yet unless there was one, since other
    ranks may still read the source by its name.
    """
    if (before := pending_rollback(run)) is not None:
        if source.resolve() == (newest(run) or run).resolve():
            return source, before
        source = _moved(run, before, source)
        finish(run)
    rollback = _plan(run, source)
    if rollback is not None:
        write_text(run / FOLDER / ROLLBACK, json.dumps(asdict(rollback), indent=1) + "\n")
        sync_folder(run / FOLDER)
    return source, rollback


def finish(run: Path) -> Path | None:
    """Executes the recorded roll-back, or the rest of it; returns the checkpoint's path after it."""
    rollback = pending_rollback(run)
    if rollback is None:
        return None
    folder, metrics = run / FOLDER, run / FILE
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
        reason = (error.strerror or str(error)).lower()
        raise SpecError(
            f"the roll-back of {run} to {rollback.target} could not be finished ({reason}): make {folder} writable, with free "
            f"space, and repeat ultrascale train --resume {run}"
        ) from None
    return folder / rollback.target


def described(run: Path, rollback: Rollback) -> str:
    """One line about what is abandoned, and how to return to it."""
    names = [Path(name).name for name in rollback.abandoned]
    kept = f"its metrics in {rollback.abandoned_metrics}" if rollback.abandoned_metrics else "no metrics of its own"
    if not names:
        return f"the run returns to {rollback.source}; the branch that it leaves has no checkpoints, {kept}"
    last = run / FOLDER / rollback.abandoned[-1]
    return (
        f"{', '.join(names)} of the branch that the run leaves {'is' if len(names) == 1 else 'are'} set aside in "
        f"{last.parent}, {kept}; return to it with --resume {last}"
    )


def _plan(run: Path, source: Path) -> Rollback | None:
    folder, step = run / FOLDER, step_of(source)
    branch = source.resolve().parent.name
    returning: list[Path] = []
    shared, history, name = step, FILE, source.name
    if ABANDONED.fullmatch(branch):
        history, name = metrics_of(branch), f"{branch}/{source.name}"
        shared = min(step, _shared_step(run / FILE, run / history))
        returning = [one for one in complete_in(folder / branch) if shared < step_of(one) <= step]
    leaving = [one for one in complete(run) if step_of(one) > shared]
    if not leaving and not returning:
        return None
    aside = _next_branch(run)
    beyond = bool(leaving) or _last_step(run / FILE) > shared
    moves = [(one.name, f"{aside}/{one.name}") for one in leaving]
    moves += [(f"{branch}/{one.name}", one.name) for one in returning]
    return Rollback(name, tuple(moves), history, metrics_of(aside) if beyond else None)


def metrics_of(branch: str) -> str:
    """The metrics file of an abandoned branch, in the run's folder."""
    return f"metrics.{branch}.jsonl"


def _shared_step(first: Path, second: Path) -> int:
    """The last step of the common prefix of two histories; rows contain measured times, so equal rows are the same step."""
    shared = 0
    for one, other in zip(_rows(first), _rows(second), strict=False):
        if one != other:
            break
        shared = int(step_of_row(one))
    return shared


def _last_step(metrics: Path) -> int:
    return max((int(step_of_row(row)) for row in _rows(metrics)), default=0)


def _rows(metrics: Path) -> list[str]:
    return rows_through(metrics, 2**62)


def _next_branch(run: Path) -> str:
    """The first number that is used neither by a folder nor by a metrics file."""
    number = 1
    while (run / FOLDER / f"abandoned-{number:03d}").exists() or (run / metrics_of(f"abandoned-{number:03d}")).exists():
        number += 1
    return f"abandoned-{number:03d}"


def _moved(run: Path, rollback: Rollback, path: Path) -> Path:
    """The path of a checkpoint after the rest of the roll-back."""
    folder = (run / FOLDER).resolve()
    for old, new in rollback.moves:
        if path.resolve() == folder / old and not (folder / new).exists():
            return run / FOLDER / new
    return path


def _move(old: Path, new: Path) -> None:
    if not new.parent.is_dir():
        new.parent.mkdir()
        sync_folder(new.parent.parent)
    os.rename(old, new)
    sync_folder(new.parent)
    sync_folder(old.parent)
