"""`ultrascale rehearse` in the terminal: each rank beside the Estimate, the fullest with all that it does; or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ultrascale.show.lines import count_of, heading, labelled
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import GIB, seconds

if TYPE_CHECKING:
    from ultrascale.measure.rehearse import Rehearsal, RehearsalReport, RehearsedTerm

KERNELS_SHOWN = 12


def show(console: Console, report: RehearsalReport) -> None:
    if len(report.found) > 1:
        console.print(_stages(report))
    _one(console, report.layout, report.fullest, report.compared(report.fullest))
    _room(console, report)
    for note in report.notes:
        labelled(console, "note:", "yellow", note)


def _room(console: Console, report: RehearsalReport) -> None:
    room = report.room
    who = f"stage {room.stage}" if report.layout.pp > 1 else "a rank"
    beside = f" and {room.beside_gib:,.1f} GiB beside them" if room.beside_gib else ""
    there = f"{room.capacity_gib:,.1f} GiB on one {report.job.cluster.gpu.name}"
    needs = f"{who} has {room.tensors_gib:,.1f} GiB of tensors{beside}, of {there}"
    if room.fits:
        labelled(console, "fits:", "green", needs)
        return
    over = f"{needs}: {room.needs_gib - room.capacity_gib:,.1f} GiB too much"
    labelled(console, "does not fit:", "red", over)
    if room.planned_gib <= room.capacity_gib and room.planned_for != room.engine:
        own = f"the plan's own {room.planned_gib:,.1f} GiB are counted for the framework {room.planned_for}"
        labelled(console, "note:", "yellow", f"{own}; plan with --framework {room.engine} for the engine that was rehearsed")


def _stages(report: RehearsalReport) -> Table:
    table = Table(title="one rank of each stage, tensors at its peak", title_justify="left", title_style="bold")
    for name in ("stage", "ranks", "layers", "predicted", "rehearsed", "difference"):
        table.add_column(name, justify="right")
    table.add_column("peak at")
    for one in report.found:
        whole = next(term for term in report.compared(one) if term.label == "all tensors at the peak")
        cells = (str(one.place.pp), f"{one.alike:,}", str(one.layers), *_cells(whole), one.moment)
        table.add_row(*cells)
    return table


def _one(console: Console, layout: Layout, one: Rehearsal, terms: Sequence[RehearsedTerm]) -> None:
    where = one.place.words(layout)
    heading(console, f"rank {one.rank}" + (f" ({where})" if where else "") + f", one of {one.alike:,} alike")
    again = "" if one.microbatches == layout.gas else "; the others repeat what a stretch of these does"
    ran = f"{one.microbatches} of {layout.gas} micro-batches run in {one.seconds:.1f} s{again}"
    console.print(f"{count_of(one.layers, 'layer')}; {ran}; peak: {one.moment}")
    table = Table()
    table.add_column("a step")
    for name in ("predicted", "rehearsed", "difference"):
        table.add_column(name, justify="right")
    for term in terms:
        table.add_row(term.label, *_cells(term))
    console.print(table)
    total = sum(one.flops.values())
    shares = ", ".join(f"{name} {count / total:.1%}" for name, count in one.flops.items())
    console.print(f"FLOPs by operator: {shares}")
    if one.collectives:
        console.print(_collectives(one))
    if one.kernels_s is not None:
        console.print(_kernels(one.kernels_s))


def _collectives(one: Rehearsal) -> Table:
    table = Table(title="collectives of a step", title_justify="left", title_style="bold")
    for name in ("technique", "collective", "where"):
        table.add_column(name)
    for name in ("ranks", "calls", "sent"):
        table.add_column(name, justify="right")
    for each in one.collectives:
        table.add_row(each.technique, each.kind, each.where, f"{each.group:,}", f"{each.calls:,}", _bytes(each.bytes))
    return table


def _kernels(times: dict[str, float]) -> Table:
    table = Table(title=f"kernels, {seconds(sum(times.values()))} in all", title_justify="left", title_style="bold")
    table.add_column("kernel", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for name, time_s in list(times.items())[:KERNELS_SHOWN]:
        table.add_row(shorten(name), seconds(time_s))
    return table


def shorten(name: str, most: int = 60) -> str:
    """A kernel's name, which templates may make longer than any terminal is wide."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _cells(term: RehearsedTerm) -> tuple[str, str, str]:
    shown = (lambda value: f"{value / 1e12:,.4g} TFLOP") if term.unit == "FLOP" else _bytes
    if not isfinite(term.difference):
        return shown(term.predicted), shown(term.rehearsed), "not seen"
    exact = round(term.predicted) == round(term.rehearsed)
    difference = "exact" if exact else "not predicted" if not term.predicted else f"{term.difference:+.2%}"
    return shown(term.predicted), shown(term.rehearsed), difference


def _bytes(value: float) -> str:
    for size, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size / 10:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"


def as_json(report: RehearsalReport) -> dict[str, Any]:
    def terms(one: Rehearsal) -> list[dict[str, Any]]:
        return [
            {**asdict(term), "difference": term.difference if isfinite(term.difference) else None}
            for term in report.compared(one)
        ]

    room = report.room
    return {
        "device": report.device,
        "layout": report.layout.model_dump(mode="json"),
        "ranks": [
            {**asdict(one), "memory": one.memory.model_dump(mode="json"), "compared": terms(one)} for one in report.found
        ],
        "predicted": report.predicted.model_dump(mode="json"),
        "room": {**asdict(room), "needs_gib": room.needs_gib, "fits": room.fits},
        "notes": list(report.notes),
    }
