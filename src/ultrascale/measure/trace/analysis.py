"""Traces of a run, from their files to what they say together, with a plan beside them where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from ultrascale.measure.compare import ComparedTerm
from ultrascale.measure.trace import rank as trace
from ultrascale.measure.trace import times as trace_times
from ultrascale.measure.trace.bubble import Bubble, bubble
from ultrascale.measure.trace.findings import findings
from ultrascale.measure.trace.times import RankTime
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.folders import TRACES
from ultrascale.specs.plan import Plan

SUFFIXES = (".json", ".json.gz")

# What a trace can tell apart, and the causes of an Estimate that are the same.
_EXPOSED = {
    "tensor exchange": ("tensor", ("tensor_s",)),
    "context exchange": ("context", ("context_s",)),
    "expert exchange": ("expert", ("expert_s",)),
    "ZeRO exchange": ("zero", ("zero_s",)),
    "gradient reduction": ("data", ("data_s",)),
    "waiting for stages": ("pipeline", ("bubble_s", "send_s")),
    "waiting for the slowest": ("bookkeeping", ()),
    "exchange of nobody known": ("unknown", ()),
}


@dataclass(frozen=True)
class Analysis:
    ranks: tuple[RankTime, ...]
    bubble: Bubble | None
    terms: tuple[ComparedTerm, ...]
    """planned beside measured; empty without a plan"""
    findings: tuple[str, ...]
    notes: tuple[str, ...]


def files(given: Sequence[Path]) -> list[Path]:
    """The trace files that are meant: themselves, or those in a folder, or in a run's folder of traces."""
    found: list[Path] = []
    for path in given:
        folder = path / TRACES if (path / TRACES).is_dir() else path
        inside = [one for one in sorted(folder.iterdir()) if one.name.endswith(SUFFIXES)] if folder.is_dir() else [path]
        if not inside:
            raise SpecError(f"--trace {path} is a folder without traces: give one with .json or .json.gz files, such as runs/x")
        found += inside
    return found


def read(given: Sequence[Path]) -> list[RankTime]:
    """One trace after the other: of each only what it tells is kept."""
    return sorted((trace_times.analyse(trace.read(path)) for path in files(given)), key=lambda one: (one.rank or 0, one.file))


def analyse(ranks: Sequence[RankTime], plan: Plan | None = None, problems: Sequence[str] = ()) -> Analysis:
    """What all of them say together. SpecError for a plan of another model."""
    notes = [*problems, *_notes(ranks)]
    if plan is not None:
        _same_model(ranks, plan)
        notes += [*_other_layout(ranks, plan), *_other_machine(ranks, plan)]
    found = bubble(ranks)
    predicted = None if plan is None or plan.layout.pp == 1 else plan.estimate.bubble_fraction
    terms = () if plan is None else tuple(_terms(ranks, plan.estimate))
    return Analysis(tuple(ranks), found, terms, tuple(findings(ranks, found, predicted)), tuple(notes))


def _notes(ranks: Sequence[RankTime]) -> Iterator[str]:
    for one in ranks:
        if one.broken is not None:
            yield f"{one.file} was cut off ({one.broken}): what is told of it is of the {one.events:,} events before that"
    unmarked = [one for one in ranks if len(one.steps) == 1 and one.steps[0].name == trace.UNMARKED]
    if unmarked:
        yield f"{unmarked[0].file} marks no steps (ProfilerStep): the whole trace is taken for one"


def _same_model(ranks: Sequence[RankTime], plan: Plan) -> None:
    model = plan.job.model
    for one in ranks:
        said = one.run
        if said is not None and (said.get("model"), said.get("layers")) != (model.name, model.layers):
            raise SpecError(
                f"the plan is of {model.name} ({model.layers} layers) but {one.file or 'the trace'} is of {said.get('model')} "
                f"({said.get('layers')} layers): give the run's own plan, which its folder has as plan.yaml"
            )


def _other_layout(ranks: Sequence[RankTime], plan: Plan) -> Iterator[str]:
    layout = (ranks[0].run or {}).get("layout", {})
    planned = plan.layout.model_dump(mode="json")
    apart = [f"layout.{name} {value} and {layout[name]}" for name, value in planned.items() if layout.get(name, value) != value]
    if apart:
        yield f"the plan and the run differ: {'; '.join(apart)}"


def _other_machine(ranks: Sequence[RankTime], plan: Plan) -> Iterator[str]:
    planned = plan.job.cluster.gpu.name
    if (planned == "cpu") != (ranks[0].device == "cpu"):
        yield f"the plan is for {planned}, the trace is of a {ranks[0].device.upper()}: only shares compare"


def _terms(ranks: Sequence[RankTime], planned: Estimate) -> Iterator[ComparedTerm]:
    """The mean over ranks and steps. The parts add up to the step, as an Estimate's causes do."""
    time = planned.time

    def causes(*names: str) -> float:
        return float(sum(getattr(time, name) for name in names))

    def exposed_s(technique: str) -> float:
        return mean(sum(each.exposed_s for each in one.techniques if each.technique == technique) for one in ranks)

    yield ComparedTerm("step time", "s", planned.step_time_s, mean(one.mean(lambda step: step.step_s) for one in ranks))
    computing = mean(one.mean(lambda step: step.computing_s + step.both_s - step.optimizer_s) for one in ranks)
    yield ComparedTerm(
        "computing", "s", causes("matmul_s", "attention_s", "memory_bound_s", "recompute_s"), computing, part=True
    )
    for name, (technique, fields) in _EXPOSED.items():
        predicted, measured = causes(*fields) if fields else None, exposed_s(technique)
        if predicted or measured:
            yield ComparedTerm(name, "s", predicted, measured, part=True)
    yield ComparedTerm(
        "optimizer", "s", time.optimizer_s, mean(one.mean(lambda step: step.optimizer_s) for one in ranks), part=True
    )
    idle = mean(one.mean(lambda step: step.neither_s) for one in ranks)
    yield ComparedTerm("nothing runs", "s", causes("launch_s", "offload_s", "overhead_s"), idle, part=True)
