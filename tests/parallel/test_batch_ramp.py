"""A batch-size ramp: in every layout each step has its own number of micro-batches, and the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.harness import SEQ, check, training_of

# Of 8 sequences: two steps of 4, then whole batches.
HALF = f"{4 * SEQ}:{8 * SEQ}"


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "mbs": 1},
        {"pp": 2, "mbs": 2},
        {"dp": 2, "tp": 2, "zero": 1, "mbs": 2, "gas": 2},
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (
                {"dp": 2, "zero": 3, "mbs": 2, "gas": 2},
                {"dp": 2, "data_parallel": "ddp", "mbs": 1},
                {"pp": 2, "schedule": "zero-bubble", "mbs": 1, "gas": 8},
                {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "mbs": 2},
                {"pp": 2, "schedule": "dualpipe-v", "virtual_stages": 2, "mbs": 1, "gas": 8},
                {"dp": 2, "pp": 2, "zero": 1, "mbs": 1},
                {"cp": 2, "mbs": 1, "gas": 8},
            )
        ),
    ],
    ids=str,
)
def test_each_layout_is_one_process(layout: dict[str, Any]) -> None:
    ranks = check("llama", training_of(batch_ramp=HALF), evaluate=True, **layout)
    assert len(ranks[0].losses) == 3


@pytest.mark.slow
def test_losses_of_experts_are_means_over_the_steps_own_batch() -> None:
    check("experts", training_of(batch_ramp=HALF, balance_loss=0.02), dp=2, ep=2, mbs=1)
