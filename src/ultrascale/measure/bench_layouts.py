"""`bench layouts`: measure a plan's layout with one field changed at a time, or the planner's best layouts, on this machine.

Words become candidates that the engine can run; `Sweep` claims one after the other from a study (bench_layouts_study.py), runs
it (bench_trial.py) and stores the result, until none waits or the budget is spent.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ultrascale.cost.columns import CHOICES
from ultrascale.cost.estimate import estimate
from ultrascale.measure import bench_trial
from ultrascale.measure.bench_trial import TrialFailure, TrialResult, TrialStep
from ultrascale.plan.search import plan as search
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError, divisors, nearest
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.layout import DEGREES, Layout, field_value
from ultrascale.specs.plan import Plan
from ultrascale.specs.validate import shown
from ultrascale.train import supported
from ultrascale.train.request import Overrides, Request, from_plan

if TYPE_CHECKING:
    from ultrascale.measure.bench_layouts_study import Study

VARIED = tuple(name for name in Layout.model_fields if name not in ("etp", "zero_shards", "recompute_layers", "offload"))
MOST_ON_CPU = 16  # processes that a plan may start here without --nproc
MOST_VALUES = 8
SEARCHED = 4  # layouts of the search for each that is measured: the engine does not run every layout
TRIALS = "trials"
BUDGET = "the budget was spent"
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|m|min|h)?\s*\Z", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600}
TrialState = Literal["waiting", "running", "measured", "stopped early", "failed"]


@dataclass(frozen=True)
class LayoutCandidate:
    """One layout to measure, named by what distinguishes it: `tp=2`, or its rank in the planner's list."""

    name: str
    request: Request
    predicted: Estimate | None

    @property
    def layout(self) -> Layout:
        return self.request.layout


@dataclass(frozen=True)
class CandidateSet:
    """All candidates of one call; the first is the plan's own layout, or the planner's first choice."""

    base: Request
    candidates: tuple[LayoutCandidate, ...]
    left_out: tuple[str, ...] = ()
    """layouts that cannot run, and why"""
    ranked: bool = False
    """by the planner; False: one field changed at a time"""


@dataclass(frozen=True)
class TrialRecord:
    """The stored trial of one layout."""

    number: int
    state: TrialState
    tokens_per_s: float | None = None
    """measured; the median of its steps if it was stopped early"""
    tensors_gib: float | None = None
    """at the peak of the fullest rank"""
    kind: str = ""
    reason: str = ""
    """why it failed, or was stopped"""
    seconds: float | None = None
    folder: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ("measured", "stopped early", "failed")

    @property
    def finished(self) -> bool:
        """Ended by itself, so that it is not run again."""
        return self.ended and self.kind != "interrupted"


NOT_OFFERED = TrialRecord(-1, "waiting")


@dataclass(frozen=True)
class TrialRow:
    candidate: LayoutCandidate
    record: TrialRecord = NOT_OFFERED


@dataclass(frozen=True)
class SweepVerdict:
    winner: TrialRow
    first: TrialRow
    regret: float | None
    """tokens/s of the winner over those of the first, minus one; None: the first was not timed"""


def base_request(plan: Plan, nproc: int | None, steps: int, gpus: int) -> Request:
    """The plan on this machine, for some steps on random tokens, without checkpoints."""
    world = nproc or plan.layout.gpus
    if gpus and world > gpus:
        raise SpecError(f"{world} processes are asked for but this machine shows {gpus} GPUs: try --nproc {gpus}")
    if not gpus and nproc is None and world > MOST_ON_CPU:
        raise SpecError(f"the plan has {world:,} GPUs and this machine has none: say how many processes, such as --nproc 2")
    changes = Overrides(train={"steps": steps, "data": "synthetic", "warmup_steps": 0}, checkpoint={"save": False})
    return from_plan(plan, changes, world, gpu=bool(gpus))


def varied(plan: Plan, base: Request, words: str, cluster: Cluster | None) -> CandidateSet:
    """Change one field at a time; dp and gas follow, so that processes and batch stay."""
    changes = [(name, value) for name, values in _requested(words, base) for value in values]
    found = {base.layout: _candidate("the plan", base, cluster)}
    left_out = []
    for name, value in changes:
        if value == getattr(base.layout, name):
            continue
        word = f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        try:
            changed = from_plan(
                plan.model_copy(update={"job": base.job, "layout": base.layout}),
                Overrides(layout={name: value}),
                base.layout.gpus,
                base.training,
            )
        except SpecError as error:
            left_out.append(f"{word}: {str(error).split('. Layouts of')[0].split('; with ')[0]}")
            continue
        if changed.layout not in found:
            found[changed.layout] = _candidate(word, replace(base, layout=changed.layout), cluster)
    return CandidateSet(base, tuple(found.values()), tuple(left_out))


def _requested(words: str, base: Request) -> Iterator[tuple[str, list[Any]]]:
    """The fields of `tp,mbs=1:2:4`, each with its values."""
    parts = [word.strip() for word in words.split(",") if word.strip()]
    if not parts:
        raise SpecError("--vary names no field of the layout: try --vary tp,mbs,recompute")
    for word in parts:
        name, equals, given = word.partition("=")
        if name not in VARIED:
            raise SpecError(f"--vary is {shown(words)}: {nearest(name, VARIED)}, such as --vary tp,mbs or --vary mbs=1:2:4")
        yield name, [field_value(name, text, "--vary") for text in given.split(":")] if equals else _values(name, base)


def _values(name: str, base: Request) -> list[Any]:
    """All values of a field; whether the engine runs them is checked later."""
    if name in DEGREES:
        return divisors(base.layout.gpus)
    if name in ("mbs", "gas"):
        each = base.job.sequences // base.layout.dp
        return [size for size in (2**power for power in range(30)) if each % size == 0][:MOST_VALUES]
    if name == "zero":
        return [0, 1, 2, 3]
    if name == "virtual_stages":
        return [1, 2, 4]
    return list(CHOICES.get(name, (True, False)))


def ranked(base: Request, cluster: Cluster, top: int) -> CandidateSet:
    """The planner's best layouts for the plan's job on this machine that the engine runs, best first."""
    here = base.on_cluster(cluster)
    result = search(here.job, top=top * SEARCHED, explain=False)
    if not result.plans:
        raise SpecError(f"nothing fits: no layout of {here.job.model.name} on {cluster.label}, by the estimate")
    found: list[LayoutCandidate] = []
    left_out: list[str] = []
    for plan in result.plans:
        problem = supported.layout_problem(here.job, plan.layout, base.training)
        if problem is not None:
            left_out.append(f"{plan.layout}: {problem}")
        elif len(found) < top:
            found.append(LayoutCandidate(f"#{len(found) + 1}", replace(base, layout=plan.layout), plan.estimate))
    if not found:
        raise SpecError(f"the engine runs none of the planner's best {len(result.plans)} layouts: {left_out[0]}")
    return CandidateSet(base, tuple(found), tuple(left_out[:top]), ranked=True)


def _candidate(name: str, request: Request, cluster: Cluster | None) -> LayoutCandidate:
    predicted = None if cluster is None else estimate(request.on_cluster(cluster).job, request.layout)
    return LayoutCandidate(name, request, predicted)


class Sweep:
    """Runs the candidates of one call through one study."""

    def __init__(
        self,
        candidate_set: CandidateSet,
        study: Study,
        out: Path,
        cluster: Cluster | None,
        limit_s: float,
        budget_s: float | None = None,
        changed: Callable[[Sweep], None] = lambda sweep: None,
    ) -> None:
        """`changed` is called with the sweep after every read of its trials."""
        self.candidate_set, self.study, self.out, self.cluster, self.changed = candidate_set, study, out, cluster, changed
        self.limit_s, self.budget_s = limit_s, budget_s
        self.by_layout = {one.layout: one for one in candidate_set.candidates}
        self.started = time.monotonic()
        self.spent: list[float] = []
        self.records: dict[Layout, TrialRecord] = {}
        self.doing, self.step = "", 0  # the trial that runs, and its last step

    def run(self) -> tuple[TrialRow, ...]:
        """Measure what waits. Trials of other processes, and those without budget, stay in the rows as they are."""
        self.study.offer(self.candidate_set.candidates, pruned_is_done=self.candidate_set.ranked)
        self._read_records()
        while self._time_for_another():
            claimed = self.study.claim(self.by_layout)
            if claimed is None:
                break
            layout, number = claimed
            self._run_trial(self.by_layout[layout], number)
            self._read_records()
        return self.rows

    @property
    def rows(self) -> tuple[TrialRow, ...]:
        return tuple(TrialRow(one, self.records.get(one.layout, NOT_OFFERED)) for one in self.candidate_set.candidates)

    @property
    def eta_s(self) -> float | None:
        """None: nothing has been timed yet."""
        if not self.spent:
            return None
        eta_s, left = statistics.mean(self.spent) * sum(not row.record.finished for row in self.rows), self._left()
        return eta_s if left is None else max(0.0, min(eta_s, left))

    def _read_records(self) -> None:
        self.records = self.study.records()
        self.doing, self.step = "", 0
        self.changed(self)

    def _run_trial(self, candidate: LayoutCandidate, number: int) -> None:
        folder = self._folder(number)
        began = last_beat = time.monotonic()
        self.doing = candidate.name

        def on_steps(steps: list[TrialStep]) -> bool:
            nonlocal last_beat
            if time.monotonic() - last_beat > self.study.beat_s:
                last_beat = time.monotonic()
                self.study.beat(number)
            self.step = steps[-1].number if steps else self.step
            self.changed(self)
            return self.study.report(number, steps) and self.candidate_set.ranked

        left = self._left()
        limit = self.limit_s if left is None else min(self.limit_s, left)
        try:
            ended = bench_trial.run(candidate.request, folder, self.cluster, limit, on_steps)
        except KeyboardInterrupt:
            self.study.finish(number, TrialFailure("interrupted", "stopped by Ctrl-C"), time.monotonic() - began, folder)
            self._read_records()
            raise
        if limit < self.limit_s and isinstance(ended, TrialFailure) and ended.kind == "timed out":
            ended = TrialFailure("interrupted", BUDGET)
        took_s = time.monotonic() - began
        try:
            self.study.finish(number, ended, took_s, folder)
        except RunError as error:
            if isinstance(ended, TrialResult):
                error.args = (f"{error}. The last trial's figures are in {folder}",)
            raise
        self.spent.append(took_s)

    def _folder(self, number: int) -> Path:
        """A new one: an earlier study that was deleted may have left folders."""
        names = (f"{number:03d}{suffix}" for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))))
        return next(place for name in names if not (place := self.out / TRIALS / name).exists())

    def _left(self) -> float | None:
        return None if self.budget_s is None else self.budget_s - (time.monotonic() - self.started)

    def _time_for_another(self) -> bool:
        """Whether the budget suffices for a trial of mean length; for the first, whether any is left."""
        left = self._left()
        return left is None or left > (statistics.mean(self.spent) if self.spent else 0.0)


def verdict(rows: tuple[TrialRow, ...]) -> SweepVerdict | None:
    """None: nothing was measured to its end."""
    done = [row for row in rows if row.record.state == "measured"]
    if not done:
        return None
    best, first = max(done, key=lambda row: row.record.tokens_per_s or 0.0), rows[0]
    rates = best.record.tokens_per_s or 0.0, first.record.tokens_per_s
    return SweepVerdict(best, first, rates[0] / rates[1] - 1 if rates[1] else None)


def winning_plan(candidate_set: CandidateSet, winner: LayoutCandidate, cluster: Cluster | None) -> Plan:
    """The fastest as a plan for this machine, or for the plan's own where this one's rates are not known."""
    request = candidate_set.base if cluster is None else candidate_set.base.on_cluster(cluster)
    predicted = winner.predicted or estimate(request.job, winner.layout)
    return Plan(job=request.job, layout=winner.layout, estimate=predicted)


def duration(text: str, flag: str) -> float:
    """`30m`, `90s`, `1.5h`, or seconds."""
    match = _DURATION.match(text)
    if match is None or not float(match[1]):
        raise SpecError(f"{flag} is {shown(text)} but must be a time with s, m or h after it, such as 30m")
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def import_optuna() -> None:
    try:
        import optuna
    except ModuleNotFoundError as missing:
        raise SpecError(
            f"bench layouts keeps its trials with optuna, and {missing.name} is not installed: try pip install "
            "'ultrascale[bench]'"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
