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
from ultrascale.cost.memory.states import FP32, autocast, compute_bytes, gathered_vocabularies, gradient_bytes
from ultrascale.cost.prefetch import gathered_elements
from ultrascale.specs.blocks import LayerKind


class EngineEvent(IntEnum):
    LOSS_FORWARD = 0
    LOSS = auto()
    HEAD_REDUCE = auto()
    """of the head's weight gradient"""
    LAYER_BACKWARD = auto()
    LAYER_REDUCE = auto()
    """of the layer's weight gradients"""
    FIRST_LAYER = auto()
    """the last one in backward, while the embedding is gathered"""
    EMBEDDING = auto()
    """reduce-scatter of the embedding's gradient, which is whole"""
    BACKWARD_END = auto()
    END = auto()


def engine_points(chunk: ChunkMemory, gradients: Array) -> Iterator[MemoryPoint]:
    """Backward of a layer, of its input gradients alone, and the loss."""
    event, rows = EngineEvent, len(chunk.columns)
    live = walk([*_head(chunk), *_layer(chunk), *_autocast(chunk), *_states(chunk, gradients)], event.END, rows)
    layer = fullest(*(live.at(one) for one in range(event.LAYER_BACKWARD, event.END)))
    yield layer
    yield layer
    yield fullest(live.at(event.LOSS), live.at(event.LOSS_FORWARD), live.at(event.HEAD_REDUCE))


def _head(chunk: ChunkMemory) -> Iterator[TensorLifetime]:
    event, head, framework = EngineEvent, chunk.share.head, chunk.job.framework
    b, g, columns = compute_bytes(chunk.job), gradient_bytes(chunk.job), chunk.columns
    with_gradients, weight = framework.loss in CHUNKED_GRADIENTS, head * chunk.vocabulary_gradient / b
    yield activation("head and loss, in forward", head * chunk.head.forward, event.LOSS_FORWARD, event.LOSS)
    yield activation("head and loss", head * chunk.head.peak, event.LOSS, event.HEAD_REDUCE)
    # Input and output of the norm, and their gradient: logits are gone.
    at_reduce = chunk.head.backward if with_gradients else 3 * chunk.residual
    yield activation("hidden states and their gradient", head * at_reduce, event.HEAD_REDUCE, event.LAYER_BACKWARD)
    gathers = _gathers(chunk) & (framework.live_parameters == 0)
    whole = np.where(gathers, b * gathered_vocabularies(chunk.job, columns) * weight, 0.0)
    yield buffer("gathered head", whole, event.LOSS_FORWARD, event.HEAD_REDUCE)
    # A head whose loss comes without gradients is freed before its gradient is reduced, while the next layer is gathered.
    at_hand = weight if with_gradients else np.minimum(1, chunk.share.layers) * chunk.rank_params.block
    yield buffer("gathered head or layer", np.where(gathers, b * at_hand, 0.0), event.HEAD_REDUCE, event.LAYER_BACKWARD)
    if with_gradients:
        yield buffer("sum of the head's gradients", g * weight, event.LOSS_FORWARD, event.LAYER_BACKWARD)
    fsdp = _is_fsdp(chunk)
    if framework.loss == "chunked-gradients":  # logits written out in fp32 are fuller before
        fresh = np.where(columns.tp == 1, b * weight, 0.0)
        yield buffer("a chunk's gradient of the head", fresh, event.LOSS, event.HEAD_REDUCE)
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
    again, gradients, saved, matrix = np.zeros((4, len(columns)))
    for alike in chunk.layers:
        again = np.maximum(again, np.where(alike.count > 0, alike.saved.recomputed, 0.0))
        # Compiled, the gradient of the activation becomes that of one of the GEMMs before it.
        compiled = framework.states == "fp32" and not framework.eager_activation
        overwritten = compiled * chunk.full_sequence * _width(chunk, alike.kind) / columns.tp
        gradients = np.maximum(gradients, np.where(alike.count > 0, alike.saved.gradients - overwritten, 0.0))
        saved = np.maximum(saved, np.where(alike.count > 0, alike.saved.total, 0.0))
        matrix = np.maximum(matrix, np.where(alike.count > 0, chunk.mlp_weight_gradient[alike.kind.has_experts], 0.0))
    fsdp = _is_fsdp(chunk)
    fresh = np.where(fsdp, (2 + chunk.job.model.gated) * matrix, (1 + chunk.job.model.gated) * matrix)
    for begin in (event.LAYER_BACKWARD, event.FIRST_LAYER):
        yield activation("recomputed", again, begin, begin + 1)
        yield activation("gradients of activations", gradients, begin, begin + 1)
        yield buffer("fresh weight gradients", fresh, begin, begin + 1)
    # Engines that gather inputs again have a buffer for them, which stays.
    stays = event.LAYER_BACKWARD if framework.gathered_inputs else event.LOSS_FORWARD
    yield buffer("gathered sequence", chunk.gathered_sequence, stays, event.LAYER_REDUCE)
    gathers = _gathers(chunk) & (framework.live_parameters == 0)
    this_and_next = np.where(gathers, b * np.minimum(2, layers) * block, 0.0)
    yield buffer("gathered layers", this_and_next, event.LAYER_BACKWARD, event.LAYER_REDUCE)
    next_one = np.where(gathers, b * np.minimum(1, layers - 1) * block, 0.0)
    reduced = np.where(fsdp, g * block, 0.0)
    ends = np.where(fsdp, (b + g / columns.shards) * block, 0.0)
    for begin, end in ((event.LAYER_REDUCE, event.FIRST_LAYER), (event.BACKWARD_END, event.END)):
        yield buffer("gathered layer", next_one, begin, end)
        yield buffer("weight gradients and reduce-scatter output", ends, begin, end)
        yield buffer("reduce-scatter input", reduced, begin, end)
    yield buffer("reduce-scatter input", reduced, event.FIRST_LAYER, event.EMBEDDING)
    embedding = _embedding(chunk)
    with_embedding = np.where(gathers, b * (block + embedding), 0.0)
    yield buffer("gathered layer and embedding", with_embedding, event.FIRST_LAYER, event.EMBEDDING)
    # The gathered embedding is freed before its gradient is reduced.
    fresh = np.where(_adds_whole_gradients(chunk) | (fsdp & ~_sums_whole_gradients(chunk)), b, 0.0) * embedding
    whole = fresh + np.where(fsdp, (g + g / columns.shards) * embedding, 0.0)
    yield buffer("embedding's gradient, reduce-scatter input and output", whole, event.EMBEDDING, event.BACKWARD_END)
    yield activation("freed", saved - chunk.saved, event.FIRST_LAYER, event.EMBEDDING)
    yield activation("freed", -chunk.saved, event.EMBEDDING, event.END)


def _width(chunk: ChunkMemory, kind: LayerKind) -> float:
    """Of the MLP, relative to the model's."""
    model = chunk.job.model
    experts = model.moe.top_k * model.moe.expert_ffn if model.moe else 0
    return {"dense": model.ffn, "moe": experts, "none": 0}[kind.mlp] / model.hidden


def _embedding(chunk: ChunkMemory) -> Array:
    return np.asarray(chunk.share.embedding * chunk.vocabulary_gradient / compute_bytes(chunk.job))


def _autocast(chunk: ChunkMemory) -> Iterator[TensorLifetime]:
    """Casts of weights, and what the residual stream takes beyond the compute format: compiled, once a layer."""
    event, b, on = EngineEvent, compute_bytes(chunk.job), autocast(chunk.job, chunk.columns)
    layers, ends = chunk.share.layers, chunk.share.head
    head = b * ends * chunk.job.model.vocab * chunk.job.model.hidden
    kept = np.where(chunk.columns.is_("recompute", "full"), 0.0, b * layers * chunk.rank_params.block)
    yield buffer("weights cast", np.where(on, head + kept, 0.0), event.LOSS_FORWARD, event.HEAD_REDUCE)
    yield buffer("weights cast", np.where(on, kept, 0.0), event.HEAD_REDUCE, event.BACKWARD_END)
    times = layers * (1 + chunk.job.framework.eager_activation * ~chunk.columns.is_("recompute", "full"))
    wider = np.where(on, (FP32 / b - 1) * times * chunk.residual, 0.0)
    yield activation("residual stream in fp32", wider, event.LOSS_FORWARD, event.BACKWARD_END)


def _states(chunk: ChunkMemory, gradients: Array) -> Iterator[TensorLifetime]:
    event, framework, columns = EngineEvent, chunk.job.framework, chunk.columns
    # Those of one micro-batch appear as its backward comes along.
    late = ((columns.gas == 1) & (not framework.keeps_gradients)) | chunk.first_backward
    params = chunk.rank_params
    each = gradients / np.maximum(1, params.total)
    yield TensorLifetime("gradients", "gradients", np.where(late, 0.0, gradients), event.LOSS_FORWARD, event.FIRST_LAYER)
    missing = each * np.where(late, _embedding(chunk), 0.0)
    yield TensorLifetime("gradients", "gradients", gradients - missing, event.FIRST_LAYER, event.EMBEDDING)
    missing = np.where(_adds_whole_gradients(chunk), 0.0, missing)  # else the sum is there beside the gradient
    yield TensorLifetime("gradients", "gradients", gradients - missing, event.EMBEDDING, event.BACKWARD_END)
    first = np.where(late, -each * params.block, 0.0)
    yield TensorLifetime("gradients", "gradients", first, event.FIRST_LAYER, event.EMBEDDING)
    yield TensorLifetime("gradients", "gradients", gradients, event.BACKWARD_END, event.END)
    if framework.live_parameters:
        found, b = gathered_elements(chunk.job, columns), compute_bytes(chunk.job)
        for live, begin, end in (
            (found.live_at_loss, event.LOSS_FORWARD, event.LAYER_BACKWARD),
            (found.live_in_last_layer, event.LAYER_BACKWARD, event.FIRST_LAYER),
            (found.live_before, event.FIRST_LAYER, event.BACKWARD_END),
        ):
            yield buffer("gathered parameters", np.where(_gathers(chunk), b * live, 0.0), begin, end)
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
    """Reduces gradients layer by layer in this backward."""
    return np.asarray(_is_sharded(chunk) & (chunk.job.framework.states == "fp32") & ~_adds_whole_gradients(chunk))


def _adds_whole_gradients(chunk: ChunkMemory) -> Array:
    """In place of reducing them, which waits for a step's last backward."""
    return _sums_whole_gradients(chunk) & (not chunk.last_backward)


def _sums_whole_gradients(chunk: ChunkMemory) -> Array:
    """Of all micro-batches, in fp32."""
    waits = chunk.job.framework.accumulation == "unsharded-in-pipelines"
    return np.asarray(_is_sharded(chunk) & waits & (chunk.columns.pp > 1) & (chunk.columns.gas > 1))


def _gathers(chunk: ChunkMemory) -> Array:
    """ZeRO-3 that frees parameters after use."""
    return np.asarray(_is_sharded(chunk) & (chunk.columns.zero == 3) & (chunk.columns.keep_gathered == 0))
