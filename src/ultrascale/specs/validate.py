"""From plain data to a validated noun, with problems reported as one sentence each.

`build` is the only door from mappings to pydantic classes. It turns pydantic's error list into a `SpecError` that names
the dotted field, what was given, what is allowed and, where the field has an example or a default, a value that works.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ultrascale.specs.errors import SpecError, nearest

T = TypeVar("T", bound=BaseModel)


class FrozenSpec(BaseModel):
    """A spec, or a part of one: it does not change, and has finite numbers and no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


_KINDS = {dict: "a mapping", list: "a list", tuple: "a list", str: "text", type(None): "empty"}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_TYPES = {
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "string_type": "text",
    "string_too_short": "text that is not empty",
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    "finite_number": "a finite number",
}
MOST_SENTENCES = 3  # more are a wall: the file was meant for something else


def build(cls: type[T], data: Mapping[str, Any], what: str) -> T:
    """Validate `data` into `cls`, or raise a SpecError with one sentence per problem, fields named `what.field`."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{what} is {kind_of(data)} but must be a mapping of fields to values{_first_field(cls)}")
    try:
        return cls.model_validate(dict(data))
    except ValidationError as failure:
        # Errors of a union's members can read alike: each sentence is printed once.
        sentences = dict.fromkeys(_sentence(cls, error, what) for error in failure.errors(include_url=False))
        distinct = [sentence for sentence in sentences if sentence]
        more = [f"and {len(distinct) - MOST_SENTENCES} more"] if len(distinct) > MOST_SENTENCES else []
        raise SpecError("; ".join(distinct[:MOST_SENTENCES] + more)) from None


def _sentence(cls: type[BaseModel], error: ErrorDetails, what: str) -> str:
    path, field, owner = _resolve(cls, error["loc"])
    name = ".".join([what, *path])
    kind, context, given = error["type"], error.get("ctx", {}), shown(error["input"])
    if kind == "default_factory_not_called":
        return ""  # The field it derives from is wrong and has its own sentence.
    if kind == "invalid_key":
        return f"{what} has the key {given} but fields are named by text: {nearest(given, owner.model_fields)}"
    if kind == "extra_forbidden":
        place = ".".join([what, *path[:-1]])
        return f"{name} is not a field of {place}: {nearest(path[-1], owner.model_fields)}"
    if kind == "missing":
        return f"{name} is missing{_example(field, ': give it, e.g. ') or ': give it'}"
    if kind in ("value_error", "assertion_error"):
        return str(context.get("error", error["msg"]))
    if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
        return f"{name} is {given} but must be a mapping of fields to values{_example(field)}"
    if kind in ("literal_error", "enum"):
        hint = nearest(error["input"], _literals(field)) if isinstance(error["input"], str) and field else ""
        advice = f": {hint}" if hint.startswith("did you mean") else _example(field)
        return f"{name} is {given} but must be {context.get('expected', 'a known word')}{advice}"
    return f"{name} is {given} but must be {_expectation(error, field)}{_example(field)}"


def _expectation(error: ErrorDetails, field: FieldInfo | None) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind.startswith("int"):
        return f"a whole number{_bounds(field)}"
    if kind.startswith("float"):
        return f"a number{_bounds(field)}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"{words} {_number(context[bound])}"
    if kind in _TYPES:
        return _TYPES[kind]
    if kind == "too_short":
        return f"at least {context['min_length']} long"
    # What is left of pydantic's catalogue reads well after "must be" once its opening is gone.
    message = error["msg"][0].lower() + error["msg"][1:]
    return message.removeprefix("input should be ").removeprefix("a valid ")


def _resolve(cls: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[list[str], FieldInfo | None, type[BaseModel]]:
    """The path as the user wrote it, the innermost field on it and that field's class, found by walking the types."""
    path: list[str] = []
    field: FieldInfo | None = None
    owner: type[BaseModel] = cls
    inside: Any = cls  # The type at the current place.
    for part in loc:
        members = _members(inside)
        if len(members) > 1:  # pydantic names the union's member here: no part of what the user wrote.
            inside = next((member for member in members if getattr(member, "__name__", None) == part), Any)
        elif isinstance(members[0], type) and issubclass(members[0], BaseModel):
            owner, field = members[0], members[0].model_fields.get(str(part))
            inside = field.annotation if field else Any
            path.append(str(part))
        elif part != "[key]":  # pydantic's mark that a dict's key, not its value, is wrong.
            inside = _element(members[0])
            path.append(str(part))
    return path, field, owner


def _members(annotation: Any) -> list[Any]:
    """The members of a union without None; any other type alone."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [found for member in typing.get_args(annotation) if member is not type(None) for found in _members(member)]
    return [annotation]


def _element(annotation: Any) -> Any:
    arguments = [argument for argument in typing.get_args(annotation) if argument not in (type(None), Ellipsis)]
    return arguments[-1] if arguments else Any


def _literals(field: FieldInfo | None) -> list[str]:
    found: list[str] = []
    pending: list[Any] = [field.annotation] if field else []
    while pending:
        annotation = pending.pop()
        if typing.get_origin(annotation) is typing.Literal:
            found += [value for value in typing.get_args(annotation) if isinstance(value, str)]
        else:
            pending += typing.get_args(annotation)
    return found


def _bounds(field: FieldInfo | None) -> str:
    for constraint in field.metadata if field else ():
        if getattr(constraint, "gt", None) is not None:
            return f" greater than {_number(constraint.gt)}"
        if getattr(constraint, "ge", None) is not None:
            return f" of at least {_number(constraint.ge)}"
    return ""


def _example(field: FieldInfo | None, lead: str = ": try ") -> str:
    """A value that works, from the field's `examples` or else its default; empty when the class offers neither."""
    if field is None:
        return ""
    if field.examples:
        return lead + " or ".join(_written(example) for example in field.examples)
    if isinstance(field.default, (bool, int, float, str)) and field.default != "":
        return lead + shown(field.default)
    return ""


def _written(example: object) -> str:
    if isinstance(example, Mapping):
        return "{" + ", ".join(f"{key}: {value}" for key, value in example.items()) + "}"
    return shown(example)


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _first_field(cls: type[BaseModel]) -> str:
    for name, field in cls.model_fields.items():
        if field.examples:
            return f", e.g. {name}: {field.examples[0]}"
    return ""


def shown(value: object) -> str:
    """A value as a person would write it in YAML, cut when long."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, (Mapping, list, tuple)) or not isinstance(value, (str, int, float)):
        return kind_of(value)
    try:
        text = repr(value)
    except ValueError:  # An integer beyond Python's digit limit.
        return "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def kind_of(value: object) -> str:
    return _KINDS.get(type(value), f"of type {type(value).__name__}")
