"""Low-rank adapters on frozen weights: under every technique, equal to one process."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.harness import check, training_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2, "data_parallel": "ddp"},
    "bucketed": {"dp": 2},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "hsdp": {"dp": 4, "zero": 3, "zero_shards": 2},
    "tp": {"tp": 2},
    "tp without sp": {"tp": 2, "sequence_parallel": False},
    "tp 4, two kv heads": {"tp": 4},
    "tp 4 without sp": {"tp": 4, "sequence_parallel": False},
    "pp": {"pp": 2},
    "zero-bubble": {"pp": 2, "schedule": "zero-bubble"},
    "zb-v, tp": {"pp": 2, "tp": 2, "schedule": "zb-v", "virtual_stages": 2},
    "cp ulysses": {"cp": 2, "context_parallel": "ulysses"},
    "cp zigzag, tp": {"cp": 2, "tp": 2},
    "selective": {"recompute": "selective"},
    "full, tp × zero 3": {"tp": 2, "dp": 2, "zero": 3, "recompute": "full"},
    "zero-bubble, zero 2": {"pp": 2, "dp": 2, "zero": 2, "schedule": "zero-bubble"},
    "offload": {"dp": 2, "zero": 3, "offload": "optimizer"},
}
QUICK = ("full, tp × zero 3", "zb-v, tp")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYOUTS])
def test_losses_and_gradients_are_those_of_one_process(name: str) -> None:
    check("qwen2", adapter_rank=4, **LAYOUTS[name])


EXPERTS: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2},
    "ep × tp × zero 3": {"dp": 2, "ep": 2, "tp": 2, "zero": 3},
    "zero 3, sliced": {"dp": 4, "zero": 3},
    "zero-bubble, ep": {"pp": 2, "dp": 2, "ep": 2, "schedule": "zero-bubble"},
}
BESIDE_EXPERTS = ("latent", "deepseek-family", "qwen2-moe", "two-experts")
QUICK_BESIDE_EXPERTS = ("deepseek-family, ep × tp × zero 3", "latent, tp without sp")


def cases_beside_experts() -> list[Any]:
    found = []
    for model in BESIDE_EXPERTS:
        for name, fields in {**LAYOUTS, **(EXPERTS if model != "latent" else {})}.items():
            case = f"{model}, {name}"
            if model == "two-experts" and name != "zero 3, sliced":
                continue
            found.append(pytest.param(model, fields, id=case, marks=() if case in QUICK_BESIDE_EXPERTS else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("model", "fields"), cases_beside_experts())
def test_beside_experts_and_latent_attention(model: str, fields: dict[str, Any]) -> None:
    overlap = "gradients" if fields.get("ep", 1) > 1 else "auto"
    # Rounding of the first update is in the gradients of the second step.
    check(model, training_of(expert_overlap=overlap), close=3e-5, adapter_rank=4, **fields)


@pytest.mark.slow
def test_beside_q_k_and_v_alone() -> None:
    check("llama", adapter_rank=4, adapter_targets="qkv", tp=2, dp=2, zero=3)
    check("gpt2", adapter_rank=4, tp=2, sequence_parallel=False)
    check("deepseek-family", adapter_rank=4, adapter_targets="qkv", tp=2, dp=2, zero=3)
