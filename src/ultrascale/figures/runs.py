"""Figures of runs: loss and throughput, a trace by lane, predicted against measured speed of published runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from ultrascale.figures import style
from ultrascale.measure.accuracy.scores import ScoredRun
from ultrascale.measure.trace_steps import Intervals, StepIntervals, intersection

if TYPE_CHECKING:
    import plotly.graph_objects as go

FINEST = 1 / 1500  # of a trace's step: what is shorter than a pixel is drawn with its neighbour


def losses(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> go.Figure:
    """Loss (and held-out loss) by step, of one run or several."""
    figure = style.new_figure("Loss", "optimizer step", "loss (nats per token)")
    for (name, rows), colour in zip(runs.items(), cycle(style.SERIES), strict=False):
        _add_line(figure, f"{name}: training", rows, "loss", {"color": colour})
        if any(row.get("eval_loss") is not None for row in rows):
            _add_line(figure, f"{name}: held out", rows, "eval_loss", {"color": colour, "dash": "dash"})
    return figure


def throughput(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> go.Figure:
    """Tokens per second and GPU by step."""
    figure = style.new_figure("Throughput", "optimizer step", "tokens/s/GPU")
    for (name, rows), colour in zip(runs.items(), cycle(style.SERIES), strict=False):
        _add_line(figure, name, rows, "tokens_per_s_per_gpu", {"color": colour})
    figure.update_yaxes(rangemode="tozero")
    return figure


def _add_line(figure: go.Figure, name: str, rows: Sequence[Mapping[str, Any]], field: str, line: dict[str, Any]) -> None:
    known = [row for row in rows if row.get(field) is not None]
    figure.add_scatter(
        name=name,
        x=[row["step"] for row in known],
        y=[row[field] for row in known],
        mode="lines+markers" if len(known) < 50 else "lines",
        line=line,
        hovertemplate="step %{x}: %{y:,.4g}<extra>%{fullData.name}</extra>",
    )


def accuracy(scored: Sequence[ScoredRun], by: str = "gpu") -> go.Figure:
    """Predicted against measured speed of every run that could be modelled; the lines are ten per cent either way."""
    known = [one for one in scored if one.measured is not None and one.tokens_per_s_per_gpu is not None]
    figure = style.new_figure(
        f"Predicted and measured speed of {len(known)} runs", "measured tokens/s/GPU", "predicted tokens/s/GPU", height=520
    )
    groups: dict[str, list[ScoredRun]] = {}
    for one in known:
        # Sources write one GPU in several ways: the preset that their run was read as has one name.
        kind = one.run.job.cluster.gpu.name if by == "gpu" and one.run.job is not None else str(getattr(one.run, by))
        groups.setdefault(kind, []).append(one)
    for number, (name, mine) in enumerate(sorted(groups.items(), key=lambda pair: -len(pair[1]))):
        figure.add_scatter(
            name=name,
            x=[one.measured for one in mine],
            y=[one.tokens_per_s_per_gpu for one in mine],
            mode="markers",
            marker={
                "color": style.SERIES[number % len(style.SERIES)],
                "symbol": style.SHAPES[number % len(style.SHAPES)],
                "size": 7,
                "opacity": 0.8,
            },
            customdata=[f"{one.run.id}: {(one.ratio or 1) - 1:+.1%}" for one in mine],
            hovertemplate="%{customdata}<br>%{x:,.0f} measured, %{y:,.0f} predicted<extra>%{fullData.name}</extra>",
        )
    rates = [one.measured for one in known if one.measured]
    if rates:
        ends = [min(rates) / 1.5, max(rates) * 1.5]
        for factor, dash, name in ((1.0, "solid", "equal"), (1.1, "dot", "±10 %"), (1 / 1.1, "dot", "")):
            figure.add_scatter(
                name=name,
                x=ends,
                y=[end * factor for end in ends],
                mode="lines",
                line={"color": style.GREY, "dash": dash, "width": 1},
                showlegend=bool(name),
                hoverinfo="skip",
            )
        axis = style.log_ticks(ends[0], ends[1])
        figure.update_xaxes(**axis)
        figure.update_yaxes(**axis)
    return figure


def lanes(intervals: StepIntervals) -> go.Figure:
    """The first recorded step: computation, and communication by technique, one lane each."""
    name, (start, end) = intervals.steps[0]
    found: dict[str, Intervals] = {"computing": intervals.computing, "of it the optimizer": intervals.optimizer}
    for technique in dict.fromkeys(one.technique for one in intervals.communication):
        found[technique] = [(one.start, one.end) for one in intervals.communication if one.technique == technique]
    figure = style.new_figure(f"{name}: computation and communication", "time in the step (ms)", height=180 + 44 * len(found))
    computing = ("computing", "of it the optimizer")
    for lane, times in found.items():
        colour = style.COLORS["computing" if lane == "computing" else "host" if lane in computing else "communication"]
        drawn = _joined(intersection(times, [(start, end)]), FINEST * (end - start))
        figure.add_bar(
            name=lane,
            orientation="h",
            y=[lane] * len(drawn),
            base=[(one - start) / 1e3 for one, _ in drawn],
            x=[(other - one) / 1e3 for one, other in drawn],
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate="%{y}: from %{base:,.3f} ms, %{x:,.3f} ms<extra></extra>",
        )
    figure.update_layout(barmode="overlay", showlegend=False)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(range=[0, (end - start) / 1e3])
    return figure


def _joined(times: Intervals, gap: float) -> list[tuple[float, float]]:
    """The intervals, joined where the gap between two is smaller than `gap`."""
    out: list[tuple[float, float]] = []
    for start, end in times:
        if out and start - out[-1][1] < gap:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return out
