"""`compare`: terms, the largest of them, what differs, and inputs that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Run
from ultrascale import Cluster, Job, Layout, Model, estimate
from ultrascale.measure import compare
from ultrascale.specs.measurement import MeasuredMemory, MeasuredStage, MeasuredTime, Measurement
from ultrascale.specs.plan import Plan

MIB = 2**20


def plan_of(layout: Layout, model: str = "tiny") -> Plan:
    job = Job(model=Model.load(model), cluster=Cluster.load("2xh100"), seq=128, batch_tokens=512)
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))


def measured(step_s: float, computing_s: float, activations: float) -> Measurement:
    memory = MeasuredMemory(parameters=MIB, master=0, gradients=MIB, optimizer=2 * MIB, activations=activations, buffers=0)
    return Measurement(
        step_time_s=step_s,
        tokens_per_s=512 / step_s,
        tokens_per_s_per_gpu=256 / step_s,
        model_tflops_per_gpu=0.1,
        peak_gib=0.1,
        peak_stage=0,
        memory=(MeasuredStage(stage=0, layers=2, memory=memory),),
        time=MeasuredTime(computing_s=computing_s, data_s=step_s - computing_s),
        steps=4,
        processes=2,
        device="cpu",
    )


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    plan_of(Layout(dp=2, gas=2)).save(tmp_path / "plan.yaml")
    for name, layout, seen in (
        ("a", Layout(dp=2, gas=2), measured(0.5, 0.4, 30 * MIB)),
        ("b", Layout(dp=2, mbs=2), measured(0.8, 0.45, 10 * MIB)),
    ):
        (tmp_path / name).mkdir()
        plan_of(layout).save(tmp_path / name / "plan.yaml")
        seen.save(tmp_path / name / "measurement.json")
    return tmp_path


def test_two_runs_and_the_largest_difference(run: Run, folders: Path) -> None:
    code, out, error = run("compare", folders / "a", folders / "b", "--json")
    assert code == 0, error
    found = json.loads(out)
    terms = {term["name"]: term for term in found["terms"]}
    assert terms["step time"]["difference"] == pytest.approx(0.5 / 0.8 - 1)
    assert terms["gradient reduction"]["first"] == pytest.approx(0.1)
    assert terms["tensors at the peak"]["first"] == 34 * MIB
    assert "gradient reduction, 250" in found["largest"][0]
    assert "activations, buffers, 20.00 MiB more" in found["largest"][1]
    assert {"layout.mbs 1 and 2", "layout.gas 2 and 1"} <= set(found["apart"])


def test_a_plan_beside_a_run(run: Run, folders: Path) -> None:
    code, out, error = run("compare", folders / "plan.yaml", folders / "a")
    assert code == 0, error
    assert "planned" in out
    assert "measured" in out
    assert "computing" in out
    assert "the two differ" not in out


def test_nothing_differs_between_a_plan_and_itself(folders: Path) -> None:
    side = compare.load(folders / "plan.yaml")
    found = compare.compare(side, side)
    assert all(term.difference in (None, 0) for term in found.terms)
    assert "no part differs" in found.sentences[0]
    assert not found.apart


def test_what_cannot_be_compared_is_refused(run: Run, folders: Path) -> None:
    plan_of(Layout(dp=2, gas=2), "tiny-moe").save(folders / "other.yaml")
    (folders / "b" / "measurement.json").unlink()
    (folders / "empty").mkdir()
    (folders / "broken.yaml").write_text("job: [")
    for first, second, words in (
        ("other.yaml", "a", "a plan is compared with a run of its own model"),
        ("a", "b", "has no measurement.json"),
        ("a", "empty", "has no plan.yaml"),
        ("a", "nowhere", "does not exist"),
        ("broken.yaml", "a", "is not YAML"),
    ):
        code, _, error = run("compare", folders / first, folders / second)
        assert code == 2, words
        assert words in " ".join(error.split()), error
