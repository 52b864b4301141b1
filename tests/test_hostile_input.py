"""Malformed and hostile inputs to every command: each ends in time, with exit code 0, 1 or 2, and without a traceback.

`tests/test_bad_input.py` checks the messages; here it is enough that there is one. The cases are in `tests/hostile/`. Inputs
are built in an empty folder; commands run in this process, under an alarm.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hostile.arguments import of_arguments, of_engines, of_environment
from hostile.cases import Case
from hostile.run_files import of_checkpoints, of_hugging_face, of_runs, of_tokens, of_traces
from hostile.spec_files import of_files, of_models, of_plans, of_tables

Run = Callable[..., tuple[int, str, str]]

LIMIT_S = 120  # of wall-clock time, on machines that others use too; a hang never ends
CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

LARGE = [*of_files(), *of_plans(), *of_models(), *of_tables()]
QUICK = [
    *LARGE[::7],
    *of_traces(),
    *of_hugging_face(),
    *of_checkpoints(),
    *of_tokens(),
    *of_runs(),
    *of_environment(),
    *of_arguments(),
    *of_engines(),
]
CASES = [*LARGE, *QUICK[len(LARGE[::7]) :]]


class TookTooLongError(BaseException):
    """A BaseException: no `except Exception` of the command may catch it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    """Imported without an alarm, which would leave it half imported; a loaded machine takes a minute."""
    from ultrascale.train import import_torch

    import_torch()


def test_the_table_is_large_and_names_each_case_once() -> None:
    names = [case.name for case in CASES]
    assert len(CASES) >= 1500
    assert len(QUICK) >= 625  # of which every twentieth is in the default suite
    assert len(set(names)) == len(names)
    verbs = {case.words[0] for case in CASES if case.words}
    wanted = "plan explain accuracy presets train verify data convert doctor rehearse profile bench compare calibrate report"
    assert verbs >= {*wanted.split(), "studio", "export", "import"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if place % 20 else []) for place, case in enumerate(QUICK)],
)
def test_hostile_input_ends_in_time_with_a_message(
    case: Case, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, run, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_the_rest_of_the_table(part: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, case in enumerate([case for place, case in enumerate(LARGE) if place % 7 == part + 1]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patched:
            check(case, run, folder, patched)


def check(case: Case, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for build in case.build:
        build(tmp_path)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    with within(LIMIT_S):
        code, out, err = run(*case.words)
    assert code in case.codes, (case.name, err)
    assert "Traceback (most recent call last)" not in out + err, case.name
    assert not CONTROL_CHARACTERS.search(out + err), case.name
    assert not (tmp_path / "pickle-was-run").exists()
    assert not (tmp_path / "config-was-run").exists()
    if code == 2:
        assert (out + err).strip(), case.name
