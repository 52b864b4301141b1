"""`ultrascale bench` as a user meets it: help, refusals without a GPU, made-up figures to a terminal and to a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Run
from ultrascale.measure import kernels_timed, ladders
from ultrascale.measure.kernels import Report, Row
from ultrascale.measure.ladders import Ladder, Rung
from ultrascale.train import launch, machine


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", list)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_says_what_to_do(run: Run) -> None:
    code, out, said = run("bench", "kernels")
    assert code == 2
    assert not out
    assert "on a machine that has one" in said
    code, _, said = run("bench", "ladders", "--only", "kernels", "--model", "tiny")
    assert code == 2
    assert "a CPU runs operator by operator" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("kernels", "--only", "gates"), "did you mean 'gate'"),
        (("kernels", "--hidden", "1000"), "multiple of 128"),
        (("kernels", "--tokens", "many"), "--tokens"),
        (("ladders", "--only", "date"), "known: kernels"),
        (("ladders", "--model", "tinny"), "tiny"),
        (("ladders", "--seq", "long"), "--seq"),
    ],
)
def test_bad_words_are_refused_before_anything_is_measured(run: Run, words: tuple[str, ...], said: str) -> None:
    code, _, error = run("bench", *words)
    assert code == 2
    assert said in error


@pytest.mark.usefixtures("gpu")
def test_kernels_to_a_terminal_and_a_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []
    row = Row("gate", "1b", "4 × 4", {"eager": 2.0, "ours": 1.0}, {"liger": "not installed"}, {}, {}, 10.0, None, None)

    def measure(names: list[str], shapes: list[object], say: object) -> Iterator[Report]:
        asked.append((names, len(shapes)))
        yield Report("a GPU", (row,), ())

    monkeypatch.setattr(kernels_timed, "measure", measure)
    file = tmp_path / "out.json"
    code, out, _ = run("bench", "kernels", "--only", "gate", "--json", file)
    assert code == 0
    assert asked == [(["gate"], 2)]
    assert "keep" in out
    assert json.loads(file.read_text())["kernels"][0]["ours_of_best_other"] == 0.5


@pytest.mark.usefixtures("gpu")
def test_a_ladder_to_a_terminal_and_a_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "machine", lambda *_: None)
    made = Ladder("kernels", "tiny", (Rung("eager", "a", step_s=0.5), Rung("compile", "b", problem="out of memory")))
    monkeypatch.setattr(ladders, "kernels", lambda *_: made)
    file = tmp_path / "out.json"
    code, out, _ = run("bench", "ladders", "--model", "tiny", "--json", file)
    assert code == 0
    assert "500.0" in out
    assert "out of memory" in out
    assert [rung["name"] for rung in json.loads(file.read_text())["rungs"]] == ["eager", "compile"]


def test_help_teaches(run: Run) -> None:
    code, out, _ = run("bench", "kernels", "--help")
    assert code == 0
    for word in ("cold L2", "Liger-Kernel", "keep", "--only norm,gate"):
        assert word in " ".join(out.split()), word
