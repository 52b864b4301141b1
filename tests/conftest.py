"""What tests share: the command line, run in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from ultrascale import cli
from ultrascale.train import machine, rates

# Ranks are forked from this process, and OpenMP's threads do not survive a fork: a child that needs them waits for ever.
os.environ["OMP_NUM_THREADS"] = "1"
# Ranks share no GPU, and autograd's threads for one do not survive a fork either: all but `make test-gpu` runs on the CPU.
if "ULTRASCALE_TEST_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A busy machine is no reason to fail: what is generated does not depend on how fast.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Runs in this process, too, keep to one thread, however many cores there are."""
    with pytest.MonkeyPatch.context() as patched:
        for place in (rates, machine):
            patched.setattr(place, "cores", lambda: 1)
        yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call it with the words of a command; it answers exit code, standard output and standard error."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ultrascale", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call
