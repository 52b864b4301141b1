"""`ultrascale explain` in the terminal: memory by owner and stage, time by cause, traffic, reasons, neighbours, cheat-sheet."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.cost import cheatsheet
from ultrascale.cost.estimate import estimate
from ultrascale.cost.timeline import memory_timeline
from ultrascale.plan.reasons import CAUSE_WORDS
from ultrascale.plan.what_if import Largest, WhatIf
from ultrascale.show.lines import bullets, heading, labelled
from ultrascale.show.plan import job_line, knows_peak, show_costs
from ultrascale.specs.estimate import CAUSES, OWNERS, Estimate
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB, gib, seconds

MOMENTS = 14  # lines of the memory timeline; a step has thousands of actions
MODULES = 8


def _table(title: str, *columns: tuple[str, str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for name, justify in columns:
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    return table


def show_plan(console: Console, plan: Plan) -> None:
    e = plan.estimate
    console.print(job_line(plan.job))
    console.print(f"Layout: {plan.layout}")
    console.print(
        f"Step {seconds(e.step_time_s)}, {e.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"{_utilisation(plan)}peak {e.peak_gib:,.1f} GiB of {e.capacity_gib:,.1f} on stage {e.peak_stage}, "
        f"at the {e.peak_moment}; first step {e.first_step_peak_gib:,.1f} GiB (optimizer states appear after it)"
    )
    if not e.fits:
        labelled(console, "Does not fit:", "red", f"{-e.headroom_gib:,.1f} GiB too much")
    show_costs(console, plan)
    console.print(memory_table(e))
    console.print(activation_table(e))
    console.print(timeline_table(plan))
    console.print(time_table(e))
    console.print(traffic_table(e))
    heading(console, "Reasons")
    bullets(console, plan.reasons)
    if plan.rejected:
        console.print(neighbour_table(plan))
    heading(console, "What this rests on")
    bullets(console, e.notes)


def _utilisation(plan: Plan) -> str:
    e = plan.estimate
    return f"MFU {e.mfu:.1%} (causal {e.mfu_causal:.1%}), HFU {e.hfu:.1%}; " if knows_peak(plan.job) else ""


def show_staleness(console: Console, plan: Plan) -> None:
    """A file can be edited, and the cost model can change: says so when the estimate is no longer what is predicted."""
    now = estimate(plan.job, plan.layout)
    for name, written, predicted in (
        ("a step of {:,.4g} s", plan.estimate.step_time_s, now.step_time_s),
        ("a peak of {:,.4g} GiB", plan.estimate.peak_gib, now.peak_gib),
    ):
        if abs(written - predicted) > 1e-4 * predicted:
            labelled(
                console,
                "note:",
                "yellow",
                f"this file says {name.format(written)} but {predicted:,.4g} is predicted for its job and layout now: "
                "it was edited or comes from another version; plan anew to refresh it",
            )


def memory_table(e: Estimate) -> Table:
    table = _table(
        "Memory at the peak of each pipeline stage, GiB",
        ("stage", "right"),
        ("layers", "right"),
        ("in\nflight", "right"),
        *((words.replace(" ", "\n"), "right") for words in OWNERS.values()),
        ("total", "right"),
        ("moment", "left"),
    )
    for stage in e.memory:
        cells = [f"{getattr(stage.memory, owner) / GIB:,.2f}" for owner in OWNERS]
        peak = stage.stage == e.peak_stage
        table.add_row(
            str(stage.stage),
            str(stage.layers),
            f"{stage.in_flight:.3g}",
            *cells,
            f"{stage.total_gib:,.2f}",
            stage.moment.split(",")[0] + (" ← peak" if peak else ""),
            style="bold" if peak else None,
        )
    return table


def activation_table(e: Estimate) -> Table:
    table = _table("Activations on the peak stage", ("module", "left"), ("GiB", "right"), ("share", "right"))
    total = sum(item.bytes for item in e.activations) or 1.0
    for item in e.activations[:MODULES]:
        table.add_row(item.module, f"{item.bytes / GIB:,.2f}", f"{item.bytes / total:.0%}")
    return table


def timeline_table(plan: Plan) -> Table:
    """Evenly spaced actions of the peak stage; the bar is against the GPU's capacity."""
    moments = memory_timeline(plan.job, plan.layout, plan.estimate.peak_stage)
    step = max(1, (len(moments) - 1) // (MOMENTS - 2))
    top = max(range(len(moments)), key=lambda index: moments[index].total_bytes)
    chosen = sorted({*range(0, len(moments), step), top, len(moments) - 1})
    table = _table(
        f"Memory over one step, stage {plan.estimate.peak_stage} ({len(moments)} actions, without runtime)",
        ("at", "right"),
        ("action", "left"),
        ("GiB", "right"),
        ("", "left"),
    )
    for index in chosen:
        moment = moments[index]
        bar = "█" * max(1, round(min(60.0, 30 * moment.total_bytes / (plan.estimate.capacity_gib * GIB))))
        table.add_row(
            seconds(moment.start_s),
            moment.action + (" ← peak" if index == top else ""),
            f"{moment.total_bytes / GIB:,.2f}",
            bar[:40],
        )
    return table


def time_table(e: Estimate) -> Table:
    table = _table("Time of one step (slowest stage)", ("cause", "left"), ("time", "right"), ("share", "right"))
    for cause in sorted(CAUSES, key=lambda name: -getattr(e.time, name)):
        value = getattr(e.time, cause)
        if value > 0:
            table.add_row(CAUSE_WORDS[cause], seconds(value), f"{value / e.step_time_s:.1%}")
    table.add_row("step", seconds(e.step_time_s), "100.0%", style="bold")
    return table


def traffic_table(e: Estimate) -> Table:
    table = _table(
        "Communication of one GPU in one step",
        ("technique", "left"),
        ("collective", "left"),
        ("group", "right"),
        ("inside the fast domain", "right"),
        ("calls", "right"),
        ("sent", "right"),
        ("time", "right"),
        ("exposed", "right"),
    )
    for one in e.traffic:
        table.add_row(
            one.technique,
            one.collective.replace("_", "-"),
            str(one.group),
            str(one.per_domain),
            f"{one.calls:,.0f}",
            gib(one.bytes),
            seconds(one.time_s),
            seconds(one.exposed_s),
        )
    if not e.traffic:
        table.add_row("none", "", "", "", "", "", "", "")
    return table


def neighbour_table(plan: Plan) -> Table:
    table = _table(
        "One step away, and why not",
        ("change", "left"),
        ("step", "right"),
        ("peak GiB", "right"),
        ("verdict", "left"),
    )
    for one in plan.rejected:
        table.add_row(one.change, seconds(one.step_time_s), f"{one.peak_gib:,.1f}", one.verdict)
    return table


def show_cheatsheet(console: Console, plan: Plan) -> None:
    console.print(job_line(plan.job))
    console.print(f"Layout: {plan.layout}")
    table = _table(
        "The cheat-sheet with this plan's numbers",
        ("strategy", "left"),
        ("here", "left"),
        ("batch size", "left"),
        ("memory reduction", "left"),
        ("compute reduction", "left"),
        ("communication in a step", "left"),
        ("overlap: transfer / compute", "left"),
    )
    for row in cheatsheet.strategies(plan):
        ratio = row.overlap
        printed = "–" if ratio.printed is None else f"{ratio.printed:.3g}"
        overlap = f"{row.verdict}\n= {ratio.corrected_form}\nprinted: {ratio.printed_form} = {printed}"
        table.add_row(row.name, row.degree, row.batch, row.memory, row.compute, row.communication, overlap)
        table.add_section()
    console.print(table)
    heading(console, "Where the printed ratio slips")
    slips = {row.overlap.technique: row.overlap.slip for row in cheatsheet.strategies(plan)}
    bullets(console, [f"{technique}: {slip}" for technique, slip in slips.items()])
    formulas = _table("Formulas", ("quantity", "left"), ("form", "left"), ("value", "left"))
    for formula in cheatsheet.formulas(plan):
        formulas.add_row(formula.name, formula.form, formula.value)
    console.print(formulas)


def show_what_if(console: Console, plan: Plan, answers: list[WhatIf]) -> None:
    console.print(job_line(plan.job))
    console.print(f"Today: {plan.layout}")
    legal = [answer for answer in answers if answer.estimate is not None]
    for answer in answers:
        if answer.estimate is None:
            labelled(console, f"{answer.change}:", "yellow", f"cannot be done: {answer.problem}")
        else:
            console.print(f"{answer.change}: {answer.layout}")
    if not legal:
        return
    table = _table(
        "Each change beside today; memory is the peak stage's",
        ("", "left"),
        ("today", "right"),
        *((answer.change, "right") for answer in legal),
    )
    estimates = [plan.estimate, *(answer.estimate for answer in legal if answer.estimate is not None)]

    def row(name: str, values: list[float], unit: str, digits: int = 2, bold: bool = False) -> None:
        today = values[0]
        cells = [f"{today:,.{digits}f} {unit}".strip()]
        cells += [f"{value:,.{digits}f} ({value - today:+,.{digits}f})" for value in values[1:]]
        table.add_row(name, *cells, style="bold" if bold else None)

    for owner in OWNERS:
        row(OWNERS[owner], [getattr(e.memory[e.peak_stage].memory, owner) / GIB for e in estimates], "GiB")
    row("peak", [e.peak_gib for e in estimates], "GiB", bold=True)
    table.add_row("fits", *("yes" if e.fits else "NO" for e in estimates))
    table.add_section()
    for cause in CAUSES:
        values = [getattr(e.time, cause) for e in estimates]
        if max(values) > 0:
            row(CAUSE_WORDS[cause], values, "s", 3)
    row("step", [e.step_time_s for e in estimates], "s", 3, bold=True)
    row("tokens/s/GPU", [e.tokens_per_s_per_gpu for e in estimates], "", 0, bold=True)
    row("tokens/s", [e.tokens_per_s for e in estimates], "", 0)
    console.print(table)


def show_largest(console: Console, plan: Plan, answer: Largest) -> None:
    console.print(job_line(plan.job))
    console.print(f"Layout: {plan.layout}")
    console.print(f"Today: {answer.today}")
    heading(console, f"Largest that fits: {answer.largest} ({answer.estimate.peak_gib:,.1f} GiB)")
    console.print(f"What stops it: {answer.stopped_by}")


def cheatsheet_json(plan: Plan) -> dict[str, Any]:
    return {
        "strategies": [
            {**{k: v for k, v in vars(row).items() if k != "overlap"}, "overlap": vars(row.overlap)}
            for row in cheatsheet.strategies(plan)
        ],
        "formulas": [vars(formula) for formula in cheatsheet.formulas(plan)],
    }


def what_if_json(answers: list[WhatIf]) -> list[dict[str, Any]]:
    return [
        {
            "change": answer.change,
            "layout": answer.layout.model_dump(mode="json") if answer.layout else None,
            "estimate": answer.estimate.model_dump(mode="json") if answer.estimate else None,
            "problem": answer.problem,
        }
        for answer in answers
    ]
