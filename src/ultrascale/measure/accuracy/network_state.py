"""The network of a measured run: its rate, and what the state of its job's network costs the host.

A row gives the rate per GPU, of a node, or as an all-reduce that its job timed before it trained. All constants here were
found on the playbook's sweep, whose jobs printed such an all-reduce (docs/lab.md, "The whole sweep"; tools/score_sweep.py fits
them on half of its jobs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ultrascale.measure.accuracy.fields import flag, number
from ultrascale.specs.cluster import Cluster

# Bus bandwidth between the two kinds of jobs that there are on 2, 4 and 8 nodes of eight H100: 430, 205 and 187 GB/s in the
# median where nothing is wrong, 330, 160 and 95 else.
DEGRADED_BELOW_GB_S = {2: 366.0, 4: 173.0, 8: 119.0}


@dataclass(frozen=True)
class NetworkState:
    call_s: float = 2.0e-4
    """host time of a tensor-parallel collective on a degraded network, per rank, beside what a healthy network's cost"""
    blocking_send_s: float = 0.26
    """a transfer between stages on different nodes, which blocks both, in nanotron before a fix; two or four a micro-batch"""
    least_rate: float = 0.65
    """of the line rate: training gets as much whatever a short all-reduce shows"""

    def network_gb_s(self, values: Mapping[str, str], cluster: Cluster) -> float:
        """Per GPU: as the row says it, or of a node, or from an all-reduce over all ranks, in which every NIC takes part."""
        if each := number(values, "network_gb_s"):
            return each
        if node_gbps := number(values, "node_network_gbps"):
            return node_gbps / 8 / cluster.gpus_per_node
        bus = number(values, "allreduce_gb_s")
        if bus is None or cluster.nodes == 1:
            return cluster.network_gb_s
        printed = bus / cluster.gpus_per_node / cluster.efficiency.network_bandwidth
        return max(printed, self.least_rate * cluster.network_gb_s)

    def constants(self, values: Mapping[str, str], cluster: Cluster, pp: int) -> dict[str, float]:
        """Constants of the cluster that follow from the state of the row's network."""
        found: dict[str, float] = {}
        if latency_us := number(values, "network_latency_us"):
            found["network_latency_s"] = latency_us * 1e-6
        if cluster.nodes == 1:
            return found
        bus = number(values, "allreduce_gb_s")
        if bus is not None and bus < degraded_below_gb_s(cluster.nodes):
            found |= {"link_call_s": self.call_s, "network_call_s": self.call_s + cluster.efficiency.network_call_s}
        if flag(values, "after_pp_fix") is False and pp > 1:
            found["action_overhead_s"] = self.blocking_send_s * min(2, pp - 1)
        return found


NETWORK_STATE = NetworkState()


def degraded_below_gb_s(nodes: int) -> float:
    """On more nodes than were seen as on the most of those."""
    return math.exp(
        float(np.interp(math.log(nodes), np.log(list(DEGRADED_BELOW_GB_S)), np.log(list(DEGRADED_BELOW_GB_S.values()))))
    )
