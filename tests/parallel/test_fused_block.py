"""Fused blocks cut by tp and cp, or with a split backward, against plain ones in one process: three losses, all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.harness import check, job_of
from ultrascale.kernels import deferred, selection
from ultrascale.kernels.deferred import add_gradient
from ultrascale.kernels.selection import Kernels
from ultrascale.model.rotary import tables
from ultrascale.model.transformer import Transformer
from ultrascale.parallel import comm, fused_block
from ultrascale.parallel.comm import Axis

slow = pytest.mark.slow


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2, "gas": 2},
        {"tp": 2, "gas": 1, "mbs": 3},
        {"tp": 2, "dp": 2, "zero": 3, "gas": 2, "mbs": 2},
        pytest.param({"tp": 2, "pp": 2, "gas": 4}, marks=slow),
        pytest.param({"tp": 4, "gas": 1, "mbs": 2, "recompute": "selective"}, marks=slow),
        pytest.param({"tp": 2, "dp": 2, "zero": 1, "gas": 2}, marks=slow),
        pytest.param({"tp": 2, "dp": 2, "gas": 2, "mbs": 2}, marks=slow),
        {"tp": 2, "gas": 2, "recompute": "full"},
        {"tp": 2, "pp": 2, "gas": 4, "recompute": "selective", "recompute_layers": 1, "schedule": "zero-bubble"},
        {"dp": 2, "zero": 3, "gas": 2, "recompute": "full", "recompute_layers": 1},
        {"dp": 2, "zero": 1, "gas": 2, "mbs": 2, "recompute": "selective", "recompute_layers": 2},
        {"cp": 2, "context_parallel": "zigzag", "gas": 2},
        pytest.param({"cp": 2, "context_parallel": "ulysses", "tp": 2, "gas": 2, "recompute": "full"}, marks=slow),
        pytest.param({"tp": 2, "dp": 2, "zero": 3, "gas": 2, "recompute": "selective"}, marks=slow),
        {"cp": 2, "context_parallel": "ulysses", "gas": 1, "mbs": 2},
        {"cp": 2, "context_parallel": "allgather", "dp": 2, "zero": 3, "gas": 2},
        pytest.param({"cp": 4, "context_parallel": "ring", "gas": 2, "recompute": "selective"}, marks=slow),
        pytest.param({"cp": 2, "context_parallel": "zigzag", "tp": 2, "gas": 2, "mbs": 2}, marks=slow),
        pytest.param({"cp": 2, "context_parallel": "allgather", "pp": 2, "gas": 4}, marks=slow),
        {"pp": 2, "gas": 4, "schedule": "zero-bubble"},
        {"pp": 2, "tp": 2, "gas": 4, "mbs": 2, "schedule": "zero-bubble"},
        {"pp": 2, "dp": 2, "gas": 4, "zero": 3, "schedule": "zb-v", "virtual_stages": 2},
        {"pp": 2, "gas": 4, "schedule": "zero-bubble", "recompute": "full"},
        {"pp": 2, "tp": 2, "gas": 4, "schedule": "zero-bubble", "recompute": "full", "recompute_layers": 1},
        {"pp": 2, "dp": 2, "gas": 4, "zero": 3, "schedule": "zb-v", "virtual_stages": 2, "recompute": "full"},
        pytest.param({"pp": 2, "gas": 6, "schedule": "dualpipe-v", "virtual_stages": 2, "recompute": "selective"}, marks=slow),
        pytest.param({"pp": 2, "gas": 6, "schedule": "dualpipe-v", "virtual_stages": 2, "recompute": "full"}, marks=slow),
        pytest.param({"pp": 2, "tp": 2, "gas": 4, "schedule": "v-half", "virtual_stages": 2, "recompute": "full"}, marks=slow),
        pytest.param({"pp": 2, "gas": 4, "schedule": "v-min", "virtual_stages": 2, "recompute": "full"}, marks=slow),
        pytest.param({"pp": 2, "dp": 2, "gas": 4, "schedule": "zero-bubble", "recompute": "full", "zero": 1}, marks=slow),
        pytest.param({"pp": 2, "dp": 2, "gas": 4, "schedule": "zero-bubble", "recompute": "full", "zero": 2}, marks=slow),
        pytest.param(
            {"pp": 2, "cp": 2, "context_parallel": "zigzag", "gas": 4, "schedule": "zero-bubble", "recompute": "full"},
            marks=slow,
        ),
        pytest.param({"pp": 2, "tp": 2, "gas": 4, "schedule": "zb-v", "virtual_stages": 2}, marks=slow),
        pytest.param({"pp": 2, "tp": 2, "gas": 4, "schedule": "v-half", "virtual_stages": 2}, marks=slow),
        pytest.param({"pp": 2, "gas": 4, "schedule": "v-min", "virtual_stages": 2}, marks=slow),
        pytest.param({"pp": 2, "cp": 2, "context_parallel": "zigzag", "gas": 4, "schedule": "zero-bubble"}, marks=slow),
        pytest.param({"pp": 2, "dp": 2, "gas": 4, "schedule": "zero-bubble"}, marks=slow),
        pytest.param({"pp": 2, "dp": 2, "gas": 4, "zero": 1, "schedule": "zero-bubble"}, marks=slow),
        pytest.param({"pp": 2, "dp": 2, "gas": 4, "zero": 2, "schedule": "zero-bubble"}, marks=slow),
    ],
    ids=str,
)
def test_fused_blocks_compute_what_plain_ones_do(fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(fused=layout.gpus > 1))
    check("llama", evaluate=True, **fields)


def test_the_fused_block_is_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(fused=layout.gpus > 1))
    monkeypatch.setattr(fused_block.TensorParallelFusedBlock, "out_mlp", lambda self, x, *_: 2 * x)
    with pytest.raises(AssertionError):
        check("llama", tp=2, gas=1)


@pytest.mark.parametrize("lost", range(7))
def test_every_weight_gradient_of_a_split_backward_is_deferred(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the seven matrices of each layer; without any of them gradients differ from one process's."""
    calls = itertools.count()

    def add(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if next(calls) % 7 != lost:
            add_gradient(parameter, gradient)

    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(fused=layout.gpus > 1))
    monkeypatch.setattr(deferred, "add_gradient", add)
    with pytest.raises(AssertionError):
        check("llama", pp=2, gas=2, tp=1 + lost % 2, schedule="zero-bubble")


class LoggedGemms(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.log.append("GEMM")
        return func(*args, **(kwargs or {}))


def test_collectives_of_backward_overlap_with_gemms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each norm's output is gathered during an input gradient, whose sum is scattered during weight gradients."""
    log: list[str] = []

    def started(name: str, result: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        def start(x: torch.Tensor, *_: object) -> Any:
            log.append(f"start {name}")
            return SimpleNamespace(wait=lambda: log.append(f"wait {name}") or result(x))

        return start

    monkeypatch.setattr(comm, "all_gather_start", started("gather", lambda x: torch.cat((x, x))))
    monkeypatch.setattr(comm, "reduce_scatter_start", started("scatter", lambda x: x.chunk(2)[0].clone()))
    job = job_of("llama")
    model, axis = Transformer(job.model, range(1), embed=False, head=False), Axis("tp", None, 0, 2, (0, 1))
    fused_block.apply(model, axis)
    x = torch.randn(2, 8, job.model.hidden, requires_grad=True)
    with LoggedGemms(log):
        out = model.each_block()[0](x, tables(job.model, torch.arange(16)))
        log.clear()
        out.sum().backward()
    mlp, attention = log[: log.index("wait scatter") + 1], log[log.index("wait scatter") + 1 :]
    assert mlp == [
        *("start gather", "wait gather", "start gather", "GEMM", "GEMM", "GEMM"),
        *("start scatter", "wait gather", "GEMM", "wait scatter"),
    ]
    assert attention[:4] == ["start gather", "wait gather", "GEMM", "GEMM"]  # of the output projection
    assert attention[4:] == ["start gather", "GEMM", "start scatter", "wait gather", "GEMM", "wait scatter"]
