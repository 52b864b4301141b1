"""`bench ladders`: rungs through the real engine, a rung that fails as a row, and what each bought."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
import torch
from rich.console import Console

from ultrascale.measure import ladders
from ultrascale.measure.ladders import Ladder, Rung
from ultrascale.show import kernels as show
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model
from ultrascale.train.engine import Engine


def test_a_rung_steps_the_engine() -> None:
    """On a CPU, where there is one: steps are counted and timed, the model learns, utilisation is of a known peak alone."""
    job, layout, training = ladders.job_of(Model.load("tiny"), Cluster.load("1xh100"), 32, 2, 3)
    job = job.model_copy(update={"precision": "fp32"})
    asked = Rung("eager", "one by one")
    rung = ladders.stepped(asked, job, layout, training, True, "cpu")
    assert (rung.name, rung.problem) == ("eager", None)
    assert rung.tokens_per_s == pytest.approx(2 * 32 / rung.step_s)
    assert rung.mfu is not None
    assert 0 < rung.mfu < 1
    assert 1 < rung.loss < 10
    assert ladders.stepped(asked, job, layout, training, False, "cpu").mfu is None


def test_rungs_are_those_of_train_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, told = [], []

    def stepped(asked: Rung, job: Any, layout: Any, training: Any, known: bool) -> Rung:
        return Rung(asked.name, training.kernels, step_s=1.0, peak_gib=float(known))

    monkeypatch.setattr(ladders, "stepped", stepped)
    found = ladders.kernels(Model.load("tiny"), None, 64, 2, 5, told.append)
    ways = [(rung.name, rung.what, rung.peak_gib) for rung in found.rungs]
    assert ways == [(name, name, 0.0) for name in ("eager", "compile", "fused")]
    assert len(told) == 3
    assert "2 × 64 tokens" in found.what


def test_a_rung_without_memory_and_one_that_breaks_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: Engine, job: Any, mesh: Any, training: Any, batches: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory") if training.kernels == "compile" else ValueError("no such kernel")

    monkeypatch.setattr(Engine, "__init__", broken)
    monkeypatch.setattr("ultrascale.parallel.mesh.Mesh.build", lambda *_: None)
    found = ladders.kernels(Model.load("tiny"), None, 64, 2, 5)
    assert [rung.problem for rung in found.rungs] == [
        "ValueError: no such kernel",
        "out of memory",
        "ValueError: no such kernel",
    ]


def test_gains_are_over_the_last_rung_that_ran() -> None:
    rungs = [
        Rung("eager", "a", step_s=1.0, tokens_per_s=1000.0, mfu=0.3, peak_gib=100.0, loss=11.5, ready_s=3.0),
        Rung("compile", "b", problem="out of memory"),
        Rung("fused", "c", step_s=0.5, tokens_per_s=2000.0, mfu=None, peak_gib=60.5, loss=11.5, ready_s=40.0),
    ]
    assert show.gains(rungs) == ["–", "–", "2.00× the speed, -39.5 GiB"]
    assert show.gains([*rungs, replace(rungs[2], step_s=0.4)])[-1] == "1.25× the speed, +0.0 GiB"
    text = StringIO()
    ladder = Ladder("kernels", "m, 8 × 4,096 tokens", tuple(rungs))
    show.show_ladder(Console(file=text, width=200), ladder)
    for word in ("1,000.0", "2,000", "30.0", "60.50", "out of memory", "2.00× the speed, -39.5 GiB"):
        assert word in text.getvalue(), word
    assert json.loads(json.dumps(show.ladder_json(ladder)))["rungs"][1]["problem"] == "out of memory"


def test_ladders_are_named() -> None:
    assert ladders.chosen(None) == ["kernels"]
    with pytest.raises(SpecError, match="did you mean 'kernels'"):
        ladders.chosen("kernel")
    with pytest.raises(SpecError, match="names no ladder"):
        ladders.chosen("")


def test_a_model_that_the_engine_cannot_run_is_refused() -> None:
    with pytest.raises(SpecError, match="latent attention"):
        ladders.job_of(Model.load("deepseek-v2-lite"), None, 64, 1, 1)
