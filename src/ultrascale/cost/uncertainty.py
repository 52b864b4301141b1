"""How wrong an estimate may be: the errors of similar runs whose source the constants had not seen."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

from ultrascale.specs.estimate import Range
from ultrascale.specs.job import Job

ENOUGH = 12  # runs from which quantiles are read; fewer, and the circle is drawn wider
LOW, HIGH = 0.10, 0.90


@cache
def _table() -> dict[str, Any]:
    text = resources.files("ultrascale.cost").joinpath("surfaces/residuals.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def similar(job: Job, without_source: str | None = None) -> tuple[list[float], str]:
    """Log of predicted over measured speed of the nearest kind of runs, and which kind that is in words."""
    rows = [row for row in _table()["time"] if row["source"] != without_source]
    experts = job.model.moe is not None
    framework, architecture = job.framework.name, job.cluster.gpu.architecture
    on_kind = [row for row in rows if row["experts"] == experts]
    on_chip = [row for row in on_kind if row["architecture"] == architecture]
    kind = "models with experts" if experts else "dense models"
    circles = (
        (f"{framework} on {architecture}", [row for row in on_chip if row["framework"] == framework]),
        (f"{kind} on {architecture}", on_chip),
        (kind, on_kind),
    )
    for words, found in circles:
        sources = len({row["source"] for row in found})
        if len(found) >= ENOUGH and sources >= 2:
            return [row["log"] for row in found], f"{len(found)} runs of {sources} sources: {words}"
    return [row["log"] for row in rows], f"{len(rows)} runs: all models"


def quantile(values: Sequence[float], share: float) -> float:
    """Where a new value falls below with that probability: below the k-th of n with k / (n + 1), as in conformal prediction."""
    ordered = sorted(values)
    position = min(max(share * (len(ordered) + 1) - 1, 0.0), len(ordered) - 1.0)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def time_range(job: Job, step_time_s: float, without_source: str | None = None) -> tuple[float, float, str]:
    """The 80 % interval of the step time: predicted too fast by x means the truth is x slower."""
    logs, words = similar(job, without_source)
    return step_time_s * math.exp(quantile(logs, LOW)), step_time_s * math.exp(quantile(logs, HIGH)), words


def estimate_range(job: Job, step_time_s: float, peak_gib: float, capacity_gib: float) -> Range | None:
    """None on a CPU: all runs that errors are known of are of GPUs."""
    if job.cluster.efficiency.synchronous:
        return None
    low, high, words = time_range(job, step_time_s)
    memory = [row["log"] for row in _table()["memory"]]
    # One run more that fits and one that does not: no finite number of runs makes a certainty.
    fitting = sum(peak_gib * math.exp(log) <= capacity_gib for log in memory)
    return Range(
        step_time_low_s=min(low, step_time_s),
        step_time_high_s=max(high, step_time_s),
        peak_low_gib=min(peak_gib, peak_gib * math.exp(quantile(memory, LOW))),
        peak_high_gib=max(peak_gib, peak_gib * math.exp(quantile(memory, HIGH))),
        fit_probability=(fitting + 1) / (len(memory) + 2),
        based_on=words,
    )
