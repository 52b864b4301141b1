"""Context parallelism: how keys and values reach the queries of other cp ranks, and what of it attention hides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.states import compute_bytes
from ultrascale.cost.mesh import GroupPlacement
from ultrascale.cost.overlap import CollectiveTransfer, OverlapRatio, exposed, transfer
from ultrascale.cost.passes import Passes
from ultrascale.specs.job import Job


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
    forward_s: Array
    backward_s: Array
    behind_forward_s: Array
    """attention that a ring's blocks hide behind: no other transfer can hide there too"""
    behind_backward_s: Array


def kv_width(job: Job, columns: LayoutColumns) -> Array:
    """Elements of keys and values per token on one rank. MLA's are expanded before they travel."""
    model = job.model
    if model.mla is None:
        return np.asarray(2 * model.kv_dim / np.minimum(columns.tp, model.kv_heads))
    return np.asarray(model.heads * (model.qk_head_dim + model.v_head_dim) / columns.tp)


def traffic(job: Job, columns: LayoutColumns, mesh: GroupPlacement, machine: ClusterRates, attention: Passes) -> ContextTraffic:
    model, cp, group = job.model, columns.cp, mesh.context
    b, tokens = compute_bytes(job), columns.tokens(job.seq)
    keys = b * tokens * kv_width(job, columns)
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
    alone, steps = cp == 1, np.where(gathers | ulysses, 0, cp - 1)
    return ContextTraffic(
        block,
        gather,
        scatter,
        switch,
        np.where(alone, 0.0, forward),
        np.where(alone, 0.0, backward),
        steps * np.minimum(block.time_s, window),
        steps * np.minimum(double.time_s, window_backward),
    )


def printed_volume(cp: int, mbs: int, seq: int, kv_dim: int) -> float:
    """The cheat-sheet's entry: (CP−1)·B·L/CP·H_kv·(num_k + num_v) elements that a rank sends per layer. A volume."""
    return (cp - 1) * mbs * seq / cp * kv_dim * 2


def ratio(cp: int, seq: int, mbs: int, kv_dim: int, q_dim: int, peak_flops: float, bandwidth: float) -> OverlapRatio:
    """One ring step: 2·2·(s/CP)·kv_dim bytes against 4·(s/CP)²·q_dim FLOPs, of which the causal mask leaves half."""
    return OverlapRatio(
        "context",
        "(CP−1)·B·L/CP·H_kv·(num_k + num_v)  [elements, not a ratio]",
        printed_volume(cp, mbs, seq, kv_dim),
        "2·CP·kv_dim·peak_flops / (seq·q_dim·peak_bw)",
        2 * cp * kv_dim * peak_flops / (seq * q_dim * bandwidth) if cp > 1 else 0.0,
        "the printed entry is the volume of a layer's exchange; the ratio is that of one ring step, causal mask counted",
    )
