"""`ultrascale bench ladders` in the terminal: each rung's figures, predicted beside measured, and what it bought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.measure.bench_ladders import Figures, Ladder, Rung
from ultrascale.specs.units import seconds

FIGURES = {"step_s": "step", "tensors_gib": "tensors", "exposed_s": "exposed communication", "bubble_s": "bubble"}


def show_ladder(console: Console, ladder: Ladder) -> None:
    table = Table(title=f"{ladder.name}: {ladder.what}", title_justify="left", title_style="bold")
    for heading in ("rung", "what it is"):
        table.add_column(heading, overflow="fold")
    for heading in FIGURES.values():
        table.add_column(f"{heading} (predicted)", justify="right", overflow="fold")
    table.add_column("loss", justify="right")
    table.add_column("this rung bought", overflow="fold")
    for rung, bought in zip(ladder.rungs, gains(ladder.rungs), strict=True):
        if rung.measured is None:
            table.add_row(rung.name, rung.what, *("–" for _ in range(len(FIGURES) + 1)), rung.problem)
        else:
            table.add_row(rung.name, rung.what, *_figures(rung.measured, rung.predicted), f"{rung.loss:.4f}", bought)
    console.print(table)


def ladders_json(ladders: Sequence[Ladder]) -> dict[str, Any]:
    return {"ladders": [asdict(ladder) for ladder in ladders]}


def gains(rungs: Sequence[Rung]) -> list[str]:
    """What each rung brought over the one that ran before it."""
    said, before = [], None
    for rung in rungs:
        if rung.measured is None or before is None:
            said.append("–")
        else:
            held = rung.measured.tensors_gib / before.tensors_gib - 1
            said.append(f"{before.step_s / rung.measured.step_s:.2f}× the speed, {held:+.0%} memory")
        before = rung.measured or before
    return said


def _figures(measured: Figures, predicted: Figures | None) -> list[str]:
    """Measured, and in brackets what was predicted of it."""

    def shown(side: Figures | None, name: str) -> str:
        value = None if side is None else getattr(side, name)
        return "–" if value is None else _gib(value) if name == "tensors_gib" else seconds(value)

    return [f"{shown(measured, name)} ({shown(predicted, name)})" for name in FIGURES]


def _gib(value: float) -> str:
    return f"{value:,.2f} GiB" if value >= 0.1 else f"{value * 1024:,.1f} MiB"
