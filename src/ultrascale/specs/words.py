"""Values written as words on a command line (`tp=8`, `sequence_parallel=false`), or a SpecError that says what would do."""

from __future__ import annotations

from collections.abc import Sequence

from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.validate import shown

_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def flag(what: str, field: str, text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise SpecError(f"{what}.{field} is {shown(text)} but must be true or false, such as {field}=true")
    return _TRUTH[text.lower()]


def whole(what: str, field: str, text: str, example: str = "2") -> int:
    try:
        return int(text)
    except ValueError:
        raise SpecError(f"{what}.{field} is {shown(text)} but must be a whole number, such as {field}={example}") from None


def choice(what: str, field: str, text: str, choices: Sequence[str]) -> str:
    if text.lower() in choices:
        return text.lower()
    hint = nearest(text.lower(), choices)
    advice = hint if hint.startswith("did you mean") else f"try {field}={choices[0]}"
    raise SpecError(f"{what}.{field} is {shown(text)} but must be one of {', '.join(choices)}: {advice}")
