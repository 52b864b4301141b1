"""What each engine runs: values and rules, their sentences, and search that proposes nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from builders import make_job
from ultrascale.cost import engines
from ultrascale.cost.estimate import estimate
from ultrascale.cost.ranges import memory_limit_gib
from ultrascale.plan import advice
from ultrascale.plan.candidates import LayoutConstraints, cores
from ultrascale.plan.search import plan
from ultrascale.plan.what_if import what_if
from ultrascale.schedules import REGISTRY
from ultrascale.specs.engine import EngineLimits
from ultrascale.specs.errors import SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan

ENGINES = ("ultrascale", "torchtitan", "megatron-core", "nanotron", "deepspeed", "accelerate")


@pytest.mark.parametrize("name", ENGINES)
def test_search_tries_only_what_the_engine_runs(name: str) -> None:
    job = make_job("llama-3-8b", "16xh100", 8192, 64, framework=name)
    limits = EngineLimits.load(job.framework.engine).layout
    tried = 0
    for group in cores(job, LayoutConstraints()):
        assert group.columns.pp[0] == 1 or all(schedule in limits["schedule"] for schedule, _ in group.variants)
        rows = range(0, len(group.columns), max(1, len(group.columns) // 40))
        for layout in map(group.columns.layout, rows):
            assert engines.layout_problem(job, layout) is None
            tried += 1
    assert tried


RULES = [
    ("torchtitan", Layout(dp=8, tp=2, zero=1), "layout.zero is 1 but torchtitan runs 3, 0: try 3"),
    ("torchtitan", Layout(dp=8, tp=2), "torchtitan cuts models only beside FSDP: try zero=3"),
    ("torchtitan", Layout(dp=4, pp=4, zero=3, schedule="zero-bubble"), "torchtitan cannot cut 32 layers so: try 2"),
    ("torchtitan", Layout(dp=4, pp=4, zero=3, schedule="v-half", virtual_stages=2), "layout.schedule is v-half"),
    ("megatron-core", Layout(dp=4, pp=4, schedule="zero-bubble"), "layout.schedule is zero-bubble but Megatron-LM runs"),
    ("nanotron", Layout(dp=16, recompute="selective"), "layout.recompute is selective but nanotron runs none, full"),
    ("deepspeed", Layout(dp=8, pp=2), "layout.pp is 2 but DeepSpeed runs 1"),
    ("accelerate", Layout(dp=8, tp=2, sequence_parallel=False), "Accelerate cuts tensors and sequences only beside FSDP"),
    ("ultrascale", Layout(dp=8, tp=2, etp=1), "layout.etp is 1 but ultrascale train has no such setting: try null"),
    ("ultrascale", Layout(tp=16), None),
    ("playbook", Layout(tp=16), None),
]


@pytest.mark.parametrize(("name", "layout", "says"), RULES, ids=lambda value: str(value)[:40])
def test_a_layout_that_the_engine_does_not_run(name: str, layout: Layout, says: str | None) -> None:
    sentence = engines.layout_problem(make_job("llama-3-8b", "16xh100", framework=name), layout)
    assert sentence is None if says is None else says in (sentence or "")


def test_torchtitan_keeps_experts_whole_with_ep() -> None:
    job = make_job("qwen3-30b-a3b", "16xh100", framework="torchtitan")
    layout = Layout(dp=8, tp=2, ep=8, zero=3)
    assert (engines.layout_problem(job, layout) or "").endswith("does not cut experts by tp = 2 with ep = 8: try etp=1")
    assert engines.layout_problem(job, layout.changed(etp=1)) is None
    assert engines.layout_problem(job, layout.changed(ep=1)) is None
    found = next(cores(job, LayoutConstraints({"tp": 2, "pp": 1, "cp": 1}))).columns
    assert set(found.etp[(found.ep > 1) & (8 % found.ep == 0)]) == {1}


def test_a_field_without_effect_is_no_problem() -> None:
    """Without tp nothing is cut along the sequence, and without cp no keys travel."""
    job = make_job("llama-3-8b", "16xh100", framework="deepspeed")
    assert engines.layout_problem(job, Layout(dp=16, zero=2)) is None


def test_a_fixed_value_that_the_engine_lacks_is_an_error() -> None:
    job = make_job("llama-3-8b", "16xh100", framework="torchtitan")
    with pytest.raises(SpecError, match=r"layout\.zero is 1 but torchtitan runs 3, 0: try 3, or another --framework"):
        plan(job, fix=["zero=1", "tp=2", "pp=1"])


def test_a_job_that_our_engine_cannot_run_is_planned_for_the_idealised_one() -> None:
    job = make_job("deepseek-v2-lite", "64xh100", 4096, 256, framework="ultrascale")
    assert advice.runnable_job(job) == (job, [])
    changed, (note,) = advice.runnable_job(job.changed(model=job.model.model_copy(update={"mla": None, "rotary_dim": 63})))
    assert changed.framework.name == "playbook"
    assert "model.rotary_dim is 63" in note
    assert advice.runnable_job(make_job(framework="ultrascale"))[1] == []


def test_a_job_that_another_engine_cannot_run_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"job\.precision is fp8 but nanotron runs bf16, fp16, fp32"):
        plan(make_job("llama-3-8b", "16xh100", framework="nanotron", precision="fp8"))


def test_blocks_that_are_not_compiled_move_the_bytes_of_plain_operators() -> None:
    """Four times as many in a layer, with biases that no fused block has; the head's are the same. `playbook` compiles all."""
    layout = Layout(tp=4)
    ours, ideal = (estimate(make_job("qwen2.5-7b", "4xh100", 8192, 1, name), layout) for name in ("ultrascale", "playbook"))
    assert Framework.load("ultrascale-eager").elementwise == 4.0
    assert 2.5 * ideal.time.memory_bound_s < ours.time.memory_bound_s < 4 * ideal.time.memory_bound_s
    for fused, sequences in ((Layout(dp=8), 8), (Layout(tp=8), 1), (Layout(tp=8, sequence_parallel=False), 1)):
        jobs = [make_job("llama-3-8b", "8xh100", 8192, sequences, name) for name in ("ultrascale", "playbook")]
        ours, ideal = (estimate(job, fused) for job in jobs)
        assert ours.time.memory_bound_s < 1.5 * ideal.time.memory_bound_s


def test_torchtitan_has_the_schedules_of_torch() -> None:
    assert EngineLimits.load("torchtitan").layout["schedule"] == tuple(
        name for name, spec in REGISTRY.items() if spec.torch_name is not None
    )


def test_the_memory_limit_is_where_the_probability_to_fit_ends() -> None:
    job, layout = make_job("llama-3-8b", "8xh100", 8192, 64, "ultrascale"), Layout(dp=8, zero=3, gas=8)
    limit = memory_limit_gib(job, 0.9, 0.0)
    assert limit < job.cluster.gpu.memory_gib
    found = estimate(job, layout)
    probability = {}
    for peak in (0.999 * limit, 1.001 * limit):
        changed = job.cluster.gpu.model_copy(update={"memory_gib": job.cluster.gpu.memory_gib * found.peak_gib / peak})
        moved = job.changed(cluster=job.cluster.model_copy(update={"gpu": changed}))
        span = estimate(moved, layout).range
        assert span is not None
        probability[peak < limit] = span.fit_probability
    assert probability[True] >= 0.9 > probability[False]
    assert memory_limit_gib(job, 0.0, 4.0) == pytest.approx(job.cluster.gpu.memory_gib - 4)
    for bad in ((1.5, 0.0), (0.9, 100.0), (0.999, 0.0)):
        with pytest.raises(SpecError, match="--min-"):
            memory_limit_gib(job, *bad)


def test_plans_keep_the_margin() -> None:
    job = make_job("llama-3-8b", "8xh100", 8192, 64, "ultrascale")
    for found in plan(job, top=5, explain=False).plans:
        assert found.estimate.range is not None
        assert found.estimate.range.fit_probability >= 0.9
    free = plan(job, top=3, explain=False, min_free_gib=20.0).plans
    assert np.max([one.estimate.peak_gib for one in free]) <= job.cluster.gpu.memory_gib - 20


def test_reasons_compare_only_with_layouts_that_the_engine_runs() -> None:
    (best,) = plan(make_job("llama-3-8b", "16xh100", 8192, 128, "torchtitan"), top=1).plans
    assert best.rejected
    for one in best.rejected:
        assert engines.layout_problem(best.job, one.layout) is None, one


def test_what_if_refuses_what_the_engine_does_not_run() -> None:
    job, layout = make_job("llama-3-8b", "16xh100", 8192, 128, "torchtitan"), Layout(dp=16, zero=3, gas=8)
    answer = what_if(Plan(job=job, layout=layout, estimate=estimate(job, layout)), "zero=1")
    assert answer.estimate is None
    assert answer.problem is not None
    assert "torchtitan runs 3, 0" in answer.problem


def test_a_schedule_in_an_engine_without_pipelines_has_a_sentence() -> None:
    assert engines.value_problem("deepspeed", "schedule", "interleaved") == (
        "layout.schedule is interleaved but DeepSpeed runs no pipeline: try pp=1, and no schedule"
    )
