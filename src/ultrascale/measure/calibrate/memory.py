"""The two constants between the tensors that a law counts and the peak that an allocator reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultrascale.cost.estimate import estimate
from ultrascale.measure.calibrate.constants import Base, bounds
from ultrascale.measure.calibrate.runs import CalibrationRun
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.units import GIB

FIELDS = ("workspace_gib", "allocator_slack")


@dataclass(frozen=True)
class MeasuredPeak:
    """Bytes on the fullest stage of one run."""

    predicted: float
    """tensors"""
    moving: float
    """of these, activations and buffers"""
    measured: float
    """tensors, and on a GPU cuBLAS's workspaces among them"""
    holes: float | None
    """what the allocator had reserved beyond; None on a CPU"""


def held(base: Base, run: CalibrationRun) -> MeasuredPeak | None:
    if run.memory is None:
        return None
    predicted = estimate(base.job(run.job, base.cluster.efficiency), run.layout).memory[run.stage].memory
    seen, runtime = run.memory, run.memory.runtime
    tensors = seen.total - (runtime or 0.0)
    return MeasuredPeak(predicted.total - predicted.runtime, predicted.activations + predicted.buffers, tensors, runtime)


def peak_bytes(one: MeasuredPeak, efficiency: Efficiency) -> float:
    """What the run's allocator should have handed out at its peak."""
    return one.predicted + (efficiency.workspace_gib * GIB if one.holes is not None else 0.0)


def fitted(runs: Sequence[MeasuredPeak]) -> dict[str, float]:
    """Least squares of relative errors; nothing where no allocator spoke."""
    spoke = [one for one in runs if one.holes is not None]
    if not spoke:
        return {}
    size = np.asarray([one.measured for one in spoke])
    missing = (size - [one.predicted for one in spoke]) / GIB
    moving, holes = (np.asarray([getattr(one, name) for one in spoke], dtype=float) for name in ("moving", "holes"))
    # A law that is off by whole tensors says nothing of workspaces: the middle one counts, each as its share of the run.
    middle = _weighted_median(missing, 1 / size)
    found = {"workspace_gib": middle, "allocator_slack": float((holes * moving / size**2).sum() / (moving**2 / size**2).sum())}
    limits = {name: bounds(name) for name in FIELDS}
    return {name: float(f"{min(max(one, 0.0), limits[name][1]):.3g}") for name, one in found.items()}


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][int(np.searchsorted(reached, 0.5))])
