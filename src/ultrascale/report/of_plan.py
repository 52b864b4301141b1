"""The report of a plan: fit, speed, reasons, memory, time, other layouts, cheat-sheet, assumptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ultrascale import __version__
from ultrascale.cost import cheatsheet
from ultrascale.cost.legality import check
from ultrascale.figures import plan as plan_figures
from ultrascale.figures import search as search_figures
from ultrascale.plan import survey
from ultrascale.plan.candidates import USUAL_VALUES
from ultrascale.report.page import Section, bullets, chart, details, page, table, tiles, words
from ultrascale.show.plan import job_line, knows_peak
from ultrascale.specs.files import to_yaml
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import count, gib, seconds

MOST_GPUS = 1024  # of the scaling curves


def plan_page(plan: Plan, name: str, say: survey.Progress = lambda _: None) -> str:
    check(plan.job, plan.layout)  # the file may have been edited
    sections = list(plan_sections(plan, say))
    title = f"{plan.job.model.name} on {plan.job.cluster.label}"
    return page(title, f"{job_line(plan.job)} Layout: {plan.layout}.", sections, footer(name))


def footer(name: str) -> str:
    return f"Written by ultrascale {__version__} from {Path(name).name}. Predictions unless said otherwise; 1 GiB = 2^30 bytes."


def plan_sections(plan: Plan, say: survey.Progress) -> Iterator[Section]:
    found = plan.estimate
    yield Section("Answer", (tiles(list(headline(plan))), words(verdict(plan)), bullets(plan.reasons)))
    yield Section(
        "Memory",
        (
            chart(plan_figures.memory_by_stage(plan), "memory-by-stage"),
            chart(plan_figures.memory_over_step(plan), "memory-over-step"),
            _activations(plan),
        ),
    )
    yield Section("Time", (chart(plan_figures.time_by_cause(plan), "time-by-cause"), _traffic(plan)))
    if plan.layout.pp > 1:
        yield Section("Pipeline", (chart(plan_figures.schedule(plan), "schedule"),))
    say("evaluating other layouts")
    yield Section("Other layouts", tuple(_others(plan)))
    if plan.job.cluster.gpus > 1 and knows_peak(plan.job):
        yield Section("Other sizes", tuple(_sizes(plan, say)))
    yield Section("Cheat-sheet", tuple(_cheatsheet(plan)))
    yield Section("Assumed", (bullets(found.notes), _range(plan), details("plan.yaml", to_yaml(plan.to_mapping()))))


def headline(plan: Plan) -> Iterator[tuple[str, str]]:
    found = plan.estimate
    yield "one step", seconds(found.step_time_s)
    yield "tokens/s on every GPU", f"{found.tokens_per_s_per_gpu:,.0f}"
    yield "tokens/s in all", f"{found.tokens_per_s:,.0f}"
    if knows_peak(plan.job):
        yield "MFU, causal", f"{found.mfu_causal:.1%}"
    yield f"peak memory of {found.capacity_gib:,.1f} GiB", f"{found.peak_gib:,.1f} GiB"
    yield "parameters", count(plan.job.model.parameters)
    if found.train_days is not None:
        days = found.train_days
        yield "for the whole training", f"{days:,.1f} days" if days >= 1 else f"{24 * days:,.1f} hours"
    if found.cost_usd is not None:
        yield "cost of the whole training", f"${found.cost_usd:,.0f}"


def verdict(plan: Plan) -> str:
    found = plan.estimate
    if not found.fits:
        return (
            f"It does not fit: {-found.headroom_gib:,.1f} GiB too much on stage {found.peak_stage}, at the {found.peak_moment}."
        )
    likely = "" if found.range is None else f" (probability {found.range.fit_probability:.0%})"
    return (
        f"It fits{likely}: {found.headroom_gib:,.1f} GiB are free on the fullest stage, {found.peak_stage}, "
        f"at its peak, the {found.peak_moment}."
    )


def _activations(plan: Plan) -> str:
    rows = [(one.module, gib(one.bytes)) for one in plan.estimate.activations if one.bytes]
    return table(("saved for backward on the peak stage", "bytes"), rows, numbers=(1,))


def _traffic(plan: Plan) -> str:
    head = ("technique", "collective", "GPUs", "sent by each GPU", "calls", "time", "exposed")
    rows = [
        (
            one.technique,
            one.collective,
            f"{one.group:,}",
            gib(one.bytes),
            f"{one.calls:,.0f}",
            seconds(one.time_s),
            seconds(one.exposed_s),
        )
        for one in plan.estimate.traffic
    ]
    return table(head, rows, numbers=(2, 3, 4, 5, 6)) if rows else words("There is no communication between GPUs.")


def _others(plan: Plan) -> Iterator[str]:
    if plan.rejected:
        yield chart(search_figures.sensitivity(plan), "sensitivity")
    front = survey.front(plan.job)
    if front:
        yield chart(search_figures.pareto(front, plan.estimate), "front")
    job, most = plan.job, min(MOST_GPUS, max(16, plan.job.cluster.gpus))
    if job.cluster.gpus > 1:
        points = [one for one in survey.scaling(job, most, plan.layout.recompute) if one.estimate is not None]
        title = f"Each technique alone, {survey.SEQUENCES_PER_GPU} sequences of {job.seq:,} tokens per GPU"
        yield chart(search_figures.scaling(points, job.cluster, title), "scaling")


def _sizes(plan: Plan, say: survey.Progress) -> Iterator[str]:
    job = plan.job
    cells = list(survey.heat_map_around(job, lambda cell: say(f"searching the best layout of {cell}")))
    for place, cell in enumerate(cells):
        own = (cell.model, cell.gpus) == (job.model.name, job.cluster.gpus)
        if own and (cell.estimate is None or plan.estimate.step_time_s < cell.estimate.step_time_s) and plan.estimate.fits:
            cells[place] = replace(cell, layout=plan.layout, estimate=plan.estimate)
    yield chart(search_figures.heat_map(cells, job.cluster.gpu.name), "heat-map")
    if job.cluster.gpus > survey.LARGE_CLUSTER_GPUS:
        yield words(f"On more than {survey.LARGE_CLUSTER_GPUS} GPUs the front and this map try {usual_values()}.")


def usual_values() -> str:
    """The values that a search of a large cluster tries, in words."""
    return "; ".join(f"{name} {', '.join(map(_word, values))}" for name, values in USUAL_VALUES.items())


def _word(value: object) -> str:
    return str(value).lower()


def _cheatsheet(plan: Plan) -> Iterator[str]:
    yield table(cheatsheet.HEADINGS, [one.cells for one in cheatsheet.strategies(plan)])
    formulas = [(one.name, one.form, one.value) for one in cheatsheet.formulas(plan)]
    yield table(("quantity", "formula", "here"), formulas)


def _range(plan: Plan) -> str:
    found = plan.estimate.range
    if found is None:
        return words("No range: there are no measured runs like this one.")
    return words(
        f"In eight of ten cases a step takes {seconds(found.step_time_low_s)} to {seconds(found.step_time_high_s)} and the "
        f"peak is {found.peak_low_gib:,.1f} to {found.peak_high_gib:,.1f} GiB ({found.based_on}). Regime: {found.coverage}."
    )
