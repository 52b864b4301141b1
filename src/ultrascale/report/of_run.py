"""The report of a run: metrics, predicted beside measured, trace, environment; then the report of its plan."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ultrascale.figures import plan as plan_figures
from ultrascale.figures import runs as run_figures
from ultrascale.measure import compare, trace_analysis
from ultrascale.measure import trace_rank as trace
from ultrascale.measure.trace_steps import step_intervals
from ultrascale.plan.survey import Progress
from ultrascale.report.of_plan import footer, plan_sections
from ultrascale.report.page import Section, bullets, chart, details, page, table, tiles, words
from ultrascale.show.compare import rows as compared
from ultrascale.show.plan import job_line
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import open_regular, read_named, reason_of
from ultrascale.specs.folders import ENVIRONMENT, MEASUREMENT, METRICS, PLAN, TRACES
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import seconds
from ultrascale.specs.validate import shown

MAX_METRICS_BYTES = 256 * 2**20  # a million steps
DRAWN = ("loss", "eval_loss", "tokens_per_s_per_gpu")
MAX_ENVIRONMENT_BYTES = 100_000  # of env.json


def run_page(folder: Path, say: Progress = lambda _: None) -> str:
    plan = _plan(folder)
    rows = metrics(folder / METRICS)
    sections = list(_run_sections(folder, plan, rows))
    sections += plan_sections(plan, say)
    return page(
        f"{folder.name}: {plan.job.model.name}", f"{job_line(plan.job)} Layout: {plan.layout}.", sections, footer(folder.name)
    )


def _plan(folder: Path) -> Plan:
    if not (folder / PLAN).is_file():
        raise SpecError(f"{folder} has no {PLAN}, so it is not a run: try a folder that `ultrascale train --out` wrote")
    return Plan.load(folder / PLAN)


def metrics(file: Path) -> list[dict[str, Any]]:
    """The metrics of a run by step; an unfinished last line of a live run is left out."""
    if not os.path.lexists(file):
        return []
    lines = read_named(file, str(file), "expected the metrics of a run, a JSON object a line", MAX_METRICS_BYTES).splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                break
            raise SpecError(f"{file} line {number} is not JSON: expected the metrics of one step") from None
        if not isinstance(row, dict) or not _is_number(row.get("step")):
            raise SpecError(f"{file} line {number} has no step: expected the metrics of one step, such as " + '{"step": 1}')
        for name in DRAWN:
            if row.get(name) is not None and not _is_number(row[name]):
                raise SpecError(f"{file} line {number}: {name} is {shown(row[name])} but must be a number, such as 2.5")
        rows.append(row)
    return rows


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > 2**60


def last_loss(rows: list[dict[str, Any]]) -> str:
    """Of the last step; a loss that was not finite is null in its line."""
    loss = rows[-1].get("loss")
    return "not finite" if loss is None else f"{loss:.3f}"


def _run_sections(folder: Path, plan: Plan, rows: list[dict[str, Any]]) -> Iterator[Section]:
    parts: list[str] = []
    measured = Measurement.load(folder / MEASUREMENT) if (folder / MEASUREMENT).is_file() else None
    if measured is not None:
        parts.append(tiles(list(_headline(measured, rows))))
    else:
        parts.append(words(f"There is no {MEASUREMENT}: the run is not finished, or ended before its last step."))
    if rows:
        parts += [
            chart(run_figures.losses({folder.name: rows}), "loss"),
            chart(run_figures.throughput({folder.name: rows}), "speed"),
        ]
    else:
        parts.append(words("No step has been written yet."))
    yield Section("Run", tuple(parts))
    if measured is not None:
        plan = compare.of_measured_batch(plan, measured)
        sides = compare.ComparisonSide("plan", plan, plan.estimate), compare.ComparisonSide(folder.name, plan, measured)
        found = compare.compare(*sides)
        head = ("term", "predicted", "measured", "difference")
        lines = compared(found.terms, ("predicted", "measured"))
        marked = [("– " + name if term.part else name, *cells) for term, (name, *cells) in zip(found.terms, lines, strict=True)]
        drawn = chart(plan_figures.predicted_and_measured(found), "predicted-measured")
        yield Section("Predicted and measured", (bullets(found.sentences), drawn, table(head, marked, numbers=(1, 2, 3))))
    if (folder / TRACES).is_dir():
        yield Section("Trace", tuple(_lanes(folder)))
    if (folder / ENVIRONMENT).is_file():
        yield Section("Environment", (details(ENVIRONMENT, _start_of(folder / ENVIRONMENT)),))


def _start_of(file: Path) -> str:
    try:
        with open_regular(file) as opened:
            return opened.read(MAX_ENVIRONMENT_BYTES).decode(errors="replace")
    except OSError as error:
        raise SpecError(f"{file} {reason_of(error)}: expected what `ultrascale train` writes of its machine") from None


def _lanes(folder: Path) -> Iterator[str]:
    """The trace of the first rank; the others are large and similar."""
    try:
        first, *others = trace_analysis.files([folder])
        yield chart(run_figures.lanes(step_intervals(trace.read(first))), "lanes")
        if others:
            yield words(
                f"{first.name}; {len(others)} more are beside it: ultrascale profile --trace {folder} reads all of them."
            )
    except SpecError as error:
        yield words(str(error))


def _headline(run: Measurement, rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    yield "one step, measured", seconds(run.step_time_s)
    yield "tokens/s on every GPU" if "cuda" in run.device else "tokens/s of every process", f"{run.tokens_per_s_per_gpu:,.0f}"
    if run.mfu_causal is not None:
        yield "MFU, causal", f"{run.mfu_causal:.1%}"
    yield "peak memory", f"{run.peak_gib:,.2f} GiB"
    if rows:
        yield f"loss at step {rows[-1]['step']:,}", last_loss(rows)
