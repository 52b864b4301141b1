"""`ultrascale bench collectives` in the terminal: times, bandwidths and the fitted line of each collective, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.measure.bench_collectives import AlphaBetaFit, CollectivesReport, CollectiveTiming
from ultrascale.show.lines import labelled
from ultrascale.specs.units import seconds


def show_collectives(console: Console, report: CollectivesReport) -> None:
    table = Table(title=f"collectives: {report.where}", title_justify="left", title_style="bold")
    table.add_column("collective")
    for heading in ("ranks", "bytes", "median", "one in ten below", "one in ten above", "algorithm GB/s", "bus GB/s"):
        table.add_column(heading, justify="right")
    before = None
    for point in report.points:
        if before is not None and before != (point.op, point.ranks):
            table.add_section()
        before = point.op, point.ranks
        table.add_row(*_cells(point))
    console.print(table)
    fitted = Table(
        title="latency and bandwidth: time = alpha + bytes on the wire / beta", title_justify="left", title_style="bold"
    )
    fitted.add_column("collective")
    for heading in ("ranks", "alpha", "beta GB/s", "median error"):
        fitted.add_column(heading, justify="right")
    for fit in report.fits:
        fitted.add_row(*_fitted(fit))
    console.print(fitted)
    for missing in report.missing:
        labelled(console, f"{missing.op} on {missing.ranks}:", "bold red", missing.reason)


def _cells(point: CollectiveTiming) -> tuple[str, ...]:
    times = seconds(point.median_s), seconds(point.low_s), seconds(point.high_s)
    if not point.bytes:
        return point.op, str(point.ranks), "–", *times, "–", "–"
    return point.op, str(point.ranks), _size(point.bytes), *times, f"{point.algorithm_gb_s:.3g}", f"{point.bus_gb_s:.3g}"


def _fitted(fit: AlphaBetaFit) -> tuple[str, ...]:
    beta = "–" if fit.beta_gb_s is None else f"{fit.beta_gb_s:,.3g}"
    return fit.op, str(fit.ranks), seconds(fit.alpha_s), beta, f"{fit.error:.0%}"


def _size(value: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:,.4g} {unit}"
    return f"{value} B"


def collectives_json(report: CollectivesReport) -> dict[str, Any]:
    points = [{**asdict(point), "algorithm_gb_s": point.algorithm_gb_s, "bus_gb_s": point.bus_gb_s} for point in report.points]
    return {
        "where": report.where,
        "points": points,
        "fits": [asdict(fit) for fit in report.fits],
        "missing": [asdict(missing) for missing in report.missing],
    }
