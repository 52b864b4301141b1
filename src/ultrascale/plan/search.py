"""The search: every legal layout, pruned by memory, timed in closed form; the best are simulated before they are ranked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ultrascale.cost import table
from ultrascale.cost.columns import Array
from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import Machine
from ultrascale.plan import advice, reasons
from ultrascale.plan.candidates import Wishes, cores, why_empty
from ultrascale.plan.objective import OBJECTIVES, Objective
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Neighbour, Plan
from ultrascale.specs.units import GIB

# Closed forms and simulator differ by some percent (schedules/closed.py), so more than asked for are simulated, and more
# than that are kept for those that the exact memory count then puts just over the edge.
SIMULATED_AT_LEAST = 24
KEPT_AT_LEAST = 240
MOST = 1000  # every plan shown is simulated: ten to sixty milliseconds each


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


@dataclass(frozen=True)
class _Ranked:
    job: Job
    layouts: list[Layout]
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
) -> Result:
    """Rank every legal layout of the job. `fix` and `forbid` are texts such as `tp=8`, `cp`, `recompute=full`.

    `throughput`: fastest step. `memory`: least peak. `cost`: fewest GPU-seconds per token, on this cluster or on a part of it.
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
    best = sorted(((s, r.job, x) for r in ranked for s, x in zip(r.score, r.layouts, strict=True)), key=lambda t: t[0])
    wanted = max(top, SIMULATED_AT_LEAST)
    say(f"simulating the best {min(wanted, len(best))} of {evaluated:,}")
    simulated = _simulate(best, wanted)
    simulated.sort(key=lambda entry: _score(entry[0], entry[2], objective))
    simulated = simulated[:top]
    winner, *others = simulated
    rejected: tuple[Neighbour, ...] = ()
    why: tuple[str, ...] = ()
    if explain:
        say("explaining the winner")
        rejected = reasons.neighbours(*winner)
        why = reasons.of_winner(*winner, rejected, objective, wishes)
    plans = [Plan(job=winner[0], layout=winner[1], estimate=winner[2], reasons=why, rejected=rejected)]
    for other in others:
        why = reasons.against_winner(winner, other, objective) if explain else ()
        plans.append(Plan(job=other[0], layout=other[1], estimate=other[2], reasons=why))
    notes += advice.batch_notes(job, plans[0].layout)
    return Result(job, tuple(plans), evaluated, fitting, time.perf_counter() - started, tuple(notes))


def _simulate(best: list[tuple[float, Job, Layout]], wanted: int) -> list[tuple[Job, Layout, Estimate]]:
    """The first `wanted` that fit by the exact count; all of them, if none does."""
    fitting: list[tuple[Job, Layout, Estimate]] = []
    over: list[tuple[Job, Layout, Estimate]] = []
    for _, job, layout in best:
        predicted = estimate(job, layout)
        (fitting if predicted.fits else over).append((job, layout, predicted))
        if len(fitting) == wanted:
            break
    return fitting or over


def _score(job: Job, predicted: Estimate, objective: Objective) -> tuple[float, ...]:
    if objective == "memory":
        return (predicted.peak_gib, predicted.step_time_s)
    if objective == "cost":
        return (job.cluster.gpus / predicted.tokens_per_s, predicted.peak_gib)
    return (predicted.step_time_s, predicted.peak_gib)


def _rank(job: Job, wishes: Wishes, objective: Objective, keep: int) -> _Ranked:
    machine = Machine(job)
    capacity = job.cluster.gpu.memory_gib * GIB
    found: list[tuple[float, Layout]] = []
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
        rows = cells.layouts(np.asarray(core), np.asarray(variant))
        found += [(float(score[c, v]), rows.layout(i)) for i, (c, v) in enumerate(zip(core, variant, strict=True))]
    found.sort(key=lambda pair: pair[0])
    found = found[:keep]
    return _Ranked(job, [x for _, x in found], [s for s, _ in found], evaluated, fitting, smallest)


def _cell(cells: table.Table, score: Array) -> Layout:
    core, variant = np.unravel_index(int(np.argmin(score)), score.shape)
    return cells.layouts(np.asarray([core]), np.asarray([variant])).layout(0)
