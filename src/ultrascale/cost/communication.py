"""What each technique communicates, how long it takes and what computation hides: dp, ZeRO, tp, cp, ep, pp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ultrascale.cost import host
from ultrascale.cost.columns import Array, LayoutColumns, Passes
from ultrascale.cost.hardware import Workload
from ultrascale.cost.memory.states import (
    FP32,
    RankParameters,
    compute_bytes,
    fp8_saving,
    gradient_bytes,
    routes_slices,
    trained_fraction,
    uses_fused_blocks,
)
from ultrascale.cost.network import CollectiveTransfer, CommGroup, Op, exposed, group, transfer
from ultrascale.cost.operators import layer_matmuls, matmul_passes, mlp_matmuls
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.job import Job

# ----------------------------------------------------------------------------------------------------------------------- data
# Data parallelism: the reduction of gradients, and how much of the last backward hides it.
#
# Playbook: naive (everything after backward), per-parameter hooks, buckets; and no reduction but in the last micro-batch.


# Tensors of one layer that a hook would reduce one by one: q, k, v, o, gate, up, down and two norms.
TENSORS_PER_LAYER = 9


def data_traffic(work: Workload, params: RankParameters) -> tuple[CollectiveTransfer, ...]:
    """The reduction of the trunk's gradients, and of the experts'."""
    groups = ((params.trunk, work.places.data), (params.experts, work.places.expert_data))
    b = trained_fraction(work.job) * gradient_bytes(work.job)
    return tuple(transfer(work.machine, "data", "all_reduce", b * each, group) for each, group in groups)


def reduced_bytes(job: Job) -> float:
    """Bytes of an element's gradient on its way between ZeRO's ranks, in the mean over the model's elements."""
    each = compute_bytes(job) if job.framework.accumulation == "bf16-and-fp32" else gradient_bytes(job)
    return trained_fraction(job) * each


def data_exposed_s(work: Workload, reduction: Array, backward: Array, layers: Array) -> Array:
    """Seconds that the step waits for the reduction, by variant.

    Naive hides nothing. Hooks start each tensor as it is ready but pay a collective's latency per tensor; buckets pay it per
    layer. Whatever the window, the last piece (the first layer's gradients) has nothing left to hide behind. ZeRO reduces
    layer by layer, whatever the variant.
    """
    columns, machine = work.columns, work.machine
    whole = (columns.zero == 0) | (columns.shards == 1)
    pieces = np.maximum(layers, 1)
    latency = machine.intra("all_reduce").base_s + machine.inter.latency_s
    per_tensor = reduction + np.where(reduction > 0, latency * TENSORS_PER_LAYER * pieces, 0.0)
    hooked = np.where(columns.is_("data_parallel", "hooks") & whole, per_tensor, reduction)
    window = backward * (pieces - 1) / pieces
    hidden = exposed(hooked * (pieces - 1) / pieces, window, machine.efficiency) + hooked / pieces
    return np.where(columns.is_("data_parallel", "naive") & whole, reduction, hidden)


# ----------------------------------------------------------------------------------------------------------------------- zero
# ZeRO 1–3 and HSDP: what is gathered and scattered, how often, and what computing hides.
#
# Playbook: ZeRO-1 reduces gradients as plain data parallelism does and gathers parameters at the step's end; ZeRO-2 turns the
# reduction into a reduce-scatter; ZeRO-3 gathers every layer before its forward and again before its backward. To keep
# gradients sharded while accumulating, ZeRO-2 and 3 scatter them in every micro-batch. Weights of fp8 GEMMs may be gathered in
# fp8.


@dataclass(frozen=True)
class ZeroTraffic:
    """Of one layer (or of all a rank holds, as the elements given): dense parameters and experts have groups of their own.

    Each collective is timed when it is first asked for: most callers want one.
    """

    work: Workload
    elements: Array
    expert_elements: Array
    narrow: Array | float = 0.0
    """of the elements, those gathered in fp8"""

    @cached_property
    def gather(self) -> CollectiveTransfer:
        job = self.work.job
        return self._transfer("all_gather", compute_bytes(job) * self.elements - fp8_saving(job, self.narrow))

    @cached_property
    def scatter(self) -> CollectiveTransfer:
        return self._transfer("reduce_scatter", reduced_bytes(self.work.job) * self.elements)

    @cached_property
    def expert_gather(self) -> CollectiveTransfer:
        size = compute_bytes(self.work.job) * self.expert_elements
        return transfer(self.work.machine, "zero", "all_gather", size, self.expert_group)

    @cached_property
    def expert_scatter(self) -> CollectiveTransfer:
        size = reduced_bytes(self.work.job) * self.expert_elements
        return transfer(self.work.machine, "zero", "reduce_scatter", size, self.expert_group)

    @cached_property
    def expert_group(self) -> CommGroup:
        columns = self.work.columns
        shards = np.maximum(1, columns.shards * (columns.tp // columns.expert_cut) // columns.ep)
        return group(shards, columns.expert_cut * columns.ep, self.work.machine.cluster)

    def _transfer(self, collective: Op, size: Array) -> CollectiveTransfer:
        return transfer(self.work.machine, "zero", collective, size, self.work.places.shard)

    @property
    def gather_s(self) -> Array:
        return self.gather.time_s if self._dense else np.asarray(self.gather.time_s + self.expert_gather.time_s)

    @property
    def scatter_s(self) -> Array:
        return self.scatter.time_s if self._dense else np.asarray(self.scatter.time_s + self.expert_scatter.time_s)

    @property
    def _dense(self) -> bool:
        return self.work.job.model.moe is None


# --------------------------------------------------------------------------------------------------------------------- tensor
# Tensor and sequence parallelism: what every layer sends inside the tp group, on the critical path.
#
# Playbook: ×4 per layer, forward all-gather of activations and backward reduce-scatter of gradients. With sequence parallelism
# each region is entered by an all-gather and left by a reduce-scatter; without it each is left by one all-reduce, which moves
# the same bytes (Korthikanti 2022, section 4.2.2).


SUBLAYERS = 2  # attention and MLP


@dataclass(frozen=True)
class LatentTransfers:
    """Of one input of latent attention: gathered in forward, its gradient scattered, without sequence parallelism reduced."""

    gather: CollectiveTransfer
    scatter: CollectiveTransfer
    reduce: CollectiveTransfer
    gathered_again: bool
    """in backward, for weight gradients"""


@dataclass(frozen=True)
class TensorTraffic:
    gather: CollectiveTransfer
    scatter: CollectiveTransfer
    reduce: CollectiveTransfer
    with_sequence: Array
    gathers_gradients_again: Array
    """fused blocks with a split backward keep slices of output gradients, too, for the weight gradients"""
    narrow_gather: CollectiveTransfer
    """of fused blocks in fp8"""
    scales: CollectiveTransfer
    """of rows, gathered with them in forward"""
    agreement: CollectiveTransfer
    """on the scale of an output gradient"""
    narrow_share: Array
    """of the layers, those in fp8"""
    latents: tuple[LatentTransfers, ...] = ()
    """what enters latent attention in our engine: the inputs of the up-projections, and the rotated key of all heads"""

    def layer_s(self, kind: LayerKind) -> Array:
        """One direction of one layer: each region is entered and left."""
        # Either direction waits for scales: they are gathered, or agreed upon.
        gather_s = self.layer_gather_s + self.narrow_share * self.scales.time_s
        region = np.where(self.with_sequence, gather_s + self.scatter.time_s, self.reduce.time_s)
        if not self.latents:
            return np.asarray(kind.sublayers * region)
        entered_s = np.where(self.with_sequence, sum(one.gather.time_s for one in self.latents) - gather_s, 0.0)
        return np.asarray(kind.sublayers * region + entered_s)

    @property
    def layer_gather_s(self) -> Array:
        return np.asarray(self.gather.time_s + self.narrow_share * (self.narrow_gather.time_s - self.gather.time_s))

    def gather_again_s(self, kind: LayerKind) -> Array:
        """Backward gathers the saved, sequence-cut inputs once more for the weight gradients; it hides behind matmuls."""
        return np.where(self.with_sequence, kind.sublayers * (1 + self.gathers_gradients_again) * self.layer_gather_s, 0.0)


def tensor_traffic(work: Workload) -> TensorTraffic:
    job, columns, machine, places = work.job, work.columns, work.machine, work.places
    tokens, model = columns.tokens(job.seq), job.model
    wide = compute_bytes(job) * tokens * model.hidden
    in_fp8 = uses_fused_blocks(job, columns) & (job.precision == "fp8")
    return TensorTraffic(
        transfer(machine, "tensor", "all_gather", wide, places.tensor),
        transfer(machine, "tensor", "reduce_scatter", wide, places.tensor),
        transfer(machine, "tensor", "all_reduce", wide, places.tensor),
        columns.sequence_parallel == 1,
        uses_fused_blocks(job, columns) & columns.split_backward & (columns.pp > 1),
        transfer(machine, "tensor", "all_gather", tokens * model.hidden, places.tensor),
        transfer(machine, "tensor", "all_gather", FP32 * tokens, places.tensor),
        transfer(machine, "tensor", "all_reduce", FP32 + 0.0 * tokens, places.tensor),
        in_fp8 * max(0, model.all_layers - 2) / model.all_layers,
        tuple(_latent_transfers(work)) if model.mla is not None and job.framework.exact_memory_trace else (),
    )


def _latent_transfers(work: Workload) -> Iterator[LatentTransfers]:
    mla, job = work.job.model.mla, work.job
    assert mla is not None
    inputs = {"q": mla.q_lora_rank or job.model.hidden, "kv": mla.kv_lora_rank, "key": mla.qk_rope_head_dim}
    for name, width in inputs.items():
        size = compute_bytes(job) * work.columns.tokens(job.seq) * width
        gather, scatter, reduce = (
            transfer(work.machine, "tensor", op, size, work.places.tensor)
            for op in ("all_gather", "reduce_scatter", "all_reduce")
        )
        yield LatentTransfers(gather, scatter, reduce, gathered_again=name != "key")


def tensor_pieced_s(work: Workload, inside: TensorTraffic, kind: LayerKind) -> Array:
    """Of one direction of one layer, what may hide behind matmuls that are cut along with the collective.

    Transformer Engine's user buffers pass one rank's piece on while the matmul of the piece already there runs, so all but one
    of tp pieces may hide. They need sequence parallelism and the links of one node, and experts' matmuls are not cut. Our own
    engine's chunks (train.tp_chunks) are a setting of a run, which estimates do not know: none of it hides.
    """
    share = 0.0 if kind.has_experts else work.job.framework.tensor_overlap
    there = inside.with_sequence & (work.columns.tp <= work.job.cluster.fast_domain)
    return np.where(there, share * (1 - 1 / work.columns.tp) * inside.layer_s(kind), 0.0)


# -------------------------------------------------------------------------------------------------------------------- context
# Context parallelism: how keys and values reach the queries of other cp ranks, and what of it attention hides.


@dataclass(frozen=True)
class ContextTraffic:
    """Per layer and micro-batch. Backward sends keys, values and their gradients: twice the forward's bytes."""

    block: CollectiveTransfer
    """ring: one neighbour's keys and values, cp − 1 times"""
    gather: CollectiveTransfer
    """all-gather: everybody's keys and values; backward gathers again and reduce-scatters the gradients"""
    scatter: CollectiveTransfer
    switch: CollectiveTransfer
    """Ulysses: q, k, v from sequence-cut to head-cut and the output back; the same in backward"""
    gradients: CollectiveTransfer
    """of keys and values, in fp32 to the next rank: torch's ring, as many times as there are ranks"""
    forward_s: Array
    backward_s: Array
    overlapped_forward_s: Array
    """attention that overlaps a ring's blocks: no other transfer can overlap it too"""
    overlapped_backward_s: Array


def kv_width(job: Job, columns: LayoutColumns) -> Array:
    """Elements of keys and values per token on one rank. MLA's are expanded before they travel."""
    model = job.model
    if model.mla is None:
        return np.asarray(2 * model.kv_dim / np.minimum(columns.tp, model.kv_heads))
    return np.asarray(model.heads * (model.qk_head_dim + model.v_head_dim) / columns.tp)


def context_traffic(work: Workload, attention: Passes) -> ContextTraffic:
    job, columns, machine = work.job, work.columns, work.machine
    model, cp, group = job.model, columns.cp, work.places.context
    b, tokens = compute_bytes(job), columns.tokens(job.seq)
    keys = b * tokens * kv_width(job, columns)
    if model.mla is not None and job.framework.exact_memory_trace:  # tiles of attention have values padded to the width of keys
        padded = 2 * b * tokens * model.heads * model.qk_head_dim / columns.tp
        keys = np.where(columns.is_("context_parallel", "ulysses"), keys, padded)
    query = b * tokens * model.heads * (model.qk_head_dim + model.v_head_dim) / columns.tp
    block = transfer(machine, "context", "send_recv", keys, group)
    double = transfer(machine, "context", "send_recv", 2 * keys, group)
    gather = transfer(machine, "context", "all_gather", cp * keys, group)
    scatter = transfer(machine, "context", "reduce_scatter", cp * keys, group)
    copies = columns.key_copies(model.kv_heads) if model.mla is None else 1
    switch = transfer(machine, "context", "all_to_all", query + copies * keys, group)
    # A ring step hides behind the attention of the block already there.
    constants = machine.efficiency
    window, window_backward = attention.forward / cp, attention.input_grad / cp
    ring_forward = (cp - 1) * exposed(block.time_s, window, constants)
    ring_backward = (cp - 1) * exposed(double.time_s, window_backward, constants)
    gathers, ulysses = columns.is_("context_parallel", "allgather"), columns.is_("context_parallel", "ulysses")
    forward = np.where(gathers, gather.time_s, np.where(ulysses, switch.time_s, ring_forward))
    backward = np.where(gathers, gather.time_s + scatter.time_s, np.where(ulysses, switch.time_s, ring_backward))
    steps = np.where(gathers | ulysses, 0, cp - 1)
    hidden, hidden_backward = steps * np.minimum(block.time_s, window), steps * np.minimum(double.time_s, window_backward)
    gradients = transfer(machine, "context", "send_recv", FP32 / b * keys, group)
    if job.framework.context == "flex":
        forward, backward, hidden, hidden_backward = gather.time_s, scatter.time_s, 0.0 * steps, 0.0 * steps
    elif job.framework.context != "layout":  # behind the attention of the rank's own block, gradients behind that of others'
        again = job.framework.context == "ring"
        forward, hidden = exposed(gather.time_s, window, constants), np.minimum(gather.time_s, window)
        backward = again * forward + gradients.time_s + (cp - 1) * exposed(gradients.time_s, window_backward, constants)
        hidden_backward = again * hidden + (cp - 1) * np.minimum(gradients.time_s, window_backward)
    alone = cp == 1
    return ContextTraffic(
        block,
        gather,
        scatter,
        switch,
        gradients,
        np.where(alone, 0.0, forward),
        np.where(alone, 0.0, backward),
        hidden,
        hidden_backward,
    )


def state_exchange(work: Workload, mixer: str) -> CollectiveTransfer:
    """Of a layer with linear attention or Mamba-2: from slices of the sequence to parts of the heads, and back, in one pass."""
    linear, mamba, width = work.job.model.linear_attention, work.job.model.mamba, 0
    if mixer == "linear" and linear is not None:
        width = 2 * linear.key_dim + 2 * linear.value_dim + 2 * linear.value_heads
    elif mixer == "mamba" and mamba is not None:
        width = 2 * mamba.inner_dim + 2 * mamba.group_dim + mamba.heads
    size = compute_bytes(work.job) * work.columns.tokens(work.job.seq) * width / work.columns.tp
    return transfer(work.machine, "context", "all_to_all", size, work.places.context)


# --------------------------------------------------------------------------------------------------------------------- expert
# Expert parallelism: two all-to-alls per MoE layer and direction, and what experts and shared experts compute meanwhile.
#
# A shared expert's GEMMs hide both. With `expert_overlap: weight-gradients`, weight gradients of the experts hide the combine
# of backward, unless a schedule defers them; and one in ep of a rank's rows has its expert on the rank itself: computed first,
# these hide part of the dispatch. Two grouped GEMMs take longer than one (partial tiles, launches, two weight gradients to
# add), so that is done only where it is faster in all.


ALL_TO_ALLS = 2  # dispatch and combine
# Of an all-to-all that Megatron's overlap with another micro-batch hides. Set by hand: the published pairs with and without it
# (mbqwen-001 and 002, mzqwen-001 and 002 of data/published.csv) are too few to fit it.
MICROBATCH_OVERLAP = 0.7


@dataclass(frozen=True)
class ExpertTraffic:
    all_to_all: CollectiveTransfer
    forward_s: Array
    """exposed, per MoE layer and micro-batch"""
    backward_s: Array
    overlapped_forward_s: Array | float = 0.0
    """of the experts' own matmuls, what overlaps it: a window that hides nothing else"""
    overlapped_backward_s: Array | float = 0.0


def expert_traffic(work: Workload) -> ExpertTraffic:
    job, columns, machine = work.job, work.columns, work.machine
    model, moe = job.model, job.model.moe
    assert moe is not None
    routed = columns.tokens(job.seq) * moe.top_k * job.cluster.efficiency.expert_imbalance
    rows = compute_bytes(job) * routed * model.hidden / columns.routed_cut(routes_slices(job, columns))
    all_to_all = transfer(machine, "expert", "all_to_all", rows, work.places.expert)
    gather, scatter = gathered_tokens(work)
    once_per_node = columns.is_("dispatcher", "deepep") | columns.is_("dispatcher", "hybridep")
    both = ALL_TO_ALLS * np.where(once_per_node, np.minimum(all_to_all.time_s, _node_wise_s(work)), all_to_all.time_s)
    both = np.where(columns.is_("dispatcher", "allgather"), gather.time_s + scatter.time_s, both)
    window_forward = window_backward = np.zeros(len(columns))
    if moe.shared_experts and job.framework.shared_expert_overlap:
        width = moe.shared_expert_ffn / columns.tp
        shared = matmul_passes(machine, mlp_matmuls(model, "shared expert", columns.tokens(job.seq), width))
        hides = columns.is_("dispatcher", "alltoall") | (not job.framework.transformer_engine)
        window_forward = np.where(hides, shared.forward, 0.0)
        window_backward = np.where(hides, shared.input_grad + shared.weight_grad, 0.0)
    if job.framework.expert_overlap == "weight-gradients":
        return _overlapped(work, all_to_all, both, (window_forward, window_backward))
    exposed_share = 1 - (MICROBATCH_OVERLAP if job.framework.expert_overlap == "microbatches" else 0.0)
    return ExpertTraffic(
        all_to_all,
        exposed_share * exposed(both, window_forward, machine.efficiency),
        exposed_share * exposed(both, window_backward, machine.efficiency),
    )


def gathered_tokens(work: Workload) -> tuple[CollectiveTransfer, CollectiveTransfer]:
    """With the all-gather dispatcher: every rank's tokens on every expert rank, and their outputs summed on the way back."""
    token_bytes = routed_token_bytes(work) * work.columns.ep
    gather = transfer(work.machine, "expert", "all_gather", token_bytes, work.places.expert)
    return gather, transfer(work.machine, "expert", "reduce_scatter", token_bytes, work.places.expert)


def routed_token_bytes(work: Workload) -> Array:
    """Of the tokens that a rank routes, each once."""
    job, columns = work.job, work.columns
    cut = columns.routed_cut(routes_slices(job, columns))
    return np.asarray(compute_bytes(job) * columns.tokens(job.seq) * job.model.hidden / cut)


def local_tokens_first(work: Workload) -> Array:
    """Where `expert_overlap: weight-gradients` multiplies rows that stay on their rank first."""
    return np.asarray(expert_traffic(work).overlapped_forward_s > np.zeros(len(work.columns)))


def _overlapped(work: Workload, all_to_all: CollectiveTransfer, both: Array, windows: tuple[Array, Array]) -> ExpertTraffic:
    """The experts' weight gradients overlap one of backward's all-to-alls; rows that stay on their rank overlap one of each
    pass where that is faster, its price included.
    """
    job, columns, machine = work.job, work.columns, work.machine
    matmuls = [matmul for matmul in layer_matmuls(job, columns, LayerKind("none", "moe")) if matmul.name.startswith("expert ")]
    staying = 1 / columns.ep
    whole, own, others = (
        matmul_passes(machine, [replace(matmul, m=share * matmul.m) for matmul in matmuls])
        for share in (np.ones(len(columns)), staying, 1 - staying)
    )
    one = both / ALL_TO_ALLS / machine.efficiency.overlap  # a window beyond it hides nothing more
    split = columns.split_backward & (columns.pp > 1)
    late = np.where(split, 0.0, whole.weight_grad)

    def traffic_with(forward: Array, backward: Array) -> ExpertTraffic:
        hidden = np.minimum(forward, one), np.minimum(backward, one)
        forward_s, backward_s = (exposed(both, w + more, machine.efficiency) for w, more in zip(windows, hidden, strict=True))
        return ExpertTraffic(all_to_all, forward_s, backward_s, *hidden)

    together, local_first = traffic_with(np.zeros(len(columns)), late), traffic_with(own.forward, late + own.input_grad)
    kernels = host.constants().compiled_layer.local_tokens_first
    launch_s = np.full(len(columns), kernels * machine.launch_s)
    # The second gradient of the experts' matrices is read with the first, and their sum written.
    added_s = machine.stream_s(np.asarray(3 * compute_bytes(job) * sum(p.count * p.n * p.k for p in matmuls)))
    price = own + others + Passes(launch_s, 2 * launch_s, added_s)
    forward_s = local_first.forward_s + price.forward - whole.forward
    backward_s = local_first.backward_s + price.input_grad + price.weight_grad - whole.input_grad - whole.weight_grad
    faster = forward_s + backward_s < together.forward_s + together.backward_s
    pairs = (
        (forward_s, together.forward_s),
        (backward_s, together.backward_s),
        (local_first.overlapped_forward_s, together.overlapped_forward_s),
        (local_first.overlapped_backward_s, together.overlapped_backward_s),
    )
    return ExpertTraffic(all_to_all, *(np.where(faster, *pair) for pair in pairs))


def _node_wise_s(work: Workload) -> Array:
    """One all-to-all in which a token crosses to each other domain at most once and is handed on there over the fast link.

    Of D domains a token with k choices reaches D·(1 − (1 − 1/D)^k) in the mean; all but its own lie across the network.
    Where a token may choose from g of G groups of experts, these lie in g·D/G domains, or are g choices of the D.
    """
    machine, moe = work.machine, work.job.model.moe
    assert moe is not None
    group = work.places.expert
    domains = group.size / group.per_domain
    finer = domains > moe.groups
    among = np.where(finer, np.maximum(1.0, domains * moe.top_groups / moe.groups), domains)
    choices = np.where(finer | (moe.groups == 1), moe.top_k, min(moe.top_k, moe.top_groups))
    domains_reached = among * (1 - (1 - 1 / among) ** choices)
    token = routed_token_bytes(work)
    across = domains_reached * (domains - 1) / domains * token / machine.inter.bytes_per_s
    inside = moe.top_k * token * (group.per_domain - 1) / group.per_domain / machine.intra("all_to_all").bytes_per_s
    return np.asarray(np.maximum(across, inside) + machine.inter.latency_s * (domains > 1) + machine.intra("all_to_all").base_s)


# ------------------------------------------------------------------------------------------------------------------- pipeline
# Pipeline parallelism: the hop between stages, and the textbook's bubble beside the simulated one.


def pipeline_hop(work: Workload) -> CollectiveTransfer:
    """Activations of one micro-batch to the next stage, or their gradients back; cut along the sequence when tp is."""
    wide = compute_bytes(work.job) * work.columns.tokens(work.job.seq) * work.job.model.hidden / work.columns.sequence_cut
    return transfer(work.machine, "pipeline", "send_recv", wide, work.places.pipeline)
