"""Measures a CPU's rates in about two seconds: GEMMs, memory passes, operator overhead, attention, and gloo's link.

All processes measure at once, as ranks run at once. Everything is measured in turns and the median counts: another process that
takes a core for a while disturbs all rates alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ultrascale.cost import host
from ultrascale.cost.kernels import BACKWARD_FLOPS, SCORES_BACKWARD
from ultrascale.model.operators import RMSNorm, swiglu
from ultrascale.model.rotary import rotate, tables
from ultrascale.model.transformer import Block
from ultrascale.parallel import comm
from ultrascale.specs.model import Model

_SIDE = 512  # of the GEMMs
# The attention that is timed, with wide heads and with narrow ones.
_ROW, _HEADS, _WIDE, _NARROW = 512, 4, 128, 8
# Tokens at which a layer's time is operator overhead, tokens at which memory passes are bandwidth-bound, and their width.
_FEW, _MANY, _WIDTH = 8, 1024, 256
_LAYERS = 4  # enough that the start of a backward pass is negligible
_LARGE = 2**18  # elements of the all-reduce: the activations of a small model
_TURNS, _EACH_S = 5, 0.02


def _passed_bytes() -> float:
    """Bytes per token that the timed passes read and write, including the two sums of its gradient."""
    counts = host.constants().cpu_tensors
    return 4 * _WIDTH * (counts.rmsnorm.both + counts.rotary.both + counts.gated.both + counts.residual.both)


@dataclass(frozen=True)
class CPURates:
    """Rates of one process while all of them run, or their mean over the processes."""

    matmul_flops: float
    stream_bytes_s: float
    operator_s: float
    attention_forward_flops: float
    attention_backward_flops: float
    softmax_scores_s: float


@dataclass(frozen=True)
class LinkRate:
    bytes_s: float
    latency_s: float


def in_new_thread(rank: int, nproc: int, store: str, measure: Callable[[], object], threads: int) -> object:
    """Runs `measure` in a process group, in a new thread of a forked process whose parent may have computed with several.

    libgomp has a worker pool per thread. The thread that forked still has the parent's pool in the child, where its workers do
    not run: its next multi-threaded operator would wait for them for ever. A new thread starts its own pool.
    """

    def joined() -> object:
        torch.set_num_threads(threads)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
        found = measure()
        dist.barrier()
        dist.destroy_process_group()
        return found

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(joined).result()


def measure_rates() -> CPURates:
    """Measures the rates of the processes of the current process group."""
    timed = actions()
    turns = [time_actions(timed) for _ in range(_TURNS + 1)][1:]  # the first warms up
    return from_times({name: median(turn[name] for turn in turns) for name in timed})


def actions() -> dict[str, Callable[[], object]]:
    """The actions that are timed, by name."""
    matrix = torch.randn(_SIDE, _SIDE)
    return {
        "matmul": lambda: matrix @ matrix,
        "layers": _small_layers(),
        "passes": _passes(_MANY),
        "few": _passes(_FEW),
        **{f"{name} {width}": action for width in (_WIDE, _NARROW) for name, action in _attention(width).items()},
    }


def time_actions(timed: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each action; all processes run it at once, as ranks do."""
    times_s = {}
    for name, action in timed.items():
        dist.barrier()
        times_s[name] = seconds_each(action, _EACH_S)
    return times_s


def from_times(times_s: dict[str, float]) -> CPURates:
    """The part of attention's time that grows with the head width is GEMMs, the rest is softmax."""
    scores = _HEADS * _ROW**2  # one block of keys: the kernel skips no masked scores
    wide, narrow = ((times_s[f"forward {width}"], times_s[f"both {width}"]) for width in (_WIDE, _NARROW))
    forward_s, both_s = (
        max(one - other, 0.1 * one) * _WIDE / (_WIDE - _NARROW) for one, other in zip(wide, narrow, strict=True)
    )
    softmax_s = max(narrow[1] - both_s * _NARROW / _WIDE, 0.1 * narrow[1]) / (1 + SCORES_BACKWARD)
    flops = 4 * scores * _WIDE
    return CPURates(
        matmul_flops=2 * _SIDE**3 / times_s["matmul"],
        stream_bytes_s=(_MANY - _FEW) * _passed_bytes() / max(times_s["passes"] - times_s["few"], 0.1 * times_s["passes"]),
        operator_s=times_s["layers"] / _LAYERS / (host.constants().cpu_operators.layer.both),
        attention_forward_flops=flops / forward_s,
        attention_backward_flops=BACKWARD_FLOPS * flops / max(both_s - forward_s, 0.1 * both_s),
        softmax_scores_s=scores / softmax_s,
    )


def _small_layers() -> Callable[[], object]:
    """Forward and backward of some layers with `_FEW` tokens."""

    model = Model.load("tiny")
    blocks, rope = [Block(model, index) for index in range(_LAYERS)], tables(model, torch.arange(_FEW))
    x = torch.randn(1, _FEW, model.hidden, requires_grad=True)

    def act() -> None:
        out = x
        for block in blocks:
            out = block(out, rope)
        out.backward(x.detach())  # type: ignore[no-untyped-call]

    return act


def _passes(tokens: int) -> Callable[[], object]:
    """The operators between a layer's GEMMs, forward and backward: a norm, a rotary embedding and a gate of `tokens` tokens."""

    model = Model.load("mini")
    norm, rope = RMSNorm(_WIDTH, model.norm_eps), tables(model, torch.arange(tokens))
    x = torch.randn(1, tokens, _WIDTH, requires_grad=True)
    gradient, heads = x.detach(), (_WIDTH // model.head_dim, model.head_dim)

    def act() -> None:
        rotated = rotate(norm(x).unflatten(-1, heads), rope).flatten(-2)
        swiglu(rotated, x).backward(gradient)  # type: ignore[no-untyped-call]

    return act


def _attention(width: int) -> dict[str, Callable[[], object]]:
    """Forward alone, and forward with backward."""
    query = torch.randn(1, _HEADS, _ROW, width, requires_grad=True)

    def attend() -> torch.Tensor:
        return scaled_dot_product_attention(query, query, query, is_causal=True)

    return {"forward": attend, "both": lambda: attend().backward(query.detach())}  # type: ignore[no-untyped-call]


def measure_link() -> LinkRate:
    """Measures the link between the processes of the current process group."""

    rank, nproc = dist.get_rank(), dist.get_world_size()
    axis = comm.Axis("link", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    matrix = torch.randn(256, 256)

    def each_s(elements: int, times: int) -> float:
        """All-reduces between matmuls, as in a step: gloo's threads compete for the cores, and ranks wait for one another."""
        tensor = torch.zeros(elements)
        comm.all_reduce(tensor, axis)
        start = time.perf_counter()
        for _ in range(times):  # a fixed number: all ranks must run the same number of collectives
            torch.mm(matrix, matrix)
            if elements:
                comm.all_reduce(tensor, axis)
        return (time.perf_counter() - start) / times

    alone_s, small_s, large_s = each_s(0, 100), each_s(1, 100), each_s(_LARGE, 50)
    # Between two ranks an all_reduce takes two hops and moves its bytes once: 2 · latency + bytes / bandwidth.
    latency_s = max(small_s - alone_s, 0.1 * small_s) / 2
    return LinkRate(bytes_s=4 * _LARGE / max(large_s - small_s, 0.1 * large_s), latency_s=latency_s)


def seconds_each(action: Callable[[], object], for_s: float) -> float:
    """Mean time of an action repeated for `for_s` seconds, in rounds long enough that reading the clock is negligible."""
    rounds, done = 1, 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < for_s or not done:
        for _ in range(rounds):
            action()
        done += rounds
        rounds = min(rounds * 2, 1000) if elapsed < 1e-3 * done else rounds
    return elapsed / done
