"""Multi-token prediction under every technique, equal to one process; and one process equal to a formula by hand."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.harness import check, training_of

LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"dp": 2},
    "torch's ddp": {"dp": 2, "data_parallel": "ddp"},
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2": {"dp": 2, "zero": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "zero 3, kept": {"dp": 2, "zero": 3, "keep_gathered": True},
    "hsdp": {"dp": 4, "zero": 3, "zero_shards": 2},
    "tp": {"tp": 2},
    "tp without sp": {"tp": 2, "sequence_parallel": False},
    "pp": {"pp": 2},
    "pp × zero 3": {"pp": 2, "dp": 2, "zero": 3},
    "pp × tp": {"pp": 2, "tp": 2},
    "pp × cp": {"pp": 2, "cp": 2},
    "zero-bubble": {"pp": 2, "schedule": "zero-bubble"},
    "tp × pp, zero-bubble": {"tp": 2, "pp": 2, "schedule": "zero-bubble"},
    "zb-v": {"pp": 2, "schedule": "zb-v", "virtual_stages": 2},
    "cp zigzag": {"cp": 2, "context_parallel": "zigzag"},
    "cp ring": {"cp": 2, "context_parallel": "ring"},
    "cp ulysses": {"cp": 2, "context_parallel": "ulysses"},
    "cp allgather": {"cp": 2, "context_parallel": "allgather"},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "selective, tp": {"tp": 2, "recompute": "selective"},
    "full, tp × zero 3": {"tp": 2, "dp": 2, "zero": 3, "recompute": "full"},
    "tp × cp": {"tp": 2, "cp": 2, "context_parallel": "ulysses"},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep": {"dp": 2, "ep": 2},
    "ep × tp × zero 3": {"dp": 2, "ep": 2, "tp": 2, "zero": 3},
    "ep × pp": {"dp": 2, "ep": 2, "pp": 2},
}
MODELS = ("predicting", "predicting, tied", "predicting, deepseek")
QUICK = ("predicting, pp × cp", "predicting, tied, zb-v", "predicting, deepseek, full, tp × zero 3")


def cases() -> list[Any]:
    found = []
    for model in MODELS:
        for name, fields in {**LAYOUTS, **(EXPERTS if model == "predicting, deepseek" else {})}.items():
            case = f"{model}, {name}"
            found.append(pytest.param(model, fields, id=case, marks=() if case in QUICK else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("model", "fields"), cases())
def test_losses_and_gradients_are_those_of_one_process(model: str, fields: dict[str, Any]) -> None:
    check(model, training_of(z_loss=1e-2), evaluate=True, **fields)
