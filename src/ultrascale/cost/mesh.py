"""Where the ranks of each group sit: tp innermost, then cp, then dp, and pp outermost.

The heaviest talker gets the nearest neighbours (playbook: TP inside the node, PP across). Expert groups run over the data
ranks (cp and dp together), next to tp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array, Columns
from ultrascale.specs.cluster import Cluster


@dataclass(frozen=True)
class Group:
    """A communication group per row: its size, and how many of its members share one fast-link domain and one node."""

    size: Array
    per_domain: Array
    per_node: Array

    @property
    def leaves_domain(self) -> Array:
        return np.asarray(self.size > self.per_domain)


def group(size: Array, stride: Array, cluster: Cluster) -> Group:
    """`stride` is the distance in ranks between neighbours of the group; domains and nodes hold consecutive ranks."""

    def members(ranks: int) -> Array:
        return np.asarray(np.clip(ranks // np.maximum(stride, 1), 1, size))

    return Group(size, members(cluster.fast_domain), members(cluster.gpus_per_node))


@dataclass(frozen=True)
class Mesh:
    tensor: Group
    context: Group
    data: Group
    """every rank with the same non-expert weights: dp × cp"""
    shard: Group
    """the data ranks that ZeRO shards over"""
    replica: Group
    """HSDP: the ranks that hold the same shard"""
    expert: Group
    expert_data: Group
    """every rank with the same experts"""
    pipeline: Group


def mesh(columns: Columns, cluster: Cluster) -> Mesh:
    tp, cp, data = columns.tp, columns.cp, columns.data_ranks
    return Mesh(
        tensor=group(tp, np.ones_like(tp), cluster),
        context=group(cp, tp, cluster),
        data=group(data, tp, cluster),
        shard=group(columns.shards, tp, cluster),
        replica=group(data // columns.shards, tp * columns.shards, cluster),
        expert=group(columns.ep, columns.expert_cut, cluster),
        expert_data=group(columns.expert_ranks // columns.ep, columns.expert_cut * columns.ep, cluster),
        pipeline=group(columns.pp, tp * data, cluster),
    )
