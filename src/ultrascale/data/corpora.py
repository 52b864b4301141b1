"""Corpora, texts as windows of tokens: bytes, random tokens, token files, and the weighted mixtures of `train.data`.

A run's texts are opened and checked before any process starts, without torch.
"""

from __future__ import annotations

import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ultrascale.data.sets import TokenSet, largest_token, open_set
from ultrascale.specs.errors import SpecError
from ultrascale.specs.training import Training
from ultrascale.specs.validate import shown

Tokens = npt.NDArray[np.int64]

STDLIB, SYNTHETIC = "stdlib", "synthetic"
MOST_PARTS = 1000
SAMPLED_WINDOWS, WINDOW_TOKENS = 64, 256  # windows of a fingerprint, and tokens in each
_GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ over the golden ratio: multiples of it, modulo 2⁶⁴, are spread evenly
_WEIGHT = re.compile(r"[0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?")
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

    def counted(self, index: int, seq: int) -> npt.NDArray[np.bool_] | None:
        """Which of the window's last seq tokens have a loss; None: all."""
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

    def counted(self, index: int, seq: int) -> npt.NDArray[np.bool_] | None:
        return None


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

    def counted(self, index: int, seq: int) -> npt.NDArray[np.bool_] | None:
        return None


class TokenFileCorpus(StoredCorpus):
    """The tokens of a file. Each window's tokens are checked against the vocabulary when it is read: files can be wrong."""

    def __init__(self, tokens: TokenSet, vocab: int) -> None:
        self.set, self.vocab = tokens, vocab
        self.tokens, self.ends = tokens.tokens, tokens.ends

    def window(self, index: int, seq: int) -> Tokens:
        return self.checked(super().window(index, seq), index * seq)

    def checked(self, found: Tokens, first: int) -> Tokens:
        """The tokens from place `first` on, unless one is not of the vocabulary."""
        if found.max() >= self.vocab or found.min() < 0:
            place, largest = int(np.argmax((found >= self.vocab) | (found < 0))), int(found.max())
            raise SpecError(
                f"train.data: token {first + place:,} of {self.set.path} is {found[place]} but model.vocab is "
                f"{self.vocab}: {f'try model.vocab={largest + 1}' if largest > 0 else 'tokenize it anew'}"
            )
        return found


class ConversationCorpus(TokenFileCorpus):
    """Whole conversations, several in a window of seq + 1 tokens, with a loss on answers alone.

    A longer one loses its end. What is left of a window is padding, a document of its own.
    """

    def __init__(self, tokens: TokenSet, vocab: int) -> None:
        super().__init__(tokens, vocab)
        assert tokens.answers is not None
        assert tokens.facts is not None
        self.answers, self.padding = tokens.answers, tokens.facts.eod
        self._packed: dict[int, PackedWindows] = {}

    def windows(self, seq: int) -> int:
        return len(self._windows(seq).first) - 1

    def window(self, index: int, seq: int) -> Tokens:
        found = np.full(seq + 1, self.padding, dtype=np.int64)
        place = 0
        for start, stop in self._spans(index, seq):
            found[place : place + stop - start] = self.checked(self.tokens[start:stop].astype(np.int64), start)
            place += stop - start
        return found

    def documents(self, index: int, seq: int) -> Tokens:
        lengths = [stop - start for start, stop in self._spans(index, seq)]
        lengths.append(seq + 1 - sum(lengths))
        return np.repeat(np.arange(len(lengths)), lengths)[:seq]

    def counted(self, index: int, seq: int) -> npt.NDArray[np.bool_]:
        masks = [self.answers[start:stop] for start, stop in self._spans(index, seq)]
        whole = np.concatenate(masks)[1:].astype(np.bool_)
        return np.pad(whole, (0, seq - len(whole)))

    def _windows(self, seq: int) -> PackedWindows:
        if seq not in self._packed:
            ends = self.ends.astype(np.int64)
            self._packed[seq] = packed_windows(ends - np.concatenate(([0], ends[:-1])), seq + 1)
        return self._packed[seq]

    def _spans(self, index: int, seq: int) -> list[tuple[int, int]]:
        """The tokens of each conversation of a window."""
        windows = self._windows(seq)
        found = []
        for document in windows.documents[windows.first[index] : windows.first[index + 1]].tolist():
            start = int(self.ends[document - 1]) if document else 0
            found.append((start, min(int(self.ends[document]), start + seq + 1)))
        return found


@dataclass(frozen=True)
class PackedWindows:
    """Documents by window: those of window i are documents[first[i] : first[i + 1]], in their order in the text."""

    documents: Tokens
    first: Tokens


def packed_windows(lengths: Tokens, size: int) -> PackedWindows:
    """Best-fit decreasing: each document, the longest first, goes to the fullest window that has room for it.

    Windows are put in an order in which those of short and of long documents are spread evenly: the last are held out. It takes
    about 2 s for a million documents.
    """
    windows = np.empty(len(lengths), dtype=np.int64)
    count, open_sizes = 0, 0  # bit i of open_sizes: a window has i tokens left
    by_room: list[list[int]] = [[] for _ in range(size + 1)]
    clipped = np.minimum(lengths, size)
    for document in np.argsort(-clipped, kind="stable").tolist():
        length = int(clipped[document])
        fits = open_sizes >> length
        if fits:
            room = length + (fits & -fits).bit_length() - 1
            window = by_room[room].pop()
            if not by_room[room]:
                open_sizes ^= 1 << room
        else:
            room, window = size, count
            count += 1
        windows[document] = window
        if room > length:
            by_room[room - length].append(window)
            open_sizes |= 1 << room - length
    spread = np.empty(count, dtype=np.int64)
    spread[np.argsort(np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN), kind="stable")] = np.arange(count)
    places = spread[windows]
    return PackedWindows(np.argsort(places, kind="stable"), np.searchsorted(np.sort(places), np.arange(count + 1)))


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


@dataclass(frozen=True)
class MixtureEntry:
    """One text of a mixture, with the name given by the user."""

    name: str
    weight: Fraction


def corpus(training: Training, vocab: int) -> MixtureCorpus:
    """Opens the texts of `train.data`; SpecError if a vocabulary is larger than the model's."""
    trained = _mixture("train.data", training.data, training.seed, vocab)
    if training.eval_data is None:
        return trained
    return replace(trained, held_out=_mixture("train.eval_data", training.eval_data, training.seed, vocab))


def check(training: Training, vocab: int, seq: int) -> None:
    """Raises SpecError unless a run can read its data; takes milliseconds, before any process starts."""
    found = corpus(training, vocab)
    for text, _ in (*found.parts, *(found.held_out.parts if found.held_out is not None else ())):
        checked_windows(text, seq)


def has_conversations(training: Training, vocab: int) -> bool:
    """Whether some text of a run is a set of conversations."""
    found = corpus(training, vocab)
    return any(isinstance(text, ConversationCorpus) for part in (found, found.held_out) if part for text, _ in part.parts)


def absolute(field: str, text: str) -> str:
    """The same value with absolute paths, so that a run finds its data from any folder."""
    found = parts(field, text)
    names = [part.name if part.name in (STDLIB, SYNTHETIC) else os.path.abspath(part.name) for part in found]
    if len(found) == 1:
        return names[0]
    weights = [Decimal(part.weight.numerator) / Decimal(part.weight.denominator) for part in found]  # as the user wrote them
    return ",".join(f"{name}:{weight:f}" for name, weight in zip(names, weights, strict=True))


def sampled_fingerprint(training: Training, vocab: int) -> int:
    """A CRC of the lengths of a run's texts and of 65 windows spread over them, as in checkpoints older than data/digest.py."""
    crc = 0
    for text, _ in corpus(training, vocab).parts:
        length = next(length for length in (WINDOW_TOKENS, 1) if text.windows(length))
        count = text.windows(length)
        crc = zlib.crc32(f"{length} {count}".encode(), crc)
        for window in sorted({place * (count - 1) // SAMPLED_WINDOWS for place in range(SAMPLED_WINDOWS + 1)}):
            crc = zlib.crc32(text.window(window, length).tobytes(), crc)
    return crc


def parts(field: str, text: str) -> tuple[MixtureEntry, ...]:
    """Parses `PATH:0.7,PATH:0.3`, or a single name."""
    if text in (STDLIB, SYNTHETIC) or _exists(text) or ("," not in text and _parse_weight(text) is None):
        return (MixtureEntry(text, Fraction(1)),)
    found = [_part(field, text, piece.strip()) for piece in text.split(",")]
    if len(found) > MOST_PARTS:
        raise SpecError(f"{field} mixes {len(found):,} texts but at most {MOST_PARTS:,} can be mixed: tokenize some together")
    return tuple(found)


def _part(field: str, text: str, piece: str) -> MixtureEntry:
    weighed = _parse_weight(piece)
    if weighed is None:
        example = f"{piece.rpartition(':')[0] or piece or 'data/first'}:0.7"
        raise SpecError(
            f"{field} is {shown(text)} but {shown(piece)} has no weight: write each as PATH:WEIGHT with a number above 0, "
            f"such as {example}"
        )
    return weighed


def _parse_weight(piece: str) -> MixtureEntry | None:
    name, colon, weight = piece.rpartition(":")
    if not colon or not name or _WEIGHT.fullmatch(weight.strip()) is None or not Fraction(weight.strip()):
        return None
    return MixtureEntry(name.strip(), Fraction(weight.strip()))


def _exists(text: str) -> bool:
    return "\0" not in text and os.path.exists(text)


def _mixture(field: str, text: str, seed: int, vocab: int) -> MixtureCorpus:
    return MixtureCorpus(tuple((_text(field, part.name, seed, vocab), part.weight) for part in parts(field, text)))


def _text(field: str, name: str, seed: int, vocab: int) -> Corpus:
    if name == SYNTHETIC:
        return SyntheticCorpus(vocab, seed)
    if name == STDLIB:
        if vocab < BYTES:
            raise SpecError(
                f"{field} is stdlib (bytes: {BYTES} tokens) but model.vocab is {vocab}: try {field}=synthetic, "
                f"or model.vocab={BYTES}"
            )
        return ByteCorpus(standard_library())
    try:
        found = open_set(name)
    except SpecError as error:
        known = "" if "/" in name or os.sep in name else f"; without a path {field} is stdlib or synthetic"
        raise SpecError(f"{field} is {shown(name)}: {error}{known}") from None
    _fits(field, found, vocab)
    return TokenFileCorpus(found, vocab) if found.answers is None else ConversationCorpus(found, vocab)


def _fits(field: str, found: TokenSet, vocab: int) -> None:
    needed = found.vocab if found.vocab is not None else largest_token(found.tokens) + 1
    if needed > vocab:
        claim = "has a vocabulary of" if found.vocab is not None else "holds tokens up to a vocabulary of"
        raise SpecError(
            f"{field}: {found.path} {claim} {needed:,} but model.vocab is {vocab:,}: try a model with vocab={needed} or more, "
            "or tokenize with a smaller tokenizer"
        )


def checked_windows(text: Corpus, seq: int) -> int:
    """The number of windows of the text; SpecError if there are fewer than two."""
    windows = text.windows(seq)
    if windows < 2:
        shorter = next((length for length in (2**power for power in range(20, -1, -1)) if text.windows(length) >= 2), 1)
        where = f" ({text.set.path})" if isinstance(text, TokenFileCorpus) else ""
        raise SpecError(
            f"job.seq is {seq} but the data{where} must hold two such sequences, one to train and one to evaluate: "
            f"try {shorter}"
        )
    return windows
