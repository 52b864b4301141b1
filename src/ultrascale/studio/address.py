"""The settings of a page as its address: a plan is shared by sending the address.

Nothing here reads a file: a model is a preset's name or pasted text, a cluster is a GPU kind and two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

from ultrascale.plan.candidates import LayoutConstraints
from ultrascale.plan.reasons import with_batch
from ultrascale.specs import units
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import mapping_of
from ultrascale.specs.framework import Framework
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout, field_value
from ultrascale.specs.model import LIST_PRESETS, Model
from ultrascale.specs.validate import build

LONGEST = 20_000  # characters of one field: a config.json has some thousand
MOST_GPUS = 65_536


@dataclass(frozen=True)
class PlannerQuery:
    model: str = "llama-3-8b"
    shape: str = ""
    """a pasted model, YAML or config.json; empty: the preset"""
    gpu: str = "h100"
    nodes: str = "8"
    per_node: str = "8"
    batch: str = "1M"
    seq: str = "8k"
    precision: str = "bf16"
    gradients: str = "fp32"
    optimizer: str = "adamw"
    objective: str = "throughput"
    framework: str = "ultrascale"
    fix: str = ""
    forbid: str = ""
    layout: str = ""
    """fields edited by hand: `tp=2,pp=4`; empty: the best layout"""
    theme: str = "light"

    @classmethod
    def from_query(cls, query: Mapping[str, str]) -> PlannerQuery:
        known = {field.name for field in fields(cls)}
        return cls(**{name: value[:LONGEST] for name, value in query.items() if name in known})

    def query(self) -> str:
        """Only settings that differ from the default."""
        plain = PlannerQuery()
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)}
        return urlencode(changed)

    def changed(self, **values: str) -> PlannerQuery:
        return replace(self, **{name: value[:LONGEST] for name, value in values.items()})

    def the_model(self) -> Model:
        if self.shape:
            return pasted(self.shape)
        presets = Model.presets()
        if self.model not in presets:
            raise SpecError(f"model is '{self.model:.60}': {nearest(self.model, presets, LIST_PRESETS)}")
        return presets[self.model]

    def the_cluster(self) -> Cluster:
        kinds = GPU.presets()
        if self.gpu not in kinds:
            raise SpecError(f"gpu is '{self.gpu:.40}': {nearest(self.gpu, list(kinds))}")
        nodes, per_node = (_whole(name, getattr(self, name)) for name in ("nodes", "per_node"))
        if nodes * per_node > MOST_GPUS:
            raise SpecError(f"nodes × per_node is {nodes * per_node:,} GPUs but at most {MOST_GPUS:,} are planned here")
        return Cluster.of(kinds[self.gpu], nodes=nodes, gpus_per_node=per_node)

    def job(self) -> Job:
        frameworks = Framework.presets()
        if self.framework not in frameworks:
            raise SpecError(f"framework is '{self.framework:.40}': {nearest(self.framework, list(frameworks))}")
        engine = frameworks[self.framework]
        settings = {
            "model": self.the_model(),
            "cluster": self.the_cluster(),
            "seq": units.tokens(self.seq, "seq", "8192 or 8k"),
            "batch_tokens": units.tokens(self.batch, "batch"),
            "precision": self.precision,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "framework": engine,
            "attention": "plain" if engine.attention.startswith("plain") else "flash",
        }
        return build(Job, settings, "job")

    def field_errors(self) -> dict[str, str]:
        """What is wrong with a field by itself, by the field's name."""
        checks: dict[str, Callable[[], object]] = {
            "shape" if self.shape else "model": self.the_model,
            "nodes": lambda: _whole("nodes", self.nodes),
            "per_node": lambda: _whole("per_node", self.per_node),
            "batch": lambda: units.tokens(self.batch, "batch"),
            "seq": lambda: units.tokens(self.seq, "seq", "8192 or 8k"),
            "fix": lambda: LayoutConstraints.parse(words(self.fix)),
            "forbid": lambda: LayoutConstraints.parse((), words(self.forbid)),
        }
        found = {}
        for name, check in checks.items():
            try:
                check()
            except SpecError as error:
                found[name] = str(error)
        return found

    def own_layout(self, job: Job, best: Layout) -> Layout | None:
        """The best layout with what the user changed; None when that cannot be cut so."""
        changes: dict[str, Any] = {}
        for word in [part for part in self.layout.replace(" ", "").split(",") if part]:
            name, equals, value = word.partition("=")
            if not equals:
                raise SpecError(f"layout '{word:.40}' must be a field and a value, such as tp=2")
            changes[name] = field_value(name, value)
        return with_batch(job, best, **changes)


def words(text: str) -> list[str]:
    """The constraints of a field, separated by commas or spaces."""
    return [word for word in text.replace(",", " ").split() if word]


def changes_text(changes: Mapping[str, Any]) -> str:
    """`tp=2,pp=4`: what `own_layout` reads."""
    return ",".join(f"{name}={str(value).lower()}" for name, value in changes.items())


def pasted(text: str) -> Model:
    """A model file or a Hugging Face config.json, told apart by its fields."""
    data = mapping_of(text, "the pasted model", "JSON" if text.lstrip().startswith("{") else "YAML")
    if "hidden_size" in data or "n_embd" in data or "model_type" in data:
        return Model.from_hf(data, name=str(data.get("_name_or_path") or data.get("model_type") or "pasted"))
    return build(Model, {"name": "pasted", **data}, "model")


def _whole(name: str, text: str) -> int:
    # Five digits at most: Python refuses to read thousands of them.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MOST_GPUS)) and 1 <= int(text) <= MOST_GPUS):
        raise SpecError(f"{name} is '{text:.20}' but must be a whole number from 1 to {MOST_GPUS:,}, such as 8")
    return int(text)
