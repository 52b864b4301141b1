"""`ultrascale runs`: what a folder of runs holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from builders import make_job
from ultrascale.cost.estimate import estimate
from ultrascale.measure.run_list import runs_in
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A run with two checkpoints and one that was not completed, and a folder that is no run."""
    layout = Layout(dp=2, zero=1, mbs=8)
    job = make_job("tiny", "2xh100", 128, layout)
    run = tmp_path / "runs" / "first"
    for step in (100, 200, 300):
        folder = run / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "0.bin").write_bytes(b"x" * 1000)
        if step < 300:
            (folder / "checkpoint.json").write_text("{}")
    Plan(job=job, layout=layout, estimate=estimate(job, layout)).save(run / "plan.yaml")
    lines = [json.dumps({"step": step, "loss": 5.0 - step / 100}) for step in range(1, 251)]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 251, "lo']))
    (tmp_path / "runs" / "notes").mkdir()
    return tmp_path / "runs"


def test_a_run_is_read_from_its_files(stored: Path) -> None:
    (run,) = runs_in(stored)
    assert (run.name, run.model, run.gpus, run.steps, run.loss, run.finished) == ("first", "tiny", 2, 250, 2.5, False)
    assert run.layout == "dp2 zero1 mbs8·gas1"
    assert [(one.step, one.complete) for one in run.checkpoints] == [(100, True), (200, True), (300, False)]
    assert run.checkpoints[0].bytes == 1002
    assert runs_in(stored / "first") == [run]


def test_a_plan_that_cannot_be_read_is_named_and_the_others_are_listed(stored: Path) -> None:
    (stored / "second").mkdir()
    (stored / "second" / "plan.yaml").write_text("job: [")
    found = {run.name: run for run in runs_in(stored)}
    assert found["first"].problem is None
    assert found["second"].problem is not None


def test_the_command_lists_them_in_80_columns_and_as_json(run: Run, stored: Path) -> None:
    code, out, err = run("runs", stored)
    assert code == 0, err
    assert all(word in out for word in ("first", "100, 200", "2.5000"))
    assert "the save of step 300 was not completed" in out
    code, out, _ = run("runs", stored, "--json")
    assert json.loads(out)[0]["steps"] == 250
    code, out, err = run("runs", stored / "no")
    assert (code, out) == (2, "")
    assert "there is no folder" in err


def test_no_folder_of_runs_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"there is no folder .*none: name a run"):
        runs_in(tmp_path / "none")
