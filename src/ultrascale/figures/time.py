"""Where a step's time goes, predicted; and predicted beside measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ultrascale.figures import style
from ultrascale.measure.compare import TIMES, ComparedTerm, Comparison
from ultrascale.plan.reasons import CAUSE_WORDS
from ultrascale.specs.estimate import CAUSES
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB, seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go

EXCHANGE = ("tensor_s", "context_s", "expert_s", "zero_s", "data_s", "send_s")
GROUPS = (
    ("computing", TIMES["computing"][1], style.BLUE),
    ("communication that nothing hides", EXCHANGE, style.ORANGE),
    ("waiting in the pipeline", ("bubble_s",), style.GREY),
    ("optimizer, offload, host", ("optimizer_s", "offload_s", "overhead_s"), style.GREEN),
)


def by_cause(plan: Plan) -> go.Figure:
    """A bar per cause, longest at the top of its group, with milliseconds and its share."""
    go, found = style.graph_objects(), plan.estimate
    figure = style.picture(f"One step by cause: {seconds(found.step_time_s)}, as the slowest rank lives it", "ms", height=460)
    total = found.time.total
    for name, causes, colour in GROUPS:
        shown = sorted((c for c in causes if getattr(found.time, c) > 0), key=lambda c: -getattr(found.time, c))
        if shown:
            values = [getattr(found.time, cause) for cause in shown]
            figure.add_trace(
                go.Bar(
                    name=name,
                    orientation="h",
                    y=[CAUSE_WORDS[cause] for cause in shown],
                    x=[value * 1e3 for value in values],
                    text=[f"{value / total:.1%}" for value in values],
                    textposition="outside",
                    cliponaxis=False,
                    marker_color=colour,
                    hovertemplate="%{y}: %{x:,.2f} ms (%{text})<extra></extra>",
                )
            )
    longest = max(getattr(found.time, cause) for cause in CAUSES) * 1e3
    figure.update_xaxes(range=[0, 1.15 * longest])
    figure.update_yaxes(autorange="reversed")
    return figure


def predicted_and_measured(found: Comparison) -> go.Figure:
    """Each term of a comparison twice, times in ms and memory in GiB side by side."""
    from plotly.subplots import make_subplots

    go = style.graph_objects()
    halves = (
        ("time (ms)", [one for one in found.terms if one.unit == "s" and _known(one)], 1e3),
        ("memory at the peak (GiB)", [one for one in found.terms if one.unit == "B" and _known(one)], 1 / GIB),
    )
    figure = make_subplots(rows=1, cols=2, subplot_titles=[title for title, _, _ in halves], horizontal_spacing=0.2)
    figure.layout.update(style.picture("").layout)
    figure.update_layout(title_text=f"{found.first.name} and {found.second.name}", height=460)
    names = [f"{side.word}: {side.name}" for side in (found.first, found.second)]
    for column, (_, terms, factor) in enumerate(halves, 1):
        labels = [one.name for one in terms]
        for name, colour, values in (
            (names[0], style.SKY, [one.first for one in terms]),
            (names[1], style.RED, [one.second for one in terms]),
        ):
            heights = [None if value is None else value * factor for value in values]
            bar = go.Bar(
                name=name, orientation="h", y=labels, x=heights, marker_color=colour, legendgroup=name, showlegend=column == 1
            )
            figure.add_trace(bar, row=1, col=column)
    figure.update_yaxes(autorange="reversed")
    return style.themed(figure, "light")


def _known(term: ComparedTerm) -> bool:
    return term.first is not None or term.second is not None
