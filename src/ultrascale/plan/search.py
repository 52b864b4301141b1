"""The search: every legal layout, pruned by memory, timed in closed form; the best are simulated before they are ranked."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ultrascale.cost.estimate import (
    DraftEstimate,
    MemoryDraft,
    add_times,
    full_estimate,
    memory_drafts,
    memory_drafts_of_jobs,
)
from ultrascale.cost.legality import check
from ultrascale.cost.ranges import MIN_FIT, memory_limit_gib
from ultrascale.cost.recompute import fewest_recomputed
from ultrascale.plan import advice, alternatives, reasons
from ultrascale.plan.candidates import OBJECTIVES, LayoutConstraints, Objective, RankedLayouts, rank, why_empty
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB

# Closed forms and simulator differ by some percent (schedules/formulas.py), so more than asked for are simulated, and more
# than that are kept for those that the exact memory count then puts just over the edge.
SIMULATED_AT_LEAST = 24
KEPT_AT_LEAST = 240
MAX_PLANS = 1000  # every plan shown is simulated and described: some milliseconds each
MAX_VARIANTS = 3  # of one layout, with other virtual stages
SAME_TIME_TOLERANCE = 1e-9  # layouts that differ in recomputation and by less in time are one


@dataclass(frozen=True)
class Result:
    """The best plans, best first, of each its variants, and plans of other kinds; how many layouts were evaluated, in how many
    seconds; what the user should know.
    """

    job: Job
    plans: tuple[Plan, ...]
    evaluated: int
    fitting: int
    seconds: float
    notes: tuple[str, ...] = ()
    no_fit: advice.NoFit | None = None
    variants: tuple[tuple[VirtualStageVariant, ...], ...] = ()
    """for each plan, the same with other virtual stages"""
    alternatives: tuple[Alternative, ...] = ()


class VirtualStageVariant(NamedTuple):
    layout: Layout
    step_time_s: float
    peak_gib: float


class Alternative(NamedTuple):
    """A plan of another kind than the first."""

    kind: str
    plan: Plan


class LayoutPreview(NamedTuple):
    """A layout that fits and how long its step takes, by closed forms."""

    layout: Layout
    step_time_s: float


def plan(
    job: Job,
    *,
    top: int = 10,
    objective: Objective = "throughput",
    fix: Sequence[str] = (),
    forbid: Sequence[str] = (),
    min_fit: float = MIN_FIT,
    min_free_gib: float = 0.0,
    explain: bool = True,
    progress: Callable[[str], None] | None = None,
    preview: Callable[[list[LayoutPreview]], None] | None = None,
) -> Result:
    """Rank every legal layout of the job. `fix` and `forbid` are texts such as `tp=8`, `cp`, `recompute=full`.

    `throughput`: fastest step. `memory`: least peak. `cost`: fewest GPU-seconds per token, on this cluster or on a part of it.
    A layout must fit with the probability `min_fit`, by the errors of measured runs, and leave `min_free_gib`; if none does,
    those that fit as predicted are ranked. `preview` is shown the first `top` by closed forms, before the best are simulated,
    where the fastest are asked for.
    """
    if objective not in OBJECTIVES:
        raise SpecError(f"objective is '{objective}': {nearest(str(objective), OBJECTIVES)} (one of {', '.join(OBJECTIVES)})")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= MAX_PLANS:
        raise SpecError(f"top is {top!r} but must be a whole number from 1 to {MAX_PLANS}, such as 10")
    started = time.perf_counter()
    constraints = LayoutConstraints.parse(fix, forbid)
    say = progress or (lambda _: None)
    job, notes = advice.runnable_job(job)
    job, more = advice.reachable_batch(job, constraints)
    notes += more
    jobs = advice.smaller_clusters(job) if objective == "cost" else [job]
    limit_gib = memory_limit_gib(job, min_fit, min_free_gib)
    with_alternatives = explain and objective == "throughput"
    ranked = _ranked(jobs, constraints, objective, top, limit_gib, with_alternatives, say)
    evaluated, fitting = sum(r.evaluated for r in ranked), sum(r.fitting for r in ranked)
    if not evaluated:
        raise SpecError(why_empty(job, constraints))
    if not fitting:
        limit_gib = job.cluster.gpu.memory_gib - min_free_gib
        ranked = _ranked(jobs, constraints, objective, top, limit_gib, with_alternatives, say)
        fitting = sum(r.fitting for r in ranked)
        if fitting:
            notes.append(f"no layout fits with a probability of {min_fit:.0%} or more: these may run out of memory")
    if not fitting:
        say("nothing fits: looking for the cheapest change that does")
        least = [rank(one, constraints, "memory", 1, capacity_bytes=np.inf) for one in jobs]
        smallest = min((one for one in least if one.score), key=lambda one: one.score[0])
        no_fit = advice.no_fit(job, constraints, smallest.score[0], smallest.rows.layout(0))
        return Result(job, (), evaluated, 0, time.perf_counter() - started, tuple(notes), no_fit)
    best = sorted(((score, r, row) for r in ranked for row, score in enumerate(r.score)), key=lambda entry: entry[0])
    if preview is not None and objective == "throughput":
        shown = [LayoutPreview(ranked.rows.layout(row), score) for score, ranked, row in best[:top]]
        check(job, shown[0].layout)  # constraints may contradict each other beyond what candidates know
        preview(shown)
    say(f"simulating the best of {evaluated:,}")
    simulated = _simulate(best, top, limit_gib, objective != "memory" and "recompute" not in constraints.fixed)
    simulated.sort(key=lambda draft: _score(draft, objective))
    rows = _rows(simulated)[:top]
    plans = [_planned(row[0]) for row in rows]
    variants = tuple(
        tuple(VirtualStageVariant(one.view.layout, one.step_time_s, one.peak_gib) for one in row[1:]) for row in rows
    )
    notes += [*advice.batch_notes(job, plans[0].layout), *advice.smaller_cluster_notes(job, plans)]
    others: tuple[Alternative, ...] = ()
    if explain:
        say("explaining the winner")
        plans = explained(plans, objective=objective, fix=fix, forbid=forbid)
        others = _alternatives(plans[0], ranked[0], constraints, limit_gib) if with_alternatives else ()
    seconds = time.perf_counter() - started
    return Result(job, tuple(plans), evaluated, fitting, seconds, tuple(notes), variants=variants, alternatives=others)


def _planned(draft: DraftEstimate) -> Plan:
    return Plan(job=draft.view.job, layout=draft.view.layout, estimate=full_estimate(draft))


def _alternatives(
    best: Plan, ranked: RankedLayouts, constraints: LayoutConstraints, limit_gib: float
) -> tuple[Alternative, ...]:
    """Plans of other kinds than the best, each the first of its kind that fits and is fast enough by the exact count."""
    job, candidates = best.job, ranked.alternatives.candidates()
    most = {alternatives.NO_PIPELINE: ("pp", 1), alternatives.TP_IN_NODE: ("tp", job.cluster.fast_domain)}
    for kind, (name, degree) in most.items():
        if getattr(best.layout, name) <= degree or name in constraints.fixed:
            continue
        parts = (table.part(np.flatnonzero(getattr(table.cores, name) <= degree)) for table in ranked.tables)
        tables = [part for part in parts if len(part.cores)]
        found = rank(job, constraints, "throughput", 1, limit_gib * GIB, tables=tables)
        candidates |= {kind: [found.rows.layout(0)]} if found.score else {}
    layouts = list(dict.fromkeys(layout for some in candidates.values() for layout in some))
    fitting = [one for one in memory_drafts(job, layouts) if one.peak_gib <= limit_gib] if layouts else []
    drafts = {draft.view.layout: draft for draft in add_times(fitting)} if fitting else {}
    kinds: dict[Layout, list[str]] = {}
    for kind, some in candidates.items():
        longest_s = alternatives.MAX_SLOWDOWN.get(kind, math.inf) * best.estimate.step_time_s
        enough = [layout for layout in some if layout in drafts and drafts[layout].step_time_s <= longest_s]
        if kind == alternatives.LEAST_MEMORY:
            enough.sort(key=lambda layout: drafts[layout].peak_gib)
            enough = [layout for layout in enough if drafts[layout].peak_gib < best.estimate.peak_gib]
        if enough and enough[0] != best.layout:
            kinds.setdefault(enough[0], []).append(kind)
    return tuple(Alternative(", ".join(names), _planned(drafts[layout])) for layout, names in kinds.items())


def best_plan(job: Job, constraints: LayoutConstraints) -> Plan | None:
    """The first plan of `plan`, without reasons. None if nothing fits."""
    job, _ = advice.runnable_job(job)
    job, _ = advice.reachable_batch(job, constraints)
    for limit_gib in (memory_limit_gib(job, MIN_FIT, 0.0), job.cluster.gpu.memory_gib):
        ranked = rank(job, constraints, "throughput", SIMULATED_AT_LEAST, limit_gib * GIB)
        if ranked.score:
            best = [(score, ranked, row) for row, score in enumerate(ranked.score)]
            simulated = _simulate(best, 1, limit_gib, "recompute" not in constraints.fixed)
            return _planned(min(simulated, key=lambda draft: _score(draft, "throughput")))
    return None


def explained(
    plans: Sequence[Plan], *, objective: Objective = "throughput", fix: Sequence[str] = (), forbid: Sequence[str] = ()
) -> list[Plan]:
    """The same plans, best first, with reasons: the winner's three steps and neighbours, what each other costs against it."""
    winner, *others = [(plan.job, plan.layout, plan.estimate) for plan in plans]
    rejected = reasons.neighbours(*winner)
    why = reasons.of_winner(*winner, rejected, objective, LayoutConstraints.parse(fix, forbid))
    found = [plans[0].model_copy(update={"reasons": why, "rejected": rejected})]
    for plan, other in zip(plans[1:], others, strict=True):
        found.append(plan.model_copy(update={"reasons": reasons.against_winner(winner, other, objective)}))
    return found


def _ranked(
    jobs: Sequence[Job],
    constraints: LayoutConstraints,
    objective: Objective,
    top: int,
    limit_gib: float,
    with_alternatives: bool,
    say: Callable[[str], None],
) -> list[RankedLayouts]:
    found = []
    for job in jobs:
        say(f"searching {job.cluster.label}")
        keep = max(4 * top, KEPT_AT_LEAST)
        found.append(rank(job, constraints, objective, keep, limit_gib * GIB, with_alternatives))
    return found


def _simulate(
    best: list[tuple[float, RankedLayouts, int]], top: int, limit_gib: float, recomputes_less: bool
) -> list[DraftEstimate]:
    """The first that fit by the exact count, at least `top` that differ in more than virtual stages, all in one simulation;
    those that do not fit, if none does. `recomputes_less`: those that recompute do so in no more layers than they must.
    """
    candidates = _limit_variants(best)
    fitting: list[MemoryDraft] = []
    over: list[MemoryDraft] = []
    while candidates:
        rows = len({_row_key(one.view.job, one.view.layout) for one in fitting})
        count = max(top - rows, SIMULATED_AT_LEAST - len(fitting))
        if count <= 0:
            break
        for found in memory_drafts_of_jobs(candidates[:count]):
            (fitting if found.peak_gib <= limit_gib else over).append(found)
        candidates = candidates[count:]
    return add_times((fewest_recomputed(fitting, limit_gib) if recomputes_less else fitting) or over)


def _row_key(job: Job, layout: Layout) -> tuple[object, ...]:
    """Layouts with the same key differ in virtual stages alone, and in the layers of each that recompute."""
    return (job.cluster.gpus, *(value for name, value in layout if name not in ("virtual_stages", "recompute_layers")))


def _limit_variants(best: list[tuple[float, RankedLayouts, int]]) -> list[tuple[Job, Layout]]:
    """In their order, without more than `MAX_VARIANTS` that differ in virtual stages alone, and without those in which another
    recomputation changes nothing: in fp8, fused blocks keep nothing that `selective` would drop.
    """
    number: Counter[tuple[object, ...]] = Counter()
    times: dict[Layout, float] = {}
    kept = []
    for score, ranked, row in best:
        job, layout = ranked.job, ranked.rows.layout(row)
        key, alike = _row_key(job, layout), layout.model_copy(update={"recompute": "none"})
        if alike in times and math.isclose(times[alike], score, rel_tol=SAME_TIME_TOLERANCE):
            continue
        times[alike] = score
        number[key] += 1
        if number[key] <= MAX_VARIANTS:
            kept.append((job, layout))
    return kept


def _rows(simulated: list[DraftEstimate]) -> list[list[DraftEstimate]]:
    """Drafts, best first, in rows of one layout and its variants."""
    rows: dict[tuple[object, ...], list[DraftEstimate]] = {}
    for draft in simulated:
        rows.setdefault(_row_key(draft.view.job, draft.view.layout), []).append(draft)
    return list(rows.values())


def _score(predicted: DraftEstimate, objective: Objective) -> tuple[float, ...]:
    if objective == "memory":
        return (predicted.peak_gib, predicted.step_time_s)
    if objective == "cost":
        return (predicted.view.job.cluster.gpus / predicted.tokens_per_s, predicted.peak_gib)
    return (predicted.step_time_s, predicted.peak_gib)
