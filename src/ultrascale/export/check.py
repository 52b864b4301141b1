"""What an engine does with an exported file: its settings, read back without the comments, beside the plan."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import problem
from ultrascale.export import fields
from ultrascale.export.common import OWN, EngineFormat, File
from ultrascale.export.read import Given, plan_of_text
from ultrascale.export.table import World
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan

CLOSE = 0.02  # step time and peak memory of a file that runs the plan are this near to the plan's


@dataclass(frozen=True)
class LostSetting:
    """A field that the engine will run with another value, and what that alone changes in step time and memory."""

    field: str
    planned: str
    runs: str
    why: str
    step_time: float | None = None
    """change over the plan's; None if the change is not legal alone"""
    peak_gib: float | None = None


@dataclass(frozen=True)
class ReadBack:
    """One engine's file: the plan in that engine, and what the file runs there."""

    engine: EngineFormat
    planned: Estimate
    runs: Estimate | None
    """None if the settings make no run that can be estimated"""
    differences: tuple[LostSetting, ...]

    @property
    def fits(self) -> bool:
        return self.runs is not None and self.runs.fits

    @property
    def same(self) -> bool:
        if self.runs is None or any(one.field == "model" for one in self.differences):
            return False
        pairs = (self.planned.step_time_s, self.runs.step_time_s), (self.planned.peak_gib, self.runs.peak_gib)
        return all(abs(other / one - 1) <= CLOSE for one, other in pairs)


def read_back(plan: Plan, engine: EngineFormat, file: File) -> ReadBack:
    """The file as its engine reads it. What the user's program sets, and the GPUs, are taken from the plan."""
    own = plan.job.framework.engine == Framework.load(engine.framework).engine
    job = plan.job if own else plan.job.changed(framework=Framework.load(engine.framework))
    planned = plan.estimate if own else estimate(job, plan.layout)
    wanted = fields.plan_fields(job, plan.layout)
    settings = {name: value for name, value in engine.parse(file.text, file.name).items() if name != OWN}
    without_model = not fields.has_model(engine.read(settings, file.name, World(job.cluster.gpus)).fields)
    given = Given(cluster=job.cluster, model=job.model if without_model else None)
    lost = []
    if without_model and "model" not in engine.program:
        lost.append(LostSetting("model", job.model.name, "a stand-in", engine.lost["model"]))
    try:
        found = plan_of_text(engine, file.text, file.name, given).plan
    except SpecError as error:
        return ReadBack(engine, planned, None, (*lost, LostSetting("file", "a run", "none", str(error))))
    inert = fields.unused_fields(plan.layout)
    runs = fields.plan_fields(found.job, found.layout)
    names = [name for name in dict.fromkeys((*wanted, *runs)) if name not in inert and name not in _FACTS]
    other = [name for name in names if runs.get(name) != wanted.get(name)]
    lost += [_difference(job, plan.layout, planned, name, wanted.get(name), runs.get(name), engine) for name in other]
    if found.job.framework != job.framework:
        lost += _of_framework(job, found.job, plan.layout, planned)
    return ReadBack(engine, planned, found.estimate, tuple(lost))


_FACTS = ("job.cluster", "job.framework", "job.total_tokens", "job.batch_tokens", "model.name", "model.source")


def _difference(
    job: Job, layout: Layout, planned: Estimate, name: str, wanted: object, value: object, engine: EngineFormat
) -> LostSetting:
    room, _, field = name.partition(".")
    changed_job = job.changed(**{field: value}) if room == "job" and field != "seq" else job
    changed = layout.changed(**{field: value}) if room == "layout" else layout
    general = engine.lost.get("model.*") if room == "model" else None
    why = engine.lost.get(name) or general or f"{engine.title} has no such setting"
    if room == "model" or problem(changed_job, changed) is not None:
        return LostSetting(name, str(wanted), str(value), why)
    return LostSetting(name, str(wanted), str(value), why, *_change(planned, estimate(changed_job, changed)))


def _of_framework(job: Job, found: Job, layout: Layout, planned: Estimate) -> list[LostSetting]:
    """Overlaps and kernels that the estimate assumed and the file does not switch on."""
    differences = []
    for name in Framework.model_fields:
        wanted, value = getattr(job.framework, name), getattr(found.framework, name)
        if name not in ("name", "source") and wanted != value:
            changed = job.changed(framework=job.framework.model_copy(update={name: value}))
            change = _change(planned, estimate(changed, layout))
            if any(change):
                why = "no setting switches it on"
                differences.append(LostSetting(f"framework.{name}", str(wanted), str(value), why, *change))
    return differences


def _change(planned: Estimate, other: Estimate) -> tuple[float, float]:
    return other.step_time_s / planned.step_time_s - 1, other.peak_gib - planned.peak_gib
