"""The runs of a folder: what each trained, how far it came, and its checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.specs.errors import SpecError
from ultrascale.specs.folders import CHECKPOINTS, MANIFEST, MEASUREMENT, METRICS, PLAN, STEP_FOLDER, run_folders
from ultrascale.specs.plan import Plan

MAX_RUNS = 1000  # runs of one folder
TAIL_BYTES = 2**20


@dataclass(frozen=True)
class StoredCheckpoint:
    step: int
    bytes: int
    complete: bool
    """a save that was killed leaves a folder that no run resumes from"""


@dataclass(frozen=True)
class StoredRun:
    name: str
    model: str
    layout: str
    gpus: int
    steps: int
    loss: float | None
    """of the last step; None before the first, and where it was not finite"""
    finished: bool
    bytes: int
    checkpoints: tuple[StoredCheckpoint, ...]
    problem: str | None = None
    """why its files could not be read"""


def runs_in(folder: Path) -> list[StoredRun]:
    """The folder itself if it is a run, else the runs in it; newest first."""
    if not os.path.isdir(folder):
        raise SpecError(f"there is no folder {folder}: name a run or a folder of runs; `ultrascale train` writes into runs/")
    inside = [folder] if (folder / PLAN).is_file() else run_folders(folder)
    inside.sort(key=lambda one: (one / PLAN).stat().st_mtime, reverse=True)
    return [_read(one) for one in inside[:MAX_RUNS]]


def _read(run: Path) -> StoredRun:
    checkpoints = tuple(sorted(_checkpoints(run), key=lambda one: one.step))
    size, finished = _size(run), (run / MEASUREMENT).is_file()
    try:
        plan, last = Plan.load(run / PLAN), _last_row(run / METRICS)
    except SpecError as error:
        return StoredRun(run.name, "", "", 0, 0, None, finished, size, checkpoints, str(error))
    layout, loss = plan.layout, last.get("loss")
    steps, loss = int(last.get("step", 0)), float(loss) if isinstance(loss, int | float) else None
    return StoredRun(run.name, plan.job.model.name, str(layout), layout.gpus, steps, loss, finished, size, checkpoints)


def _last_row(file: Path) -> dict[str, Any]:
    """The last whole line of a run's metrics; only the end of the file is read."""
    if not file.is_file():
        return {}
    with open(file, "rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES))
        lines = stream.read(TAIL_BYTES).splitlines()
    for line in reversed(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row
    return {}


def _checkpoints(run: Path) -> Iterator[StoredCheckpoint]:
    folder = run / CHECKPOINTS
    for one in folder.iterdir() if folder.is_dir() else ():
        if (match := STEP_FOLDER.fullmatch(one.name)) is not None and one.is_dir():
            yield StoredCheckpoint(int(match[1]), _size(one), (one / MANIFEST).is_file())


def _size(folder: Path) -> int:
    return sum(os.lstat(os.path.join(parent, name)).st_size for parent, _, names in os.walk(folder) for name in names)
