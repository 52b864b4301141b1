"""Output of `ultrascale plan` with --by, --budget or --compare: numbers and kinds of GPUs with days, price and energy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from ultrascale.plan.gpu_counts import GPUCount, KindPlan, Span, TrainingCost
from ultrascale.show.lines import attributes, compact, heading, labelled, notes, table
from ultrascale.specs.job import Job
from ultrascale.specs.units import count, seconds

RANGE = "Second line of a cell: the 80 % range of the estimate's step time, carried over."
NO_VALUE = "–"
_UNITS = ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))  # from a value on: divided by, with the unit


def show_counts(
    console: Console, found: Sequence[GPUCount], commands: Sequence[str | None], by: str | None, budget: str | None
) -> None:
    """One row for each kind, or two with a budget alone; then what was assumed, and the commands that plan the same."""
    first = found[0].job
    console.print(_job_line(first))
    limits = " ".join(words for words in (by and f"in {by}", budget and f"for {budget}") if words)
    columns = ("GPUs", "layout", "days", "GPU hours", "price", "MWh")
    grid = compact(table(f"Fewest GPUs {limits}", *columns, left=columns[:2]))
    costs: list[TrainingCost] = []
    for one in found:
        rows = [(one.fewest, ""), (one.fastest, "\n(the fastest)")] if one.fewest is not None else []
        for cost, words in rows:
            if cost is not None and (cost is one.fewest or cost.gpus != rows[0][0].gpus):  # type: ignore[union-attr]
                costs.append(cost)
                grid.add_row(
                    f"{cost.gpus:,} × {one.job.cluster.gpu.name}{words}",
                    str(cost.plan.layout),
                    _cell(cost.days),
                    _cell(cost.gpu_hours),
                    NO_VALUE if cost.price_usd is None else _cell(cost.price_usd, "$"),
                    _cell(cost.energy_mwh),
                )
    if costs:
        console.print(grid)
        _assumptions(console, costs)
    for one in found:
        kind = one.job.cluster.gpu.name
        if one.problem is not None:
            labelled(console, f"{kind}:", "red", one.problem)
        notes(console, [f"{kind}: {note}" for note in one.notes])
    if costs:
        heading(console, "The same plans")
    for one, command in zip(found, commands, strict=True):
        if command is not None:
            console.print(command, soft_wrap=True)
        elif one.fewest is not None:
            cluster = one.fewest.plan.job.cluster
            console.print(f"with nodes: {cluster.nodes} and gpus_per_node: {cluster.gpus_per_node} in the cluster file")


def show_comparison(console: Console, found: Sequence[KindPlan]) -> None:
    """One row for each kind, in the order given."""
    first = found[0].job
    console.print(_job_line(first))
    columns = ("GPUs", "layout", "step", "tok/s/GPU", *(("days", "price", "MWh") if first.total_tokens else ()))
    grid = compact(table("The fastest layout of each kind", *columns, left=("GPUs", "layout")))
    costs: list[TrainingCost] = []
    for one in found:
        cluster, cells = one.job.cluster, ["nothing fits"]
        if one.plan is not None:
            estimate = one.plan.estimate
            cells = [str(one.plan.layout), seconds(estimate.step_time_s), f"{estimate.tokens_per_s_per_gpu:,.0f}"]
        if one.cost is not None:
            costs.append(one.cost)
            price = one.cost.price_usd
            cells += [_cell(one.cost.days), NO_VALUE if price is None else _cell(price, "$")]
            cells.append(_cell(one.cost.energy_mwh))
        grid.add_row(f"{cluster.gpus:,} × {cluster.gpu.name}", *cells)
    console.print(grid)
    if costs:
        _assumptions(console, costs)
    elif first.total_tokens is None:
        console.print("Days, price and energy: --tokens 15T, the tokens of the whole training")
    for one in found:
        notes(console, [f"{one.job.cluster.gpu.name}: {note}" for note in one.notes])


def _job_line(job: Job) -> str:
    tokens = f"{count(job.total_tokens)} tokens in " if job.total_tokens else ""
    return (
        f"{job.model.name} ({count(job.model.parameters)} parameters), {job.precision}, {tokens}steps of "
        f"{job.batch_tokens:,}, sequences of {job.seq:,}, in {job.framework.name}"
    )


def _assumptions(console: Console, costs: Sequence[TrainingCost]) -> None:
    if any(cost.plan.estimate.range is not None for cost in costs):
        console.print(RANGE)
    kinds = {one.plan.job.cluster.gpu.name: one.plan.job.cluster.gpu for one in costs}
    watts = ", ".join(f"{name} {gpu.power_w:,.0f} W" for name, gpu in kinds.items())
    console.print(
        f"Energy: GPUs at the limit of their boards ({watts}) all the time, times PUE {costs[0].pue:g}: an upper bound for the "
        "GPUs, without hosts and switches."
    )
    unpriced = list(dict.fromkeys(one.plan.job.cluster.gpu.name for one in costs if one.price_usd is None))
    if unpriced:
        console.print(f"No price: give yours, in US dollars for a GPU hour, as --price {unpriced[0]}=…")


def _cell(span: Span, sign: str = "") -> str:
    """The value and below it its range, in the same unit: `1.13 M$`, `1.03–1.44`."""
    _, limit, unit = next((one for one in _UNITS if span.value >= one[0]), (1.0, 1.0, ""))
    value, low, high = (_digits(one / limit) for one in (span.value, span.low, span.high))
    value = f"{value} {unit}{sign}".rstrip()
    return value if low == high else f"{value}\n{low}–{high}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def counts_json(found: Sequence[GPUCount], commands: Sequence[str | None]) -> dict[str, Any]:
    """The output of `plan --json` with --by or --budget."""
    return {
        "kinds": [
            {
                "gpu": one.job.cluster.gpu.name,
                "fewest": _cost_json(one.fewest),
                "fastest": _cost_json(one.fastest),
                **attributes(one, "problem", "notes"),
                "planned_days": {gpus: None if cost is None else cost.days.value for gpus, cost in sorted(one.planned.items())},
                "command": command,
            }
            for one, command in zip(found, commands, strict=True)
        ]
    }


def comparison_json(found: Sequence[KindPlan]) -> dict[str, Any]:
    """The output of `plan --json` with --compare."""
    return {
        "kinds": [
            {
                "gpu": one.job.cluster.gpu.name,
                "gpus": one.job.cluster.gpus,
                "layout": None if one.plan is None else one.plan.layout,
                "estimate": None if one.plan is None else one.plan.estimate,
                "cost": _cost_json(one.cost),
                "notes": one.notes,
            }
            for one in found
        ]
    }


def _cost_json(cost: TrainingCost | None) -> dict[str, Any] | None:
    return (
        None
        if cost is None
        else {
            **attributes(cost, "gpus", "pue", "days", "gpu_hours", "price_usd", "energy_mwh"),
            "nodes": cost.plan.job.cluster.nodes,
            "layout": cost.plan.layout,
            "estimate": cost.plan.estimate,
        }
    )
