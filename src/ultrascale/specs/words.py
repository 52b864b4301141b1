"""Fields written as words on a command line (`tp=8`, `sequence_parallel=false`), or a SpecError that says what would do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.validate import build, shown

_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
NULL = ("none", "null")


def field_from_text(
    cls: type[BaseModel],
    what: str,
    field: str,
    text: str,
    *,
    null: Sequence[str] = NULL,
    example: str = "",
    beside: Mapping[str, Any] | None = None,
) -> Any:
    """The value of a field of `cls`, once its own bounds hold.

    `what` names the class in sentences, `null` are words for none, `beside` other fields that the bounds need.
    """
    if field not in cls.model_fields:
        raise SpecError(f"{what} has no field {shown(field)}: {nearest(field.lower(), cls.model_fields)}")
    text, found = text.strip(), cls.model_fields[field]
    example = example or shown(found.examples[0] if found.examples else found.default)
    kinds = get_args(found.annotation) or (found.annotation,)
    if type(None) in kinds and text.lower() in null:
        return None
    if bool in kinds:
        return flag(what, field, text)
    if choices := [kind for kind in kinds if isinstance(kind, str)]:
        return choice(what, field, text, choices)
    value: Any = text
    if float in kinds:
        value = _parsed(float, "a number", what, field, text, example)
    elif int in kinds:
        value = _parsed(int, "a whole number", what, field, text, example)
    return getattr(build(cls, {**(beside or {}), field: value}, what), field)


def flag(what: str, field: str, text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise SpecError(f"{what}.{field} is {shown(text)} but must be true or false, such as {field}=true")
    return _TRUTH[text.lower()]


def choice(what: str, field: str, text: str, choices: Sequence[str]) -> str:
    if text.lower() in choices:
        return text.lower()
    hint = nearest(text.lower(), choices)
    advice = hint if hint.startswith("did you mean") else f"try {field}={choices[0]}"
    raise SpecError(f"{what}.{field} is {shown(text)} but must be one of {', '.join(choices)}: {advice}")


def _parsed(kind: type[Any], words: str, what: str, field: str, text: str, example: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise SpecError(f"{what}.{field} is {shown(text)} but must be {words}, such as {field}={example}") from None
