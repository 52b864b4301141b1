"""Folders: the file names of a run's folder, and folders that appear whole or not at all.

A new folder is filled under a hidden name beside its place, then renamed into it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ultrascale.specs.errors import SpecError, os_reason

# What is in a run's folder, by who reads it: planner, trainer, compare, report.
PLAN, ENVIRONMENT, METRICS, MEASUREMENT = "plan.yaml", "env.json", "metrics.jsonl", "measurement.json"
CHECKPOINTS, TRACES, REPORT, LOCK = "checkpoints", "traces", "report.html", ".lock"
MANIFEST = "checkpoint.json"  # of a checkpoint; one without it is not complete
STEP_FOLDER = re.compile(r"step-(\d{6,})")  # a checkpoint in `checkpoints`


def step_folder(step: int) -> str:
    return f"step-{step:06d}"


def run_folders(folder: Path) -> list[Path]:
    """The runs in a folder of runs: those of its folders that have a plan, in no order."""
    return [one for one in folder.iterdir() if (one / PLAN).is_file()] if folder.is_dir() else []


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill; it takes the target's name, with all its bytes on the disk, unless an error ends the block."""
    refuse_used(target)
    place = Path(os.path.realpath(target))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        hidden = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}.", suffix=".partial"))
    except (OSError, ValueError) as error:
        raise _unwritable(target, error) from None
    try:
        yield hidden
        os.chmod(hidden, 0o755)
        _sync(hidden)
        os.rename(hidden, place)
        sync_folder(place.parent)
    except OSError as error:
        raise _unwritable(target, error) from None
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def refuse_used(target: Path) -> None:
    """SpecError unless there is nothing at the target, or an empty folder."""
    # os.path answers False where pathlib would raise: a name too long, a folder that may not be read.
    if os.path.isdir(target):
        try:
            used = any(os.scandir(target))
        except OSError as error:
            raise _unwritable(target, error) from None
        if used:
            raise SpecError(f"{target} is a folder with files in it: name a new one, such as {target}-2")
    elif os.path.lexists(target):
        raise SpecError(f"{target} is a file: name a new folder, such as {target}-2")


def folder_name(name: str) -> str:
    """A model's name as the name of one folder: signs that a path or a shell gives a meaning become `-`."""
    return re.sub(r"[^\w.+=-]", "-", name)[:100].lstrip(".-") or "model"


def open_nonblocking(path: str, flags: int) -> int:
    """An opener for `open`: a FIFO that nobody reads or writes to would block it."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


@contextmanager
def locked(lock: Path, refusal: str) -> Iterator[None]:
    """Holds the lock file for this process; SpecError with the refusal if another one does. A kill gives it back."""
    import fcntl

    try:
        file = open(lock, "w", opener=open_nonblocking)  # noqa: SIM115  (closed below)
    except OSError as error:
        raise SpecError(f"{lock} cannot be opened ({os_reason(error)}): delete it") from None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not flock: processes forked from this one would keep it
        except BlockingIOError:
            raise SpecError(refusal) from None
        except OSError:  # a disk that knows no locks
            pass
        yield


def free_bytes(target: Path) -> int:
    """Of the disk on which the target is or would be."""
    place = Path(os.path.abspath(target))
    while not os.path.exists(place) and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def _sync(folder: Path) -> None:
    for inside, _, files in os.walk(folder):
        for name in files:
            with open(Path(inside, name), "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(inside))


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(target: Path, error: Exception) -> SpecError:
    reason = os_reason(error)
    return SpecError(f"{target} cannot be written ({reason}): name another folder, on a disk with room")
