"""Tokens and their order. Which tokens a row of a global batch holds is a function of the seed and the step alone.

No layout, number of processes or earlier step changes it: a resumed or re-cut run reads on where the first would have.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training

Tokens = npt.NDArray[np.int64]
Rows = slice | Sequence[int]

BYTES = 256  # tokens of a byte-level vocabulary
EVALUATION = 0.02  # share of the windows, at the end, that never train
MOST_BYTES = 16 * 2**20  # of the standard library: 12 MB in Python 3.11 without its tests
SYNTHETIC_WINDOWS = 2**40  # more than any run reads, few enough that indices stay exact everywhere

# Installed packages differ between machines, tests are a third of the bytes, and the last two were written by the build.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib-dynload"}
_SKIPPED_STARTS = ("config-", "_sysconfigdata")
_64_BITS = 2**64 - 1


class Corpus(Protocol):
    """A text as windows of seq + 1 tokens; a window's last token is the next one's first, so that each is predicted once."""

    def windows(self, seq: int) -> int:
        """How many windows of that length there are."""
        ...

    def window(self, index: int, seq: int) -> Tokens:
        """The seq + 1 tokens of one window."""
        ...


class Bytes:
    """Text whose bytes are its tokens."""

    def __init__(self, text: npt.NDArray[np.uint8]) -> None:
        self.text = text

    def windows(self, seq: int) -> int:
        return max(0, (len(self.text) - 1) // seq)

    def window(self, index: int, seq: int) -> Tokens:
        return self.text[index * seq : index * seq + seq + 1].astype(np.int64)


class Synthetic:
    """Uniform random tokens, each window a function of the seed and its index: nothing is kept, nothing can be learned."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab = vocab
        self.seed = seed

    def windows(self, seq: int) -> int:
        return SYNTHETIC_WINDOWS

    def window(self, index: int, seq: int) -> Tokens:
        # Philox counts in the first of its four words; the second gives each window a stream of its own.
        counter = np.array([0, index, 0, 0], dtype=np.uint64)
        raw = np.random.Philox(key=self.seed, counter=counter).random_raw(seq + 1)
        return (raw % np.uint64(self.vocab)).astype(np.int64)


def corpus(training: Training, vocab: int) -> Corpus:
    """The token source that `train.data` names, if a model of that vocabulary can read it."""
    if training.data == "synthetic":
        return Synthetic(vocab, training.seed)
    if vocab < BYTES:
        raise SpecError(
            f"train.data is stdlib (bytes: {BYTES} tokens) but model.vocab is {vocab}: try train.data=synthetic, "
            f"or model.vocab={BYTES}"
        )
    return Bytes(standard_library())


@cache
def standard_library() -> npt.NDArray[np.uint8]:
    """Python's own library: every .py file by sorted path, a zero byte between two files. Read once, in some 50 ms."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(_sources(root)):
        text += (root / path).read_bytes() + b"\0"
        if len(text) >= MOST_BYTES:
            break
    if not text:
        raise SpecError(f"train.data is stdlib but {root} holds no .py files: try train.data=synthetic")
    return np.frombuffer(bytes(text[:MOST_BYTES]), dtype=np.uint8)


def _sources(root: Path) -> Iterator[str]:
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in _SKIPPED and not name.startswith(_SKIPPED_STARTS)]
        place = Path(folder).relative_to(root)
        yield from (
            (place / name).as_posix() for name in files if name.endswith(".py") and not name.startswith(_SKIPPED_STARTS)
        )


class Batches:
    """Global batches of `batch` sequences, any rows of them, by step."""

    def __init__(self, corpus: Corpus, seq: int, batch: int, seed: int) -> None:
        windows = corpus.windows(seq)
        if windows < 2:
            shorter = next((length for length in (2**power for power in range(20, -1, -1)) if corpus.windows(length) >= 2), 1)
            raise SpecError(
                f"job.seq is {seq} but the data must hold two such sequences, one to train and one to evaluate: try {shorter}"
            )
        self.corpus, self.seq, self.batch, self.seed = corpus, seq, batch, seed
        self.evaluation_windows = max(1, int(windows * EVALUATION))
        self.train_windows = windows - self.evaluation_windows

    def train(self, step: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, [rows, seq] each, of these rows of the step's global batch. Steps count from 0."""
        return self._gather(self._train_window(step * self.batch + row) for row in self._numbers(rows))

    def evaluation(self, number: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for one batch of the evaluation: held-out windows in order, from the first again after the last."""
        first = number * self.batch
        return self._gather(self.train_windows + (first + row) % self.evaluation_windows for row in self._numbers(rows))

    def _train_window(self, sample: int) -> int:
        epoch, place = divmod(sample, self.train_windows)
        return permuted(place, self.train_windows, _mixed(_mixed(self.seed) ^ epoch))

    def _numbers(self, rows: Rows) -> Sequence[int]:
        return range(*rows.indices(self.batch)) if isinstance(rows, slice) else rows

    def _gather(self, windows: Iterator[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.from_numpy(np.stack([self.corpus.window(index, self.seq) for index in windows]))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def rows_of(layout: Layout, dp_rank: int, microbatch: int) -> list[int]:
    """The rows of the global batch that a data rank reads for one of its micro-batches."""
    first = (microbatch * layout.dp + dp_rank) * layout.mbs
    return list(range(first, first + layout.mbs))


def permuted(place: int, size: int, key: int) -> int:
    """Where a keyed permutation of 0 … size − 1 puts `place`, with no table kept.

    A Feistel network permutes the next power of four; walking its cycle until it is back below `size` permutes the rest
    (Black and Rogaway 2002, section 3). The walk takes fewer than four steps on average.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(6):
            left, right = right, left ^ (_mixed(key + turn * 0x9E3779B97F4A7C15 ^ right) & mask)
        place = left << half | right
        if place < size:
            return place


def _mixed(word: int) -> int:
    """64 bits in, 64 well-mixed bits out: the finaliser of SplitMix64 (Steele 2014)."""
    word &= _64_BITS
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _64_BITS
    return word ^ word >> 31
