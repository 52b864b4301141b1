"""Figures of one plan: memory by stage and over a step, time by cause, the pipeline schedule, predicted beside measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ultrascale.cost.timeline import TimelinePoint, memory_timeline, simulated
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


def memory_by_stage(plan: Plan) -> go.Figure:
    """Stacked bars of each stage's peak against the GPU's memory; one horizontal bar without a pipeline."""
    found = plan.estimate
    flat = len(found.memory) == 1
    stages = ["" if flat else str(one.stage) for one in found.memory]
    axes = ("GiB on each GPU", "") if flat else ("pipeline stage", "GiB on each GPU of the stage")
    figure = style.new_figure("Memory at the peak, by owner", *axes, height=280 if flat else 420)
    for owner, words in OWNERS.items():
        sizes_gib = [getattr(one.memory, owner) / GIB for one in found.memory]
        if any(sizes_gib):
            along, across = ("y", "x") if flat else ("x", "y")
            figure.add_bar(
                name=words,
                orientation="h" if flat else "v",
                **{along: stages, across: sizes_gib},
                marker={"color": style.OWNER_COLORS[owner], "line": {"color": "rgba(255,255,255,0.6)", "width": 0.5}},
                hovertemplate=f"{'' if flat else 'stage %{x}: '}%{{{across}:.2f}} GiB<extra>%{{fullData.name}}</extra>",
            )
    figure.update_layout(barmode="stack")
    reach = [0, 1.12 * max(found.capacity_gib, found.peak_gib)]
    limit = f"{plan.job.cluster.gpu.name}: {found.capacity_gib:,.1f} GiB"
    if flat:
        figure.update_xaxes(range=reach)
        figure.update_yaxes(showticklabels=False)
        figure.add_vline(x=found.capacity_gib, line={"color": style.COLORS["limit"], "width": 2, "dash": "dash"})
        figure.add_annotation(
            x=found.capacity_gib, y=1, yref="paper", xanchor="right", yanchor="bottom", text=limit, showarrow=False,
            font={"color": style.COLORS["limit"]},
        )  # fmt: skip
    else:
        figure.update_xaxes(type="category")
        figure.update_yaxes(range=reach)
        style.mark_level(figure, found.capacity_gib, limit)
    return figure


def memory_over_step(plan: Plan) -> go.Figure:
    """What the fullest stage holds while each of its actions runs."""
    place = plan.estimate.peak_stage
    points = memory_timeline(plan.job, plan.layout, place)
    unit, factor = ("s", 1.0) if points[-1].end_s >= 1 else ("ms", 1e3)
    figure = style.new_figure(f"Memory over one step on stage {place}", f"time in the step ({unit})", "GiB")
    _add_memory(figure, points, factor)
    limit, words, reach = _memory_limit(plan, place, points)
    figure.update_yaxes(range=reach)
    style.mark_level(figure, limit, words)
    return figure


def _add_memory(figure: go.Figure, points: Sequence[TimelinePoint], factor: float, axis: str = "y") -> None:
    parts = (
        ("model states", "static_bytes", "master"),
        ("activations", "activation_bytes", "activations"),
        ("buffers", "buffer_bytes", "buffers"),
    )
    times = [edge * factor for one in points for edge in (one.start_s, one.end_s)]
    actions = [one.action for one in points for _ in range(2)]
    for name, field, meaning in parts:
        sizes_gib = [getattr(one, field) / GIB for one in points for _ in range(2)]
        if any(sizes_gib):
            figure.add_scatter(
                name=name,
                x=times,
                y=sizes_gib,
                yaxis=axis,
                customdata=actions,
                stackgroup="held",
                mode="lines",
                line={"width": 0.5, "color": style.COLORS[meaning]},
                fillcolor=style.COLORS[meaning],
                hovertemplate="%{customdata}: %{y:.2f} GiB<extra>%{fullData.name}</extra>",
            )


def _memory_limit(plan: Plan, stage: int, points: Sequence[TimelinePoint]) -> tuple[float, str, list[float]]:
    """What the runtime leaves of the GPU's memory in GiB, that in words, and the range of an axis that shows it."""
    capacity, runtime = plan.estimate.capacity_gib, plan.estimate.memory[stage].memory.runtime / GIB
    words = f"{capacity - runtime:,.1f} GiB beside {runtime:,.1f} of the runtime"
    return capacity - runtime, words, [0, 1.12 * max(capacity, max(one.total_bytes for one in points) / GIB)]


COMMUNICATION = ("tensor_s", "context_s", "expert_s", "zero_s", "data_s", "send_s")
GROUPS = (
    ("computing", TIMES["computing"][1], {"color": style.COLORS["computing"]}),
    ("exposed communication", COMMUNICATION, {"color": style.COLORS["communication"]}),
    ("pipeline bubble", ("bubble_s",), style.BUBBLE),
    ("optimizer step, offload, host", ("optimizer_s", "offload_s", "overhead_s"), {"color": style.COLORS["host"]}),
)


def time_by_cause(plan: Plan) -> go.Figure:
    """A bar per cause, longest at the top of its group, with its time and share."""
    found = plan.estimate
    unit, factor = ("s", 1.0) if found.step_time_s >= 1 else ("ms", 1e3)
    figure = style.new_figure(
        f"One step by cause: {seconds(found.step_time_s)} of the slowest rank", f"time ({unit})", height=460
    )
    total = found.time.total
    for name, causes, marker in GROUPS:
        shown = sorted((c for c in causes if getattr(found.time, c) > 0), key=lambda c: -getattr(found.time, c))
        if shown:
            values = [getattr(found.time, cause) for cause in shown]
            figure.add_bar(
                name=name,
                orientation="h",
                y=[CAUSE_WORDS[cause] for cause in shown],
                x=[value * factor for value in values],
                text=[f"{value / total:.1%}" for value in values],
                textposition="outside",
                cliponaxis=False,
                marker=marker,
                hovertemplate=f"%{{y}}: %{{x:,.3f}} {unit} (%{{text}})<extra></extra>",
            )
    longest = max(getattr(found.time, cause) for cause in CAUSES) * factor
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
        for side, which, colour in (
            (found.first, "first", style.COLORS["predicted"]),
            (found.second, "second", style.COLORS["measured"]),
        ):
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
    (ActionKind.F, "forward", style.COLORS["forward"]),
    (ActionKind.B, "backward", style.COLORS["backward"]),
    (ActionKind.I, "backward, input gradient", style.COLORS["backward"]),
    (ActionKind.W, "backward, weight gradient", style.COLORS["weight gradient"]),
)
MOST_MICROBATCHES = 32  # of more, the repetitions of the steady state are left out
MOST_BARS = 1500  # more are slow in a browser: then the first part of the step is drawn, and the title says so
TICKS = 8  # of a time axis that leaves periods out
LABELLED_BARS = 500  # bars with the micro-batch's number on them


def schedule(plan: Plan) -> go.Figure:
    """The plan's own schedule with its predicted times."""
    return gantt(simulated(plan.job, plan.layout), _schedule_name(plan), shorten=plan.layout.gas > MOST_MICROBATCHES)


def _schedule_name(plan: Plan) -> str:
    return plan.layout.schedule + (f", {plan.layout.virtual_stages} virtual stages" if plan.layout.virtual_stages > 1 else "")


def pipeline(plan: Plan) -> go.Figure:
    """The plan's schedule and, beneath it on the same time axis, what the fullest stage holds."""
    figure = gantt(simulated(plan.job, plan.layout), _schedule_name(plan))
    place = plan.estimate.peak_stage
    points = memory_timeline(plan.job, plan.layout, place)
    height, memory = figure.layout.height + 200, 200
    factor = 1e3 if "(ms)" in figure.layout.xaxis.title.text else 1.0
    plot = height - figure.layout.margin.t - figure.layout.margin.b
    share = memory / plot
    _add_memory(figure, points, factor, "y2")
    limit, words, reach = _memory_limit(plan, place, points)
    axis = {**figure.layout.yaxis.to_plotly_json(), "autorange": False, "dtick": None, "range": reach}
    figure.update_layout(
        height=height,
        yaxis_domain=[share + 0.04, 1],
        yaxis2={
            **axis,
            "title": {"text": f"GiB, stage {place}", "font": {"size": 13}},
            "domain": [0, share - 0.02],
            "anchor": "x",
        },
        xaxis_anchor="y2",
    )
    style.mark_level(figure, limit, words, "y2")
    return figure


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
    title = f"{name}: bubble {timeline.bubble_fraction:.1%}{part}"
    figure = style.new_figure(
        title, f"time ({unit})", "pipeline rank", height=min(1200, 190 + (28 if ranks <= 16 else 14) * ranks)
    )
    figure.add_bar(
        name="bubble",
        orientation="h",
        y=list(range(ranks)),
        x=[until * factor] * ranks,
        marker=style.BUBBLE,
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
                marker={
                    "color": colour,
                    "line": {"color": "rgba(0,0,0,0.35)", "width": 0.5 if len(events) <= LABELLED_BARS else 0},
                },
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
