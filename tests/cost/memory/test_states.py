"""What ZeRO-3 gathers in fp8, by hand: which weights, how many bytes they save, and where nothing is narrower."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builders import make_job
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import fp8_on_rank
from ultrascale.cost.stages import share_of
from ultrascale.cost.traffic import of_stage
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model, MoE

MODEL = Model(name="small", layers=4, hidden=64, heads=4, kv_heads=2, ffn=192, vocab=256)
QKV_OUT, MLP = 64 * (64 + 2 * 32) + 64 * 64, 3 * 64 * 192  # head_dim 16


def job_of(model: Model = MODEL, engine: str = "ultrascale-eager", precision: str = "fp8", gpus: int = 4) -> Job:
    return make_job(model, f"{gpus}xh100", 64, gpus, engine, precision=precision)


def narrow(job: Job, stage: int = 0, **fields: Any) -> tuple[float, float]:
    columns = LayoutColumns.of([Layout(**{"dp": 4, "zero": 3, **fields})])
    found = fp8_on_rank(job, columns, share_of(job, columns, np.asarray([stage])))
    return float(found.elements[0]), float(found.scales[0])


def test_first_and_last_block_stay_wide() -> None:
    assert narrow(job_of()) == (2 * (QKV_OUT + MLP), 2 * 7)
    assert narrow(job_of(), dp=2, pp=2) == (QKV_OUT + MLP, 7)  # two layers a stage, of which each has an end
    assert narrow(job_of(MODEL.model_copy(update={"layers": 6})), stage=1, dp=2, pp=3, gas=3) == (2 * (QKV_OUT + MLP), 14)
    assert narrow(job_of(MODEL.model_copy(update={"layers": 1}))) == (0, 0)


def test_a_fused_block_has_fewer_scales() -> None:
    assert narrow(job_of(engine="ultrascale-gpu")) == (2 * (QKV_OUT + MLP), 2 * 4)


def test_what_does_not_fit_stays_wide() -> None:
    assert narrow(job_of(MODEL.model_copy(update={"ffn": 200}))) == (2 * QKV_OUT, 2 * 4)
    assert narrow(job_of(), dp=1, tp=4)[0] == 0  # one shard
    # k and v are 8 wide on each of four ranks, so that q, which is multiplied with them, stays too.
    odd = MODEL.model_copy(update={"kv_heads": 4, "head_dim": 8})
    assert narrow(job_of(odd, gpus=8), dp=2, tp=4) == (2 * MLP / 4, 2 * 3)


def test_experts_stay_wide_but_not_the_shared_one() -> None:
    moe = MoE(experts=8, top_k=2, expert_ffn=96, dense_layers=1, shared_experts=1, shared_expert_ffn=32)
    shared = MODEL.model_copy(update={"moe": moe})
    assert narrow(job_of(shared)) == (2 * (QKV_OUT + 3 * 64 * 32), 2 * 7)
    alone = MODEL.model_copy(update={"ffn": 0, "moe": MoE(experts=8, top_k=2, expert_ffn=96)})
    assert narrow(job_of(alone)) == (2 * QKV_OUT, 2 * 4)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"precision": "bf16"}, {}),
        ({"engine": "torchtitan"}, {}),
        ({}, {"zero": 2}),
        ({}, {"offload": "parameters"}),
    ],
)
def test_where_nothing_is_narrower(changes: dict[str, Any], fields: dict[str, Any]) -> None:
    assert narrow(job_of(**changes), **fields) == (0, 0)


def test_bytes_sent_and_held() -> None:
    """Against the same engine with wide gathers: one byte less for each such element, gathered twice."""
    job, layout = job_of(), Layout(dp=4, zero=3)
    wide = job.changed(framework=job.framework.model_copy(update={"fp8_gather": False}))
    less = [sum(one.bytes for one in of_stage(each, layout, ClusterRates(each), 0)) for each in (wide, job)]
    elements, scales = narrow(job)
    # A rank of four sends three quarters of a gather, and of an all-reduce twice that.
    assert less[0] - less[1] == 2 * elements * 3 / 4 - 4 * scales * 2 * 3 / 4
    kept = layout.changed(keep_gathered=True)
    held = [estimate(each, kept).memory[0].memory.parameters for each in (wide, job)]
    assert held[0] - held[1] == elements


@pytest.mark.parametrize(
    ("engine", "narrow_layers"),
    # Eager operators are fullest when the gradients of embedding and head are scattered: no layer is gathered then. A GPU's
    # kernels are at the loss, beside the last layer alone, which stays wide.
    [("ultrascale", 1), ("ultrascale-gpu", 0), ("ultrascale-eager", 0)],
)
def test_a_step_is_no_longer_and_no_fuller(engine: str, narrow_layers: int) -> None:
    job, layout = job_of(Model.load("llama-3-8b"), engine, gpus=8), Layout(dp=8, zero=3)
    wide = job.changed(framework=job.framework.model_copy(update={"fp8_gather": False}))
    one, other = estimate(job, layout), estimate(wide, layout)
    assert one.time.zero_s < other.time.zero_s
    layer = 4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 14336
    # The fullest moment has one layer that stays wide, at an end, and one that does not.
    assert other.memory[0].memory.total - one.memory[0].memory.total == pytest.approx(narrow_layers * layer, rel=0.05)
