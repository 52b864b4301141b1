"""What a rank holds at the moments that can be its fullest, on top of the activations that wait.

A planner that must not promise too much counts all that is on its way at once (buffers.py). An engine that was followed
operator by operator has it where it lives: gradients of a gate when the layer's other transfers are not there yet, gathered
sequences beside products, whole gradients at a layer's end. A layer's backward has a file of its own (moments_layer.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ultrascale.cost import moments_norm, moments_zero, params
from ultrascale.cost.activations import compute_bytes, gradient_bytes, split_backward
from ultrascale.cost.chunk_memory import ChunkMemory
from ultrascale.cost.columns import Array
from ultrascale.cost.memory_point import MemoryPoint, fullest


def at_loss(scene: ChunkMemory, gradients: Array) -> MemoryPoint:
    peak = np.asarray(scene.share.head * scene.head.peak)
    if not scene.job.framework.exact_memory_trace:
        return MemoryPoint(peak, scene.at_once, gradients)
    # One layer is there: fetched for backward, or where the loss is fullest in forward (a cut vocabulary) not yet let go.
    moving = moments_zero.gathered(scene) + moments_zero.scattered_last(scene)
    there, head, sent = np.where(scene.one_backward, 0.0, gradients), scene.share.head, moments_zero.sent_gradient(scene)
    stays = (scene.columns.zero < 3) | (scene.columns.keep_gathered == 1)  # else that layer has gone already
    arrived = np.where(stays, moments_zero.last_arrived(scene), 0.0)
    in_forward = moving + np.where(arrived > 0, arrived, sent)
    loss = MemoryPoint(peak, np.asarray(head * np.where(scene.columns.tp > 1, in_forward, moving + sent)), there)
    loss = fullest(loss, MemoryPoint(np.asarray(head * scene.head.forward), np.asarray(head * in_forward), there))
    if scene.job.model.norm != "rmsnorm":
        return loss
    # Few logits a token weigh less than the final norm in its backward, beside which FSDP has the head's fresh gradients.
    beside = np.asarray(head * (moving + sent) + moments_zero.head_gradients(scene))
    return fullest(loss, MemoryPoint(np.asarray(head * moments_norm.of_head(scene)), beside, there))


def beginning(scene: ChunkMemory, gradients: Array) -> MemoryPoint:
    """Of a backward before which ZeRO-3 must gather embedding and head again: as they arrive, and as they are used."""
    there = scene.job.framework.exact_memory_trace & (scene.columns.zero == 3) & (scene.columns.keep_gathered == 0)
    elements, narrow = 2 * scene.held.ends + 2 * scene.held.block, scene.narrow_after(0 * scene.share.layers)
    moving = moments_zero.gathered_elements(scene, elements, narrow) + moments_zero.scattered_last(scene)
    nothing = 0.0 * scene.residual
    return MemoryPoint(np.where(there, scene.residual, nothing), np.where(there, moving, nothing), gradients)


def in_forward(scene: ChunkMemory, gradients: Array) -> MemoryPoint:
    """At the end of a forward. Where experts' rows come home: those, as they came and times their weights, the sum of each
    token's, and the layer's normed input, whole; the layer's output is not there yet.
    """
    one = _passing(scene, gradients)
    if not scene.job.framework.exact_memory_trace:
        return one
    home = [2 * layer.modules["expert output"] * (count > 0) for count, moe, layer in scene.layers if moe]
    if not home:
        return one
    here = home[0] + scene.uncut + scene.gathered_slices + scene.residual - np.where(scene.sends_output, scene.residual, 0.0)
    there = scene.share.moe_layers > 0
    return replace(one, activations=here * there, buffers=one.buffers + moments_zero.last_arrived(scene) * there)


def between(scene: ChunkMemory, gradients: Array) -> MemoryPoint:
    """While weight gradients that were put off are computed; weights that ZeRO-3 kept gathered went with their inputs' turn."""
    one, split = _passing(scene, gradients), split_backward(scene.columns) & scene.job.framework.exact_memory_trace
    gone = np.where(split & scene.lets_go & (scene.columns.zero == 3), compute_bytes(scene.job) * scene.own.total, 0.0)
    return replace(one, buffers=one.buffers - gone, gone=gone)


def _passing(scene: ChunkMemory, gradients: Array) -> MemoryPoint:
    """What is there whatever the rank computes."""
    nothing = np.zeros(len(scene.columns))
    if not scene.job.framework.exact_memory_trace:
        return MemoryPoint(nothing, scene.at_once, gradients)
    moving = moments_zero.gathered(scene) + moments_zero.scattered_last(scene)
    return MemoryPoint(nothing, moving, np.where(scene.one_backward, 0.0, gradients))


def scattering(scene: ChunkMemory, gradients: Array) -> MemoryPoint:
    """The end of a chunk's backward, when its activations are gone: embedding and head, which are FSDP's last group, are on
    their way. Where backward is split they are the first, after the weights' turn, and all of the chunk's gradients are there:
    their own scatter or the first layer's is the fuller one.
    """
    nothing, own, g = np.zeros(len(scene.columns)), scene.own, gradient_bytes(scene.job)
    split, there = split_backward(scene.columns), scene.scatters & scene.job.framework.exact_memory_trace
    made = np.where(split, g * (own.total - own.padding), compute_bytes(scene.job) * own.ends)
    ends = made + g * own.ends
    # A layer's that were put off go as they are copied for their scatter.
    block = ends + g * (own.block - 2 * own.ends) + moments_zero.made_first(scene, own.ends)
    ends = ends + moments_zero.arriving(scene, own.ends)
    whole = np.where(split, np.maximum(np.where(own.ends > 0, ends, 0.0), block), ends)
    gone = scene.kept + np.where(split, scene.dropped + scene.settled, 0.0)
    moving = whole + moments_zero.scattered_last(scene) - moments_zero.left_over(scene)
    weights = np.where(scene.lets_go & there, compute_bytes(scene.job) * own.total, 0.0)
    moving = moving + np.where(split, 0.0, moments_zero.made_first(scene, own.total - own.ends))
    # Of a step's only backward, those that are on their way now were not there before.
    new = np.where(scene.one_backward, np.where(split, own.total, own.ends) / scene.held.total, 0.0)
    moving = np.where(there, moving - weights, nothing)
    return MemoryPoint(np.where(there, -gone, nothing), moving, gradients * (1 - new), gone=weights)


def fresh(scene: ChunkMemory, there: Array) -> Array:
    """The gradient of the embedding or of the head as autograd makes it, where backward is split."""
    each = compute_bytes(scene.job) * params.head(scene.job.model).on_rank(scene.columns.tp, scene.job.model.kv_heads)
    return np.where(split_backward(scene.columns) & scene.job.framework.exact_memory_trace, there * each, 0.0)


def waiting(scene: ChunkMemory, there: Array) -> Array:
    """The same while it waits for the other weights' turn, in the format that meets; what ZeRO-1 keeps is counted anyway."""
    apart = scene.sharded & (scene.scatters | scene.first)
    return np.where(apart, max(1.0, gradient_bytes(scene.job) / compute_bytes(scene.job)) * fresh(scene, there), 0.0)


def looked_up(scene: ChunkMemory) -> Array:
    """Gradients of all tokens' embeddings on a rank that has a part of the vocabulary."""
    there = split_backward(scene.columns) & (scene.columns.tp > 1) & scene.job.framework.exact_memory_trace
    return np.where(there, scene.share.embedding * scene.uncut, 0.0)
