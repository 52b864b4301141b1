"""What tests share: the command line, run in this process."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from ultrascale import cli
from ultrascale.launch import machine

if TYPE_CHECKING:
    from ultrascale.launch.cpu_rates import CPURates, LinkRate

# Ranks are forked from this process, and OpenMP's threads do not survive a fork: a child that needs them waits for ever.
os.environ["OMP_NUM_THREADS"] = "1"
# Ranks share no GPU, and autograd's threads for one do not survive a fork either: all but `make test-gpu` runs on the CPU.
if "ULTRASCALE_TEST_GPU" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A busy machine is no reason to fail: what is generated does not depend on how fast.
settings.register_profile("slow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", settings.get_profile("slow"), max_examples=10)

Run = Callable[..., tuple[int, str, str]]

# Files that `make test-slow` alone runs: kills, restarts and timeouts that wait for seconds, sweeps, fits, kernels in an
# interpreter. The default level keeps each technique, each verb and the README's commands.
TESTS = Path(__file__).parent
SLOW_FILES = {
    "measure/test_foreign_programs.py",
    "kernels/test_contest_interpreted.py",
    "kernels/test_interpreted.py",
    "launch/test_elastic.py",
    "launch/test_failing.py",
    "launch/test_kill_random.py",
    "launch/test_killed.py",
    "launch/test_phases.py",
    "launch/test_watchdog.py",
    "measure/test_bench_layouts.py",
    "measure/test_calibrate.py",
    "measure/test_heatmap.py",
    "measure/test_trace_steps.py",
    "measure/test_bench_ladders.py",
    "measure/test_left_out.py",
    "measure/test_rehearse_attention.py",
    "measure/test_rehearse_drawn.py",
    "measure/test_rehearse_kernels.py",
    "measure/test_rehearse_sweep.py",
    "train/test_live_bytes.py",
    "train/test_memory.py",
}


_CACHES = count()


@pytest.fixture(autouse=True)
def _no_timings_of_earlier_runs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / f"cache-{next(_CACHES)}"))


def _without_slow(config: pytest.Config) -> bool:
    return "not slow" in config.getoption("-m")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("default" if _without_slow(config) else "slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of slow tests are not even imported where none will run."""
    slow = collection_path.is_relative_to(TESTS) and collection_path.relative_to(TESTS).as_posix() in SLOW_FILES
    return True if slow and _without_slow(config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow the files above, and of a test with `quick_cases` all other cases."""
    counts: Counter[str] = Counter()
    for item in items:
        if item.path.relative_to(TESTS).as_posix() in SLOW_FILES:
            item.add_marker(pytest.mark.slow)
        if quick := item.get_closest_marker("quick_cases"):
            function, _, case = item.nodeid.removesuffix("]").partition("[")
            taken = case in quick.args if quick.args else counts[function] % quick.kwargs["every"] == 0
            counts[function] += 1
            if not taken:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Runs in this process keep to one thread, however many cores there are, and measure its rates in a tenth of the time."""
    measure = machine.measure_cpu

    def measure_quickly(nproc: int, timeout_s: float) -> tuple[CPURates, LinkRate]:
        from ultrascale.launch import cpu_rates

        with pytest.MonkeyPatch.context() as shorter:
            shorter.setattr(cpu_rates, "_TURNS", 1)
            shorter.setattr(cpu_rates, "_EACH_S", 2e-3)
            return measure(nproc, timeout_s)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(machine, "cores", lambda: 1)
        patched.setattr(machine, "measure_cpu", measure_quickly)
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
