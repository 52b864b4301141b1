"""The table of an engine's settings: each row pairs one setting with a field of a plan, for writing and for reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from ultrascale.export import fields
from ultrascale.export.fields import Fields
from ultrascale.schedules import DEFAULT_SCHEDULE, REGISTRY
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import package_data
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.specs.validate import shown

CLOSE = 0.8  # how alike a key must be to a known one to be taken for a misspelling_hint
MAX_UNREAD_SHOWN = 60
MAX_DEPTH = 20
MAX_KEYS = 10_000  # YAML's aliases multiply: a short file could name more than there is memory for
MAX_MISSPELLINGS = 100
NOT_READ = "not read: "  # how a note on a misspelt setting begins
MAY_CHANGE = "not read, though it may change time or memory: "
NO_EFFECT = "not read, since it changes neither time nor memory: "


class PlanFields:
    """A plan to be written: its fields by dotted path, None for those that it does not have."""

    def __init__(self, job: Job, layout: Layout) -> None:
        # The whole training where its tokens are known, else a trial.
        steps = math.ceil(job.total_tokens / job.batch_tokens) if job.total_tokens else Training().steps
        self.job, self.layout, self.model = job, layout, job.model
        self.sequences = layout.dp * layout.mbs * layout.gas
        self.training = Training().changed(steps=steps)
        self._fields = fields.plan_fields(job, layout)

    def __getitem__(self, path: str) -> Any:
        return self._fields.get(path)

    @property
    def lowest_rate(self) -> float:
        """The learning rate at the end."""
        return float(f"{self.training.lr * self.training.min_lr_ratio:.6g}")


Cases = Mapping[Any, Mapping[str, Any]]
Condition = Callable[["PlanFields | SettingsReader"], bool]


@dataclass(frozen=True)
class Setting:
    """A row of the table: a setting of the engine and the field of a plan that it carries. p is the plan, s the settings."""

    key: str = ""
    """dotted, or an option of a command line; empty: `write` returns a mapping of several, or None"""
    path: str = ""
    """the field, such as `layout.tp`; empty: `read` returns a mapping of several, or None"""
    write: Callable[[PlanFields], Any] | None = None
    """the setting's value, which is left out if it is None; without `write` it is the field itself"""
    read: Callable[[SettingsReader], Any] = lambda s: None
    """the field's value; None: the field keeps its default"""
    when: Condition = lambda source: True
    """whether the row applies, when a plan is written and when settings are read"""
    written: Callable[[PlanFields], bool] = lambda p: True
    """whether a plan needs the setting; it is read in any case"""


def above_one(path: str) -> Condition:
    return lambda source: source[path] > 1


def has(path: str) -> Condition:
    return lambda source: source[path] is not None


# The usual rows. `others` are columns of Setting that differ from the usual.


def whole(
    key: str, path: str, default: int | Callable[[SettingsReader], int] | None = None, least: int = 1, **others: Any
) -> Setting:
    """A whole number; it must be there unless it has a default."""

    def read(settings: SettingsReader) -> int:
        return settings.whole(key, default(settings) if callable(default) else default, least)

    return Setting(key, path, **{"read": read, **others})


def optional(key: str, path: str, **others: Any) -> Setting:
    """A whole number that need not be there."""
    return Setting(key, path, read=lambda s: s.whole(key) if key in s else None, **others)


def number(key: str, path: str, default: float, **others: Any) -> Setting:
    return Setting(key, path, read=lambda s: s.number(key, default), **others)


def flag(key: str, path: str, on: Any = True, off: Any = False, default: bool = False, **others: Any) -> Setting:
    """True in the engine is `on` in a plan, false is `off`."""
    usual: Any = {"write": lambda p: p[path] == on, "read": lambda s: on if s.flag(key, default) else off}
    return Setting(key, path, **{**usual, **others})


def word(key: str, path: str, meanings: Mapping[str, Any], default: str, instead: str = "", **others: Any) -> Setting:
    """A word of the engine; the first with a meaning is written, `instead` (or the default) for a value without a word."""
    words = {meaning: name for name, meaning in reversed(list(meanings.items()))}
    usual: Any = {"write": lambda p: words.get(p[path], instead or default), "read": lambda s: s.word(key, meanings, default)}
    return Setting(key, path, **{**usual, **others})


def constant(key: str, value: Any, **others: Any) -> Setting:
    return Setting(key, write=lambda p: value, **others)


def cases(path: str, settings: Cases, **others: Any) -> Setting:
    """Several settings for some values of a field."""
    return Setting(path=path, write=lambda p: settings.get(p[path]), **others)


def implied(path: str, value: Any, **others: Any) -> Setting:
    """What the engine does without a setting."""
    return Setting(path=path, read=lambda s: value, **others)


def written(table: Iterable[Setting], job: Job, layout: Layout) -> dict[str, Any]:
    """The engine's settings for a plan, nested as their dotted keys say."""
    plan, settings = PlanFields(job, layout), dict[str, Any]()
    for row in table:
        if not row.when(plan) or not row.written(plan):
            continue
        value = row.write(plan) if row.write is not None else plan[row.path] if row.key else None
        for key, one in ({row.key: value} if row.key else value or {}).items():
            if one is not None:
                *groups, last = key.split(".")
                group = settings
                for name in groups:
                    group = group.setdefault(name, {})
                group[last] = one
    return settings


@dataclass(frozen=True)
class World:
    """What is known beside the file that is read: the number of GPUs and the size of the vocabulary."""

    gpus: int | None = None
    vocab: int | None = None


@dataclass(frozen=True)
class UnmodelledSettings:
    """Settings of an engine that a plan has no place for (settings.yaml)."""

    no_effect: tuple[str, ...] = ()
    """patterns of those that change neither time nor memory"""
    not_modelled: tuple[str, ...] = ()
    """patterns of some that may"""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """today's names by earlier ones"""

    @classmethod
    @cache
    def of(cls, engine: str) -> UnmodelledSettings:
        data = package_data("ultrascale.export", "settings.yaml")[engine]
        return cls(tuple(data["no_effect"]), tuple(data.get("not_modelled", ())), data.get("renamed", {}))


class SettingsReader:
    """The settings of a foreign file under dotted names, read row by row; a row that needs another's field has it read first.

    `where` names the file in sentences. `fields` and `notes` are what was found: the fields of a plan, and what was assumed
    or not read.
    """

    def __init__(
        self, table: Iterable[Setting], data: Mapping[str, Any], where: str, world: World, unmodelled: UnmodelledSettings
    ) -> None:
        self.data, self.where, self.world, self._unmodelled = data, where, world, unmodelled
        self.fields: Fields = {}
        self.notes: list[str] = []
        self._rows = {row.path or id(row): row for row in table}
        self._done: set[str | int] = set()
        flat = _flat(data, where)
        renamed = {self._unmodelled.renamed.get(key, key): value for key, value in flat.items()}
        self._flat = {**renamed, **{key: value for key, value in flat.items() if key in renamed}}
        self._used: set[str] = set()

    def read(self) -> None:
        for path in self._rows:
            self._read(path)

    def _read(self, path: str | int) -> None:
        if path in self._done or path not in self._rows:
            return
        self._done.add(path)
        row = self._rows[path]
        value = row.read(self) if row.when(self) else None
        if value is not None:
            self.fields |= {row.path: value} if row.path else value

    def __getitem__(self, path: str) -> Any:
        """The field at `path`, None where the settings do not give it."""
        self._read(path)
        return self.fields.get(path)

    def __contains__(self, key: str) -> bool:
        return self.value(key) is not None

    def value(self, key: str, default: Any = None) -> Any:
        self._used.add(key)
        found = self._flat.get(key)
        return default if found is None else found

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self.value(key, default)
        if value is None:
            raise self.error(f"{key} is missing{self.misspelling_hint(key)}: give it, such as {max(least, 8)}")
        try:
            count = int(value) if isinstance(value, str) else value
        except ValueError:
            count = None
        if isinstance(count, bool) or not isinstance(count, int):
            raise self.error(f"{key} is {shown(value)} but must be a whole number, such as {max(least, 8)}")
        if not least <= count <= 2**40:
            raise self.error(f"{key} is {shown(count)} but must be from {least} to 2^40: try {max(least, 1)}")
        return count

    def number(self, key: str, default: float) -> float:
        value = self.value(key, default)
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError):
            raise self.error(f"{key} is {shown(value)} but must be a number, such as {default:g}") from None

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        words = {"true": True, "false": False, "1": True, "0": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if isinstance(value, str) and value.startswith("$"):  # in a script, a flag before a variable without a value
            return True
        if not isinstance(value, bool):
            raise self.error(f"{key} is {shown(value)} but must be true or false")
        return value

    def word(self, key: str, meanings: Mapping[str, Any], default: str) -> Any:
        """What a word of the engine means here."""
        value = self.value(key, default)
        if isinstance(value, str) and value in meanings:
            return meanings[value]
        close = get_close_matches(str(value)[:60], list(meanings), n=1)
        advice = f"did you mean {close[0]}?" if close else f"known: {', '.join(meanings)}"
        raise self.error(f"{key} is {shown(value)}, which cannot be read: {advice}")

    def data_parallel(self, others: int) -> int:
        """Data ranks, of the GPUs and the ranks that hold one replica."""
        gpus = self.world.gpus
        if gpus is None:
            raise SpecError(
                f"{self.where} does not say on how many GPUs it runs: give --cluster, such as --cluster {others}xh100"
            )
        if gpus % others:
            raise SpecError(
                f"{self.where} cuts the model over {others} GPUs but there are {gpus}: try {others} or {2 * others}"
            )
        return gpus // others

    def accumulation(self, total: int, dp: int, mbs: int, key: str) -> int:
        """Micro-batches of a rank that make a global batch of `total` sequences."""
        if total % (dp * mbs):
            near = max(1, total // (dp * mbs)) * dp * mbs
            raise self.error(
                f"{key} is {total} but must be a multiple of the micro-batch {mbs} times {dp} data ranks: try {near}"
            )
        return total // (dp * mbs)

    def filled_schedule(self, schedule: str) -> str:
        """The schedule, or the one that it becomes with fewer micro-batches than a rank's pipeline holds."""
        pp, gas = self["layout.pp"], self["layout.gas"]
        if schedule != DEFAULT_SCHEDULE or gas >= pp:
            return schedule
        everything = next(spec.name for spec in REGISTRY.values() if spec.holds_all)
        self.notes.append(f"{schedule} with {gas} micro-batches on {pp} stages runs them all forward first: it is {everything}")
        return everything

    def error(self, sentence: str) -> SpecError:
        return SpecError(f"{self.where}: {sentence}")

    def misspelling_hint(self, key: str) -> str:
        """Of a setting that is not there: the one, never read, that may mean it."""
        unused = [] if key in self._flat else [name for name in self._flat if name not in self._used][:MAX_MISSPELLINGS]
        close = get_close_matches(key, unused, n=1, cutoff=CLOSE)
        return f" (there is '{close[0]:.80}')" if close else ""

    def ignore(self, *keys: str) -> None:
        """Known keys that say nothing about a plan."""
        self._used.update(keys)

    def unread(self) -> list[str]:
        """What was not read: misspelt settings by name with what they may mean, all others in two lines."""
        lines: list[str] = []
        changes: list[str] = []
        harmless: list[str] = []
        absent = sorted((self._used | {key for key in self._unmodelled.no_effect if "*" not in key}) - set(self._flat))
        for key, value in self._flat.items():
            if key in self._used or value is None:
                continue
            no_effect = _matches(key, self._unmodelled.no_effect)
            known = no_effect or _matches(key, self._unmodelled.not_modelled) or len(changes) > MAX_MISSPELLINGS
            close = [] if known else get_close_matches(key[:80], absent, n=1, cutoff=CLOSE)
            if close:
                lines.append(f"{NOT_READ}{key:.80}: did you mean '{close[0]}'?")
            else:
                (harmless if no_effect else changes).append(f"{key:.80}")
        for words, keys in ((MAY_CHANGE, changes), (NO_EFFECT, harmless)):
            if keys:
                more = f" and {len(keys) - MAX_UNREAD_SHOWN} more" if len(keys) > MAX_UNREAD_SHOWN else ""
                lines.append(words + ", ".join(keys[:MAX_UNREAD_SHOWN]) + more)
        return lines


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _flat(data: Mapping[str, Any], where: str, before: str = "", depth: int = 0) -> dict[str, Any]:
    if depth > MAX_DEPTH:
        raise SpecError(f"{where}: {before} is nested too deeply: expected groups of settings")
    flat: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping):
            flat |= _flat(value, where, f"{name}.", depth + 1)
        else:
            flat[name] = value
        if len(flat) > MAX_KEYS:
            raise SpecError(f"{where} has more than {MAX_KEYS:,} settings, too many for a configuration: is it the right file?")
    return flat
