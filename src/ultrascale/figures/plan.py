"""Figures of one plan: memory by stage and over a step, time by cause, the pipeline schedule, predicted beside measured."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ultrascale.cost.timeline import memory_timeline, simulated
from ultrascale.figures import style
from ultrascale.measure.compare import TIMES, Comparison
from ultrascale.plan.reasons import CAUSE_WORDS
from ultrascale.schedules.actions import ActionKind
from ultrascale.schedules.simulate import Event, Timeline
from ultrascale.schedules.steady_state import ShortTimeline, shortened
from ultrascale.specs.estimate import CAUSES, OWNERS
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB, seconds

if TYPE_CHECKING:
    import plotly.graph_objects as go

OWNER_WORDS = {"master": "fp32 master weights", "optimizer": "optimizer states", "runtime": "runtime and allocator"}


def memory_by_stage(plan: Plan) -> go.Figure:
    """Stacked bars of each stage's peak against the GPU's memory."""
    found = plan.estimate
    stages = [str(one.stage) for one in found.memory]
    figure = style.new_figure("Memory at the peak, by owner", "pipeline stage", "GiB on each GPU of the stage")
    for owner in OWNERS:
        sizes_gib = [getattr(one.memory, owner) / GIB for one in found.memory]
        if any(sizes_gib):
            figure.add_bar(
                name=OWNER_WORDS.get(owner, owner),
                x=stages,
                y=sizes_gib,
                marker_color=style.OWNER_COLORS[owner],
                hovertemplate="stage %{x}: %{y:.2f} GiB<extra>%{fullData.name}</extra>",
            )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(type="category")
    figure.update_yaxes(range=[0, 1.12 * max(found.capacity_gib, found.peak_gib)])
    style.mark_level(figure, found.capacity_gib, f"{plan.job.cluster.gpu.name}: {found.capacity_gib:,.1f} GiB")
    return figure


def memory_over_step(plan: Plan, stage: int | None = None) -> go.Figure:
    """What one stage holds while each of its actions runs; the fullest stage by default."""
    place = plan.estimate.peak_stage if stage is None else stage
    points = memory_timeline(plan.job, plan.layout, place)
    unit, factor = ("s", 1.0) if points[-1].end_s >= 1 else ("ms", 1e3)
    figure = style.new_figure(f"Memory over one step on stage {place}", f"time in the step ({unit})", "GiB")
    parts = (
        ("weights, gradients, optimizer", "static_bytes", style.BLUE),
        ("activations", "activation_bytes", style.ORANGE),
        ("buffers", "buffer_bytes", style.PINK),
    )
    times = [edge * factor for one in points for edge in (one.start_s, one.end_s)]
    actions = [one.action for one in points for _ in range(2)]
    for name, field, colour in parts:
        sizes_gib = [getattr(one, field) / GIB for one in points for _ in range(2)]
        if any(sizes_gib):
            figure.add_scatter(
                name=name,
                x=times,
                y=sizes_gib,
                customdata=actions,
                stackgroup="held",
                mode="lines",
                line={"width": 0.5, "color": colour},
                fillcolor=colour,
                hovertemplate="%{customdata}: %{y:.2f} GiB<extra>%{fullData.name}</extra>",
            )
    capacity = plan.estimate.capacity_gib
    runtime = plan.estimate.memory[place].memory.runtime / GIB
    figure.update_yaxes(range=[0, 1.12 * max(capacity, max(one.total_bytes for one in points) / GIB)])
    style.mark_level(figure, capacity - runtime, f"{capacity - runtime:,.1f} GiB left by the runtime's {runtime:,.1f}")
    return figure


COMMUNICATION = ("tensor_s", "context_s", "expert_s", "zero_s", "data_s", "send_s")
GROUPS = (
    ("computing", TIMES["computing"][1], style.BLUE),
    ("exposed communication", COMMUNICATION, style.ORANGE),
    ("pipeline bubble", ("bubble_s",), style.GREY),
    ("optimizer, offload, host", ("optimizer_s", "offload_s", "overhead_s"), style.GREEN),
)


def time_by_cause(plan: Plan) -> go.Figure:
    """A bar per cause, longest at the top of its group, with milliseconds and its share."""
    found = plan.estimate
    figure = style.new_figure(f"One step by cause: {seconds(found.step_time_s)} of the slowest rank", "ms", height=460)
    total = found.time.total
    for name, causes, colour in GROUPS:
        shown = sorted((c for c in causes if getattr(found.time, c) > 0), key=lambda c: -getattr(found.time, c))
        if shown:
            values = [getattr(found.time, cause) for cause in shown]
            figure.add_bar(
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
    longest = max(getattr(found.time, cause) for cause in CAUSES) * 1e3
    figure.update_xaxes(range=[0, 1.15 * longest])
    figure.update_yaxes(autorange="reversed")
    return figure


def predicted_and_measured(found: Comparison) -> go.Figure:
    """Each term of a comparison twice, times in ms and memory in GiB side by side."""
    layout = style.new_figure("").layout  # before Plotly is imported: it says what to install
    from plotly.subplots import make_subplots

    panels = (("time (ms)", "s", 1e3), ("memory at the peak (GiB)", "B", 1 / GIB))
    figure = make_subplots(rows=1, cols=2, subplot_titles=[title for title, _, _ in panels], horizontal_spacing=0.2)
    figure.layout.update(layout)
    figure.update_layout(title_text=f"{found.first.name} and {found.second.name}", height=460)
    for column, (_, unit, factor) in enumerate(panels, 1):
        terms = [one for one in found.terms if one.unit == unit]
        for side, which, colour in ((found.first, "first", style.SKY), (found.second, "second", style.RED)):
            name, values = f"{side.word}: {side.name}", [getattr(one, which) for one in terms]
            figure.add_bar(
                name=name,
                orientation="h",
                y=[one.name for one in terms],
                x=[None if value is None else value * factor for value in values],
                marker_color=colour,
                legendgroup=name,
                showlegend=column == 1,
                row=1,
                col=column,
            )
    figure.update_yaxes(autorange="reversed")
    return style.themed(figure, "light")


KINDS = (
    (ActionKind.F, "forward", style.SKY),
    (ActionKind.B, "backward", style.ORANGE),
    (ActionKind.I, "backward, input gradient", style.ORANGE),
    (ActionKind.W, "backward, weight gradient", style.GREEN),
)
MOST_MICROBATCHES = 32  # of more, the repetitions of the steady state are left out
MOST_BARS = 1500  # more are slow in a browser: then the first part of the step is drawn, and the title says so
TICKS = 8  # of a time axis that leaves periods out
LABELLED_BARS = 500  # bars with the micro-batch's number on them


def schedule(plan: Plan) -> go.Figure:
    """The plan's own schedule with its predicted times."""
    name = plan.layout.schedule + (f", {plan.layout.virtual_stages} chunks per rank" if plan.layout.virtual_stages > 1 else "")
    return gantt(simulated(plan.job, plan.layout), name, shorten=plan.layout.gas > MOST_MICROBATCHES)


def gantt(timeline: Timeline, name: str, unit: str = "", shorten: bool = False) -> go.Figure:
    """Ranks downwards, time to the right; grey is the bubble. `unit`: of the times, if not seconds. `shorten`: leave the
    repetitions of the steady state out.
    """
    ranks = len(timeline.busy_s)
    short = shortened(timeline) if shorten else ShortTimeline(timeline.events, (), timeline.makespan_s)
    events, until = _drawn_events(short)
    unit, factor = (unit, 1.0) if unit else ("s", 1.0) if until >= 1 else ("ms", 1e3)
    end = short.place_s(timeline.makespan_s)
    part = "" if until == end else f", first {short.time_s(until) * factor:,.1f} of {timeline.makespan_s * factor:,.1f} {unit}"
    title = f"{name}: bubble {timeline.bubble_fraction:.1%} of the ranks' time{part}"
    figure = style.new_figure(title, f"time ({unit})", "pipeline rank", height=min(1200, 200 + 28 * ranks))
    figure.add_bar(
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
    shared = Counter((event.rank, event.start_s, event.end_s) for event in events)
    for kind, words, colour in KINDS:
        mine = [event for event in events if event.action.kind is kind]
        if mine:
            halved = [shared[event.rank, event.start_s, event.end_s] > 1 for event in mine]
            figure.add_bar(
                name=words,
                orientation="h",
                y=[event.rank for event in mine],
                base=[short.place_s(event.start_s) * factor for event in mine],
                x=[(event.end_s - event.start_s) * factor for event in mine],
                width=[0.42 if half else 0.86 for half in halved],
                # A pair runs at once: its forward is drawn in the upper half, its backward in the lower.
                offset=[-0.43 if kind is ActionKind.F or not half else 0.01 for half in halved],
                marker={"color": colour, "line": {"color": "rgba(0,0,0,0.35)", "width": 0.5}},
                text=[str(event.action.microbatch) for event in mine] if len(events) <= LABELLED_BARS else None,
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                textfont={"color": "#000000"},
                customdata=[f"{event.action}: {event.start_s * factor:,.2f}" for event in mine],
                hovertemplate=f"%{{customdata}} + %{{x:,.2f}} {unit}<extra>rank %{{y}}</extra>",
            )
    figure.update_layout(barmode="overlay", bargap=0)
    figure.update_yaxes(autorange="reversed", dtick=1 if ranks <= 32 else None)
    figure.update_xaxes(range=[0, until * factor])
    if short.left_out:
        _mark_left_out(figure, short, until, unit, factor)
    return figure


def _drawn_events(short: ShortTimeline) -> tuple[list[Event], float]:
    """All events, or those of the first part of the step that a browser still draws; and where that part ends."""
    if len(short.events) <= MOST_BARS:
        return list(short.events), short.place_s(short.makespan_s)
    last_s = sorted(event.end_s for event in short.events)[MOST_BARS - 1]
    return [event for event in short.events if event.end_s <= last_s], short.place_s(last_s)


def _mark_left_out(figure: go.Figure, short: ShortTimeline, until: float, unit: str, factor: float) -> None:
    """A line where periods are left out, how many, and an axis with the times of the whole step."""
    for one in short.left_out:
        place = short.place_s(one.start_s) * factor
        if place > until * factor:
            continue
        each = f"{one.microbatches} micro-batch{'es' if one.microbatches > 1 else ''}"
        figure.add_vline(x=place, line={"color": style.RED, "width": 2, "dash": "dash"})
        figure.add_annotation(
            x=place,
            y=1,
            yref="paper",
            yanchor="bottom",
            text=f"{one.count:,} more periods of {each} ({one.length_s / one.count * factor:,.2f} {unit}) left out",
            showarrow=False,
            font={"color": style.RED},
        )
    places = [until * number / TICKS for number in range(TICKS + 1)]
    texts = [f"{short.time_s(place) * factor:,.1f}" for place in places]
    figure.update_xaxes(tickvals=[place * factor for place in places], ticktext=texts)
