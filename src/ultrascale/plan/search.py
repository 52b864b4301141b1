"""The search: every legal layout, pruned by memory, timed in closed form; the best are simulated before they are ranked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ultrascale.cost import table
from ultrascale.cost.columns import NAMES, Array, LayoutColumns
from ultrascale.cost.estimate import DraftEstimate, StageFill, held, timed, whole
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.legality import check
from ultrascale.plan import advice, reasons
from ultrascale.plan.candidates import OBJECTIVES, LayoutConstraints, Objective, cores, why_empty
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


@dataclass(frozen=True)
class _Ranked:
    job: Job
    rows: LayoutColumns
    """the best, best first"""
    score: list[float]
    evaluated: int
    fitting: int


def plan(
    job: Job,
    *,
    top: int = 10,
    objective: Objective = "throughput",
    fix: Sequence[str] = (),
    forbid: Sequence[str] = (),
    explain: bool = True,
    progress: Callable[[str], None] | None = None,
    preview: Callable[[list[LayoutPreview]], None] | None = None,
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
    wishes = LayoutConstraints.parse(fix, forbid)
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
        say("nothing fits: looking for the cheapest change that does")
        smallest = [found for found in (_smallest(one, wishes) for one in jobs) if found]
        no_fit = advice.no_fit(job, wishes, *min(smallest, key=lambda pair: pair[0]))
        return Result(job, (), evaluated, 0, time.perf_counter() - started, tuple(notes), no_fit)
    best = sorted(((score, r, row) for r in ranked for row, score in enumerate(r.score)), key=lambda entry: entry[0])
    if preview is not None and objective == "throughput":
        shown = [LayoutPreview(ranked.rows.layout(row), score) for score, ranked, row in best[:top]]
        check(job, shown[0].layout)  # wishes may contradict each other beyond what candidates know
        preview(shown)
    wanted = max(top, SIMULATED_AT_LEAST)
    say(f"simulating the best {min(wanted, len(best))} of {evaluated:,}")
    simulated = _simulate(best, wanted)
    simulated.sort(key=lambda draft: _score(draft, objective))
    plans = [Plan(job=draft.view.job, layout=draft.view.layout, estimate=whole(draft)) for draft in simulated[:top]]
    notes += advice.batch_notes(job, plans[0].layout)
    notes += advice.engine_notes(plans[0].job, plans[0].layout)
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
    why = reasons.of_winner(*winner, rejected, objective, LayoutConstraints.parse(fix, forbid))
    found = [plans[0].model_copy(update={"reasons": why, "rejected": rejected})]
    for plan, other in zip(plans[1:], others, strict=True):
        found.append(plan.model_copy(update={"reasons": reasons.against_winner(winner, other, objective)}))
    return found


def _simulate(best: list[tuple[float, _Ranked, int]], wanted: int) -> list[DraftEstimate]:
    """The first `wanted` that fit by the exact count, all in one simulation; every one of them, if none does."""
    fitting: list[StageFill] = []
    over: list[StageFill] = []
    while best and len(fitting) < wanted:
        count = wanted - len(fitting)
        for found in _held([(ranked.job, ranked.rows.layout(row)) for _, ranked, row in best[:count]]):
            (fitting if found.fits else over).append(found)
        best = best[count:]
    return timed(fitting or over)


def _held(asked: list[tuple[Job, Layout]]) -> list[StageFill]:
    """In the order asked; those of one cluster together."""
    found: dict[int, StageFill] = {}
    for job in {id(job): job for job, _ in asked}.values():
        numbers = [number for number, (one, _) in enumerate(asked) if one is job]
        found.update(zip(numbers, held(job, [asked[number][1] for number in numbers]), strict=True))
    return [found[number] for number in range(len(asked))]


def _score(predicted: DraftEstimate, objective: Objective) -> tuple[float, ...]:
    if objective == "memory":
        return (predicted.peak_gib, predicted.step_time_s)
    if objective == "cost":
        return (predicted.view.job.cluster.gpus / predicted.tokens_per_s, predicted.peak_gib)
    return (predicted.step_time_s, predicted.peak_gib)


def _rank(job: Job, wishes: LayoutConstraints, objective: Objective, keep: int) -> _Ranked:
    machine = ClusterRates(job)
    capacity = job.cluster.gpu.memory_gib * GIB
    scores, rows = np.zeros(0), [LayoutColumns.of([])]
    evaluated = fitting = 0
    for group in cores(job, wishes):
        # Who is slower than as many as are kept is out; the least memory may be at any speed.
        enough = len(scores) >= keep and objective != "memory"
        longest_s = float(np.partition(scores, keep - 1)[keep - 1]) if enough else np.inf
        cells = table.evaluate(job, group.columns, group.variants, machine, capacity, longest_s)
        evaluated += int(cells.legal.sum())
        fitting += int(cells.fits.sum())
        score = np.where(cells.fits, cells.peak_bytes, np.inf) if objective == "memory" else cells.step_s
        core, variant = _least(score, keep)
        rows.append(cells.layouts(core, variant))
        scores = np.concatenate([scores, score[core, variant]])
    first = np.argsort(scores, kind="stable")[:keep]
    found = LayoutColumns.from_mapping({name: np.concatenate([getattr(part, name) for part in rows])[first] for name in NAMES})
    weight = job.cluster.gpus if objective == "cost" else 1.0
    return _Ranked(job, found, (weight * scores[first]).tolist(), evaluated, fitting)


def _least(score: Array, most: int) -> tuple[Array, Array]:
    """Cores and variants with the least finite scores, in the order of the table; more than `most` where the last are equal."""
    variant, core = np.nonzero(np.isfinite(score.T))
    found = score[core, variant]
    if len(found) > most:
        among = found <= np.partition(found, most - 1)[most - 1]
        core, variant = core[among], variant[among]
    order = np.lexsort((variant, core))
    return core[order], variant[order]


def _smallest(job: Job, wishes: LayoutConstraints) -> tuple[float, Layout] | None:
    """The least peak in bytes, and whose it is: what is said when nothing fits."""
    machine = ClusterRates(job)
    best: tuple[float, Layout] | None = None
    for group in cores(job, wishes):
        cells = table.evaluate(job, group.columns, group.variants, machine, np.inf, longest_s=0.0)
        core, variant = _least(np.where(cells.legal, cells.peak_bytes, np.inf), 1)
        if len(core) and (best is None or cells.peak_bytes[core[0], variant[0]] < best[0]):
            best = (float(cells.peak_bytes[core[0], variant[0]]), cells.layouts(core[:1], variant[:1]).layout(0))
    return best
