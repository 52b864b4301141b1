"""What FSDP2 holds of a rank's weights and gradients for a while: gathered layers, and buffers that it has not let go."""

from __future__ import annotations

import numpy as np

from ultrascale.cost import float8, params
from ultrascale.cost.activations import compute_bytes, gradient_bytes, sharded_gradient_bytes, split_backward
from ultrascale.cost.chunk_memory import ChunkMemory
from ultrascale.cost.columns import Array


def gathered(scene: ChunkMemory) -> Array:
    """ZeRO-3's whole copies: embedding and head through the micro-batch, and the chunk's last layer."""
    share = scene.share
    last = np.where((share.head == 1) | ((share.embedding == 1) & (share.layers == 1)), 0.0, scene.narrow_block)
    return gathered_elements(scene, scene.held.ends + scene.held.block, last)


def gathered_elements(scene: ChunkMemory, elements: Array, narrow: Array) -> Array:
    """`narrow` of them in fp8."""
    columns = scene.columns
    gathers = (columns.zero == 3) & (columns.keep_gathered == 0) & (columns.shards > 1)
    return np.where(gathers, compute_bytes(scene.job) * elements - float8.less(scene.job, narrow), 0.0)


def last_arrived(scene: ChunkMemory) -> Array:
    """The buffer in which a forward's last gather came, until that forward is over; in ZeRO-1 and 2 a step's first alone."""
    columns, once = scene.columns, scene.columns.zero < 3
    gathers = ~once | scene.one_backward | (scene.first & (columns.pp == 1))
    return np.where(scene.sharded & gathers, compute_bytes(scene.job) * scene.last_group, 0.0)


def scattered_last(scene: ChunkMemory) -> Array:
    """FSDP keeps what each of a rank's chunks scattered last until that scatters again: through the next forward."""
    columns, held, holder = scene.columns, scene.held, scene.holder
    without_ends = np.maximum(0, columns.virtual_stages - holder.embedding - holder.head)
    whole = held.ends + without_ends * held.block
    return _left_over(scene, np.where(split_backward(columns), columns.virtual_stages * scene.last_group, whole))


def met(scene: ChunkMemory) -> Array:
    """A chunk's gradients with which HSDP's replicas met: a split backward has them meet after every scatter, and FSDP keeps
    the last ones; the first are what the next are added to.
    """
    columns, there = scene.columns, scene.scatters & scene.job.framework.exact_memory_trace
    meets = there & split_backward(columns) & (columns.data_ranks > columns.shards)
    return np.where(meets, gradient_bytes(scene.job) * scene.own.total / columns.shards, 0.0)


def arriving(scene: ChunkMemory, elements: Array) -> Array:
    """A rank's share of what is scattered, as it comes and in the format in which it is kept."""
    g, kept = gradient_bytes(scene.job), sharded_gradient_bytes(scene.job)
    return np.asarray((g + np.where(kept > g, kept, 0)) * elements / scene.columns.shards)


def arrived(scene: ChunkMemory, elements: Array) -> Array:
    """As a rank keeps its share."""
    return np.asarray(sharded_gradient_bytes(scene.job) * elements / scene.columns.shards)


def made_first(scene: ChunkMemory, elements: Array) -> Array:
    """What a step's first backward has of gradients, where it has come by these: shards, or whole where those meet later."""
    kept = np.where(scene.scatters, arrived(scene, elements), gradient_bytes(scene.job) * elements)
    return np.where(scene.sharded & scene.first, kept, 0.0)


def left_over(scene: ChunkMemory) -> Array:
    """Of what this chunk scattered last: embedding and head, where it has them, or its first layer; where scatters follow the
    weights' turn, its last.
    """
    own = scene.own
    whole = np.where(own.ends > 0, own.ends, own.block)
    return _left_over(scene, np.where(split_backward(scene.columns), scene.last_group, whole))


def head_gradients(scene: ChunkMemory) -> Array:
    """FSDP's root, embedding and head, has its gradients whole until all layers are through; so has a head that is tied to the
    embedding beside it, whose part is yet to come.
    """
    each = compute_bytes(scene.job) * params.head(scene.job.model).on_rank(scene.columns.tp, scene.job.model.kv_heads)
    tied = scene.job.model.tied_embeddings & (scene.share.embedding == 1)
    return np.where(scene.holds_gradients | tied, scene.share.head * each, 0.0)


def sent_gradient(scene: ChunkMemory) -> Array:
    """A pipeline's gradient on its way to the stage before, until that has used it."""
    sends = (scene.columns.pp > 1) & ((scene.share.embedding == 0) | (scene.columns.virtual_stages > 1))
    return np.where(sends, scene.residual, 0.0)


def _left_over(scene: ChunkMemory, elements: Array) -> Array:
    columns = scene.columns
    keeps = (columns.zero >= 2) & (columns.shards > 1) & (columns.gas > 1) & (not scene.first)
    return np.where(keeps, gradient_bytes(scene.job) * elements, 0.0)
