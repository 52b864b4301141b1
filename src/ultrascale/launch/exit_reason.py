"""Describes how a process ended: its exit code, its signal, and whether the system ran out of memory during the run."""

from __future__ import annotations

import signal
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
NEARLY_FULL = 0.05  # share of memory available below which the out-of-memory killer is suspected

# Error messages of gloo, NCCL and the store when a peer is lost or does not connect.
LOST_PEER_MESSAGES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Wait timeout",
    "Application timeout",
    "Socket Timeout",
    "timed out after",
    "Read timeout",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
    "Watchdog caught collective operation timeout",
    "failed to recv, got 0 bytes",
)


def describe_exit(code: int | None, kills_before: int | None) -> str:
    """Describes a `Process.exitcode`; `kills_before`: the value of `oom_kills` when the process was started."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return f"signal {name}: {_killer(kills_before)}"
    return f"signal {name}"


def _killer(kills_before: int | None) -> str:
    now = oom_kills()
    if now is not None and kills_before is not None and now > kills_before:
        return "the system's out-of-memory killer struck meanwhile, so it was most likely that"
    left = memory_left()
    if left is not None and left < NEARLY_FULL:
        return f"it may have been the system's out-of-memory killer, with {left:.0%} of the memory left"
    return "it was killed from outside, and memory was not short"


def oom_kills() -> int | None:
    """Number of out-of-memory kills in this control group or on this machine; None if the kernel does not report it."""
    files = (CGROUP / "memory.events", CGROUP / "memory" / "memory.oom_control", Path("/proc/vmstat"))
    return next((count for file in files if (count := _number(file, "oom_kill")) is not None), None)


def memory_left() -> float | None:
    """Share of the memory of this machine, or of its control group, that is available; None if it is not reported."""
    machine = Path("/proc/meminfo")
    total, left = _number(machine, "MemTotal:"), _number(machine, "MemAvailable:")
    limit, used = _number(CGROUP / "memory.max"), _number(CGROUP / "memory.current")
    shares = [left / total] if total and left is not None else []
    shares += [1 - used / limit] if limit and used is not None else []
    return min(shares, default=None)


def state(pid: int) -> str:
    """The kernel's state letter of a process: R running, S sleeping, T stopped, Z ended; empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _number(file: Path, name: str | None = None) -> int | None:
    """The number after `name` in a file of such lines, or the only word of a file; None if there is none, such as `max`."""
    try:
        lines = [line.split() for line in file.read_text().splitlines() if line.strip()]
    except OSError:
        return None
    words = [line[0] if name is None else line[1] for line in lines if name is None or line[:1] == [name]]
    return int(words[0]) if words and words[0].isdigit() else None
