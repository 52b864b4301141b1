"""The units of tokenizer input: parts of files, and chunks of the documents in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

PIECE = 2**20  # maximum bytes (or characters) of one text given to the tokenizer


@dataclass(frozen=True)
class InputSpan:
    """Bytes (.txt, .jsonl) or row groups (.parquet) from `start` to `stop` of a file; gzip files are not split."""

    file: str
    size: int
    digest: str
    """digest of the whole file's content"""
    start: int
    stop: int
    cost: int
    """bytes on disk, for progress"""


@dataclass(frozen=True)
class InputPart:
    """The input of one worker task: some spans, one after the other."""

    spans: tuple[InputSpan, ...]

    @property
    def cost(self) -> int:
        return sum(span.cost for span in self.spans)


@dataclass(frozen=True)
class DocumentChunk:
    """A chunk of one document. `last`: it ends the document. `place`: how much of the span's, then the part's, cost is read."""

    text: str
    last: bool
    place: int


def checked(text: Any, field: str) -> str:
    if not isinstance(text, str):
        raise SpecError(f"has {shown(text)} in its field {field!r} but must have text: name another with --field")
    if not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text):
        raise SpecError(f"has half a character (a lone surrogate) in its field {field!r}: repair it or take it out")
    return text


def pieces(text: str, place: int) -> Iterator[DocumentChunk]:
    start = 0
    while len(text) - start > PIECE:
        stop = text.rfind("\n", start + PIECE // 2, start + PIECE) + 1 or start + PIECE
        yield DocumentChunk(text[start:stop], False, place)
        start = stop
    if text:
        yield DocumentChunk(text[start:] if start else text, True, place)
