"""One change at a time, and the largest micro-batch, sequence and model that still fit."""

from __future__ import annotations

import re

import pytest

from builders import make_job, make_plan
from ultrascale.cost.estimate import estimate
from ultrascale.plan.what_if import AXES, largest, what_if
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan

GIB = 2**30
N8 = 8_030_261_248


TODAY = make_plan(Layout(dp=64, zero=1, gas=4, recompute="selective"))


def peak(plan: Plan, change: str) -> float:
    found = what_if(plan, change)
    assert found.problem is None, found.problem
    assert found.estimate is not None
    return found.estimate.peak_gib


def test_narrower_gradients() -> None:
    """ZeRO-1 keeps whole gradients: bf16 saves 2·N bytes = 14.96 GiB, and the fresh bf16 copy of one layer with them."""
    saved = TODAY.estimate.peak_gib - peak(TODAY, "gradients=bf16")
    assert saved == pytest.approx((2 * N8 + 1.04 * 2 * 218_112_000) / GIB, rel=1e-6)


def test_a_higher_zero_stage() -> None:
    """ZeRO-3 over 64 saves 63/64 of bf16 parameters and fp32 gradients, and gathers some layers instead."""
    found = what_if(TODAY, "zero=3")
    assert found.estimate is not None
    before, after = TODAY.estimate.memory[0].memory, found.estimate.memory[0].memory
    assert before.parameters - after.parameters == pytest.approx(63 / 64 * 2 * N8)
    assert before.gradients - after.gradients == pytest.approx(63 / 64 * 4 * N8)
    assert found.estimate.peak_gib < TODAY.estimate.peak_gib


def test_hsdp() -> None:
    whole, part = what_if(TODAY, "zero=3"), what_if(TODAY, "zero=3,zero_shards=8")
    assert whole.estimate is not None
    assert part.estimate is not None
    assert part.layout is not None
    assert part.layout.zero_shards == 8
    more = part.estimate.memory[0].memory.optimizer - whole.estimate.memory[0].memory.optimizer
    assert more == pytest.approx(8 * N8 * (1 / 8 - 1 / 64))


def test_keeping_gathered() -> None:
    assert peak(TODAY, "zero=3,keep_gathered=true") > peak(TODAY, "zero=3")
    assert what_if(TODAY, "keep_gathered=true").problem is not None


def test_offload() -> None:
    """The master and AdamW's moments, 12·N/64 bytes, go to the host; the step takes longer."""
    found = what_if(TODAY, "offload=optimizer")
    assert found.estimate is not None
    assert TODAY.estimate.peak_gib - found.estimate.peak_gib == pytest.approx(12 * N8 / 64 / GIB, rel=1e-6)
    assert found.estimate.step_time_s > TODAY.estimate.step_time_s


def test_another_number_of_gpus_keeps_the_batch() -> None:
    found = what_if(TODAY, "gpus=128")
    assert found.job.cluster.gpus == 128
    assert found.job.batch_tokens == TODAY.job.batch_tokens
    assert found.layout is not None
    assert (found.layout.dp, found.layout.gas) == (128, 2)
    assert found.estimate is not None
    assert found.estimate.step_time_s < TODAY.estimate.step_time_s


def test_another_gpu_and_another_network() -> None:
    found = what_if(TODAY, "gpu=h200")
    assert (found.job.cluster.gpu.name, found.job.cluster.gpus) == ("h200", 64)
    assert found.estimate is not None
    assert found.estimate.capacity_gib > TODAY.estimate.capacity_gib
    slow = what_if(TODAY, "network_gb_s=5")
    assert slow.job.cluster.network_gb_s == 5
    assert slow.estimate is not None
    assert slow.estimate.time.data_s > TODAY.estimate.time.data_s
    both = what_if(TODAY.model_copy(update={"job": slow.job}), "gpu=h200,gpus=32")
    assert (both.job.cluster.network_gb_s, both.job.cluster.gpus) == (5, 32)  # a network that was given stays
    wrong = {"network_gb_s=fast": "must be GB/s per GPU", "gpu=h2000": "h200", "expert_imbalance=1": "no experts"}
    for change, words in wrong.items():
        with pytest.raises(SpecError, match=words):
            what_if(TODAY, change)


def test_balanced_experts_are_faster() -> None:
    job, layout = make_job("qwen3-30b-a3b", "16xh100", 4096, batch=64), Layout(dp=16, ep=16, zero=1, gas=4)
    today = Plan(job=job, layout=layout, estimate=estimate(job, layout))
    found = what_if(today, "expert_imbalance=1.0")
    assert found.job.cluster.efficiency.expert_imbalance == 1.0
    assert found.estimate is not None
    assert found.estimate.step_time_s < today.estimate.step_time_s
    with pytest.raises(SpecError, match=r"expert_imbalance is 0.5 but must be at least 1"):
        what_if(today, "expert_imbalance=0.5")


def test_a_longer_sequence_keeps_the_tokens() -> None:
    found = what_if(TODAY, "seq=16k")
    assert (found.job.seq, found.job.batch_tokens) == (16384, TODAY.job.batch_tokens)
    assert found.layout is not None
    assert found.layout.gas == 2


def test_several_changes_at_once() -> None:
    found = what_if(TODAY, "tp=2, mbs=2 ,recompute=full")
    assert found.layout is not None
    assert (found.layout.tp, found.layout.dp, found.layout.mbs, found.layout.gas) == (2, 32, 2, 4)
    assert found.layout.recompute == "full"


def test_impossible_changes_are_reported_without_raising() -> None:
    assert what_if(TODAY, "tp=3").estimate is None
    assert "cannot be cut" in str(what_if(TODAY, "tp=3").problem)
    assert "has no experts" in str(what_if(TODAY, "ep=2").problem)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("", "is empty"),
        ("zero", "must be a field and a value"),
        ("zeroo=3", "did you mean 'zero'"),
        ("gpus=x", "must be a whole number"),
        ("gpus=65", "must fill whole nodes"),
        ("precision=int3", "precision"),
    ],
)
def test_invalid_changes_are_refused(change: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        what_if(TODAY, change)


def fits(plan: Plan, axis: str, value: int) -> bool:
    """Today's layout with one number changed, estimated anew here."""
    job, layout = plan.job, plan.layout
    if axis == "mbs":
        layout = layout.changed(mbs=value)
    elif axis == "seq":
        job = job.changed(seq=value)
    else:
        job = job.changed(model=job.model.model_copy(update={"layers": value}))
    return estimate(job.changed(batch_tokens=layout.batch_tokens(job.seq)), layout).fits


PLANS = {
    "zero-1": TODAY,
    "zero-3": make_plan(Layout(dp=64, zero=3, gas=4)),
    "pipeline": make_plan(Layout(dp=4, tp=4, pp=4, gas=8, zero=1, recompute="selective"), model="llama-3-70b"),
    "context": make_plan(Layout(dp=8, cp=8, zero=3, gas=2, recompute="full"), seq=65536),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(("axis", "unit"), [("mbs", 1), ("seq", 128), ("model", 1)])
def test_the_largest_fits_and_the_next_does_not(name: str, axis: str, unit: int) -> None:
    plan = PLANS[name]
    found = largest(plan, axis)
    value = int(re.search(r"[\d,]+", found.largest)[0].replace(",", ""))  # type: ignore[index]
    assert found.estimate.fits
    assert fits(plan, axis, value)
    assert not fits(plan, axis, value + unit)
    needs = re.search(r"needs ([\d,.]+) GiB of ([\d,.]+)", found.stopped_by)
    assert needs is not None
    assert float(needs[1].replace(",", "")) >= float(needs[2].replace(",", ""))
    assert found.axis in AXES


def test_learned_positions_limit_the_sequence_before_memory() -> None:
    plan = make_plan(Layout(dp=8, zero=3, recompute="full"), model="gpt2-xl", cluster="8xh100", seq=512)
    found = largest(plan, "seq")
    assert found.largest == "seq = 1,024 tokens"
    assert "not memory that stops it" in found.stopped_by


def test_nothing_fits_at_all() -> None:
    plan = make_plan(Layout(dp=8, gas=4), model="llama-3-70b", cluster="8xh100")
    with pytest.raises(SpecError, match=r"nothing fits, even mbs = 1 needs"):
        largest(plan, "mbs")


def test_an_unknown_axis_is_refused() -> None:
    with pytest.raises(SpecError, match="mbs, seq, model"):
        largest(TODAY, "layers")
