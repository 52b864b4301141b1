"""Blocks of other families than Llama: each under every technique, equal to one process."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.harness import check, training_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "tp without sp": {"tp": 2, "sequence_parallel": False},
    "tp 4": {"tp": 4},
    "pp": {"pp": 2},
    "zb-v": {"pp": 2, "schedule": "zb-v", "virtual_stages": 2},
    "cp ulysses": {"cp": 2, "context_parallel": "ulysses"},
    "cp ring": {"cp": 2, "context_parallel": "ring"},
    "cp zigzag": {"cp": 2, "context_parallel": "zigzag"},
    "cp allgather": {"cp": 2, "context_parallel": "allgather"},
    "full": {"recompute": "full"},
    "selective, tp": {"tp": 2, "recompute": "selective"},
    "full, tp × zero 3": {"tp": 2, "dp": 2, "zero": 3, "recompute": "full"},
    "tp × pp, zero-bubble": {"tp": 2, "pp": 2, "schedule": "zero-bubble"},
    "tp × cp": {"tp": 2, "cp": 2, "context_parallel": "ulysses"},
    "hsdp": {"dp": 4, "zero": 3, "zero_shards": 2},
}
MODELS = (
    "latent",
    "deepseek-family",
    "gemma-family",
    "gpt-oss-family",
    "llama4-family",
    "qwen3-next-family",
    "nemotron-h-family",
    "mamba",
    "hybrid-experts",
    "sinks",
    "olmo-family",
    "cohere-family",
    "neox",
)
EXPERTS: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2},
    "ep × tp × zero 3": {"dp": 2, "ep": 2, "tp": 2, "zero": 3},
}
WITH_EXPERTS = ("deepseek-family", "gpt-oss-family", "llama4-family", "hybrid-experts")
QUICK = (
    "gpt-oss-family, ep × tp × zero 3",
    "llama4-family, tp × cp",
    "qwen3-next-family, full, tp × zero 3",
    "nemotron-h-family, tp × pp, zero-bubble",
    "mamba, cp zigzag",
    "latent, cp zigzag",
    "deepseek-family, full, tp × zero 3",
)


def cases() -> list[Any]:
    found = []
    for model in MODELS:
        for name, fields in {**LAYOUTS, **(EXPERTS if model in WITH_EXPERTS else {})}.items():
            tiled = fields.get("context_parallel", "ulysses") != "ulysses"
            if model in ("gemma-family", "gpt-oss-family", "llama4-family") and tiled:
                continue  # windows and capped scores are not cut in tiles
            if model == "sinks" and not tiled:
                continue  # as gpt-oss
            case = f"{model}, {name}"
            found.append(pytest.param(model, fields, id=case, marks=() if case in QUICK else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("model", "fields"), cases())
def test_losses_and_gradients_are_those_of_one_process(model: str, fields: dict[str, Any]) -> None:
    check(model, training_of(balance_loss=0.01) if model in WITH_EXPERTS else None, **fields)
