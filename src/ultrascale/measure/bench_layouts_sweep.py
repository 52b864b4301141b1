"""The sweep of `bench layouts`: claim a configuration, run it, tell the database, until none waits or the budget is spent."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ultrascale.measure import bench_trial as trial
from ultrascale.measure.bench_layouts import Asked, Configuration
from ultrascale.measure.bench_layouts_study import BEAT_S, Claimed, Record, Study
from ultrascale.measure.bench_trial import TrialFailure, TrialResult, TrialStep
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError

TRIALS = "trials"
BUDGET = "the budget was spent"


@dataclass(frozen=True)
class TrialRow:
    configuration: Configuration
    record: Record | None
    """None: not offered yet"""


@dataclass(frozen=True)
class TrialProgress:
    """Where a sweep stands, for whoever watches."""

    rows: tuple[TrialRow, ...]
    doing: str
    step: int
    of_steps: int
    eta_s: float | None
    """None: nothing has been timed yet"""

    @property
    def finished(self) -> int:
        return sum(row.record is not None and row.record.finished for row in self.rows)


@dataclass(frozen=True)
class RaceVerdict:
    """Who won, and what it would have cost to believe the first."""

    winner: TrialRow
    first: TrialRow
    regret: float | None
    """tokens/s of the winner over those of the first, less one; None: the first was not timed"""


def verdict(rows: tuple[TrialRow, ...]) -> RaceVerdict | None:
    """None: nothing was measured to its end."""
    done = [row for row in rows if row.record is not None and row.record.state == "measured"]
    if not done:
        return None
    best, first = max(done, key=_speed), rows[0]
    slowest = _speed(first)
    return RaceVerdict(best, first, _speed(best) / slowest - 1 if slowest else None)


def _speed(row: TrialRow) -> float:
    return (row.record.tokens_per_s if row.record is not None else None) or 0.0


class Sweep:
    """One call's configurations through one study."""

    def __init__(
        self,
        asked: Asked,
        study: Study,
        out: Path,
        cluster: Cluster | None,
        limit_s: float,
        budget_s: float | None = None,
        changed: Callable[[TrialProgress], None] = lambda progress: None,
    ) -> None:
        self.asked, self.study, self.out, self.cluster, self.changed = asked, study, out, cluster, changed
        self.limit_s, self.budget_s = limit_s, budget_s
        self.by_layout = {one.layout: one for one in asked.configurations}
        self.started = time.monotonic()
        self.spent: list[float] = []
        self.known: dict[Configuration, Record] = {}

    def run(self) -> tuple[TrialRow, ...]:
        """All that can be measured now; what another process measures, or the budget left over, is in the rows as it is."""
        self.study.offer(self.asked.configurations, stopped_count=self.asked.ranked)
        self._look_up()
        while self._time_for_another():
            claimed = self.study.claim(self.by_layout)
            if claimed is None:
                break
            layout, mine = claimed
            self._one(self.by_layout[layout], mine)
            self._look_up()
        return self.rows

    @property
    def rows(self) -> tuple[TrialRow, ...]:
        records = self.known
        return tuple(TrialRow(one, records.get(one)) for one in self.asked.configurations)

    def _look_up(self) -> None:
        records = self.study.records()
        self.known = {one: records[layout] for layout, one in self.by_layout.items() if layout in records}
        self.changed(self._progress("", 0))

    def _one(self, configuration: Configuration, mine: Claimed) -> None:
        folder = self._folder(mine.number)
        began, beat, done = time.monotonic(), time.monotonic(), 0

        def look(steps: list[TrialStep]) -> bool:
            nonlocal beat, done
            if time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                mine.beat()
            done = steps[-1].number if steps else done
            self.changed(self._progress(configuration.name, done))
            return mine.slower(steps) and self.asked.ranked

        left = self._left()
        limit = self.limit_s if left is None else min(self.limit_s, left)
        try:
            ended = trial.run(configuration.request, folder, self.cluster, limit, look)
        except KeyboardInterrupt:
            mine.tell(TrialFailure("interrupted", "stopped by Ctrl-C"), time.monotonic() - began, folder)
            self._look_up()
            raise
        if limit < self.limit_s and isinstance(ended, TrialFailure) and ended.kind == "timed out":
            ended = TrialFailure("interrupted", BUDGET)
        gone = time.monotonic() - began
        try:
            mine.tell(ended, gone, folder)
        except RunError as error:
            if isinstance(ended, TrialResult):
                error.args = (f"{error}. The last trial's figures are in {folder}",)
            raise
        self.spent.append(gone)

    def _folder(self, number: int) -> Path:
        """A new one, also where an earlier study that is gone has left some."""
        names = (f"{number:03d}{suffix}" for suffix in itertools.chain([""], (f"-{n}" for n in itertools.count(2))))
        return next(place for name in names if not (place := self.out / TRIALS / name).exists())

    def _left(self) -> float | None:
        return None if self.budget_s is None else self.budget_s - (time.monotonic() - self.started)

    def _time_for_another(self) -> bool:
        """Time for one like those before; for the first, any time at all."""
        left = self._left()
        return left is None or left > (statistics.mean(self.spent) if self.spent else 0.0)

    def _progress(self, doing: str, step: int) -> TrialProgress:
        rows = self.rows
        waiting = sum(row.record is None or not row.record.finished for row in rows)
        eta = statistics.mean(self.spent) * waiting if self.spent else None
        left = self._left()
        if eta is not None and left is not None:
            eta = max(0.0, min(eta, left))
        return TrialProgress(rows, doing, step, self.asked.base.training.steps, eta)
