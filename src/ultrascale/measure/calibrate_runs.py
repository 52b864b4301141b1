"""Read measured runs for a calibration: run folders, folders of them, gathered runs (.jsonl), or a table (.csv)."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.cost.legality import problem
from ultrascale.measure.accuracy.runs import read as read_table
from ultrascale.measure.accuracy.scores import measured_rate
from ultrascale.measure.compare import load_run
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_named
from ultrascale.specs.folders import MEASUREMENT, METRICS, PLAN, run_folders
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.measurement import MeasuredMemory, Measurement
from ultrascale.specs.plan import job_from_mapping
from ultrascale.specs.validate import build, shown

MAX_JSONL_BYTES = 256 * 2**20  # a million steps
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


def load(paths: Sequence[Path], say: Callable[[str], None] = lambda _: None) -> list[CalibrationRun]:
    """Every run that the paths name, once; SpecError for what is no run, or is of another kind of GPU.

    `say` is told what is left out: unfinished runs, and on a CPU runs of another number of processes than most have.
    """
    found: dict[str, CalibrationRun] = {}
    for path in paths:
        if len(paths) > 1 and (path / PLAN).is_file() and not (path / MEASUREMENT).exists():
            say(f"{path} is left out: it has no {MEASUREMENT}, so its steps are not all done")
            continue
        for one in _runs_in(path):
            found.setdefault(one.name, one)
    runs = list(found.values())
    if not runs:
        raise SpecError(f"no runs to calibrate with: name some, {EXAMPLE}")
    _one_kind(runs)
    return _one_machine(runs, say)


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
        inside = [run for run in sorted(run_folders(path)) if (run / MEASUREMENT).is_file()]
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
    return read_named(path, str(path), f"name measured runs, {EXAMPLE}", MAX_JSONL_BYTES).splitlines()


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


def _one_kind(runs: Sequence[CalibrationRun]) -> None:
    first = runs[0]
    for one in runs[1:]:
        kinds = [each.job.cluster.gpu.name for each in (first, one)]
        if kinds[0] != kinds[1]:
            raise SpecError(
                f"{first.name} ran on {kinds[0]} and {one.name} on {kinds[1]}: calibrate each kind with its own runs"
            )


def _one_machine(runs: list[CalibrationRun], say: Callable[[str], None]) -> list[CalibrationRun]:
    """Processes share a CPU's cores, so each number of them is a machine of its own: the runs of the most frequent number."""
    if not runs[0].job.cluster.efficiency.synchronous:
        return runs
    (world, count), *others = Counter(run.layout.gpus for run in runs).most_common()
    for other, number in others:
        say(
            f"{number} of the {len(runs)} runs are left out: they had {other} processes, not {world} as {count} had, and "
            "processes share a CPU's cores; calibrate them apart"
        )
    return [run for run in runs if run.layout.gpus == world]
