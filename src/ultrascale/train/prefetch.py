"""Prefetches a rank's part of the next batch in a thread while the current step computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Read = TypeVar("Read")


class BatchPrefetcher(Generic[Read]):
    """`take(n)` returns `read(n)`, started in a thread by `take(n - 1)`. Nothing is prefetched from `end` on."""

    def __init__(self, read: Callable[[int], Read], end: int) -> None:
        self._read, self._end = read, end
        self._number: int | None = None
        self._thread: threading.Thread | None = None
        self._found: Read | None = None
        self._error: BaseException | None = None

    def take(self, number: int) -> Read:
        found = self._read(number) if self._number != number else self._join()
        self._begin(number + 1)
        return found

    def _join(self) -> Read:
        assert self._thread is not None
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._found is not None
        return self._found

    def _begin(self, number: int) -> None:
        self._number = number if number < self._end else None
        if self._number is None:
            return
        self._found = self._error = None
        self._thread = threading.Thread(target=self._work, args=(number,), daemon=True)
        self._thread.start()

    def _work(self, number: int) -> None:
        try:
            self._found = self._read(number)
        except BaseException as error:  # raised by `take`
            self._error = error
