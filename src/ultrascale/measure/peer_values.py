"""Values of ranks that do not exist, for programs that run with real tensors.

torch's `fake` group copies a rank's own part into what it gathers, but leaves memory as it was where it receives and, in some
versions, where it reduces and exchanges. What lies there may be NaN: GEMMs of NaN take less power than those of numbers, and so
less time, and an engine skips a step whose gradients are not finite.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.parallel.torch_private import finished_work

STD = 0.02
"""of received numbers that no rank has here"""


@contextmanager
def values_of_peers() -> Iterator[None]:
    """Collectives return values, on a GPU and on a CPU: the other ranks have what this one has.

    Ranks that tell one another how many rows they send so send this one as many as it sends them.
    """
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name, function in _OPERATORS.items():
                for key in ("CPU", "CUDA"):
                    library.impl(name, function, key, allow_override=True)  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _own_part(output: Tensor, whole: Tensor, group: Any) -> None:
    group = dist.ProcessGroup.unbox(group)
    output.copy_(whole.reshape(group.size(), -1)[group.rank()].view_as(output))


def _reduce_scatter(output: Tensor, whole: Tensor, group: Any, *_: Any) -> tuple[Tensor, Any]:
    _own_part(output, whole, group)
    return output, finished_work()


def _reduce_scatter_several(outputs: Sequence[Tensor], wholes: Sequence[Tensor], group: Any, *_: Any) -> Any:
    for output, whole in zip(outputs, wholes, strict=True):
        _own_part(output, whole, group)
    return finished_work()


def _all_to_all(output: Tensor, own: Tensor, *_: Any) -> Any:
    both, received = min(output.numel(), own.numel()), output.view(-1)
    received[:both].copy_(own.reshape(-1)[:both])
    _random(received[both:])
    return finished_work()


def _receive(tensors: Sequence[Tensor], *_: Any) -> Any:
    for tensor in tensors:
        _random(tensor)
    return finished_work()


def _random(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.normal_(std=STD)
    else:
        tensor.zero_()


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_reduce_scatter_base_": _reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_several,
    "alltoall_base_": _all_to_all,
    "recv_": _receive,
}
