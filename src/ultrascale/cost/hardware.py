"""The cluster as the laws of time see it: rates of matmuls, streams and links, and where each of them came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ultrascale.cost import kernels, network
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.kernels import AttentionRate, attention_rate, attention_rates
from ultrascale.cost.network import CommGroup, GroupPlacement, Link, Op, mesh
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import Job

# Products of a chip without a measured table run at this share of its peak; the estimate says so.
UNMEASURED_MATMUL = 0.5
# A chip without NVLink measurements gets this share of its link's data sheet and this latency per hop; the estimate says so.
UNMEASURED_LINK = 0.75
UNMEASURED_LATENCY_S = 2e-6


# Share of the matmul rate measured alone that a training step sustains, hour after hour at the power limit.
SUSTAINED: dict[str, dict[str, float]] = {
    "ampere": {"bf16": 1.00, "fp8": 1.00},
    "hopper": {"bf16": 0.88, "fp8": 1.15},
    "blackwell": {"bf16": 0.69, "fp8": 1.08},
}
# The parts on which the surfaces were measured; one that has less power for its peak computes in proportion.
MEASURED_ON = {
    "a100_sxm": "a100-80",
    "h100_sxm": "h100",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "b300_sxm": "b300",
    "gb200": "gb200",
}


def sustained(gpu: GPU) -> dict[str, float]:
    """What the kind keeps of the measured rate; a chip that was not measured keeps all of what is assumed for it."""
    if gpu.surface is None:
        return {"bf16": 1.0, "fp8": 1.0}
    capped = min(1.0, _power(gpu) / _power(GPU.load(MEASURED_ON[gpu.surface])))
    share = SUSTAINED.get(gpu.architecture, {"bf16": 0.9, "fp8": 0.9})
    same_family = not gpu.surface_note or gpu.architecture == "hopper"
    return {precision: value * (capped if same_family else 1.0) for precision, value in share.items()}


def _power(gpu: GPU) -> float:
    """W for each TFLOP/s of its widest tensor-core rate."""
    return gpu.power_w / max(gpu.peak_tflops.get(precision, 0.0) for precision in ("bf16", "fp16", "fp32"))


# FLOPs of a layer over its time and over what matmuls in a row are said to keep, above which power leaves no more than the
# clock of these: below it, steps of eight models on an H200 are faster than that clock would have them (docs/time.md).
FULL_WORK = 0.55


class ClusterRates:
    """Rates of one job's cluster in the job's precision."""

    def __init__(self, job: Job) -> None:
        cluster, gpu = job.cluster, job.cluster.gpu
        self.efficiency = cluster.efficiency
        self.framework = job.framework
        self.gpu = gpu
        self.cluster = cluster
        self.peak_flops = job.peak_flops
        self.is_fp8 = job.precision == "fp8"
        self.wide_precision = "bf16" if self.is_fp8 else job.precision
        self.attention_peak_flops = gpu.peak_tflops.get(self.wide_precision, job.peak_flops / 2e12) * 1e12
        self.stream_bytes_s = gpu.memory_bandwidth_gb_s * 1e9 * self.efficiency.memory_bandwidth
        self.launch_s = 0.0 if gpu.architecture == "cpu" else self.efficiency.kernel_launch_s
        self.surface = self._surface("bf16")
        self.fp8_surface = self._surface("fp8") if self.is_fp8 else None
        self.fabric = network.load_fabric(gpu.surface) if gpu.surface else None
        self.inter = Link(cluster.network_gb_s * self.efficiency.network_bandwidth, self.efficiency.network_latency_s)
        host_gb_s = gpu.pcie_bandwidth_gb_s * self.efficiency.host_link
        self.host = Link(host_gb_s, self.efficiency.network_latency_s)
        self.attention = self._attention_rate()
        self.sustained = sustained(gpu)
        self._intra: dict[Op, Link] = {}

    def _surface(self, dtype: str) -> kernels.Surface | None:
        table = self.gpu.surface
        known = table is not None and (table.removesuffix("_sxm"), dtype) in kernels.gemm_surfaces()
        return kernels.load_surface(table, dtype) if table and known else None

    def _attention_rate(self) -> AttentionRate:
        rate = attention_rate(self.framework.attention, self.gpu.architecture) or attention_rates()["flash"]["ampere"]
        forward, backward = self.efficiency.attention_forward, self.efficiency.attention_backward
        return replace(rate, forward=forward or rate.forward, backward=backward or rate.backward)

    def clock(self, flops: Array, seconds: Array) -> Array:
        """Over the clock of matmuls in a row: a GPU at its power limit is the faster the less its matrix units do.

        Power grows as their work and the cube of the clock, so that the clock goes with the cube root of the work.
        """
        sustained = self.attention_peak_flops * (self.efficiency.matmul or self.sustained["bf16"])
        work = flops / np.maximum(seconds, 1e-12) / sustained
        return np.clip(np.cbrt(FULL_WORK / np.maximum(work, 1e-6)), 1.0, self.efficiency.boost)

    def matmul_s(self, m: Array, n: Array, k: Array, in_fp8: bool = True) -> Array:
        """Seconds of [m, k] × [k, n] in the job's precision, or in bf16 where fp8 is not used."""
        fp8 = self.is_fp8 and in_fp8
        peak = self.peak_flops if fp8 or not self.is_fp8 else self.attention_peak_flops
        surface = self.fp8_surface if fp8 else self.surface
        if surface is None:
            time = 2.0 * m * n * k / (peak * UNMEASURED_MATMUL * (self.efficiency.matmul or 1.0))
            return np.asarray(time + (self._operands_s(m, n, k) if self.efficiency.synchronous else 0.0))
        time = kernels.gemm_time_s(
            surface,
            m,
            n,
            k,
            peak_tflops=peak / 1e12,
            memory_bandwidth_gb_s=self.gpu.memory_bandwidth_gb_s,
            multiprocessors=self.gpu.multiprocessors or surface.multiprocessors,
            quantize=False,
            steady=True,
            ramp=self.efficiency.matmul_ramp,
        )
        given = self.efficiency.matmul_fp8 if fp8 else self.efficiency.matmul
        return np.asarray(time / (given or self.sustained["fp8" if fp8 else "bf16"]))

    def _operands_s(self, m: Array, n: Array, k: Array) -> Array:
        """A CPU's matmuls read and write as other operators do: no thread goes ahead to fetch for them."""
        return self.stream_s((4 if self.wide_precision == "fp32" else 2) * (m * k + k * n + m * n))

    def stream_s(self, bytes_: Array) -> Array:
        """A memory-bound pass: bytes read and written over the bandwidth that such passes get."""
        return np.asarray(bytes_ / self.stream_bytes_s)

    def intra(self, op: Op) -> Link:
        """The fast link as `op` finds it: measured, unless the cluster file says otherwise."""
        if op not in self._intra:
            self._intra[op] = self._intra_link(op)
        return self._intra[op]

    def _intra_link(self, op: Op) -> Link:
        rate, fixed = self.cluster.link_bandwidth_gb_s, self.efficiency
        if self.fabric is None:
            latency = UNMEASURED_LATENCY_S if fixed.link_latency_s is None else fixed.link_latency_s
            return Link(rate * (fixed.link_bandwidth or UNMEASURED_LINK), latency)
        link = self.fabric.link(op, rate)
        bandwidth_gb_s = link.bandwidth_gb_s if fixed.link_bandwidth is None else rate * fixed.link_bandwidth
        latency_s = link.latency_s if fixed.link_latency_s is None else fixed.link_latency_s
        return replace(link, bandwidth_gb_s=bandwidth_gb_s, latency_s=latency_s)

    def collective_s(self, op: Op, bytes_: Array, group: CommGroup) -> Array:
        if self.efficiency.synchronous and op == "reduce_scatter":
            op = "all_reduce"  # gloo's own is one inside, of which each rank keeps its part
        per_domain = group.per_domain
        if not self.framework.rails and op != "send_recv":
            per_domain = np.where(group.leaves_domain, 1, per_domain)

        def over(inter: Link) -> Array:
            return network.collective_time_s(op, bytes_, group.size, per_node=per_domain, intra=self.intra(op), inter=inter)

        if self.cluster.link_domain >= self.cluster.gpus_per_node:
            return over(self.inter)
        # Three tiers: bridged pairs or lone cards talk over PCIe inside the node before anything reaches the network.
        return np.where(group.size <= group.per_node, over(self.host), over(self.inter))

    def send_s(self, bytes_: Array, group: CommGroup) -> Array:
        """A hop between neighbours of the group: over the network when the group leaves its domain."""
        per_domain = np.where(group.leaves_domain, 1, 2)
        pair = CommGroup(np.minimum(group.size, 2), per_domain, np.where(group.size > group.per_node, 1, 2))
        return self.collective_s("send_recv", bytes_, pair)

    def notes(self) -> list[str]:
        """What is borrowed or assumed about this hardware."""
        gpu, notes = self.gpu, [] if self.cluster.calibrated is None else [str(self.cluster.calibrated)]
        if self.efficiency.synchronous:
            return [
                *notes,
                f"{gpu.name}: rates of this machine, measured when it was detected; one rate for matmuls of every shape",
            ]
        if self.surface is None:
            notes.append(f"{gpu.name} has no measured matmuls: {UNMEASURED_MATMUL:.0%} of its peak is assumed for every shape")
        else:
            about = f"matmuls from {self.surface.rows:,} measured on {self.surface.gpu}"
            about += f" (median error of the fit {self.surface.training_residual_median:.1%} on training shapes)"
            notes.append(f"{about}: {gpu.surface_note}" if gpu.surface_note else about)
        if self.is_fp8 and self.fp8_surface is None:
            notes.append(f"{gpu.name} has no measured fp8 matmuls: {UNMEASURED_MATMUL:.0%} of its fp8 peak is assumed")
        if self.wide_precision not in ("bf16", "fp16") and self.surface is not None:
            notes.append(f"{self.wide_precision} matmuls take the bf16 surface's share of their own peak")
        if self.fabric is None and self.cluster.gpus > 1:
            notes.append(f"{gpu.name} has no measured collectives: {UNMEASURED_LINK:.0%} of its link's data sheet is assumed")
        if gpu.architecture not in attention_rates()["flash"]:
            notes.append(f"attention on {gpu.architecture} is assumed to reach the share of ampere")
        else:
            notes.append(f"attention rate: {self.attention.source}")
        return notes


@dataclass(frozen=True)
class Workload:
    """Layouts of one job, a row each, on its cluster: what communication and a step's time depend on."""

    job: Job
    columns: LayoutColumns
    machine: ClusterRates

    @cached_property
    def places(self) -> GroupPlacement:
        return mesh(self.columns, self.machine.cluster)
