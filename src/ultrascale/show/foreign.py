"""Output of `ultrascale rehearse` for programs that are not ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from ultrascale.show.lines import heading, notes, table
from ultrascale.show.rehearse import cells, room_json, show_room, term_json
from ultrascale.specs.units import byte_size, seconds

if TYPE_CHECKING:
    from ultrascale.measure.foreign.compare import ForeignReport

OWNERS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "buffers": "buffers and the rest",
}


def show(console: Console, report: ForeignReport) -> None:
    found = report.found
    program = found.engine or report.request.program
    heading(console, f"rank {found.rank} of {found.world:,}: {program}")
    if found.step_s is not None:
        console.print(f"steps 2 to {found.step}, rehearsed in {found.seconds:.1f} s with torch {found.torch} on {found.gpu}")
        console.print(f"allocator's peak: {byte_size(found.peak)}; a step computes for {seconds(found.step_s)}")
    else:
        console.print(f"step {found.step}, rehearsed in {found.seconds:.1f} s with torch {found.torch}; peak: {found.moment}")
        grid = table("memory of tensors", "owner", "at the peak", "at most")
        for owner, label in OWNERS.items():
            grid.add_row(label, byte_size(found.memory.get(owner, 0)), byte_size(found.most.get(owner, 0)))
        grid.add_row("all", byte_size(found.peak), byte_size(found.peak))
        console.print(grid)
    total = sum(found.flops.values())
    shares = ", ".join(f"{name} {count / total:.1%}" for name, count in found.flops.items() if count)
    if shares or found.step_s is None:
        console.print(f"FLOPs: {total / 1e12:,.4g} TFLOP" + (f" ({shares})" if shares else ""))
    if found.collectives:
        columns = ("group", "collective", "where", "ranks", "calls", "sent")
        grid = table("collectives", *columns, left=columns[:3])
        for one in found.collectives:
            grid.add_row(one.technique, one.kind, one.where, f"{one.group:,}", f"{one.calls:,}", byte_size(one.bytes))
        console.print(grid)
    elif shares or found.step_s is None:
        console.print("no collectives")
    beside = report.compared
    if beside is not None:
        grid = table(f"beside the estimate for {beside.room.engine}", "one step", "predicted", "rehearsed", "difference")
        for term in beside.terms:
            grid.add_row(OWNERS.get(term.label, term.label), *cells(term))
        console.print(grid)
        if beside.stands_in:
            planned = f"{beside.room.planned_gib:,.1f} GiB with what is beside tensors, for {beside.room.planned_for}"
            console.print(f"the plan's own estimate: {planned}")
        else:
            show_room(console, beside.room, f"rank {found.rank}", beside.gpu)
    notes(console, found.notes)


def as_json(report: ForeignReport) -> dict[str, Any]:
    beside = report.compared
    return {
        **vars(report.found),
        "program": report.request.program,
        "arguments": report.request.arguments,
        "estimate": None
        if beside is None
        else {**vars(beside), "terms": [term_json(term) for term in beside.terms], "room": room_json(beside.room)},
    }
