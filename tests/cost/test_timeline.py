"""Memory over a step: its maximum is the estimate's peak, and the first step has no optimizer states before its end."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ultrascale.cost.estimate import estimate
from ultrascale.cost.timeline import TimelinePoint, memory_timeline, simulated
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

GPT3 = Job(
    model=Model.load("gpt3-175b"),
    cluster=Cluster.load("64xa100-80gb"),
    seq=2048,
    batch_tokens=2048 * 32,
    framework=Framework.load("playbook"),
)  # 96 layers and a head of a third of one: every stage and chunk below has the same number
LLAMA = Job(
    model=Model.load("llama-3-8b"),
    cluster=Cluster.load("8xh100"),
    seq=8192,
    batch_tokens=8192 * 32,
    framework=Framework.load("playbook"),
)


def peak_bytes(job: Job, points: tuple[TimelinePoint, ...]) -> float:
    """The maximum with what the runtime adds: the context, and 4 % of activations and buffers."""
    constants = job.cluster.efficiency
    slack = 1 + constants.allocator_slack
    highest = max(m.static_bytes + slack * (m.activation_bytes + m.buffer_bytes) for m in points)
    return highest + constants.context_gib * 2**30


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "afab"},
        {"schedule": "1f1b"},
        {"schedule": "interleaved", "virtual_stages": 3},
        {"schedule": "zero-bubble"},
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 7])
def test_the_timeline_peak_is_the_estimates_peak(fields: dict[str, object], recompute: str, stage: int) -> None:
    layout = Layout(tp=8, pp=8, gas=32, recompute=recompute).changed(**fields)
    predicted = estimate(GPT3, layout).memory[stage]
    assert peak_bytes(GPT3, memory_timeline(GPT3, layout, stage)) == pytest.approx(predicted.memory.total, rel=0.02)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
@pytest.mark.parametrize("stage", [0, 7])
def test_the_v_shapes_without_recomputation(schedule: str, stage: int) -> None:
    layout = Layout(tp=8, pp=8, gas=32, schedule=schedule, virtual_stages=2)
    predicted = estimate(GPT3, layout).memory[stage]
    assert peak_bytes(GPT3, memory_timeline(GPT3, layout, stage)) == pytest.approx(predicted.memory.total, rel=0.02)


def test_without_a_pipeline() -> None:
    layout = Layout(dp=8, zero=1, gas=4, recompute="full")
    points = memory_timeline(LLAMA, layout)
    assert [point.action for point in points] == ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3", "optimizer step"]
    assert peak_bytes(LLAMA, points) == pytest.approx(estimate(LLAMA, layout).memory[0].memory.total)


def test_activations_are_allocated_and_freed() -> None:
    """1F1B, first of 4 stages, 8 micro-batches: 1, 2, 3, 4 are live in the warm-up, and none at the end."""
    job = LLAMA.changed(batch_tokens=8192 * 8)
    points = memory_timeline(job, Layout(dp=1, tp=2, pp=4, gas=8))
    forwards = [point.activation_bytes for point in points if point.action.startswith("F")]
    assert forwards[:4] == pytest.approx([forwards[0] * n for n in (1, 2, 3, 4)])
    assert forwards[4:] == pytest.approx([forwards[0] * 4] * 4)
    assert points[-1].activation_bytes == 0
    assert all(a.end_s <= b.start_s for a, b in pairwise(points))


def test_afab_keeps_all_losses() -> None:
    """Last stage, forward of micro-batch k: k + 1 stages' activations and as many saved logits."""
    job = LLAMA.changed(batch_tokens=8192 * 8)
    layout = Layout(tp=2, pp=4, gas=8, schedule="afab")
    forwards = [m.activation_bytes for m in memory_timeline(job, layout, 3) if m.action.startswith("F")]
    assert forwards == pytest.approx([forwards[0] * n for n in range(1, 9)])
    layers = estimate(job, layout).memory[3].layers
    # Per token on one of two tp ranks: 139,392 / 2 a layer; head: norm 2·8192 / 2, two fp32 numbers, logits 256,512 / 2.
    assert forwards[0] == 8192 * (layers * 139_392 / 2 + 16_384 / 2 + 8 + 256_512 / 2)


def test_the_first_step_has_no_optimizer_states_before_its_end() -> None:
    """8·N/8 bytes of AdamW appear with the optimizer step: 8,030,261,248 on each of 8 ranks."""
    layout = Layout(dp=8, zero=1, gas=4)
    points = memory_timeline(LLAMA, layout)
    assert points[-1].action == "optimizer step"
    without = peak_bytes(LLAMA, points[:-1]) - 8_030_261_248
    assert without == pytest.approx(estimate(LLAMA, layout).first_step_peak_gib * 2**30)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(SpecError, match="try 0 to 3"):
        memory_timeline(LLAMA, Layout(tp=2, pp=4, gas=32), stage=4)


def test_the_simulated_pipeline_is_the_estimates() -> None:
    """Busy, bubble and send of the estimate add up to the simulated makespan."""
    job = LLAMA.changed(batch_tokens=8192 * 16)
    layout = Layout(tp=2, pp=4, gas=16, schedule="interleaved", virtual_stages=2)
    time = estimate(job, layout).time
    after = time.data_s + time.optimizer_s + time.offload_s + time.overhead_s
    assert simulated(job, layout).makespan_s == pytest.approx(time.total - after)
