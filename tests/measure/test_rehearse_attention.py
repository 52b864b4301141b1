"""FLOPs of attention as a GPU's kernels are called: fewer heads of keys than of queries, the causal mask as their argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ultrascale.measure.rehearse_tracker import _formula

aten = torch.ops.aten
BATCH, HEADS, KV_HEADS, SEQ, WIDTH = 2, 8, 2, 64, 16
FULL = 2 * 2 * BATCH * HEADS * SEQ * SEQ * WIDTH  # two matmuls, a multiplication and an addition each


def arguments(func: Any, causal: bool) -> list[Any]:
    """As torch would call it, by the names of its schema; what no formula reads is None."""
    heads = {"query": HEADS, "key": KV_HEADS, "value": KV_HEADS}
    given: list[Any] = []
    for one in func._schema.arguments:
        if one.name in heads:
            given.append(torch.empty(BATCH, heads[one.name], SEQ, WIDTH, device="meta"))
        else:
            given.append(causal if one.name == "is_causal" else None)
    return given


@pytest.mark.parametrize("kind", ["flash", "cudnn", "efficient"])
def test_every_query_head_counts_once(kind: str) -> None:
    forward = getattr(aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kind}_attention_backward").default
    for func, times in ((forward, 1), (backward, 2)):
        formula = _formula(func)
        assert formula is not None
        assert formula(arguments(func, causal=True), {}, None) == times * FULL / 2
        assert formula(arguments(func, causal=False), {}, None) == times * FULL
