"""How a run ended, as its first rank tells the process that started it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.specs.measurement import Measurement


@dataclass(frozen=True)
class RunOutcome:
    """Where it ended, what was seen, what is kept."""

    step: int
    """steps done"""
    measured: Measurement | None
    """None where the run was stopped"""
    stopped: str | None = None
    """the signal that asked it to end"""
    kept: Path | None = None
    """the checkpoint of that step"""
    observed: Any = None
    """what somebody saw who looked on"""
