"""Output of `ultrascale profile --flight-recorder`: collectives that ranks did not join, or in which they differ."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ultrascale.measure.flight_recorder import DumpAnalysis
from ultrascale.show.lines import attributes, bullets, count_of, notes


def show(console: Console, found: DumpAnalysis) -> None:
    read = f"{count_of(found.ranks, 'dump')}: {count_of(found.collectives, 'collective')} of {count_of(found.groups, 'group')}"
    fine = "all ranks joined the same ones"
    if found.nccl is not None:
        read, fine = f"NCCL {found.nccl}: {count_of(found.groups, 'communicator')}", "no rank is missing, late or in error"
    if found.problems:
        console.print(f"{read}, {count_of(len(found.problems), 'problem')}")
        bullets(console, (f"{one.sentence[0].upper()}{one.sentence[1:]}" for one in found.problems))
    else:
        console.print(f"{read}: {fine}")
    notes(console, found.notes)


def as_json(found: DumpAnalysis) -> dict[str, Any]:
    return attributes(found, "ranks", "collectives", "groups", "problems", "notes", "nccl")
