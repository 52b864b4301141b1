"""What must hold for every legal layout: nothing negative, sums that add up, and the sign of changes in memory and time."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import HealthCheck, assume, given, settings
from random_layouts import jobs_and_layouts

from ultrascale.cost import flops
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import problem
from ultrascale.specs.estimate import CAUSES, OWNERS, Estimate
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

bounded = settings(
    derandomize=True, database=None, max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
ROUNDING = 1e-9


def slack_gib(job: Job, predicted: Estimate) -> float:
    """What the allocator loses on the buffers: they count 1.04-fold, so turning states into buffers may cost that much."""
    return job.cluster.efficiency.allocator_slack * max(stage.memory.buffers for stage in predicted.memory) / 2**30


def changed(job: Job, layout: Layout, **fields: object) -> Layout:
    """The layout with those fields, if the job may be cut so."""
    other = layout.changed(**fields)
    assume(problem(job, other) is None)
    return other


@bounded
@given(jobs_and_layouts())
def test_every_number_is_a_number_and_they_add_up(case: tuple[Job, Layout]) -> None:
    job, layout = case
    predicted = estimate(job, layout)
    assert len(predicted.memory) == layout.pp
    for stage in predicted.memory:
        owners = [getattr(stage.memory, owner) for owner in OWNERS]
        assert all(math.isfinite(bytes_) and bytes_ >= 0 for bytes_ in owners)
        assert stage.memory.total == sum(owners)
        assert stage.in_flight >= 1
    assert predicted.peak_gib == max(stage.total_gib for stage in predicted.memory)
    assert predicted.memory[predicted.peak_stage].total_gib == predicted.peak_gib
    assert predicted.fits == (predicted.peak_gib <= job.cluster.gpu.memory_gib)
    assert 0 < predicted.first_step_peak_gib <= predicted.peak_gib
    assert sum(stage.layers for stage in predicted.memory) == job.model.layers
    causes = [getattr(predicted.time, cause) for cause in CAUSES]
    assert all(math.isfinite(seconds) and seconds >= 0 for seconds in causes)
    assert math.isclose(sum(causes), predicted.step_time_s, rel_tol=ROUNDING)
    assert 0 <= predicted.bubble_fraction < 1
    assert math.isclose(predicted.tokens_per_s * predicted.step_time_s, job.batch_tokens, rel_tol=ROUNDING)
    for moved in predicted.traffic:
        assert min(moved.bytes, moved.calls, moved.time_s, moved.exposed_s) >= 0
        assert math.isfinite(moved.bytes + moved.time_s + moved.exposed_s)
    assert all(item.bytes > 0 for item in predicted.activations)
    activations = predicted.memory[predicted.peak_stage].memory.activations
    assert math.isclose(sum(item.bytes for item in predicted.activations), activations, rel_tol=1e-6)


@bounded
@given(jobs_and_layouts())
def test_no_step_beats_the_peak(case: tuple[Job, Layout]) -> None:
    """Not even the causal half of the model's FLOPs fits into less than their time at the chip's peak."""
    job, layout = case
    predicted = estimate(job, layout)
    least = flops.model_flops(job.model, job.seq, causal=True) * job.batch_tokens / layout.gpus / job.peak_flops
    assert predicted.step_time_s > least
    assert 0 < predicted.mfu_causal <= predicted.hfu_causal < 1
    assert predicted.mfu <= predicted.hfu
    assert predicted.mfu_causal <= predicted.mfu


@bounded
@given(jobs_and_layouts())
def test_a_higher_zero_stage_never_needs_more(case: tuple[Job, Layout]) -> None:
    job, layout = case
    peaks = []
    for stage in range(4):
        other = layout.changed(zero=stage, zero_shards=None, keep_gathered=False, offload="none")
        predicted = estimate(job, other)
        peaks.append((predicted.peak_gib, slack_gib(job, predicted)))
    for (lower, _), (higher, slack) in pairwise(peaks):
        assert higher <= lower * (1 + ROUNDING) + slack
    if layout.data_ranks > 1:
        assert peaks[1][0] < peaks[0][0]


@bounded
@given(jobs_and_layouts())
def test_more_shards_never_need_more(case: tuple[Job, Layout]) -> None:
    job, layout = case
    assume(layout.zero_shards)
    fewer, more = estimate(job, layout), estimate(job, layout.changed(zero_shards=None))
    assert more.peak_gib <= fewer.peak_gib * (1 + ROUNDING) + slack_gib(job, more)


@bounded
@given(jobs_and_layouts())
def test_more_recomputation_never_needs_more_memory_or_less_time(case: tuple[Job, Layout]) -> None:
    job, layout = case
    none, selective, full = (estimate(job, layout.changed(recompute=policy)) for policy in ("none", "selective", "full"))
    assert full.peak_gib <= selective.peak_gib * (1 + ROUNDING)
    assert selective.peak_gib <= none.peak_gib * (1 + ROUNDING)
    assert none.step_time_s <= selective.step_time_s * (1 + ROUNDING)
    assert none.step_time_s <= full.step_time_s * (1 + ROUNDING)


@bounded
@given(jobs_and_layouts())
def test_a_larger_micro_batch_never_needs_less(case: tuple[Job, Layout]) -> None:
    job, layout = case
    twice = job.changed(batch_tokens=2 * job.batch_tokens)
    larger = estimate(twice, changed(twice, layout, mbs=2 * layout.mbs))
    one = estimate(job, layout)
    assert larger.peak_gib > one.peak_gib
    assert larger.step_time_s > one.step_time_s


@bounded
@given(jobs_and_layouts())
def test_a_longer_sequence_never_needs_less(case: tuple[Job, Layout]) -> None:
    job, layout = case
    assume(job.model.positions != "learned")
    longer = job.changed(seq=2 * job.seq, batch_tokens=2 * job.batch_tokens)
    assume(problem(longer, layout) is None)
    one, two = estimate(job, layout), estimate(longer, layout)
    assert two.peak_gib > one.peak_gib
    assert two.step_time_s > one.step_time_s


@bounded
@given(jobs_and_layouts())
def test_more_accumulation_never_needs_less(case: tuple[Job, Layout]) -> None:
    """Looped schedules hold a round; a number of micro-batches that is no multiple of pp has longer rounds and holds more."""
    job, layout = case
    assume(layout.gas % layout.pp == 0)
    twice = job.changed(batch_tokens=2 * job.batch_tokens)
    more = estimate(twice, changed(twice, layout, gas=2 * layout.gas))
    one = estimate(job, layout)
    assert more.peak_gib >= one.peak_gib * (1 - ROUNDING)
    assert more.step_time_s > one.step_time_s


@bounded
@given(jobs_and_layouts())
def test_more_micro_batches_shrink_the_bubble(case: tuple[Job, Layout]) -> None:
    job, layout = case
    assume(layout.pp > 1 and layout.gas % layout.pp == 0)
    twice = job.changed(batch_tokens=2 * job.batch_tokens)
    more = estimate(twice, changed(twice, layout, gas=2 * layout.gas))
    assert more.bubble_fraction <= estimate(job, layout).bubble_fraction + 0.002


@bounded
@given(jobs_and_layouts())
def test_faster_hardware_never_makes_a_slower_step(case: tuple[Job, Layout]) -> None:
    """No transfer overlaps with work that already hides another: counted twice, slower work would make a faster step.

    Not V-Half and V-Min: their steady state takes six times the longest pass. Faster GEMMs expose more of ZeRO's gathers, which
    are added to forward and input gradients alone, so that the longest pass may grow while the sum of all shrinks. So is the
    time in which a GPU waits for launches, of which other split backwards get 0.01 % longer.
    """
    job, layout = case
    assume(layout.schedule not in ("v-half", "v-min"))
    most = 1e-3 if LayoutColumns.of([layout]).split_backward.any() else ROUNDING
    step_s = estimate(job, layout).step_time_s
    for constants in (
        {"matmul": 1.25},
        {"attention_forward": 0.9, "attention_backward": 0.9},
        {"memory_bandwidth": 1.0},
        {"network_bandwidth": 1.0, "network_latency_s": 0.0},
    ):
        efficiency = job.cluster.efficiency.model_copy(update=constants)
        faster = job.changed(cluster=job.cluster.model_copy(update={"efficiency": efficiency}))
        assert estimate(faster, layout).step_time_s <= step_s * (1 + most), constants


@bounded
@given(jobs_and_layouts())
def test_the_contiguous_ring_is_never_faster_than_the_zig_zag(case: tuple[Job, Layout]) -> None:
    job, layout = case
    assume(layout.cp > 1)
    zigzag = changed(job, layout, context_parallel="zigzag")
    ring = changed(job, layout, context_parallel="ring")
    assert estimate(job, ring).step_time_s >= estimate(job, zigzag).step_time_s * (1 - ROUNDING)
    assert estimate(job, ring).peak_gib >= estimate(job, zigzag).peak_gib * (1 - ROUNDING)


@bounded
@given(jobs_and_layouts())
def test_naive_hooks_and_offload_are_never_faster(case: tuple[Job, Layout]) -> None:
    job, layout = case
    bucketed = layout.changed(data_parallel="bucketed", offload="none")
    best = estimate(job, bucketed)
    for word in ("naive", "hooks"):
        assert estimate(job, bucketed.changed(data_parallel=word)).step_time_s >= best.step_time_s * (1 - ROUNDING)
    for word in ("optimizer", *(["parameters"] if layout.zero == 3 else [])):
        away = estimate(job, bucketed.changed(offload=word))
        assert away.step_time_s >= best.step_time_s * (1 - ROUNDING)
        assert away.peak_gib <= best.peak_gib * (1 + ROUNDING) + slack_gib(job, away)


@bounded
@given(jobs_and_layouts())
def test_sequence_parallelism_never_needs_more(case: tuple[Job, Layout]) -> None:
    """It is not always faster: one all-reduce may beat a gather, a scatter and the second gather of backward."""
    job, layout = case
    with_it = changed(job, layout, sequence_parallel=True)
    without = estimate(job, layout.changed(sequence_parallel=False))
    assert estimate(job, with_it).peak_gib <= without.peak_gib * (1 + ROUNDING)
