"""All ranks' traces of a job together: aligned clocks, stragglers, critical path, exposed communication, bubble by stage.

Traces are read one after the other by a few processes, and only their summaries are kept.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

import numpy as np

from ultrascale.measure.compare import ComparedTerm
from ultrascale.measure.trace_analysis import ADVICE, MIN_STEP_FRACTION, files
from ultrascale.measure.trace_clocks import Clock, align, match
from ultrascale.measure.trace_groups import CommLabel
from ultrascale.measure.trace_path import CriticalPath, critical_paths
from ultrascale.measure.trace_rank import rank_list
from ultrascale.measure.trace_stragglers import SlowGroup, Straggler, Waits, waits
from ultrascale.measure.trace_summary import RankSummary, summarise
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.units import seconds

MAX_TRACES = 1024
MERGED_EVENTS = 1_000_000  # of the merged trace: 150 MB of JSON, which Perfetto opens
SMALL_BYTES = 8 * 2**20  # of all traces together: less is read sooner than processes start
MAX_READERS = 16
UNUSUAL = 2.0  # times the wait that the median rank causes
Progress = Callable[[str], None]


@dataclass(frozen=True)
class RankStepTime:
    """A rank's mean step in seconds; computing, data loading, wait, bubble, transfer and host add up to it."""

    rank: int
    host: str
    step_s: float
    computing_s: float
    data_s: float
    wait_s: float
    """exposed, for ranks that come later to a collective"""
    bubble_s: float
    """exposed communication of the pipeline"""
    transfer_s: float
    """the rest of exposed communication"""
    host_s: float
    caused_s: float
    """exposed wait of others, their mean, for this rank"""
    clock_us: float
    """how much its machine's clock is ahead of the first rank's"""


@dataclass(frozen=True)
class AxisTime:
    """Exposed communication of the groups of one axis, in the mean step of the mean rank."""

    label: CommLabel
    calls: float
    exposed_s: float
    wait_s: float | None
    """of it, for late ranks; None where collectives could not be matched"""


@dataclass(frozen=True)
class StageBubble:
    """Of one pipeline stage: idle while it waits for messages, mean of its ranks."""

    stage: int
    ranks: int
    step_s: tuple[float, ...]
    """of each step"""
    bubble_s: tuple[float, ...]

    @property
    def share(self) -> float:
        return sum(self.bubble_s) / sum(self.step_s)


@dataclass(frozen=True)
class JobAnalysis:
    name: str
    ranks: tuple[RankStepTime, ...]
    steps: tuple[str, ...]
    step_s: tuple[float, ...]
    """of each step, the mean of all ranks"""
    axes: tuple[AxisTime, ...]
    stages: tuple[StageBubble, ...]
    stragglers: tuple[Straggler, ...]
    slow_groups: tuple[SlowGroup, ...]
    paths: tuple[CriticalPath, ...]
    waited_s: tuple[tuple[float, ...], ...]
    """by rank and step"""
    caused_s: tuple[tuple[float, ...], ...]
    clocks: tuple[Clock, ...]
    matched: int
    """collectives in common"""
    findings: tuple[str, ...]
    notes: tuple[str, ...]

    def mean(self, field: str) -> float:
        return float(mean(getattr(one, field) for one in self.ranks))


def read(given: Sequence[Path], say: Progress = lambda _: None) -> list[RankSummary]:
    """The summaries of a job's traces by rank. SpecError for traces that are not of one job."""
    paths = files(given)
    if len(paths) > MAX_TRACES:
        raise SpecError(
            f"--trace names {len(paths):,} files but at most {MAX_TRACES:,} are read: name fewer, such as rank0*.gz"
        )
    reduce = partial(summarise, timeline_events=max(2000, MERGED_EVENTS // len(paths)))
    found = []
    for done, one in enumerate(_map(reduce, paths), 1):
        found.append(one)
        say(f"reading traces: {done:,} of {len(paths):,}")
    return _checked(found)


def _map(reduce: Callable[[Path], RankSummary], paths: Sequence[Path]) -> Iterator[RankSummary]:
    """In processes of their own, where there is enough to read."""
    readers = min(len(paths), len(os.sched_getaffinity(0)), MAX_READERS)
    if readers == 1 or sum(os.path.getsize(path) for path in paths if path.is_file()) < SMALL_BYTES:
        yield from map(reduce, paths)
        return
    # A trace's events hold no cycles, and looking for some takes a sixth of the time.
    with ProcessPoolExecutor(readers, multiprocessing.get_context("spawn"), initializer=gc.disable) as pool:
        try:
            yield from pool.map(reduce, paths)
        except BrokenProcessPool:
            raise RunError(
                "a process that reads traces was ended, probably for want of memory: read fewer traces, or on a larger machine"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _checked(found: list[RankSummary]) -> list[RankSummary]:
    """Sorted by rank; a trace that does not name its rank has its place among the files."""
    if all(one.times.rank is None for one in found):
        found = [replace(one, times=replace(one.times, rank=place)) for place, one in enumerate(found)]
    seen: dict[int | None, str] = {}
    for one in found:
        if one.times.rank is None:
            raise SpecError(
                f"--trace {one.times.file} does not say of which rank it is, as others do: name it rankN.json.gz, such as "
                f"rank{len(found) - 1}.json.gz"
            )
        if one.times.rank in seen:
            raise SpecError(
                f"rank {one.rank} is in {seen[one.rank]} and in {one.times.file}: name the traces of one run, each rank once"
            )
        seen[one.times.rank] = one.times.file
    for what, values in (
        ("world size", {one.times.file: one.world for one in found if one.world is not None}),
        ("model", {one.times.file: (one.times.run or {}).get("model") for one in found}),
    ):
        different = {str(value): file for file, value in values.items()}
        if len(different) > 1:
            (first, one_file), (second, other_file), *_ = different.items()
            raise SpecError(
                f"the traces are of different jobs: {what} is {first} in {one_file} and {second} in {other_file}: "
                "name the traces of one run"
            )
    return sorted(found, key=lambda one: one.rank)


def analyse(ranks: Sequence[RankSummary], name: str) -> JobAnalysis:
    steps = [step for step in ranks[0].steps if all(step in one.steps for one in ranks)]
    if not steps:
        other = next(one for one in ranks if not set(one.steps) & set(ranks[0].steps))
        cut = next((f" ({one.times.file} is cut off: {one.times.broken})" for one in (ranks[0], other) if one.times.broken), "")
        raise SpecError(
            f"rank {ranks[0].rank} has {_span(ranks[0].steps)} and rank {other.rank} has {_span(other.steps)}, no step in "
            f"common{cut}: record the same steps on all ranks"
        )
    matched, problems = match(ranks)
    clocks = align(ranks, matched)
    found = waits(ranks, clocks, matched, steps)
    shares = tuple(_shares(ranks, clocks, found, steps))
    paths = tuple(critical_paths(ranks, clocks, found, steps))
    job = JobAnalysis(
        name=name,
        ranks=shares,
        steps=tuple(steps),
        step_s=tuple(np.mean([_rows(one, steps).sum(axis=1) for one in ranks], axis=0).tolist()),
        axes=tuple(_axes(ranks, found, steps)),
        stages=tuple(_stages(ranks, steps)),
        stragglers=found.stragglers,
        slow_groups=found.slow_groups,
        paths=paths,
        waited_s=tuple(map(tuple, found.waited_s.tolist())),
        caused_s=tuple(map(tuple, found.caused_s.tolist())),
        clocks=tuple(clocks),
        matched=sum(one.rows.shape[1] for one in matched),
        findings=(),
        notes=(*_notes(ranks, clocks, steps), *problems),
    )
    return replace(job, findings=tuple(_findings(job)))


def _span(steps: Sequence[str]) -> str:
    return steps[0] if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _rows(one: RankSummary, steps: Sequence[str]) -> np.ndarray:
    rows: np.ndarray = one.shares[[one.steps.index(step) for step in steps]]
    return rows


def _exposed(one: RankSummary, steps: Sequence[str], label: CommLabel) -> np.ndarray:
    rows: np.ndarray = one.exposed[label][[one.steps.index(step) for step in steps]]
    return rows


def _pipeline(one: RankSummary, steps: Sequence[str]) -> np.ndarray:
    parts = [_exposed(one, steps, label) for label in one.exposed if label.technique == "pipeline"]
    return np.sum(parts, axis=0) if parts else np.zeros(len(steps))


def _shares(ranks: Sequence[RankSummary], clocks: Sequence[Clock], found: Waits, steps: list[str]) -> Iterator[RankStepTime]:
    for place, (one, clock) in enumerate(zip(ranks, clocks, strict=True)):
        computing, data, communication, host = _rows(one, steps).mean(axis=0).tolist()
        bubble = float(_pipeline(one, steps).mean())
        # Collectives of two groups at once make two waits of one time.
        wait = min(float(found.waited_s[place].mean()), max(0.0, communication - bubble))
        yield RankStepTime(
            one.rank,
            one.host,
            computing + data + communication + host,
            computing,
            data,
            wait,
            bubble,
            max(0.0, communication - bubble - wait),
            host,
            float(found.caused_s[place].mean()),
            one.zero_us - ranks[0].zero_us - clock.offset_us if clock.collectives else 0.0,
        )


def _axes(ranks: Sequence[RankSummary], found: Waits, steps: list[str]) -> Iterator[AxisTime]:
    labels = dict.fromkeys(label for one in ranks for label in one.exposed)
    for label in labels:
        exposed = [float(_exposed(one, steps, label).mean()) if label in one.exposed else 0.0 for one in ranks]
        calls = 0
        for one in ranks:
            if label in one.transfers.labels:
                inside = [one.steps.index(step) for step in steps]
                mine = one.transfers.label == one.transfers.labels.index(label)
                calls += int((mine & np.isin(one.transfers.step, inside)).sum())
        wait = found.by_label.get(label)
        yield AxisTime(
            label, calls / len(ranks) / len(steps), mean(exposed), None if wait is None else min(wait, mean(exposed))
        )


def _stages(ranks: Sequence[RankSummary], steps: list[str]) -> Iterator[StageBubble]:
    of_stage: dict[int, list[RankSummary]] = defaultdict(list)
    for one in ranks:
        if one.stage is not None and any(label.technique == "pipeline" for label in one.exposed):
            of_stage[one.stage].append(one)
    for stage, mine in sorted(of_stage.items()):
        bubble = np.mean([_pipeline(one, steps) for one in mine], axis=0)
        whole = np.mean([_rows(one, steps).sum(axis=1) for one in mine], axis=0)
        yield StageBubble(stage, len(mine), tuple(whole.tolist()), tuple(bubble.tolist()))


def _notes(ranks: Sequence[RankSummary], clocks: Sequence[Clock], steps: list[str]) -> Iterator[str]:
    known = {one.rank for one in ranks}
    world = next((one.world for one in ranks if one.world is not None), None) or max(known) + 1
    missing = [rank for rank in range(min(world, 10**6)) if rank not in known]
    if missing:
        yield (
            f"{rank_list(missing)} of {world:,} {'is' if len(missing) == 1 else 'are'} missing: what they delay is counted "
            "for the ranks that are here"
        )
    lost = [one.rank for one, clock in zip(ranks[1:], clocks[1:], strict=True) if not clock.collectives]
    if lost and len(lost) == len(ranks) - 1:
        yield (
            "the ranks have no collective in common that the traces name, so their clocks are not aligned and no rank is "
            "called late"
        )
    elif lost:
        yield f"{rank_list(lost)} share no collective with the others: their machines' own clocks are used"
    if any(len(one.steps) > len(steps) for one in ranks):
        yield f"only {_span(steps)} {'is' if len(steps) == 1 else 'are'} in the traces of all ranks, and counted"


_CAUSES = {
    "computing": "it computes {time} longer than the others before them",
    "data loading": "it waits {time} longer for its data loader",
    "host": "its host leaves {time} more without kernels or operators: look for Python, synchronizations or a busy CPU there",
    "communication": "it comes {time} later out of collectives of other groups",
}


def axis(label: CommLabel) -> str:
    """`tensor (mesh_tp, 8 ranks)`."""
    inside = ", ".join(
        [*([label.description] if label.description else []), *([f"{label.size:,} ranks"] if label.size else [])]
    )
    return f"{label.technique} ({inside})" if inside else label.technique


def late_ranks(job: JobAnalysis) -> list[Straggler]:
    """Those that delay the others noticeably, and more than ranks usually do in this job."""
    usual = sorted(one.caused_s for one in job.ranks)[(len(job.ranks) - 1) // 2]
    least = max(MIN_STEP_FRACTION * job.mean("step_s"), UNUSUAL * usual)
    return [one for one in job.stragglers if one.wait_s >= least]


def straggler_sentence(one: Straggler) -> str:
    cause, _ = next(iter(one.causes.items()), ("host", 0.0))
    why = _CAUSES[cause].format(time=seconds(max(0.0, one.excess[cause])))
    label = next(iter(one.groups))
    return (
        f"Rank {one.rank} delays the others by {seconds(one.wait_s)} a step (last to {one.last:,} of {one.collectives:,} "
        f"collectives, most in {axis(label)}): {why}"
    )


def _findings(job: JobAnalysis) -> Iterator[str]:
    step = job.mean("step_s")
    late = late_ranks(job)
    yield from (straggler_sentence(one) for one in late[:4])
    if job.stragglers and not late:
        yield (
            f"No rank is later than the others: they come last in turn, and each waits {seconds(job.mean('wait_s'))} a step "
            f"({job.mean('wait_s') / step:.0%}) for the last"
        )
    for slow in job.slow_groups[:3]:
        if slow.transfer_s - slow.usual_s >= MIN_STEP_FRACTION * step:
            yield (
                f"Link: {axis(slow.label)} of {rank_list(slow.ranks)} transfers for {seconds(slow.transfer_s)} a step after "
                f"the last arrival, other groups for {seconds(slow.usual_s)}: look at the links between these ranks"
            )
    for one in sorted(job.axes, key=lambda one: -one.exposed_s)[:3]:
        if one.exposed_s >= MIN_STEP_FRACTION * step and one.wait_s is not None and one.wait_s > one.exposed_s / 2:
            yield (
                f"{axis(one.label)}: {seconds(one.wait_s)} of {seconds(one.exposed_s)} exposed communication are waits for "
                "late ranks: a faster link would not help"
            )
        elif one.exposed_s >= MIN_STEP_FRACTION * step and one.wait_s is not None:
            yield (
                f"{axis(one.label)}: {seconds(one.exposed_s - one.wait_s)} of {seconds(one.exposed_s)} exposed communication "
                f"are transfers: try {ADVICE[one.label.technique]}"
            )
    if job.stages:
        worst = max(job.stages, key=lambda one: one.share)
        yield f"Stage {worst.stage} waits most for messages: {seconds(mean(worst.bubble_s))} a step ({worst.share:.0%})"
    yield _path_sentence(job)


def longest_path(job: JobAnalysis) -> CriticalPath:
    return max(job.paths, key=lambda one: one.length_s)


def _path_sentence(job: JobAnalysis) -> str:
    path = longest_path(job)
    whole = path.length_s or 1.0
    parts = ", ".join(f"{time / whole:.0%} {what}" for what, time in list(path.by_what.items())[:4])
    who, time = next(iter(path.by_rank.items()))
    return f"Critical path of {path.step}, the longest step: {seconds(whole)}, {parts}; {time / whole:.0%} of it on rank {who}"


def compare(first: JobAnalysis, second: JobAnalysis) -> list[ComparedTerm]:
    """The mean step of both, by what it was spent on."""
    parts = {
        "computing": "computing_s",
        "transfers": "transfer_s",
        "waits for late ranks": "wait_s",
        "pipeline bubble": "bubble_s",
        "data loading": "data_s",
        "host": "host_s",
    }
    terms = [ComparedTerm("step time", "s", first.mean("step_s"), second.mean("step_s"))]
    for name, field in parts.items():
        sides = first.mean(field), second.mean(field)
        if any(sides):
            terms.append(ComparedTerm(name, "s", *sides, part=True))
    of = [{one.label.technique: 0.0 for one in job.axes} for job in (first, second)]
    for exposed, job in zip(of, (first, second), strict=True):
        for one in job.axes:
            exposed[one.label.technique] += one.exposed_s
    techniques = dict.fromkeys([*of[0], *of[1]])
    return terms + [ComparedTerm(f"exposed {one}", "s", of[0].get(one), of[1].get(one)) for one in techniques]


def compare_sentences(first: JobAnalysis, second: JobAnalysis) -> Iterator[str]:
    """What differs most from the second run, and which ranks are late in each."""
    change = first.mean("step_s") - second.mean("step_s")
    more = 1 if change > 0 else -1
    apart = {term.name: (term.first or 0.0) - (term.second or 0.0) for term in compare(first, second) if term.part}
    name = max(apart, key=lambda one: apart[one] * more)
    yield (
        f"A step of {first.name} takes {seconds(abs(change))} ({abs(change) / second.mean('step_s'):.0%}) "
        f"{'longer' if change > 0 else 'less'} than one of {second.name}: most of that in {name} "
        f"({'+' if apart[name] > 0 else '-'}{seconds(abs(apart[name]))})"
    )
    for job in (first, second):
        yield from (f"{job.name}: {straggler_sentence(one)}" for one in late_ranks(job)[:1])
    if len(first.ranks) != len(second.ranks):
        yield f"{first.name} has {len(first.ranks):,} ranks and {second.name} {len(second.ranks):,}: compare shares, not times"
