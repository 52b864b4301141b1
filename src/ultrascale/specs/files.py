"""Reading and writing the files a user meets: safe YAML and JSON in, whole files or nothing out."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ultrascale.specs.errors import SpecError

MAX_BYTES = 16 * 2**20  # a plan is some tens of KiB; a checkpoint named by mistake should not be parsed


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; SpecError, with the line, when it is not one."""
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{what} file {path} has {path.stat().st_size:,} bytes: too large to be a {what} file")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SpecError(f"{what} file {path} is not text: expected YAML or JSON") from None
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()
        raise SpecError(f"{what} file {path} {reason}") from None
    try:
        data = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"{what} file {path} is not JSON: {error.msg} at line {error.lineno}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise SpecError(f"{what} file {path} is not YAML: {getattr(error, 'problem', None) or 'unreadable'}{where}") from None
    if not isinstance(data, Mapping):
        raise SpecError(f"{what} file {path} holds {type(data).__name__}, expected a mapping of fields to values")
    bad = next((key for key in data if not isinstance(key, str)), None)
    if bad is not None:
        raise SpecError(f"{what} file {path} has the key {bad!r}, expected field names as text")
    return dict(data)


def write_text(path: Path, text: str) -> None:
    """Write the whole file or leave what was there: a temporary file beside it, then a rename."""
    if path.is_dir():
        raise SpecError(f"{path} is a folder: name a file in it, such as {path / 'plan.yaml'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise SpecError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise SpecError(f"{path} cannot be written: {(error.strerror or str(error)).lower()}") from None


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line, everything else in block style, keys in the order of the spec."""


def _sequence(dumper: yaml.SafeDumper, data: list[Any] | tuple[Any, ...]) -> yaml.SequenceNode:
    flat = all(isinstance(item, (int, float)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Dumper.add_representer(list, _sequence)
_Dumper.add_representer(tuple, _sequence)


def to_yaml(data: Mapping[str, Any]) -> str:
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
