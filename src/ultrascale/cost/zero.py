"""ZeRO 1–3 and HSDP: what is gathered and scattered, how often, and what computing hides.

Playbook: ZeRO-1 reduces gradients as plain data parallelism does and gathers parameters at the step's end; ZeRO-2 turns the
reduction into a reduce-scatter; ZeRO-3 gathers every layer before its forward and again before its backward. To keep
gradients sharded while accumulating, ZeRO-2 and 3 scatter them in every micro-batch. Weights of products in fp8 may be gathered
in fp8 (cost/memory/states.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import compute_bytes, fp8_saving, gradient_bytes
from ultrascale.cost.mesh import GroupPlacement, group
from ultrascale.cost.overlap import CollectiveTransfer, OverlapRatio, transfer
from ultrascale.specs.job import Job


@dataclass(frozen=True)
class ZeroTraffic:
    """Of one layer (or of all a rank holds, as the elements given): dense parameters and experts have groups of their own."""

    gather: CollectiveTransfer
    scatter: CollectiveTransfer
    expert_gather: CollectiveTransfer
    expert_scatter: CollectiveTransfer

    @property
    def gather_s(self) -> Array:
        return np.asarray(self.gather.time_s + self.expert_gather.time_s)

    @property
    def scatter_s(self) -> Array:
        return np.asarray(self.scatter.time_s + self.expert_scatter.time_s)


def traffic(
    job: Job,
    columns: LayoutColumns,
    mesh: GroupPlacement,
    machine: ClusterRates,
    elements: Array,
    expert_elements: Array,
    narrow: Array | float = 0.0,
) -> ZeroTraffic:
    """`narrow` of the elements are gathered in fp8."""
    b, g = compute_bytes(job), gradient_bytes(job)
    whole_experts = columns.tp // columns.expert_cut
    expert_shards = np.maximum(1, columns.shards * whole_experts // columns.ep)
    experts = group(expert_shards, columns.expert_cut * columns.ep, machine.cluster)
    return ZeroTraffic(
        transfer(machine, "zero", "all_gather", b * elements - fp8_saving(job, narrow), mesh.shard),
        transfer(machine, "zero", "reduce_scatter", g * elements, mesh.shard),
        transfer(machine, "zero", "all_gather", b * expert_elements, experts),
        transfer(machine, "zero", "reduce_scatter", g * expert_elements, experts),
    )


def ratio_2(dp: int, parameters: float, tokens: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    return OverlapRatio(
        "zero-2",
        "(DP−1)·num_params·peak_flops / (4·peak_bw·num_tokens·DP)",
        (dp - 1) * parameters * peak_flops / (4 * bandwidth * tokens * dp),
        "(DP−1)/DP·peak_flops / (2·peak_bw·num_tokens)",
        (dp - 1) / dp * peak_flops / (2 * bandwidth * tokens),
        "the printed form carries num_params, so it is no ratio; a reduce-scatter of 2N bytes meets 4N·tokens FLOPs",
    )


def ratio_3(dp: int, tokens: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    return OverlapRatio(
        "zero-3",
        "(DP−1)·peak_flops / (2·seq·mbs·peak_bw)",
        (dp - 1) * peak_flops / (2 * tokens * bandwidth),
        "(DP−1)/DP·peak_flops / (seq·mbs·peak_bw)",
        (dp - 1) / dp * peak_flops / (tokens * bandwidth),
        "the printed form counts one byte a parameter and DP−1 whole layers; an all-gather of 2P bytes moves (DP−1)/DP of "
        "them and meets the 2P·tokens FLOPs of the next layer's forward",
    )
