"""`ultrascale bench kernels` in the terminal: contests of kernels as tables, and the same as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ultrascale.measure.bench_kernels import WAYS, KernelResult, KernelsReport
from ultrascale.show.lines import labelled

STYLES = {"keep": "green", "slower": "bold red", "–": ""}


def show_kernels(console: Console, report: KernelsReport) -> None:
    title = f"forward and backward, medians in ms with a cold L2 cache: {report.machine}"
    table = Table(title=title, title_justify="left", title_style="bold")
    for heading in ("kernel", "shape"):
        table.add_column(heading, overflow="fold")
    for heading in (*(f"{way} ms" for way in WAYS), "ours / best other", "ours moves or computes", "largest difference", ""):
        table.add_column(heading, justify="right", overflow="fold")
    for row in report.rows:
        table.add_row(
            row.kernel,
            f"{row.model}: {row.size}",
            *(_time(row, way) for way in WAYS),
            "–" if row.share is None else f"{row.share:.2f}",
            _rate(row),
            _differences(row),
            Text(row.verdict, style=STYLES[row.verdict]),
        )
    console.print(table)
    for line in report.choices:
        console.print(f"{line}; a run takes the first")
    slower = [f"{row.kernel} ({row.model})" for row in report.rows if row.verdict == "slower"]
    if slower:
        labelled(console, "slower:", "bold red", f"{', '.join(slower)}: another way is faster here than ours")


def kernels_json(report: KernelsReport) -> dict[str, Any]:
    rows = [{**asdict(row), "ours_of_best_other": row.share, "verdict": row.verdict} for row in report.rows]
    return {"machine": report.machine, "kernels": rows, "choices": list(report.choices)}


def _time(row: KernelResult, way: str) -> str:
    return f"{row.times_ms[way]:,.3f}" if way in row.times_ms else row.missing.get(way, "–")


def _rate(row: KernelResult) -> str:
    share = "" if row.of_peak is None else f" ({100 * row.of_peak:.0f} % of the GPU's)"
    if row.gb_s is not None:
        return f"{row.gb_s:,.0f} GB/s{share}"
    return "–" if row.tflops is None else f"{row.tflops:,.0f} TFLOP/s{share}"


def _differences(row: KernelResult) -> str:
    """Of all that are compared with the first."""
    return ", ".join(f"{way} {value:.1e}" for way, value in list(row.differences.items())[1:]) or "–"
