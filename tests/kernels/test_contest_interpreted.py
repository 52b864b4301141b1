"""The contests with their Triton kernels, ours and Liger's, by Triton's interpreter: test_contest.py starts this file so."""

from __future__ import annotations

import os
from importlib import import_module

import pytest
import torch

from ultrascale.cli.bench import kernel_contest
from ultrascale.kernels import fused
from ultrascale.specs.model import Model

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton does not interpret")

kernels = kernel_contest()  # which adds its folder to sys.path
cases = import_module("kernel_contest.cases")
SMALL = kernels.KernelShape(
    Model(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16, vocab=96, rope_theta=1e4), mbs=1, seq=6
)


def difference(kernel: str, candidate: str, dtype: torch.dtype) -> float:
    comparison = cases.CASES[kernel](SMALL, torch.device("cpu"), dtype)
    found = []
    for name in ("eager", candidate):
        one = comparison.candidates[name]()
        outputs = one.run()
        found.append(tuple(output.clone() for output in (outputs if one.result is None else one.result())))
    return kernels.difference(found[1], found[0])


@pytest.mark.parametrize("kernel", ["norm", "rotary", "gate"])
def test_ours(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ultrascale.kernels import fused_triton

    for name in ("norm", "norm_backward", "gate", "gate_backward"):
        monkeypatch.setattr(fused, name, getattr(fused_triton, name))
    monkeypatch.setattr(fused, "rotate_", lambda qkv, heads, kv_heads, rope: fused_triton.rotate_(qkv, heads, kv_heads, *rope))
    monkeypatch.setattr(fused, "rotate_back", lambda q, k, v, rope: fused_triton.rotate_back(q, k, v, *rope))
    assert difference(kernel, "ours", torch.float32) < 1e-5


def test_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "LAYERS", 1)
    assert difference("adamw", "ours", torch.bfloat16) < 1e-4


@pytest.mark.skipif(not cases.LIGER, reason="Liger-Kernel is not installed")
@pytest.mark.parametrize("kernel", ["rotary", "loss"])
def test_liger(kernel: str) -> None:
    """Its norm and its gate do not run under the interpreter."""
    assert difference(kernel, "liger", torch.float32) < 1e-5
