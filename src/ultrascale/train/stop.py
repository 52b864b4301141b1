"""Stop signals: the first is recorded, so that the loop can save and end; a second Ctrl-C ends the process at once."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any, Self

from ultrascale.parallel.local import SAME_S, STOP


class StopSignals:
    """A context in which SIGTERM, SIGINT and SIGUSR1 set `received` instead of ending the process. In the main thread only."""

    def __init__(self) -> None:
        self.received: str | None = None
        """the name of the first signal, such as SIGTERM"""
        self._at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._handle) for number in STOP}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received, self._at = signal.Signals(number).name, now
        elif number == signal.SIGINT and now - self._at > SAME_S:
            raise KeyboardInterrupt
