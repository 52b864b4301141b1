"""Numbers and flags in the cells of a row: blank means unknown; a cell that cannot be read raises with its name."""

from __future__ import annotations

from collections.abc import Mapping


class UnmodelledRowError(Exception):
    """Why a row cannot be modelled."""


def number(values: Mapping[str, str], name: str) -> float | None:
    text = values.get(name, "")
    if not text or text.lower() in ("nan", "none", "null", "-"):
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        raise UnmodelledRowError(f"{name} is '{text}', not a number") from None
    if not 0 <= value < 1e18:
        raise UnmodelledRowError(f"{name} is {text}: it must be a number that is not negative")
    return value


def whole(values: Mapping[str, str], name: str) -> int | None:
    value = number(values, name)
    if value is None:
        return None
    if value != int(value) or value < 1:
        raise UnmodelledRowError(f"{name} is {values[name]}: it must be a whole number of at least 1")
    return int(value)


def flag(values: Mapping[str, str], name: str) -> bool | None:
    """yes, true or 1; no, false or 0; anything else says nothing."""
    text = values.get(name, "").lower()
    return True if text in ("yes", "true", "1") else False if text in ("no", "false", "0") else None
