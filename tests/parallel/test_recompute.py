"""Recomputation: the same numbers, and exactly those operators a second time that the policy names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.harness import check, engine_of, job_of, training_of
from ultrascale.specs.layout import Layout

aten = torch.ops.aten
LAYERS = 4


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "window"])
def test_against_none(family: str, policy: str) -> None:
    check(family, gas=2, recompute=policy)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_with_zero_3(policy: str) -> None:
    """What is computed again finds its layer gathered again."""
    check("gpt2", dp=2, gas=2, zero=3, recompute=policy)


class _CallCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def _call_counts(family: str, policy: str) -> Counter[Any]:
    engine = engine_of(job_of(family), Layout(recompute=policy), training_of())
    with _CallCounter() as counter:
        engine.backward(engine.read(0))
    return counter.calls


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recomputed_operators(family: str) -> None:
    plain, selective, full = (_call_counts(family, policy) for policy in ("none", "selective", "full"))
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert (plain[attention], selective[attention], full[attention]) == (LAYERS, LAYERS, 2 * LAYERS)
    matmuls = [sum(calls[op] for op in (aten.mm.default, aten.addmm.default)) for calls in (plain, selective, full)]
    # The last matmul of a block is the input of the next one: no backward needs it.
    per_block = 7 if family == "llama" else 6
    assert matmuls == [matmuls[0], matmuls[0], matmuls[0] + LAYERS * (per_block - 1)]
    cheap = aten.silu.default if family == "llama" else aten.native_layer_norm.default
    assert selective[cheap] > plain[cheap]
