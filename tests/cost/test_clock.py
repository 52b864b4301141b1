"""Light work at a higher clock: a GPU that its power limits runs the faster the less its matrix units do."""

from __future__ import annotations

import numpy as np
import pytest

from ultrascale import Cluster, Job, Layout, Model, estimate
from ultrascale.cost.columns import Columns
from ultrascale.cost.hardware import FULL_WORK, Machine
from ultrascale.cost.table import evaluate
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.framework import Framework


def job_of(name: str, seq: int, mbs: int, boost: float) -> Job:
    cluster = Cluster.of(Cluster.load("1xh200").gpu, nodes=1, gpus_per_node=1, efficiency=Efficiency(boost=boost))
    engine = Framework.load("ultrascale-gpu")
    return Job(model=Model.load(name), cluster=cluster, seq=seq, batch_tokens=mbs * seq, framework=engine)


@pytest.mark.parametrize(
    ("work", "clock"), [(2 * FULL_WORK, 1.0), (FULL_WORK, 1.0), (FULL_WORK / 1.331, 1.1), (FULL_WORK / 1000, 1.25)]
)
def test_the_clock_goes_with_the_cube_root_of_the_work(work: float, clock: float) -> None:
    machine = Machine(job_of("llama-3.2-1b", 4096, 4, boost=1.25))
    flops = np.asarray([work * machine.attention_peak_flops * machine.sustained["bf16"]])
    assert machine.clock(flops, np.ones(1))[0] == pytest.approx(clock)


def test_a_narrow_model_gains_and_a_wide_one_does_not() -> None:
    """Products of 576 wide keep the matrix units a quarter busy, those of 3072 full."""
    for name, gains in (("smollm2-135m", True), ("llama-3.2-3b", False)):
        plain, light = (estimate(job_of(name, 4096, 2, boost), Layout(mbs=2)).time for boost in (1.0, 1.25))
        assert (light.matmul_s < plain.matmul_s) is gains
        assert (light.attention_s < plain.attention_s) is gains
        assert light.memory_bound_s == plain.memory_bound_s
    assert light == plain


def test_the_search_and_the_estimate_have_one_law() -> None:
    job, layout = job_of("smollm2-135m", 2048, 4, boost=1.25), Layout(mbs=4)
    cells = evaluate(job, Columns.of([layout]), [("1f1b", 1)], Machine(job), 2.0**40)
    assert cells.step_s[0, 0] == pytest.approx(estimate(job, layout).step_time_s, rel=1e-9)
