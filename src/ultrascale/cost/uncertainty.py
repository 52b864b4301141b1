"""How wrong an estimate may be: the errors of similar runs whose source the constants had not seen."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from ultrascale.specs.estimate import EstimateRange
from ultrascale.specs.job import Job

ENOUGH = 12  # runs from which quantiles are read; fewer, and the circle is drawn wider
LOW, HIGH = 0.10, 0.90


class PredictionError(NamedTuple):
    """Of one run: the log of predicted over measured speed, or of measured over predicted memory."""

    log: float
    source: str


@cache
def _table() -> dict[str, Any]:
    text = resources.files("ultrascale.cost").joinpath("surfaces/residuals.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def similar(job: Job, without_source: str | None = None) -> tuple[list[PredictionError], str]:
    """Errors of the nearest kind of runs, and which kind that is in words."""
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
            return _errors(found), f"{len(found)} runs of {sources} sources: {words}"
    return _errors(rows), f"{len(rows)} runs: all models"


def _errors(rows: Iterable[dict[str, Any]]) -> list[PredictionError]:
    return [PredictionError(row["log"], row["source"]) for row in rows]


def quantile(errors: Sequence[PredictionError], share: float) -> float:
    """Where the error of a run of a new source falls below with that probability.

    Runs of one source resemble each other: each source has one vote, and the new one may be anywhere. Where every run has its
    own source that is conformal prediction's: below the k-th of n with k / (n + 1).
    """
    ordered, runs = sorted(errors), Counter(error.source for error in errors)
    votes = np.asarray([1 / runs[error.source] for error in ordered])
    below = (np.cumsum(votes) - votes / 2 + 0.5) / (len(runs) + 1)
    return float(np.interp(share, below, [error.log for error in ordered]))


def time_range(job: Job, step_time_s: float, without_source: str | None = None) -> tuple[float, float, str]:
    """The 80 % interval of the step time: predicted too fast by x means the truth is x slower."""
    errors, words = similar(job, without_source)
    return step_time_s * math.exp(quantile(errors, LOW)), step_time_s * math.exp(quantile(errors, HIGH)), words


def estimate_range(job: Job, step_time_s: float, peak_gib: float, capacity_gib: float) -> EstimateRange | None:
    """None on a CPU: all runs that errors are known of are of GPUs."""
    if job.cluster.efficiency.synchronous:
        return None
    low, high, words = time_range(job, step_time_s)
    memory = _errors(_table()["memory"])
    # One run more that fits and one that does not: no finite number of runs makes a certainty.
    fitting = sum(peak_gib * math.exp(error.log) <= capacity_gib for error in memory)
    return EstimateRange(
        step_time_low_s=min(low, step_time_s),
        step_time_high_s=max(high, step_time_s),
        peak_low_gib=min(peak_gib, peak_gib * math.exp(quantile(memory, LOW))),
        peak_high_gib=max(peak_gib, peak_gib * math.exp(quantile(memory, HIGH))),
        fit_probability=(fitting + 1) / (len(memory) + 2),
        based_on=words,
    )
