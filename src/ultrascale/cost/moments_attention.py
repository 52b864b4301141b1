"""Attention's backward: gradients of queries, keys and values, and what comes from other ranks for them."""

from __future__ import annotations

import numpy as np

from ultrascale.cost.activations import FP32, LayerActivations, compute_bytes
from ultrascale.cost.columns import Array
from ultrascale.cost.scene import Scene

OF_MLP = ("mlp", "expert", "router", "shared")


def backward(scene: Scene, layer: LayerActivations, moe: bool, split: Array, matrix: Array) -> tuple[Array, Array]:
    """What is there beyond all that the layer keeps, and beside it the MLP's fresh gradients, where FSDP holds them.

    The MLP's own tensors are gone, but wait for its weights' turn where backward is split.
    """
    gone = sum(held for name, held in layer.modules.items() if name.startswith(OF_MLP))
    freed = np.where(split, scene.residual + scene.router_copy * moe, gone)
    apart = moe & (scene.columns.ep > 1)  # experts that ep cuts are a group of FSDP's own, and through by now
    return np.asarray(_gradients(scene) - freed), np.where(apart, 0.0, (2 + scene.job.model.gated) * matrix)


def _gradients(scene: Scene) -> Array:
    """Of the output, of queries, and of keys and values as the kernel writes them: for every head of queries. All-gathered keys
    and values stand beside gradients as long; a ring adds in fp32, and has a block that comes, one that goes, and their sums.
    """
    model, columns, b = scene.job.model, scene.columns, compute_bytes(scene.job)
    tokens = columns.tokens(scene.job.seq)
    query = b * tokens * model.q_dim / columns.tp
    key = b * tokens * model.kv_dim / np.minimum(columns.tp, model.kv_heads)
    plain = 4 * query
    gathers = 2 * query + 4 * key + 4 * columns.cp * key
    ring = (3 + FP32 / b) * query + 4 * key + np.where(columns.cp > 2, 4 * key, 0.0)
    switches = 5 * query
    cut = columns.cp > 1
    found = np.where(cut & columns.is_("context_parallel", "allgather"), gathers, plain)
    found = np.where(cut & (columns.is_("context_parallel", "ring") | columns.is_("context_parallel", "zigzag")), ring, found)
    return np.where(cut & columns.is_("context_parallel", "ulysses"), switches, found)
