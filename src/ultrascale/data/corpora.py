"""Corpora, texts as windows of tokens: bytes, random tokens, token files, and weighted mixtures of them."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ultrascale.data.sets import TokenSet
from ultrascale.specs.errors import SpecError

Tokens = npt.NDArray[np.int64]

BYTES = 256  # tokens of a byte-level vocabulary
MOST_BYTES = 16 * 2**20  # limit of the standard library: 12 MB in Python 3.11 without its tests
SYNTHETIC_WINDOWS = 2**40  # more than any run reads, few enough that indices are exact everywhere

# Installed packages differ between machines, tests are a third of the bytes, and the last two are written by the build.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}
_SKIPPED_STARTS = ("config-", "_sysconfigdata")


class Corpus(Protocol):
    """A text as windows of seq + 1 tokens; a window's last token is the next one's first: each token is predicted once."""

    def windows(self, seq: int) -> int:
        """The number of windows of that length."""
        ...

    def window(self, index: int, seq: int) -> Tokens:
        """The seq + 1 tokens of one window."""
        ...

    def documents(self, index: int, seq: int) -> Tokens:
        """The document index of each of the window's first seq tokens; a document includes its last token."""
        ...


class StoredCorpus:
    """A text whose tokens exist; `ends`: the number of tokens up to and including each document's last."""

    tokens: npt.NDArray[Any]
    ends: npt.NDArray[Any]

    def windows(self, seq: int) -> int:
        return max(0, (len(self.tokens) - 1) // seq)

    def window(self, index: int, seq: int) -> Tokens:
        return self.tokens[index * seq : index * seq + seq + 1].astype(np.int64)

    def documents(self, index: int, seq: int) -> Tokens:
        first, ends = index * seq, self.ends
        low, high = (int(np.searchsorted(ends, ends.dtype.type(place), side="right")) for place in (first, first + seq - 1))
        marks = np.zeros(seq, dtype=np.int64)
        marks[ends[low:high].astype(np.int64) - first] = 1
        return np.cumsum(marks)


class ByteCorpus(StoredCorpus):
    """A text with its bytes as tokens; a zero byte ends a document."""

    def __init__(self, text: npt.NDArray[np.uint8]) -> None:
        self.tokens = text

    @cached_property
    def ends(self) -> Tokens:  # type: ignore[override]
        return np.flatnonzero(self.tokens == 0) + 1


class SyntheticCorpus:
    """Uniform random tokens, each window a function of the seed and its index: nothing is stored, nothing can be learned."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab = vocab
        self.seed = seed

    def windows(self, seq: int) -> int:
        return SYNTHETIC_WINDOWS

    def window(self, index: int, seq: int) -> Tokens:
        # Philox counts in the first of its four words; the second selects a separate stream per window.
        counter = np.array([0, index, 0, 0], dtype=np.uint64)
        raw = np.random.Philox(key=self.seed, counter=counter).random_raw(seq + 1)
        return (raw % np.uint64(self.vocab)).astype(np.int64)

    def documents(self, index: int, seq: int) -> Tokens:
        return np.zeros(seq, dtype=np.int64)


class TokenFileCorpus(StoredCorpus):
    """The tokens of a file. Each window's tokens are checked against the vocabulary when it is read: files can be wrong."""

    def __init__(self, tokens: TokenSet, vocab: int) -> None:
        self.set, self.vocab = tokens, vocab
        self.tokens, self.ends = tokens.tokens, tokens.ends

    def window(self, index: int, seq: int) -> Tokens:
        found = super().window(index, seq)
        if found.max() >= self.vocab or found.min() < 0:
            place, largest = int(np.argmax((found >= self.vocab) | (found < 0))), int(found.max())
            raise SpecError(
                f"train.data: token {index * seq + place:,} of {self.set.path} is {found[place]} but model.vocab is "
                f"{self.vocab}: {f'try model.vocab={largest + 1}' if largest > 0 else 'tokenize it anew'}"
            )
        return found


@dataclass(frozen=True)
class MixtureCorpus:
    """Several texts and their weights; `held_out`: the evaluation data, if it is not the end of each text."""

    parts: tuple[tuple[Corpus, Fraction], ...]
    held_out: MixtureCorpus | None = None


@cache
def standard_library() -> npt.NDArray[np.uint8]:
    """Python's standard library: every .py file by sorted path, each followed by a zero byte. Read once, in about 50 ms."""
    text = bytearray()
    for path in library_sources():
        text += path.read_bytes() + b"\0"
        if len(text) >= MOST_BYTES:
            break
    return np.frombuffer(bytes(text[:MOST_BYTES]), dtype=np.uint8)


def library_sources() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = [root / path for path in sorted(_sources(root))]
    if not found:
        raise SpecError(f"train.data is stdlib but {root} holds no .py files: try train.data=synthetic")
    return found


def _sources(root: Path) -> Iterator[str]:
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED and not name.startswith(_SKIPPED_STARTS)]
        place = Path(folder).relative_to(root)
        yield from (
            (place / name).as_posix() for name in files if name.endswith(".py") and not name.startswith(_SKIPPED_STARTS)
        )
