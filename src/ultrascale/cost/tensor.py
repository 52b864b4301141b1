"""Tensor and sequence parallelism: what every layer exchanges inside the tp group, on the critical path.

Playbook: ×4 per layer, forward all-gather of activations and backward reduce-scatter of gradients. With sequence parallelism
each region is entered by an all-gather and left by a reduce-scatter; without it each is left by one all-reduce, which moves
the same bytes (Korthikanti 2022, section 4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import compute_bytes
from ultrascale.cost.mesh import GroupPlacement
from ultrascale.cost.overlap import CollectiveTransfer, OverlapRatio, transfer
from ultrascale.specs.job import Job

REGIONS = 2  # attention and MLP


@dataclass(frozen=True)
class TensorTraffic:
    gather: CollectiveTransfer
    scatter: CollectiveTransfer
    reduce: CollectiveTransfer
    with_sequence: Array

    @property
    def region_s(self) -> Array:
        """Entering and leaving one region, forward or backward."""
        return np.where(self.with_sequence, self.gather.time_s + self.scatter.time_s, self.reduce.time_s)

    @property
    def layer_s(self) -> Array:
        """One direction of one layer."""
        return np.asarray(REGIONS * self.region_s)

    @property
    def gather_again_s(self) -> Array:
        """Backward gathers the saved, sequence-cut inputs once more for the weight gradients; it hides behind products."""
        return np.where(self.with_sequence, REGIONS * self.gather.time_s, 0.0)


def traffic(job: Job, columns: LayoutColumns, mesh: GroupPlacement, machine: ClusterRates) -> TensorTraffic:
    wide = compute_bytes(job) * columns.tokens(job.seq) * job.model.hidden
    return TensorTraffic(
        transfer(machine, "tensor", "all_gather", wide, mesh.tensor),
        transfer(machine, "tensor", "reduce_scatter", wide, mesh.tensor),
        transfer(machine, "tensor", "all_reduce", wide, mesh.tensor),
        columns.sequence_parallel == 1,
    )


def pieced_s(job: Job, columns: LayoutColumns, inside: TensorTraffic, moe: bool) -> Array:
    """Of one direction of one layer, what may hide behind products that are cut along with the exchange.

    Transformer Engine's user buffers pass one rank's piece on while the product of the piece already there runs, so all but one
    of tp pieces may hide. They need sequence parallelism, and experts' products are not cut.
    """
    share = 0.0 if moe else job.framework.tensor_overlap
    return np.where(inside.with_sequence, share * (1 - 1 / columns.tp) * inside.layer_s, 0.0)


def ratio(tp: int, hidden: int, layer_parameters: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    """One exchange of s·mbs·h bf16 elements against the next region's share of the layer (half of it in the mean)."""
    return OverlapRatio(
        "tensor",
        "(TP−1)·peak_flops / (24·h·peak_bw)",
        (tp - 1) * peak_flops / (24 * hidden * bandwidth),
        "2·h·(TP−1)·peak_flops / (layer_parameters·peak_bw)",
        2 * hidden * (tp - 1) * peak_flops / (layer_parameters * bandwidth),
        "the printed form counts one byte an element and a whole layer of 12h² parameters for each of its four exchanges",
    )
