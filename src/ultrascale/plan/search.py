"""The search: every legal layout, pruned by memory, timed in closed form; the best are simulated before they are ranked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ultrascale.cost import table
from ultrascale.cost.columns import NAMES, Array, Columns
from ultrascale.cost.estimate import Draft, drafts, whole
from ultrascale.cost.hardware import Machine
from ultrascale.cost.legality import check
from ultrascale.plan import advice, reasons
from ultrascale.plan.candidates import Wishes, cores, why_empty
from ultrascale.plan.objective import OBJECTIVES, Objective
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import GIB

# Closed forms and simulator differ by some percent (schedules/closed.py), so more than asked for are simulated, and more
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


class Previewed(NamedTuple):
    """A layout that fits and how long its step takes, by closed forms."""

    layout: Layout
    step_time_s: float


@dataclass(frozen=True)
class _Ranked:
    job: Job
    rows: Columns
    """the best, best first"""
    score: list[float]
    evaluated: int
    fitting: int
    smallest: tuple[float, Layout] | None
    """the least peak in bytes, and whose it is: what is said when nothing fits"""


def plan(
    job: Job,
    *,
    top: int = 10,
    objective: Objective = "throughput",
    fix: Sequence[str] = (),
    forbid: Sequence[str] = (),
    explain: bool = True,
    progress: Callable[[str], None] | None = None,
    preview: Callable[[list[Previewed]], None] | None = None,
) -> Result:
    """Rank every legal layout of the job. `fix` and `forbid` are texts such as `tp=8`, `cp`, `recompute=full`.

    `throughput`: fastest step. `memory`: least peak. `cost`: fewest GPU-seconds per token, on this cluster or on a part of it.
    `preview` is shown the first `top` by closed forms, before the best are simulated, where the fastest are asked for.
    """
    if objective not in OBJECTIVES:
        raise SpecError(f"objective is '{objective}': {nearest(str(objective), OBJECTIVES)} (one of {', '.join(OBJECTIVES)})")
    if isinstance(top, bool) or not isinstance(top, int) or not 1 <= top <= MOST:
        raise SpecError(f"top is {top!r} but must be a whole number from 1 to {MOST}, such as 10")
    started = time.perf_counter()
    wishes = Wishes.parse(fix, forbid)
    say = progress or (lambda _: None)
    job, notes = advice.reachable_batch(job, wishes)
    jobs = advice.smaller_clusters(job) if objective == "cost" else [job]
    ranked = []
    for one in jobs:
        say(f"searching {one.cluster.label}")
        ranked.append(_rank(one, wishes, objective, max(4 * top, KEPT_AT_LEAST)))
    evaluated, fitting = sum(r.evaluated for r in ranked), sum(r.fitting for r in ranked)
    if not evaluated:
        raise SpecError(why_empty(job, wishes))
    if not fitting:
        smallest = min((r.smallest for r in ranked if r.smallest), key=lambda pair: pair[0])
        say("nothing fits: looking for the cheapest change that does")
        found = advice.no_fit(job, wishes, smallest[0], smallest[1])
        return Result(job, (), evaluated, 0, time.perf_counter() - started, tuple(notes), found)
    best = sorted(((score, r, row) for r in ranked for row, score in enumerate(r.score)), key=lambda entry: entry[0])
    if preview is not None and objective == "throughput":
        shown = [Previewed(ranked.rows.layout(row), score) for score, ranked, row in best[:top]]
        check(job, shown[0].layout)  # wishes may contradict each other beyond what candidates know
        preview(shown)
    wanted = max(top, SIMULATED_AT_LEAST)
    say(f"simulating the best {min(wanted, len(best))} of {evaluated:,}")
    simulated = _simulate(best, wanted)
    simulated.sort(key=lambda draft: _score(draft, objective))
    plans = [Plan(job=draft.view.job, layout=draft.view.layout, estimate=whole(draft)) for draft in simulated[:top]]
    notes += advice.batch_notes(job, plans[0].layout)
    if explain:
        say("explaining the winner")
        plans = explained(plans, objective=objective, fix=fix, forbid=forbid)
    return Result(job, tuple(plans), evaluated, fitting, time.perf_counter() - started, tuple(notes))


def explained(
    plans: Sequence[Plan], *, objective: Objective = "throughput", fix: Sequence[str] = (), forbid: Sequence[str] = ()
) -> list[Plan]:
    """The same plans, best first, with reasons: the winner's three steps and neighbours, what each other costs against it."""
    winner, *others = [(plan.job, plan.layout, plan.estimate) for plan in plans]
    rejected = reasons.neighbours(*winner)
    why = reasons.of_winner(*winner, rejected, objective, Wishes.parse(fix, forbid))
    found = [plans[0].model_copy(update={"reasons": why, "rejected": rejected})]
    for plan, other in zip(plans[1:], others, strict=True):
        found.append(plan.model_copy(update={"reasons": reasons.against_winner(winner, other, objective)}))
    return found


def _simulate(best: list[tuple[float, _Ranked, int]], wanted: int) -> list[Draft]:
    """The first `wanted` that fit by the exact count; all of them, if none does."""
    fitting: list[Draft] = []
    over: list[Draft] = []
    while best and len(fitting) < wanted:
        count = wanted - len(fitting)
        for predicted in _drafts([(ranked.job, ranked.rows.layout(row)) for _, ranked, row in best[:count]]):
            (fitting if predicted.fits else over).append(predicted)
        best = best[count:]
    return fitting or over


def _drafts(asked: list[tuple[Job, Layout]]) -> list[Draft]:
    """In the order asked; those of one cluster together."""
    found: dict[int, Draft] = {}
    for job in {id(job): job for job, _ in asked}.values():
        numbers = [number for number, (one, _) in enumerate(asked) if one is job]
        found.update(zip(numbers, drafts(job, [asked[number][1] for number in numbers]), strict=True))
    return [found[number] for number in range(len(asked))]


def _score(predicted: Draft, objective: Objective) -> tuple[float, ...]:
    if objective == "memory":
        return (predicted.peak_gib, predicted.step_time_s)
    if objective == "cost":
        return (predicted.view.job.cluster.gpus / predicted.tokens_per_s, predicted.peak_gib)
    return (predicted.step_time_s, predicted.peak_gib)


def _rank(job: Job, wishes: Wishes, objective: Objective, keep: int) -> _Ranked:
    machine = Machine(job)
    capacity = job.cluster.gpu.memory_gib * GIB
    scores, rows = [np.zeros(0)], [Columns.of([])]
    evaluated = fitting = 0
    smallest: tuple[float, Layout] | None = None
    for group in cores(job, wishes):
        cells = table.evaluate(job, group.columns, group.variants, machine, capacity)
        evaluated += int(cells.legal.sum())
        finite = np.isfinite(cells.step_s)
        fitting += int(finite.sum())
        least = np.where(cells.legal, cells.peak_bytes, np.inf)
        if cells.legal.any() and (smallest is None or least.min() < smallest[0]):
            smallest = (float(least.min()), _cell(cells, least))
        if not finite.any():
            continue
        if objective == "memory":
            score = np.where(finite, cells.peak_bytes, np.inf)
        else:
            score = cells.step_s * (job.cluster.gpus if objective == "cost" else 1.0)
        count = min(keep, int(finite.sum()))
        flat = np.argpartition(score, count - 1, axis=None)[:count]
        core, variant = np.unravel_index(flat, score.shape)
        rows.append(cells.layouts(np.asarray(core), np.asarray(variant)))
        scores.append(score[core, variant])
    together = np.concatenate(scores)
    first = np.argsort(together, kind="stable")[:keep]
    found = Columns.from_mapping({name: np.concatenate([getattr(part, name) for part in rows])[first] for name in NAMES})
    return _Ranked(job, found, together[first].tolist(), evaluated, fitting, smallest)


def _cell(cells: table.Table, score: Array) -> Layout:
    core, variant = np.unravel_index(int(np.argmin(score)), score.shape)
    return cells.layouts(np.asarray([core]), np.asarray([variant])).layout(0)
