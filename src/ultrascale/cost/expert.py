"""Expert parallelism: two all-to-alls per MoE layer and direction, and what experts and shared experts compute meanwhile.

A shared expert's GEMMs hide both. With `expert_overlap: weight-gradients`, weight gradients of the experts hide the combine of
backward, unless a schedule defers them; and one in ep of a rank's rows has its expert on the rank itself: computed first, these
hide part of the dispatch. Two grouped GEMMs take longer than one (partial tiles, launches, two weight gradients to add), so
that is done only where it is faster in all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ultrascale.cost import host
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import compute_bytes
from ultrascale.cost.mesh import GroupPlacement
from ultrascale.cost.operators import layer_matmuls, matmul_passes, mlp_matmuls
from ultrascale.cost.overlap import CollectiveTransfer, OverlapRatio, exposed, transfer
from ultrascale.cost.passes import Passes
from ultrascale.specs.job import Job

EXCHANGES = 2  # dispatch and combine
# Of an all-to-all that Megatron's overlap with another micro-batch hides. Set by hand: the published pairs with and without it
# (mbqwen-001 and 002, mzqwen-001 and 002 of data/published.csv) are too few to fit it.
MICROBATCH_OVERLAP = 0.7


@dataclass(frozen=True)
class ExpertTraffic:
    exchange: CollectiveTransfer
    forward_s: Array
    """exposed, per MoE layer and micro-batch"""
    backward_s: Array
    behind_forward_s: Array | float = 0.0
    """of the experts' own products, what hides it: a window that hides nothing else"""
    behind_backward_s: Array | float = 0.0


def traffic(job: Job, columns: LayoutColumns, mesh: GroupPlacement, machine: ClusterRates) -> ExpertTraffic:
    model, moe = job.model, job.model.moe
    assert moe is not None
    routed = columns.tokens(job.seq) * moe.top_k * job.cluster.efficiency.expert_imbalance
    exchange = transfer(
        machine,
        "expert",
        "all_to_all",
        compute_bytes(job) * routed * model.hidden / columns.routed_cut(job.framework.transformer_engine),
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
    if job.framework.expert_overlap == "weight-gradients":
        return _behind(job, columns, machine, exchange, both, (window_forward, window_backward))
    seen = 1 - (MICROBATCH_OVERLAP if job.framework.expert_overlap == "microbatches" else 0.0)
    return ExpertTraffic(
        exchange,
        seen * exposed(both, window_forward, machine.efficiency),
        seen * exposed(both, window_backward, machine.efficiency),
    )


def rows_first(job: Job, columns: LayoutColumns, mesh: GroupPlacement, machine: ClusterRates) -> Array:
    """Where `expert_overlap: weight-gradients` multiplies rows that stay on their rank first."""
    return np.asarray(traffic(job, columns, mesh, machine).behind_forward_s > np.zeros(len(columns)))


def _behind(
    job: Job,
    columns: LayoutColumns,
    machine: ClusterRates,
    exchange: CollectiveTransfer,
    both: Array,
    windows: tuple[Array, Array],
) -> ExpertTraffic:
    """With gradients of the experts' matrices behind one of backward's exchanges, and rows that stay behind one of each pass
    where that is faster, its price included.
    """
    products = [product for product in layer_matmuls(job, columns, moe=True) if product.name.startswith("expert ")]
    staying = 1 / columns.ep
    whole, own, others = (
        matmul_passes(machine, [replace(product, m=share * product.m) for product in products])
        for share in (np.ones(len(columns)), staying, 1 - staying)
    )
    one = both / EXCHANGES / machine.efficiency.overlap  # a window beyond it hides nothing more
    split = columns.split_backward & (columns.pp > 1)
    late = np.where(split, 0.0, whole.weight_grad)

    def traffic_with(forward: Array, backward: Array) -> ExpertTraffic:
        behind = np.minimum(forward, one), np.minimum(backward, one)
        forward_s, backward_s = (exposed(both, w + more, machine.efficiency) for w, more in zip(windows, behind, strict=True))
        return ExpertTraffic(exchange, forward_s, backward_s, *behind)

    together, parted = traffic_with(np.zeros(len(columns)), late), traffic_with(own.forward, late + own.input_grad)
    kernels = host.constants().compiled_layer.local_tokens_first
    launch_s = np.full(len(columns), kernels * machine.launch_s * job.framework.launch)
    # The second gradient of the experts' matrices is read with the first, and their sum written.
    added_s = machine.stream_s(np.asarray(3 * compute_bytes(job) * sum(p.count * p.n * p.k for p in products)))
    price = own + others + Passes(launch_s, 2 * launch_s, added_s)
    forward_s = parted.forward_s + price.forward - whole.forward
    backward_s = parted.backward_s + price.input_grad + price.weight_grad - whole.input_grad - whole.weight_grad
    pays = forward_s + backward_s < together.forward_s + together.backward_s
    return ExpertTraffic(
        exchange,
        np.where(pays, forward_s, together.forward_s),
        np.where(pays, backward_s, together.backward_s),
        np.where(pays, parted.behind_forward_s, together.behind_forward_s),
        np.where(pays, parted.behind_backward_s, together.behind_backward_s),
    )


def _node_wise_s(job: Job, columns: LayoutColumns, mesh: GroupPlacement, machine: ClusterRates) -> Array:
    """One exchange in which a token crosses to each other domain at most once and is handed on there over the fast link.

    Of D domains a token with k choices meets D·(1 − (1 − 1/D)^k) in the mean; all but its own lie across the network.
    """
    moe = job.model.moe
    assert moe is not None
    group = mesh.expert
    domains = group.size / group.per_domain
    met = domains * (1 - (1 - 1 / domains) ** moe.top_k)
    token = (
        compute_bytes(job) * columns.tokens(job.seq) * job.model.hidden / columns.routed_cut(job.framework.transformer_engine)
    )
    across = met * (domains - 1) / domains * token / machine.inter.bytes_per_s
    inside = moe.top_k * token * (group.per_domain - 1) / group.per_domain / machine.intra("all_to_all").bytes_per_s
    return np.asarray(np.maximum(across, inside) + machine.inter.latency_s * (domains > 1) + machine.intra("all_to_all").base_s)


def ratio(ep: int, experts: int, hidden: int, expert_parameters: float, peak_flops: float, bandwidth: float) -> OverlapRatio:
    """Dispatch and combine of a routed token (2·2·h bytes, (EP−1)/EP of them leave) against its expert's 2·parameters FLOPs."""
    return OverlapRatio(
        "expert",
        "(EP−1)·peak_flops / (12·num_experts·h·peak_bw)",
        (ep - 1) * peak_flops / (12 * experts * hidden * bandwidth),
        "(EP−1)/EP·2·h·peak_flops / (expert_parameters·peak_bw)",
        (ep - 1) / ep * 2 * hidden * peak_flops / (expert_parameters * bandwidth),
        "the printed form counts one byte and one move an element, and lets every expert of a rank (6h² parameters each) see "
        "every token; a routed token moves twice and meets one expert",
    )
