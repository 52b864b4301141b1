"""What must hold for every legal layout: nothing negative, sums that add up, and the sign of changes in memory and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise
from typing import TypeAlias

from random_layouts import JOBS, job_of, layouts_of, sample

from ultrascale.cost import flops
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.estimate import DraftEstimate, add_times, estimate, memory_drafts_of_jobs
from ultrascale.cost.legality import problem
from ultrascale.specs.estimate import CAUSES, OWNERS
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

COUNT = 6  # layouts of each of the eleven jobs for each law
ROUNDING = 1e-9
Change: TypeAlias = Callable[[Layout], Layout]
Variants: TypeAlias = Callable[[Job], Sequence[tuple[Job, Change]]]


def fields(**values: object) -> Change:
    return lambda layout: layout.changed(**values)


def estimates(
    seed: int, variants: Variants, wanted: Callable[[Layout], bool] = lambda _: True
) -> Iterator[tuple[Job, Layout, list[DraftEstimate]]]:
    """Random layouts that are legal in each variant, with the variants' estimates, all from one call."""
    cases: list[tuple[Job, Layout, int]] = []
    changed: list[tuple[Job, Layout]] = []
    for index in range(len(JOBS)):
        job = job_of(index)
        asked = variants(job)

        def legal(layout: Layout, asked: Sequence[tuple[Job, Change]] = asked) -> bool:
            return wanted(layout) and all(problem(other, change(layout)) is None for other, change in asked)

        for layout in layouts_of(index, COUNT, seed + index, legal) if asked else ():
            cases.append((job, layout, len(asked)))
            changed += [(other, change(layout)) for other, change in asked]
    drafted = iter(add_times(memory_drafts_of_jobs(changed)))
    assert len(cases) >= 3 * COUNT
    for job, layout, count in cases:
        yield job, layout, list(islice(drafted, count))


def slack_gib(job: Job, predicted: DraftEstimate) -> float:
    """What the allocator loses on the buffers: they count 1.04-fold, so turning states into buffers may cost that much."""
    return job.cluster.efficiency.allocator_slack * max(stage["buffers"] for stage in predicted.owned) / 2**30


def test_numbers_add_up_and_no_step_beats_the_peak() -> None:
    """Not even the causal half of the model's FLOPs fits into less than their time at the chip's peak."""
    for job, layouts in sample(COUNT, seed=0):
        for layout in layouts:
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
            least = flops.model_flops(job.model, job.seq, causal=True) * job.batch_tokens / layout.gpus / job.peak_flops
            assert predicted.step_time_s > least
            assert 0 < predicted.mfu_causal <= predicted.hfu_causal < 1
            assert predicted.mfu <= predicted.hfu
            assert predicted.mfu_causal <= predicted.mfu


def test_a_higher_zero_stage_never_needs_more() -> None:
    def stages(job: Job) -> list[tuple[Job, Change]]:
        return [(job, fields(zero=zero, zero_shards=None, keep_gathered=False, offload="none")) for zero in range(4)]

    for job, layout, found in estimates(1, stages):
        for lower, higher in pairwise(found):
            assert higher.peak_gib <= lower.peak_gib * (1 + ROUNDING) + slack_gib(job, higher)
        if layout.data_ranks > 1:
            assert found[1].peak_gib < found[0].peak_gib


def test_more_shards_never_need_more() -> None:
    def shards(job: Job) -> list[tuple[Job, Change]]:
        return [(job, fields()), (job, fields(zero_shards=None))]

    for job, _, (fewer, more) in estimates(2, shards, lambda layout: layout.zero_shards is not None):
        assert more.peak_gib <= fewer.peak_gib * (1 + ROUNDING) + slack_gib(job, more)


def test_more_recomputation_never_needs_more_memory_or_less_time() -> None:
    def policies(job: Job) -> list[tuple[Job, Change]]:
        return [(job, fields(recompute=policy)) for policy in ("none", "selective", "full")]

    for _, _, (none, selective, full) in estimates(3, policies):
        assert full.peak_gib <= selective.peak_gib * (1 + ROUNDING)
        assert selective.peak_gib <= none.peak_gib * (1 + ROUNDING)
        assert none.step_time_s <= selective.step_time_s * (1 + ROUNDING)
        assert none.step_time_s <= full.step_time_s * (1 + ROUNDING)


def twice_the_batch(change: Change) -> Variants:
    return lambda job: [(job, fields()), (job.changed(batch_tokens=2 * job.batch_tokens), change)]


def test_a_larger_micro_batch_never_needs_less() -> None:
    variants = twice_the_batch(lambda layout: layout.changed(mbs=2 * layout.mbs))
    for _, _, (one, larger) in estimates(4, variants):
        assert larger.peak_gib > one.peak_gib
        assert larger.step_time_s > one.step_time_s


def test_a_longer_sequence_never_needs_less() -> None:
    def lengths(job: Job) -> list[tuple[Job, Change]]:
        if job.model.positions == "learned":
            return []  # longer sequences need another model
        return [(job, fields()), (job.changed(seq=2 * job.seq, batch_tokens=2 * job.batch_tokens), fields())]

    for _, _, (one, two) in estimates(5, lengths):
        assert two.peak_gib > one.peak_gib
        assert two.step_time_s > one.step_time_s


def test_more_accumulation_never_needs_less_nor_has_a_larger_bubble() -> None:
    """Looped schedules hold a round; a number of micro-batches that is no multiple of pp has longer rounds and holds more."""
    variants = twice_the_batch(lambda layout: layout.changed(gas=2 * layout.gas))
    for _, layout, (one, more) in estimates(6, variants, lambda layout: layout.gas % layout.pp == 0):
        assert more.peak_gib >= one.peak_gib * (1 - ROUNDING)
        assert more.step_time_s > one.step_time_s
        assert layout.pp == 1 or more.bubble_fraction <= one.bubble_fraction + 0.002


def test_faster_hardware_never_makes_a_slower_step() -> None:
    """No transfer overlaps with work that already hides another: counted twice, slower work would make a faster step.

    Not V-Half and V-Min: their steady state takes six times the longest pass. Faster GEMMs expose more of ZeRO's gathers, which
    are added to forward and input gradients alone, so that the longest pass may grow while the sum of all shrinks. So is the
    time in which a GPU waits for launches, of which other split backwards get 0.01 % longer.
    """
    faster = (
        {"matmul": 1.25},
        {"attention_forward": 0.9, "attention_backward": 0.9},
        {"memory_bandwidth": 1.0},
        {"network_bandwidth": 1.0, "network_latency_s": 0.0},
    )

    def clusters(job: Job) -> list[tuple[Job, Change]]:
        cluster = job.cluster
        efficiencies = [cluster.efficiency.model_copy(update=constants) for constants in faster]
        jobs = [job.changed(cluster=cluster.model_copy(update={"efficiency": efficiency})) for efficiency in efficiencies]
        return [(one, fields()) for one in (job, *jobs)]

    for _, layout, (one, *others) in estimates(7, clusters, lambda layout: layout.schedule not in ("v-half", "v-min")):
        most = 1e-3 if LayoutColumns.of([layout]).split_backward.any() else ROUNDING
        for constants, other in zip(faster, others, strict=True):
            assert other.step_time_s <= one.step_time_s * (1 + most), constants


def test_the_contiguous_ring_is_never_faster_than_the_zig_zag() -> None:
    def rings(job: Job) -> list[tuple[Job, Change]]:
        return [(job, fields(context_parallel=kind)) for kind in ("zigzag", "ring")]

    for _, _, (zigzag, ring) in estimates(8, rings, lambda layout: layout.cp > 1):
        assert ring.step_time_s >= zigzag.step_time_s * (1 - ROUNDING)
        assert ring.peak_gib >= zigzag.peak_gib * (1 - ROUNDING)


def test_naive_and_hooks_are_never_faster() -> None:
    def kinds(job: Job) -> list[tuple[Job, Change]]:
        return [(job, fields(data_parallel=kind, offload="none")) for kind in ("bucketed", "hooks", "naive")]

    for _, _, (bucketed, *others) in estimates(9, kinds):
        assert all(other.step_time_s >= bucketed.step_time_s * (1 - ROUNDING) for other in others)


def test_offload_is_never_faster_and_never_needs_more() -> None:
    def kinds(job: Job) -> list[tuple[Job, Change]]:
        return [(job, fields(data_parallel="bucketed", offload=kind)) for kind in ("none", "optimizer", "parameters")]

    for job, _, (none, *others) in estimates(10, kinds, lambda layout: layout.zero == 3):
        for other in others:
            assert other.step_time_s >= none.step_time_s * (1 - ROUNDING)
            assert other.peak_gib <= none.peak_gib * (1 + ROUNDING) + slack_gib(job, other)


def test_sequence_parallelism_never_needs_more() -> None:
    """It is not always faster: one all-reduce may beat a gather, a scatter and the second gather of backward."""

    def kinds(job: Job) -> list[tuple[Job, Change]]:
        return [(job, fields(sequence_parallel=kind)) for kind in (True, False)]

    for _, _, (with_it, without) in estimates(11, kinds, lambda layout: layout.sequence_parallel):
        assert with_it.peak_gib <= without.peak_gib * (1 + ROUNDING)
