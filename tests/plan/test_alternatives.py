"""Layouts of other kinds than the fastest, and rows of layouts that differ in virtual stages alone."""

from __future__ import annotations

import numpy as np
import pytest

from builders import make_job, with_constants
from ultrascale.cost.columns import LayoutColumns
from ultrascale.plan.alternatives import LEAST_MEMORY_MAX_SLOWDOWN, SIMPLEST_MAX_SLOWDOWN, techniques
from ultrascale.plan.search import MAX_VARIANTS, Result, plan
from ultrascale.specs.layout import Layout

CLOSED_FORM_ERROR = 1.02  # of step times


@pytest.fixture(scope="module")
def dense() -> Result:
    return plan(make_job("llama-3-70b", "64xh100", 8192, 512, framework="megatron-core"))


def number_of_techniques(layout: Layout) -> int:
    return int(techniques(LayoutColumns.of([layout]))[0])


def test_rows_differ_in_more_than_virtual_stages(dense: Result) -> None:
    rows = [plan.layout.model_copy(update={"virtual_stages": 1}) for plan in dense.plans]
    assert len(set(rows)) == len(rows) == 10
    assert any(dense.variants)
    for plan_, variants in zip(dense.plans, dense.variants, strict=True):
        assert len(variants) < MAX_VARIANTS
        for one in variants:
            assert one.layout != plan_.layout
            assert one.layout.changed(virtual_stages=plan_.layout.virtual_stages) == plan_.layout
            assert one.step_time_s >= plan_.estimate.step_time_s


def test_each_kind_is_what_it_says(dense: Result) -> None:
    best = dense.plans[0]
    kinds = {kind: one.plan for one in dense.alternatives for kind in one.kind.split(", ")}
    assert {"least memory", "simplest", "no pipeline"} <= set(kinds)
    slower = {kind: one.estimate.step_time_s / best.estimate.step_time_s for kind, one in kinds.items()}
    assert kinds["no pipeline"].layout.pp == 1
    assert slower["least memory"] <= LEAST_MEMORY_MAX_SLOWDOWN
    assert slower["simplest"] <= SIMPLEST_MAX_SLOWDOWN
    fewest, least = number_of_techniques(kinds["simplest"].layout), kinds["least memory"].estimate.peak_gib
    for plan_ in dense.plans:
        assert least <= plan_.estimate.peak_gib * CLOSED_FORM_ERROR
        if plan_.estimate.step_time_s <= SIMPLEST_MAX_SLOWDOWN * best.estimate.step_time_s / CLOSED_FORM_ERROR:
            assert fewest <= number_of_techniques(plan_.layout)
    assert all(plan_.estimate.fits for plan_ in kinds.values())


def test_tensor_parallelism_across_nodes_has_an_alternative_inside() -> None:
    """One sequence on two nodes 2 µs apart: tp = 16, or tp = 8 with a pipeline that is idle half of the time."""
    job = make_job("llama-3-8b", with_constants(16, network_latency_s=2e-6, network_call_s=0.0), 8192, 1)
    found = plan(job, forbid=["cp"], top=1)
    inside = {one.kind: one.plan for one in found.alternatives}
    assert found.plans[0].layout.tp == 16
    assert inside["TP inside a node"].layout.tp <= 8
    fixed = plan(job, fix=["tp=16"], top=1)
    assert not any("TP inside" in one.kind for one in fixed.alternatives)


def test_a_technique_is_counted_once() -> None:
    counts = {
        Layout(dp=8): 0,
        Layout(dp=8, zero=1): 1,
        Layout(dp=8, zero=3): 2,
        Layout(tp=8, pp=2, gas=8): 2,
        Layout(tp=8, pp=2, gas=8, schedule="interleaved", virtual_stages=2, recompute="full"): 5,
        Layout(dp=8, ep=8, dispatcher="deepep"): 2,
    }
    assert np.array_equal(techniques(LayoutColumns.of(list(counts))), list(counts.values()))


def test_a_recomputation_that_changes_nothing_is_no_row_of_its_own() -> None:
    """Fused blocks keep nothing that selective recomputation would drop."""
    found = plan(make_job("llama-3.2-1b", "8xh100", 4096, 64, framework="ultrascale"))
    without = [plan_.layout.model_copy(update={"recompute": "none"}) for plan_ in found.plans]
    times = [round(plan_.estimate.step_time_s, 12) for plan_ in found.plans]
    assert len(set(zip(without, times, strict=True))) == len(found.plans)


def test_fewer_gpus_than_asked_for_are_said() -> None:
    found = plan(make_job("llama-3.2-1b", "16xh100", 4096, 64, framework="ultrascale"), objective="cost", top=3)
    used = found.plans[0].job.cluster.gpus
    assert used < 16
    assert any(f"uses {used} of 16 GPUs" in note for note in found.notes)


def test_where_nothing_fits_adapters_are_weighed() -> None:
    found = plan(make_job("llama-3-8b", "1xrtx4090", 4096, 32, framework="ultrascale"))
    assert found.no_fit is not None
    weights = 8.03e9 * 2 / 2**30
    assert weights < found.no_fit.lora_gib < found.no_fit.capacity_gib < found.no_fit.peak_gib
