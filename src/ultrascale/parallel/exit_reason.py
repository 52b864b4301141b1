"""How a process ended, in words: its exit code, the signal, and whether the system ran out of memory meanwhile."""

from __future__ import annotations

import signal
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
NEARLY_FULL = 0.05  # of the memory left

# What gloo, NCCL and the store say when a peer is gone or does not come.
LOST = (
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


def ending(code: int | None, kills_before: int | None) -> str:
    """Of `Process.exitcode`; `kills_before`: what `oom_kills` said when the process was started."""
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
    """How often the kernel has killed for memory, in this control group or on this machine; None where it does not say."""
    files = (CGROUP / "memory.events", CGROUP / "memory" / "memory.oom_control", Path("/proc/vmstat"))
    return next((count for file in files if (count := _number(file, "oom_kill")) is not None), None)


def memory_left() -> float | None:
    """Share of this machine's, or its control group's, memory that a process could still get; None where nothing says."""
    machine = Path("/proc/meminfo")
    total, left = _number(machine, "MemTotal:"), _number(machine, "MemAvailable:")
    limit, used = _alone(CGROUP / "memory.max"), _alone(CGROUP / "memory.current")
    shares = [left / total] if total and left is not None else []
    shares += [1 - used / limit] if limit and used is not None else []
    return min(shares, default=None)


def state(pid: int) -> str:
    """The kernel's letter for a process: R runs, S sleeps, T is stopped, Z has ended; empty where it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _number(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), None)


def _alone(file: Path) -> int | None:
    """A file that holds one number, or the word `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
