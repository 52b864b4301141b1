"""How little a layout must recompute to fit: the fewest layers of each stage, and the fastest policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

from ultrascale.cost import engines
from ultrascale.cost.estimate import MIN_FIT, MemoryDraft, add_times, memory_drafts, memory_drafts_of_jobs, memory_limit_gib
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout, Recompute

AUTO = "auto"  # in place of a policy: the fastest that fits
TRIED = 3  # numbers of layers, from the one that a straight line gives


def fastest_recompute(job: Job, layout: Layout) -> Layout:
    """The layout with the policy, and the fewest layers, that fit and are fastest; in full where nothing fits."""
    policies = [layout.changed(recompute=word, recompute_layers=None) for word in get_args(Recompute)]
    runs = [one for one in policies if engines.problem(job, one) is None]
    limit_gib = memory_limit_gib(job, MIN_FIT, 0.0)
    fitting = [one for one in memory_drafts(job, runs) if one.peak_gib <= limit_gib]
    if not fitting:
        return runs[-1]
    return min(add_times(fewest_recomputed(fitting, limit_gib)), key=lambda one: one.step_time_s).view.layout


def fewest_recomputed(drafts: Sequence[MemoryDraft], limit_gib: float) -> list[MemoryDraft]:
    """The same, each with the fewest recomputed layers that fit.

    A peak is nearly linear in their number: the fewest are near where the line from none to all meets the limit.
    """
    some = [one for one in drafts if _may_recompute_less(one.view.job, one.view.layout)]
    without = _changed([(one, {"recompute": "none"}) for one in some])
    tried: list[tuple[MemoryDraft, dict[str, Any]]] = []
    for one, none in zip(some, without, strict=True):
        layers = -(-one.view.job.model.layers // (one.view.layout.pp * one.view.layout.virtual_stages))
        on_line = (none.peak_gib - limit_gib) / max(none.peak_gib - one.peak_gib, 1e-9) * layers
        first = max(1, math.ceil(min(on_line, layers)))
        tried += [(one, {"recompute_layers": count}) for count in range(first, min(first + TRIED, layers))]
    fewer: dict[int, MemoryDraft] = {}
    for (one, _), found in zip(tried, _changed(tried), strict=True):
        if found.peak_gib <= limit_gib:
            fewer.setdefault(id(one), found)
    return [fewer.get(id(one), one) for one in drafts]


def _may_recompute_less(job: Job, layout: Layout) -> bool:
    one_layer = layout.model_copy(update={"recompute_layers": 1})
    return layout.recompute != "none" and layout.recompute_layers is None and engines.layout_problem(job, one_layer) is None


def _changed(changes: Sequence[tuple[MemoryDraft, dict[str, Any]]]) -> list[MemoryDraft]:
    return memory_drafts_of_jobs([(one.view.job, one.view.layout.model_copy(update=change)) for one, change in changes])
