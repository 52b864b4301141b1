"""Analyse the traces of a run: findings in sentences, and the measured times beside a plan's where there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from ultrascale.measure import trace_rank, trace_times
from ultrascale.measure.compare import ComparedTerm
from ultrascale.measure.trace_nsight import REPORT, SUFFIX, export_command
from ultrascale.measure.trace_steps import UNMARKED
from ultrascale.measure.trace_times import Bubble, RankTime, bubble
from ultrascale.specs.errors import SpecError
from ultrascale.specs.folders import TRACES
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import seconds

MIN_STEP_FRACTION = 0.02  # of a step: less is not worth a sentence
IMBALANCE_FRACTION = 0.15  # of the busiest rank's computing
MAX_HOST_WAITS = 2.0  # of the host for the device, in a step: one reads the loss
MAX_BUCKETS = 64
LARGE_COPY_BYTES = 2**20  # bytes of pageable memory in a step: a loss that is read is less

ADVICE = {
    "tensor": "a smaller layout.tp, or a larger layout.mbs, whose matmuls last longer beside the same number of collectives",
    "context": "a smaller layout.cp, or context_parallel=zigzag, whose communication hides behind attention",
    "expert": "a smaller layout.ep, or experts kept within one node",
    "pipeline": "more micro-batches (layout.gas), or a schedule with a smaller bubble",
    "zero": "a larger layout.mbs, so that a layer computes for longer than its weights take to come, or a lower layout.zero",
    "data": "more micro-batches between reductions (layout.gas), or train.compress=bf16",
    "muon": "a larger batch (layout.gas), so that the optimizer steps less often",
    "bookkeeping": "ranks that have as much to do as the slowest: these wait for it at the end of a step",
    "unknown": "names for process groups (group_desc), so that the next trace names their technique",
}


def findings(ranks: Sequence[RankTime], bubble: Bubble | None, predicted_bubble: float | None) -> list[str]:
    """Sentences: where the time went, and what would change it."""
    buckets = list(_buckets(ranks))
    known = {"data": bool(buckets), "pipeline": bubble is not None}  # these have a sentence of their own
    found = [_overall(ranks), *_exposed(ranks, {technique for technique, has in known.items() if has}), *buckets]
    if bubble is not None:
        found.append(_bubble(bubble, predicted_bubble))
    return found + [sentence for make in (_uneven, _gpu, _operators) for sentence in make(ranks)]


def _mean(ranks: Sequence[RankTime], *fields: str) -> float:
    return mean(one.mean(*fields) for one in ranks)


def _overall(ranks: Sequence[RankTime]) -> str:
    step = _mean(ranks, "step_s")
    parts = {"computing": "computing_s", "exposed communication": "exchanging_s", "overlapped": "both_s", "idle": "neither_s"}
    shares = ", ".join(f"{_mean(ranks, part) / step:.0%} {name}" for name, part in parts.items())
    who = "the rank" if len(ranks) == 1 else f"the mean of {len(ranks)} ranks"
    return f"A step takes {seconds(step)} ({who}): {shares}"


def _exposed(ranks: Sequence[RankTime], but: set[str]) -> Iterator[str]:
    step = _mean(ranks, "step_s")
    found = []
    for technique in dict.fromkeys(each.technique for rank in ranks for each in rank.techniques):
        mine = [each for rank in ranks for each in rank.techniques if each.technique == technique]
        sums = (
            sum(values) / len(ranks) for values in zip(*((one.exposed_s, one.time_s, one.calls) for one in mine), strict=True)
        )
        found.append((technique, *sums))
    for technique, exposed_s, time_s, calls in sorted(found, key=lambda one: -one[1]):
        if exposed_s >= MIN_STEP_FRACTION * step and technique not in but:
            number = round(calls)
            hidden = seconds(time_s - exposed_s) if time_s > exposed_s else "none"
            yield (
                f"{technique}: {number:,} {'collective' if number == 1 else 'collectives'} per step, {seconds(exposed_s)} "
                f"({exposed_s / step:.0%}) exposed and {hidden} overlapped: try {ADVICE[technique]}"
            )


def _buckets(ranks: Sequence[RankTime]) -> Iterator[str]:
    """Gradient reduction: with n buckets, all but the last can overlap with backward."""
    found = [(one.reductions, one.run or {}) for one in ranks if one.reductions and one.reductions.technique == "data"]
    if not found:
        return
    step, open_s = _mean(ranks, "step_s"), mean(last.exposed_s for last, _ in found)
    # The last rank to arrive does not wait: its time is the reduction's own.
    last, run = min(found, key=lambda pair: pair[0].time_s)
    layout = run.get("layout", {})
    number = max(1, round(last.calls))
    what = f"{number:,} {'bucket' if number == 1 else 'buckets'}"
    backward_s = None if last.backward_s is None else last.backward_s / max(1, layout.get("gas", 1))
    if open_s < MIN_STEP_FRACTION * step:
        return
    if layout.get("data_parallel") == "naive":
        yield f"Gradients are reduced after backward, {seconds(open_s)} exposed: try layout.data_parallel=bucketed"
    elif len(found) > 1 and open_s > 2 * last.time_s:
        yield (
            f"Gradient reduction leaves {seconds(open_s)} exposed ({open_s / step:.0%}) but takes {seconds(last.time_s)} "
            f"on the rank that comes last ({what}): data ranks are out of step; look for what slows that one down"
        )
    elif backward_s is not None and last.time_s > backward_s:
        yield (
            f"Gradient reduction takes {seconds(last.time_s)} ({what}), longer than the backward of the last micro-batch that "
            f"could hide it ({seconds(backward_s)}): try {ADVICE['data']}"
        )
    elif open_s > last.time_s / 2:
        better = min(MAX_BUCKETS, max(4 * number, math.ceil(last.time_s / (MIN_STEP_FRACTION * step))))
        total = run.get("gradient_bytes") or last.bytes
        how = f" (train.bucket_mb={max(0.1, total / better / 1e6):.2g})" if run and total else " (bucket_cap_mb of torch's DDP)"
        yield (
            f"Gradient reduction bunches at the end: {what} in {seconds(last.time_s)} on the rank that comes last, "
            f"{seconds(open_s)} exposed: try {better}{how}"
        )


def _uneven(ranks: Sequence[RankTime]) -> Iterator[str]:
    work = sorted(((one.mean("computing_s", "both_s"), one.rank) for one in ranks), key=lambda pair: pair[0])
    (least_s, idle), (most_s, busy) = work[0], work[-1]
    if len(ranks) > 1 and most_s - least_s > IMBALANCE_FRACTION * most_s:
        yield (
            f"Ranks compute unevenly: rank {busy} {seconds(most_s)} a step and rank {idle} {seconds(least_s)}: move layers "
            "between stages if these are two, or look for another program on that machine"
        )


def _gpu(ranks: Sequence[RankTime]) -> Iterator[str]:
    """Launch overhead, synchronizations and pageable memory, of the rank with the most of each."""
    found = [
        (one.launches, one.copies, one.mean("step_s")) for one in ranks if one.launches is not None and one.copies is not None
    ]
    if not found:
        return
    late, _, step = max(found, key=lambda one: one[0].late_s)
    if late.late_s >= MIN_STEP_FRACTION * step:
        where = ", ".join(f"{seconds(time_s)} in {name}" for name, time_s in list(late.where.items())[:2])
        pace = f" of {seconds(late.kernel_s)} on average, launched every {seconds(late.every_s)}" if late.every_s else ""
        yield (
            f"Launch-bound: the GPU is idle for {seconds(late.late_s)} a step ({late.late_s / step:.0%}) because the host "
            f"launches too late, {late.gaps:,.0f} kernels{pace} ({where}): try a larger layout.mbs{_other_launches(ranks)}"
        )
    late, copies, step = max(found, key=lambda one: one[1].waits)
    if copies.waits > MAX_HOST_WAITS or late.after_waits_s >= MIN_STEP_FRACTION * step:
        yield (
            f"The host waits for the GPU {copies.waits:,.0f} times a step, {seconds(copies.wait_s)} in all, and the GPU is "
            f"then idle for {seconds(late.after_waits_s)}: read values (.item(), .tolist(), print) once, at the step's end"
        )
    copies = max((copies for _, copies, _ in found), key=lambda one: one.pageable_bytes)
    if copies.pageable_bytes >= LARGE_COPY_BYTES:
        yield (
            f"{copies.pageable:,.0f} copies a step between host and GPU use pageable memory, "
            f"{copies.pageable_bytes / 2**20:,.2f} MiB: pin it (pin_memory=True) and copy with non_blocking=True"
        )


def _other_launches(ranks: Sequence[RankTime]) -> str:
    """What else launches fewer kernels: of our engine's runs only what is not on already."""
    run = next((one.run for one in ranks if one.run), None)
    if run is None:
        return ", fused or compiled blocks, or CUDA graphs"
    return " or train.graphs=auto" if run.get("train_graphs") == "never" and not run.get("cuda_graphs") else ""


def _operators(ranks: Sequence[RankTime]) -> Iterator[str]:
    """Of CPUs: on a GPU this shows as launch overhead."""
    found = [one for one in ranks if one.device == "cpu"]
    if not found:
        return
    idle_s, step = _mean(found, "neither_s"), _mean(found, "step_s")
    if idle_s > 0.2 * step:
        yield (
            f"For {seconds(idle_s)} a step ({idle_s / step:.0%}) the host runs Python between operators, and the profiler: try "
            "larger micro-batches (layout.mbs), which need fewer operators"
        )


def _bubble(found: Bubble, predicted: float | None) -> str:
    planned = "" if predicted is None else f", the plan predicts {predicted:.0%}"
    rest = found.measured - found.scheduled
    slowest, fastest = max(found.stage_s), min(found.stage_s)
    sentence = (
        f"Pipeline bubble: {found.measured:.0%} of {seconds(found.makespan_s)}; {found.schedule} with these stage times has "
        f"{found.scheduled:.0%}{planned}"
    )
    if fastest and slowest > (1 + IMBALANCE_FRACTION) * fastest:
        place = found.stage_s.index(slowest)
        return f"{sentence}: stage {place} takes {slowest / fastest:.1f} times as long as the fastest; give it fewer layers"
    if rest > 0.05:
        return (
            f"{sentence}: {rest:.0%} are messages, and stages that take longer at times; try larger micro-batches (layout.mbs)"
        )
    return f"{sentence}: try more micro-batches (layout.gas), or a schedule with a smaller bubble"


SUFFIXES = (".json", ".json.gz", SUFFIX)
MERGED = ".perfetto.json.gz"
"""ending of a merged trace, which a folder of traces may hold too"""

# What a trace distinguishes, and the same causes of an Estimate.
_EXPOSED = {
    "tensor communication": ("tensor", ("tensor_s",)),
    "context communication": ("context", ("context_s",)),
    "expert communication": ("expert", ("expert_s",)),
    "ZeRO communication": ("zero", ("zero_s",)),
    "gradient reduction": ("data", ("data_s",)),
    "waiting for stages": ("pipeline", ("bubble_s", "send_s")),
    "waiting for the slowest": ("bookkeeping", ()),
    "communication of an unknown group": ("unknown", ()),
}


@dataclass(frozen=True)
class Analysis:
    ranks: tuple[RankTime, ...]
    bubble: Bubble | None
    terms: tuple[ComparedTerm, ...]
    """predicted and measured; empty without a plan"""
    findings: tuple[str, ...]
    notes: tuple[str, ...]


def files(given: Sequence[Path]) -> list[Path]:
    """The trace files that are named: themselves, those in a folder, or in the traces of a run's folder."""
    found: list[Path] = []
    for path in given:
        folder = path / TRACES if (path / TRACES).is_dir() else path
        inside = [path]
        if folder.is_dir():
            inside = [one for one in sorted(folder.iterdir()) if one.name.endswith(SUFFIXES) and not one.name.endswith(MERGED)]
            inside = inside or [one for one in folder.iterdir() if one.suffix == REPORT]
        if not inside:
            raise SpecError(f"--trace {path} is a folder without traces: give one with .json or .json.gz files, such as runs/x")
        found += inside
    for report in (one for one in found if one.suffix == REPORT):
        raise SpecError(f"--trace {report} is a report of Nsight Systems: export it first, `{export_command(report)}`")
    one_of_each = {path.suffix == SUFFIX: path for path in found}
    if len(one_of_each) > 1:
        raise SpecError(
            f"--trace names {one_of_each[True]}, an export of Nsight Systems, and {one_of_each[False]}, of torch.profiler: "
            "name those of one tool"
        )
    return found


def read(given: Sequence[Path]) -> list[RankTime]:
    """Analyse one trace after the other; only the results are kept."""
    return sorted(
        (trace_times.analyse(trace_rank.read(path)) for path in files(given)), key=lambda one: (one.rank or 0, one.file)
    )


def analyse(ranks: Sequence[RankTime], plan: Plan | None = None, problems: Sequence[str] = ()) -> Analysis:
    """All ranks together. SpecError for a plan of another model."""
    notes = [*problems, *_notes(ranks)]
    if plan is not None:
        notes += _plan_notes(ranks, plan)
    found = bubble(ranks)
    predicted = None if plan is None or plan.layout.pp == 1 else plan.estimate.bubble_fraction
    terms = () if plan is None else tuple(_terms(ranks, plan))
    return Analysis(tuple(ranks), found, terms, tuple(findings(ranks, found, predicted)), tuple(notes))


def _notes(ranks: Sequence[RankTime]) -> Iterator[str]:
    for one in ranks:
        yield from one.notes
        if one.broken is not None:
            yield f"{one.file} was cut off ({one.broken}): what is told of it is of the {one.events:,} events before that"
    unmarked = [one for one in ranks if len(one.steps) == 1 and one.steps[0].name == UNMARKED]
    if unmarked:
        marks = "NVTX ranges such as `step 3`" if unmarked[0].file.endswith(SUFFIX) else "ProfilerStep"
        yield f"{unmarked[0].file} marks no steps ({marks}): the whole trace is taken for one"


def _plan_notes(ranks: Sequence[RankTime], plan: Plan) -> Iterator[str]:
    """In what the plan differs from the run."""
    model = plan.job.model
    for one in ranks:
        run = one.run
        if run is not None and (run.get("model"), run.get("layers")) != (model.name, model.layers):
            raise SpecError(
                f"the plan is of {model.name} ({model.layers} layers) but {one.file or 'the trace'} is of {run.get('model')} "
                f"({run.get('layers')} layers): give the run's own plan, which its folder has as plan.yaml"
            )
    layout = (ranks[0].run or {}).get("layout", {})
    planned = plan.layout.model_dump(mode="json")
    pairs = [f"layout.{name} {value} and {layout[name]}" for name, value in planned.items() if layout.get(name, value) != value]
    if pairs:
        yield f"the plan and the run differ: {'; '.join(pairs)}"
    gpu = plan.job.cluster.gpu.name
    if (gpu == "cpu") != (ranks[0].device == "cpu"):
        yield f"the plan is for {gpu}, the trace is of a {ranks[0].device.upper()}: only shares compare"


def _terms(ranks: Sequence[RankTime], plan: Plan) -> Iterator[ComparedTerm]:
    """The mean over ranks and steps. The parts add up to the step, as an Estimate's causes do."""
    planned, time = plan.estimate, plan.estimate.time
    # Under ZeRO gradients are reduced by the groups that gather weights.
    reduces = {"zero": ("zero_s", "data_s"), "data": ()} if plan.layout.zero else {}

    def causes(*names: str) -> float:
        return float(sum(getattr(time, name) for name in names))

    def exposed_s(technique: str) -> float:
        return mean(sum(each.exposed_s for each in one.techniques if each.technique == technique) for one in ranks)

    yield ComparedTerm("step time", "s", planned.step_time_s, _mean(ranks, "step_s"))
    optimizer = _mean(ranks, "optimizer_s")
    computing = _mean(ranks, "computing_s", "both_s") - optimizer
    yield ComparedTerm(
        "computing", "s", causes("matmul_s", "attention_s", "memory_bound_s", "recompute_s"), computing, part=True
    )
    for name, (technique, fields) in _EXPOSED.items():
        fields = reduces.get(technique, fields)
        predicted, measured = causes(*fields) if fields else None, exposed_s(technique)
        if predicted or measured:
            yield ComparedTerm(name, "s", predicted, measured, part=True)
    yield ComparedTerm("optimizer", "s", time.optimizer_s, optimizer, part=True)
    idle = _mean(ranks, "neither_s")
    yield ComparedTerm("nothing runs", "s", causes("launch_s", "offload_s", "overhead_s"), idle, part=True)
