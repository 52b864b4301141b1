"""Half precision: layouts against one process in the same format, fp32 masters, and fp16's loss scale."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.harness import gradient_errors, in_ranks, job_of, one_process, relative, train, training_of
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.train.engine import Engine
from ultrascale.train.optimizer import LossScale

# Matmuls in half precision are slow on a CPU without it.
MODEL = Model(name="small", layers=2, hidden=16, heads=2, kv_heads=1, ffn=32, vocab=32, tied_embeddings=True)
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
slow = pytest.mark.slow

LAYOUTS: list[Any] = [
    {},
    {"dp": 2},
    {"dp": 2, "zero": 3},
    {"tp": 2},
    pytest.param({"pp": 2, "schedule": "zero-bubble"}, marks=slow),
    pytest.param({"cp": 2}, marks=slow),
    pytest.param({"pp": 2, "schedule": "1f1b"}, marks=slow),
    pytest.param({"dp": 2, "data_parallel": "hooks"}, marks=slow),
    pytest.param({"dp": 2, "zero": 1}, marks=slow),
    pytest.param({"dp": 2, "offload": "optimizer"}, marks=slow),
    pytest.param({"dp": 2, "zero": 3, "offload": "parameters"}, marks=slow),
    pytest.param({"recompute": "full"}, marks=slow),
]


@pytest.mark.quick_cases(every=5)
@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
@pytest.mark.parametrize(("precision", "gradients"), [("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "bf16")])
def test_against_one_process(precision: str, gradients: str, fields: dict[str, Any]) -> None:
    """Sums in another order round otherwise, a few times in the last bit of the format."""
    job, training, layout = _job(precision, gradients=gradients), training_of(loss_scale=1024.0), Layout(**{"gas": 2, **fields})
    ranks = in_ranks(train, job, layout, training)
    reference = one_process(job, layout.dp * layout.gas, training)
    close = ROUNDING[precision] * (4 if gradients == "fp32" else 8)
    assert max(gradient_errors(ranks, reference, job).values()) < close
    for result in ranks:
        assert relative(result.losses, reference.losses) < close / 10
        assert relative(result.norms, reference.norms) < close
    assert all(piece.gradient.dtype == torch.float32 for result in ranks for piece in result.pieces) or gradients == "bf16"


def _job(precision: str, **fields: Any) -> Any:
    return job_of(MODEL, seq=16, precision=precision, **fields)


def test_it_is_near_fp32() -> None:
    exact = one_process(_job("fp32"), 2, training_of())
    for precision in ("bf16", "fp16"):
        result = one_process(_job(precision), 2, training_of(loss_scale=1024.0))
        assert relative(result.losses, exact.losses) < ROUNDING[precision]
        assert result.losses != exact.losses  # it did compute in another format
        # Gradients still carry the factor: it goes when they are used.
        scale = 1024.0 if precision == "fp16" else 1.0
        lengths = [float(piece.gradient.norm()) / scale for piece in result.pieces]
        assert relative(lengths, [float(piece.gradient.norm()) for piece in exact.pieces]) < 0.1


def _masters(engine: Engine) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Name, master before, master after and what computes after a step too small for half precision to see."""
    before = [weight.master.clone() for weight in engine.weights]
    engine.step(0)
    return [(w.shard.name, old, w.master.clone(), w.local.clone()) for old, w in zip(before, engine.weights, strict=True)]


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize("fields", [{}, {"dp": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_masters_keep_what_half_precision_cannot(fields: dict[str, Any]) -> None:
    training = training_of(lr=1e-6, weight_decay=0.0)
    for masters in in_ranks(_masters, _job("bf16"), Layout(**fields), training):
        for name, before, after, computes in masters:
            assert before.dtype == after.dtype == torch.float32
            if "norm" in name and after.numel():
                assert torch.equal(before, torch.ones_like(before))
                # A step of 10⁻⁶ from 1: 8 bits of fp32, nothing in bf16.
                assert 0 < float((after - before).abs().max()) < 2e-6
                assert fields.get("zero") or torch.equal(computes, torch.ones_like(computes))
            assert fields.get("zero") or (computes.dtype == torch.bfloat16 and torch.equal(computes, after.bfloat16()))
        rounded = [bool((before != before.bfloat16().float()).any()) for name, before, _, _ in masters if "norm" not in name]
        assert any(rounded)  # the first weights are not those of a half-precision copy


def _overflow(engine: Engine) -> tuple[list[bool], list[float], bool, list[float]]:
    """Which steps were skipped, the scale after each, whether skipped steps left weights and moments alone, all losses."""
    skipped, scales, alone, losses = [], [], True, []
    for step in range(engine.training.steps):
        before = [weight.master.clone() for weight in engine.weights] + [x.clone() for x in engine.optimizer.state_tensors()]
        result = engine.step(step)
        after = [weight.master for weight in engine.weights] + engine.optimizer.state_tensors()
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        alone &= same == result.skipped
        skipped.append(result.skipped)
        scales.append(engine.scale.value)
        losses.append(result.loss)
    return skipped, scales, alone, losses


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize(
    "fields",
    [{}, {"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, pytest.param({"pp": 2, "gas": 2}, marks=slow)],
    ids=str,
)
def test_an_overflow_skips_the_step_on_every_rank(fields: dict[str, Any]) -> None:
    training = training_of(steps=24, loss_scale=2.0**30, loss_scale_window=3)
    ranks = in_ranks(_overflow, _job("fp16"), Layout(**fields), training)
    skipped, scales, alone, losses = ranks[0]
    assert all(rank == ranks[0] for rank in ranks)
    assert alone
    first = skipped.index(False)
    assert 3 < first < 20
    assert scales[:first] == [2.0 ** (30 - step) for step in range(1, first + 1)]
    assert scales[first : first + 3] == [scales[first - 1], scales[first - 1], 2 * scales[first - 1]]
    assert all(torch.isfinite(torch.tensor(losses)))  # the forward does not know the scale


def test_the_scale_doubles_after_its_window_and_never_falls_below_one() -> None:
    scale = LossScale(training_of(loss_scale=4.0, loss_scale_window=2), used=True)
    scales = []
    for overflow in (False, False, False, True, False, False, True, True, True, True):
        scale.update(overflow)
        scales.append(scale.value)
    assert scales == [4, 8, 8, 4, 4, 8, 4, 2, 1, 1]
    unused = LossScale(training_of(loss_scale=4.0), used=False)
    unused.update(overflow=True)
    assert unused.value == 1
