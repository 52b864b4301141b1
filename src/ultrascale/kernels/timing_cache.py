"""Kernel timings kept on this machine's disk, so that a run does not time again what an earlier one did. No torch.

The file has, by environment (GPU, torch, optional kernel packages) and by what was timed, the milliseconds of each kernel.
Deleting it makes the next run time everything anew; a file that cannot be read or written is as good as none.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ultrascale.kernels.optional_kernels import PACKAGES
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_text, write_text

Timings = dict[str, dict[str, dict[str, float]]]
"""environment -> what was timed -> kernel -> ms"""
MOST_BYTES = 2**20


def file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ultrascale" / "kernels.json"


def environment(gpu: str) -> str:
    """What timings depend on besides the shape."""
    versions = []
    for name in ("torch", *(one.name for one in PACKAGES)):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join((gpu, *versions))


def load() -> Timings:
    """All that is known; empty if the file is missing, too large or not of this form."""
    try:
        found = json.loads(read_text(file(), MOST_BYTES))
        return {
            str(where): {
                str(what): {str(kernel): float(ms) for kernel, ms in times.items()} for what, times in timed.items() if times
            }
            for where, timed in found.items()
        }
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def recall(gpu: str, what: str) -> dict[str, float] | None:
    return load().get(environment(gpu), {}).get(what)


def store(gpu: str, what: str, times_ms: Mapping[str, float]) -> None:
    """Adds to the file. Of several ranks that write at once, one wins; the others' timings are taken again."""
    known = load()
    known.setdefault(environment(gpu), {})[what] = dict(times_ms)
    with suppress(SpecError):
        write_text(file(), json.dumps(known, indent=1))
