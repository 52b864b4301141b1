"""What an engine does with an exported file: its settings, read back without the comments, beside the plan."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.cost.estimate import drafts, estimate
from ultrascale.cost.legality import problem
from ultrascale.export import fields, header
from ultrascale.export.common import OWN_KEY, EngineFormat, File
from ultrascale.export.read import ImportOptions, plan_from_text
from ultrascale.export.table import World
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan

# Fields without which an engine trains another model, however near its time and memory are.
OTHER_MODEL = {
    "model",
    "job.adapter_rank",
    *(f"model.{name}" for name in ("activation", "norm", "positions", "qk_norm", "sliding_window", "tied_embeddings", "vocab")),
    *(f"model.{name}" for name in ("qkv_bias", "attention_output_bias", "mlp_bias")),
}
CLOSE = 0.02  # step time and peak memory of a file that runs the plan are this near to the plan's


@dataclass(frozen=True)
class ChangedField:
    """A field that the engine will run with another value, and what that alone changes in step time and memory."""

    field: str
    planned: str
    actual: str
    why: str
    step_time: float | None = None
    """change over the plan's; None if the change is not legal alone"""
    peak_gib: float | None = None


@dataclass(frozen=True)
class ExportCheck:
    """One engine's file: the plan in that engine, and what the file runs there."""

    engine: EngineFormat
    planned: Estimate
    actual: Estimate | None
    """of what the file makes the engine run; None if that is nothing"""
    differences: tuple[ChangedField, ...]
    plan_fits: bool = False
    """the plan fits the GPU in the engine it was made for"""

    @property
    def same(self) -> bool:
        return self.runs_plan and not self.too_large

    @property
    def too_large(self) -> bool:
        """The plan fits in its own engine alone."""
        return self.actual is not None and self.plan_fits and not self.actual.fits

    @property
    def runs_plan(self) -> bool:
        """Whether or not it fits."""
        if self.actual is None or any(one.field in OTHER_MODEL for one in self.differences):
            return False
        pairs = (self.planned.step_time_s, self.actual.step_time_s), (self.planned.peak_gib, self.actual.peak_gib)
        return all(abs(other / one - 1) <= CLOSE for one, other in pairs)

    def refusal(self) -> str:
        """Why the engine gets no file, in words."""
        title = self.engine.title
        if self.actual is not None and self.too_large:
            why = f"needs {self.actual.peak_gib:,.1f} GiB of {self.actual.capacity_gib:,.1f} in {title}"
        else:
            why = f"would be another in {title}: {', '.join(one.field for one in self.differences)}"
        return f"the plan {why}: plan for the engine {self.engine.framework} (--framework {self.engine.framework})"


def check_export(plan: Plan, engine: EngineFormat, file: File) -> ExportCheck:
    """The file as its engine reads it. What the user's program sets, and the GPUs, are taken from the plan."""
    own = plan.job.framework.engine == Framework.load(engine.framework).engine
    job = plan.job if own else plan.job.changed(framework=Framework.load(engine.framework))
    planned = estimate(job, plan.layout)  # the file may have been edited
    wanted = fields.plan_fields(job, plan.layout)
    settings = {name: value for name, value in engine.parse(file.text, file.name).items() if name != OWN_KEY}
    without_model = not fields.has_model(engine.read(settings, file.name, World(job.cluster.gpus)).fields)
    given = ImportOptions(cluster=job.cluster, model=job.model if without_model else None)
    differences = []
    if without_model and "model" not in engine.program:
        differences.append(ChangedField("model", job.model.name, "a stand-in", engine.lost["model"]))
    try:
        found = plan_from_text(engine, file.text, file.name, given).plan
    except SpecError as error:
        return ExportCheck(engine, planned, None, (*differences, ChangedField("file", "a run", "none", str(error))))
    ignored = {*fields.unused_fields(plan.layout), *header.KEPT_FIELDS, *header.DERIVED_FIELDS}
    actual = fields.plan_fields(found.job, found.layout)
    names = [name for name in dict.fromkeys((*wanted, *actual)) if name not in ignored]
    changed = [name for name in names if actual.get(name) != wanted.get(name)]
    differences += [
        _changed_field(job, plan.layout, planned, name, wanted.get(name), actual.get(name), engine) for name in changed
    ]
    if found.job.framework != job.framework:
        differences += _changed_framework(job, found.job, plan.layout, planned)
    return ExportCheck(engine, planned, found.estimate, tuple(differences), plan_fits=plan.estimate.fits)


def _changed_field(
    job: Job, layout: Layout, planned: Estimate, name: str, wanted: object, value: object, engine: EngineFormat
) -> ChangedField:
    section, _, field = name.partition(".")
    changed_job = job.changed(**{field: value}) if section == "job" and field != "seq" else job
    changed = layout.changed(**{field: value}) if section == "layout" else layout
    general = engine.lost.get("model.*") if section == "model" else None
    why = engine.lost.get(name) or general or f"{engine.title} has no such setting"
    if section == "model" or problem(changed_job, changed) is not None:
        return ChangedField(name, str(wanted), str(value), why)
    return ChangedField(name, str(wanted), str(value), why, *_change(planned, changed_job, changed))


def _changed_framework(job: Job, found: Job, layout: Layout, planned: Estimate) -> list[ChangedField]:
    """Overlaps and kernels that the estimate assumed and the file does not switch on."""
    differences = []
    for name in Framework.model_fields:
        wanted, value = getattr(job.framework, name), getattr(found.framework, name)
        if name not in ("name", "source") and wanted != value:
            changed = job.changed(framework=job.framework.model_copy(update={name: value}))
            change = _change(planned, changed, layout)
            if any(change):
                why = "no setting switches it on"
                differences.append(ChangedField(f"framework.{name}", str(wanted), str(value), why, *change))
    return differences


def _change(planned: Estimate, job: Job, layout: Layout) -> tuple[float, float]:
    """In step time, relative, and in peak memory."""
    other = drafts(job, [layout])[0]
    return other.step_time_s / planned.step_time_s - 1, other.peak_gib - planned.peak_gib
