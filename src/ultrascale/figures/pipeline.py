"""A pipeline schedule as a Gantt chart: the actions of every rank in time, drawn from the list that the engine runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ultrascale.cost.timeline import simulated
from ultrascale.figures import style
from ultrascale.schedules.actions import ActionKind
from ultrascale.schedules.simulate import Event, Timeline
from ultrascale.specs.plan import Plan

if TYPE_CHECKING:
    import plotly.graph_objects as go

KINDS = (
    (ActionKind.F, "forward", style.SKY),
    (ActionKind.B, "backward", style.ORANGE),
    (ActionKind.I, "backward, gradient of the input", style.ORANGE),
    (ActionKind.W, "backward, gradient of the weights", style.GREEN),
)
MOST = 1500  # bars: beyond, a browser stutters; the first part of the step is drawn, and the title says so
LABELLED = 500  # bars with the micro-batch's number on them


def schedule(plan: Plan) -> go.Figure:
    """The plan's own schedule with its predicted times."""
    name = plan.layout.schedule + (f", {plan.layout.virtual_stages} chunks a rank" if plan.layout.virtual_stages > 1 else "")
    return gantt(simulated(plan.job, plan.layout), name)


def gantt(timeline: Timeline, name: str, unit: str = "") -> go.Figure:
    """Ranks downwards, time to the right; what is grey is the bubble. `unit`: of the times, where they are no seconds."""
    go, ranks = style.graph_objects(), len(timeline.busy_s)
    events, until = _shown(timeline)
    unit, factor = (unit, 1.0) if unit else ("s", 1.0) if until >= 1 else ("ms", 1e3)
    part = (
        "" if until == timeline.makespan_s else f", first {until * factor:,.1f} of {timeline.makespan_s * factor:,.1f} {unit}"
    )
    title = f"{name}: bubble {timeline.bubble_fraction:.1%} of the ranks' time{part}"
    figure = style.picture(title, f"time ({unit})", "pipeline rank", height=min(1200, 200 + 28 * ranks))
    figure.add_trace(
        go.Bar(
            name="bubble",
            orientation="h",
            y=list(range(ranks)),
            x=[until * factor] * ranks,
            marker={
                "color": "rgba(128,128,128,0.25)",
                "pattern": {"shape": "/", "fgcolor": "rgba(128,128,128,0.6)", "size": 6},
            },
            width=0.86,
            hoverinfo="skip",
        )
    )
    shared = Counter((event.rank, event.start_s, event.end_s) for event in events)
    for kind, words, colour in KINDS:
        mine = [event for event in events if event.action.kind is kind]
        if mine:
            halved = [shared[event.rank, event.start_s, event.end_s] > 1 for event in mine]
            figure.add_trace(
                go.Bar(
                    name=words,
                    orientation="h",
                    y=[event.rank for event in mine],
                    base=[event.start_s * factor for event in mine],
                    x=[(event.end_s - event.start_s) * factor for event in mine],
                    width=[0.42 if half else 0.86 for half in halved],
                    # A pair runs at once: its forward is drawn in the upper half, its backward in the lower.
                    offset=[-0.43 if kind is ActionKind.F or not half else 0.01 for half in halved],
                    marker={"color": colour, "line": {"color": "rgba(0,0,0,0.35)", "width": 0.5}},
                    text=[str(event.action.microbatch) for event in mine] if len(events) <= LABELLED else None,
                    textposition="inside",
                    insidetextanchor="middle",
                    textangle=0,
                    textfont={"color": "#000000"},
                    customdata=[str(event.action) for event in mine],
                    hovertemplate=f"%{{customdata}}: %{{base:,.2f}} + %{{x:,.2f}} {unit}<extra>rank %{{y}}</extra>",
                )
            )
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_yaxes(autorange="reversed", dtick=1 if ranks <= 32 else None)
    figure.update_xaxes(range=[0, until * factor])
    return figure


def _shown(timeline: Timeline) -> tuple[list[Event], float]:
    """All events, or those of the first part of the step that a browser still draws; and where that part ends."""
    if len(timeline.events) <= MOST:
        return list(timeline.events), timeline.makespan_s
    until = sorted(event.end_s for event in timeline.events)[MOST - 1]
    return [event for event in timeline.events if event.end_s <= until], until
