"""Memory that exists only because something is on its way between GPUs, all of it at once: a planner must not promise too much.

What of it lives when, in an engine that was followed, is in moments.py.
"""

from __future__ import annotations

import numpy as np

from ultrascale.cost import float8, params
from ultrascale.cost.activations import compute_bytes, gradient_bytes, split_backward
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.specs.job import Job


def at_once(
    job: Job,
    columns: LayoutColumns,
    held: params.RankParameters,
    narrow: Array | float = 0.0,
    narrow_fetched: Array | float = 0.0,
) -> Array:
    """All that can be on its way during a backward; of the rank's elements and of two layers' so many are gathered in fp8."""
    model, b = job.model, compute_bytes(job)
    tokens = columns.tokens(job.seq)
    wide = b * tokens * model.hidden
    # Experts are sharded over the data ranks that ep left them, so with ep = shards there is nothing of them to gather.
    expert_shards = np.maximum(1, columns.shards / columns.ep)
    beyond_own_shard = held.trunk * (1 - 1 / columns.shards) + held.experts * (1 - 1 / expert_shards)
    # ZeRO-3: the layer at work and the one prefetched behind it, plus embedding and head, which stay gathered; never more
    # than the parameters that live elsewhere.
    gathered = np.where(
        (columns.zero == 3) & (columns.keep_gathered == 0),
        np.minimum(
            b * (2 * held.layer + held.ends) - float8.less(job, np.asarray(narrow_fetched)),
            b * beyond_own_shard - float8.less(job, np.asarray(narrow * (1 - 1 / columns.shards))),
        ),
        0.0,
    )
    gathered = np.where(columns.is_("offload", "parameters"), b * (2 * held.layer + held.ends), gathered)
    # One layer's gradients as autograd makes them, and from ZeRO-2 on the same layer's on its way into the reduce-scatter.
    fresh = held.total if job.framework.accumulation == "after-backward" else held.layer
    fresh_gradients = b * fresh if gradient_bytes(job) != b else 0.0
    waiting = held.layer
    if job.framework.states == "fp32":
        # FSDP scatters a chunk's gradients together where backward is split: hooks do not see weight gradients made later.
        waiting = np.where(split_backward(columns), held.total / columns.virtual_stages, waiting)
    reduced = np.where(columns.zero >= 2, gradient_bytes(job) * np.minimum(waiting, beyond_own_shard), 0.0)
    gathered_sequence = np.where((columns.tp > 1) & (columns.sequence_parallel == 1), wide, 0.0)
    received = np.where(columns.pp > 1, 2 * wide / columns.sequence_cut, 0.0)
    buffers = gathered + fresh_gradients + reduced + gathered_sequence + received + _context_buffers(job, columns)
    if model.moe is not None:
        routed = job.cluster.efficiency.expert_imbalance * model.moe.top_k * wide
        travelling = routed / columns.routed_cut(job.framework.transformer_engine)
        buffers = buffers + np.where(columns.ep > 1, travelling, 0.0)
    return np.asarray(buffers)


def _context_buffers(job: Job, columns: LayoutColumns) -> Array:
    model, b = job.model, compute_bytes(job)
    tokens = columns.tokens(job.seq)
    kv_width = 2 * model.kv_dim if model.mla is None else model.heads * (model.qk_head_dim + model.v_head_dim)
    kv_cut = np.minimum(columns.tp, model.kv_heads if model.mla is None else model.heads)
    keys_and_values = b * tokens * kv_width / kv_cut
    queries = b * tokens * model.heads * model.qk_head_dim / columns.tp
    ring = columns.is_("context_parallel", "ring") | columns.is_("context_parallel", "zigzag")
    gather = columns.is_("context_parallel", "allgather")
    # Ring: the block at work and the one arriving, of values and in backward of their gradients. All-gather: the whole
    # sequence's keys and values. All-to-all: a second copy of q, k and v in the other cut.
    each = np.where(ring, 2 * keys_and_values, np.where(gather, columns.cp * keys_and_values, queries + keys_and_values))
    return np.where(columns.cp > 1, each, 0.0)
