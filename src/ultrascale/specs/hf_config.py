"""Model -> Hugging Face config.json: the first family whose config, read again, is the same Model.

A Model that no family can say is refused by its field: a config that left it out would load, and compute something else.
"""

from __future__ import annotations

import math
from itertools import cycle, islice
from typing import Any

from ultrascale.specs.errors import SpecError
from ultrascale.specs.hf_families import FAMILIES
from ultrascale.specs.model import Model
from ultrascale.specs.validate import shown

Config = dict[str, Any]
Difference = tuple[str, Any, Any]
"""a field's dotted name, its value, and what a config would say it is"""

DTYPES: dict[str, str] = {"bf16": "bfloat16", "fp32": "float32"}
NOT_IN_CONFIG = ("name", "family", "source", "ignored_keys")


def config_of(model: Model, dtype: str) -> Config:
    """What config.json says of `model`, its weights stored as `dtype`: bf16 or fp32."""
    if dtype not in DTYPES:
        raise SpecError(f"dtype is {shown(dtype)} but weights are written as {' or '.join(DTYPES)}: try bf16")
    return {**_config(model, family_of(model)), "torch_dtype": DTYPES[dtype]}


def family_of(model: Model) -> str:
    """The model_type whose classes compute what `model` says, its own before others; SpecError with the field that the nearest
    one has not.
    """
    nearest: tuple[str, list[Difference]] | None = None
    for family in FAMILIES if model.family is None else (model.family, *FAMILIES):
        differences = _differences(model, family)
        if not differences:
            return family
        if nearest is None or len(differences) < len(nearest[1]):
            nearest = family, differences
    assert nearest is not None
    family, ((field, given, said), *_) = nearest
    raise SpecError(
        f"model.{field} is {shown(given)} ({model.name}), which no Hugging Face family can say beside its other fields: in "
        f"{family}, the nearest, it is {shown(said)}: try {field}: {shown(said)}"
    )


def _config(model: Model, family: str) -> Config:
    one = FAMILIES[family]
    # Some classes have a padding token by default, which a smaller vocabulary has not.
    return {"architectures": [one.architecture], "model_type": family, "pad_token_id": None, **one.write(model)}


def _differences(model: Model, family: str) -> list[Difference]:
    """What a config of the family, read again, says differently; empty: nothing."""
    try:
        back = Model.from_hf(_config(model, family))
    except SpecError as error:
        return [("shape", model.name, str(error))] * len(Model.model_fields)
    ours, theirs = map(_fields, (model, back))
    pairs = [(name, ours.get(name), theirs.get(name)) for name in {**ours, **theirs}]
    return [(name, one, other) for name, one, other in pairs if not _equal(one, other)]


def _fields(model: Model) -> dict[str, Any]:
    """By dotted name; patterns repeated over the layers, which a shorter one may say too."""
    found = _flat(model.model_dump(exclude=set(NOT_IN_CONFIG)))
    patterns = {name: found[name] for name in ("attention_pattern", "rope_pattern")}
    return found | {name: tuple(islice(cycle(pattern), model.layers)) for name, pattern in patterns.items()}


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in fields.items():
        found |= {f"{name}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)  # a value may be stored as its inverse
    return bool(one == other)
