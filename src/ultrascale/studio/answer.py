"""What stands above the layouts: cards of the selected one, or changes of the job where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from nicegui import ui

from ultrascale.plan.advice import NoFit
from ultrascale.plan.search import Result
from ultrascale.show.plan import knows_peak
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import seconds, tokens
from ultrascale.studio.address import PlannerQuery
from ultrascale.studio.layout_table import layout_words

Fix = tuple[str, dict[str, str]]


def cards(place: ui.element, plan: Plan, best: Plan) -> None:
    """Step time, speed, memory and probability to fit, each with its 80 % interval or its convention."""
    place.clear()
    with place:
        for name, value, under, bad in _numbers(plan, best):
            style = ' class="us-bad"' if bad else ""
            ui.html(f"<b{style}>{escape(value)}</b><span>{escape(name)}</span><span>{escape(under)}</span>", sanitize=False)


def _numbers(plan: Plan, best: Plan) -> Iterator[tuple[str, str, str, bool]]:
    found, span = plan.estimate, plan.estimate.range
    times = _interval(span.step_time_low_s, span.step_time_high_s, " s") if span is not None else ""
    yield "step time", seconds(found.step_time_s), times, False
    slower = found.step_time_s / best.estimate.step_time_s - 1
    yield "Δ to the best", "best" if plan.layout == best.layout else f"{slower:+.1%}", "of step time", False
    yield "tokens/s/GPU", f"{found.tokens_per_s_per_gpu:,.0f}", f"{found.tokens_per_s:,.0f} in all", False
    if knows_peak(plan.job):
        peak = "fp8" if plan.job.precision.startswith("fp8") else plan.job.precision
        yield "MFU", f"{found.mfu_causal:.1%}", f"causal attention, {peak} peak", False
    sizes = _interval(span.peak_low_gib, span.peak_high_gib, "") if span is not None else ""
    yield f"peak of {found.capacity_gib:,.1f} GiB", f"{found.peak_gib:,.1f} GiB", sizes, not found.fits
    chance = f"{span.fit_probability:.0%}" if span is not None else "yes" if found.fits else "no"
    under = f"{found.headroom_gib:,.1f} GiB free" if found.fits else f"{-found.headroom_gib:,.1f} GiB too much"
    yield "fits with probability", chance, under, not found.fits


def _interval(low: float, high: float, unit: str) -> str:
    if unit == " s" and high < 1:
        low, high, unit = 1e3 * low, 1e3 * high, " ms"
    return f"{low:,.3g}–{high:,.3g}{unit}, 80 % interval"


def no_fit_words(found: NoFit) -> str:
    none = "No single change makes it fit: try more GPUs and shorter sequences."
    after = "What makes it fit, cheapest first:" if found.changes else none
    return (
        f"The closest layout, {layout_words(found.layout)}, needs {found.peak_gib:,.1f} GiB per GPU and there are "
        f"{found.capacity_gib:,.1f}: {found.short_gib:,.1f} GiB too much. {after}"
    )


def no_fit_fixes(result: Result, ask: PlannerQuery) -> list[Fix]:
    """Each change that makes the job fit, as values of the form."""
    assert result.no_fit is not None
    found = []
    for change in result.no_fit.changes:
        job, cluster = change.job, change.job.cluster
        values = {"gradients": job.gradients, "optimizer": job.optimizer, "gpu": cluster.gpu.name, "fix": ask.fix}
        values |= {"nodes": str(cluster.nodes), "per_node": str(cluster.gpus_per_node)}
        if job.seq != result.job.seq:
            values["seq"] = str(job.seq)
        if job == result.job:
            values["fix"] = ",".join(part for part in (ask.fix, f"offload={change.layout.offload}") if part)
        changed = {name: value for name, value in values.items() if value != getattr(ask, name)}
        if changed:
            text = change.text.split(" (--")[0]
            found.append((f"{text[0].upper()}{text[1:]}: {change.estimate.peak_gib:,.1f} GiB", changed))
    return found


def error_fixes(ask: PlannerQuery) -> list[Fix]:
    """What to change where no layout is legal: a sequence that is too long, the constraints, the pasted model, everything."""
    found: list[Fix] = []
    model = ask.the_model() if not ask.field_errors() else None
    if model is not None and model.max_positions and tokens(ask.seq, "seq") > model.max_positions:
        found.append((f"Use sequences of {model.max_positions:,} tokens", {"seq": str(model.max_positions)}))
    if ask.fix:
        found.append((f"Remove the constraint {ask.fix[:60]}", {"fix": ""}))
    if ask.forbid:
        found.append((f"Allow {ask.forbid[:60]} again", {"forbid": ""}))
    if ask.shape:
        found.append(("Go back to the preset", {"shape": ""}))
    plain = PlannerQuery()
    names = ("model", "shape", "gpu", "nodes", "per_node", "batch", "seq", "precision", "gradients", "optimizer", "objective")
    everything = {name: getattr(plain, name) for name in (*names, "framework", "fix", "forbid")}
    return [*found, ("Start again from the defaults", everything)]
