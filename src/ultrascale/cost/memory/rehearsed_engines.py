"""Live memory of other engines, event by event: buffers and fresh gradients where rehearsals of the engine show them.

The engines hold states, saved tensors and layers as activations.py and states.py count them. Here is what FSDP2, DeepSpeed's
ZeRO and plain data parallelism have beside these at the loss and in the backward of the last layer, where most is saved
(tools/fit_frameworks.py, docs/rehearse.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum, auto

import numpy as np

from ultrascale.cost.columns import Array
from ultrascale.cost.memory.activations import CHUNKED_GRADIENTS
from ultrascale.cost.memory.chunk import ChunkMemory, MemoryPoint, TensorLifetime, activation, buffer, fullest, walk
from ultrascale.cost.memory.states import compute_bytes, gradient_bytes


class EngineEvent(IntEnum):
    LOSS_FORWARD = 0
    LOSS = auto()
    HEAD_REDUCE = auto()
    """of the head's weight gradient"""
    LAYER_BACKWARD = auto()
    LAYER_REDUCE = auto()
    """of the layer's weight gradients"""
    BACKWARD_END = auto()
    END = auto()


def engine_points(chunk: ChunkMemory, gradients: Array) -> Iterator[MemoryPoint]:
    """Backward of a layer, of its input gradients alone, and the loss."""
    event, rows = EngineEvent, len(chunk.columns)
    live = walk([*_head(chunk), *_layer(chunk), *_states(chunk, gradients)], event.END, rows)
    layer = fullest(live.at(event.LAYER_BACKWARD), live.at(event.LAYER_REDUCE), live.at(event.BACKWARD_END))
    yield layer
    yield layer
    yield fullest(live.at(event.LOSS), live.at(event.LOSS_FORWARD), live.at(event.HEAD_REDUCE))


def _head(chunk: ChunkMemory) -> Iterator[TensorLifetime]:
    event, head, framework = EngineEvent, chunk.share.head, chunk.job.framework
    b, g, columns = compute_bytes(chunk.job), gradient_bytes(chunk.job), chunk.columns
    with_gradients, weight = framework.loss in CHUNKED_GRADIENTS, head * chunk.vocabulary_gradient / b
    plain = chunk.head.peak if framework.loss != "log-softmax" else chunk.head.forward
    yield activation("head and loss, in forward", head * plain, event.LOSS_FORWARD, event.LOSS)
    yield activation("head and loss", head * chunk.head.peak, event.LOSS, event.HEAD_REDUCE)
    at_reduce = chunk.head.backward if with_gradients else chunk.head.saved
    yield activation("hidden states and their gradient", head * at_reduce, event.HEAD_REDUCE, event.LAYER_BACKWARD)
    gathers = _gathers(chunk) & (framework.live_parameters == 0)
    # FSDP copies a group out of its all-gather buffer, which the next all-gather frees.
    copies = 1 if with_gradients else 2
    yield buffer("gathered head", np.where(gathers, copies * b * weight, 0.0), event.LOSS_FORWARD, event.LOSS)
    yield buffer("gathered head", np.where(gathers, b * weight, 0.0), event.LOSS, event.LAYER_BACKWARD)
    if with_gradients:
        yield buffer("sum of the head's gradients", g * weight, event.LOSS_FORWARD, event.LAYER_BACKWARD)
    fsdp = _is_fsdp(chunk)
    fresh = np.where(fsdp & (not with_gradients), b * weight, 0.0)
    reduced = np.where(fsdp, g * weight, 0.0)
    yield buffer("head's fresh weight gradient", fresh, event.HEAD_REDUCE, event.LAYER_BACKWARD)
    yield buffer("reduce-scatter input", reduced, event.HEAD_REDUCE, event.LAYER_BACKWARD)
    shard = np.where(fsdp, g * weight / columns.shards, 0.0)
    yield buffer("reduce-scatter output", shard, event.HEAD_REDUCE, event.LAYER_BACKWARD)
    if with_gradients and chunk.job.model.tied_embeddings:  # a tied head's gradient is reduced apart from the embedding's
        yield buffer("head's gradient shard", shard, event.LOSS_FORWARD, event.LAYER_BACKWARD)
    # It is freed when the next one begins, or a backward ends: that of a chunked loss with gradients is one of its own.
    kept = 0.0 * reduced if with_gradients else reduced
    yield buffer("head's reduce-scatter input", kept, event.LAYER_BACKWARD, event.LAYER_REDUCE)


def _layer(chunk: ChunkMemory) -> Iterator[TensorLifetime]:
    event, columns, b, g = EngineEvent, chunk.columns, compute_bytes(chunk.job), gradient_bytes(chunk.job)
    framework, block, layers = chunk.job.framework, chunk.rank_params.block, chunk.share.layers
    again, gradients = np.zeros(len(columns)), np.zeros(len(columns))
    for kind in chunk.layers:
        again = np.maximum(again, np.where(kind.count > 0, kind.saved.recomputed, 0.0))
        gradients = np.maximum(gradients, np.where(kind.count > 0, kind.saved.gradients, 0.0))
    yield activation("recomputed", again, event.LAYER_BACKWARD, event.LAYER_REDUCE)
    yield activation("gradients of activations", gradients, event.LAYER_BACKWARD, event.LAYER_REDUCE)
    # Engines that gather inputs again have a buffer for them, which stays.
    stays = event.LAYER_BACKWARD if framework.gathered_inputs else event.LOSS_FORWARD
    yield buffer("gathered sequence", chunk.gathered_sequence, stays, event.LAYER_REDUCE)
    matrix, fsdp = chunk.mlp_weight_gradient[False], _is_fsdp(chunk)
    fresh = np.where(fsdp, (2 + chunk.job.model.gated) * matrix, (1 + chunk.job.model.gated) * matrix)
    yield buffer("fresh weight gradients", fresh, event.LAYER_BACKWARD, event.LAYER_REDUCE)
    gathers = _gathers(chunk) & (framework.live_parameters == 0)
    this_and_next = np.where(gathers, b * np.minimum(2, layers) * block, 0.0)
    yield buffer("gathered layers", this_and_next, event.LAYER_BACKWARD, event.LAYER_REDUCE)
    next_one = np.where(gathers, b * np.minimum(1, layers - 1) * block, 0.0)
    yield buffer("gathered layer", next_one, event.LAYER_REDUCE, event.END)
    ends = np.where(fsdp, (b + g + g / columns.shards) * block, 0.0)
    yield buffer("weight gradients, reduce-scatter input and output", ends, event.LAYER_REDUCE, event.END)
    yield activation("freed", -chunk.saved, event.BACKWARD_END, event.END)


def _states(chunk: ChunkMemory, gradients: Array) -> Iterator[TensorLifetime]:
    event, framework, columns = EngineEvent, chunk.job.framework, chunk.columns
    # Those of one micro-batch appear as its backward comes along.
    late = (columns.gas == 1) & (not framework.keeps_gradients)
    yield TensorLifetime("gradients", "gradients", np.where(late, 0.0, gradients), event.LOSS_FORWARD, event.BACKWARD_END)
    yield TensorLifetime("gradients", "gradients", gradients, event.BACKWARD_END, event.END)
    if framework.live_parameters:
        most = np.minimum(chunk.rank_params.total, framework.live_parameters)
        live = np.where(_gathers(chunk), compute_bytes(chunk.job) * most, 0.0)
        yield buffer("gathered parameters", live, event.LOSS_FORWARD, event.BACKWARD_END)
    if framework.ddp_buckets:
        reduced = np.where((columns.zero == 0) & (columns.data_ranks > 1), gradients, 0.0)
        yield buffer("buckets of DDP", reduced, event.LOSS_FORWARD, event.END)
    bucket = compute_bytes(chunk.job) * framework.reduce_bucket
    yield buffer("bucket of gradients", np.where(columns.zero == 3, bucket, 0.0), event.LOSS_FORWARD, event.END)
    both = np.where(columns.zero == 2, 2 * np.minimum(bucket, compute_bytes(chunk.job) * chunk.rank_params.total), 0.0)
    yield buffer("buckets of gradients", both, event.LAYER_BACKWARD, event.END)


def _is_sharded(chunk: ChunkMemory) -> Array:
    return np.asarray((chunk.columns.zero >= 1) & (chunk.columns.shards > 1))


def _is_fsdp(chunk: ChunkMemory) -> Array:
    return np.asarray(_is_sharded(chunk) & (chunk.job.framework.states == "fp32"))


def _gathers(chunk: ChunkMemory) -> Array:
    """ZeRO-3 that frees parameters after use."""
    return np.asarray(_is_sharded(chunk) & (chunk.columns.zero == 3) & (chunk.columns.keep_gathered == 0))
