"""Reading a step ahead changes when something is read, never what."""

from __future__ import annotations

import threading

import pytest

from ultrascale.train.data import BatchPrefetcher


def test_steps_in_order_skipped_and_again() -> None:
    ahead = BatchPrefetcher(lambda number: number * 10, end=100)
    assert [ahead.take(number) for number in (0, 1, 2, 7, 8, 3, 3)] == [0, 10, 20, 70, 80, 30, 30]


def test_the_next_batch_is_prefetched_and_none_beyond_the_end() -> None:
    read, known = [], threading.Event()

    def work(number: int) -> int:
        read.append(number)
        if number == 1:
            known.set()
        return number

    ahead = BatchPrefetcher(work, end=2)
    assert ahead.take(0) == 0
    assert known.wait(10)
    assert ahead.take(1) == 1
    assert read == [0, 1]
    assert ahead.take(5) == 5  # requested all the same


def test_a_prefetch_error_is_raised_at_its_step() -> None:
    def work(number: int) -> int:
        if number == 1:
            raise ValueError("the disk is gone")
        return number

    ahead = BatchPrefetcher(work, end=9)
    assert ahead.take(0) == 0
    with pytest.raises(ValueError, match="the disk is gone"):
        ahead.take(1)
    assert ahead.take(2) == 2
