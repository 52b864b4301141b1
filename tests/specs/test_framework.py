"""Engines: presets load, each field changes time and memory as documented, and a plan keeps its engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.cost.estimate import estimate
from ultrascale.plan.search import plan
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.estimate import Estimate
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan

Run = Callable[..., tuple[int, str, str]]

# name of a case: model, cluster, seq, layout
CASES: dict[str, tuple[str, str, int, Layout]] = {
    "one node": ("llama-3-8b", "8xh100", 4096, Layout(dp=8, zero=1, gas=4)),
    "small": ("llama-3.2-1b", "8xh100", 1024, Layout(dp=8, zero=1, gas=4)),
    "across": ("llama-3-8b", "32xh100", 2048, Layout(dp=32, zero=1)),
    "sharded": ("llama-3-8b", "32xh100", 2048, Layout(dp=32, zero=3)),
    "pipeline": ("llama-3-8b", "8xh100", 4096, Layout(dp=2, pp=4, gas=16)),
    "tensor": ("llama-3-8b", "8xh100", 4096, Layout(tp=8, gas=4)),
    "selective": ("llama-3-8b", "8xh100", 8192, Layout(dp=8, zero=3, mbs=2, gas=2, recompute="selective")),
    "experts": ("qwen3-30b-a3b", "32xh100", 4096, Layout(dp=32, ep=32, zero=1, gas=4)),
    "shared experts": ("deepseek-v2-lite", "16xh100", 4096, Layout(dp=16, ep=16, zero=1, gas=4)),
    "few tokens an expert": ("qwen3-30b-a3b", "32xh100", 512, Layout(dp=32, ep=8, zero=1, gas=4)),
}


def predicted(case: str, **fields: Any) -> Estimate:
    model, cluster, seq, layout = CASES[case]
    engine = Framework(**fields)
    job = Job(
        model=Model.load(model),
        cluster=Cluster.load(cluster),
        seq=seq,
        batch_tokens=layout.batch_tokens(seq),
        framework=engine,
        attention="plain" if engine.attention.startswith("plain") else "flash",
    )
    return estimate(job, layout)


# --------------------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", sorted(Framework.presets()))
def test_a_preset_loads_by_name_with_a_description(name: str) -> None:
    one = Framework.load(name)
    assert one.name == name
    assert len(one.source.split()) >= 3


def test_promised_engines_exist() -> None:
    promised = {"ultrascale", "torchtitan", "megatron-core", "megatron-2021", "nanotron", "deepspeed", "fsdp1-eager"}
    assert promised <= set(Framework.presets())


def test_without_settings_it_is_the_idealised_engine() -> None:
    assert Framework(source=Framework.load("playbook").source) == Framework.load("playbook")


def test_a_job_runs_in_our_engine_unless_another_is_named() -> None:
    fields = {"model": Model.load("tiny"), "seq": 128, "batch_tokens": 1024}
    assert Job(cluster=Cluster.load("8xh100"), **fields).framework == Framework.load("ultrascale")
    assert Job(cluster=Cluster.load("2xcpu"), **fields).framework == Framework.load("ultrascale-eager")
    assert Job(cluster=Cluster.load("8xh100"), framework=Framework.load("nanotron"), **fields).framework.name == "nanotron"


def test_names_are_read_without_case_or_spaces() -> None:
    assert Framework.load(" Megatron-Core ") == Framework.load("megatron-core")


@pytest.mark.parametrize(("name", "near"), [("megatron-cor", "megatron-core"), ("torchtitn", "torchtitan"), ("foo", "known: ")])
def test_an_unknown_name_suggests_the_nearest(name: str, near: str) -> None:
    with pytest.raises(SpecError, match=f"framework '{name}' is not known: .*{near}"):
        Framework.load(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"elementwise": 0},
        {"elementwise": -1},
        {"launch": 1000},
        {"overlap": 1.5},
        {"overlap": -0.1},
        {"loss": "fast"},
        {"attention": "flash-9"},
        {"states": "fp64"},
        {"colour": "blue"},
    ],
)
def test_a_value_out_of_range_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Framework(**fields)


@pytest.mark.parametrize("name", sorted(Framework.presets()))
@pytest.mark.parametrize("case", ["one node", "pipeline", "experts"])
def test_every_engine_runs_every_kind_of_job_no_faster_than_a_third_of_ours(name: str, case: str) -> None:
    """An engine changes a step by its fusions and overlaps, not by an order of magnitude."""
    ours, theirs = predicted(case), predicted(case, **Framework.load(name).model_dump())
    assert 1 / 3 < theirs.step_time_s / ours.step_time_s < 6


# ------------------------------------------------------------------------------------------------- what each field does


@pytest.mark.parametrize(
    ("case", "fast", "slow"),
    [
        ("one node", {"elementwise": 1.0}, {"elementwise": 2.0}),
        ("small", {"launch": 1.0}, {"launch": 6.0}),
        ("small", {"launch": 6.0}, {"launch": 24.0}),
        ("one node", {"optimizer_passes": 1.0}, {"optimizer_passes": 3.0}),
        ("one node", {"accumulation": "fused"}, {"accumulation": "separate"}),
        ("one node", {"loss": "fused"}, {"loss": "fp32"}),
        ("one node", {"attention": "flash"}, {"attention": "flash-2"}),
        ("one node", {"attention": "flash-2"}, {"attention": "flash-1"}),
        ("one node", {"attention": "flash-1"}, {"attention": "plain-fused"}),
        ("one node", {"attention": "plain-fused"}, {"attention": "plain"}),
        ("across", {"overlap": 1.0}, {"overlap": 0.0}),
        ("sharded", {"overlap": 1.0}, {"overlap": 0.0}),
        ("across", {"accumulation": "separate"}, {"accumulation": "after-backward"}),
        ("across", {"rails": True}, {"rails": False}),
        ("sharded", {"rails": True}, {"rails": False}),
        ("pipeline", {"stage_split": "balanced"}, {"stage_split": "layers"}),
        ("tensor", {"transformer_engine": True, "overlap": 0.5}, {"transformer_engine": True, "overlap": 0.0}),
        ("tensor", {"transformer_engine": True, "overlap": 1.0}, {"transformer_engine": True, "overlap": 0.5}),
        ("tensor", {"transformer_engine": True}, {"transformer_engine": False}),
        ("experts", {"expert_overlap": "microbatches"}, {"expert_overlap": "weight-gradients"}),
        ("experts", {"expert_overlap": "weight-gradients"}, {"expert_overlap": "none"}),
        ("shared experts", {"shared_expert_overlap": True}, {"shared_expert_overlap": False}),
        ("few tokens an expert", {"routing": "grouped"}, {"routing": "capacity"}),
        ("few tokens an expert", {"routing": "capacity"}, {"routing": "graphed"}),
        ("few tokens an expert", {"routing": "graphed"}, {"routing": "dropless"}),
        ("selective", {"selective": "cheap"}, {"selective": "half"}),
    ],
)
def test_faster_settings_shorten_the_step(case: str, fast: dict[str, Any], slow: dict[str, Any]) -> None:
    assert predicted(case, **fast).step_time_s < predicted(case, **slow).step_time_s


@pytest.mark.parametrize(
    ("case", "less", "more"),
    [
        ("one node", {"loss": "chunked"}, {"loss": "fused"}),
        ("one node", {"loss": "fused"}, {"loss": "in-place"}),
        ("one node", {"loss": "in-place"}, {"loss": "fp32"}),
        ("one node", {"states": "pure"}, {"states": "master"}),
        ("sharded", {"states": "pure"}, {"states": "fp32"}),
        ("sharded", {"states": "fp32"}, {"states": "master"}),
        ("one node", {"eager_activation": False}, {"eager_activation": True}),
        ("one node", {"accumulation": "separate"}, {"accumulation": "after-backward"}),
        ("one node", {"attention": "flash"}, {"attention": "plain"}),
        ("selective", {"selective": "half"}, {"selective": "cheap"}),
    ],
)
def test_smaller_settings_need_less_memory(case: str, less: dict[str, Any], more: dict[str, Any]) -> None:
    assert predicted(case, **less).peak_gib < predicted(case, **more).peak_gib


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("one node", {"rails": False}),  # nothing crosses nodes
        ("one node", {"shared_expert_overlap": False}),
        ("one node", {"routing": "dropless"}),
        ("one node", {"expert_overlap": "microbatches"}),
        ("one node", {"transformer_engine": True}),  # bf16, no experts, tp = 1
        ("one node", {"stage_split": "layers"}),  # one stage
        ("one node", {"stage_split": "layers-and-head"}),
        ("one node", {"stage_split": "nanotron"}),
        ("one node", {"selective": "half"}),  # nothing is recomputed
        ("tensor", {"overlap": 0.0}),  # one replica
    ],
)
def test_a_field_does_not_change_jobs_without_its_technique(case: str, fields: dict[str, Any]) -> None:
    before, after = predicted(case), predicted(case, **fields)
    assert after.step_time_s == before.step_time_s
    assert after.peak_gib == before.peak_gib


def test_unbalanced_stages_have_equal_layers_and_balanced_ones_spare_the_head() -> None:
    even = [stage.layers for stage in predicted("pipeline", stage_split="layers").memory]
    spared = [stage.layers for stage in predicted("pipeline", stage_split="balanced").memory]
    layers = [stage.layers for stage in predicted("pipeline", stage_split="layers-and-head").memory]
    assert even == [8, 8, 8, 8]
    assert sum(spared) == 32
    assert spared[-1] < 8
    assert sum(layers) == 32
    assert layers[-1] == 8  # 33 over four: the first three have eight or nine, the last eight with the head as its ninth


def test_chunked_tensor_overlap_exposes_one_chunk() -> None:
    """tp = 8: an eighth is exposed, the rest slows matmuls; without sequence parallelism nothing is chunked."""
    whole, pieced = (predicted("tensor", transformer_engine=engine).time.tensor_s for engine in (False, True))
    assert whole / 8 < pieced < whole


def test_fp8_inputs_are_smaller_where_matmuls_are_in_fp8() -> None:
    model, cluster, seq, layout = CASES["one node"]
    peaks = []
    for kept in (False, True):
        job = Job(
            model=Model.load(model),
            cluster=Cluster.load(cluster),
            seq=seq,
            batch_tokens=layout.batch_tokens(seq),
            precision="fp8",
            framework=Framework(transformer_engine=kept),
        )
        peaks.append(estimate(job, layout).memory[0].memory.activations)
    assert peaks[1] < peaks[0]


def test_micro_batch_overlap_hides_70_percent_of_expert_all_to_all() -> None:
    whole, hidden = (predicted("experts", expert_overlap=overlap).time.expert_s for overlap in ("none", "microbatches"))
    assert hidden == pytest.approx(0.3 * whole)


def test_states_by_hand() -> None:
    """ZeRO-3 over 32: fp32 shards have no bf16 copy of their own; bf16 throughout has no master."""
    master, fp32, pure = (predicted("sharded", states=states).memory[0].memory for states in ("master", "fp32", "pure"))
    each = 8_030_261_248 / 32
    assert (master.parameters, master.master) == pytest.approx((2 * each, 4 * each))
    assert (fp32.parameters, fp32.master) == pytest.approx((0.0, 4 * each))
    assert (pure.parameters, pure.master, pure.gradients) == pytest.approx((2 * each, 0.0, 2 * each))


SEQS, TOP = st.sampled_from([256, 1024, 4096]), st.sampled_from([8, 16, 32])


@settings(max_examples=25, deadline=None)
@given(seq=SEQS, ep=TOP, gas=st.sampled_from([1, 4]), precision=st.sampled_from(["bf16", "fp8"]))
def test_no_expert_job_is_slower_node_wise_or_faster_ungrouped(seq: int, ep: int, gas: int, precision: str) -> None:
    layout = Layout(dp=32, ep=ep, zero=1, gas=gas)
    job = Job(
        model=Model.load("qwen3-30b-a3b"),
        cluster=Cluster.load("32xh100"),
        seq=seq,
        batch_tokens=layout.batch_tokens(seq),
        precision=precision,  # type: ignore[arg-type]
        framework=Framework.load("playbook"),
    )

    def step_s(dispatcher: str = "alltoall", **fields: Any) -> float:
        return estimate(job.changed(framework=Framework(**fields)), layout.changed(dispatcher=dispatcher)).step_time_s

    assert step_s("deepep") == step_s("hybridep") <= step_s("alltoall") * (1 + 1e-12)
    assert step_s(routing="dropless") >= step_s(routing="grouped") * (1 - 1e-12)


# ------------------------------------------------------------------------------------------------- plans and the command


def planned(engine: Framework) -> Plan:
    job = Job(
        model=Model.load("llama-3.2-1b"),
        cluster=Cluster.load("8xh100"),
        seq=4096,
        batch_tokens=2**18,
        framework=engine,
    )
    return plan(job, top=1).plans[0]


def test_a_plan_names_its_engine(tmp_path: Path) -> None:
    saved = planned(Framework.load("megatron-core"))
    again = Plan.load(saved.save(tmp_path / "plan.yaml"))
    assert saved.to_mapping()["job"]["framework"] == "megatron-core"
    assert again.job == saved.job
    assert estimate(again.job, again.layout) == estimate(saved.job, saved.layout)


@pytest.mark.parametrize("changes", [{"elementwise": 2.5}, {"elementwise": 1.0}, {"loss": "fused", "name": "my fork"}])
def test_a_plan_keeps_a_changed_engine_whole(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Also where a change is back to the default of the class, which the preset's name alone would undo."""
    engine = Framework.load("megatron-core").model_copy(update=changes)
    saved = planned(engine)
    again = Plan.load(saved.save(tmp_path / "plan.yaml"))
    assert again.job.framework == engine
    assert again.job == saved.job


def test_an_unknown_engine_in_a_plan_suggests_the_nearest(tmp_path: Path) -> None:
    mapping = planned(Framework.load("nanotron")).to_mapping()
    mapping["job"]["framework"] = "nanotorn"
    with pytest.raises(SpecError, match="did you mean 'nanotron'"):
        Plan.from_mapping(mapping)


def test_an_unknown_engine_field_in_a_plan_suggests_the_nearest() -> None:
    mapping = planned(Framework.load("nanotron")).to_mapping()
    mapping["job"]["framework"] = {"name": "mine", "elementwize": 2.0}
    with pytest.raises(SpecError, match=r"elementwize.*did you mean 'elementwise'"):
        Plan.from_mapping(mapping)


SMALL = ["plan", "llama-3.2-1b", "--cluster", "8xh100", "--batch-tokens", "256k", "--seq", "4096", "--top", "1"]


@pytest.mark.quick_cases(every=4)
@pytest.mark.parametrize("name", ["megatron-core", "megatron-2021", "torchtitan", "nanotron"])
def test_a_plan_for_another_engine_is_not_faster_than_ours(run: Run, tmp_path: Path, name: str) -> None:
    code, out, _ = run(*SMALL, "--framework", name, "--json", "-o", tmp_path / "plan.yaml")
    assert code == 0
    theirs = json.loads(out)["plans"][0]["estimate"]["step_time_s"]
    code, out, _ = run(*SMALL, "--json")
    assert code == 0
    assert theirs >= json.loads(out)["plans"][0]["estimate"]["step_time_s"]
    assert Plan.load(tmp_path / "plan.yaml").job.framework == Framework.load(name)
    code, out, _ = run("explain", tmp_path / "plan.yaml")
    assert code == 0


@pytest.mark.parametrize(("name", "says"), [("foo", "megatron-core"), ("megatron-cor", "did you mean 'megatron-core'")])
def test_a_plan_for_an_unknown_engine_is_exit_2_with_the_nearest(run: Run, name: str, says: str) -> None:
    code, out, err = run(*SMALL, "--framework", name)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: framework '{name}' is not known: ")
    assert says in err
