"""Reading and writing the files a user meets: safe YAML and JSON in, whole files or nothing out."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Literal

import yaml

from ultrascale.specs.errors import SpecError, os_reason
from ultrascale.specs.folders import open_nonblocking
from ultrascale.specs.validate import kind_of, shown

Form = Literal["YAML", "JSON"]
MAX_BYTES = 2 * 2**20  # a plan is some tens of KiB; a checkpoint named by mistake should not be parsed
MAX_TOKENIZER_BYTES = 2**28  # of a tokenizer.json; those of large vocabularies have some 2**25
MAX_BASE_60 = 100  # characters of a number such as `1:30:00`: its time grows with the square of them
MAX_MERGED = 10_000  # fields that `<<` may bring together: nested merges multiply, and a short file could fill the memory


# libyaml's parser, where PyYAML was built with it: a seventh of the time.
_PackageLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def package_data(package: str, name: str) -> Any:
    """The content of a YAML or JSON file that is installed with the package; nobody may change it."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else yaml.load(text, _PackageLoader)


class FileTooLargeError(OSError):
    """A file of more bytes than its reader takes."""

    def __init__(self, size: int, most: int) -> None:
        super().__init__(errno.EFBIG, f"{size:,} bytes, more than {most:,}")
        self.size = size


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read its bytes. OSError for anything else: a FIFO may block for ever, a device may never end."""
    try:
        file = open(path, "rb", opener=open_nonblocking)  # noqa: SIM115  (the caller closes it)
    except ValueError as error:  # a null byte in the name
        raise OSError(errno.EINVAL, str(error)) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def read_bytes(path: str | os.PathLike[str], most: int = MAX_BYTES) -> bytes:
    """The content of a regular file. OSError for anything else, and for a file of more than `most` bytes."""
    with open_regular(path) as file:
        content = file.read(most + 1)
        if len(content) > most:
            raise FileTooLargeError(max(os.fstat(file.fileno()).st_size, len(content)), most)
    return content


def read_text(path: str | os.PathLike[str], most: int = MAX_BYTES) -> str:
    """The text of a regular file in UTF-8. OSError as `read_bytes`, UnicodeDecodeError for what is no text."""
    return read_bytes(path, most).decode("utf-8-sig")


def read_named(path: Path, what: str, advice: str, most: int = MAX_BYTES) -> str:
    """The text of a file that a user named. SpecError if there is none: `what`, the reason, what is wanted instead."""
    try:
        return read_text(path, most)
    except UnicodeDecodeError:
        raise SpecError(f"{what} is not text: {advice}") from None
    except FileTooLargeError as error:
        raise SpecError(f"{what} has {error.size:,} bytes, too many: expected at most {most:,}") from None
    except OSError as error:
        raise SpecError(f"{what} {reason_of(error)}: {advice}") from None


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; SpecError, with the line, when it is not one."""
    text = read_named(path, f"{what} file {path}", "expected a YAML or JSON file", MAX_BYTES)
    form: Form = "JSON" if path.suffix.lower() == ".json" else "YAML"
    return mapping_of(text, f"{what} file {path}", form)


def mapping_of(text: str, what: str, form: Form = "YAML") -> dict[str, Any]:
    """The mapping that a text spells out; SpecError, with the line, when it is none."""
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys) if form == "JSON" else yaml.load(text, _Loader)
    except json.JSONDecodeError as error:
        raise SpecError(f"{what} is not JSON: {error.msg} at line {error.lineno}") from None
    except yaml.MarkedYAMLError as error:
        where = f" at line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise SpecError(f"{what} is not YAML: {error.problem}{where}") from None
    except (yaml.YAMLError, ValueError) as error:  # a character no text has, a date or number that is none
        raise SpecError(f"{what} is not {form}: {(str(error).splitlines() or ['a value that is none'])[0]}") from None
    except (AttributeError, IndexError, KeyError):  # PyYAML's own, of `!!timestamp x`, `!!int ''` and `!!bool x`
        raise SpecError(f"{what} is not {form}: a tagged value that is not of its type; leave the tags (!!) out") from None
    except RecursionError:
        raise SpecError(f"{what} is nested too deeply: expected a mapping of fields to values") from None
    if not isinstance(data, Mapping):
        raise SpecError(f"{what} is {kind_of(data)} but must be a mapping of fields to values")
    bad = [key for key in data if not isinstance(key, str)]
    if bad:
        raise SpecError(f"{what} has the key {shown(bad[0])} but fields are named by text")
    return dict(data)


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses what YAML leaves open: a field given twice, merges that multiply and numbers without end."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise yaml.MarkedYAMLError(problem=f"the field '{key.value}' is given twice", problem_mark=key.start_mark)
            keys.add(key.value)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGED:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_MERGED:,} merged fields", problem_mark=node.start_mark)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if ":" in node.value and len(node.value) > MAX_BASE_60:
            raise yaml.MarkedYAMLError(
                problem=f"a number in base 60 of more than {MAX_BASE_60} characters", problem_mark=node.start_mark
            )
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the field '{name:.80}' is given twice")
        found[name] = value
    return found


def reason_of(error: OSError) -> str:
    """Why a file could not be read, to stand behind its name in a sentence."""
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    if isinstance(error, IsADirectoryError):
        return "is a folder"
    return f"cannot be read ({os_reason(error)})"


def write_text(path: Path, text: str, example: str = "plan.yaml") -> None:
    """Write the whole file or leave what was there: a temporary file beside it, then a rename.

    `example` is the name that errors advise.
    """
    # os.path answers False where pathlib would raise: a name too long, a folder that may not be read.
    if os.path.isdir(path):
        raise SpecError(f"{path} is a folder: name a file in it, such as {path / example}")
    if os.path.exists(path) and not os.path.isfile(path):  # a rename would put a file in a device's place
        raise SpecError(f"{path} is a device: name a file, such as {example}")
    temporary = None
    try:
        target = Path(os.path.realpath(path))  # a link stays a link
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before the rename: after a power cut it is the old file or the new one
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
        temporary = None
    except (OSError, ValueError) as error:
        reason = os_reason(error)
        raise SpecError(f"{path} cannot be written ({reason}): name another file, such as {example}") from None
    finally:
        if temporary is not None:
            os.unlink(temporary)


class _Dumper(yaml.SafeDumper):
    """Lists of numbers on one line, everything else in block style, keys in the order of the spec."""


def _sequence(dumper: yaml.SafeDumper, data: list[Any] | tuple[Any, ...]) -> yaml.SequenceNode:
    flat = all(isinstance(item, (int, float)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)


_Dumper.add_representer(list, _sequence)
_Dumper.add_representer(tuple, _sequence)


def to_yaml(data: Mapping[str, Any]) -> str:
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def rounded(value: Any) -> Any:
    """Six significant digits: more would be noise in a file that people read. Whole bytes stay whole."""
    if isinstance(value, float):
        short = value if value.is_integer() else float(f"{value:.6g}")
        return int(short) if short.is_integer() and abs(short) < 2**53 else short
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
