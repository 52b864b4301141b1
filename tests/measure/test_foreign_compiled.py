"""Buffers of compiled code that is rehearsed, worked out by hand."""

from __future__ import annotations

from torch import Tensor, empty
from torch.fx.experimental.proxy_tensor import make_fx

from ultrascale.measure.foreign.compiled import CompiledGraph
from ultrascale.measure.rehearse_tracker import OperatorCounter
from ultrascale.measure.rehearse_world import QuickFakeTensorMode

ROWS, WIDTH = 32, 8


class _Counter(OperatorCounter):  # type: ignore[no-untyped-call]
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
