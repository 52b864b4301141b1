"""What a rank's time went into, step by step: computing, exchanging, both, neither; whose exchanges stood in the open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ultrascale.measure.trace import names
from ultrascale.measure.trace.host import Copies, Launches, copies, launches
from ultrascale.measure.trace.intervals import Interval, Intervals, both, length, merged, within, without
from ultrascale.measure.trace.rank import RankTrace
from ultrascale.measure.trace.step_intervals import Exchange, StepIntervals, TracedPass, view
from ultrascale.specs.errors import SpecError

US = 1e-6


@dataclass(frozen=True)
class StepTime:
    """Seconds; the four parts add up to the step."""

    name: str
    step_s: float
    computing_s: float
    exchanging_s: float
    both_s: float
    neither_s: float
    optimizer_s: float
    """of computing"""


@dataclass(frozen=True)
class TechniqueTime:
    """One technique's exchanges in a mean step."""

    technique: str
    calls: float
    kinds: dict[str, float]
    """calls by kind"""
    time_s: float
    exposed_s: float
    """while nothing was computed; a moment of several techniques is counted for one"""


@dataclass(frozen=True)
class Reductions:
    """How gradients met in a mean step."""

    technique: str
    calls: float
    time_s: float
    exposed_s: float
    backward_s: float | None
    """of the backward that they could run behind"""
    bytes: float | None


@dataclass(frozen=True)
class RankTime:
    """What one trace tells."""

    file: str
    rank: int | None
    device: str
    events: int
    broken: str | None
    steps: tuple[StepTime, ...]
    techniques: tuple[TechniqueTime, ...]
    actions: tuple[tuple[TracedPass, ...], ...]
    """by step, in microseconds of the machine's clock"""
    reductions: Reductions | None
    launches: Launches | None
    copies: Copies | None
    run: dict[str, Any] | None = field(default=None)
    """what our own engine said of the run"""

    def mean(self, of: Callable[[StepTime], float]) -> float:
        return sum(map(of, self.steps)) / len(self.steps)


def analyse(trace: RankTrace) -> RankTime:
    seen = view(trace)
    if not seen.steps:
        raise SpecError(f"--trace {trace.path} marks steps in which nothing ran: profile steps that compute")
    inside = [window for _, window in seen.steps]
    count = len(inside)
    exchanging = merged((one.start, one.end) for one in seen.exchanges)
    return RankTime(
        file=str(trace.path),
        rank=trace.rank,
        device="gpu" if trace.on_gpu else "cpu",
        events=trace.events,
        broken=trace.broken,
        steps=tuple(_step(name, window, seen, exchanging) for name, window in seen.steps),
        techniques=_techniques(seen, inside),
        actions=tuple(_actions(seen, window, trace.origin_us) for window in inside),
        reductions=_reductions(seen, inside),
        launches=launches(trace, inside) if trace.on_gpu else None,
        copies=copies(trace, inside, count) if trace.on_gpu else None,
        run=trace.ours,
    )


def _step(name: str, window: Interval, seen: StepIntervals, exchanges: Intervals) -> StepTime:
    computing, exchanging = within(seen.computing, window), within(exchanges, window)
    overlapped = length(both(computing, exchanging))
    whole = window[1] - window[0]
    alone, open_ = length(computing) - overlapped, length(exchanging) - overlapped
    return StepTime(
        name,
        whole * US,
        alone * US,
        open_ * US,
        overlapped * US,
        max(0.0, whole - alone - open_ - overlapped) * US,
        length(within(seen.optimizer, window)) * US,
    )


def _techniques(seen: StepIntervals, steps: list[Interval]) -> tuple[TechniqueTime, ...]:
    whole, count = merged(steps), len(steps)
    taken = seen.computing
    found = []
    for technique in names.TECHNIQUES:
        mine = both(merged((one.start, one.end) for one in seen.exchanges if one.technique == technique), whole)
        exposed = without(mine, taken)
        taken = merged([*taken, *exposed])
        kinds = Counter(one.kind for one in seen.counted if one.technique == technique and _in(one, steps))
        if mine or kinds:
            each = {kind: number / count for kind, number in kinds.most_common()}
            calls = kinds.total() / count
            found.append(TechniqueTime(technique, calls, each, length(mine) * US / count, length(exposed) * US / count))
    return tuple(found)


def _in(one: Exchange | TracedPass, steps: list[Interval]) -> bool:
    return any(start <= one.start < end for start, end in steps)


def _actions(seen: StepIntervals, window: Interval, origin_us: float) -> tuple[TracedPass, ...]:
    mine = sorted(one for one in seen.actions if _in(one, [window]))
    return tuple(one._replace(start=one.start + origin_us, end=one.end + origin_us) for one in mine)


def _reductions(seen: StepIntervals, steps: list[Interval]) -> Reductions | None:
    """All-reduces of data parallelism, reduce-scatters of ZeRO; those that no host waited for apart from others count too."""
    kinds = {"data": "all_reduce", "zero": "reduce_scatter"}
    for technique, kind in kinds.items():
        begun = [one for one in seen.counted if (one.technique, one.kind) == (technique, kind) and _in(one, steps)]
        if not begun:
            continue
        spans = merged(
            (one.start, one.end) for one in seen.exchanges if one.technique == technique and one.kind in (kind, "wait")
        )
        mine = both(spans, merged(steps))
        sizes = [one.bytes for one in begun if one.bytes is not None]
        backward = [one.busy for one in seen.actions if one.name != "forward" and _in(one, steps)]
        count = len(steps)
        return Reductions(
            technique,
            len(begun) / count,
            length(mine) * US / count,
            length(without(mine, seen.computing)) * US / count,
            sum(backward) * US / count if backward else None,
            sum(sizes) / count if sizes else None,
        )
    return None
