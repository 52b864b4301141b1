"""Figures of all ranks' traces: where each rank's time goes, who is waited for, and the critical path."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ultrascale.figures import style
from ultrascale.measure.trace_job import JobAnalysis
from ultrascale.measure.trace_path import CriticalPath, PathPart

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHARES = {
    "computing": ("computing_s", {"color": style.COLORS["computing"]}),
    "transfers": ("transfer_s", {"color": style.COLORS["communication"]}),
    "waits for late ranks": ("wait_s", {"color": style.COLORS["limit"]}),
    "pipeline bubble": ("bubble_s", style.BUBBLE),
    "data loading": ("data_s", {"color": style.COLORS["activations"]}),
    "host": ("host_s", {"color": style.COLORS["host"]}),
}
FINEST = 1 / 1500  # of a path: what is shorter than a pixel is not drawn
MOST_LANES = 24  # ranks of the critical path


def rank_shares(job: JobAnalysis) -> go.Figure:
    """A stacked bar for each rank: its mean step, by what the time was spent on."""
    unit, factor = _unit(max(one.step_s for one in job.ranks))
    figure = style.new_figure("Mean step of each rank", "rank", f"time ({unit})")
    for name, (field, marker) in SHARES.items():
        times = [round(getattr(one, field) * factor, 3) for one in job.ranks]
        if any(times):
            figure.add_bar(
                name=name,
                x=[one.rank for one in job.ranks],
                y=times,
                marker=marker,
                hovertemplate=f"rank %{{x}}: %{{y:,.3f}} {unit}<extra>%{{fullData.name}}</extra>",
            )
    figure.update_layout(barmode="stack", bargap=0.1 if len(job.ranks) > 16 else 0.25)
    if len(job.ranks) <= 32:
        figure.update_xaxes(type="category")
    return figure


def late_ranks(job: JobAnalysis) -> go.Figure:
    """Heat map of ranks and steps: how long the others waited for a rank."""
    unit, factor = _unit(max((time for row in job.caused_s for time in row), default=0.0))
    figure = style.new_figure(
        "Wait that a rank causes: mean of the others, exposed", "step", "rank", height=min(900, 190 + 14 * len(job.ranks))
    )
    figure.add_heatmap(
        x=[step.removeprefix("ProfilerStep#") for step in job.steps],
        y=[one.rank for one in job.ranks],
        z=[[round(time * factor, 3) for time in row] for row in job.caused_s],
        colorscale="Cividis",
        zmin=0,
        colorbar={"title": unit, "thickness": 12},
        hovertemplate=f"rank %{{y}}, step %{{x}}: %{{z:,.3f}} {unit}<extra></extra>",
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def critical_path(path: CriticalPath) -> go.Figure:
    """The path of one step as a timeline, a lane for each rank that it crosses."""
    ranks = [rank for rank, _ in sorted(list(path.by_rank.items())[:MOST_LANES])]
    length = path.length_s
    unit, factor = _unit(length)
    first = path.parts[0].start_s if path.parts else 0.0
    more = f"; {MOST_LANES} of {len(path.by_rank):,} ranks" if len(path.by_rank) > MOST_LANES else ""
    figure = style.new_figure(
        f"{path.step}: critical path{more}", f"time in the step ({unit})", "rank", height=190 + 26 * len(ranks)
    )
    groups: dict[str, list[PathPart]] = defaultdict(list)
    for part in path.parts:
        if part.rank in ranks and part.end_s - part.start_s >= FINEST * length:
            groups[part.what if part.what in ("computing", "host", "data loading") else "communication"].append(part)
    colours = {"computing": "computing", "communication": "communication", "data loading": "activations", "host": "host"}
    for name, colour in colours.items():
        parts = groups[name]
        if parts:
            figure.add_bar(
                name=name,
                orientation="h",
                y=[str(part.rank) for part in parts],
                base=[round((part.start_s - first) * factor, 3) for part in parts],
                x=[round((part.end_s - part.start_s) * factor, 3) for part in parts],
                marker={"color": style.COLORS[colour], "line": {"width": 0}},
                customdata=[f"{part.what} {part.kind}".strip() for part in parts],
                hovertemplate=f"rank %{{y}}: %{{customdata}}, %{{x:,.3f}} {unit} from %{{base:,.3f}}<extra></extra>",
            )
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=[str(rank) for rank in reversed(ranks)])
    return figure


def _unit(largest_s: float) -> tuple[str, float]:
    return ("s", 1.0) if largest_s >= 1 else ("ms", 1e3)
