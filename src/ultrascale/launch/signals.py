"""Stop signals: recorded by a rank, so that it saves and ends; forwarded to its ranks by the process that started them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from ultrascale.specs.errors import RunError

# A terminal signals the whole group and a launcher forwards it: a signal within this time is the same request.
REPEATED_SIGNAL_S = 2.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # from a launcher or Slurm, Ctrl-C, Slurm before the time limit


class StopSignals:
    """A context in which SIGTERM, SIGINT and SIGUSR1 set `received` instead of ending the process. In the main thread only."""

    def __init__(self) -> None:
        self.received: str | None = None
        """the name of the first signal, such as SIGTERM"""
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._before)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._at > REPEATED_SIGNAL_S:
            raise KeyboardInterrupt


@contextmanager
def forward_signals(processes: list[Any]) -> Iterator[None]:
    """Forwards stop signals to the ranks; a second signal after `REPEATED_SIGNAL_S` kills them at once."""
    first: list[float] = []

    def forward(number: int, _: object) -> None:
        now = time.monotonic()
        if first and now - first[0] > REPEATED_SIGNAL_S and number != signal.SIGUSR1:
            for process in processes:
                process.kill()
            raise RunError(f"ended at once, without saving: {signal.Signals(number).name} came a second time")
        if not first:
            first.append(now)
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, number)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python
