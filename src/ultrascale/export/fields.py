"""A job and a layout as a mapping of dotted fields (`layout.tp`, `job.seq`, `model.moe.experts`), and back.

An engine's settings give some of the fields, lines in the header of its file the others; they are merged here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.engines import has_effect
from ultrascale.specs.blocks import MLA, ROPE_FIELDS, MoE, RopeScaling
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import job_to_mapping
from ultrascale.specs.validate import build, shown

Fields = dict[str, Any]

JOB = (
    *("seq", "batch_tokens", "precision", "gradients", "optimizer", "ema", "attention", "dropout"),
    *("adapter_rank", "adapter_targets", "total_tokens"),
)
_PARTS: dict[str, type[BaseModel]] = {"mla": MLA, "moe": MoE, "rope_scaling": RopeScaling}
_SHORT_CLUSTER = re.compile(r"[0-9]{1,9}x(?:[0-9]{1,9} )?[a-zA-Z][\w\-]*")


def all_field_names() -> set[str]:
    """Every field that a header line may give."""
    parts = {f"model.{part}.{name}" for part, cls in _PARTS.items() for name in cls.model_fields}
    whole = {"model", "job.cluster", "job.framework"}
    layout = {f"layout.{name}" for name in Layout.model_fields}
    return whole | layout | {f"job.{name}" for name in JOB} | {f"model.{name}" for name in Model.model_fields} | parts


def plan_fields(job: Job, layout: Layout) -> Fields:
    """All fields of a plan but its estimate and reasons."""
    fields: Fields = {f"layout.{name}": value for name, value in layout.model_dump().items()}
    fields |= {f"job.{name}": getattr(job, name) for name in JOB}
    fields["job.cluster"] = _cluster_words(job.cluster)
    fields["job.framework"] = job_to_mapping(job)["framework"]
    return fields | model_fields(job.model)


def model_fields(model: Model) -> Fields:
    fields: Fields = {}
    for name, value in model.model_dump().items():
        if name == "rope_scaling" and model.rope_scaling is not None:
            read = ("rope_type", "factor", *ROPE_FIELDS[model.rope_scaling.rope_type])
            fields |= {f"model.{name}.{inner}": value[inner] for inner in read}
        elif isinstance(value, Mapping):
            fields |= {f"model.{name}.{inner}": one for inner, one in value.items()}
        else:
            fields[f"model.{name}"] = value
    return fields


def with_defaults(found: Fields, framework: str) -> Fields:
    """The fields found, and the defaults of the others; those of the model only if the fields found make one."""
    defaults: Fields = {f"layout.{name}": value for name, value in Layout().model_dump().items()}
    derived = ("seq", "batch_tokens", *(["total_tokens"] if "job.steps" in found else []))
    defaults |= {f"job.{name}": Job.model_fields[name].default for name in JOB if name not in derived}
    defaults["job.framework"] = framework
    if has_model(found):
        found = {**found, **model_fields(model_of(found))}
    return defaults | found


def with_derived(fields: Fields) -> Fields:
    """The fields, and those that follow from them: the batch in tokens, and all tokens from the number of steps."""
    known, count = dict(fields), fields.get("job.steps")
    known.pop("job.steps", None)
    if "job.seq" not in known:
        return known
    sequences = math.prod(known.get(f"layout.{name}", 1) for name in ("dp", "mbs", "gas"))
    batch = known.setdefault("job.batch_tokens", sequences * known["job.seq"])
    if count is not None:
        known.setdefault("job.total_tokens", count * batch)
    return known


def has_model(fields: Fields) -> bool:
    return all(f"model.{name}" in fields for name in ("layers", "hidden", "heads", "vocab"))


def without_model(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name != "model" and not name.startswith("model.")}


def merged(fields: Fields, more: Fields) -> Fields:
    """`more` over `fields`; a whole model replaces every field of a model, a field of a part replaces a part that was null."""
    if "model" in more:
        more = {**without_model(more), **model_fields(model_from_mapping(more["model"]))}
        fields = without_model(fields)
    if "model.name" in more and "model.source" not in more:
        fields = {name: value for name, value in fields.items() if name != "model.source"}
    for part in _PARTS:
        if any(name.startswith(f"model.{part}.") for name in more):
            fields = {name: value for name, value in fields.items() if name != f"model.{part}"}
        if more.get(f"model.{part}", ...) is None:
            fields = {name: value for name, value in fields.items() if not name.startswith(f"model.{part}.")}
    return fields | more


def model_of(fields: Fields) -> Model:
    """The model that the fields describe: the preset of its name, or of its shape where it has none, else a new one."""
    data: dict[str, Any] = {}
    for name, value in fields.items():
        if name.startswith("model.") and value is not None:
            first, _, inner = name.removeprefix("model.").partition(".")
            if inner:
                data.setdefault(first, {})[inner] = value
            else:
                data[first] = value
    named = "name" in data
    model = build(Model, {"name": "imported", **data}, "model")
    if "source" in data:
        return model
    same = [one for one in Model.presets().values() if same_shape(one, model)]
    return next((one for one in same if not named or one.name == model.name), model)


def same_shape(one: Model, other: Model) -> bool:
    """Equal but for name and source."""
    return one.model_copy(update={"name": other.name, "source": other.source}) == other


def model_from_mapping(data: Any) -> Model:
    if not isinstance(data, Mapping):
        raise SpecError(f"model is {shown(data)} in the file's header but must be a mapping of its fields")
    return build(Model, data, "model")


def model_to_mapping(model: Model) -> dict[str, Any]:
    return model.model_dump(mode="json", exclude_defaults=True)


def job_and_layout(fields: Fields) -> tuple[Job, Layout]:
    layout = build(Layout, {name: fields[f"layout.{name}"] for name in Layout.model_fields}, "layout")
    job: dict[str, Any] = {name: fields[f"job.{name}"] for name in JOB if f"job.{name}" in fields}
    job["cluster"] = cluster_of(fields.get("job.cluster"))
    job["framework"] = fields["job.framework"]
    job["model"] = model_of(fields)
    return build(Job, job, "job"), layout


def cluster_of(value: Any) -> Cluster:
    if isinstance(value, Cluster):
        return value
    if isinstance(value, Mapping):
        return Cluster.from_mapping(value)
    if isinstance(value, str) and _SHORT_CLUSTER.fullmatch(value):  # never a path: the file may come from anywhere
        return Cluster.load(value)
    raise SpecError(f"job.cluster is {shown(value)} but must name GPUs and their number, such as 64xh100")


def _cluster_words(cluster: Cluster) -> str | dict[str, Any]:
    """The short form, such as `64xh100`, if it means the same cluster."""
    kind = cluster.gpu.name
    if kind in GPU.presets():
        for words in (f"{cluster.gpus}x{kind}", f"{cluster.nodes}x{cluster.gpus_per_node} {kind}"):
            try:
                if _SHORT_CLUSTER.fullmatch(words) and Cluster.load(words) == cluster:
                    return words
            except SpecError:  # a number of GPUs that does not fill the usual nodes
                continue
    return cluster.to_mapping()


def unused_fields(layout: Layout) -> set[str]:
    """Fields that have no effect in this layout."""
    row = LayoutColumns.of([layout])
    return {f"layout.{name}" for name in Layout.model_fields if not has_effect(name, row)[0]}


def missing_fields(wanted: Fields, found: Fields) -> Fields:
    """The fields of a plan that a file does not give: they go to its header."""
    missing = {name: value for name, value in wanted.items() if name not in found or found[name] != value}
    model = {name: value for name, value in wanted.items() if name.startswith("model.")}
    if not has_model(found):
        return {**without_model(missing), "model": model_to_mapping(model_of(model))}
    preset = Model.presets().get(str(model["model.name"]))
    if preset is not None and "model.name" in missing and model_fields(preset) == model:
        missing.pop("model.source", None)  # the name brings it
    removed = [name for name in found if name.startswith("model.") and name not in wanted and name.count(".") == 2]
    return missing | {name.rpartition(".")[0]: None for name in removed}


def check_header(given: Fields) -> Fields:
    """The fields of a header; SpecError unless all are known and those that others follow from are valid."""
    fields = all_field_names()
    for name in given:
        if name not in fields:
            raise SpecError(f"the file's header gives '{name:.60}', which is no field of a plan: {nearest(name, fields)}")
    layout = {name.removeprefix("layout."): value for name, value in given.items() if name.startswith("layout.")}
    build(Layout, layout, "layout")
    for name in ("job.seq", "job.batch_tokens"):
        value = given.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SpecError(f"{name} is {shown(value)} in the file's header but must be a whole number of at least 1: try 8192")
    return given
