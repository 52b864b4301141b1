"""Collectives over one axis of the mesh, along any tensor dimension: synchronous, asynchronous and differentiable.

An axis of size 1 has no group and every function here is the identity on it. Each collective has a `_start` form that returns
an AsyncCollective, so that computation can continue until `.wait()`; the plain form starts and waits. The differentiable ones
run one collective in forward and its transpose in backward:

| function      | forward        | backward       |
|---------------|----------------|----------------|
| `copy_to`     | identity       | all-reduce     |
| `reduce_from` | all-reduce     | identity       |
| `gather_from` | all-gather     | reduce-scatter |
| `scatter_to`  | reduce-scatter | all-gather     |
| `switch`      | all-to-all     | all-to-all     |

The first two are Megatron's f and g, the next two their sequence-parallel forms (Korthikanti et al. 2022, figure 5). Waits are
timed, and collectives are profiler ranges, whose names measure/trace_rank.py parses.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import profiler

from ultrascale.parallel.torch_private import all_gather_into, is_profiling, reduce_scatter_into

TECHNIQUES = {
    "tp": "tensor",
    "cp": "context",
    "ep": "expert",
    "pp": "pipeline",
    "zero": "zero",
    "dp": "data",
    "muon": "muon",
    "norm": "bookkeeping",
    "world": "bookkeeping",
}
"""by axis name"""

_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def profile_range(*words: object) -> AbstractContextManager[Any]:
    """`with profile_range("forward stage", 0, "micro-batch", 3):`; no range unless a profiler records.

    Nor inside torch.compile, where it would break the graph.
    """
    # In this order: torch.compile evaluates the first condition itself, and would recompile whenever the second changes.
    if torch.compiler.is_compiling() or not is_profiling():
        return _NO_RANGE
    return profiler.record_function(" ".join(map(str, words)))


def comm_range(axis: str, operation: str) -> AbstractContextManager[Any]:
    """`tensor all_reduce`, `data wait`."""
    return profile_range(TECHNIQUES.get(axis, axis), operation)


Op = Literal["sum", "mean", "max"]
Result = TypeVar("Result", Tensor, list[Tensor])

_OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}


class WaitClock:
    """Seconds spent waiting for other ranks, by axis name. The same waits are profiler ranges."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with comm_range(name, "wait"):
                yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Returns and clears the seconds recorded since the last call."""
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds


@dataclass(frozen=True)
class Axis:
    """One axis of the mesh and this rank's position on it."""

    name: str
    group: dist.ProcessGroup | None
    """None when size is 1"""
    rank: int
    """this rank's index on the axis"""
    size: int
    ranks: tuple[int, ...]
    """the global ranks on the axis, in order"""
    clock: WaitClock = field(default_factory=WaitClock, compare=False, repr=False)


SINGLE_RANK = Axis("alone", None, 0, 1, (0,))


class AsyncCollective(Generic[Result]):
    """A pending collective. `wait` returns its result; further calls return the same result."""

    def __init__(
        self, name: str, works: Sequence[dist.Work], axis: Axis, inputs: Sequence[Tensor], finish: Callable[[], Result]
    ) -> None:
        self.name = name  # for debugging a hung process: gloo's Work object does not name its collective
        self._works = list(works)
        self._axis = axis
        self._inputs = list(inputs)  # buffers must stay alive until they are sent
        self._finish: Callable[[], Result] = finish
        self._result: Result | None = None

    def wait(self) -> Result:
        if self._result is None:
            self._wait_for_works()
            self._result = result = self._finish()
            self._inputs, self._finish = [], lambda: result  # frees the input and receive buffers
        return self._result

    def then(self, function: Callable[[Result], Result]) -> AsyncCollective[Result]:
        """Applies `function` to the result when it is waited for; returns this collective."""
        finish = self._finish
        self._finish = lambda: function(finish())
        return self

    def _wait_for_works(self) -> None:
        # On a GPU, wait() only orders streams and returns at once, so timing it would measure nothing.
        if self._works and self._inputs[0].device.type == "cpu":
            with self._axis.clock.waiting(self._axis.name):
                for work in self._works:
                    work.wait()
        else:
            for work in self._works:
                work.wait()
        self._works = []


def all_reduce_start(x: Tensor, axis: Axis, op: Op = "sum") -> AsyncCollective[Tensor]:
    """In place; `x` must be contiguous and must not be used until `wait`."""
    if axis.size == 1:
        return completed(x, axis)
    with comm_range(axis.name, "all_reduce"):
        work = dist.all_reduce(x, _OPS[op], group=axis.group, async_op=True)
    return AsyncCollective("all_reduce", _works(work), axis, [x], lambda: x)


def all_gather_start(x: Tensor, axis: Axis, dim: int = 0, out: Tensor | None = None) -> AsyncCollective[Tensor]:
    """`out`: contiguous memory for the slices of all ranks, which is the result if `dim` is 0; else new memory."""
    if axis.size == 1:
        return completed(x, axis)
    x = x.contiguous()
    whole = x.new_empty(axis.size * len(x), *x.shape[1:]) if out is None else out
    with comm_range(axis.name, "all_gather"):
        work = all_gather_into(whole, x, axis.group)
    dim %= x.dim()
    return AsyncCollective(
        "all_gather", _works(work), axis, [x], lambda: whole if dim == 0 else _join(whole.view(axis.size, *x.shape), dim)
    )


def reduce_scatter_start(x: Tensor, axis: Axis, dim: int = 0, out: Tensor | None = None) -> AsyncCollective[Tensor]:
    """`out`: contiguous memory for the result; else new memory."""
    if axis.size == 1:
        return completed(x, axis)
    dim %= x.dim()
    parts = x.contiguous() if dim == 0 else _split(x, axis, dim).flatten(0, 1)
    own = parts.new_empty(len(parts) // axis.size, *parts.shape[1:]) if out is None else out
    with comm_range(axis.name, "reduce_scatter"):
        work = reduce_scatter_into(own, parts, axis.group)
    return AsyncCollective("reduce_scatter", _works(work), axis, [parts], lambda: own)


def all_to_all_start(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> AsyncCollective[Tensor]:
    if axis.size == 1:
        return completed(x, axis)
    parts = _split(x, axis, split_dim % x.dim())
    received = torch.empty_like(parts)
    with comm_range(axis.name, "all_to_all"):
        work = dist.all_to_all_single(received.view(-1), parts.view(-1), group=axis.group, async_op=True)
    return AsyncCollective("all_to_all", _works(work), axis, [parts], lambda: _join(received, concat_dim % x.dim()))


def all_to_all_rows_start(x: Tensor, axis: Axis, sent: Sequence[int], received: Sequence[int]) -> AsyncCollective[Tensor]:
    """Sends the first sent[0] rows to rank 0, the next sent[1] to rank 1 …; receives received[i] rows from each rank i."""
    if axis.size == 1:
        return completed(x, axis)
    x = x.contiguous()
    rows = x.new_empty(sum(received), *x.shape[1:])
    with comm_range(axis.name, "all_to_all"):
        work = dist.all_to_all_single(rows, x, list(received), list(sent), group=axis.group, async_op=True)
    return AsyncCollective("all_to_all", _works(work), axis, [x], lambda: rows)


def shift_start(tensors: Sequence[Tensor], axis: Axis) -> AsyncCollective[list[Tensor]]:
    """Sends each tensor to the next rank of the ring and receives the previous rank's; shapes must be equal on all ranks.

    All sends and receives are one batch: on NCCL, a send and a receive issued separately would deadlock.
    """
    sent = [x.contiguous() for x in tensors]
    if axis.size == 1 or not sent:
        return completed(sent, axis)
    received = [torch.empty_like(x) for x in sent]
    next_rank, previous_rank = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    operations = [dist.P2POp(dist.isend, x, next_rank, axis.group, tag) for tag, x in enumerate(sent)]
    operations += [dist.P2POp(dist.irecv, x, previous_rank, axis.group, tag) for tag, x in enumerate(received)]
    with comm_range(axis.name, "send_recv"):
        works = dist.batch_isend_irecv(operations)
    return AsyncCollective("send and recv", works, axis, sent, lambda: received)


def all_reduce(x: Tensor, axis: Axis, op: Op = "sum") -> Tensor:
    """In place; returns `x`."""
    return all_reduce_start(x, axis, op).wait()


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Every rank's `x`, concatenated along `dim` in rank order."""
    return all_gather_start(x, axis, dim).wait()


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This rank's slice along `dim` of the sum over ranks."""
    return reduce_scatter_start(x, axis, dim).wait()


def all_to_all(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Sends slice i along `split_dim` to rank i; concatenates the received slices along `concat_dim`."""
    return all_to_all_start(x, axis, split_dim, concat_dim).wait()


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


def completed(x: Result, axis: Axis) -> AsyncCollective[Result]:
    """A completed collective with result `x`."""
    return AsyncCollective("nothing", [], axis, [], lambda: x)


def _split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """[size, ...]: the slices of `x` along `dim`, each contiguous."""
    return torch.unflatten(x, dim, (axis.size, -1)).movedim(dim, 0).contiguous()


def _join(parts: Tensor, dim: int) -> Tensor:
    """The inverse of `_split`: a view if `dim` is 0, else a copy."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


Collective = Callable[[Tensor], Tensor]


class _DifferentiableCollective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.collective = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.collective(grads[0]), None, None


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """Passes on an input that is the same on all ranks and that each rank multiplies by its own weight shard."""
    return _apply(x, axis, _identity, lambda grad: _all_reduce_copy(grad, axis))


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """Sums partial results; every rank gets the total."""
    return _apply(x, axis, lambda y: _all_reduce_copy(y, axis), _identity)


def gather_from(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Gathers slices along `dim`; each rank multiplies the whole by its own weight shard."""
    return _apply(x, axis, lambda y: all_gather(y, axis, dim), lambda grad: reduce_scatter(grad, axis, dim))


def scatter_to(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sums partial results; each rank gets its slice of the total along `dim`."""
    return _apply(x, axis, lambda y: reduce_scatter(y, axis, dim), lambda grad: all_gather(grad, axis, dim))


def switch(x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
    """Reshards a tensor: sharded along `concat_dim` before, along `split_dim` after."""
    return _apply(
        x,
        axis,
        lambda y: all_to_all(y, axis, split_dim, concat_dim),
        lambda grad: all_to_all(grad, axis, concat_dim, split_dim),
    )


def _apply(x: Tensor, axis: Axis, forward: Collective, backward: Collective) -> Tensor:
    if axis.size == 1:
        return x
    return cast(Tensor, _DifferentiableCollective.apply(x, forward, backward))  # type: ignore[no-untyped-call]


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


def _all_reduce_copy(x: Tensor, axis: Axis) -> Tensor:
    # A copy: autograd may pass the same gradient to other nodes, and the forward's input may be saved for backward.
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)
