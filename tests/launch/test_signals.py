"""Stop signals: the first is recorded, two at the same time count once, a second Ctrl-C afterwards stops at once."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ultrascale.launch import signals as stopping
from ultrascale.launch.signals import STOP_SIGNALS, StopSignals


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_the_first_signal_is_recorded_without_exiting(number: signal.Signals) -> None:
    with StopSignals() as stop:
        assert stop.received is None
        os.kill(os.getpid(), number)
        assert stop.received == number.name
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == number.name


def test_old_handlers_are_restored() -> None:
    heard: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.received, heard) == ("SIGUSR1", [signal.SIGUSR1])
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_simultaneous_signals_count_once_and_later_ones_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal signals every process of the group, and the parent hands the same signal on."""
    monkeypatch.setattr(stopping, "REPEATED_SIGNAL_S", 0.3)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == "SIGINT"
        time.sleep(0.4)
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher may repeat itself while we save
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
