"""The measured runs in data/calibration: what the documents say of six runs and twenty others."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from ultrascale.measure.calibrate.constants import Base
from ultrascale.measure.calibrate.runs import load

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def told() -> tuple:
    script = runpy.run_path(str(ROOT / "benchmarks" / "calibration.py"))
    return script["report"](script["DATA"])


def test_six_runs_predict_twenty_others(told: tuple) -> None:
    found, rows = told
    assert found.improved
    assert sum(row.fitted for row in rows) == 6
    others = [row for row in rows if not row.fitted]
    assert len(others) == 20
    by_gpu = [row for row in others if row.steady and row.waits < 0.05]
    assert len(by_gpu) == 12
    errors = [abs(row.after) for row in by_gpu]
    assert max(errors) < 0.03
    assert sum(errors) / len(errors) < 0.012
    before, after = (sum(abs(getattr(row, when)) for row in others) / len(others) for when in ("before", "after"))
    assert after < 0.55 * before
    assert all(abs(row.memory_after) <= 0.02 for row in others)


def test_one_gpu_tells_no_link(told: tuple) -> None:
    found, _ = told
    kept = {verdict.name: verdict.why for verdict in found.verdicts if verdict.known is None}
    assert "layout.tp=2" in kept["link_bandwidth"]
    assert {"network_bandwidth", "matmul_fp8", "context_gib"} <= set(kept)
    assert {verdict.name for verdict in found.verdicts if verdict.known is not None} >= {
        "matmul",
        "attention",
        "kernel_launch_s",
    }


@pytest.mark.slow
def test_other_choices_of_six_are_drawn_by_what_was_predicted() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "calibration.py"))
    runs = load([script["DATA"]])
    base = Base.of(runs[0].job)
    least = {run.name for run in sorted(runs, key=lambda run: script["_layer_s"](base, run))[:9]}
    draws = script["drawn"](script["DATA"], 2)
    for draw in draws:
        assert len(set(draw.fitted)) == 6
        assert len(set(draw.fitted) & least) == 2
        assert set(draw.off) == {run.name for run in runs} - set(draw.fitted)
        assert sum(abs(one) for one in draw.off.values()) / 20 < 0.07
    assert draws[0].fitted != draws[1].fitted
    assert "2 draws of six" in script["about_draws"](draws)[0]
