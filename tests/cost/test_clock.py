"""Light work at a higher clock: a GPU that its power limits runs the faster the less its matrix units do."""

from __future__ import annotations

import numpy as np
import pytest

from builders import make_job
from ultrascale import Cluster, Job, Layout, estimate
from ultrascale.cost import operators
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import FULL_WORK, ClusterRates, Workload
from ultrascale.cost.step import component_times as pieces_of
from ultrascale.cost.table import SearchTable
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.framework import Framework


def job_of(name: str, seq: int, mbs: int, boost: float) -> Job:
    cluster = Cluster.of(Cluster.load("1xh200").gpu, nodes=1, gpus_per_node=1, efficiency=Efficiency(boost=boost))
    return make_job(name, cluster, seq, mbs, "ultrascale")


@pytest.mark.parametrize(
    ("work", "clock"), [(2 * FULL_WORK, 1.0), (FULL_WORK, 1.0), (FULL_WORK / 1.331, 1.1), (FULL_WORK / 1000, 1.25)]
)
def test_clock_scales_with_the_cube_root_of_the_load(work: float, clock: float) -> None:
    machine = ClusterRates(job_of("llama-3.2-1b", 4096, 4, boost=1.25))
    flops = np.asarray([work * machine.attention_peak_flops * machine.sustained["bf16"]])
    assert machine.clock(flops, np.ones(1))[0] == pytest.approx(clock)


def test_a_narrow_model_boosts_and_a_wide_one_does_not() -> None:
    """Matmuls of 576 wide keep the matrix units a quarter busy, those of 3072 full."""
    for name, gains in (("smollm2-135m", True), ("llama-3.2-3b", False)):
        plain, light = (estimate(job_of(name, 4096, 2, boost), Layout(mbs=2)).time for boost in (1.0, 1.25))
        assert (light.matmul_s < plain.matmul_s) is gains
        assert (light.attention_s < plain.attention_s) is gains
        assert light.memory_bound_s == plain.memory_bound_s
    assert light == plain


def test_search_and_estimate_agree() -> None:
    job, layout = job_of("smollm2-135m", 2048, 4, boost=1.25), Layout(mbs=4)
    cells = SearchTable(job, LayoutColumns.of([layout]), (("1f1b", 1),), ClusterRates(job)).evaluate(2.0**40)
    assert cells.step_s[0, 0] == pytest.approx(estimate(job, layout).step_time_s, rel=1e-9)


def test_one_clock_for_the_whole_step() -> None:
    """The head's matmuls have it too, and an optimizer that steps after each micro-batch makes it higher than one in four."""
    job = job_of("llama-3.2-1b", 1024, 4, boost=1.3)
    machine = ClusterRates(job)
    rows = LayoutColumns.of([Layout(mbs=4), Layout(mbs=4, gas=4)])
    often, seldom = operators.clock(job, rows, machine)
    assert often > seldom >= 1
    steady = job_of("llama-3.2-1b", 1024, 4, boost=1.0)
    (slow,) = operators.clock(steady, rows.take(np.asarray([0])), ClusterRates(steady))
    assert slow == 1
    pieces, slower = (
        pieces_of(Workload(one, rows, ClusterRates(one))) for one in (job, job_of("llama-3.2-1b", 1024, 4, boost=1.0))
    )
    for one, other in ((pieces.layers[0], slower.layers[0]), (pieces.head, slower.head)):
        found, base = one.matmul.total, other.matmul.total
        assert found == pytest.approx(base / [often, seldom])


def machine_of(job: Job) -> ClusterRates:
    return ClusterRates(job.changed(cluster=Cluster.load("1xh200")))


def test_only_fused_blocks_join_qkv_matmuls() -> None:
    """With biases the engine runs the plain model, where q, k and v are matmuls of their own: narrow, and slower."""
    job, rows = job_of("smollm2-135m", 1024, 4, boost=1.0), LayoutColumns.of([Layout(mbs=4, tp=3)])
    biased = job.changed(model=job.model.model_copy(update={"qkv_bias": True}))
    matmuls = operators.layer_matmuls(job, rows, LayerKind())
    times = []
    for one, count in ((job, 0), (biased, 1)):
        run = operators.engine_matmuls(one, rows, matmuls)
        assert sum(matmul.flops for matmul in run) == pytest.approx(sum(matmul.flops for matmul in matmuls))
        assert sum(float(np.max(matmul.count)) for matmul in run if np.max(matmul.n) == job.model.kv_dim // 3) == 2 * count
        times.append(operators.layer(one, rows, ClusterRates(one), LayerKind()).matmul.total)
    fused, plain = times
    assert plain > 1.05 * fused
    others = job.changed(framework=Framework.load("torchtitan"))
    assert operators.engine_matmuls(others, rows, matmuls) is matmuls
