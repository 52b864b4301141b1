"""Bytes that ranks really hold against the law the planner believes: states to 3 %, activations to 10 %, on a CPU in fp32."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from parallel.harness import in_ranks, job_of, training_of
from ultrascale.cost.estimate import estimate
from ultrascale.model import moe
from ultrascale.parallel.zero import FSDPGrads
from ultrascale.specs.blocks import MoE
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.estimate import Memory
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.train.engine import Engine
from ultrascale.train.memory import LiveBytes, account

MODEL = Model(name="small", layers=4, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=256)
EXPERTS = Model(
    name="experts", layers=4, hidden=64, heads=4, kv_heads=2, ffn=0, vocab=256, moe=MoE(experts=8, top_k=2, expert_ffn=96)
)
slow = pytest.mark.slow


@dataclass
class RankMemory:
    """The most bytes of each owner at any gradient of a step, those of gradients after its backward, and the peak."""

    top: dict[str, int]
    gradients: int
    peak: int
    states: int
    """of the peak: weights, gradients and moments"""
    loads: list[float]
    """of each layer with experts: rows that came to this rank's, over the mean of ranks"""

    @property
    def load(self) -> float:
        return sum(self.loads) / len(self.loads)


def _measured(engine: Engine) -> RankMemory:
    engine.step(0)
    engine.step(1)
    gc.collect()
    live, top = LiveBytes(), dict[str, int]()

    def on_gradient(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            live.track([parameter.grad], "gradients")
        top.update({owner: max(size, top.get(owner, 0)) for owner, size in live.by_owner.items()})

    live.track((weight.local for weight in engine.weights), "weights")
    live.track(engine.optimizer.state_tensors(), "optimizer")
    for chunk in engine.pipeline.chunks.values():
        gradients = chunk.gradients
        if isinstance(gradients, FSDPGrads):
            live.track(gradients.gathered(), "gathered")
            watched = gradients.unsharded()
        else:
            live.track(gradients.allocated(), "gradients")
            watched = list(gradients.module.parameters())
        for parameter in watched:
            parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
    with live:
        engine.backward(engine.read(2))
    peak = live.peak_by_owner
    states = sum(peak.get(owner, 0) for owner in ("weights", "optimizer", "gathered", "gradients"))
    return RankMemory(top, sum(weight.gradient.nbytes for weight in engine.weights), live.peak, states, _loads(engine))


def _loads(engine: Engine) -> list[float]:
    if engine._loads is None:
        return [1.0]
    ep, tokens = engine.mesh.ep, engine._loads.tokens
    here = tokens.chunk(ep.size, dim=1)[ep.rank]
    return (here.sum(1) * ep.size / tokens.sum(1)).tolist()


def _first_ones(wanted: torch.Tensor, _: MoE) -> torch.Tensor:
    """Experts in turns, but each fourth token gets the first two: rank 0 has 1.5 times the mean (ep 2), or twice (ep 4)."""
    rows, columns, experts = wanted.shape
    turns = torch.arange(columns)
    first = 2 * torch.where(turns % 4 == 3, 0, turns) % experts
    return torch.stack([first, first + 1], -1).expand(rows, columns, 2)


def _measured_alike(engine: Engine) -> RankMemory:
    """Every layer and micro-batch routes alike, so that the load is one number, as in the law."""
    moe.choose = _first_ones  # in this rank's own process
    return _measured(engine)


def _accounted(engine: Engine) -> tuple[float, int]:
    engine.step(0)
    live = LiveBytes()
    memory, _ = account(engine, lambda: engine.step(1), live)
    return memory.total, live.peak


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_owners_add_up_to_the_live_bytes_at_the_peak(zero: int) -> None:
    """With one micro-batch, shards of gradients come after it."""
    for total, peak in in_ranks(_accounted, *_job_and_layout(MODEL, {"dp": 2, "zero": zero}), training_of()):
        assert total == peak


def _job_and_layout(model: Model, fields: dict[str, Any]) -> tuple[Job, Layout]:
    layout = Layout(**{"mbs": 2, **fields})
    cluster = Cluster.load(f"{layout.gpus}xh100")
    engine = Framework.load("ultrascale-eager")
    return job_of(model, seq=128).changed(cluster=cluster, batch_tokens=layout.batch_tokens(128), framework=engine), layout


def compared(fields: dict[str, Any]) -> list[tuple[RankMemory, Memory]]:
    """Per pipeline stage, the measured memory of its first rank and the predicted one."""
    job, layout = _job_and_layout(MODEL, fields)
    ranks = in_ranks(_measured, job, layout, training_of())
    stages = estimate(job, layout).memory
    return [(ranks[stage.stage * layout.gpus // layout.pp], stage.memory) for stage in stages]


@pytest.mark.parametrize(
    "fields",
    [
        {"gas": 2},
        {"pp": 2, "gas": 4, "schedule": "zb-v", "virtual_stages": 2},
        pytest.param({"tp": 2}, marks=slow),
        pytest.param({"dp": 2, "gas": 2, "data_parallel": "hooks"}, marks=slow),
        pytest.param({"tp": 4}, marks=slow),
        pytest.param({"dp": 2, "data_parallel": "ddp"}, marks=slow),
    ],
    ids=str,
)
def test_states_without_zero(fields: dict[str, Any]) -> None:
    for measured, law in compared(fields):
        assert measured.top["weights"] == pytest.approx(law.parameters, rel=0.03)
        assert measured.top["gradients"] == measured.gradients == pytest.approx(law.gradients, rel=0.03)
        assert measured.top["optimizer"] == pytest.approx(law.optimizer, rel=0.03)


@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 2, "gas": 3, "zero": 1},
        pytest.param({"dp": 2, "gas": 3, "zero": 2}, marks=slow),
        {"dp": 2, "gas": 3, "zero": 3},
        pytest.param({"dp": 4, "gas": 3, "zero": 2}, marks=slow),
        pytest.param({"dp": 4, "gas": 3, "zero": 3}, marks=slow),
        pytest.param({"dp": 4, "gas": 3, "zero": 3, "zero_shards": 2}, marks=slow),
        pytest.param({"dp": 2, "gas": 3, "zero": 3, "keep_gathered": True}, marks=slow),
        pytest.param({"dp": 2, "gas": 4, "pp": 2, "zero": 2}, marks=slow),
    ],
    ids=str,
)
def test_states_with_zero(fields: dict[str, Any]) -> None:
    """FSDP2 holds its shard beside what it keeps gathered: the law calls that the master."""
    layout = Layout(**fields)
    for measured, law in compared(fields):
        assert measured.top["optimizer"] == pytest.approx(law.optimizer, rel=0.03)
        whole = law.optimizer / 2 * layout.shards  # AdamW's two moments are twice a rank's share
        assert measured.top["weights"] == pytest.approx(whole / layout.shards, rel=0.03)
        assert measured.gradients == pytest.approx(whole / layout.shards, rel=0.03)
        if layout.zero == 3 and not layout.keep_gathered:
            assert measured.top["weights"] == pytest.approx(law.parameters, rel=0.03)
            # Embedding and head, which stay gathered, and two layers at most.
            assert measured.top["gathered"] < 0.8 * whole
        else:
            assert measured.top["gathered"] == pytest.approx(law.parameters, rel=0.03)
            assert measured.top["weights"] == pytest.approx(law.master, rel=0.03)
        if layout.zero == 1:
            assert measured.top["gradients"] == pytest.approx(law.gradients, rel=0.03)  # whole from one micro-batch to the next
        else:
            assert measured.gradients == pytest.approx(law.gradients, rel=0.03)
            assert measured.top["gradients"] < 0.6 * whole


@pytest.mark.parametrize(
    "fields",
    [
        {"gas": 2},
        {"recompute": "selective"},
        {"recompute": "full"},
        {"tp": 2},
        pytest.param({"tp": 2, "sequence_parallel": False}, marks=slow),
        {"pp": 2, "gas": 4},
        pytest.param({"pp": 2, "gas": 4, "schedule": "afab"}, marks=slow),
        pytest.param({"pp": 2, "gas": 4, "schedule": "interleaved", "virtual_stages": 2}, marks=slow),
        {"pp": 2, "gas": 4, "schedule": "zero-bubble"},
        pytest.param({"pp": 2, "gas": 4, "schedule": "zb-v", "virtual_stages": 2}, marks=slow),
        pytest.param({"pp": 2, "gas": 4, "schedule": "dualpipe-v", "virtual_stages": 2}, marks=slow),
        pytest.param({"cp": 2}, marks=slow),
    ],
    ids=str,
)
def test_activations(fields: dict[str, Any]) -> None:
    for measured, law in compared(fields):
        assert measured.peak - measured.states == pytest.approx(law.activations + law.buffers, rel=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 2, "ep": 2},
        {"gas": 2, "recompute": "selective"},
        pytest.param({"gas": 2}, marks=slow),
        pytest.param({"gas": 2, "recompute": "full"}, marks=slow),
        pytest.param({"dp": 2, "ep": 2, "gas": 2}, marks=slow),
        pytest.param({"dp": 4, "ep": 4}, marks=slow),
        pytest.param({"dp": 2, "ep": 2, "gas": 3, "zero": 1}, marks=slow),
        {"dp": 2, "ep": 2, "gas": 3, "zero": 3},
        pytest.param({"dp": 4, "ep": 2, "gas": 3, "zero": 3}, marks=slow),
    ],
    ids=str,
)
def test_the_rank_with_the_busiest_experts(fields: dict[str, Any]) -> None:
    job, layout = _job_and_layout(EXPERTS, fields)
    measured = max(in_ranks(_measured_alike, job, layout, training_of()), key=lambda rank: rank.load)
    assert measured.loads == pytest.approx(4 * [{1: 1.0, 2: 1.5, 4: 2.0}[layout.ep]])
    law = _under(job, layout, measured.load)
    assert measured.top["weights"] == pytest.approx(law.master or law.parameters, rel=0.03)
    assert measured.top["optimizer"] == pytest.approx(law.optimizer, rel=0.03)
    assert measured.peak == pytest.approx(_tensors(law), rel=0.02)
    if not layout.zero:
        assert measured.peak - measured.states == pytest.approx(law.activations + law.buffers, rel=0.03)


@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=slow)])
def test_peak_with_an_unbalanced_router(ep: int) -> None:
    """Layers differ: what waits has the mean of their loads, the layer at work its own. The peak lies between the two laws."""
    job, layout = _job_and_layout(EXPERTS, {"dp": ep, "ep": ep})
    measured = max(in_ranks(_measured, job, layout, training_of()), key=lambda rank: rank.load)
    assert max(measured.loads) > 1.2
    assert (
        0.97 * _tensors(_under(job, layout, measured.load))
        < measured.peak
        < 1.03 * _tensors(_under(job, layout, max(measured.loads)))
    )


def _under(job: Job, layout: Layout, load: float) -> Memory:
    """The law of the first stage for a rank whose experts have so much more to do than the mean."""
    efficiency = job.cluster.efficiency.model_copy(update={"expert_imbalance": load})
    return estimate(job.changed(cluster=job.cluster.model_copy(update={"efficiency": efficiency})), layout).memory[0].memory


def _tensors(law: Memory) -> float:
    return law.total - (law.runtime or 0.0)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero-bubble", marks=slow)])
def test_more_micro_batches_take_no_more_memory(schedule: str) -> None:
    """But their tokens, read ahead: what was sent to a neighbour goes when the neighbour has used it."""
    few, many = (compared({"pp": 2, "gas": gas, "schedule": schedule}) for gas in (4, 8))
    for (less, _), (more, _) in zip(few, many, strict=True):
        tokens = 4 * 2 * 2 * 128 * 8  # micro-batches, inputs and targets, rows, columns, int64
        assert more.peak - less.peak <= tokens + 1024
