"""Output of `ultrascale explain`: memory by owner and stage, time by cause, traffic, reasons, what-if, cheat-sheet."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ultrascale.cost import cheatsheet
from ultrascale.cost.estimate import estimate
from ultrascale.cost.timeline import memory_timeline
from ultrascale.plan.reasons import CAUSE_WORDS
from ultrascale.plan.what_if import LargestFit, WhatIf
from ultrascale.show.lines import NARROW, bullets, compact, heading, labelled, table
from ultrascale.show.plan import job_line, knows_peak, show_costs, show_reasons
from ultrascale.specs.estimate import CAUSES, OWNERS, Estimate
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB, gib, seconds

NARROW_WORDS = dict(zip(OWNERS, ("params", "master", "grads", "optim", "activ", "buffers", "runtime"), strict=True))
TIMELINE_ROWS = 14  # a step has thousands of actions
MODULES = 8


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
    if knows_peak(plan.job):
        console.print(f"{plan.job.mfu_convention}; with full attention {e.mfu:.1%}, HFU {e.hfu:.1%}")
    show_costs(console, plan)
    console.print(memory_table(e, narrow=console.width < NARROW))
    console.print(activation_table(e))
    console.print(timeline_table(plan))
    console.print(time_table(e))
    console.print(traffic_table(e))
    heading(console, "Reasons")
    show_reasons(console, plan.reasons, every=True)
    if plan.rejected:
        console.print(rejected_table(plan))
    heading(console, "Notes and assumptions")
    bullets(console, (*([e.cache_flush] if e.cache_flush else []), *e.notes))


def _utilisation(plan: Plan) -> str:
    e = plan.estimate
    return f"MFU {e.mfu_causal:.1%}, HFU {e.hfu_causal:.1%}; " if knows_peak(plan.job) else ""


def show_staleness(console: Console, plan: Plan) -> None:
    """A note when the file's estimate is not what is predicted now: the file was edited, or the cost model changed."""
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
                "it was edited or comes from another version; plan again to refresh it",
            )


def memory_table(e: Estimate, narrow: bool = False) -> Table:
    """One row per stage; in a narrow terminal with short names, without lines and without the point of the peak."""
    owners = [NARROW_WORDS[owner] if narrow else words.replace(" ", "\n") for owner, words in OWNERS.items()]
    at = () if narrow else ("peak at",)
    columns = ("stage", "layers", "in\nflight", *owners, "total", *at)
    grid = table("Memory at the peak of each pipeline stage, GiB", *columns, left=at)
    for stage in e.memory:
        peak = stage.stage == e.peak_stage
        grid.add_row(
            str(stage.stage),
            str(stage.layers),
            f"{stage.in_flight:.3g}",
            *(f"{getattr(stage.memory, owner) / GIB:,.2f}" for owner in OWNERS),
            f"{stage.total_gib:,.2f}",
            *([] if narrow else [stage.moment.split(",")[0] + (" ← peak" if peak else "")]),
            style="bold" if peak else None,
        )
    return compact(grid) if narrow else grid


def activation_table(e: Estimate) -> Table:
    grid = table("Activations on the peak stage", "module", "GiB", "share")
    total = sum(item.bytes for item in e.activations) or 1.0
    for item in e.activations[:MODULES]:
        grid.add_row(item.module, f"{item.bytes / GIB:,.2f}", f"{item.bytes / total:.0%}")
    return grid


def timeline_table(plan: Plan) -> Table:
    """Evenly spaced actions of the peak stage; the bar is against the GPU's capacity."""
    points = memory_timeline(plan.job, plan.layout, plan.estimate.peak_stage)
    step = max(1, (len(points) - 1) // (TIMELINE_ROWS - 2))
    top = max(range(len(points)), key=lambda index: points[index].total_bytes)
    selected = sorted({*range(0, len(points), step), top, len(points) - 1})
    title = f"Memory over one step, stage {plan.estimate.peak_stage} ({len(points)} actions, without runtime)"
    grid = table(title, "at", "action", "GiB", "", left=("action", ""))
    for index in selected:
        point = points[index]
        bar = "█" * max(1, round(min(60.0, 30 * point.total_bytes / (plan.estimate.capacity_gib * GIB))))
        action = point.action + (" ← peak" if index == top else "")
        grid.add_row(seconds(point.start_s), action, f"{point.total_bytes / GIB:,.2f}", bar[:40])
    return grid


def time_table(e: Estimate) -> Table:
    grid = table("Time of one step (slowest stage)", "cause", "time", "share")
    for cause in sorted(CAUSES, key=lambda name: -getattr(e.time, name)):
        value = getattr(e.time, cause)
        if value > 0:
            grid.add_row(CAUSE_WORDS[cause], seconds(value), f"{value / e.step_time_s:.1%}")
    grid.add_row("step", seconds(e.step_time_s), "100.0%", style="bold")
    return grid


def traffic_table(e: Estimate) -> Table:
    grid = table(
        "Communication of one GPU in one step",
        *("technique", "collective", "group", "inside the fast domain", "calls", "sent", "time", "exposed"),
        left=("technique", "collective"),
    )
    for one in e.traffic:
        name, sizes = one.collective.replace("_", "-"), (str(one.group), str(one.per_domain), f"{one.calls:,.0f}")
        grid.add_row(one.technique, name, *sizes, gib(one.bytes), seconds(one.time_s), seconds(one.exposed_s))
    if not e.traffic:
        grid.add_row("none")
    return grid


def rejected_table(plan: Plan) -> Table:
    grid = table("One step away, and why not", "change", "step", "peak GiB", "verdict", left=("change", "verdict"))
    for one in plan.rejected:
        grid.add_row(one.change, seconds(one.step_time_s), f"{one.peak_gib:,.1f}", one.verdict)
    return grid


def show_cheatsheet(console: Console, plan: Plan) -> None:
    console.print(job_line(plan.job))
    console.print(f"Layout: {plan.layout}")
    sizes = ("batch size", "memory reduction", "compute reduction", "communication in a step")
    columns = ("strategy", "here", *sizes, "overlap: transfer / compute")
    grid = table("The cheat-sheet with this plan's numbers", *columns, left=columns)
    for row in cheatsheet.strategies(plan):
        ratio = row.overlap
        overlap = f"{row.verdict}\n= {ratio.corrected_form}\nprinted: {ratio.printed_form} = {ratio.printed:.3g}"
        grid.add_row(row.name, row.degree, row.batch, row.memory, row.compute, row.communication, overlap)
        grid.add_section()
    console.print(grid)
    heading(console, "Errors of the printed ratios")
    corrections = {row.overlap.technique: row.overlap.correction for row in cheatsheet.strategies(plan)}
    bullets(console, [f"{technique}: {correction}" for technique, correction in corrections.items()])
    formulas = table("Formulas", *(names := ("quantity", "form", "value")), left=names)
    for formula in cheatsheet.formulas(plan):
        formulas.add_row(formula.name, formula.form, formula.value)
    console.print(formulas)


def show_what_if(console: Console, plan: Plan, answers: list[WhatIf]) -> None:
    console.print(job_line(plan.job))
    console.print(f"Plan: {plan.layout}")
    legal = [answer for answer in answers if answer.estimate is not None]
    for answer in answers:
        if answer.estimate is None:
            labelled(console, f"{answer.change}:", "yellow", f"not possible: {answer.problem}")
        else:
            console.print(f"{answer.change}: {answer.layout}")
    if not legal:
        return
    grid = table("Each change beside the plan; memory is the peak stage's", "", "plan", *(answer.change for answer in legal))
    estimates = [plan.estimate, *(answer.estimate for answer in legal if answer.estimate is not None)]

    def row(name: str, values: list[float], unit: str, digits: int = 2, bold: bool = False) -> None:
        now = values[0]
        cells = [f"{now:,.{digits}f} {unit}".strip()]
        cells += [f"{value:,.{digits}f} ({value - now:+,.{digits}f})" for value in values[1:]]
        grid.add_row(name, *cells, style="bold" if bold else None)

    for owner in OWNERS:
        row(OWNERS[owner], [getattr(e.memory[e.peak_stage].memory, owner) / GIB for e in estimates], "GiB")
    row("peak", [e.peak_gib for e in estimates], "GiB", bold=True)
    grid.add_row("fits", *("yes" if e.fits else "NO" for e in estimates))
    grid.add_section()
    for cause in CAUSES:
        values = [getattr(e.time, cause) for e in estimates]
        if max(values) > 0:
            row(CAUSE_WORDS[cause], values, "s", 3)
    row("step", [e.step_time_s for e in estimates], "s", 3, bold=True)
    row("tokens/s/GPU", [e.tokens_per_s_per_gpu for e in estimates], "", 0, bold=True)
    row("tokens/s", [e.tokens_per_s for e in estimates], "", 0)
    console.print(grid)


def show_largest(console: Console, plan: Plan, answer: LargestFit) -> None:
    console.print(job_line(plan.job))
    console.print(f"Layout: {plan.layout}")
    console.print(f"Plan: {answer.today}")
    heading(console, f"Largest that fits: {answer.largest} ({answer.estimate.peak_gib:,.1f} GiB)")
    console.print(f"Limit: {answer.stopped_by}")
