"""The measured runs in data/calibration: what the documents say of six runs and twenty others."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

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
    assert sum(error <= 0.05 for error in errors) >= 11
    assert max(errors) < 0.055
    assert sum(errors) / len(errors) < 0.02
    before, after = (sum(abs(getattr(row, when)) for row in others) / len(others) for when in ("before", "after"))
    assert after < 0.5 * before
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
