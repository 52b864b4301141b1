"""Where the ranks of each group sit: tp innermost, then cp, then dp, and pp outermost.

The heaviest talker gets the nearest neighbours (playbook: TP inside the node, PP across). Expert groups run over the data
ranks (cp and dp together), next to tp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.specs.cluster import Cluster


@dataclass(frozen=True)
class CommGroup:
    """A communication group per row: its size, and how many of its members share one fast-link domain and one node."""

    size: Array
    per_domain: Array
    per_node: Array

    @property
    def leaves_domain(self) -> Array:
        return np.asarray(self.size > self.per_domain)


def group(size: Array, stride: Array, cluster: Cluster) -> CommGroup:
    """`stride` is the distance in ranks between neighbours of the group; domains and nodes hold consecutive ranks."""

    def members(ranks: int) -> Array:
        return np.asarray(np.clip(ranks // np.maximum(stride, 1), 1, size))

    return CommGroup(size, members(cluster.fast_domain), members(cluster.gpus_per_node))


@dataclass(frozen=True)
class GroupPlacement:
    tensor: CommGroup
    context: CommGroup
    data: CommGroup
    """every rank with the same non-expert weights: dp × cp"""
    shard: CommGroup
    """the data ranks that ZeRO shards over"""
    replica: CommGroup
    """HSDP: the ranks that hold the same shard"""
    expert: CommGroup
    expert_data: CommGroup
    """every rank with the same experts"""
    pipeline: CommGroup


def mesh(columns: LayoutColumns, cluster: Cluster) -> GroupPlacement:
    tp, cp, data = columns.tp, columns.cp, columns.data_ranks
    return GroupPlacement(
        tensor=group(tp, np.ones_like(tp), cluster),
        context=group(cp, tp, cluster),
        data=group(data, tp, cluster),
        shard=group(columns.shards, tp, cluster),
        replica=group(data // columns.shards, tp * columns.shards, cluster),
        expert=group(columns.ep, columns.expert_cut, cluster),
        expert_data=group(columns.expert_ranks // columns.ep, columns.expert_cut * columns.ep, cluster),
        pipeline=group(columns.pp, tp * data, cluster),
    )
