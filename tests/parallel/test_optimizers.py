"""Optimizers that do more than each element for itself, in layouts against one process: weights after 20 steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from parallel.harness import engine_of, in_ranks, job_of, training_of
from ultrascale.parallel.mesh import Shard
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train.engine import Engine

STEPS = 20
CLOSE = 1e-5
slow = pytest.mark.slow


def trained(engine: Engine) -> list[tuple[Shard, torch.Tensor]]:
    for number in range(engine.training.steps):
        engine.step(number)
    return [(_portable(weight.shard), weight.exact().clone()) for weight in engine.weights]


def _portable(shard: Shard) -> Shard:
    """Without process groups, which cannot be sent to another process."""
    return replace(shard, partial=None, copies=None, pieces=None if shard.pieces is None else replace(shard.pieces, group=None))


@cache
def one_process(job: Job, batch: int, training: Training) -> dict[str, torch.Tensor]:
    return {shard.name: weight for shard, weight in trained(engine_of(job, Layout(mbs=batch), training))}


def check(
    model: str, optimizer: str, close: float = CLOSE, apart: float = 0.0, base_width: int | None = None, **fields: Any
) -> None:
    """`apart`: part of the elements that may differ by more than `close`."""
    job, training, layout = (
        job_of(model, optimizer=optimizer),
        training_of(steps=STEPS, lr=3e-3, mup_base_width=base_width),
        Layout(**{"gas": 2, **fields}),
    )
    wholes = one_process(job, layout.dp * layout.mbs * layout.gas, training)
    seen = dict.fromkeys(wholes, 0)
    for rank, weights in enumerate(in_ranks(trained, job, layout, training)):
        for shard, weight in weights:
            name = shard.name if shard.name in wholes else "embed.tokens.weight"  # a tied head on a stage of its own
            wanted = shard.piece(wholes[name])
            assert weight.shape == wanted.shape
            differs = (weight - wanted).abs() > close
            assert int(differs.sum()) <= apart * len(differs.flatten()), (rank, name, float((weight - wanted).abs().max()))
            seen[name] += weight.numel()
    assert all(seen[name] >= whole.numel() for name, whole in wholes.items())


ZERO_BUBBLE = {"pp": 2, "schedule": "zero-bubble", "gas": 4}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("llama", {"dp": 2, "zero": 3}),
        *(
            pytest.param(*one, marks=slow)
            for one in (
                ("experts", {"dp": 2, "ep": 2}),
                ("llama", {"dp": 4}),
                ("llama", {"dp": 4, "zero": 1}),
                ("qwen2", {"dp": 4, "zero": 2}),
                ("llama", {"dp": 4, "zero": 3, "zero_shards": 2}),
                ("llama", {"dp": 2, "zero": 3, "offload": "parameters"}),
                ("llama", {"dp": 2, "offload": "optimizer"}),
                ("narrow", {"dp": 4, "zero": 3}),  # uneven and empty shards
                ("one-kv-head", {"tp": 4}),
                ("llama", {"tp": 4, "sequence_parallel": False}),
                ("tied", {"tp": 2, "dp": 4, "zero": 3}),
                ("llama", {"tp": 2, "dp": 4, "zero": 3, "zero_shards": 2}),
                ("llama", {"cp": 4, "dp": 2, "zero": 1}),
                ("tied", {"pp": 4, "gas": 4}),
                ("llama", {**ZERO_BUBBLE, "dp": 4, "zero": 2}),
                ("tied", {**ZERO_BUBBLE, "dp": 2, "tp": 2, "zero": 3}),
                ("eight", {"pp": 2, "schedule": "zb-v", "virtual_stages": 2, "gas": 4, "dp": 2, "tp": 2, "zero": 1}),
                ("latent", {"tp": 2, "dp": 2, "zero": 3}),
                ("qwen2-moe", {"dp": 4, "ep": 2, "tp": 2}),
                ("experts", {"dp": 2, "ep": 2, "tp": 2}),
                ("experts", {"dp": 3, "zero": 3}),  # three experts, three, and two
                ("experts", {"dp": 4, "ep": 4, "zero": 2, "tp": 2}),
                ("two-experts", {"dp": 8, "ep": 2, "zero": 3}),  # each expert in four slices
                ("eight-experts", {"pp": 2, "gas": 4, "dp": 4, "ep": 2, "zero": 1}),
            )
        ),
    ],
    ids=str,
)
def test_muon(model: str, fields: dict[str, Any]) -> None:
    """Matrices are gathered from whatever cuts them, and orthogonalised once."""
    check(model, "muon", **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("llama", {"dp": 2, "zero": 3}),
        *(
            pytest.param(*one, marks=slow)
            for one in (
                ("narrow", {"dp": 4, "zero": 3}),
                ("tied", {**ZERO_BUBBLE, "dp": 2, "tp": 2, "zero": 1}),
                ("two-experts", {"dp": 8, "ep": 2, "zero": 3}),
                ("qwen2-moe", {"dp": 4, "ep": 2, "tp": 2}),
            )
        ),
    ],
    ids=str,
)
def test_adamw_with_moments_in_bf16(model: str, fields: dict[str, Any]) -> None:
    """The random bits are the same; what is 10⁻⁷ apart before rounding is seldom an ulp of bf16, 2⁻⁸, apart after it."""
    check(model, "adamw-bf16", 1e-4, **fields)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("llama", {"dp": 2, "zero": 3}),
        *(
            pytest.param(*one, marks=slow)
            for one in (
                ("llama", {"tp": 2}),
                ("narrow", {"dp": 4, "zero": 3}),
                ("tied", {**ZERO_BUBBLE, "dp": 2, "tp": 2, "zero": 1}),
                ("two-experts", {"dp": 8, "ep": 2, "zero": 3}),
                ("qwen2-moe", {"dp": 4, "ep": 2, "tp": 2}),
            )
        ),
    ],
    ids=str,
)
def test_adamw_with_moments_in_8_bits(model: str, fields: dict[str, Any]) -> None:
    """As in bf16; where rounding turns a bit, a moment is an eighth apart, and its weight up to a tenth of a step."""
    check(model, "adamw-8bit", 1e-4, apart=0.05, **fields)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        pytest.param("llama", {"tp": 2}, marks=slow),
        pytest.param("qwen2-moe", {"dp": 4, "ep": 2, "tp": 2, "zero": 2}, marks=slow),
    ],
    ids=str,
)
def test_lion(model: str, fields: dict[str, Any]) -> None:
    """Rounding may turn the sign of an update that is nearly zero: that weight is two steps away then, alone."""
    check(model, "lion", apart=0.01, **fields)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "optimizer", "fields"),
    [
        ("llama", "adamw", {"dp": 2, "zero": 3}),
        *(
            pytest.param(*one, marks=slow)
            for one in (
                ("deepseek", "adamw", {"dp": 4, "ep": 2, "tp": 2}),
                ("llama", "lion", {**ZERO_BUBBLE, "dp": 2, "tp": 2, "zero": 1}),
                ("llama", "adamw", {"cp": 2, "tp": 2, "dp": 2, "zero": 2}),
            )
        ),
    ],
    ids=str,
)
def test_mup(model: str, optimizer: str, fields: dict[str, Any]) -> None:
    """Initial values and learning rates by a weight's role."""
    check(model, optimizer, 1e-4 if optimizer == "lion" else CLOSE, base_width=8, **fields)
