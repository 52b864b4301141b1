"""Output of `ultrascale profile --trace` for several ranks: late ranks, exposed communication, bubble, critical path."""

from __future__ import annotations

from dataclasses import asdict
from statistics import mean
from typing import Any

from rich.console import Console

from ultrascale.measure.trace_job import JobAnalysis, compare, compare_sentences
from ultrascale.show.compare import show_terms
from ultrascale.show.lines import attributes, bullets, heading, notes, table
from ultrascale.specs.units import seconds

MOST_RANKS = 8  # in the table of late ranks; all are in the JSON and on the page


def show(console: Console, job: JobAnalysis) -> None:
    _show_late(console, job)
    _show_axes(console, job)
    if job.stages:
        grid = table("waits for messages", "stage", "ranks", "time", "of the step", left=())
        for one in job.stages:
            grid.add_row(str(one.stage), f"{one.ranks:,}", seconds(mean(one.bubble_s)), f"{one.share:.0%}")
        console.print(grid)
    heading(console, "across ranks")
    bullets(console, job.findings)
    notes(console, job.notes)


def _show_late(console: Console, job: JobAnalysis) -> None:
    if not job.stragglers:
        return
    of_rank = {one.rank: one for one in job.ranks}
    grid = table(
        "late ranks, per step",
        "rank",
        "others wait",
        "last to",
        "mostly because of",
        "waits itself",
        left=("mostly because of",),
    )
    for one in job.stragglers[:MOST_RANKS]:
        cause = next(iter(one.causes), "–")
        row = seconds(one.wait_s), f"{one.last:,} of {one.collectives:,}", cause, seconds(of_rank[one.rank].wait_s)
        grid.add_row(str(one.rank), *row)
    console.print(grid)
    if len(job.stragglers) > MOST_RANKS:
        console.print(f"and {len(job.stragglers) - MOST_RANKS:,} more ranks (--json and the page have them)")


def _show_axes(console: Console, job: JobAnalysis) -> None:
    if not job.axes:
        return
    columns = ("technique", "group", "ranks", "calls", "exposed", "waits", "transfers")
    grid = table("exposed communication, per step", *columns, left=columns[:2])
    for one in job.axes:
        parts = ("–", "–") if one.wait_s is None else (seconds(one.wait_s), seconds(one.exposed_s - one.wait_s))
        size = f"{one.label.size:,}" if one.label.size else "–"
        grid.add_row(
            one.label.technique, one.label.description or "–", size, f"{one.calls:,.0f}", seconds(one.exposed_s), *parts
        )
    console.print(grid)


def show_comparison(console: Console, first: JobAnalysis, second: JobAnalysis) -> None:
    names = (first.name, second.name) if first.name != second.name else ("this", "against")
    show_terms(console, "one step, mean over ranks", names, compare(first, second))
    bullets(console, compare_sentences(first, second))
    notes(console, (f"{job.name}: {note}" for job in (first, second) for note in job.notes))


def as_json(job: JobAnalysis) -> dict[str, Any]:
    return {
        **attributes(job, "name", "steps", "step_s", "waited_s", "caused_s", "matched", "findings", "notes"),
        "ranks": [{**vars(one), "clock": clock} for one, clock in zip(job.ranks, job.clocks, strict=True)],
        "axes": [
            {**one.label._asdict(), "calls": one.calls, "exposed_s": one.exposed_s, "wait_s": one.wait_s} for one in job.axes
        ],
        "stages": job.stages,
        "stragglers": [
            {**vars(one), "groups": [{**label._asdict(), "wait_s": time} for label, time in one.groups.items()]}
            for one in job.stragglers
        ],
        "slow_groups": [{**vars(one), "label": one.label._asdict()} for one in job.slow_groups],
        "critical_paths": [
            {**asdict(one), "parts": [part._asdict() for part in one.parts], "length_s": one.length_s} for one in job.paths
        ],
    }


def comparison_json(first: JobAnalysis, second: JobAnalysis) -> dict[str, Any]:
    return {
        "terms": [{**vars(term), "difference": term.difference} for term in compare(first, second)],
        "findings": list(compare_sentences(first, second)),
        "first": as_json(first),
        "second": as_json(second),
    }
