"""Read measured runs for a calibration: run folders, folders of them, gathered runs (.jsonl), or a table (.csv)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.cost.legality import problem
from ultrascale.measure.accuracy.runs import read as read_table
from ultrascale.measure.accuracy.scores import measured_rate
from ultrascale.measure.compare import load_run
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_named
from ultrascale.specs.folders import MEASUREMENT, METRICS, PLAN
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import MeasuredMemory, Measurement
from ultrascale.specs.plan import job_from_mapping
from ultrascale.specs.validate import build, shown

LARGEST = 256 * 2**20  # bytes of a .jsonl file: a million steps
EXAMPLE = "such as runs/first, runs/, gathered.jsonl or a table with the columns of data/published.csv"


@dataclass(frozen=True)
class CalibrationRun:
    """One measured run."""

    name: str
    job: Job
    layout: Layout
    step_s: float
    spread: float = 0.0
    """half the interquartile range of its steps, relative to the median"""
    memory: MeasuredMemory | None = None
    """of the fullest stage"""
    stage: int = 0


def load(paths: Sequence[Path]) -> list[CalibrationRun]:
    """Every run that the paths name, once; SpecError for what is no run, or is of another machine."""
    found: dict[str, CalibrationRun] = {}
    for path in paths:
        for one in _runs_in(path):
            found.setdefault(one.name, one)
    runs = list(found.values())
    if not runs:
        raise SpecError(f"no runs to calibrate with: name some, {EXAMPLE}")
    _one_machine(runs)
    return runs


def _runs_in(path: Path) -> Iterator[CalibrationRun]:
    if not path.exists():
        raise SpecError(f"{path} does not exist: name measured runs, {EXAMPLE}")
    if path.suffix.lower() == ".csv":
        yield from _rows(path)
    elif path.suffix.lower() == ".jsonl":
        yield from _read_jsonl(path)
    elif not path.is_dir():
        raise SpecError(f"{path} is neither a run's folder nor a table of runs: name some, {EXAMPLE}")
    elif (path / PLAN).is_file() or (path / MEASUREMENT).is_file():
        yield _folder(path)
    else:
        inside = [each for each in sorted(path.iterdir()) if (each / PLAN).is_file() and (each / MEASUREMENT).is_file()]
        if not inside:
            raise SpecError(
                f"{path} holds no measured run: a run's folder has {PLAN} and, once all its steps are done, {MEASUREMENT}"
            )
        yield from map(_folder, inside)


def _folder(path: Path) -> CalibrationRun:
    plan, measured = load_run(path, "it cannot be calibrated with", "leave it out")
    return _measured(str(path), plan.job, plan.layout, measured, _steps(path / METRICS))


def _read_jsonl(path: Path) -> Iterator[CalibrationRun]:
    """Runs in a .jsonl file, as benchmarks/gpu/calibration_runs.py writes them."""
    for number, line in enumerate(_lines(path), 1):
        try:
            data: dict[str, Any] = json.loads(line)
            fields = {name: data[name] for name in ("run", "job", "layout", "measurement")}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise SpecError(f"{path}, line {number}, is no run: it needs run, job, layout and measurement") from None
        what = f"{path}, line {number}"
        measured = build(Measurement, fields["measurement"], f"{what}, measurement")
        layout = build(Layout, fields["layout"], f"{what}, layout")
        steps = data.get("steps_s", [])
        if not isinstance(steps, list):
            raise SpecError(f"{what}, steps_s is {shown(steps)} but must be a list of seconds, such as [0.5, 0.5]")
        times = [_positive(step, f"{what}, steps_s") for step in steps]
        yield _measured(str(fields["run"]), job_from_mapping(fields["job"], what), layout, measured, times)


def _measured(name: str, job: Job, layout: Layout, measured: Measurement, steps: Iterable[float]) -> CalibrationRun:
    if (measured.device == "cpu") != (job.cluster.gpu.architecture == "cpu" or job.cluster.efficiency.synchronous):
        raise SpecError(
            f"{name} ran on {measured.device} but its plan is of {job.cluster.gpu.name}, so that nothing predicts it: run it "
            "again with a plan for the machine it runs on"
        )
    if (why := problem(job, layout)) is not None:
        raise SpecError(f"{name} cannot be estimated: {why}")
    memory = measured.memory[measured.peak_stage].memory
    return CalibrationRun(name, job, layout, measured.step_time_s, _spread(list(steps)[2:]), memory, measured.peak_stage)


def _steps(metrics: Path) -> list[float]:
    times = []
    for number, line in enumerate(_lines(metrics) if metrics.is_file() else (), 1):
        try:
            step = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            step = None
        if not isinstance(step, dict):
            raise SpecError(
                f"{metrics}, line {number}, is not JSON: expected the metrics of one step, such as " + '{"step": 1}'
            )
        if "step_time_s" in step:
            times.append(_positive(step["step_time_s"], f"{metrics}, line {number}, step_time_s"))
    return times


def _positive(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SpecError(f"{what} is {shown(value)} but must be a number greater than 0, such as 0.5")
    return float(value)


def _lines(path: Path) -> list[str]:
    return read_named(path, str(path), f"name measured runs, {EXAMPLE}", LARGEST).splitlines()


def _spread(steps: Sequence[float]) -> float:
    if len(steps) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(steps, n=4)
    return (high - low) / 2 / middle


def _rows(path: Path) -> Iterator[CalibrationRun]:
    runs, _ = read_table(path)
    for run in runs:
        job, layout, rate = run.job, run.layout, measured_rate(run)
        if job and layout and rate and not run.half_recompute and problem(job, layout) is None:
            yield CalibrationRun(run.id, job, layout, layout.batch_tokens(job.seq) / (rate * layout.gpus))


def _one_machine(runs: Sequence[CalibrationRun]) -> None:
    first = runs[0]
    for one in runs[1:]:
        kinds = [each.job.cluster.gpu.name for each in (first, one)]
        if kinds[0] != kinds[1]:
            raise SpecError(
                f"{first.name} ran on {kinds[0]} and {one.name} on {kinds[1]}: calibrate each kind with its own runs"
            )
        worlds = [each.layout.gpus for each in (first, one)]
        if one.job.cluster.efficiency.synchronous and worlds[0] != worlds[1]:
            raise SpecError(
                f"{first.name} had {worlds[0]} processes and {one.name} {worlds[1]}: processes share a CPU's cores, so that "
                "each number of them is a machine of its own; calibrate them apart"
            )
