"""Where memory goes: by owner on every pipeline stage, and over one step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ultrascale.cost.timeline import memory_timeline
from ultrascale.figures import style
from ultrascale.specs.estimate import OWNERS
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB

if TYPE_CHECKING:
    import plotly.graph_objects as go

WORDS = {"master": "fp32 master weights", "optimizer": "optimizer states", "runtime": "runtime and allocator"}


def by_stage(plan: Plan) -> go.Figure:
    """Stacked bars of each stage's peak against the GPU's memory."""
    go, found = style.graph_objects(), plan.estimate
    stages = [str(one.stage) for one in found.memory]
    figure = style.picture("Memory at the peak, by owner", "pipeline stage", "GiB on each GPU of the stage")
    for owner in OWNERS:
        held = [getattr(one.memory, owner) / GIB for one in found.memory]
        if any(held):
            figure.add_trace(
                go.Bar(
                    name=WORDS.get(owner, owner),
                    x=stages,
                    y=held,
                    marker_color=style.OWNER_COLORS[owner],
                    hovertemplate="stage %{x}: %{y:.2f} GiB<extra>%{fullData.name}</extra>",
                )
            )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(type="category")
    figure.update_yaxes(range=[0, 1.12 * max(found.capacity_gib, found.peak_gib)])
    style.mark(figure, found.capacity_gib, f"{plan.job.cluster.gpu.name}: {found.capacity_gib:,.1f} GiB")
    return figure


def over_step(plan: Plan, stage: int | None = None) -> go.Figure:
    """What one stage holds while each of its actions runs; the fullest stage unless told otherwise."""
    go, place = style.graph_objects(), plan.estimate.peak_stage if stage is None else stage
    moments = memory_timeline(plan.job, plan.layout, place)
    unit, factor = ("s", 1.0) if moments[-1].end_s >= 1 else ("ms", 1e3)
    figure = style.picture(f"Memory over one step on stage {place}", f"time in the step ({unit})", "GiB")
    parts = (
        ("weights, gradients, optimizer", "static_bytes", style.BLUE),
        ("activations", "activation_bytes", style.ORANGE),
        ("buffers", "buffer_bytes", style.PINK),
    )
    times = [edge * factor for one in moments for edge in (one.start_s, one.end_s)]
    actions = [one.action for one in moments for _ in range(2)]
    for name, field, colour in parts:
        held = [getattr(one, field) / GIB for one in moments for _ in range(2)]
        if any(held):
            figure.add_trace(
                go.Scatter(
                    name=name,
                    x=times,
                    y=held,
                    customdata=actions,
                    stackgroup="held",
                    mode="lines",
                    line={"width": 0.5, "color": colour},
                    fillcolor=colour,
                    hovertemplate="%{customdata}: %{y:.2f} GiB<extra>%{fullData.name}</extra>",
                )
            )
    capacity = plan.estimate.capacity_gib
    runtime = plan.estimate.memory[place].memory.runtime / GIB
    figure.update_yaxes(range=[0, 1.12 * max(capacity, max(one.total_bytes for one in moments) / GIB)])
    style.mark(figure, capacity - runtime, f"{capacity - runtime:,.1f} GiB left by the runtime's {runtime:,.1f}")
    return figure
