"""The result of a run, sent from rank 0 to the process that started it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.specs.measurement import Measurement


@dataclass(frozen=True)
class RunOutcome:
    """The last step, the measurement and the last checkpoint of a run."""

    step: int
    """steps done"""
    measured: Measurement | None
    """None if the run was stopped"""
    stopped: str | None = None
    """the signal that asked it to end"""
    kept: Path | None = None
    """the checkpoint of that step"""
    observed: Any = None
    """the result of `Observer.report`"""
