"""`bench hardware`: measure what one GPU of this machine gives a training step, as constants of a Cluster.

A GPU that runs one GEMM alone for a moment has a higher clock than in training. So GEMMs, attention and copies take turns,
as in a layer, until the power limit sets the clock; each is timed by device events.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.kernels import BACKWARD_FLOPS, QUERY_BLOCK, sm_occupancy
from ultrascale.measure.doctor_facts import ask_clocks
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build

TOKENS, WIDTHS = 16384, ((2048, 8192), (4096, 14336))  # of micro-batches and layers that are trained on one GPU
SEQ, HEADS, KV_HEADS, HEAD = 4096, 32, 8, 128
COPIED = 2**30  # bytes
ROUNDS, WARM = 60, 20


@dataclass(frozen=True)
class GemmShape:
    """[m, k] × [k, n], as in forward and in both gradients of a layer."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class HardwareTimes:
    """Median seconds over the rounds."""

    matmuls: tuple[tuple[GemmShape, float], ...]
    attention_forward_s: float
    attention_backward_s: float
    copy_s: float
    launch_s: float
    clocks_mhz: tuple[float, float] | None = None
    """during the measurement, and the highest; None: nvidia-smi does not report them"""


def measured(cluster: Cluster) -> Cluster:
    """The cluster with constants of this machine's first GPU, which must be of its kind."""
    from ultrascale.launch.local import run

    (times,) = run(_measure, 1, timeout_s=300)
    return cluster.model_copy(update={"efficiency": efficiency(cluster, times)})


def efficiency(cluster: Cluster, times: HardwareTimes) -> Efficiency:
    """Constants for which the laws predict the measured times; those that were not measured stay."""
    gpu = cluster.gpu
    as_measured = cluster.model_copy(update={"efficiency": cluster.efficiency.model_copy(update={"matmul": 1.0})})
    fields = {"model": Model.load("llama-3-8b"), "cluster": as_measured, "seq": SEQ, "batch_tokens": SEQ * cluster.gpus}
    machine = ClusterRates(build(Job, fields, "job"))
    m, n, k = np.array([(one.m, one.n, one.k) for one, _ in times.matmuls], dtype=float).T
    alone = machine.matmul_s(m, n, k)
    scores = 2 * TOKENS * SEQ * HEADS * HEAD  # FLOPs of two GEMMs, of which the causal mask leaves half
    reach = SEQ / (SEQ + machine.attention.half_row) * sm_occupancy(machine, TOKENS * HEADS / QUERY_BLOCK)
    full = machine.attention_peak_flops * reach
    given = {
        "matmul": float(alone.sum()) / sum(seconds for _, seconds in times.matmuls),
        "attention_forward": scores / times.attention_forward_s / full,
        "attention_backward": BACKWARD_FLOPS * scores / times.attention_backward_s / full,
        "memory_bandwidth": 2 * COPIED / times.copy_s / (gpu.memory_bandwidth_gb_s * 1e9),
        "kernel_launch_s": times.launch_s,
    }
    if times.clocks_mhz is not None:
        now, highest = times.clocks_mhz
        given["boost"] = max(1.0, highest / now)
    return cluster.efficiency.model_copy(update={name: float(f"{value:.4g}") for name, value in given.items()})


def _measure(_: int, __: int, ___: str) -> HardwareTimes:
    import torch

    from ultrascale.kernels import autotune
    from ultrascale.model.self_attention import CausalAttention

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    actions: list[tuple[object, Callable[[], object]]] = []
    for hidden, ffn in WIDTHS:
        x, wide, weight = numbers(TOKENS, hidden), numbers(TOKENS, ffn), numbers(ffn, hidden)
        actions += [
            (GemmShape(TOKENS, ffn, hidden), partial(torch.matmul, x, weight.t())),
            (GemmShape(TOKENS, hidden, ffn), partial(torch.matmul, wide, weight)),
            (GemmShape(ffn, hidden, TOKENS), partial(torch.matmul, wide.t(), x)),
        ]
    q, k, v = (numbers(TOKENS // SEQ, SEQ, heads, HEAD).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
    grad, outputs = torch.randn_like(q), list[torch.Tensor]()
    core = CausalAttention()  # with the kernel that a run would select
    shape = autotune.AttentionShape(TOKENS // SEQ, SEQ, HEADS, KV_HEADS, HEAD, torch.bfloat16)
    if (found := autotune.time_attention(shape, torch.device("cuda"))) is not None:
        found.apply([core])

    def attend() -> None:
        outputs.append(core(q, k, v))

    source, target = (torch.empty(COPIED // 2, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    actions += [
        ("forward", attend),
        ("backward", lambda: torch.autograd.grad(outputs.pop(), (q, k, v), grad)),
        ("copy", lambda: target.copy_(source)),
    ]
    seconds, clocks = _in_turns(actions)
    return HardwareTimes(
        tuple((what, each) for what, each in seconds.items() if isinstance(what, GemmShape)),
        seconds["forward"],
        seconds["backward"],
        seconds["copy"],
        _launch_s(),
        clocks,
    )


def _in_turns(
    actions: Sequence[tuple[object, Callable[[], object]]],
) -> tuple[dict[object, float], tuple[float, float] | None]:
    """Device seconds of each action while all take turns, and the clock meanwhile."""
    import torch

    marks: dict[object, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
    for _ in range(ROUNDS):
        for what, action in actions:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            action()
            end.record()
            marks[what].append((begin, end))
    clocks = ask_clocks(str(torch.cuda.get_device_properties(0).uuid))  # while the device still works on its queue
    torch.cuda.synchronize()
    times = {what: [begin.elapsed_time(end) / 1e3 for begin, end in each[WARM:]] for what, each in marks.items()}
    return {what: float(np.median(each)) for what, each in times.items()}, clocks


def _launch_s(times: int = 2000) -> float:
    """Launch overhead: host time of a kernel that the device finishes sooner."""
    import time

    import torch

    small = torch.ones(8, device="cuda")
    for _ in range(times // 10):
        small.add_(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        small.add_(1)
    elapsed_s = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed_s / times
