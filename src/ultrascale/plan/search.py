"""The search: every legal layout, pruned by memory, timed in closed form; the best are simulated before they are ranked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ultrascale.cost.estimate import DraftEstimate, StageFill, add_times, full_estimate, memory_drafts, memory_limit_gib
from ultrascale.cost.legality import check
from ultrascale.plan import advice, reasons
from ultrascale.plan.candidates import OBJECTIVES, LayoutConstraints, Objective, RankedLayouts, fastest, rank, why_empty
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB

# Closed forms and simulator differ by some percent (schedules/formulas.py), so more than asked for are simulated, and more
# than that are kept for those that the exact memory count then puts just over the edge.
SIMULATED_AT_LEAST = 24
KEPT_AT_LEAST = 240
MOST = 1000  # every plan shown is simulated and described: some milliseconds each


@dataclass(frozen=True)
class Result:
    """The best plans, best first; how many layouts were evaluated, in how many seconds; what the user should know."""

    job: Job
    plans: tuple[Plan, ...]
    evaluated: int
    fitting: int
    seconds: float
    notes: tuple[str, ...] = ()
    no_fit: advice.NoFit | None = None


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
    min_fit: float = advice.MIN_FIT,
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
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= MOST:
        raise SpecError(f"top is {top!r} but must be a whole number from 1 to {MOST}, such as 10")
    started = time.perf_counter()
    constraints = LayoutConstraints.parse(fix, forbid)
    say = progress or (lambda _: None)
    job, notes = advice.runnable_job(job)
    job, more = advice.reachable_batch(job, constraints)
    notes += more
    jobs = advice.smaller_clusters(job) if objective == "cost" else [job]
    limit_gib = memory_limit_gib(job, min_fit, min_free_gib)
    ranked = _ranked(jobs, constraints, objective, top, limit_gib, say)
    evaluated, fitting = sum(r.evaluated for r in ranked), sum(r.fitting for r in ranked)
    if not evaluated:
        raise SpecError(why_empty(job, constraints))
    if not fitting:
        limit_gib = job.cluster.gpu.memory_gib - min_free_gib
        ranked = _ranked(jobs, constraints, objective, top, limit_gib, say)
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
    wanted = max(top, SIMULATED_AT_LEAST)
    say(f"simulating the best {min(wanted, len(best))} of {evaluated:,}")
    simulated = _simulate(best, wanted, limit_gib)
    simulated.sort(key=lambda draft: _score(draft, objective))
    plans = [Plan(job=draft.view.job, layout=draft.view.layout, estimate=full_estimate(draft)) for draft in simulated[:top]]
    notes += advice.batch_notes(job, plans[0].layout)
    if explain:
        say("explaining the winner")
        plans = explained(plans, objective=objective, fix=fix, forbid=forbid)
    return Result(job, tuple(plans), evaluated, fitting, time.perf_counter() - started, tuple(notes))


def best_plan(job: Job, constraints: LayoutConstraints) -> Plan | None:
    """The first plan of `plan`, without reasons, several times faster: slower layouts are not counted. None if nothing fits."""
    job, _ = advice.runnable_job(job)
    job, _ = advice.reachable_batch(job, constraints)
    for limit_gib in (memory_limit_gib(job, advice.MIN_FIT, 0.0), job.cluster.gpu.memory_gib):
        ranked = fastest(job, constraints, SIMULATED_AT_LEAST, limit_gib * GIB)
        if ranked.score:
            best = [(score, ranked, row) for row, score in enumerate(ranked.score)]
            first = min(_simulate(best, SIMULATED_AT_LEAST, limit_gib), key=lambda draft: _score(draft, "throughput"))
            return Plan(job=job, layout=first.view.layout, estimate=full_estimate(first))
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
    say: Callable[[str], None],
) -> list[RankedLayouts]:
    found = []
    for job in jobs:
        say(f"searching {job.cluster.label}")
        found.append(rank(job, constraints, objective, max(4 * top, KEPT_AT_LEAST), limit_gib * GIB))
    return found


def _simulate(best: list[tuple[float, RankedLayouts, int]], wanted: int, limit_gib: float) -> list[DraftEstimate]:
    """The first `wanted` that fit by the exact count, all in one simulation; every one of them, if none does."""
    fitting: list[StageFill] = []
    over: list[StageFill] = []
    while best and len(fitting) < wanted:
        count = wanted - len(fitting)
        for found in _memory_drafts([(ranked.job, ranked.rows.layout(row)) for _, ranked, row in best[:count]]):
            (fitting if found.peak_gib <= limit_gib else over).append(found)
        best = best[count:]
    return add_times(fitting or over)


def _memory_drafts(layouts: list[tuple[Job, Layout]]) -> list[StageFill]:
    """In the order given; those of one cluster together."""
    found: dict[int, StageFill] = {}
    for job in {id(job): job for job, _ in layouts}.values():
        numbers = [number for number, (one, _) in enumerate(layouts) if one is job]
        found.update(zip(numbers, memory_drafts(job, [layouts[number][1] for number in numbers]), strict=True))
    return [found[number] for number in range(len(layouts))]


def _score(predicted: DraftEstimate, objective: Objective) -> tuple[float, ...]:
    if objective == "memory":
        return (predicted.peak_gib, predicted.step_time_s)
    if objective == "cost":
        return (predicted.view.job.cluster.gpus / predicted.tokens_per_s, predicted.peak_gib)
    return (predicted.step_time_s, predicted.peak_gib)
