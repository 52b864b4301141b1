"""What a CPU gives a training step, measured in some three seconds: products, passes, operators, attention, and gloo's link.

All processes measure at once, as ranks work at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from ultrascale.cost import host
from ultrascale.cost.attention import BACKWARD_FLOPS
from ultrascale.specs.model import Model

# The attention that is timed: heads so wide that products take the time, and so narrow that softmax does.
_ROW, _HEADS, _WIDE, _NARROW = 512, 4, 128, 8
_FEW = 8  # tokens, with which a layer takes what its operators take
_LARGE = 2**18  # numbers that processes exchange: the activations of a small model


@dataclass(frozen=True)
class Rates:
    """What one process gets while all of them work, or the mean of that over the processes."""

    products_flops: float
    stream_bytes_s: float
    operator_s: float
    attention_forward_flops: float
    attention_backward_flops: float
    softmax_scores_s: float


@dataclass(frozen=True)
class LinkRate:
    bytes_s: float
    latency_s: float


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def rates_of(rank: int, nproc: int, store: str) -> Rates:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(max(1, cores() // nproc))
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)

    def timed(action: Callable[[], object], for_s: float) -> float:
        action()
        dist.barrier()  # all work at once, as ranks do
        return seconds_each(action, for_s)

    matrix = torch.randn(512, 512)
    product_s = timed(lambda: matrix @ matrix, 0.3)
    first, second = torch.ones(2**19), torch.ones(2**19)
    stream_s = timed(lambda: first * second, 0.2)
    layer_s = timed(_small_layer(), 0.15)

    def attended(width: int) -> tuple[float, float]:
        """Seconds forward, and forward and backward."""
        query = torch.randn(1, _HEADS, _ROW, width, requires_grad=True)

        def attention() -> torch.Tensor:
            return scaled_dot_product_attention(query, query, query, is_causal=True)

        return timed(attention, 0.15), timed(lambda: attention().backward(query.detach()), 0.25)  # type: ignore[no-untyped-call]

    (forward_s, both_s), (softmax_s, _) = attended(_WIDE), attended(_NARROW)
    dist.barrier()
    dist.destroy_process_group()
    scores = _HEADS * _ROW**2  # one block of keys: the kernel skips nothing of what the mask hides
    return Rates(
        products_flops=2 * 512**3 / product_s,
        stream_bytes_s=3 * 4 * 2**19 / stream_s,
        operator_s=layer_s / (host.FORWARD + host.BACKWARD),
        attention_forward_flops=4 * scores * _WIDE / forward_s,
        attention_backward_flops=BACKWARD_FLOPS * 4 * scores * _WIDE / max(both_s - forward_s, 0.1 * both_s),
        softmax_scores_s=scores / softmax_s,
    )


def _small_layer() -> Callable[[], None]:
    """Forward and backward of a layer with hardly a token."""
    import torch

    from ultrascale.model.rotary import tables
    from ultrascale.model.transformer import Block

    model = Model.load("tiny")
    block, rope = Block(model, 0), tables(model, torch.arange(_FEW))
    x = torch.randn(1, _FEW, model.hidden, requires_grad=True)
    return lambda: block(x, rope).backward(x.detach())


def link_rate(rank: int, nproc: int, store: str) -> LinkRate:
    import torch
    import torch.distributed as dist

    from ultrascale.parallel import comm

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    axis = comm.Axis("link", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    matrix = torch.randn(256, 256)

    def each_s(elements: int, times: int) -> float:
        """An exchange amid computing, as in a step: gloo's threads want its cores, and ranks wait for one another."""
        tensor = torch.zeros(elements)
        comm.all_reduce(tensor, axis)
        start = time.perf_counter()
        for _ in range(times):  # a fixed number: both sides must agree on the last
            torch.mm(matrix, matrix)
            if elements:
                comm.all_reduce(tensor, axis)
        return (time.perf_counter() - start) / times

    alone_s, small_s, large_s = each_s(0, 100), each_s(1, 100), each_s(_LARGE, 50)
    dist.barrier()
    dist.destroy_process_group()
    # Between two ranks an all_reduce takes two hops and moves its bytes once: 2 · latency + bytes / bandwidth.
    latency_s = max(small_s - alone_s, 0.1 * small_s) / 2
    return LinkRate(bytes_s=4 * _LARGE / max(large_s - small_s, 0.1 * large_s), latency_s=latency_s)


def seconds_each(action: Callable[[], object], for_s: float) -> float:
    """Mean time of an action repeated for that long, in rounds that make the clock's own cost small."""
    rounds, done = 1, 0
    start = time.perf_counter()
    while (gone := time.perf_counter() - start) < for_s or not done:
        for _ in range(rounds):
            action()
        done += rounds
        rounds = min(rounds * 2, 1000) if gone < 1e-3 * done else rounds
    return gone / done
