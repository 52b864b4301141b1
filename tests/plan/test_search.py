"""The search against brute force, its objectives and constraints, and its advice when nothing fits."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from builders import make_job
from ultrascale.cost.estimate import DraftEstimate, drafts, estimate
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.legality import problem
from ultrascale.cost.ranges import MIN_FIT, memory_limit_gib
from ultrascale.cost.table import SearchTable
from ultrascale.plan.candidates import LayoutConstraints, cores, rank
from ultrascale.plan.search import LayoutPreview, plan
from ultrascale.schedules import REGISTRY
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, divisors
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.units import GIB


def everything(of: Job) -> list[DraftEstimate]:
    """Every legal layout, simulated; the fields that the search leaves out at their defaults."""
    world, found = of.cluster.gpus, []
    schedules = [(name, loops) for name, spec in REGISTRY.items() for loops in (1, 2, 3, 4) if spec.takes(loops)]
    for dp, tp, pp, cp in product(divisors(world), repeat=4):
        if dp * tp * pp * cp != world or of.sequences % dp:
            continue
        for mbs, zero, keep, variant, (schedule, loops), recompute in product(
            divisors(of.sequences // dp),
            range(4 if dp * cp > 1 else 1),
            (False, True),
            ("zigzag", "allgather", "ulysses") if cp > 1 else ("zigzag",),
            schedules,
            ("none", "selective", "full"),
        ):
            layout = Layout(
                dp=dp, tp=tp, pp=pp, cp=cp, mbs=mbs, gas=of.sequences // (dp * mbs), zero=zero, keep_gathered=keep,
                context_parallel=variant, schedule=schedule, virtual_stages=loops, recompute=recompute,
            )  # fmt: skip
            if problem(of, layout) is None:
                found.append(layout)
    return drafts(of, found)


SMALL = make_job("smollm2-1.7b", "4xa100-40gb", 16384, 2)


@pytest.fixture(scope="module")
def brute() -> list[DraftEstimate]:
    return everything(SMALL)


def test_the_winner_is_the_best_of_all(brute: list[DraftEstimate]) -> None:
    best = min(predicted.step_time_s for predicted in brute if predicted.fits)
    result = plan(SMALL)
    assert len(brute) > 500
    assert result.evaluated >= len(brute)
    assert result.plans[0].estimate.step_time_s == pytest.approx(best, rel=0.01)
    assert result.plans[0].estimate.step_time_s <= best * 1.0001
    fitting = sum(predicted.fits for predicted in brute)
    assert 0 < fitting < len(brute)


def test_the_memory_objective_minimizes_the_peak(brute: list[DraftEstimate]) -> None:
    least = min(predicted.peak_gib for predicted in brute)
    result = plan(SMALL, objective="memory")
    assert result.plans[0].estimate.peak_gib == pytest.approx(least, rel=0.01)
    peaks = [one.estimate.peak_gib for one in result.plans]
    assert peaks == sorted(peaks)


@pytest.mark.slow
def test_the_winner_on_eight_gpus_is_the_best_of_all() -> None:
    of = make_job("llama-3.2-1b", "8xa100-40gb", 8192, 16)
    best = min(predicted.step_time_s for predicted in everything(of) if predicted.fits)
    assert plan(of).plans[0].estimate.step_time_s <= best * 1.01


def test_plans_are_ranked_fit_and_distinct() -> None:
    result = plan(make_job("llama-3-8b", "16xh100", 8192, 64), top=20, explain=False)
    times = [one.estimate.step_time_s for one in result.plans]
    assert len(times) == 20
    assert times == sorted(times)
    assert all(one.estimate.fits for one in result.plans)
    assert len({one.layout for one in result.plans}) == 20
    for one in result.plans:
        assert problem(result.job, one.layout) is None
        assert one.estimate == estimate(result.job, one.layout)
    assert result.fitting <= result.evaluated


def test_early_pruning_keeps_the_fastest_layouts() -> None:
    of, kept = make_job("llama-3-70b", "32xh100", 8192, 128), 1000
    ranked = rank(of, LayoutConstraints(), "throughput", kept)
    capacity = of.cluster.gpu.memory_gib * GIB
    tables = [
        SearchTable(of, one.columns, one.variants, ClusterRates(of)).evaluate(capacity)
        for one in cores(of, LayoutConstraints())
    ]
    assert ranked.evaluated == sum(cells.legal.sum() for cells in tables)
    assert kept <= ranked.fitting < sum(cells.fits.sum() for cells in tables)
    fastest = np.sort(np.concatenate([cells.step_s.ravel() for cells in tables]))[:kept]
    assert ranked.score == fastest.tolist()


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize("fix", ["tp=4", "pp=2,schedule=interleaved", "zero=3", "recompute=full", "mbs=2", "dp=4"])
def test_fixed_fields_are_respected(fix: str) -> None:
    of = make_job("llama-3-8b", "16xh100", 8192, 64)
    free = plan(of, explain=False).plans[0]
    pinned = plan(of, fix=[fix], explain=False)
    for one in pinned.plans:
        for pair in fix.split(","):
            name, value = pair.split("=")
            assert str(getattr(one.layout, name)) == value
    assert pinned.plans[0].estimate.step_time_s >= free.estimate.step_time_s


@pytest.mark.parametrize(
    ("forbid", "field", "absent"), [("zero", "zero", {1, 2, 3}), ("pp", "pp", {2, 4, 8}), ("zero=1", "zero", {1})]
)
def test_forbidden_fields_are_absent(forbid: str, field: str, absent: set[int]) -> None:
    for one in plan(make_job("llama-3.2-1b", "8xh100", 8192, 64), forbid=[forbid], explain=False).plans:
        assert getattr(one.layout, field) not in absent


def test_fixed_constraints_are_among_the_reasons() -> None:
    best = plan(make_job("llama-3.2-1b", "8xh100", 8192, 64), fix=["tp=2"]).plans[0]
    assert "Constraint: tp=2 was fixed" in best.reasons


def test_the_objective_cost_may_leave_gpus_idle() -> None:
    """A small batch on many GPUs: half of them or less do it for fewer GPU-seconds a token."""
    of = make_job("llama-3.2-1b", "64xh100", 2048, 64)
    fast, cheap = plan(of, explain=False).plans[0], plan(of, objective="cost", explain=False).plans[0]

    def gpu_seconds(one: object) -> float:
        return one.job.cluster.gpus / one.estimate.tokens_per_s  # type: ignore[attr-defined]

    assert cheap.job.cluster.gpus < 64
    assert fast.job.cluster.gpus == 64
    assert gpu_seconds(cheap) < gpu_seconds(fast)
    assert cheap.layout.gpus == cheap.job.cluster.gpus


def test_every_advised_change_fits() -> None:
    """70B on 8 A100 of 40 GiB: states alone are 18·70.6e9/8 = 148 GiB a GPU."""
    of = make_job("llama-3-70b", "8xa100-40gb", 4096, 64)
    result = plan(of)
    assert result.plans == ()
    assert result.fitting == 0
    no = result.no_fit
    assert no is not None
    assert no.peak_gib > no.capacity_gib
    assert no.peak_gib == pytest.approx(estimate(of, no.layout).peak_gib, rel=0.02)
    assert no.changes
    for change in no.changes:
        again = estimate(change.job, change.layout)
        assert again == change.estimate
        assert again.fits, change.text
    assert str(no).startswith("nothing fits: the closest layout")
    assert no.changes[0].text in str(no)


def test_the_closest_layout_has_the_least_memory() -> None:
    of = make_job("llama-3-70b", "4xa100-40gb", 2048, 8)
    no = plan(of).no_fit
    assert no is not None
    for fields in ({"zero": 3, "dp": 4, "gas": 2}, {"tp": 4, "gas": 8}, {"pp": 4, "gas": 8}, {"cp": 4, "zero": 3, "gas": 8}):
        other = Layout(recompute="full").changed(**fields)
        assert estimate(of, other).peak_gib >= no.peak_gib * 0.98


def test_an_impossible_batch_becomes_the_nearest() -> None:
    """7 sequences on 8 GPUs with dp pinned to 8: 8 sequences are the nearest."""
    result = plan(make_job("llama-3.2-1b", "8xh100", 4096, 7), fix=["dp=8"], explain=False)
    assert result.job.sequences == 8
    assert "nearest batch that can is 8 sequences = 32,768 tokens" in " ".join(result.notes)
    assert result.plans[0].layout.dp * result.plans[0].layout.mbs * result.plans[0].layout.gas == 8


def test_a_batch_of_no_whole_sequences_is_rounded() -> None:
    of = make_job("llama-3.2-1b", "8xh100", 4096, 64).changed(batch_tokens=4096 * 64 + 1000)
    result = plan(of, explain=False)
    assert result.job.batch_tokens == 4096 * 64
    assert "not a whole number of 4,096-token sequences" in result.notes[0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"objective": "speed"}, "throughput, cost, memory"), ({"top": 0}, "whole number from 1 to"), ({"top": True}, "from 1")],
)
def test_bad_arguments_are_explained(fields: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        plan(SMALL, **fields)  # type: ignore[arg-type]


def test_progress_is_reported() -> None:
    messages: list[str] = []
    plan(SMALL, progress=messages.append)
    assert messages[0] == "searching 4xa100-40gb" or messages[0].startswith("searching 4x")
    assert any(line.startswith("simulating the best") for line in messages)
    assert messages[-1] == "explaining the winner"


def test_a_preview_precedes_the_result_and_is_close_to_it() -> None:
    job = Job(model=Model.load("llama-3-8b"), cluster=Cluster.load("16xh100"), seq=4096, batch_tokens=2**19)
    previews: list[list[LayoutPreview]] = []
    found = plan(job, top=5, explain=False, fix=["pp=2"], preview=previews.append)
    ((first, *others),) = previews
    assert len(others) == 4
    assert [one.step_time_s for one in (first, *others)] == sorted(one.step_time_s for one in (first, *others))
    assert first.step_time_s == pytest.approx(found.plans[0].estimate.step_time_s, rel=0.1)
    plan(job, top=5, objective="memory", preview=previews.append)
    with pytest.raises(SpecError, match="ddp"):
        plan(job, fix=["data_parallel=ddp", "zero=3"], preview=previews.append)
    assert len(previews) == 1


@pytest.mark.parametrize(
    ("model", "framework", "fix", "words"),
    [
        ("llama-3-8b", "megatron-core", ["dispatcher=deepep"], "layout.dispatcher is deepep but llama-3-8b has no experts"),
        ("mixtral-8x7b", "ultrascale", ["dispatcher=deepep"], "layout.dispatcher is deepep but ultrascale train runs alltoall"),
        ("mixtral-8x7b", "megatron-core", ["dispatcher=deepep", "ep=1"], "layout.dispatcher is deepep but ep is 1"),
        ("llama-3-8b", "ultrascale", ["context_parallel=ulysses", "cp=1"], "layout.context_parallel is ulysses but cp is 1"),
    ],
)
def test_a_fixed_method_that_no_layout_uses_is_refused(model: str, framework: str, fix: list[str], words: str) -> None:
    of = make_job(model, "8xh100", 8192, 64).changed(framework=Framework.load(framework))
    with pytest.raises(SpecError, match=words):
        plan(of, fix=fix)


def test_a_fixed_method_is_used() -> None:
    of = make_job("mixtral-8x7b", "16xh100", 4096, 64).changed(framework=Framework.load("megatron-core"))
    assert all(one.layout.ep > 1 for one in plan(of, fix=["dispatcher=deepep"], explain=False).plans)
    assert all(one.layout.cp > 1 for one in plan(of, fix=["context_parallel=ulysses"], explain=False).plans)


OWN_JOB = make_job(framework="ultrascale")


def test_a_plan_recomputes_in_no_more_layers_than_it_must() -> None:
    """Fewer would not fit with the same probability; with a fixed policy all layers recompute."""
    options = {"fix": ["dp=8", "zero=3", "mbs=4"], "explain": False, "top": 1}
    best = plan(OWN_JOB, **options).plans[0]
    layers = best.layout.recompute_layers
    assert best.layout.recompute != "none"
    assert layers is not None
    fewer = estimate(OWN_JOB, best.layout.changed(recompute_layers=layers - 1))
    limit = memory_limit_gib(OWN_JOB, MIN_FIT, 0.0)
    assert fewer.peak_gib > limit >= best.estimate.peak_gib
    every = plan(OWN_JOB, **{**options, "fix": [*options["fix"], f"recompute={best.layout.recompute}"]}).plans[0]
    assert every.layout.recompute_layers is None
    assert every.estimate.step_time_s > best.estimate.step_time_s
    asked = plan(OWN_JOB, **{**options, "fix": [*options["fix"], "recompute=auto"], "explain": True}).plans[0]
    assert asked.layout == best.layout
    assert any("without recomputation it would need" in reason for reason in asked.reasons)


def test_engines_that_recompute_all_layers_or_none_are_offered_that() -> None:
    job = OWN_JOB.changed(framework=Framework.load("torchtitan"))
    found = plan(job, fix=["recompute=full"], explain=False, top=3).plans
    assert {one.layout.recompute_layers for one in found} == {None}
