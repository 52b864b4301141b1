"""Global batches as tensors; the tokens of each row are a function of the seed and the step only.

They do not depend on layout or number of processes: a resumed or resharded run continues with the same data.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from ultrascale.data.corpora import ConversationCorpus, Corpus, MixtureCorpus, Tokens, checked_windows
from ultrascale.data.order import MixturePattern, SampleOrder, seed_of
from ultrascale.model.transformer import IGNORE_INDEX
from ultrascale.specs.batch_ramp import BatchRamp
from ultrascale.specs.layout import Layout

Rows = slice | Sequence[int]
Window = tuple[Corpus, int]
Read = TypeVar("Read")


class Batches:
    """Global batches by step; any rows of them can be read."""

    def __init__(self, mixture: MixtureCorpus, seq: int, batch: int, seed: int, ramp: str | None = None) -> None:
        """`batch`: sequences of a batch after `ramp` (train.batch_ramp), and in an evaluation."""
        self.seq, self.batch = seq, batch
        self.ramp = BatchRamp.of(ramp, seq, batch)
        self._trained = _MixedSamples(mixture, seq, seed)
        self._held_out = self._trained if mixture.held_out is None else _MixedSamples(mixture.held_out, seq, seed, held_out=1.0)

    @property
    def train_windows(self) -> int:
        return sum(order.train_windows for order in self._trained.orders)

    @property
    def evaluation_windows(self) -> int:
        return sum(order.evaluation_windows for order in self._held_out.orders)

    def train(self, step: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, [rows, seq] each, of these rows of the step's global batch. Steps count from 0. The target of a
        token without a loss is IGNORE_INDEX.
        """
        return self._tokens(step, rows, held_out=False)

    def evaluation(self, number: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The same for one batch of the evaluation: held-out windows in order, repeated from the first after the last."""
        return self._tokens(number, rows, held_out=True)

    def documents(self, number: int, rows: Rows, held_out: bool = False) -> torch.Tensor:
        """[rows, seq]: the document index of each input token, counted from 0 in each row."""
        found = [text.documents(index, self.seq) for text, index in self._windows(number, rows, held_out)]
        return torch.from_numpy(np.stack(found))

    def losses(self, number: int, held_out: bool = False) -> int:
        """How many tokens of a global batch have a loss: all, except in conversations. At least 1, to divide by."""
        samples = self._held_out if held_out else self._trained
        if not samples.masked:
            return self._size(number, held_out) * self.seq
        masks = [text.counted(index, self.seq) for text, index in self._windows(number, slice(None), held_out)]
        return max(1, sum(self.seq if mask is None else int(np.count_nonzero(mask)) for mask in masks))

    def _tokens(self, number: int, rows: Rows, held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
        windows = self._windows(number, rows, held_out)
        found: list[Tokens] = [text.window(index, self.seq) for text, index in windows]
        tokens = torch.from_numpy(np.stack(found))
        targets = tokens[:, 1:].clone()  # a single row is contiguous, and would share the memory of the inputs
        for row, (text, index) in enumerate(windows):
            if (counted := text.counted(index, self.seq)) is not None:
                targets[row].masked_fill_(torch.from_numpy(~counted), IGNORE_INDEX)
        return tokens[:, :-1].contiguous(), targets

    def _windows(self, number: int, rows: Rows, held_out: bool) -> list[Window]:
        indices = range(*rows.indices(self._size(number, held_out))) if isinstance(rows, slice) else rows
        samples = self._held_out if held_out else self._trained
        first = number * self.batch if held_out else self.ramp.sequences_before(number)
        return [samples.window(first + row, held_out) for row in indices]

    def _size(self, number: int, held_out: bool) -> int:
        """Sequences of a batch."""
        return self.batch if held_out else self.ramp.sequences(number)


class _MixedSamples:
    """Maps a sample's number to its text and its window there."""

    def __init__(self, mixture: MixtureCorpus, seq: int, seed: int, held_out: float | None = None) -> None:
        self.texts = [text for text, _ in mixture.parts]
        alone = len(self.texts) == 1
        shares = {} if held_out is None else {"held_out": held_out}
        self.orders = [
            SampleOrder(checked_windows(text, seq), seed if alone else seed_of(seed, place), **shares)
            for place, text in enumerate(self.texts)
        ]
        self.masked = any(isinstance(text, ConversationCorpus) for text in self.texts)
        self.pattern = MixturePattern([weight for _, weight in mixture.parts])

    def window(self, sample: int, held_out: bool) -> Window:
        owner, place = self.pattern.locate(sample)
        order = self.orders[owner]
        return self.texts[owner], order.evaluation(place) if held_out else order.train(place)


def rows_of(layout: Layout, dp_rank: int, microbatch: int) -> list[int]:
    """The rows of the global batch that a data rank reads for one of its micro-batches."""
    first = (microbatch * layout.dp + dp_rank) * layout.mbs
    return list(range(first, first + layout.mbs))


def in_background(function: Callable[..., Read], *args: Any) -> Future[Read]:
    """Calls a function in a daemon thread, unlike an executor's: a run that fails does not wait for it."""
    found: Future[Read] = Future()

    def work() -> None:
        try:
            found.set_result(function(*args))
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return found


class BatchPrefetcher(Generic[Read]):
    """Prefetches: `take(n)` returns `read(n)`, started in a thread by `take(n - 1)`; nothing from `end` on."""

    def __init__(self, read: Callable[[int], Read], end: int) -> None:
        self._read, self._end = read, end
        self._pending: dict[int, Future[Read]] = {}

    def take(self, number: int) -> Read:
        pending = self._pending.pop(number, None)
        found = self._read(number) if pending is None else pending.result()
        following = number + 1
        self._pending = {following: in_background(self._read, following)} if following < self._end else {}
        return found
