"""Output of `ultrascale accuracy` and `explain --row`: errors by group, worst rows, one run term by term."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale import __version__
from ultrascale.cost.ranges import time_range
from ultrascale.measure.accuracy import scores as accuracy
from ultrascale.measure.accuracy.scores import ErrorSummary, ScoredRun
from ultrascale.plan.reasons import CAUSE_WORDS
from ultrascale.show.explain import memory_table, time_table
from ultrascale.show.lines import NARROW, attributes, bullets, heading, table
from ultrascale.specs.units import count, seconds

WRONG_LISTED = 6  # of wrong verdicts; --json has all
GROUPS = {
    "source": lambda one: accuracy.source_group(one.run),
    "gpu": lambda one: one.run.gpu,
    "system": lambda one: one.run.system,
}


def summary(scored: Sequence[ScoredRun], left_out: Sequence[ScoredRun]) -> dict[str, Any]:
    """Every figure of the report, for machines; percentages as shares."""
    trusted = [one for one in scored if one.run.trust == "A"]
    trusted_left_out = [one for one in left_out if one.run.trust == "A"]
    memory = [error for _, error in accuracy.memory_errors(scored)]
    ranks = accuracy.rankings(scored)
    right, wrong = accuracy.verdicts(scored)
    inside = [_inside(one) for one in left_out if one.ratio is not None]

    def pair(belongs: Any) -> dict[str, Any]:
        here, there = accuracy.errors(filter(belongs, trusted)), accuracy.errors(filter(belongs, trusted_left_out))
        return {"in_sample": here, "leave_one_source_out": there}

    return {
        "rows": len(scored),
        "modelled": sum(one.reason is None for one in scored),
        "dense": pair(lambda one: one.dense),
        "experts": pair(lambda one: one.run.job is not None and not one.dense),
        "small_single_node": pair(accuracy.small),
        "memory": {
            "rows": len(memory),
            "mape": sum(map(abs, memory)) / len(memory) if memory else None,
            "most_under": min(memory, default=None),
        },
        "verdicts": {"right": right, "wrong": wrong},
        "ranking": {
            "groups": len(ranks),
            "mean_tau": sum(one.tau for one in ranks) / len(ranks) if ranks else None,
            "worst_regret": max((one.regret for one in ranks), default=None),
        },
        "interval_80_coverage": sum(inside) / len(inside) if inside else None,
    }


def _inside(one: ScoredRun) -> bool:
    """Does the interval from other sources hold this row?"""
    assert one.run.job is not None
    assert one.estimate is not None
    assert one.ratio is not None
    low, high, _ = time_range(one.run.job, one.estimate.time, accuracy.source_group(one.run))
    return low <= one.estimate.step_time_s * one.ratio <= high


def as_json(scored: Sequence[ScoredRun], left_out: Sequence[ScoredRun]) -> dict[str, Any]:
    return {
        "rows": [
            {
                **_row_json(one),
                "predicted_iter_time_s": one.iter_time_s,
                "predicted_peak_mem_gib": one.peak_mem_gib,
                **attributes(one, "fits", "ratio"),
            }
            for one in scored
        ],
        "summary": summary(scored, left_out),
    }


def show(console: Console, scored: Sequence[ScoredRun], left_out: Sequence[ScoredRun], group: str, worst: int) -> None:
    figures = summary(scored, left_out)
    console.print(f"{figures['rows']} rows, {figures['modelled']} modelled; speed is predicted over measured tokens/s/GPU")
    title = "Errors, rows of trust A; one configuration of one source is one sample"
    grid = table(title, "what", "samples", "mean", "median", "bias", "mean, source left out")
    for label, key in (("dense", "dense"), ("experts", "experts"), ("small, one node", "small_single_node")):
        here, there = figures[key]["in_sample"], figures[key]["leave_one_source_out"]
        if here:
            grid.add_row(label, *_cells(here)[1:], f"{there.mape:.1%}" if there else "–")
    console.print(grid)
    _show_rest(console, figures)
    console.print(group_table(accuracy.by(scored, GROUPS[group]), group))
    console.print(worst_table(scored, worst))
    reasons = [one for one in scored if one.reason is not None]
    if reasons:
        heading(console, f"Not modelled: {len(reasons)}")
        bullets(console, (f"{one.run.id}: {one.reason}" for one in reasons))


def _show_rest(console: Console, figures: dict[str, Any]) -> None:
    memory, verdicts, ranking = figures["memory"], figures["verdicts"], figures["ranking"]
    if memory["rows"]:
        console.print(
            f"Memory (allocated or active): {memory['mape']:.1%} mean error over {memory['rows']} rows, "
            f"at most {max(0.0, -memory['most_under']):.1%} under"
        )
    listed = [*verdicts["wrong"][:WRONG_LISTED], *(["…"] if len(verdicts["wrong"]) > WRONG_LISTED else [])]
    wrong = f"; wrong: {', '.join(listed)}" if listed else ""
    console.print(f"Fit or out of memory: {verdicts['right']} right, {len(verdicts['wrong'])} wrong{wrong}")
    if ranking["groups"]:
        console.print(
            f"Ranking within {ranking['groups']} groups of one job: mean Kendall τ {ranking['mean_tau']:.2f}, "
            f"worst regret of our first choice {ranking['worst_regret']:.1%}"
        )
    if figures["interval_80_coverage"] is not None:
        console.print(
            f"80 % intervals made without a row's source hold it in {figures['interval_80_coverage']:.0%} of the cases"
        )


def group_table(groups: Any, title: str) -> Table:
    grid = table(f"By {title}", title, "rows", "samples", "mean", "median", "bias")
    for name, one in groups.items():
        grid.add_row(name, *_cells(one))
    return grid


def _cells(one: ErrorSummary) -> tuple[str, ...]:
    return str(one.rows), str(one.samples), f"{one.mape:.1%}", f"{one.median:.1%}", f"{one.bias:+.1%}"


def worst_table(scored: Sequence[ScoredRun], worst: int) -> Table:
    columns = ("id", "system", "model", "layout", "measured", "predicted", "error")
    grid = table(f"Worst {worst}", *columns, left=columns[:4])
    rows = [one for one in scored if one.error is not None]
    for one in sorted(rows, key=lambda row: -(row.error or 0))[:worst]:
        run = one.run
        speeds = f"{one.measured or 0:,.0f}", f"{one.tokens_per_s_per_gpu or 0:,.0f}", f"{(one.ratio or 1) - 1:+.1%}"
        grid.add_row(run.id, run.system, run.values.get("model", ""), str(run.layout), *speeds)
    return grid


def show_row(console: Console, one: ScoredRun) -> None:
    """One run: what was printed, what was assumed, what is predicted, term by term."""
    run = one.run
    console.print(f"{run.id}: {run.values.get('model', '')} on {run.values.get('gpus', '?')} × {run.gpu}, {run.system}")
    console.print(f"source: {run.source}")
    if one.reason is not None or run.job is None or one.estimate is None:
        console.print(f"Not modelled: {one.reason}")
        return
    console.print(f"{count(run.job.model.parameters)} parameters, {run.job.precision}, {run.job.framework.name}: {run.layout}")
    bullets(console, (f"assumed: {text}" for text in run.assumptions))
    grid, ratio = table("Predicted and measured", "", "predicted", "measured", "difference"), one.ratio or 1
    if one.measured is not None:
        grid.add_row("tokens/s/GPU", f"{one.tokens_per_s_per_gpu or 0:,.0f}", f"{one.measured:,.0f}", f"{ratio - 1:+.1%}")
        assert one.iter_time_s is not None
        grid.add_row("step", seconds(one.iter_time_s), seconds(one.iter_time_s * ratio), f"{1 / ratio - 1:+.1%}")
    if run.peak_mem_gib and one.peak_mem_gib:
        name = f"peak memory ({run.mem_kind or 'kind not stated'})"
        difference = f"{one.peak_mem_gib / run.peak_mem_gib - 1:+.1%}"
        grid.add_row(name, f"{one.peak_mem_gib:,.1f} GiB", f"{run.peak_mem_gib:,.1f} GiB", difference)
    console.print(grid)
    if one.estimate.range is not None:
        span = one.estimate.range
        console.print(
            f"80 % interval of the step: {seconds(span.step_time_low_s)} to {seconds(span.step_time_high_s)} ({span.based_on})"
        )
    console.print(time_table(one.estimate))
    console.print(memory_table(one.estimate, narrow=console.width < NARROW))
    largest = max(CAUSE_WORDS, key=lambda cause: getattr(one.estimate.time, cause) if one.estimate else 0)
    console.print(
        f"The largest cause is {CAUSE_WORDS[largest]}; a difference of this size is most likely there or in what was assumed."
    )


def row_json(one: ScoredRun) -> dict[str, Any]:
    return {**_row_json(one), "layout": one.run.layout, "estimate": one.estimate}


def _row_json(one: ScoredRun) -> dict[str, Any]:
    return {
        **attributes(one.run, "id", "assumptions"),
        "reason": one.reason,
        "measured_tokens_per_s_per_gpu": one.measured,
        "predicted_tokens_per_s_per_gpu": one.tokens_per_s_per_gpu,
    }


def markdown(file: Any, scored: Sequence[ScoredRun], left_out: Sequence[ScoredRun]) -> str:
    """The report as a page, with the command, the date and the version that made it."""
    figures, outside = summary(scored, left_out), accuracy.by(left_out, GROUPS["source"])
    columns = ("rows", "samples", "mean", "median", "bias")
    lines = [
        "# Accuracy on measured runs",
        "",
        f"Written by `ultrascale accuracy {file} --report docs/accuracy.md`, version {__version__}, {date.today().isoformat()}"
        + (f", commit {commit}." if (commit := _commit()) else "."),
        "How the figures came about, and what they owe to having seen the rows: docs/decisions/0004-fit-little-and-say-so.md.",
        "",
        *_markdown_table(("what", "figure"), headline(figures)),
        "",
        *_markdown_table(
            ("source", *columns, "mean, source left out"),
            (
                (name, *_cells(one), f"{outside[name].mape:.1%}" if name in outside else "–")
                for name, one in accuracy.by(scored, GROUPS["source"]).items()
            ),
        ),
        "",
        *_markdown_table(("GPU", *columns), ((name, *_cells(one)) for name, one in accuracy.by(scored, GROUPS["gpu"]).items())),
        "",
        "Not modelled:",
        "",
        *(f"- {one.run.id}: {one.reason}" for one in scored if one.reason is not None),
    ]
    return "\n".join(lines) + "\n"


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, None, *rows):
        yield f"| {' | '.join(cells)} |" if cells else f"|{'---|' * len(head)}"


def headline(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """The figures that the project holds itself to."""

    def both(key: str) -> str:
        here, there = figures[key]["in_sample"], figures[key]["leave_one_source_out"]
        return f"{here.mape:.1%} / {there.mape:.1%}" if here and there else "–"

    memory, ranking, verdicts = figures["memory"], figures["ranking"], figures["verdicts"]
    rows = [
        ("dense rows of trust A, mean error: in sample / source left out", both("dense")),
        ("the same, models with experts", both("experts")),
        ("small single-node jobs (up to 3.3 B parameters, 8 GPUs)", both("small_single_node")),
    ]
    if memory["rows"]:
        under = max(0.0, -memory["most_under"])
        rows.append(("memory, allocated or active: mean error / most under", f"{memory['mape']:.1%} / {under:.1%}"))
    rows.append(("fit or out of memory: right / wrong", f"{verdicts['right']} / {len(verdicts['wrong'])}"))
    if ranking["groups"]:
        tau_and_regret = f"{ranking['mean_tau']:.2f} / {ranking['worst_regret']:.1%}"
        rows.append(("ranking of one job's layouts: mean Kendall τ / worst regret", tau_and_regret))
    if figures["interval_80_coverage"] is not None:
        rows.append(("80 % intervals hold rows of sources they had not seen", f"{figures['interval_80_coverage']:.0%}"))
    return rows


def _commit() -> str | None:
    """The commit of the checkout this runs from, where there is one."""
    here = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except OSError:
        return None
    return answer.stdout.strip() or None
