"""Output of `ultrascale calibrate`: each constant fitted or why not, and errors before, after, and on runs left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from ultrascale.measure.calibrate import CalibratedRun, Calibration, ConstantVerdict
from ultrascale.show.lines import bullets, heading, table
from ultrascale.specs.units import seconds

WHAT = {"step_time": "step_s", "memory": "held_gib"}
TIMES = ("before", "after", "left_out")
UNSTEADY = 0.05  # share of a step: a run whose steps differ by more is marked


def show_calibration(console: Console, found: Calibration, file: Path | None) -> None:
    heading(console, f"{found.base.label}: constants fitted to {len(found.runs)} runs")
    _constants(console, [verdict for verdict in found.verdicts if verdict.known is not None])
    kept = [verdict for verdict in found.verdicts if verdict.known is None]
    if kept:
        heading(console, "not changed")
        bullets(console, (f"{verdict.name}, {verdict.before:.4g}: {verdict.why}" for verdict in kept))
    show_runs(console, found.runs)
    for line in summary(found):
        console.print(line)
    alone = [f"{run.name} alone determines {', '.join(run.alone)}" for run in found.runs if run.alone]
    if alone:
        console.print(f"Not judged, since no other run does it: {'; '.join(alone)}.")
    if not found.judges():
        console.print(
            "Each run alone determines some constant, so none can judge the fit: the constants stay; more runs would help."
        )
    elif not found.improved:
        console.print("On runs left out the old constants predict as well or better: they stay.")
    elif file is not None:
        console.print(f"written to {file}: `ultrascale plan --cluster {file} …` plans with it")


def _constants(console: Console, fitted: list[ConstantVerdict]) -> None:
    grid = table(None, "constant", "before", "after", "uncertainty")
    grid.box, grid.pad_edge = None, False
    for one in fitted:
        grid.add_row(one.name, f"{one.before:.4g}", f"{one.after:.4g}", f"±{one.known:.1%}" if one.known else "")
    console.print(grid)


def show_runs(console: Console, runs: tuple[CalibratedRun, ...]) -> None:
    columns = ("run", "step", "before", "after", "left out", "peak GiB", "before", "after", "left out")
    grid = table("error: predicted over measured, less one", *columns)
    for run in runs:
        marked = f"{seconds(run.step_s)}{f' ±{run.spread:.0%}' if run.spread > UNSTEADY else ''}"
        times = (f"{getattr(run, f'{when}_s') / run.step_s - 1:+.1%}" for when in TIMES)
        memory = ("–",) * 4
        if run.held_gib:
            peaks = (getattr(run, f"held_{when}_gib") / run.held_gib - 1 for when in TIMES)
            memory = (f"{run.held_gib:.3g}", *(f"{peak:+.1%}" for peak in peaks))  # type: ignore[assignment]
        grid.add_row(run.name, marked, *times, *memory)
    console.print(grid)


def summary(found: Calibration) -> list[str]:
    lines = []
    for what, of in (("step time", "step_s"), ("peak memory", "held_gib")):
        each = [found.errors(when, of) for when in TIMES]
        if all(each):
            before, after, left_out = (
                f"{one.middle:.1%} (mean {one.mean:.1%}, worst {one.worst:.1%})" for one in each if one is not None
            )
            lines.append(f"{what}, median error: {before} before, {after} after on the same runs, {left_out} on runs left out")
    return lines


def calibrate_json(found: Calibration) -> dict[str, Any]:
    return {
        "improved": found.improved,
        "cluster": found.cluster.to_mapping(),
        "constants": [{**vars(verdict), "fitted": verdict.known is not None} for verdict in found.verdicts],
        "runs": found.runs,
        "errors": {name: {when: found.errors(when, of) for when in TIMES} for name, of in WHAT.items()},
    }
