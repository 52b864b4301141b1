"""Files: mappings in, with the line of a mistake; whole files or nothing out."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.specs import files
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import MAX_BYTES, read_mapping, to_yaml, write_text

MERGE_BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}], z{n}: 1}}\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.yaml", "", "is empty but must be a mapping of fields to values"),
        ("a.yaml", "- 1", "is a list but must be a mapping"),
        ("a.yaml", "hello", "is text but must be a mapping"),
        ("a.yaml", "a: [1", "is not YAML: expected ',' or ']', but got '<stream end>' at line 1"),
        ("a.yaml", "a: 1\n\tb: 2", "at line 2"),
        ("a.yaml", "a: 1\na: 2", "is not YAML: the field 'a' is given twice at line 2"),
        ("a.yaml", "b:\n  a: 1\n  a: 2", "the field 'a' is given twice at line 3"),
        ("a.yaml", "a: 1\n---\nb: 2", "is not YAML: but found another document at line 2"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "is not YAML: could not determine a constructor"),
        ("a.yaml", "a: " + "[" * 5000, "is nested too deeply"),
        ("a.yaml", MERGE_BOMB, "is not YAML: more than 10,000 merged fields"),
        ("a.yaml", "a: *b", "is not YAML: found undefined alias 'b' at line 1"),
        ("a.yaml", "a: \0", "is not YAML: unacceptable character"),
        ("a.yaml", "a: 2020-13-45", "is not YAML: month must be in 1..12"),
        ("a.yaml", "a: " + "9" * 5000, "is not YAML: Exceeds the limit"),
        ("a.yaml", "a: " + ":".join(["1"] * 500_000), "is not YAML: a number in base 60 of more than 100 characters at line 1"),
        ("a.yaml", "a: !!timestamp x", "is not YAML: a tagged value that is not of its type"),
        ("a.yaml", "a: !!int ''", "is not YAML: a tagged value that is not of its type"),
        ("a.yaml", "a: !!bool x", "is not YAML: a tagged value that is not of its type"),
        ("a.yaml", "1: 2", "has the key 1 but fields are named by text"),
        ("a.yaml", "null: 2", "has the key null but fields are named by text"),
        ("a.yaml", bytes(range(256)), "is not text: expected a YAML or JSON"),
        ("a.json", "", "is not JSON: Expecting value at line 1"),
        ("a.json", '{"a": 1,\n}', "is not JSON:"),
        ("a.json", '{"a": 1, "a": 2}', "is not JSON: the field 'a' is given twice"),
        ("a.json", "[" * 100_000, "is nested too deeply"),
        ("a.json", "[]", "is a list but must be a mapping"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SpecError) as caught:
        read_mapping(file, "model")
    assert str(caught.value).startswith(f"model file {file} ")
    assert says in str(caught.value)


def test_missing_files_folders_and_large_files_have_their_own_errors(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        read_mapping(tmp_path / "none.yaml", "plan")
    with pytest.raises(SpecError, match="is a folder"):
        read_mapping(tmp_path, "plan")
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(SpecError, match=r"has 2,097,153 bytes, too many: expected at most 2,097,152"):
        read_mapping(large, "plan")


def test_a_short_number_in_base_60_is_still_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 1:30\n")
    assert read_mapping(tmp_path / "a.yaml", "model") == {"a": 90}


class ComparisonCountingKey(str):
    """A key that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        ComparisonCountingKey.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_a_field_given_twice_among_many_is_found_in_linear_time(tmp_path: Path) -> None:
    """Comparing each with each would take 10 ** 10 comparisons of keys."""
    names = [f"k{number}" for number in range(140_000)]
    pairs: list[tuple[str, Any]] = [(ComparisonCountingKey(name), 0) for name in [*names, names[-1]]]
    ComparisonCountingKey.compared = 0
    with pytest.raises(ValueError, match=f"the field '{names[-1]}' is given twice"):
        files._unique_keys(pairs)
    assert ComparisonCountingKey.compared < len(names)
    file = tmp_path / "a.json"
    file.write_text("{" + ",".join(f'"{name}":0' for name in [*names, names[-1]]) + "}")
    with pytest.raises(SpecError, match=f"the field '{names[-1]}' is given twice"):
        read_mapping(file, "model")


@pytest.mark.parametrize("kind", ["fifo", "zero", "socket"])
def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 107 characters
    place = Path("a.yaml")
    if kind == "fifo":
        os.mkfifo(place)
    elif kind == "zero":
        place.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(str(place))
    with pytest.raises(SpecError, match=r"plan file a.yaml cannot be read \("):
        read_mapping(place, "plan")
    for read in (files.open_regular, files.read_bytes, files.read_text):
        with pytest.raises(OSError, match=r"not a regular file|No such device"):
            read(place)


def test_the_size_limit_holds_whatever_size_a_file_reports(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert files.read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(files.FileTooLargeError, match="5 bytes, more than 4"):
        files.read_bytes(tmp_path / "a", 4)
    with pytest.raises(files.FileTooLargeError):
        files.read_bytes("/proc/self/maps", 10)  # reports a size of 0
    with pytest.raises(OSError, match="null"):
        files.read_bytes("a\0b")


def test_a_byte_order_mark_and_one_merge_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("\ufeffbase: &base {x: 1, y: 2}\nhere: {<<: *base, y: 3}\n", encoding="utf-8")
    assert read_mapping(file, "model")["here"] == {"x": 1, "y": 3}
    file = tmp_path / "a.json"
    file.write_text('\ufeff{"a": 1}', encoding="utf-8")
    assert read_mapping(file, "model") == {"a": 1}


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "deep" / "a.txt", "β")
    assert (tmp_path / "new" / "deep" / "a.txt").read_text(encoding="utf-8") == "β"
    assert os.listdir(tmp_path / "new" / "deep") == ["a.txt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan.yaml"
    write_text(file, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(SpecError, match=r"cannot be written \(no space left on device\)"):
        write_text(file, "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan.yaml"]


def test_an_interrupted_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(tmp_path / "plan.yaml", "new")
    assert os.listdir(tmp_path) == []


def test_folders_and_impossible_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is a folder: name a file in it"):
        write_text(tmp_path, "x")
    for bad in (tmp_path / ("a" * 300), tmp_path / "a\0b"):
        with pytest.raises(SpecError, match="cannot be written"):
            write_text(bad, "x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpecError, match="cannot be written"):
        write_text(tmp_path / "file" / "plan.yaml", "x")


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SpecError, match="is a device: name a file, such as"):
        write_text(pipe, "x")
    assert pipe.is_fifo()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("old")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "real.yaml")
    write_text(tmp_path / "link.yaml", "new")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text() == "new"


PRINTABLE = st.characters(
    min_codepoint=32, exclude_characters="\x7f\x85", exclude_categories=("Cs", "Cc", "Zl", "Zp", "Cn", "Co")
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(PRINTABLE, max_size=10)


@given(st.dictionaries(st.text(PRINTABLE, min_size=1, max_size=8), PLAIN | st.lists(PLAIN, max_size=4), max_size=5))
def test_what_is_written_reads_back(data: dict[str, Any]) -> None:
    assert yaml.safe_load(to_yaml(data)) == data


def test_lists_of_numbers_stay_on_one_line_and_keys_in_order() -> None:
    assert to_yaml({"b": [1, 2.5], "a": ["x"]}) == "b: [1, 2.5]\na:\n- x\n"
