"""Who runs a trial, and whether that process still lives."""

from __future__ import annotations

import os
import socket
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial

from ultrascale.launch.exit_reason import state
from ultrascale.measure.bench.layouts_storage import SILENT_S


def this_process() -> dict[str, Any]:
    return {"host": _host(), "pid": os.getpid()}


def _host() -> str:
    """Of this boot: a container has another name, a machine that was started anew has other processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


def orphaned(trial: FrozenTrial) -> bool:
    owner = trial.user_attrs.get("owner")
    if owner is None:  # it died between its claim and its first word
        return trial.datetime_start is None or datetime.now() - trial.datetime_start > timedelta(seconds=SILENT_S)
    return owner["host"] == _host() and not _lives(owner["pid"])


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return state(pid) != "Z"
