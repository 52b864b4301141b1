"""Constants from what a GPU showed: put into the laws, they give it back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ultrascale.cost import kernels
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.measure import bench_hardware as hardware
from ultrascale.measure import doctor_facts as nvidia
from ultrascale.measure.bench_hardware import GemmShape, HardwareTimes
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

MEASURED = HardwareTimes(
    matmuls=((GemmShape(16384, 8192, 2048), 8.1e-4), (GemmShape(8192, 2048, 16384), 7.7e-4)),
    attention_forward_s=1.1e-3,
    attention_backward_s=3.2e-3,
    copy_s=5.3e-4,
    launch_s=4.0e-6,
)


@pytest.mark.parametrize("kind", ["h200", "mi300x"], ids=["with measured matmuls", "without"])
def test_the_cost_model_reproduces_the_measurement(kind: str) -> None:
    cluster = Cluster.load(f"1x{kind}")
    found = hardware.efficiency(cluster, MEASURED)
    job = Job(
        model=Model.load("llama-3-8b"),  # 32 heads of 128, as were timed
        cluster=cluster.model_copy(update={"efficiency": found}),
        seq=hardware.SEQ,
        batch_tokens=hardware.TOKENS,
    )
    machine = ClusterRates(job)
    m, n, k = np.array([(one.m, one.n, one.k) for one, _ in MEASURED.matmuls], dtype=float).T
    assert machine.matmul_s(m, n, k).sum() == pytest.approx(15.8e-4, rel=1e-3)
    passes = kernels.mixer_passes(job, LayoutColumns.of([Layout(mbs=4)]), machine, LayerKind())
    assert passes.forward[0] == pytest.approx(1.1e-3, rel=1e-3)
    assert passes.input_grad[0] == pytest.approx(3.2e-3, rel=1e-3)
    assert machine.stream_s(np.array([2.0 * hardware.COPIED]))[0] == pytest.approx(5.3e-4, rel=1e-3)
    assert found.kernel_launch_s == 4.0e-6
    assert found.boost == cluster.efficiency.boost  # the clocks were not read
    assert found.network_bandwidth == cluster.efficiency.network_bandwidth


def test_light_work_may_run_at_the_highest_clock() -> None:
    found = hardware.efficiency(Cluster.load("1xh200"), replace(MEASURED, clocks_mhz=(1590.0, 1980.0)))
    assert found.boost == pytest.approx(1.245)
    assert hardware.efficiency(Cluster.load("1xh200"), replace(MEASURED, clocks_mhz=(1995.0, 1980.0))).boost == 1


@pytest.mark.parametrize(
    ("answer", "clocks"),
    [
        ("1590, 1980\n", (1590.0, 1980.0)),
        ("[N/A], 1980\n", None),
        ("0, 0\n", None),
        ("", None),
        ("1, 2\n3, 4\n", None),
    ],
)
def test_clocks_of_nvidia_smi(answer: str, clocks: tuple[float, float] | None) -> None:
    assert nvidia.parse_clocks(answer) == clocks
