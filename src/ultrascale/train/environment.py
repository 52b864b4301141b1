"""env.json: the versions, command and settings of each launch of a run, and the settings that a relaunch inherits."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_text, write_text
from ultrascale.specs.training import Training
from ultrascale.specs.validate import build

if TYPE_CHECKING:
    from ultrascale.train.request import Request

FILE = "env.json"
JOB_FIELDS = ("precision", "gradients")  # fields of the job that a resumed run may change


@dataclass(frozen=True)
class LastLaunch:
    """The settings of the last launch of a run."""

    resumed_from: str | None
    """the name of its checkpoint"""
    training: Training
    checkpoint: Checkpointing
    job: dict[str, Any]
    changed: tuple[str, ...]
    """what it was allowed to change and changed"""


def write(request: Request, run: Path, launch: str, resumed: bool) -> None:
    """`launch`: the same for every attempt of one launcher. `resumed`: earlier launches stay in the file."""
    import torch

    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
        "processes": request.layout.gpus,
        "layout": str(request.layout),
        "resumed_from": request.resume.name if request.resume else None,
        "training": request.training.model_dump(mode="json"),
        "checkpoint": request.checkpoint.model_dump(mode="json"),
        "job": {name: getattr(request.job, name) for name in JOB_FIELDS},
        "changed": list(request.changed),
        "command": sys.argv,
        "launch": launch,
        "earlier": _earlier(run) if resumed else [],
    }
    write_text(run / FILE, json.dumps(environment, indent=1) + "\n")


def launch_of(run: Path) -> str:
    """The launcher's name for the last launch; empty if there is none."""
    return str(_read(run).get("launch", ""))


def last_launch(run: Path) -> LastLaunch | None:
    """The last launch; None if the file cannot be read or was written by another version."""
    data = _read(run)
    try:
        training = build(Training, data["training"], "env.training")
        settings = build(Checkpointing, data["checkpoint"], "env.checkpoint")
        job = {name: data["job"][name] for name in JOB_FIELDS}
        return LastLaunch(data["resumed_from"], training, settings, job, tuple(data["changed"]))
    except (KeyError, TypeError, SpecError):
        return None


def _earlier(run: Path) -> list[Any]:
    """The earlier launches, oldest first."""
    before = _read(run)
    earlier = before.pop("earlier", [])
    return [*(earlier if isinstance(earlier, list) else []), before] if before else []


def _read(run: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_text(run / FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
