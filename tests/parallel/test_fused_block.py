"""Fused blocks cut by tp and cp, or with a split backward, against plain ones in one process: three losses, all gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.harness import check, in_ranks, job_of, training_of
from ultrascale.kernels import deferred, selection
from ultrascale.kernels.deferred import DeferredWeightGrads, add_gradient
from ultrascale.kernels.selection import Kernels
from ultrascale.model.rotary import tables
from ultrascale.model.transformer import Transformer
from ultrascale.parallel import comm, fused_block
from ultrascale.parallel.comm import AsyncCollective, Axis
from ultrascale.specs.layout import Layout
from ultrascale.train.engine import Engine

slow = pytest.mark.slow


@pytest.mark.quick_cases(every=2)
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
        *(
            {"tp": 2, "sequence_parallel": False, **fields}
            for fields in ({"gas": 2}, {"gas": 1, "mbs": 3, "recompute": "full"})
        ),
        {"tp": 2, "sequence_parallel": False, "pp": 2, "gas": 4, "schedule": "zero-bubble", "recompute": "selective"},
        *(
            pytest.param({"tp": 2, "sequence_parallel": False, **fields}, marks=slow)
            for fields in (
                {"dp": 2, "zero": 3, "gas": 2, "recompute": "selective"},
                {"cp": 2, "context_parallel": "zigzag", "gas": 2},
                {"pp": 2, "gas": 4, "schedule": "zb-v", "virtual_stages": 2, "mbs": 2},
            )
        ),
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


@pytest.mark.parametrize(("dp", "zero", "copies"), [(2, 3, 0), (2, 1, 0), (3, 3, 16)])
def test_weights_of_joined_matmuls_are_gathered_side_by_side(
    dp: int, zero: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each rank has as many of their rows: else the four matmuls of two layers copy them in both passes."""
    monkeypatch.setattr(selection, "choose", lambda *_: Kernels(fused=True))
    layout = Layout(dp=dp, zero=zero, gas=2)
    assert in_ranks(_copies_of_weights, job_of("llama"), layout, training_of(steps=1)) == dp * [copies]


def _copies_of_weights(engine: Engine) -> int:
    cat, weights = torch.cat, list[int]()

    def counted(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        weights.append(isinstance(tensors[0], torch.nn.Parameter))
        return cat(tensors, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cat", counted)
        engine.step(0)
    return sum(weights)


@pytest.mark.quick_cases(every=3)
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


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize(
    ("family", "chunks", "fields"),
    [
        ("llama", 2, {"tp": 2, "gas": 2}),
        ("llama", 2, {"tp": 2, "gas": 1, "mbs": 2}),  # a chunk is a sequence
        ("llama", 2, {"tp": 2, "gas": 1, "mbs": 4, "recompute": "full"}),  # two sequences
        ("llama", 4, {"tp": 2, "gas": 1, "mbs": 2, "recompute": "selective"}),  # half a sequence
        ("one-kv-head", 4, {"tp": 2, "gas": 1}),
        ("llama", 2, {"tp": 2, "pp": 2, "gas": 4, "schedule": "zero-bubble", "recompute": "selective", "recompute_layers": 1}),
        ("llama", 4, {"tp": 2, "pp": 2, "gas": 4, "mbs": 2, "schedule": "zero-bubble"}),
        ("llama", 4, {"tp": 2, "dp": 2, "zero": 3, "gas": 2, "mbs": 2}),
        pytest.param("llama", 2, {"tp": 2, "dp": 2, "zero": 1, "gas": 2, "mbs": 2}, marks=slow),
        pytest.param("llama", 3, {"tp": 2, "gas": 1, "mbs": 3}, marks=slow),
        pytest.param("llama", 16, {"tp": 2, "gas": 2}, marks=slow),  # of one token
        pytest.param("llama", 2, {"tp": 4, "gas": 1, "mbs": 2}, marks=slow),
        pytest.param("llama", 4, {"tp": 4, "gas": 1, "mbs": 2, "recompute": "selective"}, marks=slow),
        pytest.param("one-kv-head", 4, {"tp": 4, "gas": 2, "recompute": "full"}, marks=slow),
        pytest.param("llama", 2, {"tp": 4, "gas": 2, "mbs": 4}, marks=slow),
        pytest.param("llama", 2, {"tp": 2, "dp": 2, "zero": 3, "gas": 2, "recompute": "full"}, marks=slow),
        pytest.param("llama", 4, {"tp": 2, "dp": 2, "zero": 3, "gas": 2, "recompute": "selective"}, marks=slow),
        pytest.param("llama", 2, {"tp": 2, "pp": 2, "gas": 4, "schedule": "zero-bubble", "recompute": "full"}, marks=slow),
        pytest.param("llama", 4, {"tp": 2, "pp": 2, "gas": 4, "schedule": "zb-v", "virtual_stages": 2, "mbs": 2}, marks=slow),
        pytest.param("llama", 4, {"tp": 2, "cp": 2, "context_parallel": "zigzag", "gas": 2, "mbs": 2}, marks=slow),
    ],
    ids=str,
)
def test_chunks_compute_what_one_process_does(
    family: str, chunks: int, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(fused=layout.gpus > 1))
    check(family, training_of(tp_chunks=chunks), evaluate=True, **fields)


class LoggedGemms(TorchDispatchMode):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.log.append("GEMM")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of GEMMs and of collectives between two ranks with the same numbers, which a test simulates in one process."""
    found: list[str] = []

    def logged(name: str, result: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., AsyncCollective[torch.Tensor]]:
        def start(x: torch.Tensor, axis: Axis, *_: object, out: torch.Tensor | None = None) -> AsyncCollective[torch.Tensor]:
            found.append(f"start {name}")
            received = result(x) if out is None else out.copy_(result(x))
            work: Any = SimpleNamespace(wait=lambda: found.append(f"wait {name}"))
            return AsyncCollective(name, [work], axis, [x], lambda: received)

        return start

    monkeypatch.setattr(comm, "all_gather_start", logged("gather", lambda x: torch.cat((x, x))))
    monkeypatch.setattr(comm, "reduce_scatter_start", logged("scatter", lambda x: x.chunk(2)[0].clone()))
    return found


AXIS = Axis("tp", None, 0, 2, (0, 1))


def passes(log: list[str], chunks: int, split: bool = False, recompute: bool = False) -> tuple[list[str], list[str], list[str]]:
    """What forward, backward and deferred weight gradients of one layer log."""
    job, queue = job_of("llama"), DeferredWeightGrads(used=split, open=split)
    model = Transformer(job.model, range(1), embed=False, head=False)
    fused_block.apply(model, AXIS, queue, chunks)
    block = model.each_block()[0]
    block.saves_gate_up = not recompute
    x = torch.randn(2, 8, job.model.hidden, requires_grad=True)
    found = []
    with LoggedGemms(log):
        out = block(x, tables(job.model, torch.arange(16)))
        found.append(log.copy())
        log.clear()
        out.sum().backward()
        found.append(log.copy())
        log.clear()
        for run in queue.pop():
            run()
    return found[0], found[1], log


def test_collectives_of_backward_overlap_with_gemms(log: list[str]) -> None:
    """Each norm's output is gathered during an input gradient, whose sum is scattered during weight gradients."""
    _, backward, _ = passes(log, chunks=1)
    mlp, attention = backward[: backward.index("wait scatter") + 1], backward[backward.index("wait scatter") + 1 :]
    assert mlp == [
        *("start gather", "wait gather", "start gather", "GEMM", "GEMM", "GEMM"),
        *("start scatter", "wait gather", "GEMM", "wait scatter"),
    ]
    assert attention[:4] == ["start gather", "wait gather", "GEMM", "GEMM"]  # of the output projection
    assert attention[4:] == ["start gather", "GEMM", "start scatter", "wait gather", "GEMM", "wait scatter"]


def gather_gemm(chunks: int) -> list[str]:
    """Each chunk but the first is gathered during the GEMM of the previous one."""
    return ["start gather", *(chunks - 1) * ["wait gather", "start gather", "GEMM"], "wait gather", "GEMM"]


def gemm_scatter(chunks: int) -> list[str]:
    """Each chunk but the last is scattered during the GEMM of the next one; the last wait is the caller's."""
    return ["GEMM", "start scatter", *(chunks - 1) * ["GEMM", "start scatter", "wait scatter"]]


@pytest.mark.parametrize("chunks", [2, 4])
def test_collectives_of_chunks_overlap_with_gemms_in_forward(chunks: int, log: list[str]) -> None:
    forward, _, _ = passes(log, chunks)
    assert forward == 2 * [*gather_gemm(chunks), *gemm_scatter(chunks), "wait scatter"]


@pytest.mark.parametrize("chunks", [2, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_collectives_of_chunks_overlap_with_gemms_in_backward(chunks: int, recompute: bool, log: list[str]) -> None:
    """All chunks of both gathers are started before the first GEMM, and each GEMM waits for its own chunk alone."""
    start, wait, gemms = chunks * ["start gather"], chunks * ["wait gather"], chunks * ["wait gather", "GEMM"]
    _, backward, _ = passes(log, chunks, recompute=recompute)
    gate_up, normed = (gemms, []) if recompute else ([], wait)
    mlp = [*start, *start, *gate_up, *gemms, "GEMM", *gemm_scatter(chunks), *normed, "GEMM", "wait scatter"]
    out = [*start, *gemms, "GEMM"]
    assert backward == [*mlp, *out, *start, *gemm_scatter(chunks), *wait, "GEMM", "wait scatter"]


@pytest.mark.parametrize("chunks", [2, 4])
def test_collectives_of_chunks_overlap_with_gemms_in_a_split_backward(chunks: int, log: list[str]) -> None:
    """No weight gradient hides the sum of an input gradient: the GEMM of another chunk does."""
    start, wait = chunks * ["start gather"], chunks * ["wait gather"]
    _, backward, weights = passes(log, chunks, split=True)
    scattered = [*gemm_scatter(chunks), "wait scatter"]
    assert backward == [*gather_gemm(chunks), *scattered, *gather_gemm(chunks), *scattered]
    assert weights == [*start, *start, *wait, "GEMM", *start, *wait, "GEMM", *wait, "GEMM", *start, *wait, "GEMM"]
