"""The settings of a foreign file under dotted names, read one by one; what nobody asked for is told at the end."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

CLOSE = 0.8  # how alike a key must be to a known one to be taken for a slip
MOST_UNREAD = 60
DEEPEST = 20
MOST_KEYS = 10_000  # YAML's aliases multiply: a short file could name more than there is memory for
MOST_SLIPS = 100


class Keys:
    """`where` names the file in sentences."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._data = _flat(data, where)
        self._asked: set[str] = set()
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        self._asked.add(key)
        return self._data.get(key) is not None

    def value(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        found = self._data.get(key)
        return default if found is None else found

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.value(key, default)
        if value is None:
            raise SpecError(f"{self.where}: {key} is missing{self.slip(key)}: give it, such as {max(least, 8)}")
        try:
            count = int(value) if isinstance(value, str) else value
        except ValueError:
            count = None
        if isinstance(count, bool) or not isinstance(count, int):
            raise SpecError(f"{self.where}: {key} is {shown(value)} but must be a whole number, such as {max(least, 8)}")
        if not least <= count <= 2**40:
            raise SpecError(f"{self.where}: {key} is {shown(count)} but must be from {least} to 2^40: try {max(least, 1)}")
        return count

    def number(self, key: str, default: float) -> float:
        value = self.value(key, default)
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise SpecError(f"{self.where}: {key} is {shown(value)} but must be a number, such as {default:g}") from None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        words = {"true": True, "false": False, "1": True, "0": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if not isinstance(value, bool):
            raise SpecError(f"{self.where}: {key} is {shown(value)} but must be true or false")
        return value

    def word(self, key: str, choices: Mapping[str, Any], default: str) -> Any:
        """What a word of the engine means here."""
        value = self.value(key, default)
        if isinstance(value, str) and value in choices:
            return choices[value]
        close = get_close_matches(str(value)[:60], list(choices), n=1)
        advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(choices)}"
        raise SpecError(f"{self.where}: {key} is {shown(value)}, which cannot be read: {advice}")

    def slip(self, key: str) -> str:
        """Of a setting that is not there: the one, never asked for, that may mean it."""
        unasked = [] if key in self._data else [name for name in self._data if name not in self._asked][:MOST_SLIPS]
        close = get_close_matches(key, unasked, n=1, cutoff=CLOSE)
        return f" (there is '{close[0]:.80}')" if close else ""

    def passed(self, *keys: str) -> None:
        """Known keys that say nothing about a plan."""
        self._asked.update(keys)

    def also_known(self, *keys: str) -> None:
        """Settings that have no place in a plan, but may be meant by a slip."""
        self._known.update(keys)

    def unread(self) -> list[str]:
        """What was passed over: slips by name with what they may mean, all others in one line."""
        rest: list[str] = []
        said: list[str] = []
        absent = sorted((self._asked | self._known) - set(self._data))
        for key in (key for key in self._data if key not in self._asked):
            skips = key in self._known or len(rest) > MOST_SLIPS
            close = [] if skips else get_close_matches(key[:80], absent, n=1, cutoff=CLOSE)
            if close:
                said.append(f"not read: {key:.80}: did you mean '{close[0]}'?")
            else:
                rest.append(f"{key:.80}")
        if rest:
            more = f" and {len(rest) - MOST_UNREAD} more" if len(rest) > MOST_UNREAD else ""
            said.append("not read, since a plan has no place for it: " + ", ".join(rest[:MOST_UNREAD]) + more)
        return said


def _flat(data: Mapping[str, Any], where: str, before: str = "", depth: int = 0) -> dict[str, Any]:
    if depth > DEEPEST:
        raise SpecError(f"{where}: {before} is nested too deeply: expected groups of settings")
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, where, f"{name}.", depth + 1)
        else:
            flat[name] = value
        if len(flat) > MOST_KEYS:
            raise SpecError(
                f"{where} has more than {MOST_KEYS:,} settings, too many for a configuration: is it the right file?"
            )
    return flat
