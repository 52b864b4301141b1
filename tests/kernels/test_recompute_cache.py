"""What recomputation does not repeat: cached results with their collectives, and results that backward does not need."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from parallel.harness import in_ranks, job_of, training_of
from ultrascale.kernels.recompute_cache import RecomputeRegion, cache_across_recompute
from ultrascale.specs.layout import Layout
from ultrascale.train.engine import Engine


def ran(engine: Engine) -> Counter[str]:
    """Matmuls, attention and collectives of a step's forward and backward."""
    calls: Counter[str] = Counter()

    class CallCounter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d" or func._opname in ("mm", "addmm") or "attention" in func._opname:
                calls[func._opname] += 1
            return func(*args, **(kwargs or {}))

    with CallCounter():
        engine.backward(engine.read(0))
    return calls


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize(
    "fields", [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"pp": 2, "schedule": "zero-bubble"}], ids=str
)
def test_cached_results_are_not_recomputed_or_communicated_again(fields: dict[str, Any]) -> None:
    """And of a layer that is recomputed in full, neither is its last matmul, which no backward needs."""
    layers, tp = 4, fields.get("tp", 1)
    none, selective, full = (
        in_ranks(ran, job_of("llama"), Layout(gas=2, recompute=policy, **fields), training_of())[0]
        for policy in ("none", "selective", "full")
    )
    assert selective == none
    passes = 2 * layers // fields.get("pp", 1)
    assert full["mm"] - none["mm"] == passes * 6
    sums = "_reduce_scatter_base_" if fields.get("sequence_parallel", True) else "allreduce_"
    assert full[sums] - none[sums] == (passes if tp > 1 else 0)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, calls: list[str], needed: bool) -> torch.Tensor:
        def make() -> tuple[torch.Tensor, ...]:
            calls.append("again" if calls else "first")
            return (2 * x,)

        ctx.save_for_backward(x)
        return cache_across_recompute(make, needed)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return 2 * grads[0] * torch.ones_like(ctx.saved_tensors[0]), None, None


@pytest.mark.parametrize(("keeps", "needed", "times"), [(True, True, 1), (False, True, 2), (True, False, 1), (False, False, 1)])
def test_a_cached_result_is_computed_once(keeps: bool, needed: bool, times: int) -> None:
    region, x, calls = RecomputeRegion(keeps), torch.ones(3, requires_grad=True), list[str]()

    def passes() -> list[Any]:
        return [region.run_pass(again) for again in (False, True)]

    def work(x: torch.Tensor) -> torch.Tensor:
        doubled = Doubled.apply(x.sin(), calls, needed)  # type: ignore[no-untyped-call]
        out: torch.Tensor = doubled * (doubled.detach() if needed else 3)  # a factor is read by backward
        return out

    checkpoint(work, x, use_reentrant=False, context_fn=passes).sum().backward()
    assert len(calls) == times
    sine, cosine = torch.ones(3).sin(), torch.ones(3).cos()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * cosine * (2 * sine if needed else 3))


def test_an_unneeded_result_is_nan() -> None:
    region = RecomputeRegion(saves=True)
    for again in (False, True):
        with region.run_pass(again):
            (found,) = cache_across_recompute(lambda: (torch.ones(2, 3),), needed_in_backward=False)
    assert found.shape == (2, 3)
    assert found.isnan().all()
