"""`ultrascale bench`: help, errors without a GPU, fake results to a terminal and to a file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Run
from ultrascale.cli.bench import kernel_contest
from ultrascale.cli.common import select
from ultrascale.launch import machine
from ultrascale.measure import bench_collectives as collectives
from ultrascale.measure import bench_ladders as ladders
from ultrascale.measure.bench_ladders import Figures, Ladder, LadderMachine, Rung
from ultrascale.specs.errors import SpecError


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", list)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_the_error_names_the_fix(run: Run) -> None:
    code, out, err = run("bench", "kernels")
    assert code == 2
    assert not out
    assert "on a machine that has one" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("kernels", "--only", "gates"), "did you mean 'gate'"),
        (("kernels", "--hidden", "1000"), "multiple of 128"),
        (("kernels", "--tokens", "many"), "--tokens"),
        (("ladders", "--only", "dato"), "did you mean 'data'"),
        (("collectives", "--only", "allreduce"), "did you mean 'all_reduce'"),
        (("ladders", "--model", "tinny"), "tiny"),
        (("ladders", "--seq", "long"), "--seq"),
    ],
)
def test_bad_options_are_refused_before_measuring(run: Run, words: tuple[str, ...], message: str) -> None:
    code, _, error = run("bench", *words)
    assert code == 2
    assert message in error


def test_a_selection_keeps_the_order_of_what_is_known() -> None:
    assert select(None, ladders.LADDERS, "ladder") == list(ladders.LADDERS)
    assert select("pipeline, data", ladders.LADDERS, "ladder") == ["data", "pipeline"]
    assert select(" gate, NORM ", kernel_contest().KERNELS, "kernel") == ["norm", "gate"]
    assert select("all-reduce,Broadcast", collectives.OPS, "collective") == ["broadcast", "all_reduce"]
    with pytest.raises(SpecError, match="did you mean 'all_reduce'"):
        select("allreduce", collectives.OPS, "collective")
    for only in ("", ","):
        with pytest.raises(SpecError, match="names no ladder: try data"):
            select(only, ladders.LADDERS, "ladder")


@pytest.mark.usefixtures("gpu")
def test_kernels_to_a_terminal_and_a_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], int]] = []
    contest = kernel_contest()
    row = contest.KernelResult(
        "gate", "1b", "4 × 4", {"eager": 2.0, "ours": 1.0}, {"liger": "not installed"}, {}, {}, 10.0, None, None
    )

    def measure(names: list[str], shapes: list[object], say: object) -> Iterator[object]:
        calls.append((names, len(shapes)))
        yield contest.KernelsReport("a GPU", (row,), ())

    monkeypatch.setattr(contest, "measure", measure)
    file = tmp_path / "out.json"
    code, out, _ = run("bench", "kernels", "--only", "gate", "--json", file)
    assert code == 0
    assert calls == [(["gate"], 2)]
    assert "keep" in out
    assert json.loads(file.read_text())["kernels"][0]["ours_of_best_other"] == 0.5


@pytest.mark.usefixtures("gpu")
def test_ladders_to_a_terminal_and_a_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, LadderMachine]] = []
    rungs = (Rung("eager", "a", measured=Figures(0.5, 1.0, None, None)), Rung("compile", "b", problem="out of memory"))

    def climb(name: str, here: LadderMachine, say: object) -> Ladder:
        calls.append((name, here))
        return Ladder(name, "tiny", rungs if name == "kernels" else rungs[1:])

    monkeypatch.setattr(ladders, "climb", climb)
    file = tmp_path / "out.json"
    code, out, _ = run("bench", "ladders", "--only", "kernels,precision", "--seq", "2k", "--json", file)
    assert code == 0
    assert [name for name, _ in calls] == ["precision", "kernels"]
    here = calls[0][1]
    assert (here.model.name, here.seq, here.mbs, here.world, here.gpus) == ("llama-3.2-1b", 2048, 8, 1, 1)
    assert "500.0 ms" in out
    assert "out of memory" in out
    assert [one["name"] for one in json.loads(file.read_text())["ladders"]] == ["precision", "kernels"]
    code, _, _ = run("bench", "ladders", "--only", "precision")
    assert code == 1  # no rung ran
    code, _, err = run("bench", "ladders", "--nproc", "2")
    assert code == 2
    assert "shows 1 GPU" in err


def test_help_fills_the_lines_of_any_terminal(run: Run) -> None:
    lines = run("bench", "layouts", "--help")[1].splitlines()
    assert any("batch stay the same. --budget takes the planner's" in line for line in lines)
    assert any(line.strip() == "ultrascale bench layouts plan.yaml --budget 30m" for line in lines)


def test_help_describes_the_measurement(run: Run) -> None:
    code, out, _ = run("bench", "kernels", "--help")
    assert code == 0
    for word in ("cold L2", "Liger-Kernel", "keep", "--only norm,gate"):
        assert word in " ".join(out.split()), word
