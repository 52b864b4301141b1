"""Expert computation that overlaps the all-to-all: what it hides, what it costs, and that it is never slower."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builders import make_job
from ultrascale.cost import communication
from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.communication import ExpertTraffic
from ultrascale.cost.estimate import estimate
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.operators import layer_matmuls, matmul_passes
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout


def job_of(name: str, seq: int, overlap: bool = True, gpus: int = 8) -> Job:
    engine = Framework.load("ultrascale").model_copy(update={"expert_overlap": "weight-gradients" if overlap else "none"})
    return make_job(name, f"{gpus}xh100", seq, gpus, engine)


def of(job: Job, **fields: Any) -> tuple[ExpertTraffic, bool]:
    row = LayoutColumns.of([Layout(**{"dp": job.cluster.gpus, **fields})])
    work = Workload(job, row, ClusterRates(job))
    return communication.expert_traffic(work), bool(communication.local_tokens_first(work)[0])


def one(value: Any) -> float:
    return float(np.ravel(value)[0])


def test_weight_gradients_overlap_one_backward_all_to_all() -> None:
    """Mixtral's are long: all of that all_to_all hides, at the price of computing that shares the GPU with it."""
    (found, rows_first), (plain, _) = of(job_of("mixtral-8x7b", 4096), ep=8), of(job_of("mixtral-8x7b", 4096, False), ep=8)
    all_to_all, constants = one(plain.all_to_all.time_s), job_of("mixtral-8x7b", 4096).cluster.efficiency
    assert not rows_first
    assert one(plain.backward_s) == pytest.approx(2 * all_to_all)
    assert one(found.backward_s) == pytest.approx(all_to_all + constants.overlap_slowdown * all_to_all)
    assert one(found.forward_s) == one(plain.forward_s)
    assert one(found.overlapped_backward_s) == pytest.approx(all_to_all / constants.overlap)


def test_deferred_weight_gradients_leave_nothing_to_overlap() -> None:
    layout = {"dp": 4, "pp": 2, "ep": 4, "gas": 4}
    split, _ = of(job_of("mixtral-8x7b", 4096), schedule="zero-bubble", **layout)
    whole, _ = of(job_of("mixtral-8x7b", 4096), schedule="1f1b", **layout)
    assert one(split.backward_s) == pytest.approx(2 * one(split.all_to_all.time_s))
    assert one(whole.backward_s) < one(split.backward_s)


def test_splitting_local_rows_pays_off_with_full_tiles() -> None:
    """An eighth of 16,384 tokens of two experts each is 4096 rows a rank, of one expert; of 512 tokens it is 128."""
    few, many = (of(job_of("mixtral-8x7b", seq), ep=8) for seq in (512, 16384))
    assert (few[1], many[1]) == (False, True)
    job = job_of("mixtral-8x7b", 16384)
    row, machine = LayoutColumns.of([Layout(dp=8, ep=8)]), ClusterRates(job)
    matmuls = [matmul for matmul in layer_matmuls(job, row, LayerKind(mlp="moe")) if matmul.name.startswith("expert ")]
    eighth = [type(matmul)(matmul.name, matmul.m / 8, matmul.n, matmul.k, matmul.count) for matmul in matmuls]
    staying = one(matmul_passes(machine, eighth).forward)
    assert one(many[0].overlapped_forward_s) == pytest.approx(
        min(staying, one(many[0].all_to_all.time_s) / machine.efficiency.overlap)
    )


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3"])
@pytest.mark.parametrize("ep", [2, 4, 8])
@pytest.mark.parametrize("seq", [256, 4096, 32768])
def test_overlap_is_never_slower_than_none(name: str, ep: int, seq: int) -> None:
    found, _ = of(job_of(name, seq), ep=ep)
    plain, _ = of(job_of(name, seq, overlap=False), ep=ep)
    assert one(found.forward_s + found.backward_s) <= one(plain.forward_s + plain.backward_s) * (1 + 1e-9)
    assert one(found.all_to_all.wire_bytes) == one(plain.all_to_all.wire_bytes)


def test_without_ep_nothing_is_overlapped() -> None:
    found, rows_first = of(job_of("mixtral-8x7b", 4096), ep=1)
    assert (one(found.forward_s), one(found.backward_s), rows_first) == (0, 0, False)


def test_overlap_shortens_the_step() -> None:
    overlapped, plain = (
        estimate(job_of("mixtral-8x7b", 4096, flag), Layout(dp=8, ep=8, zero=1, recompute="full")) for flag in (True, False)
    )
    assert overlapped.time.expert_s < plain.time.expert_s
    assert overlapped.step_time_s < plain.step_time_s
    assert overlapped.peak_gib == plain.peak_gib
