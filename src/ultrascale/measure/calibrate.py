"""Calibrate: a Cluster whose constants are fitted to measured runs, as far as these determine them, judged on runs left out.

Step times and memory are judged separately: the constants of one may stay while those of the other change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from statistics import mean, median

import numpy as np

from ultrascale.cost.estimate import estimate
from ultrascale.measure.calibrate_fit import (
    CONSTANTS,
    Constant,
    FitResult,
    InitialConstants,
    LogShifts,
    StepTimeModel,
    bounds,
    fit,
    refit,
)
from ultrascale.measure.calibrate_runs import CalibrationRun
from ultrascale.specs.cluster import CalibrationSource, Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.errors import SpecError
from ultrascale.specs.units import GIB

MIN_RUNS = 3  # runs: with two, each would be judged by one other
FOLDS = 8  # of cross-validation
STEP, MEMORY = "step_s", "held_gib"  # what a run measures: step time, memory
FIELDS = ("workspace_gib", "allocator_slack")
CONTEXT = "a run sees what its allocator holds, not what CUDA holds beside it; what would: nvidia-smi, less that"
NO_BETTER = "on runs left out what was fitted is no better"
NO_JUDGE = "no run is left to judge what was fitted: without any one of them some constant is not told; what would: more runs"


@dataclass(frozen=True)
class ConstantVerdict:
    """One constant before and after."""

    name: str
    before: float
    after: float
    known: float | None
    """relative uncertainty; None: it was not fitted"""
    why: str = ""
    """why it was not fitted, and which run would determine it"""


@dataclass(frozen=True)
class CalibratedRun:
    """One run: measured, and predicted before, after, and by constants fitted without it."""

    name: str
    step_s: float
    before_s: float
    after_s: float
    left_out_s: float
    spread: float
    """of its steps"""
    alone: tuple[str, ...] = ()
    """constants that only this run determines: left out, it is predicted with their old values, which judges nothing"""
    held_gib: float | None = None
    held_before_gib: float | None = None
    held_after_gib: float | None = None
    held_left_out_gib: float | None = None


@dataclass(frozen=True)
class CalibrationErrors:
    """Of |predicted / measured − 1|."""

    mean: float
    middle: float
    worst: float


@dataclass(frozen=True)
class Calibration:
    base: Cluster
    cluster: Cluster
    """with new constants, or the old ones where the new are no better on runs left out"""
    verdicts: tuple[ConstantVerdict, ...]
    runs: tuple[CalibratedRun, ...]

    @property
    def improved(self) -> bool:
        return self.cluster.calibrated is not None

    def errors(self, when: str, of: str = STEP) -> CalibrationErrors | None:
        """`when`: before, after or left_out (only of runs that others determine); `of`: step_s or held_gib."""
        return _errors(self.runs if when != "left_out" else self.judges(of), when, of)

    def judges(self, of: str = STEP) -> tuple[CalibratedRun, ...]:
        """Runs whose constants others determine as well; for memory all are."""
        return tuple(run for run in self.runs if of == MEMORY or not run.alone)


def _errors(runs: Sequence[CalibratedRun], when: str, of: str = STEP) -> CalibrationErrors | None:
    stem, unit = of.rsplit("_", 1)
    name = f"{when}_{unit}" if stem == "step" else f"{stem}_{when}_{unit}"
    pairs = [(getattr(run, name), getattr(run, of)) for run in runs]
    off = [abs(one / measured - 1) for one, measured in pairs if measured]
    return CalibrationErrors(mean(off), median(off), max(off)) if off else None


def calibrate(runs: Sequence[CalibrationRun], say: Callable[[str], None] = lambda text: None) -> Calibration:
    """Fit what the runs determine, judge it by cross-validation, and keep old constants where it does not help."""
    if len(runs) < MIN_RUNS:
        raise SpecError(
            f"calibrate needs at least {MIN_RUNS} runs, to judge each by the others, but found {len(runs)}: add some"
        )
    # The run with most processes has a cluster that is large enough for all.
    base = InitialConstants.of(max(runs, key=lambda run: run.layout.gpus).job)
    model = StepTimeModel(base, runs)
    everyone = range(len(runs))
    say(f"fitting to {len(runs)} runs")
    found = fit(model, everyone)
    peaks = [measured_peak(base, run) for run in runs]
    efficiency = _with_memory(base, found.moves, [one for one in peaks if one is not None])
    without: dict[int, tuple[Efficiency, list[Constant]]] = {}
    folds = min(len(runs), FOLDS)
    for first in range(folds):
        say(f"judging on runs left out: {len(without)} of {len(runs)}")
        fold = everyone[first::folds]  # left out together
        kept = [index for index in everyone if index not in fold]
        moves, lost = refit(model, kept, found)
        changed = _with_memory(base, moves, [one for index in kept if (one := peaks[index]) is not None])
        without |= dict.fromkeys(fold, (changed, lost))

    def judged(after: Efficiency, left_out: Callable[[Efficiency], Efficiency]) -> tuple[CalibratedRun, ...]:
        return tuple(
            _calibrated_run(base, run, one, after, left_out(without[index][0]), without[index][1])
            for index, (run, one) in enumerate(zip(runs, peaks, strict=True))
        )

    verdicts = _verdicts(base, found, efficiency, any(one is not None and one.holes is not None for one in peaks))
    result = Calibration(base.cluster, base.cluster, tuple(verdicts), judged(efficiency, lambda each: each))
    taken = {of: _better(result, of) for of in (STEP, MEMORY)}
    if not any(taken.values()):
        return result

    def as_taken(each: Efficiency) -> Efficiency:
        """With the new constants of times, of memory, or of both."""
        times, of_memory = (each if taken[of] else base.cluster.efficiency for of in (STEP, MEMORY))
        return times.model_copy(update={name: getattr(of_memory, name) for name in FIELDS})

    why_not = {of: NO_BETTER if result.judges(of) else NO_JUDGE for of in taken}
    verdicts = [_kept(one, taken[of], why_not[of]) for one in verdicts for of in (MEMORY if one.name in FIELDS else STEP,)]
    result = Calibration(base.cluster, base.cluster, tuple(verdicts), judged(as_taken(efficiency), as_taken))
    return replace(result, cluster=_signed(result, as_taken(efficiency)))


def _with_memory(base: InitialConstants, moves: LogShifts, peaks: Sequence[MeasuredPeak]) -> Efficiency:
    return base.changed(moves).model_copy(update=fit_memory(peaks))


def _calibrated_run(
    base: InitialConstants,
    run: CalibrationRun,
    peak: MeasuredPeak | None,
    after: Efficiency,
    without: Efficiency,
    lost: Sequence[Constant],
) -> CalibratedRun:
    constants = base.cluster.efficiency, after, without
    before_s, after_s, without_s = (estimate(base.job(run.job, each), run.layout).step_time_s for each in constants)
    alone = tuple(constant.name for constant in lost)
    judged = CalibratedRun(run.name, run.step_s, before_s, after_s, without_s, run.spread, alone)
    if peak is None:
        return judged
    before, after_fit, without_it = (peak_bytes(peak, each) / GIB for each in constants)
    return replace(
        judged,
        held_gib=peak.measured / GIB,
        held_before_gib=before,
        held_after_gib=after_fit,
        held_left_out_gib=without_it,
    )


def _better(found: Calibration, of: str = STEP) -> bool:
    """Whether the median error on runs left out is smaller."""
    before, after = (_errors(found.judges(of), when, of) for when in ("before", "left_out"))
    return before is not None and after is not None and after.middle < before.middle


def _kept(verdict: ConstantVerdict, taken: bool, why_not: str) -> ConstantVerdict:
    if taken or verdict.known is None:
        return verdict
    return replace(verdict, after=verdict.before, known=None, why=why_not)


def _signed(found: Calibration, efficiency: Efficiency) -> Cluster:
    """The new cluster, with the origin of its constants."""
    # If every run alone determines some constant, the constants of time stay, and are judged by their own predictions.
    time, memory = found.errors("left_out") or found.errors("after"), found.errors("left_out", MEMORY)
    assert time is not None  # there are runs
    origin = CalibrationSource(
        runs=len(found.runs),
        date=datetime.now(UTC).date().isoformat(),
        processes=found.base.gpus,
        constants=tuple(verdict.name for verdict in found.verdicts if verdict.known is not None),
        step_time_error=float(f"{time.middle:.3g}"),
        step_time_worst=float(f"{time.worst:.3g}"),
        memory_error=float(f"{memory.middle:.3g}") if memory is not None else None,
    )
    return found.base.model_copy(update={"efficiency": efficiency, "calibrated": origin})


def _verdicts(base: InitialConstants, found: FitResult, efficiency: Efficiency, on_gpu: bool) -> list[ConstantVerdict]:
    verdicts = []
    for constant in CONSTANTS:
        before = after = base.values[constant.fields[0]]
        if constant in found.moves:
            after = base.shifted(constant, found.moves[constant])[constant.fields[0]]
        why = "" if constant in found.moves else f"{found.why[constant]}; what would: {constant.run}"
        verdicts.append(ConstantVerdict(constant.name, before, after, found.known.get(constant), why))
    for name in FIELDS:
        before, after = getattr(base.cluster.efficiency, name), getattr(efficiency, name)
        why = "" if on_gpu else "no allocator spoke in these runs; what would: a run on a GPU"
        verdicts.append(ConstantVerdict(name, before, after, 0.0 if on_gpu else None, why))
    context_gib = base.cluster.efficiency.context_gib
    return [*verdicts, ConstantVerdict("context_gib", context_gib, context_gib, None, CONTEXT)]


@dataclass(frozen=True)
class MeasuredPeak:
    """Peak memory of the fullest stage of one run, in bytes."""

    predicted: float
    """tensors"""
    moving: float
    """of these, activations and buffers"""
    measured: float
    """tensors, on a GPU with the workspaces of cuBLAS"""
    holes: float | None
    """reserved by the allocator beyond that; None on a CPU"""


def measured_peak(base: InitialConstants, run: CalibrationRun) -> MeasuredPeak | None:
    if run.memory is None:
        return None
    predicted = estimate(base.job(run.job, base.cluster.efficiency), run.layout).memory[run.stage].memory
    runtime = run.memory.runtime
    tensors = run.memory.total - (runtime or 0.0)
    return MeasuredPeak(predicted.total - predicted.runtime, predicted.activations + predicted.buffers, tensors, runtime)


def peak_bytes(one: MeasuredPeak, efficiency: Efficiency) -> float:
    """Predicted bytes that the allocator gives out at the peak."""
    return one.predicted + (efficiency.workspace_gib * GIB if one.holes is not None else 0.0)


def fit_memory(runs: Sequence[MeasuredPeak]) -> dict[str, float]:
    """Workspace and allocator slack from runs on GPUs."""
    on_gpu = [one for one in runs if one.holes is not None]
    if not on_gpu:
        return {}
    size = np.asarray([one.measured for one in on_gpu])
    missing = (size - [one.predicted for one in on_gpu]) / GIB
    moving, holes = (np.asarray([getattr(one, name) for one in on_gpu], dtype=float) for name in ("moving", "holes"))
    # A median, since a law that is off by whole tensors says nothing of workspaces; each run weighs by its relative error.
    middle = float(np.quantile(missing, 0.5, weights=1 / size, method="inverted_cdf"))
    found = {"workspace_gib": middle, "allocator_slack": float((holes * moving / size**2).sum() / (moving**2 / size**2).sum())}
    limits = {name: bounds(name) for name in FIELDS}
    return {name: float(f"{min(max(one, 0.0), limits[name][1]):.3g}") for name, one in found.items()}
