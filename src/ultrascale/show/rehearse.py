"""Output of `ultrascale rehearse`: each rank beside the estimate, and all figures of the rank with the highest peak."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from ultrascale.show.lines import attributes, count_of, heading, labelled, notes, table
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import byte_size, seconds

if TYPE_CHECKING:
    from ultrascale.measure.rehearse import MemoryRoom, Rehearsal, RehearsalReport, RehearsedTerm

KERNELS_SHOWN = 12


def show(console: Console, report: RehearsalReport) -> None:
    if len(report.found) > 1:
        console.print(_stages(report))
    _one(console, report.layout, report.fullest, report.compared(report.fullest))
    who = f"stage {report.room.stage}" if report.layout.pp > 1 else "a rank"
    show_room(console, report.room, who, report.job.cluster.gpu.name)
    notes(console, report.notes)


def show_room(console: Console, room: MemoryRoom, who: str, gpu: str) -> None:
    beside = f" and {room.beside_gib:,.1f} GiB beside them" if room.beside_gib else ""
    there = f"{room.capacity_gib:,.1f} GiB on one {gpu}"
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
    columns = ("stage", "ranks", "layers", "predicted", "rehearsed", "difference", "peak at")
    grid = table("one rank of each stage, tensors at its peak", *columns, left=("peak at",))
    for one in report.found:
        whole = next(term for term in report.compared(one) if term.label == "all tensors at the peak")
        grid.add_row(str(one.place.pp), f"{one.alike:,}", str(one.layers), *cells(whole), one.moment)
    return grid


def _one(console: Console, layout: Layout, one: Rehearsal, terms: Sequence[RehearsedTerm]) -> None:
    where = one.place.words(layout)
    heading(console, f"rank {one.rank}" + (f" ({where})" if where else "") + f", one of {one.alike:,} alike")
    again = "" if one.microbatches == layout.gas else "; the others repeat part of these"
    ran = f"{one.microbatches} of {layout.gas} micro-batches run in {one.seconds:.1f} s{again}"
    console.print(f"{count_of(one.layers, 'layer')}; {ran}; peak: {one.moment}")
    grid = table(None, "one step", "predicted", "rehearsed", "difference")
    for term in terms:
        grid.add_row(term.label, *cells(term))
    console.print(grid)
    total = sum(one.flops.values())
    shares = ", ".join(f"{name} {count / total:.1%}" for name, count in one.flops.items())
    console.print(f"FLOPs by operator: {shares}")
    if one.collectives:
        console.print(_collectives(one))
    if one.step_s is not None:
        ran = f"{one.microbatches} of {layout.gas} micro-batches"
        console.print(f"step: {seconds(one.step_s)} with {ran}, computing alone: communication is not counted")
    if one.kernels_s is not None:
        console.print(_kernels(one.kernels_s))


def _collectives(one: Rehearsal) -> Table:
    columns = ("technique", "collective", "where", "ranks", "calls", "sent")
    grid = table("collectives of one step", *columns, left=columns[:3])
    for each in one.collectives:
        grid.add_row(each.technique, each.kind, each.where, f"{each.group:,}", f"{each.calls:,}", byte_size(each.bytes))
    return grid


def _kernels(times: dict[str, float]) -> Table:
    grid = table(f"kernels, {seconds(sum(times.values()))} in total", "kernel", "time", no_wrap=True)
    for name, time_s in list(times.items())[:KERNELS_SHOWN]:
        grid.add_row(shorten(name), seconds(time_s))
    return grid


def shorten(name: str, most: int = 60) -> str:
    """A kernel's name, cut: templates make it longer than any terminal is wide."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def cells(term: RehearsedTerm) -> tuple[str, str, str]:
    shown = (lambda value: f"{value / 1e12:,.4g} TFLOP") if term.unit == "FLOP" else byte_size
    if not isfinite(term.difference):
        return shown(term.predicted), shown(term.rehearsed), "not seen"
    exact = round(term.predicted) == round(term.rehearsed)
    near = "< 0.01%" if abs(term.difference) < 5e-5 else f"{term.difference:+.2%}"
    difference = "exact" if exact else "not predicted" if not term.predicted else near
    return shown(term.predicted), shown(term.rehearsed), difference


def term_json(term: RehearsedTerm) -> dict[str, Any]:
    return {**vars(term), "difference": term.difference if isfinite(term.difference) else None}


def room_json(room: MemoryRoom) -> dict[str, Any]:
    return {**vars(room), **attributes(room, "needs_gib", "fits")}


def as_json(report: RehearsalReport) -> dict[str, Any]:
    def terms(one: Rehearsal) -> list[dict[str, Any]]:
        return [term_json(term) for term in report.compared(one)]

    return {
        "device": report.device,
        "layout": report.layout,
        "ranks": [{**vars(one), "compared": terms(one)} for one in report.found],
        "predicted": report.predicted,
        "room": room_json(report.room),
        "notes": report.notes,
    }
