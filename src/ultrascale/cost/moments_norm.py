"""Backward of norms, which are computed in fp32 whatever the format."""

from __future__ import annotations

import numpy as np

from ultrascale.cost.activations import FP32, LayerActivations, compute_bytes
from ultrascale.cost.chunk_memory import ChunkMemory
from ultrascale.cost.columns import Array

OF_MLP = ("mlp input", "mlp products", "mlp act", "expert")


def of_mlp(scene: ChunkMemory, layer: LayerActivations, moe: bool, split: Array) -> Array:
    """The norm before the MLP: its gradient, and what it has in fp32. The MLP's own are gone, but as much as they were waits
    for its weights' turn where backward is split: all but the router's copy.
    """
    gone = sum(held for name, held in layer.modules.items() if name.startswith(OF_MLP))
    waits = scene.router_copy * moe - scene.gathered_slices
    return np.asarray(scene.residual + wide(scene, scene.residual) - np.where(split, waits, gone))


def of_attention(scene: ChunkMemory, moe: bool) -> Array:
    """The layer's first, where backward is split: its input is there to the end, and beside it wait gradients of what the last
    products of attention and MLP made. Where slices of the sequence are cut those are gathered, and the residual's gradient is
    a tensor of its own.
    """
    cut = scene.columns.sequence_cut > 1
    shared = scene.job.model.moe is not None and scene.job.model.moe.shared_experts > 0
    routed = moe and not shared  # rows have their own gradients
    of_products = (1 if routed else 2) * scene.uncut - scene.residual  # attention's stands where the MLP norm's input was
    return np.asarray(of_products + np.where(cut, scene.residual, 0.0) + wide(scene, scene.residual) - scene.router_copy * moe)


def of_head(scene: ChunkMemory) -> Array:
    """The last: its input, the gradient of what it made, and in fp32 what it computes with."""
    return np.asarray(2 * scene.residual + wide(scene, scene.residual))


def wide(scene: ChunkMemory, normed: Array) -> Array:
    """Five tensors in fp32 for what is `normed`, four where nothing is cast, none where a norm is one kernel."""
    if scene.job.framework.fused_blocks:
        return 0.0 * normed
    b = compute_bytes(scene.job)
    return np.asarray((5 if b < FP32 else 4) * FP32 / b * normed)
