"""A batch-size ramp, and stages of sequence length: in every layout each step has its own number of micro-batches, or of
sequences, and the numbers of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.harness import SEQ, check, engine_of, job_of, training_of
from ultrascale.specs.layout import Layout

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


# Sequences of a quarter, of half and of the whole length, in a step each.
SHORTER = f"{SEQ // 4}:1,{SEQ // 2}:{2 * 6 * SEQ}"


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", {"dp": 2, "tp": 2, "zero": 3}),
        ("llama", {"pp": 2, "mbs": 2, "gas": 3}),
        ("window", {"cp": 2, "context_parallel": "ulysses", "mbs": 2}),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (
                ("llama", {"dp": 2, "mbs": 3, "gas": 1}),
                ("llama", {"cp": 2, "context_parallel": "zigzag", "mbs": 2}),
                ("llama", {"cp": 2, "context_parallel": "ring", "tp": 2, "mbs": 2}),
                ("llama", {"pp": 2, "tp": 2, "schedule": "zero-bubble", "mbs": 1, "gas": 6}),
                ("llama", {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "mbs": 1, "gas": 6, "recompute": "full"}),
                ("qwen3-next-family", {"dp": 2, "tp": 2, "mbs": 3, "gas": 1}),
                ("nemotron-h-family", {"cp": 2, "context_parallel": "ulysses", "mbs": 2}),
                ("llama4-family", {"dp": 2, "ep": 2, "mbs": 3, "gas": 1}),
                ("predicting", {"pp": 2, "mbs": 2, "gas": 3}),
            )
        ),
    ],
    ids=str,
)
def test_each_layout_is_one_process_with_shorter_sequences(model: str, layout: dict[str, Any]) -> None:
    balance = {"balance_loss": 0.02} if model == "llama4-family" else {}
    ranks = check(model, training_of(seq_stages=SHORTER, **balance), evaluate=True, **layout)
    assert len(ranks[0].losses) >= 3


def test_shorter_sequences_have_the_same_text() -> None:
    layout = Layout(mbs=2, gas=3)
    plain, shorter = (engine_of(job_of("llama"), layout, training_of(seq_stages=one)) for one in (None, SHORTER))
    for step, parts in enumerate((4, 2, 1)):
        whole, cut = (engine.read(step) for engine in (plain, shorter))
        for (tokens, targets), (short_tokens, short_targets) in zip(whole.microbatches, cut.microbatches, strict=True):
            assert short_tokens.shape == (2 * parts, SEQ // parts)
            assert torch.equal(short_tokens.view(2, SEQ), tokens)
            assert torch.equal(short_targets.view(2, SEQ), targets)
        assert cut.positions.tolist() == list(range(SEQ // parts))
        assert cut.losses == whole.losses
    assert shorter.read(0, held_out=True).positions.tolist() == list(range(SEQ))
