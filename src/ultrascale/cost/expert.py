"""Expert parallelism: two all-to-alls per MoE layer and direction, hidden only by a shared expert's work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.activations import compute_bytes
from ultrascale.cost.columns import Array, Columns
from ultrascale.cost.hardware import Machine
from ultrascale.cost.mesh import Mesh
from ultrascale.cost.operators import matmul_passes, mlp_matmuls
from ultrascale.cost.overlap import Ratio, Transfer, exposed, transfer
from ultrascale.specs.job import Job

EXCHANGES = 2  # dispatch and combine


@dataclass(frozen=True)
class ExpertTraffic:
    exchange: Transfer
    forward_s: Array
    """exposed, per MoE layer and micro-batch"""
    backward_s: Array


def traffic(job: Job, columns: Columns, mesh: Mesh, machine: Machine) -> ExpertTraffic:
    model, moe = job.model, job.model.moe
    assert moe is not None
    routed = columns.tokens(job.seq) * moe.top_k * job.cluster.efficiency.expert_imbalance
    exchange = transfer(
        machine,
        "expert",
        "all_to_all",
        compute_bytes(job) * routed * model.hidden / columns.routed_cut(job.framework.sliced_routing),
        mesh.expert,
    )
    both = EXCHANGES * exchange.time_s
    if job.framework.dispatch == "node-wise":
        both = EXCHANGES * np.minimum(exchange.time_s, _node_wise_s(job, columns, mesh, machine))
    window_forward = window_backward = np.zeros(len(columns))
    if moe.shared_experts:
        width = (moe.shared_expert_ffn or 0) / columns.tp
        shared = matmul_passes(machine, mlp_matmuls(model, "shared expert", columns.tokens(job.seq), width))
        window_forward, window_backward = shared.forward, shared.input_grad + shared.weight_grad
    seen = 1 - job.framework.expert_overlap
    return ExpertTraffic(
        exchange,
        seen * exposed(both, window_forward, machine.efficiency),
        seen * exposed(both, window_backward, machine.efficiency),
    )


def _node_wise_s(job: Job, columns: Columns, mesh: Mesh, machine: Machine) -> Array:
    """One exchange in which a token crosses to each other domain at most once and is handed on there over the fast link.

    Of D domains a token with k choices meets D·(1 − (1 − 1/D)^k) in the mean; all but its own lie across the network.
    """
    moe = job.model.moe
    assert moe is not None
    group = mesh.expert
    domains = group.size / group.per_domain
    met = domains * (1 - (1 - 1 / domains) ** moe.top_k)
    token = compute_bytes(job) * columns.tokens(job.seq) * job.model.hidden / columns.routed_cut(job.framework.sliced_routing)
    across = met * (domains - 1) / domains * token / machine.inter.bytes_per_s
    inside = moe.top_k * token * (group.per_domain - 1) / group.per_domain / machine.intra("all_to_all").bytes_per_s
    return np.asarray(np.maximum(across, inside) + machine.inter.latency_s * (domains > 1) + machine.intra("all_to_all").base_s)


def ratio(ep: int, experts: int, hidden: int, expert_parameters: float, peak_flops: float, bandwidth: float) -> Ratio:
    """Dispatch and combine of a routed token (2·2·h bytes, (EP−1)/EP of them leave) against its expert's 2·parameters FLOPs."""
    return Ratio(
        "expert",
        "(EP−1)·peak_flops / (12·num_experts·h·peak_bw)",
        (ep - 1) * peak_flops / (12 * experts * hidden * bandwidth),
        "(EP−1)/EP·2·h·peak_flops / (expert_parameters·peak_bw)",
        (ep - 1) / ep * 2 * hidden * peak_flops / (expert_parameters * bandwidth),
        "the printed form counts one byte and one move an element, and lets every expert of a rank (6h² parameters each) see "
        "every token; a routed token moves twice and meets one expert",
    )
