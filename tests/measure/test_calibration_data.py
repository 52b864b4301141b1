"""The measured runs in data/calibration: what the documents say of six runs and twenty others."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from ultrascale.measure.calibrate_fit import InitialConstants
from ultrascale.measure.calibrate_runs import load

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent


def report(name: str) -> tuple:
    script = runpy.run_path(str(ROOT / "benchmarks" / "calibration.py"))
    return script["report"](script["DATA"].with_name(name))


@pytest.fixture(scope="module")
def calibrated() -> tuple:
    return report("h200_first.jsonl")


def test_six_runs_predict_twenty_unseen_runs() -> None:
    found, rows = report("h200.jsonl")
    assert found.improved
    assert sum(row.fitted for row in rows) == 6
    others = [row for row in rows if not row.fitted]
    assert len(others) == 20
    assert max(abs(row.before) for row in others) < 0.035
    assert max(abs(row.after) for row in others) < 0.05
    assert sum(abs(row.after) for row in others) / 20 < 0.016
    assert max(abs(row.memory_after) for row in others) < 0.011 < max(abs(row.memory_before) for row in others)


def test_the_cost_model_fits_its_development_runs(calibrated: tuple) -> None:
    found, rows = calibrated
    assert found.improved
    assert sum(row.fitted for row in rows) == 6
    others = [row for row in rows if not row.fitted]
    assert len(others) == 20
    errors = [abs(row.after) for row in others]
    assert max(errors) < 0.04
    assert sum(errors) / len(errors) < 0.015
    assert max(abs(row.memory_after) for row in others) < 0.01 < max(abs(row.memory_before) for row in others)


def test_one_gpu_identifies_no_link(calibrated: tuple) -> None:
    found, _ = calibrated
    kept = {verdict.name: verdict.why for verdict in found.verdicts if verdict.known is None}
    assert "layout.tp=2" in kept["link_bandwidth"]
    assert {"network_bandwidth", "matmul_fp8", "context_gib"} <= set(kept)


def test_measured_times_stay_where_runs_do_not_improve_them(calibrated: tuple) -> None:
    found, rows = calibrated
    assert {verdict.name for verdict in found.verdicts if verdict.known is not None} == {"workspace_gib", "allocator_slack"}
    assert all(row.before == row.after for row in rows)
    assert not found.judges()  # each of the six alone identifies a constant of time; all validate memory
    assert len(found.judges("held_gib")) == 6
    assert {verdict.why.split(":")[0] for verdict in found.verdicts if verdict.name in ("matmul", "attention")} == {
        "no run is left to judge what was fitted"
    }


def test_six_runs_predict_twenty_others_on_a_cpu() -> None:
    found, rows = report("cpu.jsonl")
    assert found.base.efficiency.synchronous
    assert sum(row.fitted for row in rows) == 6
    others = [row for row in rows if not row.fitted]
    assert len(others) == 20
    errors = [abs(row.after) for row in others]
    assert max(errors) <= 0.15
    assert sum(errors) / len(errors) < 0.05
    fitted = [row for row in rows if row.fitted]
    assert sum(abs(row.after) for row in fitted) < 0.5 * sum(abs(row.before) for row in fitted)
    assert all(abs(row.memory_after) <= 0.02 for row in others)


@pytest.mark.slow
def test_other_choices_of_six_are_drawn_by_what_was_predicted() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "calibration.py"))
    runs = load([script["DATA"]])
    base = InitialConstants.of(runs[0].job)
    least = {run.name for run in sorted(runs, key=lambda run: script["_layer_s"](base, run))[:9]}
    draws = script["drawn"](script["DATA"], 2)
    for draw in draws:
        assert len(set(draw.fitted)) == 6
        assert len(set(draw.fitted) & least) == 2
        assert set(draw.off) == {run.name for run in runs} - set(draw.fitted)
        assert sum(abs(one) for one in draw.off.values()) / 20 < 0.07
    assert draws[0].fitted != draws[1].fitted
    assert "2 draws of six" in script["about_draws"](draws)[0]
