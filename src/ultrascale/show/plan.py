"""Output of `ultrascale plan`: the ranking, the reasons for the first layout, and what to change when nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.plan import Result
from ultrascale.plan.advice import LORA_RANK
from ultrascale.plan.reasons import MAIN_REASONS
from ultrascale.plan.search import VirtualStageVariant
from ultrascale.show.lines import NARROW, attributes, bullets, compact, count_of, heading, labelled, notes, table
from ultrascale.specs.job import Job
from ultrascale.specs.layout import DEGREES, Layout
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import count, seconds

WIDE = 150  # columns from which a layout has a column for each field
LIKELY = 0.5  # a layout that fits with less probability is called likely out of memory


def job_line(job: Job) -> str:
    model, cluster = job.model, job.cluster
    total = f", {count(job.total_tokens)} tokens in total" if job.total_tokens else ""
    total += f", in {job.framework.name}" if job.framework.name != "ultrascale" else ""
    total += f", adapters of rank {job.adapter_rank} alone trained" if job.adapter_rank is not None else ""
    return (
        f"{model.name} ({count(model.parameters)} parameters) on {cluster.gpus} × {cluster.gpu.name} "
        f"({count_of(cluster.nodes, 'node')} of {cluster.gpus_per_node}), {job.precision}, "
        f"{job.batch_tokens:,} tokens per step = {count_of(job.sequences, 'sequence')} of {job.seq:,}{total}"
    )


def knows_peak(job: Job) -> bool:
    """Whether the peak rate is known: on a CPU only the measured rate is, so there is no MFU."""
    return not job.cluster.efficiency.synchronous


def show_result(console: Console, result: Result, all_reasons: bool = False) -> None:
    console.print(job_line(result.job))
    notes(console, result.notes)
    rate = f"{result.evaluated / max(result.seconds, 1e-9):,.0f} per second"
    console.print(f"{result.evaluated:,} legal layouts searched in {result.seconds:.2f} s ({rate})")
    if result.no_fit is not None:
        show_no_fit(console, result)
        return
    best, narrow = result.plans[0], console.width < NARROW
    console.print(ranking(result.plans, console.width, result.variants))
    if knows_peak(best.job):
        console.print(best.job.mfu_convention)
    if result.alternatives:
        console.print(alternatives_table(result, narrow))
    heading(console, "Why the first one")
    show_reasons(console, best.reasons, all_reasons)
    show_costs(console, best)


def alternatives_table(result: Result, narrow: bool) -> Table:
    best = result.plans[0].estimate
    grid = table("Of another kind", "kind", "layout", "step", "Δ time", "peak GiB", "Δ GiB", left=("kind", "layout"))
    for kind, plan in result.alternatives:
        e = plan.estimate
        grid.add_row(
            kind,
            str(plan.layout),
            seconds(e.step_time_s),
            f"{e.step_time_s / best.step_time_s - 1:+.1%}",
            f"{e.peak_gib:,.1f}",
            f"{e.peak_gib - best.peak_gib:+,.1f}",
        )
    return compact(grid) if narrow else grid


def show_reasons(console: Console, reasons: Sequence[str], every: bool) -> None:
    """Under the name of their step, if they have one; the few that matter most, unless every one is asked for."""
    shown = reasons if every else reasons[:MAIN_REASONS]
    steps: dict[str, list[str]] = {}
    for reason in shown:
        step, named, text = reason.partition(": ")
        steps.setdefault(step if named else "", []).append(text if named else reason)
    for step, texts in steps.items():
        if step:
            console.print(step)
        bullets(console, texts)
    if len(shown) < len(reasons):
        console.print(f"{len(reasons) - len(shown)} more reasons: --all-reasons")


def show_costs(console: Console, plan: Plan) -> None:
    """The range of the estimate, then days and cost where the job's total tokens are known."""
    estimate, span = plan.estimate, plan.estimate.range
    if span is not None:
        console.print(
            f"80 % interval: {seconds(span.step_time_low_s)} to {seconds(span.step_time_high_s)} per step, "
            f"{span.peak_low_gib:,.1f} to {span.peak_high_gib:,.1f} GiB (from {span.based_on})"
        )
        console.print(f"Regime: {span.coverage}")
        chance = f"{span.fit_probability:.0%}"
        if span.fit_probability < LIKELY:
            labelled(console, "Likely out of memory", "red", f"({chance} chance of fitting)")
        else:
            console.print(f"Fits with a probability of {chance}")
    if estimate.train_days is not None and estimate.gpu_hours is not None:
        price = f", {estimate.cost_usd:,.0f} USD" if estimate.cost_usd is not None else ""
        whole = estimate.train_days
        long = f"{whole:,.1f} days" if whole >= 1 else f"{24 * whole:,.1f} hours"
        console.print(f"Whole training: {long}, {estimate.gpu_hours:,.0f} GPU-hours{price}")


def ranking(plans: tuple[Plan, ...], width: int = WIDE, variants: tuple[tuple[VirtualStageVariant, ...], ...] = ()) -> Table:
    """One row per plan, with its other virtual stages; below a width of `WIDE` the layout is one column."""
    wide, narrow = width >= WIDE, width < NARROW
    gpus = ("GPUs",) if len({plan.job.cluster.gpus for plan in plans}) > 1 else ()
    mfu = ("MFU",) if all(knows_peak(plan.job) for plan in plans) else ()
    fit = ("fits",) if all(plan.estimate.range is not None for plan in plans) else ()
    layout = (*DEGREES, "zero", "mbs", "gas", "schedule", "recompute") if wide else ("layout",)
    grid = table(
        "Layouts, best first",
        *("#", *gpus, *layout, "step", "tok/s/GPU", *mfu, "peak GiB", *(() if narrow else ("free GiB",)), *fit),
        left=("layout", "schedule", "recompute"),
    )
    for position, (plan, others) in enumerate(zip(plans, variants or ((),) * len(plans), strict=True), start=1):
        e = plan.estimate
        grid.add_row(
            str(position),
            *([str(plan.job.cluster.gpus)] if gpus else []),
            *_layout_cells(plan.layout, wide, [one.layout.virtual_stages for one in others]),
            seconds(e.step_time_s),
            f"{e.tokens_per_s_per_gpu:,.0f}",
            *([f"{e.mfu_causal:.1%}"] if mfu else []),
            f"{e.peak_gib:,.1f}",
            *([] if narrow else [f"{e.headroom_gib:,.1f}"]),
            *([f"{e.range.fit_probability:.0%}"] if fit and e.range is not None else []),
        )
    return grid if wide else compact(grid)


def _layout_cells(x: Layout, wide: bool, virtual_stages: list[int]) -> list[str]:
    also = f" (or v{', v'.join(map(str, sorted(virtual_stages)))})" if virtual_stages else ""
    if not wide:
        return [f"{x}{also}"]
    zero = f"{x.zero}" + (f"/{x.zero_shards}" if x.zero_shards else "") + ("k" if x.keep_gathered else "")
    schedule = x.schedule + (f"·v{x.virtual_stages}" if x.virtual_stages > 1 else "") + also if x.pp > 1 else "–"
    cp = f"{x.cp} {x.context_parallel}" if x.cp > 1 else "1"
    ep = f"{x.ep} {x.dispatcher}" if x.ep > 1 else "1"
    recompute = x.recompute + (f"·{x.recompute_layers}" if x.recompute_layers else "")
    recompute += f", {x.offload} offload" if x.offload != "none" else ""
    return [str(cell) for cell in (x.dp, x.tp, x.pp, cp, ep, zero, x.mbs, x.gas, schedule, recompute)]


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
        if no_fit.lora_gib <= no_fit.capacity_gib:
            console.print(
                f"Low-rank adapters (LoRA, rank {LORA_RANK}) on frozen weights would need {no_fit.lora_gib:,.1f} GiB; "
                f"try --adapters {LORA_RANK}"
            )
    else:
        console.print("No single change that was tried makes it fit: try more GPUs and a shorter sequence together.")


def as_json(result: Result) -> dict[str, Any]:
    """The output of `plan --json`."""
    no_fit = result.no_fit
    return {
        **attributes(result, "evaluated", "fitting", "seconds", "notes"),
        "plans": [
            {
                "gpus": one.job.cluster.gpus,
                **attributes(one, "layout", "estimate", "reasons", "rejected"),
                "variants": [variant._asdict() for variant in variants],
            }
            for one, variants in zip(result.plans, result.variants, strict=True)
        ],
        "alternatives": [{"kind": kind, **attributes(plan, "layout", "estimate")} for kind, plan in result.alternatives],
        "no_fit": no_fit
        and {
            **attributes(no_fit, "layout", "peak_gib", "capacity_gib", "lora_gib"),
            "changes": [{**attributes(one, "text", "layout"), "peak_gib": one.estimate.peak_gib} for one in no_fit.changes],
        },
    }
