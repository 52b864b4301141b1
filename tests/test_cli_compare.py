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
    for name, layout, measurement in (
        ("a", Layout(dp=2, gas=2), measured(0.5, 0.4, 30 * MIB)),
        ("b", Layout(dp=2, mbs=2), measured(0.8, 0.45, 10 * MIB)),
    ):
        (tmp_path / name).mkdir()
        plan_of(layout).save(tmp_path / name / "plan.yaml")
        measurement.save(tmp_path / name / "measurement.json")
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


def test_a_plan_compared_with_a_run(run: Run, folders: Path) -> None:
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
    assert not found.differences


def test_incomparable_inputs_are_refused(run: Run, folders: Path) -> None:
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


def on_gpu(step_s: float, attention_ms: float, layers: int) -> Measurement:
    measurement = measured(step_s, 0.0, MIB)
    stages = (MeasuredStage(stage=0, layers=layers, memory=measurement.memory[0].memory),)
    note = f"attention: cuDNN {attention_ms:.2f} ms, flash 9.99 ms"
    return measurement.model_copy(update={"device": "NVIDIA H100", "time": MeasuredTime(), "notes": (note,), "memory": stages})


def beside(model: str, seq: int, mbs: int, slower: float, attention_slower: float) -> compare.Comparison:
    """A plan for one H100 beside a run of it that took longer, and whose attention did."""
    layout = Layout(mbs=mbs)
    job = Job(model=Model.load(model), cluster=Cluster.load("1xh100"), seq=seq, batch_tokens=mbs * seq)
    plan = Plan(job=job, layout=layout, estimate=estimate(job, layout))
    each_ms = 1e3 * plan.estimate.time.attention_s / job.model.layers
    measurement = on_gpu(slower * plan.estimate.step_time_s, attention_slower * each_ms, job.model.layers)
    return compare.compare(
        compare.ComparisonSide("plan.yaml", plan, plan.estimate), compare.ComparisonSide("runs/a", plan, measurement)
    )


def test_attention_that_is_slower_than_the_table_is_named_with_its_head_size() -> None:
    found = beside("llama-3.2-1b", 4096, 8, slower=1.03, attention_slower=1.18)
    attention = next(term for term in found.terms if term.name == "attention")
    assert attention.difference == pytest.approx(1 / 1.18 - 1, abs=0.01)
    assert "most of it is attention" in found.sentences[0]
    assert found.sentences[0].endswith("head size 64")
    assert beside("llama-3.2-3b", 1024, 32, 1.03, 1.5).sentences[0].endswith("rows of 1024 tokens are short")
    assert "blocks, few for 132 multiprocessors" in beside("llama-3.2-3b", 1024, 1, 1.05, 3.0).sentences[0]


def test_a_host_bound_gpu_is_reported() -> None:
    sentence = beside("smollm2-135m", 1024, 1, slower=5, attention_slower=1).sentences[0]
    assert "the GPU waits for the host: 1,024 tokens" in sentence
    assert "a larger micro-batch" in sentence


def test_a_uniformly_slower_gpu_needs_its_own_constants() -> None:
    assert "`ultrascale calibrate`" in beside("smollm2-1.7b", 4096, 8, slower=1.2, attention_slower=1.02).sentences[0]


def test_a_part_with_the_opposite_sign_is_not_the_main_cause() -> None:
    sentence = beside("llama-3.2-1b", 4096, 8, slower=0.95, attention_slower=1.5).sentences[0]
    assert "attention" not in sentence
    assert "`ultrascale calibrate`" in sentence


def test_causes_are_named_only_for_a_plan_and_a_run(folders: Path) -> None:
    first, second = (compare.load(folders / name) for name in ("a", "b"))
    assert compare.compare(first, second).cause("gradient reduction", 1.0) is None
    planned = compare.compare(compare.load(folders / "plan.yaml"), first)
    assert "slowest" in (planned.cause("gradient reduction", -1.0) or "")
