"""The z-loss in every layout against one process, by the plain and by the chunked loss; and what it does to the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.harness import check, engine_of, job_of, one_process, train, training_of
from ultrascale.kernels import selection
from ultrascale.kernels.selection import Kernels
from ultrascale.specs.layout import Layout
from ultrascale.train import supported

slow = pytest.mark.slow
TRAINING = training_of(z_loss=0.2)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "zero 1": {"dp": 2, "zero": 1, "gas": 2},
    "zero 3, full recompute": {"dp": 2, "zero": 3, "recompute": "full", "gas": 2, "mbs": 2},
    "tp": {"tp": 2, "sequence_parallel": False, "gas": 2},
    "tp with sequences": {"tp": 2, "gas": 2, "mbs": 2},
    "cp": {"cp": 2, "gas": 2},
    "pp": {"pp": 2},
    "pp split, tp": {"pp": 2, "tp": 2, "schedule": "zero-bubble"},
    "v schedule": {"pp": 2, "schedule": "zb-v", "virtual_stages": 2},
    "tp zero 2": {"tp": 2, "dp": 2, "zero": 2, "gas": 2},
}


@pytest.mark.quick_cases("zero 3, full recompute", "tp with sequences", "v schedule")
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_equal_one_process(name: str) -> None:
    check("tied" if "pp" in LAYOUTS[name] else "llama", TRAINING, evaluate=True, **LAYOUTS[name])


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("qwen2-moe", {"tp": 2, "gas": 2}),
        pytest.param("gemma-family", {"tp": 2, "gas": 2}, marks=slow),  # of capped logits
        pytest.param("experts", {"dp": 2, "ep": 2, "gas": 2}, marks=slow),
        pytest.param("llama", {"dp": 2, "data_parallel": "ddp"}, marks=slow),
    ],
)
def test_models(model: str, fields: dict[str, Any]) -> None:
    check(model, TRAINING, **fields)


@pytest.mark.quick_cases("tp with sequences")
@pytest.mark.parametrize("name", ["dp", "tp", "tp with sequences", "pp split, tp", "tp zero 2"])
def test_chunked_losses_equal_one_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = Kernels(fused=True, loss=True)
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: fused if layout.gpus > 1 else Kernels())
    check("llama", TRAINING, evaluate=True, **LAYOUTS[name])


def test_it_is_reported_beside_the_cross_entropy() -> None:
    with_z, without = (engine_of(job_of("llama"), Layout(mbs=2), training_of(z_loss=weight)) for weight in (0.2, 0.0))
    found, plain = with_z.step(0), without.step(0)
    assert found.loss == plain.loss
    assert plain.z_loss is None
    # Logits of small random weights are near 0, so that their log-sum-exp is near log(vocabulary).
    assert found.z_loss == pytest.approx(0.2 * torch.tensor(64.0).log().item() ** 2, rel=0.05)
    assert found.grad_norm > 1.05 * plain.grad_norm
    assert with_z.evaluate(1) != without.evaluate(1)  # of other weights by now


def test_it_pulls_the_log_sum_exp_to_zero() -> None:
    training = training_of(z_loss=0.2, steps=30)
    sizes = train(engine_of(job_of("llama"), Layout(mbs=4), training)).losses[1::2]
    assert sizes[-1] < 0.1 * sizes[0]
    assert one_process(job_of("llama"), 4, training).losses[1::2] == sizes


def test_fp8_has_room_for_a_small_one() -> None:
    job = job_of("llama", precision="fp8")
    assert supported.layout_problem(job, Layout(), training_of(z_loss=1e-3)) is None
    problem = supported.layout_problem(job, Layout(), training_of(z_loss=0.01))
    assert problem == (
        "train.z_loss is 0.01 but gradients of logits in fp8 have room for 0.001 at most: try 0.001, or job.precision=bf16"
    )
