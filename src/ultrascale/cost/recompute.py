"""How little a layout must recompute to fit: the fewest layers of each stage, and the fastest policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from ultrascale.cost import engines
from ultrascale.cost.estimate import MemoryDraft, add_times, memory_drafts, memory_drafts_of_jobs
from ultrascale.cost.ranges import MIN_FIT, memory_limit_gib
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout, Recompute

AUTO = "auto"  # in place of a policy: the fastest that fits
ROUNDS = 4  # until the fewest layers are found, or few more than them


def fastest_recompute(job: Job, layout: Layout) -> Layout:
    """The layout with the policy, and the fewest layers, that fit and are fastest; in full where nothing fits. A layout that
    cannot run stays as it is.
    """
    policies = [layout.changed(recompute=word, recompute_layers=None) for word in get_args(Recompute)]
    runs = [one for one in policies if engines.problem(job, one) is None]
    if not runs:
        return layout
    limit_gib = memory_limit_gib(job, MIN_FIT, 0.0)
    fitting = [one for one in memory_drafts(job, runs) if one.peak_gib <= limit_gib]
    if not fitting:
        return runs[-1]
    return min(add_times(fewest_recomputed(fitting, limit_gib)), key=lambda one: one.step_time_s).view.layout


@dataclass
class _Bracket:
    """A layout that does not fit with `low` recomputed layers in each stage, and fits with `high`."""

    fits: MemoryDraft
    high: int
    low: int
    low_gib: float

    def next(self, limit_gib: float) -> int:
        """Where the line between both meets the limit."""
        share = (self.low_gib - limit_gib) / max(self.low_gib - self.fits.peak_gib, 1e-9)
        return min(max(self.low + math.ceil(share * (self.high - self.low)), self.low + 1), self.high - 1)


def fewest_recomputed(drafts: Sequence[MemoryDraft], limit_gib: float) -> list[MemoryDraft]:
    """The same, each with the fewest recomputed layers that fit: a peak falls with their number, nearly on straight lines."""
    some = [one for one in drafts if _may_recompute_less(one.view.job, one.view.layout)]
    brackets: dict[int, _Bracket] = {}
    for one, none in zip(some, _changed([(one, {"recompute": "none"}) for one in some]), strict=True):
        layers = -(-one.view.job.model.layers // (one.view.layout.pp * one.view.layout.virtual_stages))
        brackets[id(one)] = _Bracket(one, layers, 0, none.peak_gib)
    for _ in range(ROUNDS):
        wide = [bracket for bracket in brackets.values() if bracket.high - bracket.low > 1]
        counts = [bracket.next(limit_gib) for bracket in wide]
        changes = [(bracket.fits, {"recompute_layers": count}) for bracket, count in zip(wide, counts, strict=True)]
        for bracket, count, found in zip(wide, counts, _changed(changes), strict=True):
            if found.peak_gib <= limit_gib:
                bracket.fits, bracket.high = found, count
            else:
                bracket.low, bracket.low_gib = count, found.peak_gib
    return [brackets[id(one)].fits if id(one) in brackets else one for one in drafts]


def _may_recompute_less(job: Job, layout: Layout) -> bool:
    one_layer = layout.model_copy(update={"recompute_layers": 1})
    return layout.recompute != "none" and layout.recompute_layers is None and engines.layout_problem(job, one_layer) is None


def _changed(changes: Sequence[tuple[MemoryDraft, dict[str, Any]]]) -> list[MemoryDraft]:
    return memory_drafts_of_jobs([(one.view.job, one.view.layout.model_copy(update=change)) for one, change in changes])
