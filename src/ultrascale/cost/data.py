"""Data parallelism: the reduction of gradients, and how much of the last backward hides it.

Playbook: naive (everything after backward), per-parameter hooks, buckets; and no reduction but in the last micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import gradient_bytes
from ultrascale.cost.mesh import GroupPlacement
from ultrascale.cost.overlap import CollectiveTransfer, OverlapRatio, exposed, transfer
from ultrascale.specs.job import Job

# Tensors of one layer that a hook would reduce one by one: q, k, v, o, gate, up, down and two norms.
TENSORS_PER_LAYER = 9


@dataclass(frozen=True)
class DataTraffic:
    reduce: CollectiveTransfer
    expert_reduce: CollectiveTransfer

    @property
    def time_s(self) -> Array:
        return np.asarray(self.reduce.time_s + self.expert_reduce.time_s)


def traffic(
    job: Job, columns: LayoutColumns, mesh: GroupPlacement, machine: ClusterRates, elements: Array, expert_elements: Array
) -> DataTraffic:
    g = gradient_bytes(job)
    return DataTraffic(
        transfer(machine, "data", "all_reduce", g * elements, mesh.data),
        transfer(machine, "data", "all_reduce", g * expert_elements, mesh.expert_data),
    )


def exposed_s(columns: LayoutColumns, machine: ClusterRates, reduction: Array, backward: Array, layers: Array) -> Array:
    """Seconds that the step waits for the reduction, by variant.

    Naive hides nothing. Hooks start each tensor as it is ready but pay a collective's latency per tensor; buckets pay it per
    layer. Whatever the window, the last piece (the first layer's gradients) has nothing left to hide behind.
    """
    pieces = np.maximum(layers, 1)
    latency = machine.intra("all_reduce").base_s + machine.inter.latency_s
    per_tensor = reduction + np.where(reduction > 0, latency * TENSORS_PER_LAYER * pieces, 0.0)
    hooked = np.where(columns.is_("data_parallel", "hooks"), per_tensor, reduction)
    window = backward * (pieces - 1) / pieces
    hidden = exposed(hooked * (pieces - 1) / pieces, window, machine.efficiency) + hooked / pieces
    return np.where(columns.is_("data_parallel", "naive"), reduction, hidden)


def ratio(dp: int, parameters: float, tokens: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    return OverlapRatio(
        "data",
        "(DP−1)·num_params·peak_flops / (2·peak_bw·num_tokens·DP)",
        (dp - 1) * parameters * peak_flops / (2 * bandwidth * tokens * dp),
        "(DP−1)/DP·peak_flops / (peak_bw·num_tokens)",
        (dp - 1) / dp * peak_flops / (bandwidth * tokens),
        "the printed form carries num_params, so it is no ratio; an all-reduce of 2N bytes moves 4N·(DP−1)/DP and meets "
        "the 4N·tokens FLOPs of backward",
    )
