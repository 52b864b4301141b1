"""Output of `ultrascale plan`: the ranking, the reasons for the first layout, and what to change when nothing fits."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.plan import Result
from ultrascale.show.lines import NARROW, bullets, compact, count_of, heading, labelled, notes, picked, table
from ultrascale.specs.job import Job
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import count, seconds

LIKELY = 0.5  # a layout that fits with less probability is called likely out of memory


def job_line(job: Job) -> str:
    model, cluster = job.model, job.cluster
    total = f", {count(job.total_tokens)} tokens in total" if job.total_tokens else ""
    total += f", in {job.framework.name}" if job.framework.name != "ultrascale" else ""
    return (
        f"{model.name} ({count(model.parameters)} parameters) on {cluster.gpus} × {cluster.gpu.name} "
        f"({count_of(cluster.nodes, 'node')} of {cluster.gpus_per_node}), {job.precision}, "
        f"{job.batch_tokens:,} tokens per step = {count_of(job.sequences, 'sequence')} of {job.seq:,}{total}"
    )


def knows_peak(job: Job) -> bool:
    """Whether the peak rate is known: on a CPU only the measured rate is, so there is no MFU."""
    return not job.cluster.efficiency.synchronous


def show_result(console: Console, result: Result) -> None:
    console.print(job_line(result.job))
    notes(console, result.notes)
    rate = f"{result.evaluated / max(result.seconds, 1e-9):,.0f} per second"
    console.print(f"{result.evaluated:,} legal layouts evaluated in {result.seconds:.2f} s ({rate}), {result.fitting:,} fit")
    if result.no_fit is not None:
        show_no_fit(console, result)
        return
    console.print(ranking(result.plans, narrow=console.width < NARROW))
    best = result.plans[0]
    heading(console, "Why the first one")
    bullets(console, best.reasons)
    show_costs(console, best)


def show_costs(console: Console, plan: Plan) -> None:
    """The range of the estimate, then days and cost where the job's total tokens are known."""
    estimate, span = plan.estimate, plan.estimate.range
    if span is not None:
        console.print(
            f"80 % interval: {seconds(span.step_time_low_s)} to {seconds(span.step_time_high_s)} per step, "
            f"{span.peak_low_gib:,.1f} to {span.peak_high_gib:,.1f} GiB (from {span.based_on})"
        )
        chance = f"{span.fit_probability:.0%}"
        if span.fit_probability < LIKELY:
            labelled(console, "Likely out of memory", "red", f"({chance} chance of fitting)")
        else:
            console.print(f"Fits with a probability of {chance}")
    if estimate.train_days is not None and estimate.gpu_hours is not None:
        price = f", {estimate.cost_usd:,.0f} USD" if estimate.cost_usd is not None else ""
        console.print(f"Whole training: {estimate.train_days:,.1f} days, {estimate.gpu_hours:,.0f} GPU-hours{price}")


def ranking(plans: tuple[Plan, ...], narrow: bool = False) -> Table:
    """One row per plan; in a narrow terminal the layout is one column."""
    gpus = ("GPUs",) if len({plan.job.cluster.gpus for plan in plans}) > 1 else ()
    mfu = ("MFU",) if all(knows_peak(plan.job) for plan in plans) else ()
    fit = ("fits",) if all(plan.estimate.range is not None for plan in plans) else ()
    degrees = ("dp", "tp", "pp", "cp", "ep", "zero", "mbs", "gas", "schedule", "recompute")
    layout = ("layout",) if narrow else degrees
    grid = table(
        "Layouts, best first",
        *("#", *gpus, *layout, "step", "tok/s/GPU", *mfu, "peak GiB", *(() if narrow else ("free GiB",)), *fit),
        left=("layout", "schedule", "recompute"),
        no_wrap=not narrow,
    )
    for position, plan in enumerate(plans, start=1):
        x, e = plan.layout, plan.estimate
        zero = f"{x.zero}" + (f"/{x.zero_shards}" if x.zero_shards else "") + ("k" if x.keep_gathered else "")
        schedule = x.schedule + (f"·v{x.virtual_stages}" if x.virtual_stages > 1 else "") if x.pp > 1 else "–"
        cp = f"{x.cp} {x.context_parallel}" if x.cp > 1 else "1"
        recompute = x.recompute + (f", {x.offload} offload" if x.offload != "none" else "")
        cells = (x,) if narrow else (x.dp, x.tp, x.pp, cp, x.ep, zero, x.mbs, x.gas, schedule, recompute)
        grid.add_row(
            str(position),
            *([str(plan.job.cluster.gpus)] if gpus else []),
            *map(str, cells),
            seconds(e.step_time_s),
            f"{e.tokens_per_s_per_gpu:,.0f}",
            *([f"{e.mfu:.1%}"] if mfu else []),
            f"{e.peak_gib:,.1f}",
            *([] if narrow else [f"{e.headroom_gib:,.1f}"]),
            *([f"{e.range.fit_probability:.0%}"] if fit and e.range is not None else []),
        )
    return compact(grid) if narrow else grid


def show_no_fit(console: Console, result: Result) -> None:
    no_fit = result.no_fit
    assert no_fit is not None
    labelled(
        console,
        "Nothing fits.",
        "red",
        f"The closest layout, {no_fit.layout}, needs {no_fit.peak_gib:,.1f} GiB per GPU and there are "
        f"{no_fit.capacity_gib:,.1f}: {no_fit.short_gib:,.1f} GiB too much.",
    )
    if no_fit.changes:
        console.print("What makes it fit, cheapest first:")
        bullets(console, [change.text for change in no_fit.changes])
    else:
        console.print("No single change that was tried makes it fit: try more GPUs and a shorter sequence together.")


def as_json(result: Result) -> dict[str, Any]:
    """The output of `plan --json`."""
    no_fit = result.no_fit
    return {
        **picked(result, "evaluated", "fitting", "seconds", "notes"),
        "plans": [
            {"gpus": one.job.cluster.gpus, **picked(one, "layout", "estimate", "reasons", "rejected")} for one in result.plans
        ],
        "no_fit": no_fit
        and {
            **picked(no_fit, "layout", "peak_gib", "capacity_gib"),
            "changes": [{**picked(one, "text", "layout"), "peak_gib": one.estimate.peak_gib} for one in no_fit.changes],
        },
    }
