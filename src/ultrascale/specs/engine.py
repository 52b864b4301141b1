"""EngineLimits: which values of the layout and the job a training program runs, from presets/engines.yaml."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import Field

from ultrascale.schedules import REGISTRY
from ultrascale.specs.files import package_data
from ultrascale.specs.model import Model
from ultrascale.specs.validate import FrozenSpec, build

OWN_ENGINE = "ultrascale"


class EngineLimits(FrozenSpec):
    """A training program. A field that it does not name takes every value."""

    name: str
    title: str
    layout: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    job: dict[str, tuple[Any, ...]] = Field(default_factory=dict)

    @classmethod
    def load(cls, name: str) -> EngineLimits:
        return _presets()[name]


@cache
def _presets() -> dict[str, EngineLimits]:
    data = package_data("ultrascale.specs", "presets/engines.yaml")
    found = {}
    for name, fields in data.items():
        schedules = tuple(spec.name for spec in REGISTRY.values() if spec.runs_in(name))
        limits = {**fields.get("layout", {}), "schedule": schedules}
        found[name] = build(EngineLimits, {**fields, "name": name, "layout": limits}, f"engine {name}")
    return found


def model_problem(model: Model) -> str | None:
    """Why our engine cannot train the model, with what to try; None if it can."""
    if model.positions == "rotary" and model.rotated_dim % 2:
        field = "mla.qk_rope_head_dim" if model.mla else "head_dim" if model.rotary_dim is None else "rotary_dim"
        return f"model.{field} is {model.rotated_dim} but rotary positions turn pairs of numbers: try {model.rotated_dim + 1}"
    return None
