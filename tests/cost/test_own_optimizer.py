"""What our own engine's step end costs on a GPU: bytes of its AdamW, gradients that are not accumulated."""

from __future__ import annotations

import numpy as np
import pytest

from builders import make_job
from ultrascale import Cluster, Job, Layout, Model, estimate
from ultrascale.cost import host
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.operators import accumulate_s
from ultrascale.cost.table import SearchTable
from ultrascale.specs.efficiency import Efficiency

MODEL = Model.load("llama-3.2-1b")


def job_of(gas: int = 1, framework: str = "ultrascale") -> Job:
    cluster = Cluster.of(Cluster.load("1xh200").gpu, nodes=1, gpus_per_node=1, efficiency=Efficiency(kernel_launch_s=0.0))
    return make_job(MODEL, cluster, 4096, gas, framework)


def optimizer_bytes(gas: int, framework: str = "ultrascale") -> float:
    job = job_of(gas, framework)
    seconds = estimate(job, Layout(gas=gas)).time.optimizer_s
    if job.framework.fused_blocks:
        seconds -= (
            host.constants().launch_queue.start_s * 2 * 9 * MODEL.layers
        )  # of a kernel that steps a weight, and one for its norm
    return seconds * ClusterRates(job).stream_bytes_s / MODEL.parameters


def test_bytes_of_a_step_by_hand() -> None:
    """Gradient twice (its norm, its use), master 4 + 4, moments 8 + 8, and 2 for a bf16 copy that is not the master's half."""
    assert optimizer_bytes(1) == pytest.approx(2 * 2 + 8 + 16)
    assert optimizer_bytes(2) == pytest.approx(2 * 4 + 8 + 16)
    assert optimizer_bytes(1, "torchtitan") == pytest.approx(2 * 4 + 8 + 16 + 2)


def test_a_single_micro_batch_has_no_gradient_accumulation() -> None:
    job, elements = job_of(), np.asarray([1e9])
    machine = ClusterRates(job)
    assert accumulate_s(job, LayoutColumns.of([Layout()]), machine, elements)[0] == 0
    assert accumulate_s(job, LayoutColumns.of([Layout(gas=2)]), machine, elements)[0] == machine.stream_s(1e10)


def test_the_search_distinguishes_one_micro_batch_from_two() -> None:
    job = job_of(2)
    layouts = [Layout(gas=1), Layout(gas=2)]
    table = SearchTable(job, LayoutColumns.of(layouts), (("1f1b", 1),), ClusterRates(job)).evaluate(2.0**40)
    for layout, step_s in zip(layouts, table.step_s[:, 0], strict=True):
        alone = job.changed(batch_tokens=layout.batch_tokens(4096))
        assert step_s == pytest.approx(estimate(alone, layout).step_time_s, rel=1e-6)
