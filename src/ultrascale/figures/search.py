"""Figures of other layouts: heat map over sizes, scaling of each technique, Pareto front, one-step changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from ultrascale.figures import style
from ultrascale.plan.survey import HeatmapCell, ScalingPoint
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.layout import DEGREES, Layout
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go


def heat_map(cells: Sequence[HeatmapCell], gpu: str) -> go.Figure:
    """Best tokens/s/GPU over model size and nodes, with MFU and the winning layout written in each cell."""
    models, nodes = list(dict.fromkeys(cell.model for cell in cells)), sorted({cell.nodes for cell in cells})
    found = {(cell.model, cell.nodes): cell for cell in cells}
    figure = style.new_figure(f"Best layout by model size and {gpu} nodes", "nodes", height=170 + 96 * len(models))
    rows = [[found[model, count] for count in nodes] for model in models]
    figure.add_heatmap(
        x=[f"{count}" for count in nodes],
        y=models,
        z=[[100 * cell.estimate.mfu_causal if cell.estimate else None for cell in row] for row in rows],
        text=[[_cell_words(cell) for cell in row] for row in rows],
        texttemplate="%{text}",
        textfont={"size": 11},
        colorscale="Cividis",
        colorbar={"title": "MFU (%),<br>causal<br>attention", "thickness": 12},
        xgap=2,
        ygap=2,
        hovertemplate="%{y} on %{x} nodes<br>%{text}<extra></extra>",
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _cell_words(cell: HeatmapCell) -> str:
    if cell.layout is None or cell.estimate is None:
        return "does not fit"
    cut = " ".join(f"{axis}{getattr(cell.layout, axis)}" for axis in DEGREES if getattr(cell.layout, axis) > 1)
    policy = "" if cell.layout.recompute == "none" else f" {cell.layout.recompute}"
    return (
        f"{cell.estimate.tokens_per_s_per_gpu:,.0f} tok/s/GPU<br>{cell.estimate.mfu_causal:.0%} · {cut or 'dp1'}<br>"
        f"zero{cell.layout.zero} mbs{cell.layout.mbs}{policy}"
    )


def scaling(points: Sequence[ScalingPoint], cluster: Cluster, title: str) -> go.Figure:
    """Tokens/s/GPU of each technique alone; hollow where it does not fit; the line where a node ends."""
    figure = style.new_figure(title, "GPUs", "tokens/s/GPU")
    names = dict.fromkeys(point.technique for point in points)
    for name, colour, shape in zip(names, cycle(style.SERIES), cycle(style.SHAPES), strict=False):
        mine = [(point.gpus, point.estimate) for point in points if point.technique == name and point.estimate is not None]
        figure.add_scatter(
            name=name,
            x=[gpus for gpus, _ in mine],
            y=[found.tokens_per_s_per_gpu for _, found in mine],
            mode="lines+markers",
            line={"color": colour},
            marker={
                "color": colour,
                "size": 9,
                "symbol": [shape if found.fits else f"{shape}-open" for _, found in mine],
            },
            customdata=[
                f"{found.peak_gib:,.1f} of {found.capacity_gib:,.1f} GiB{'' if found.fits else ': does not fit'}"
                for _, found in mine
            ],
            hovertemplate="%{x} GPUs: %{y:,.0f} tokens/s/GPU, %{customdata}<extra>%{fullData.name}</extra>",
        )
    sizes = sorted({point.gpus for point in points})
    figure.update_xaxes(type="log", tickvals=sizes, ticktext=[f"{size:,}" for size in sizes])
    figure.update_yaxes(rangemode="tozero")
    if sizes[0] <= cluster.fast_domain < sizes[-1]:
        figure.add_vline(x=cluster.fast_domain * 2**0.5, line={"color": style.GREY, "dash": "dot"})
        figure.add_annotation(
            x=math.log10(cluster.fast_domain * 2**0.5),  # on a logarithmic axis a place is its exponent
            xref="x",
            y=1,
            yref="paper",
            yanchor="bottom",
            text="node boundary",
            showarrow=False,
        )
    return figure


def pareto(front: Sequence[tuple[Layout, Estimate]], selected: Estimate | None = None) -> go.Figure:
    """The Pareto front: step time against free memory."""
    figure = style.new_figure("Pareto front of step time and free memory", "step time", "free memory (GiB)")
    costs = [found.cost_usd_per_billion_tokens for _, found in front]
    figure.add_scatter(
        name="layouts of the front",
        x=[found.step_time_s for _, found in front],
        y=[found.headroom_gib for _, found in front],
        mode="lines+markers",
        line={"color": style.COLORS["other layouts"], "shape": "hv"},
        marker={"size": 9, "color": style.COLORS["other layouts"]},
        customdata=[
            f"{layout}<br>{found.tokens_per_s:,.0f} tokens/s, {found.peak_gib:,.1f} GiB"
            + ("" if cost is None else f", ${cost:,.0f} per billion tokens")
            for (layout, found), cost in zip(front, costs, strict=True)
        ],
        hovertemplate="%{customdata}<br>%{x:.3f} s, %{y:.1f} GiB free<extra></extra>",
    )
    times = [found.step_time_s for _, found in front] + ([selected.step_time_s] if selected is not None else [])
    figure.update_xaxes(**style.log_ticks(min(times), max(times), " s"))
    if selected is not None:
        figure.add_scatter(
            name="this plan",
            x=[selected.step_time_s],
            y=[selected.headroom_gib],
            mode="markers",
            marker={"size": 14, "color": style.COLORS["this plan"], "symbol": "star"},
            hovertemplate="this plan: %{x:.3f} s, %{y:.1f} GiB free<extra></extra>",
        )
    return figure


def sensitivity(plan: Plan, most: int = 14) -> go.Figure:
    """What one step in each field of the layout would change, fastest first; what does not fit is hatched."""
    selected = plan.estimate
    others = plan.rejected[:most]
    figure = style.new_figure(
        f"One step away from this layout ({seconds(selected.step_time_s)})",
        "step time, % more than this plan",
        height=160 + 28 * len(others),
    )
    changes = [100 * (other.step_time_s / selected.step_time_s - 1) for other in others]
    short = [_short_change(other.change) for other in others]
    names = short if len(set(short)) == len(short) else [other.change for other in others]
    figure.add_bar(
        orientation="h",
        showlegend=False,
        y=names,
        x=changes,
        marker={
            "color": [style.COLORS["other layouts" if other.fits else "limit"] for other in others],
            "pattern": {"shape": ["" if other.fits else "/" for other in others]},
        },
        customdata=[f"{other.change}: {other.verdict}" for other in others],
        hovertemplate="%{customdata}<extra></extra>",
    )
    for name, kind, shape in (("fits", "other layouts", ""), ("does not fit", "limit", "/")):  # for the legend
        figure.add_bar(
            name=name, x=[None], y=names[:1], orientation="h", marker={"color": style.COLORS[kind], "pattern": {"shape": shape}}
        )
    figure.add_scatter(  # to the right of zero even where the bar is to its left, where the names of the changes are
        y=names,
        x=[max(0.0, change) for change in changes],
        mode="text",
        showlegend=False,
        text=[f" {change:+.1f} %, {other.peak_gib:,.1f} GiB" for change, other in zip(changes, others, strict=True)],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
    )
    figure.update_layout(barmode="overlay", margin_r=132)  # room for the numbers beside the longest bar
    low, high = min(0.0, *changes, 0.0), max(0.0, *changes, 0.0)
    figure.update_xaxes(range=[1.05 * low, high or 1.0])
    figure.update_yaxes(autorange="reversed")
    return figure


def _short_change(change: str) -> str:
    """`interleaved·v4` for `schedule=interleaved, virtual_stages=4 (gas=8)`: a phone has 340 pixels for it all."""
    return change.split(" (")[0].removeprefix("schedule=").replace(", virtual_stages=", "·v")
