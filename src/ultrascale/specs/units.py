"""Numbers as people write them: `4M` tokens, `8k` context, `15T` tokens of data; and back into words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import TypeVar

from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

T = TypeVar("T")
GIB = 2**30
_LONGEST = 64  # characters; 2^63 has 19 digits

# A batch of "4M tokens" is 512 sequences of 8,192 = 4,194,304 everywhere in this field (Llama 3's "16M" is 2,048 × 8,192),
# and "8k" is 8,192. Totals ("15T tokens of data") are decimal.
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*)"
_NUMBER = re.compile(rf"\s*({_DIGITS}(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]?)\s*\Z")


def tokens(text: str | int, field: str, example: str = "4M or 4194304") -> int:
    """`4M` → 4,194,304 and `8k` → 8,192 (binary, as batches and contexts are cut); `4e6` and `4000000` mean themselves."""
    return _parse(text, field, _BINARY, example)


def total_tokens(text: str | int, field: str) -> int:
    """`15T` → 15,000,000,000,000 (decimal, as data sets are counted)."""
    return _parse(text, field, _DECIMAL, "15T or 300B")


def memory_gib(text: str, field: str) -> float:
    """`4GiB`, `512 MiB` or `4` in GiB."""
    match = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*(gib|mib|)\s*", text.lower()) if len(text) <= _LONGEST else None
    if match is None:
        raise SpecError(f"{field} is {shown(text)} but must be an amount of memory, such as 4GiB")
    return float(match[1]) / (2**10 if match[2] == "mib" else 1)


_MONEY = ((1e9, "B$"), (1e6, "M$"), (1e3, "k$"))
_HOURS = {"h": 1, "d": 24, "w": 168}


def duration_days(text: str, field: str) -> float:
    """`30d`, `12h`, `2w` or `1.5d` in days."""
    match = re.fullmatch(r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([hdw])\s*", text.lower()) if len(text) <= _LONGEST else None
    if match is None or float(match[1]) == 0:
        raise SpecError(f"{field} is {shown(text)} but must be hours, days or weeks above zero: try 12h, 30d or 2w")
    return float(match[1]) * _HOURS[match[2]] / 24


def usd(text: str, field: str, example: str = "2M$, 500k$ or 2e6") -> float:
    """`2M$`, `$500k`, `2e6` or `2,000,000` in US dollars."""
    words = text.strip().removeprefix("$").removesuffix("$") if len(text) <= _LONGEST and text.count("$") < 2 else ""
    match = _NUMBER.match(words)
    value = _fraction(match[1]) * _DECIMAL.get(match[2].lower(), 0) if match else Fraction(0)
    if not 0 < value <= 10**15:
        raise SpecError(f"{field} is {shown(text)} but must be US dollars above zero: try {example}")
    return float(value)


def _parse(text: str | int, field: str, suffixes: dict[str, int], example: str) -> int:
    if isinstance(text, int) and not isinstance(text, bool):
        value = Fraction(text)
    else:
        match = _NUMBER.match(text) if isinstance(text, str) and len(text) <= _LONGEST else None
        if not match or match[2].lower() not in suffixes:
            words = " or ".join(letter.upper() if letter != "k" else letter for letter in suffixes if letter)
            raise SpecError(
                f"{field} is {shown(text)} but must be a whole number, with {words} after it or nothing: try {example}"
            )
        value = _fraction(match[1]) * suffixes[match[2].lower()]
    if not 1 <= value < 2**63:
        raise SpecError(f"{field} is {shown(text)} but must be at least 1 and below 2^63: try {example}")
    if value.denominator != 1:
        raise SpecError(f"{field} is {shown(text)}, which is not a whole number: try {round(value)}")
    return int(value)


def _fraction(digits: str) -> Fraction:
    """Exact, so that no digit is lost; an exponent beyond any count of tokens is cut before it is multiplied out."""
    number, _, exponent = digits.lower().replace("_", "").replace(",", "").partition("e")
    return Fraction(number) * Fraction(10) ** max(-_LONGEST, min(_LONGEST, int(exponent or 0)))


def gib(number_of_bytes: float) -> str:
    return f"{number_of_bytes / GIB:,.2f} GiB"


def byte_size(value: float) -> str:
    """`1.50 GiB`, `20.00 MiB`: with the largest unit of which there is a tenth."""
    for size, unit in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size / 10:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"


def seconds(value: float) -> str:
    """A duration with the unit that keeps three digits before the point."""
    if value >= 1 or value == 0:
        return f"{value:,.2f} s"
    return f"{value * 1e3:,.1f} ms" if value >= 1e-3 else f"{value * 1e6:,.1f} µs"


def count(value: float) -> str:
    """`8.03 B`, `405.9 B`, `1.01 T`: parameters and tokens for reading, never for arithmetic."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:
            return f"{value / limit:.3g} {unit}" if abs(value) < 999.5 * limit else f"{value / limit:,.0f} {unit}"
    return f"{value:g}"


def money(value: float) -> str:
    """`1.06 M$`, `850 k$`, `12.5 $`: for reading."""
    limit, unit = next((pair for pair in _MONEY if value >= 0.9995 * pair[0]), (1.0, "$"))
    return f"{value / limit:.3g} {unit}" if value < 999.5 * limit else f"{value / limit:,.0f} {unit}"


def groups_up_to(limit: float, items: Iterable[T], size: Callable[[T], float]) -> list[list[T]]:
    """Consecutive items in groups of at most `limit` in total; a larger item is a group of its own."""
    groups: list[list[T]] = []
    total = 0.0
    for item in items:
        if not groups or total + size(item) > limit:
            groups.append([])
            total = 0.0
        groups[-1].append(item)
        total += size(item)
    return groups
