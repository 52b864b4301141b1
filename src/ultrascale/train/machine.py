"""What this machine is, as a Cluster: its GPUs by name, or its CPU by a measurement of some two seconds.

GPUs are asked for through nvidia-smi, so that CUDA is not initialised here: the caller forks its ranks afterwards.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from statistics import mean

from ultrascale.cost.attention import BACKWARD_FLOPS
from ultrascale.cost.hardware import RATES, UNMEASURED_MATMUL
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.errors import SpecError
from ultrascale.specs.gpu import GPU
from ultrascale.specs.units import GIB
from ultrascale.specs.validate import build

# What nvidia-smi calls the parts whose numbers we have. PCIe cards, and others of a family, have their own peaks: not here.
KINDS = {
    r"V100-SXM\d-32GB": "v100",
    r"T4": "t4",
    r"A10G": "a10g",
    r"RTX A6000": "a6000",
    r"GeForce RTX 3090": "rtx3090",
    r"A100-SXM\d-40GB": "a100-40",
    r"A100-SXM\d-80GB": "a100-80",
    r"A800-SXM\d-80GB": "a800",
    r"H100 80GB HBM3": "h100",
    r"H100 PCIe": "h100-pcie",
    r"H100 NVL": "h100-94",
    r"H800": "h800",
    r"GH200 480GB": "gh200",
    r"H20": "h20",
    r"H200": "h200",
    r"B200": "b200",
    r"B300( SXM6 AC)?": "b300",
    r"GB200": "gb200",
    r"GB300": "gb300",
    r"L4": "l4",
    r"L40S": "l40s",
    r"GeForce RTX 4090": "rtx4090",
    r"GeForce RTX 5090": "rtx5090",
}
_ASK = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def detect(nproc: int) -> Cluster:
    """This machine with one process per GPU, or with `nproc` processes on its CPU; SpecError for a GPU of unknown kind."""
    names = gpu_names()
    if not names:
        return _cpu(nproc)
    if nproc > len(names):
        raise SpecError(f"nproc is {nproc} but this machine shows {len(names)} GPUs: try {len(names)}")
    kinds = {kind_of_gpu(name) for name in names[:nproc]}
    if len(kinds) > 1:
        raise SpecError(f"this machine mixes {' and '.join(sorted(set(names)))}: try CUDA_VISIBLE_DEVICES with one kind alone")
    return Cluster.of(GPU.load(kinds.pop()), nodes=1, gpus_per_node=nproc)


def gpu_names() -> list[str]:
    """NVIDIA's GPUs that a process started now would see, by their product names."""
    try:
        answer = subprocess.run(_ASK, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    chosen = [word.strip() for word in visible.split(",") if word.strip()]
    if all(word.isdigit() for word in chosen):
        return [names[int(word)] for word in chosen if int(word) < len(names)]
    return names[: len(chosen)]  # named by UUID: the kinds of one machine are alike as a rule


def kind_of_gpu(name: str) -> str:
    """The preset of a product name such as `NVIDIA H100 80GB HBM3`."""
    for pattern, kind in KINDS.items():
        if re.fullmatch(rf"(NVIDIA |Tesla )?{pattern}", name):
            return kind
    raise SpecError(
        f"this machine's GPU is '{name}', of which no peak is known: give --cluster a file with its numbers, such as "
        f"`gpu: {{kind: h100, name: mine, peak_tflops: {{bf16: 756}}}}`"
    )


@dataclass(frozen=True)
class Rates:
    """What one process gets while all of them work, or the mean of that over the processes."""

    products_flops: float
    stream_bytes_s: float
    operator_s: float
    attention_forward_flops: float
    attention_backward_flops: float


@dataclass(frozen=True)
class LinkRate:
    bytes_s: float
    latency_s: float


@cache
def _cpu(nproc: int) -> Cluster:
    import torch  # noqa: F401  (before the processes fork, so that none of them has to)

    from ultrascale.parallel.local import run

    each: list[Rates] = run(_rates, nproc, timeout_s=120)
    together = Rates(*(mean(getattr(one, field.name) for one in each) for field in fields(Rates)))
    return cpu_cluster(nproc, together, run(_link, 2, timeout_s=120)[0], memory_bytes())


def cpu_cluster(nproc: int, rates: Rates, link: LinkRate, memory: float) -> Cluster:
    """The measured numbers as a GPU kind called `cpu`, of which a step gets all: they are no data sheet."""
    together = f"measured here with {nproc} processes at work on {cores()} cores"
    bandwidth, between = rates.stream_bytes_s / 1e9, link.bytes_s / 1e9
    sources = {
        "memory_gib": f"this machine's, or its control group's, over {nproc} processes",
        "memory_bandwidth_gb_s": f"{together}: copies of 32 MiB, read and write counted",
        "peak_tflops": f"{together}: fp32 products of 512 × 512 × 512",
        "link_bandwidth_gb_s": "measured here: all_reduce of 8 MiB over gloo between two processes",
        "link_domain": "the processes of this machine",
        "pcie_bandwidth_gb_s": "as memory_bandwidth_gb_s: the host is the device",
        "network_gb_s": "as link_bandwidth_gb_s: there is one machine",
        "gpus_per_node": "the processes asked for",
        "power_w": GPU.load("cpu").sources["power_w"],
    }
    kind = {
        "name": "cpu",
        "vendor": platform.system().lower() or "unknown",
        "architecture": platform.machine().lower() or "unknown",
        "memory_gib": memory / nproc / GIB,
        "memory_bandwidth_gb_s": bandwidth,
        "peak_tflops": {"fp32": rates.products_flops / 1e12},
        "link_bandwidth_gb_s": between,
        "link_domain": nproc,
        "pcie_bandwidth_gb_s": bandwidth,
        "network_gb_s": between,
        "gpus_per_node": nproc,
        "power_w": GPU.load("cpu").power_w,
        "sources": sources,
    }
    return Cluster.of(
        build(GPU, kind, "this machine's CPU"), nodes=1, gpus_per_node=nproc, efficiency=_efficiency(nproc, rates, link)
    )


def _efficiency(nproc: int, rates: Rates, link: LinkRate) -> Efficiency:
    # The laws take a share of long rows' rate; what was measured on short ones is put back on that scale.
    reach = _ROW / (_ROW + RATES["flash"]["ampere"].half_row)
    return Efficiency(
        matmul=1 / UNMEASURED_MATMUL,  # the share assumed of a data sheet; the peak here is a measurement
        attention_forward=_share(rates.attention_forward_flops / reach, rates.products_flops),
        attention_backward=_share(rates.attention_backward_flops / reach, rates.products_flops),
        memory_bandwidth=1.0,
        kernel_launch_s=min(1e-2, rates.operator_s),
        synchronous=True,
        link_latency_s=min(1.0, link.latency_s),
        link_bandwidth=1.0,
        network_bandwidth=1.0,
        network_latency_s=min(1.0, link.latency_s),
        overlap=0.9 if nproc < cores() else 0.0,  # a transfer needs a core of its own to hide on
        host_link=1.0,
        step_overhead_s=0.0,
        context_gib=0.0,
        workspace_gib=0.0,
        allocator_slack=0.0,
    )


def _share(part: float, whole: float) -> float:
    return min(1.0, max(1e-3, part / whole))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> float:
    """Main memory, or less where a control group allows less."""
    least = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in map(Path, _LIMITS):
        text = file.read_text().strip() if file.is_file() else ""
        least = min(least, float(text)) if text.isdigit() else least
    return least


_ROW, _HEADS, _HEAD = 512, 4, 128  # the attention that is timed: the laws' own head size


def _rates(rank: int, nproc: int, store: str) -> Rates:
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
    source, target = torch.ones(2**23), torch.empty(2**23)
    copy_s = timed(lambda: target.copy_(source), 0.2)
    small = torch.ones(8, requires_grad=True)
    operator_s = timed(lambda: small + small, 0.05)
    query = torch.randn(1, _HEADS, _ROW, _HEAD, requires_grad=True)

    def attention() -> torch.Tensor:
        return scaled_dot_product_attention(query, query, query, is_causal=True)

    forward_s = timed(attention, 0.15)
    both_s = timed(lambda: attention().backward(query.detach()), 0.25)  # type: ignore[no-untyped-call]
    dist.barrier()
    dist.destroy_process_group()
    scores = 2 * _HEADS * _ROW**2 * _HEAD  # two products of which the causal mask leaves half
    return Rates(
        products_flops=2 * 512**3 / product_s,
        stream_bytes_s=2 * 4 * 2**23 / copy_s,
        operator_s=operator_s,
        attention_forward_flops=scores / forward_s,
        attention_backward_flops=BACKWARD_FLOPS * scores / max(both_s - forward_s, 0.1 * both_s),
    )


def _link(rank: int, nproc: int, store: str) -> LinkRate:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)

    def each_s(elements: int, times: int) -> float:
        tensor = torch.zeros(elements)
        dist.all_reduce(tensor)
        start = time.perf_counter()
        for _ in range(times):  # a fixed number: both sides must agree on the last
            dist.all_reduce(tensor)
        return (time.perf_counter() - start) / times

    small_s, large_s = each_s(1, 50), each_s(2**21, 10)
    dist.barrier()
    dist.destroy_process_group()
    # Between two ranks an all_reduce takes two hops and moves its bytes once: 2 · latency + bytes / bandwidth.
    return LinkRate(bytes_s=4 * 2**21 / max(large_s - small_s, 0.1 * large_s), latency_s=small_s / 2)


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
