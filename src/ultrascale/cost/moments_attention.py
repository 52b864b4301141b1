"""Attention's backward: gradients of queries, keys and values, and what comes from other ranks for them."""

from __future__ import annotations

import numpy as np

from ultrascale.cost import moments_norm
from ultrascale.cost.activations import FP32, LayerActivations, compute_bytes
from ultrascale.cost.chunk_memory import ChunkMemory
from ultrascale.cost.columns import Array

OF_MLP = ("mlp", "expert", "router", "shared")


def backward(scene: ChunkMemory, layer: LayerActivations, moe: bool, split: Array, matrix: Array) -> tuple[Array, Array]:
    """What is there beyond all that the layer keeps, and beside it the MLP's fresh gradients, where FSDP holds them.

    The MLP's own tensors are gone, but wait for its weights' turn where backward is split.
    """
    gone = sum(held for name, held in layer.modules.items() if name.startswith(OF_MLP))
    freed = np.where(split, scene.residual + scene.router_copy * moe, gone)
    apart = moe & (scene.columns.ep > 1)  # experts that ep cuts are a group of FSDP's own, and through by now
    return np.asarray(_gradients(scene) - freed), np.where(apart, 0.0, (2 + scene.job.model.gated) * matrix)


def _gradients(scene: ChunkMemory) -> Array:
    """Of the output, of queries, and of keys and values as the kernel writes them: for every head of queries, and where heads
    share keys it reads copies of these, one for each. All-gathered keys and values stand beside gradients as long.
    """
    model, columns, b = scene.job.model, scene.columns, compute_bytes(scene.job)
    tokens = columns.tokens(scene.job.seq)
    query = b * tokens * model.q_dim / columns.tp
    key = b * tokens * model.kv_dim / np.minimum(columns.tp, model.kv_heads)
    copies = np.where(query > key, 2 * query, 0.0)
    plain = 4 * query + copies
    gathers = np.maximum(2 * query + 4 * key + 4 * columns.cp * key, plain + 2 * columns.cp * key)
    switches = 5 * query + np.where(query > key * columns.key_copies(model.kv_heads), 2 * query, 0.0)
    cut = columns.cp > 1
    found = np.where(cut & columns.is_("context_parallel", "allgather"), gathers, plain)
    found = np.where(cut & columns.is_("context_parallel", "ring"), _ring(scene, query, key, copies, 1.0), found)
    found = np.where(cut & columns.is_("context_parallel", "zigzag"), _ring(scene, query, key, copies, 0.5), found)
    found = np.where(cut & columns.is_("context_parallel", "ulysses"), switches, found)
    # Queries are normed in fp32, when the kernel's own gradients are gone.
    return np.maximum(found, moments_norm.wide(scene, query)) if model.qk_norm else found


def _ring(scene: ChunkMemory, query: Array, key: Array, copies: Array, rows: float) -> Array:
    """A block of keys and values with the part of the queries that sees it (`rows`): gradients of queries are added in fp32,
    those of the rank's own keys and the sums for others wait, and while blocks travel on each is there as it goes and comes.
    """
    columns, b = scene.columns, compute_bytes(scene.job)
    blocks = 2 * (2 + 2 * (columns.cp > 2) + (columns.cp > 3))  # own gradients, keys at work; sums twice; keys to come
    return np.asarray((1 + FP32 / b + 2 + rows) * query + copies + (blocks + (copies > 0)) * key)
