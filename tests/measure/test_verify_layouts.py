"""The layouts that verify tries: all legal, all different, every value present."""

from __future__ import annotations

import pytest

from builders import make_job
from ultrascale.measure.verify_layouts import compositions, pairwise_sample, reduced
from ultrascale.schedules import REGISTRY
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Training
from ultrascale.train.supported import layout_problem


def tiny_job(world: int, model: str = "tiny") -> Job:
    return make_job(model, f"{world}xh100", 64, 16, precision="fp32")


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_every_layout_is_legal_and_unique(world):
    job = tiny_job(world)
    layouts = compositions(job, world)
    assert len(set(layouts)) == len(layouts) > 0
    assert all(layout.gpus == world for layout in layouts)
    assert all(layout_problem(job, layout, Training()) is None for layout in layouts)


def test_eight_processes_have_over_150_layouts_with_every_value():
    layouts = compositions(tiny_job(8), 8)
    assert len(layouts) >= 150
    for field, values in {
        "schedule": set(REGISTRY),
        "context_parallel": {"allgather", "ring", "zigzag", "ulysses"},
        "data_parallel": {"naive", "hooks", "bucketed", "ddp"},
        "recompute": {"none", "selective", "full"},
        "zero": {0, 1, 2, 3},
        "sequence_parallel": {True, False},
        "keep_gathered": {True, False},
    }.items():
        assert {getattr(layout, field) for layout in layouts} == values, field
    assert any(layout.zero_shards for layout in layouts)
    assert any(min(layout.dp, layout.tp, layout.pp) > 1 for layout in layouts)
    assert any(min(layout.dp, layout.cp, layout.pp) > 1 and layout.zero == 3 for layout in layouts)


@pytest.mark.parametrize("world", [4, 8])
def test_experts_add_at_least_40_layouts(world):
    job = tiny_job(world, "tiny-moe")
    layouts = compositions(job, world)
    spread_out = [layout for layout in layouts if layout.ep > 1]
    assert len(spread_out) >= 40
    assert len(layouts) - len(spread_out) == len(compositions(tiny_job(world), world))
    assert {layout.zero for layout in spread_out} == {0, 1, 2, 3}
    for axis in ("dp", "tp", "pp", "cp"):
        assert any(getattr(layout, axis) > 1 for layout in spread_out), axis
    assert all(layout_problem(job, layout, Training()) is None for layout in spread_out[::4])
    assert compositions(job, world, ["ep"]) == spread_out


def test_only_keeps_those_that_use_each_technique():
    layouts = compositions(tiny_job(8), 8, ["pp", "cp", "zero"])
    assert layouts
    assert all(layout.pp > 1 and layout.cp > 1 and layout.zero for layout in layouts)
    with pytest.raises(SpecError, match="did you mean"):
        compositions(tiny_job(8), 8, ["ppp"])


def test_a_spread_of_24_has_every_schedule_and_variant():
    few = pairwise_sample(compositions(tiny_job(8), 8), 24)
    assert len(few) == 24
    assert {layout.schedule for layout in few if layout.pp > 1} == set(REGISTRY)
    assert {layout.context_parallel for layout in few if layout.cp > 1} == {"allgather", "ring", "zigzag", "ulysses"}
    assert {layout.zero for layout in few} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral-8x7b", Layout(dp=64, ep=8, tp=2, gas=4, zero=1)),
        ("qwen3-235b-a22b", Layout(dp=8, ep=8, pp=2, gas=8, zero=3)),
    ],
)
def test_a_plan_with_experts_is_shrunk(name, layout):
    plan = Job(
        model=Model.load(name), cluster=Cluster.load(f"{layout.gpus}xh100"), seq=4096, batch_tokens=layout.batch_tokens(4096)
    )
    job, small, notes = reduced(plan, layout)
    assert job.model.moe.top_k == Model.load(name).moe.top_k
    assert small.ep == 8
    assert layout_problem(job, small, Training()) is None
    assert any("experts of" in note for note in notes)
