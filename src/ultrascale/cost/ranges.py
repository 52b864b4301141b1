"""Ranges of an estimate: errors of measured runs of its regime, whose source no constant had seen.

A regime is what a step's time depends on most, so that runs of it are wrong in the same way: experts, the host, communication
or computing. Where no two sources measured the regime on an architecture, or the engine is not known, the estimate lies outside
all of them and its range is wider: 84 of 100 of all runs, and what is not known of the architecture or engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ultrascale.cost.hardware import SUSTAINED
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import EstimateRange, Time
from ultrascale.specs.files import package_data
from ultrascale.specs.job import Job

MIN_SIMILAR_RUNS = 12  # for quantiles; with fewer, runs of the regime on other architectures are included
MIN_SOURCES = 2
LOW, HIGH = 0.10, 0.90
LOW_OUTSIDE, HIGH_OUTSIDE = 0.08, 0.92
MIN_FIT = 0.9  # the least probability to fit of a layout that is recommended
HOST_BOUND, COMMUNICATION_BOUND = 0.05, 0.15  # shares of the step from which on it is called so
UNKNOWN_ENGINE = "unknown"
LEAST_MEMORY_BOUND = 1 / 3  # of an eager engine's memory-bound and host time, in the leanest engine that was fitted


class PredictionError(NamedTuple):
    """Of one run: the log of predicted over measured speed, or of measured over predicted memory."""

    log: float
    source: str


@dataclass(frozen=True)
class SimilarRuns:
    """The runs whose errors give a range."""

    errors: list[PredictionError]
    words: str
    outside: str = ""
    """why the estimate is outside of what was measured; empty: it is not"""
    slower: float = 0.0
    """log of how much slower than in these runs it may be besides"""

    def interval(self) -> tuple[float, float]:
        """Logs of the factors between which the truth lies."""
        low, high = (LOW_OUTSIDE, HIGH_OUTSIDE) if self.outside else (LOW, HIGH)
        return quantile(self.errors, low), quantile(self.errors, high) + self.slower


def _residuals() -> Any:
    return package_data("ultrascale.cost", "surfaces/residuals.json")


def regime(job: Job, time: Time) -> str:
    if job.model.moe is not None:
        return "experts"
    communication = time.tensor_s + time.context_s + time.expert_s + time.zero_s + time.data_s + time.send_s
    if time.launch_s + time.overhead_s >= HOST_BOUND * time.total:
        return "host-bound"
    return "communication-bound" if communication >= COMMUNICATION_BOUND * time.total else "compute-bound"


def similar(job: Job, kind: str, without_source: str | None = None) -> SimilarRuns:
    """Runs of the regime `kind`, on the same architecture if there are enough."""
    rows = [row for row in _residuals()["time"] if row["source"] != without_source]
    architecture, experts = job.cluster.gpu.architecture, job.model.moe is not None
    on_chip = [row for row in rows if row["architecture"] == architecture and (row["regime"] == "experts") == experts]
    of_kind = [row for row in rows if row["regime"] == kind]
    both = [row for row in of_kind if row["architecture"] == architecture]
    name = "models with experts" if experts else f"{kind} dense models"
    unknown_chip = len({row["source"] for row in on_chip}) < MIN_SOURCES
    outside = [
        *(["an engine that is not known"] if job.framework.name == UNKNOWN_ENGINE else []),
        *([f"fewer than {MIN_SOURCES} sources measured such models on {architecture}"] if unknown_chip else []),
        *([] if _enough(of_kind) else [f"too few runs of {name} were measured"]),
    ]
    slower = math.log(max(rate["bf16"] for rate in SUSTAINED.values()) / min(rate["bf16"] for rate in SUSTAINED.values()))
    candidates = ((both, f"{name} on {architecture}"), (of_kind, name), (rows, "all models"))
    found, words = next((one for one in candidates if _enough(one[0])), candidates[-1])
    sources = len({row["source"] for row in found})
    plural = "s" if sources != 1 else ""
    return SimilarRuns(
        _errors(found),
        f"{len(found)} runs of {sources} source{plural}: {words}",
        "; ".join(outside),
        slower if unknown_chip else 0.0,
    )


def _enough(rows: Sequence[dict[str, Any]]) -> bool:
    return len(rows) >= MIN_SIMILAR_RUNS and len({row["source"] for row in rows}) >= MIN_SOURCES


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


def time_range(job: Job, time: Time, without_source: str | None = None) -> tuple[float, float, SimilarRuns]:
    """The 80 % interval of the step time: predicted too fast by x means the truth is x slower."""
    runs = similar(job, regime(job, time), without_source)
    low, high = (time.total * math.exp(log) for log in runs.interval())
    if job.framework.name == UNKNOWN_ENGINE:  # it is taken for an eager one, the slowest of memory-bound operators
        low -= (1 - LEAST_MEMORY_BOUND) * (time.memory_bound_s + time.launch_s) * low / time.total
    return low, high, runs


def estimate_range(job: Job, time: Time, peak_gib: float, capacity_gib: float) -> EstimateRange | None:
    """None on a CPU: all runs that errors are known of are of GPUs."""
    if job.cluster.efficiency.synchronous:
        return None
    low, high, runs = time_range(job, time)
    memory = _errors(_residuals()["memory"])
    fitting = sum(peak_gib * math.exp(error.log) <= capacity_gib for error in memory)
    return EstimateRange(
        step_time_low_s=min(low, time.total),
        step_time_high_s=max(high, time.total),
        peak_low_gib=min(peak_gib, peak_gib * math.exp(quantile(memory, LOW))),
        peak_high_gib=max(peak_gib, peak_gib * math.exp(quantile(memory, HIGH))),
        fit_probability=_chance(fitting, len(memory)),
        based_on=runs.words,
        regime=regime(job, time),
        outside=runs.outside,
    )


def _chance(runs: int, among: int) -> float:
    """One run more that fits and one that does not: no finite number of runs makes a certainty."""
    return (runs + 1) / (among + 2)


def memory_limit_gib(job: Job, min_fit: float, min_free_gib: float) -> float:
    """The largest predicted peak that fits with this probability and leaves so much memory free.

    Errors of memory are known of GPUs only: on a CPU a peak fits or does not.
    """
    capacity = job.cluster.gpu.memory_gib
    if not 0 <= min_free_gib < capacity:
        raise SpecError(f"--min-free is {min_free_gib:g} GiB but must be less than the {capacity:.1f} GiB of a GPU: try 4")
    if not 0 <= min_fit <= 1:
        raise SpecError(f"--min-fit is {min_fit:g} but must be a probability from 0 to 1: try 0.9")
    if job.cluster.efficiency.synchronous:
        return capacity - min_free_gib
    worst = sorted(error.log for error in _errors(_residuals()["memory"]))
    enough = next((k for k in range(len(worst) + 1) if _chance(k, len(worst)) >= min_fit), None)
    if enough is None:
        raise SpecError(f"--min-fit is {min_fit:g} but {len(worst)} runs tell at most {_chance(len(worst), len(worst)):.2f}")
    share = math.exp(-worst[enough - 1]) if enough else math.inf
    return min(capacity - min_free_gib, capacity * share)
