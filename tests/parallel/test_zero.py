"""ZeRO 1 to 3, HSDP and offload against one process, in the pipeline's schedules too; shards that are uneven or empty."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.harness import check
from parallel.test_pipeline import SCHEDULES, every_schedule

slow = pytest.mark.slow
stages = pytest.mark.parametrize("zero", [1, 2, 3])


@stages
@pytest.mark.parametrize("family", ["gpt2", pytest.param("qwen2", marks=slow)])
def test_two_ranks(family: str, zero: int) -> None:
    check(family, dp=2, gas=3, zero=zero)


@pytest.mark.quick_cases("accumulation-1", "zero-bubble-3", "hsdp-2")
@stages
@pytest.mark.parametrize(
    "fields",
    [{"gas": 2}, {"pp": 2, "gas": 4, "schedule": "zero-bubble"}, {"gas": 2, "zero_shards": 2, "dp": 4}],
    ids=["accumulation", "zero-bubble", "hsdp"],
)
def test_steps_after_an_evaluation(zero: int, fields: dict[str, Any]) -> None:
    """An evaluation leaves parameters gathered; the next step must begin with no gradient on the shards all the same."""
    check("tied", evaluate=True, **{"dp": 2, "zero": zero, **fields})


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=slow), 3])
def test_uneven_and_empty_shards(zero: int) -> None:
    """Four ranks share two rows of a key's weight and five of the MLP's: some hold less, some nothing."""
    check("narrow", dp=4, gas=1, zero=zero)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=slow), 2, pytest.param(3, marks=slow)])
def test_shards_of_three_ranks(zero: int) -> None:
    check("odd-vocabulary", dp=3, gas=2, zero=zero)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3])
def test_hsdp(zero: int) -> None:
    check("tied", dp=4, gas=2, zero=zero, zero_shards=2)


@pytest.mark.parametrize("policy", ["none", *(pytest.param(policy, marks=slow) for policy in ("selective", "full"))])
def test_kept_gathered(policy: str) -> None:
    check("tied", dp=2, gas=2, zero=3, keep_gathered=True, recompute=policy)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"zero": 0, "offload": "optimizer"}, marks=slow),
        pytest.param({"zero": 1, "offload": "optimizer"}, marks=slow),
        {"zero": 3, "offload": "optimizer"},
        {"zero": 3, "offload": "parameters"},
    ],
)
def test_offload(fields: dict[str, Any]) -> None:
    check("tied", dp=2, gas=2, **fields)


@slow
@stages
@every_schedule
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_in_every_schedule(name: str, zero: int, policy: str) -> None:
    check("tied", dp=2, pp=2, zero=zero, recompute=policy, **SCHEDULES[name])


@pytest.mark.parametrize(("name", "zero"), [pytest.param("1f1b", 1, marks=slow), ("zero-bubble", 2), ("zb-v", 3)])
def test_in_a_pipeline(name: str, zero: int) -> None:
    check("tied", dp=2, pp=2, zero=zero, recompute="full", **SCHEDULES[name])


def test_with_context_and_tensor_parallelism() -> None:
    """Shards go over dp and cp together."""
    check("gpt2", dp=2, cp=2, gas=1, zero=3)
    check("qwen3", dp=2, tp=2, gas=1, zero=2)


@slow
def test_with_everything() -> None:
    check("gpt2", dp=2, cp=2, pp=2, gas=4, zero=3, zero_shards=2)
    check("qwen3", dp=2, tp=2, pp=2, zero=3, recompute="selective", **SCHEDULES["dualpipe-v"])
