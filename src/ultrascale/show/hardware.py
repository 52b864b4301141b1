"""A measured machine, as `bench hardware` shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.cost.hardware import UNMEASURED_MATMUL, sustained
from ultrascale.show.lines import heading
from ultrascale.specs.cluster import Cluster


def hardware_json(cluster: Cluster) -> dict[str, Any]:
    return {"cluster": cluster.to_mapping()}


def show_hardware(console: Console, cluster: Cluster, file: Path | None) -> None:
    gpu, constants = cluster.gpu, cluster.efficiency
    heading(console, f"{cluster.label}, measured")
    table = Table(box=None, pad_edge=False)
    for name in ("what", "measured", "of"):
        table.add_column(name, justify="right" if name == "measured" else "left")
    if gpu.surface is None:
        flops = max(gpu.peak_tflops.values()) * UNMEASURED_MATMUL * (constants.matmul or 1.0)
        table.add_row("products", f"{flops:,.3g} TFLOP/s", "each process, while all work")
        table.add_row("memory", f"{gpu.memory_bandwidth_gb_s * constants.memory_bandwidth:,.0f} GB/s", "read and written")
    else:
        usual = sustained(gpu)["bf16"]
        table.add_row("products", f"{100 * (constants.matmul or usual):.0f} %", f"the kind's table; long runs kept {usual:.0%}")
        table.add_row("memory", f"{100 * constants.memory_bandwidth:.0f} %", f"{gpu.memory_bandwidth_gb_s:,.0f} GB/s")
    for name, share in (("forward", constants.attention_forward), ("backward", constants.attention_backward)):
        if share is not None:
            table.add_row(f"attention, {name}", f"{100 * share:.0f} %", "the peak rate of products, in long rows")
    table.add_row("launch of a kernel", f"{1e6 * constants.kernel_launch_s:.1f} µs", "the host's time")
    console.print(table)
    if file is not None:
        console.print(f"written to {file}: `ultrascale plan --cluster {file} …` plans with it")
