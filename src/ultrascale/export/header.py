"""Header lines of a file, for fields without a setting.

`not expressible here: layout.schedule = zb-v (why)` is for people; `kept for import: job.cluster = 64xh100` is read back. No
line that is read back has a setting: what an engine does with a file is in its settings alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ultrascale.export import fields
from ultrascale.export.fields import Fields
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout

NOT_EXPRESSIBLE, KEPT = "not expressible here", "kept for import"
_LINE = re.compile(rf"[#\s]*{KEPT}: ([\w.]+) = (.*)")
_WORD = re.compile(r"[A-Za-z0-9][\w.+\-]*(?: [\w\-]+)?")
_MARK = "ultrascale"
_NOTHING = object()
KEPT_FIELDS = ("job.cluster", "model.name", "model.source")
DERIVED_FIELDS = ("job.framework", "job.total_tokens", "job.batch_tokens")  # they follow from the engine and its settings


def lines(missing: Fields, layout: Layout, why: Mapping[str, str], title: str, program: Sequence[str]) -> list[str]:
    """One line for each field, those that change the run first; without comment signs.

    `program`: fields that no setting of the engine gives, since the user's program does.
    """
    unused = fields.unused_fields(layout)
    changes, facts = [], []
    for name, value in missing.items():
        if name in KEPT_FIELDS or name in program:
            facts.append(f"{KEPT}: {name} = {_written(value)}")
        elif name not in unused and name not in DERIVED_FIELDS:
            general = "model.*" if name.startswith("model.") else name
            reason = why.get(name) or why.get(general, f"{title} has no such setting")
            changes.append(f"{NOT_EXPRESSIBLE}: {name} = {_written(value)} ({reason})")
    return changes + facts


def commented(title: str, comments: Iterable[str], *more: str) -> str:
    """The head of a file whose comments begin with `#`."""
    opening = [f"Written by {_MARK} export for {title}; `{_MARK} import` reads it back.", *more, *comments]
    return "".join(f"# {line}\n" for line in opening)


def parse(text: str, program: Sequence[str]) -> Fields:
    """The fields that the header lines of a text give, of those that no setting gives."""
    given: Fields = {}
    for line in text.splitlines():
        if match := _LINE.match(line):
            given[match[1]] = _value(match[1], match[2])
    return {name: value for name, value in fields.check_header(given).items() if name in KEPT_FIELDS or name in program}


def _written(value: Any) -> str:
    """A word as it is if it cannot be mistaken for JSON, all else as JSON."""
    if isinstance(value, str) and _WORD.fullmatch(value) and _json(value) is _NOTHING:
        return value
    return json.dumps(value, ensure_ascii=True)  # on one line, whatever is in a name


def _value(name: str, text: str) -> Any:
    word = text.partition(" (")[0].strip()
    if _WORD.fullmatch(word) and _json(word) is _NOTHING:
        return word
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError):
        raise SpecError(f"the file's header gives {name} = '{text:.40}', which is neither a word nor JSON: try null") from None


def _json(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return _NOTHING
