"""verify accepts correct layouts, detects planted faults, and compares every parameter."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from ultrascale.cost.estimate import estimate
from ultrascale.measure import verify as measure
from ultrascale.measure.verify import verify
from ultrascale.measure.verify_layouts import MAX_PROCESSES, compositions, pairwise_sample, reduced, small_job
from ultrascale.measure.verify_recording import Bounds
from ultrascale.parallel import mesh as meshes
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

torch.set_num_threads(1)
TINY = Model.load("tiny")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_spread_of_compositions_computes_what_one_process_computes(world):
    """Of two processes four layers will do: none has more than two virtual stages."""
    job = small_job(TINY.model_copy(update={"layers": 4}) if world == 2 else TINY, world)
    for difference in verify(job, pairwise_sample(compositions(job, world), {2: 6, 4: 8, 8: 6}[world])):
        assert difference.ok, difference


@pytest.mark.slow
@pytest.mark.parametrize(("world", "most"), [(2, 200), (3, 40), (4, 60), (6, 20), (8, 40)])
def test_many_compositions(world, most):
    """`ultrascale verify --world 8 --all` tries the rest, in an hour."""
    job = small_job(TINY, world, sequences=16 if 16 % world == 0 else 4 * world)
    differences = list(verify(job, pairwise_sample(compositions(job, world), most)))
    assert not [one for one in differences if not one.ok]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        Model(name="tied", layers=8, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=256, tied_embeddings=True, qk_norm=True),
        Model(
            name="gpt",
            layers=8,
            hidden=32,
            heads=4,
            ffn=64,
            vocab=256,
            activation="gelu",
            norm="layernorm",
            positions="learned",
            max_positions=64,
            tied_embeddings=True,
            qkv_bias=True,
            attention_output_bias=True,
            mlp_bias=True,
        ),
    ],
    ids=lambda model: model.name,
)
def test_other_families(model):
    layouts = [
        Layout(tp=2, pp=2, schedule="zb-v", virtual_stages=2, gas=4, mbs=2),
        Layout(dp=2, tp=2, zero=3, gas=2, mbs=2, sequence_parallel=False),
        Layout(cp=2, pp=2, schedule="1f1b", gas=2, mbs=4, zero=2, recompute="full"),
    ]
    for difference in verify(small_job(model, 4, seq=32, sequences=8), layouts):
        assert difference.ok, difference


@pytest.mark.slow
def test_a_missing_cp_reduction_is_detected(monkeypatch):
    """Gradients reduced over dp alone, as if ranks with other tokens of the same sequences were none of our business."""
    build = meshes.Mesh.build.__func__

    def without_cp(cls, layout, kv_heads, rank=0, device="cpu"):
        mesh = build(cls, layout, kv_heads, rank, device)
        object.__setattr__(mesh, "data", mesh.kv)  # an axis of this rank alone
        return mesh

    monkeypatch.setattr(meshes.Mesh, "build", classmethod(without_cp))
    (difference,) = verify(small_job(TINY, 2), [Layout(cp=2, mbs=8, gas=2)])
    assert not difference.ok
    assert difference.excess > 100


@pytest.mark.slow
def test_an_uncompared_parameter_is_detected(monkeypatch):
    monkeypatch.setattr(measure, "_first_replica", lambda weight: weight.shard.name != "blocks.0.mlp.down.weight")
    (difference,) = verify(small_job(TINY, 2), [Layout(tp=2, mbs=8, gas=2)])
    assert not difference.ok
    assert "were compared" in difference.problem


@pytest.mark.slow
def test_a_rank_that_fails_is_a_difference_and_not_the_end(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(measure, "compare_items", broken)
    (difference,) = verify(small_job(TINY, 2), [Layout(dp=2, mbs=4, gas=2)])
    assert not difference.ok
    assert "out of luck" in difference.problem


def large(layout: Layout) -> Job:
    model, batch = Model.load("llama-3-70b"), layout.batch_tokens(8192)
    return Job(model=model, cluster=Cluster.load(f"{layout.gpus}xh100"), seq=8192, batch_tokens=batch)


def test_a_large_plan_is_shrunk_with_its_layout():
    layout = Layout(dp=8, tp=4, pp=2, schedule="interleaved", virtual_stages=2, zero=1, gas=64)
    estimate(large(layout), layout)  # legal as planned
    job, small, notes = reduced(large(layout), layout)
    assert small.gpus <= MAX_PROCESSES
    assert (small.tp, small.pp, small.schedule, small.zero) == (4, 2, "interleaved", 1)
    assert (job.model.layers, job.model.heads, job.model.kv_heads) == (80, 64, 8)
    assert job.precision == "fp32"
    assert len(notes) == 5


def test_a_plan_with_too_many_ranks_per_replica_is_refused():
    layout = Layout(tp=8, pp=8, gas=64)
    with pytest.raises(SpecError, match="at most 16 processes"):
        reduced(large(layout), layout)


def test_a_load_near_the_mean_leaves_the_sign_of_its_bias_open() -> None:
    """Three steps; the first expert has the mean's tokens, the second never does. One token is 1 % of the largest load."""
    loads = torch.tensor([[100.0, 60.0, 140.0, 100.0]], dtype=torch.float64)
    reference = {f"{step}/expert_tokens": loads for step in (1, 2, 3)}
    key = "3/weight/blocks.2.mlp.router.bias"
    reference[key] = torch.tensor([0.0, 3e-3, -3e-3, 0.0])
    flipped = torch.tensor([2e-3, 3e-3, -3e-3, 0.0])
    coarse, fine = (Bounds.measured(reference, [reference], eps, bias_rate=1e-3) for eps in (7.8e-3, 1.2e-7))
    assert coarse.excess(key, flipped, reference[key])[1] <= 1
    assert coarse.excess(key, reference[key] + 0.02, reference[key])[1] > 1
    assert fine.excess(key, flipped, reference[key])[1] > 1
