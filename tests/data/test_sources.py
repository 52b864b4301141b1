"""Documents from files: each kind, each cut, each tokenizer gives the same documents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from text_builders import json_lines, parquet, tokenizer, words

from ultrascale.data import sources
from ultrascale.data.sources import PIECE, InputPart, TextField, pieces
from ultrascale.data.tokenizer import load

TEXTS = words(60)


def cut(path: Path, field: str, length: int) -> list[InputPart]:
    files = sources.find(str(path))
    return sources.cut(files, sources.digests(files), TextField(field), length)


def documents(path: Path, length: int, field: str = "text") -> list[str]:
    """Every document, from parts of so many bytes."""
    found, open_text = list[str](), ""
    for part in cut(path, field, length):
        places = []
        for piece in sources.read(part, TextField(field)):
            open_text += piece.text
            places.append(piece.place)
            if piece.last:
                found.append(open_text)
                open_text = ""
        assert places == sorted(places)
        assert not places or places[-1] <= part.cost
    assert not open_text
    return found


@pytest.mark.parametrize("length", [1, 7, 100, 1000, 2**25])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_splitting_into_parts_changes_no_document(tmp_path: Path, name: str, length: int) -> None:
    write: Callable[..., Path] = parquet if name.endswith("parquet") else json_lines
    assert documents(write(tmp_path / name, TEXTS), length) == TEXTS
    assert documents(write(tmp_path / name, TEXTS, field="content"), length, "content") == TEXTS


@pytest.mark.parametrize("length", [1, 5, 333, 2**25])
def test_a_text_file_is_one_document_however_it_is_split(tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE", 64)
    for number, text in enumerate(["火" * 300, "a\nb\n\nc", "x", "naïve words " * 50, "\ufeffmarked", "\n" * 9]):
        path = tmp_path / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        assert documents(path, length) == [text.removeprefix("\ufeff")]


def test_a_missing_final_newline_and_blank_lines_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n  \n{"text": ""}\r\n{"text": "two\\n"}')
    for length in (1, 10, 1000):
        assert documents(path, length) == ["one", "two\n"]


def test_folders_are_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/z.txt", "b/a.txt", "a.jsonl", "c.txt", ".hidden/x.txt", ".x.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name if name.endswith("txt") else '{"text": "a.jsonl"}')
    assert documents(tmp_path, 1000) == ["a.jsonl", "b/a.txt", "b/z.txt", "c.txt"]
    parts = cut(tmp_path, "text", 1000)
    assert len(parts) == 1  # small files share one


def test_a_long_document_is_split_at_lines() -> None:
    text = ("x" * 999 + "\n") * 3000 + "end"
    found = list(pieces(text, 0))
    assert "".join(piece.text for piece in found) == text
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True]
    assert all(len(piece.text) <= PIECE for piece in found)
    assert all(piece.text.endswith("\n") for piece in found[:-1])


def test_tokens_are_those_of_the_tokenizer_itself(tmp_path: Path) -> None:
    path = tokenizer(tmp_path / "tokenizer.json")
    ours, theirs = load(path), tokenizers.Tokenizer.from_file(str(path))
    theirs.no_truncation()
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert ids.dtype == np.uint16
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False).ids
    assert (ours.vocab, ours.eod) == (theirs.get_vocab_size(), theirs.token_to_id("<|endoftext|>"))


def test_a_text_cannot_contain_the_end_of_document_token(tmp_path: Path) -> None:
    ours = load(tokenizer(tmp_path / "tokenizer.json"))
    (ids,) = ours.encode(["before<|endoftext|>after"])
    assert ours.eod not in ids


def test_the_end_of_a_document_may_be_named(tmp_path: Path) -> None:
    path = tokenizer(tmp_path / "tokenizer.json", special=["<|pad|>", "<|stop|>"])
    assert load(path, "<|stop|>").eod == 1


def test_bytes_are_the_tokens_where_no_tokenizer_is_given() -> None:
    plain = load(None)
    (ids,) = plain.encode(["aé"])
    assert (plain.vocab, plain.eod, ids.tolist()) == (256, 0, [97, 195, 169])
