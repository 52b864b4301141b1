"""plan.yaml: reads back equal, predicts the same numbers again, and an edited file is caught."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ultrascale import Cluster, Job, Model, Plan, SpecError, estimate, plan
from ultrascale.specs.estimate import CAUSES, OWNERS


@pytest.fixture(scope="module")
def example_plan() -> Plan:
    job = Job(
        model=Model.load("llama-3.2-1b"),
        cluster=Cluster.load("8xh100"),
        seq=4096,
        batch_tokens=2**18,
        total_tokens=10**12,
    )
    return plan(job, top=1, fix=["pp=2"]).plans[0]


@pytest.fixture(scope="module")
def mapping(example_plan: Plan) -> dict[str, Any]:
    return example_plan.to_mapping()


def near(left: Any, right: Any) -> bool:
    """Equal to the six digits that a file keeps."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(near(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(near, left, right))
    return left == pytest.approx(right, rel=1e-5) if isinstance(left, float) else bool(left == right)


def test_a_plan_reads_back_equal(example_plan: Plan, tmp_path: Path) -> None:
    again = Plan.load(example_plan.save(tmp_path / "plan.yaml"))
    assert (again.job, again.layout, again.reasons) == (example_plan.job, example_plan.layout, example_plan.reasons)
    assert near(again.estimate.model_dump(), example_plan.estimate.model_dump())
    assert [one.layout for one in again.rejected] == [one.layout for one in example_plan.rejected]


def test_a_reloaded_plan_predicts_the_same_numbers(example_plan: Plan, tmp_path: Path) -> None:
    again = Plan.load(example_plan.save(tmp_path / "plan.yaml"))
    assert estimate(again.job, again.layout) == estimate(example_plan.job, example_plan.layout)


def test_a_file_saved_twice_is_the_same(example_plan: Plan, tmp_path: Path) -> None:
    first = example_plan.save(tmp_path / "one.yaml").read_text()
    assert Plan.load(tmp_path / "one.yaml").save(tmp_path / "two.yaml").read_text() == first
    assert first.startswith("# A plan of ultrascale")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v2-lite", "gpt2", "qwen3-0.6b"])
@pytest.mark.parametrize("cluster", ["8xh100", "72xgb200", "8xmi300x"])
def test_every_kind_of_job_reads_back_equal(example_plan: Plan, name: str, cluster: str) -> None:
    job = example_plan.job.changed(model=Model.load(name), cluster=Cluster.load(cluster), seq=1024)
    again = Plan.from_mapping(yaml.safe_load(yaml.safe_dump(example_plan.model_copy(update={"job": job}).to_mapping())))
    assert again.job == job


def test_overridden_hardware_reads_back_equal(example_plan: Plan) -> None:
    cluster = Cluster.from_mapping(
        {
            "gpu": {"kind": "h100", "memory_gib": 94},
            "network_gb_s": 25,
            "efficiency": {"matmul": 0.9},
            "price_per_gpu_hour_usd": 2,
        }
    )
    again = Plan.from_mapping(
        example_plan.model_copy(update={"job": example_plan.job.changed(cluster=cluster)}).to_mapping()
    ).job.cluster
    assert (again.gpu.memory_gib, again.network_gb_s, again.price_per_gpu_hour_usd) == (94, 25, 2)
    assert again.efficiency == cluster.efficiency


def test_a_plan_may_name_its_model_and_cluster(mapping: dict[str, Any], example_plan: Plan) -> None:
    short = {**mapping, "job": {**mapping["job"], "model": "llama-3.2-1b", "cluster": "8xh100"}}
    assert Plan.from_mapping(short).job == example_plan.job


def test_memory_and_time_add_up_in_the_file(mapping: dict[str, Any]) -> None:
    written = mapping["estimate"]
    assert sum(written["time"][cause] for cause in CAUSES) == pytest.approx(written["step_time_s"], rel=1e-4)
    peak = written["memory"][written["peak_stage"]]["memory"]
    assert sum(peak[owner] for owner in OWNERS) / 2**30 == pytest.approx(written["peak_gib"], rel=1e-4)


def drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def put(value: Any, *path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("estimate"), "plan.estimate is missing: `ultrascale plan … -o plan.yaml` writes all of it"),
        (put(None, "layout"), "plan.layout is null but must be a mapping"),
        (put(1, "extra"), "plan.extra is not a field of plan: known: estimate, job, layout, reasons, rejected"),
        (put([], "reason"), "plan.reason is not a field of plan: did you mean 'reasons'?"),
        (put(1, "job", "sequence"), "plan.job.sequence is not a field of plan.job"),
        (put(4, "layout", "pp"), "plan.estimate.memory lists 2 stages but layout.pp is 4: try pp: 2, or plan anew"),
        (put("2", "layout", "tp"), "plan.layout.tp is '2' but must be a whole number"),
        (put(9, "estimate", "peak_stage"), "plan.estimate.peak_stage is 9 but memory lists 2 stages: try 1"),
        (put([], "estimate", "memory"), "plan.estimate.memory is a list but must be at least 1 long"),
        (put("1", "estimate", "step_time_s"), "plan.estimate.step_time_s is '1' but must be a number greater than 0"),
        (put(float("nan"), "estimate", "mfu"), "plan.estimate.mfu is nan but must be a finite number"),
        (
            put("x", "estimate", "memory", 0, "memory", "master"),
            "plan.estimate.memory.0.memory.master is 'x' but must be a number",
        ),
        (put("yes", "estimate", "fits"), "plan.estimate.fits is 'yes' but must be true or false"),
        (put("llama-3.2-1x", "job", "model"), "model 'llama-3.2-1x' is neither a preset nor a file"),
        (put(0, "job", "cluster", "gpu", "memory_gib"), "cluster.gpu.memory_gib is 0 but must be at least 0.001"),
        (put([1], "reasons"), "plan.reasons.0 is 1 but must be text"),
    ],
)
def test_an_edited_file_is_caught(mapping: dict[str, Any], change: Callable[[dict[str, Any]], None], says: str) -> None:
    edited = copy.deepcopy(mapping)
    change(edited)
    with pytest.raises(SpecError) as caught:
        Plan.from_mapping(edited)
    assert str(caught.value).startswith(says)
