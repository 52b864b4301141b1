"""Attention within documents: several packed into one row give what each gives alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from model.builders import initialize
from ultrascale.model.self_attention import CausalAttention
from ultrascale.model.transformer import Transformer
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build

SHAPE: dict[str, Any] = {"name": "x", "layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64}
LENGTHS = ([5, 1, 9, 9], [24])  # of the documents in two rows


def model_of(**fields: Any) -> Transformer:
    model = build(Model, {**SHAPE, **fields}, "model")
    module = Transformer(model)
    initialize(module, 0, model)
    return module.double()


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and documents, [2, 24]."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS]
    return torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1)), torch.stack(rows)


@pytest.mark.parametrize("fields", [{}, {"sliding_window": 4}, {"qk_norm": True}, {"kv_heads": 4, "tied_embeddings": True}])
def test_packed_documents_equal_separate_ones(fields: dict[str, Any]) -> None:
    """Positions run on within a row, but a rotation only knows distances."""
    module = model_of(**fields)
    tokens, documents = packed()
    logits = module(tokens, torch.arange(24), None, documents)
    loss = module(tokens, torch.arange(24), tokens, documents)
    alone_loss = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            mine = tokens[row : row + 1, start : start + length]
            alone = module(mine, torch.arange(length))
            torch.testing.assert_close(logits[row : row + 1, start : start + length], alone, rtol=1e-6, atol=1e-6)
            alone_loss += module(mine, torch.arange(length), mine)
            start += length
    torch.testing.assert_close(loss, alone_loss)
    unmasked = module(tokens, torch.arange(24))
    assert not torch.allclose(unmasked[0, 6:], logits[0, 6:], atol=1e-3)
    torch.testing.assert_close(unmasked[1], logits[1])


def test_learned_positions_continue_and_attention_stays_within_documents() -> None:
    module = model_of(positions="learned", max_positions=32, kv_heads=4)
    tokens, documents = packed()
    logits = module(tokens, torch.arange(24), None, documents)
    alone = module(tokens[:1, 6:15], torch.arange(6, 15))
    torch.testing.assert_close(logits[:1, 6:15], alone, rtol=1e-6, atol=1e-6)


def test_no_gradient_crosses_the_end_of_a_document() -> None:
    q, k, v = (torch.randn(1, 6, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    documents = torch.tensor([0, 0, 1, 1, 1, 1])
    mask = (documents.unsqueeze(1) == documents).tril()
    bias = torch.zeros(1, 1, 6, 6, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    CausalAttention()(q, k, v, bias)[:, 2:].sum().backward()
    assert v.grad is not None
    assert not v.grad[:, :2].any()
    assert v.grad[:, 2:].any()
