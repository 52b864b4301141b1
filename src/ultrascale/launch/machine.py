"""Detects this machine as a Cluster: its GPUs by name, or its CPU by a measurement of about two seconds (launch/cpu_rates.py).

GPUs are queried with nvidia-smi, so that CUDA is not initialized here: the caller forks its ranks afterwards.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from ultrascale.cost.hardware import UNMEASURED_MATMUL
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.errors import SpecError
from ultrascale.specs.gpu import GPU
from ultrascale.specs.units import GIB
from ultrascale.specs.validate import build

if TYPE_CHECKING:
    from ultrascale.launch.cpu_rates import CPURates, LinkRate

# nvidia-smi's names of the GPUs in our presets. PCIe cards and other variants have different peaks and are not listed.
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
_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def detect(nproc: int, timeout_s: float = 240.0, again: bool = False) -> Cluster:
    """This machine with one process per GPU, or with `nproc` processes on its CPU; SpecError for a GPU of unknown kind.

    `timeout_s`: limit of a CPU's measurement; `again`: measure it even if it was before.
    """
    names = gpu_names()
    if not names:
        if again or nproc not in _measured:
            _measured[nproc] = cpu_cluster(nproc, *measure_cpu(nproc, timeout_s), memory_bytes())
        return _measured[nproc]
    if nproc > len(names):
        raise SpecError(f"nproc is {nproc} but this machine shows {len(names)} GPUs: try {len(names)}")
    kinds = {kind_of_gpu(name) for name in names[:nproc]}
    if len(kinds) > 1:
        raise SpecError(f"this machine mixes {' and '.join(sorted(set(names)))}: try CUDA_VISIBLE_DEVICES with one kind alone")
    return Cluster.of(GPU.load(kinds.pop()), nodes=1, gpus_per_node=nproc)


def gpu_names() -> list[str]:
    """Product names of the NVIDIA GPUs visible to a process started now."""
    try:
        answer = subprocess.run(_QUERY, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return names
    selected = [word.strip() for word in visible.split(",") if word.strip()]
    if all(word.isdigit() for word in selected):
        return [names[int(word)] for word in selected if int(word) < len(names)]
    return names[: len(selected)]  # given by UUID: the GPUs of one machine are usually of one kind


def kind_of_gpu(name: str) -> str:
    """The preset of a product name such as `NVIDIA H100 80GB HBM3`."""
    for pattern, kind in KINDS.items():
        if re.fullmatch(rf"(NVIDIA |Tesla )?{pattern}", name):
            return kind
    raise SpecError(
        f"this machine's GPU is '{name}', of which no peak is known: give --cluster a file with its numbers, such as "
        f"`gpu: {{kind: h100, name: mine, peak_tflops: {{bf16: 756}}}}`"
    )


_measured: dict[int, Cluster] = {}  # by the number of processes


def measure_cpu(nproc: int, timeout_s: float) -> tuple[CPURates, LinkRate]:
    """The mean rates of `nproc` processes that use this CPU at once, and the rate of the link between two of them."""
    from ultrascale.launch.cpu_rates import CPURates, in_new_thread, measure_link, measure_rates  # before the processes fork
    from ultrascale.launch.local import run

    each: list[CPURates] = run(in_new_thread, nproc, measure_rates, max(1, cores() // nproc), timeout_s=timeout_s / 2)
    together = CPURates(*(mean(getattr(one, field.name) for one in each) for field in fields(CPURates)))
    return together, run(in_new_thread, 2, measure_link, 1, timeout_s=timeout_s / 2)[0]


def cpu_cluster(nproc: int, rates: CPURates, link: LinkRate, memory: float) -> Cluster:
    """The measured rates as a GPU kind called `cpu`, with efficiencies of 1: they are measurements, not a data sheet."""
    together = f"measured here with {nproc} processes at work on {cores()} cores"
    bandwidth, between = rates.stream_bytes_s / 1e9, link.bytes_s / 1e9
    sources = {
        "memory_gib": f"this machine's, or its control group's, over {nproc} processes",
        "memory_bandwidth_gb_s": f"{together}: a norm, a rotation and a gate, forward and backward, read and write counted",
        "peak_tflops": f"{together}: fp32 matmuls of 512 × 512 × 512",
        "link_bandwidth_gb_s": "measured here: all_reduce of 1 MiB over gloo between two processes that compute in between",
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
        "peak_tflops": {"fp32": rates.matmul_flops / 1e12},
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


def _efficiency(nproc: int, rates: CPURates, link: LinkRate) -> Efficiency:
    return Efficiency(
        matmul=1 / UNMEASURED_MATMUL,  # the share assumed of a data sheet; the peak here is a measurement
        attention_forward=_share(rates.attention_forward_flops, rates.matmul_flops),
        attention_backward=_share(rates.attention_backward_flops, rates.matmul_flops),
        memory_bandwidth=1.0,
        kernel_launch_s=min(1e-2, rates.operator_s),
        synchronous=True,
        softmax_gscores_s=max(1e-3, rates.softmax_scores_s / 1e9),
        link_latency_s=min(1.0, link.latency_s),
        link_bandwidth=1.0,
        network_bandwidth=1.0,
        network_latency_s=min(1.0, link.latency_s),
        overlap=0.9 if nproc < cores() else 0.0,  # a transfer needs its own core to overlap
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
    """Main memory, or the limit of the control group if that is less."""
    least = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for file in map(Path, _LIMITS):
        text = file.read_text().strip() if file.is_file() else ""
        least = min(least, float(text)) if text.isdigit() else least
    return least
