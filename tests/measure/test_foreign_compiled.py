"""Buffers of compiled code that is rehearsed, worked out by hand, and operators that differ from those of a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, empty
from torch.distributed import ProcessGroup
from torch.fx.experimental.proxy_tensor import make_fx

from ultrascale.measure.foreign.compiled import CompiledGraph
from ultrascale.measure.foreign.gpu import ValuesOfZero, histogram
from ultrascale.measure.rehearse_tracker import OperatorCounter
from ultrascale.measure.rehearse_world import QuickFakeTensorMode
from ultrascale.parallel.torch_private import FakeTensor, wait_tensor

ROWS, WIDTH = 32, 8


class _Counter(OperatorCounter):  # type: ignore[no-untyped-call]
    def technique_of(self, group: ProcessGroup) -> str:
        return "other"

    def where(self, place: int | None) -> str:
        return "forward"


def test_only_buffers_of_kernels_count() -> None:
    """exp and sin are computed within the kernel that writes their product for the matmul."""
    fake = QuickFakeTensorMode()

    def program(x: Tensor, weight: Tensor) -> Tensor:
        return (x.exp() * x.sin()) @ weight

    with fake:
        x, weight = empty(ROWS, WIDTH), empty(WIDTH, WIDTH)
        graph = CompiledGraph(fake, make_fx(program)(x, weight))
        counter = _Counter(fake)
        with counter:
            graph.run([x, weight])
    assert counter.peak == 2 * ROWS * WIDTH * 4  # what the matmul reads, and its result
    assert sum(counter.flops.values()) == 2 * ROWS * WIDTH * WIDTH


def test_a_kernel_writes_into_an_operand_that_ends() -> None:
    fake = QuickFakeTensorMode()

    def program(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).exp()

    with fake:
        x, weight = empty(ROWS, WIDTH), empty(WIDTH, WIDTH)
        graph = CompiledGraph(fake, make_fx(program)(x, weight))
        counter = _Counter(fake)
        with counter:
            graph.run([x, weight])
    assert counter.peak == ROWS * WIDTH * 4


def test_an_operand_that_ends_is_freed_with_its_views() -> None:
    """As in the gradients of Megatron-Core's fused loss, which are scattered into a copy of the softmax."""
    fake = QuickFakeTensorMode()

    def program(x: Tensor, place: Tensor, factor: Tensor) -> Tensor:
        return x.view(-1).index_put([place], factor).view(ROWS, WIDTH) * factor

    with fake:
        given = [empty(ROWS, WIDTH), torch.zeros(1, dtype=torch.int64), empty(1)]
        graph = CompiledGraph(fake, make_fx(program)(*given))
        counter = _Counter(fake)
        with counter:
            graph.run(given)
    assert counter.peak == ROWS * WIDTH * 4


def test_tensors_on_the_meta_device_are_not_counted() -> None:
    fake = QuickFakeTensorMode()
    with fake:
        x, counter = empty(ROWS, WIDTH), _Counter(fake)
        with counter:
            shapes = [torch.zeros_like(x, device="meta") for _ in range(2)]
            assert counter.peak == 0
            y = torch.zeros_like(x)
    assert counter.peak == y.nbytes == shapes[1].nbytes


def test_waiting_for_a_collective_allocates_nothing() -> None:
    fake = QuickFakeTensorMode()
    with fake:
        x = empty(ROWS, WIDTH)
        counter = _Counter(fake)
        with counter:
            assert wait_tensor(x) is x
    assert counter.peak == 0


def test_rows_of_experts_are_those_that_were_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tolist", "data_ptr"):  # which the mode replaces
        monkeypatch.setattr(FakeTensor, name, getattr(FakeTensor, name))
    with ValuesOfZero():
        counts = histogram(torch.zeros(18, dtype=torch.int64), bins=4, min=0, max=4)
        assert (counts.dtype, counts.tolist()) == (torch.int64, [5, 5, 4, 4])
