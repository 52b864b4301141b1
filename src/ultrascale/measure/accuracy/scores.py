"""How far the cost model is from measured runs: per row, by source and GPU, in memory, in verdicts and in ranking."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import combinations
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import sustained
from ultrascale.cost.kernels import attention_line, attention_rate
from ultrascale.cost.legality import problem
from ultrascale.measure.accuracy.runs import MeasuredRun, read_cells, read_row
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import GIB

# What a memory figure must say of itself to be compared with the bytes that tensors hold.
ALLOCATED = ("allocated", "active")
PASSES = 16  # over a file whose scores are sent: the first few runs are from all of its sources
FIRST_BATCH, BATCH = 8, 24  # runs that are predicted at once, and that are sent together
# Frameworks whose elementwise kernels have the constant of another.
FAMILY = {
    "torchtitan-eager": "eager",
    "torchtitan-0.2-eager": "eager",
    "deepspeed": "eager",
    "unknown": "eager",
    "deepspeed-2021": "eager",
    "megatron-no-overlap": "megatron-core",
    "flash-training": "megatron-core",
}


@dataclass(frozen=True)
class ScoredRun:
    """One run with its prediction; `ratio` is predicted over measured speed, above 1 is too fast."""

    run: MeasuredRun
    estimate: Estimate | None = None
    tokens_per_s_per_gpu: float | None = None
    iter_time_s: float | None = None
    peak_mem_gib: float | None = None
    fits: bool | None = None
    reason: str | None = None

    @property
    def measured(self) -> float | None:
        return measured_rate(self.run)

    @property
    def ratio(self) -> float | None:
        if self.measured is None or self.tokens_per_s_per_gpu is None:
            return None
        return self.tokens_per_s_per_gpu / self.measured

    @property
    def error(self) -> float | None:
        return None if self.ratio is None else abs(self.ratio - 1)

    @property
    def memory_ratio(self) -> float | None:
        """Only where the figure is one of tensors, not of the driver's view of the process."""
        kind = self.run.mem_kind.lower()
        comparable = any(word in kind for word in ALLOCATED) and "not stated" not in kind
        if not comparable or not self.run.peak_mem_gib or self.peak_mem_gib is None:
            return None
        return self.peak_mem_gib / self.run.peak_mem_gib

    @property
    def dense(self) -> bool:
        return self.run.job is not None and self.run.job.model.moe is None


def measured_rate(run: MeasuredRun) -> float | None:
    """Tokens per second and GPU, printed or from the iteration time."""
    if run.tokens_per_s_per_gpu:
        return run.tokens_per_s_per_gpu
    if run.iter_time_s and run.job is not None and run.layout is not None:
        return run.layout.batch_tokens(run.job.seq) / run.iter_time_s / run.layout.gpus
    return None


def score(
    runs: Sequence[MeasuredRun],
    adjust: Callable[[MeasuredRun], Job] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[ScoredRun]:
    """Predict every run; `adjust` may put other constants under a job (for leaving its source out)."""
    scored = []
    for number, run in enumerate(runs, start=1):
        if progress is not None:
            progress(number)
        scored.append(_score_one(run, adjust))
    return scored


def first_scores(file: Path) -> tuple[int, list[ScoredRun]]:
    """How many runs a CSV has, and the scores of the first few; `send_scores` has the others."""
    rows = _spread_rows(file)
    return len(rows), score([read_row(values, line) for line, values in rows[:FIRST_BATCH]])


def send_scores(file: Path, sender: Connection) -> None:
    """Send scores, some at a time; the target of a process.

    Ends with the reader: a pipe without one breaks.
    """
    with suppress(BrokenPipeError, KeyboardInterrupt):
        try:
            rows = _spread_rows(file)
            for start in range(FIRST_BATCH, len(rows), BATCH):
                sender.send(score([read_row(values, line) for line, values in rows[start : start + BATCH]]))
        except (SpecError, RunError) as error:
            sender.send(error)


def _spread_rows(file: Path) -> list[tuple[int, dict[str, str]]]:
    rows = list(read_cells(file)[0].items())
    return [one for start in range(PASSES) for one in rows[start::PASSES]]


def score_left_out(runs: Sequence[MeasuredRun]) -> list[ScoredRun]:
    """Every run under the constants that were fitted without its source; a source the fit never saw needs no leaving out."""

    def without_its_source(run: MeasuredRun) -> Job:
        assert run.job is not None
        return adjusted(run.job, left_out_multipliers().get(source_group(run), {}))

    return score(runs, without_its_source)


def adjusted(job: Job, multipliers: Mapping[str, float]) -> Job:
    """The job with its cluster's and framework's constants multiplied; a constant that it does not use changes nothing."""

    def times(name: str) -> float:
        return multipliers.get(name, 1.0)

    cluster, framework, gpu = job.cluster, job.framework, job.cluster.gpu
    constants, shares = cluster.efficiency, sustained(gpu)
    changed = {
        "matmul": (constants.matmul or shares["bf16"]) * times(f"sustained.{gpu.architecture}.bf16"),
        "matmul_fp8": (constants.matmul_fp8 or shares["fp8"]) * times(f"sustained.{gpu.architecture}.fp8"),
    }
    for name in ("memory_bandwidth", "network_bandwidth", "overlap_slowdown"):
        changed[name] = min(1.0, getattr(constants, name) * times(name))
    if (rate := attention_rate(framework.attention, gpu.architecture)) is not None:
        attention = times(f"attention.{attention_line(framework.attention, gpu.architecture)}.{gpu.architecture}")
        changed["attention_forward"] = min(1.0, (constants.attention_forward or rate.forward) * attention)
        changed["attention_backward"] = min(1.0, (constants.attention_backward or rate.backward) * attention)
    efficiency = constants.model_copy(update=changed)
    link = cluster.link_bandwidth_gb_s * times("link_bandwidth")
    elementwise = framework.elementwise * times(f"elementwise.{FAMILY.get(framework.name, framework.name)}")
    return job.model_copy(
        update={
            "cluster": cluster.model_copy(update={"efficiency": efficiency, "link_bandwidth_gb_s": link}),
            "framework": framework.model_copy(update={"elementwise": elementwise}),
        }
    )


@cache
def left_out_multipliers() -> dict[str, dict[str, float]]:
    """What tools/fit_constants.py wrote: for each source, multipliers of constants that were fitted without it."""
    text = resources.files("ultrascale.measure.accuracy").joinpath("left_out.json").read_text(encoding="utf-8")
    multipliers: dict[str, dict[str, float]] = json.loads(text)["multipliers"]
    return multipliers


def _score_one(run: MeasuredRun, adjust: Callable[[MeasuredRun], Job] | None) -> ScoredRun:
    if run.job is None or run.layout is None:
        return ScoredRun(run, reason=run.reason)
    job, layout = (adjust(run) if adjust else run.job), run.layout
    sentence = problem(job, layout)
    if sentence is not None:
        return ScoredRun(run, reason=sentence)
    predicted, workspace_gib = estimate(job, layout), job.cluster.efficiency.workspace_gib
    step_s, peak = predicted.step_time_s, comparable_peak_gib(predicted, run, workspace_gib)
    if run.half_recompute:
        # Every second layer recomputed: half the way between all and none of them.
        without = estimate(job, layout.changed(recompute="none"))
        step_s = (step_s + without.step_time_s) / 2
        peak = (peak + comparable_peak_gib(without, run, workspace_gib)) / 2
    rate = layout.batch_tokens(job.seq) / step_s / layout.gpus
    return ScoredRun(run, predicted, rate, step_s, peak, predicted.fits)


def comparable_peak_gib(predicted: Estimate, run: MeasuredRun, workspace_gib: float) -> float:
    """The peak as the row's figure means it: tensors alone, the allocator's reserve, or the whole process; in its unit."""
    memory = predicted.memory[predicted.peak_stage].memory
    kind = run.mem_kind.lower()
    peak = memory.total
    if any(word in kind for word in ALLOCATED):
        peak = memory.total - memory.runtime + workspace_gib * GIB
    return peak / run.mem_unit


def source_group(run: MeasuredRun) -> str:
    """Rows of one repository or paper are one source, however many pages of it they come from."""
    words = run.source.replace("@", " ").split()
    head = words[0] if words else run.system
    return " ".join(words[:2]) if "/" not in head and len(words) > 1 else head


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of a set of rows: means over samples, a sample being one configuration of one source."""

    rows: int
    samples: int
    mape: float
    median: float
    bias: float


def errors(scored: Iterable[ScoredRun]) -> ErrorSummary | None:
    samples: dict[tuple[Any, ...], list[float]] = {}
    rows = 0
    for one in scored:
        if one.ratio is None or one.run.job is None:
            continue
        rows += 1
        samples.setdefault(_configuration(one.run), []).append(math.log(one.ratio))
    if not samples:
        return None
    # Releases of one configuration are one sample: their geometric mean is compared.
    biases = [math.exp(fmean(logs)) - 1 for logs in samples.values()]
    absolute = [abs(bias) for bias in biases]
    return ErrorSummary(rows, len(biases), fmean(absolute), median(absolute), fmean(biases))


def _configuration(run: MeasuredRun) -> tuple[Any, ...]:
    assert run.job is not None
    job = run.job
    return (source_group(run), job.model.name, run.layout, job.cluster.label, job.precision, job.seq, job.framework)


@dataclass(frozen=True)
class Ranking:
    """Runs of one job under several layouts: do we put them in the right order?"""

    job: str
    runs: int
    tau: float
    regret: float
    """how much slower our first choice of those that we think fit ran than the best measured"""


def rankings(scored: Iterable[ScoredRun]) -> list[Ranking]:
    groups: dict[tuple[Any, ...], dict[tuple[Layout, Framework], list[ScoredRun]]] = {}
    for one in scored:
        run = one.run
        if one.ratio is None or run.job is None or run.layout is None:
            continue
        job = run.job
        key = (job.model.name, job.cluster.label, job.seq, job.batch_tokens, job.precision, run.system, job.framework.name)
        groups.setdefault(key, {}).setdefault((run.layout, job.framework), []).append(one)
    found = []
    for key, by_layout in groups.items():
        if len(by_layout) < 2:
            continue
        pairs = [
            (fmean(one.tokens_per_s_per_gpu or 0 for one in ones), fmean(one.measured or 0 for one in ones))
            for ones in by_layout.values()
        ]
        best = max(measured for _, measured in pairs)
        # What is predicted not to fit would not be chosen.
        fitting = [
            pair for pair, ones in zip(pairs, by_layout.values(), strict=True) if any(one.fits is not False for one in ones)
        ]
        first = max(fitting or pairs)[1]
        found.append(Ranking(f"{key[0]} on {key[1]}, {key[5]}", len(pairs), kendall_tau(pairs), best / first - 1))
    return found


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Concordant less discordant pairs over all; measured ties within 1 % say nothing and are left out."""
    agree = count = 0
    for (predicted_a, measured_a), (predicted_b, measured_b) in combinations(pairs, 2):
        if abs(measured_a / measured_b - 1) < 0.01:
            continue
        count += 1
        agree += 1 if (predicted_a - predicted_b) * (measured_a - measured_b) > 0 else -1
    return agree / count if count else 1.0


def verdicts(scored: Iterable[ScoredRun]) -> tuple[int, list[str]]:
    """Fit or out of memory, against what happened: how many are right, and those that are wrong."""
    right, wrong = 0, []
    for one in scored:
        if one.fits is None:
            continue
        happened = one.run.status.lower() != "oom"
        if one.fits == happened:
            right += 1
        else:
            wrong.append(f"{one.run.id}: {'ran' if happened else 'out of memory'}, predicted {one.peak_mem_gib:,.1f} GiB")
    return right, wrong


def memory_errors(scored: Iterable[ScoredRun]) -> list[tuple[str, float]]:
    """(id, predicted over measured − 1) of the rows whose figure means allocated tensors."""
    return [(one.run.id, one.memory_ratio - 1) for one in scored if one.memory_ratio is not None]


def small(one: ScoredRun) -> bool:
    """Small single-node jobs: up to 3 billion parameters (3.2 with the embeddings) on up to 8 GPUs."""
    job = one.run.job
    return job is not None and job.model.parameters <= 3.3e9 and job.cluster.gpus <= 8


def by(scored: Sequence[ScoredRun], key: Callable[[ScoredRun], str]) -> Mapping[str, ErrorSummary]:
    groups: dict[str, list[ScoredRun]] = {}
    for one in scored:
        groups.setdefault(key(one), []).append(one)
    found = {name: errors(ones) for name, ones in sorted(groups.items())}
    return {name: one for name, one in found.items() if one is not None}
