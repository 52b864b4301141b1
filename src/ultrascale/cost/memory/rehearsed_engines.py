"""Live memory of other engines, event by event: buffers and fresh gradients where rehearsals of the engine show them.

The engines hold states, saved tensors and layers as activations.py and states.py count them. Here is what FSDP2, DeepSpeed's
ZeRO and plain data parallelism have beside these at the loss and in the backward of the last layer, where most is saved
(tools/fit_frameworks.py, docs/rehearse.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum, auto

import numpy as np

from ultrascale.cost.columns import Array, where
from ultrascale.cost.memory.activations import CHUNKED_GRADIENTS, EXPERTS, LayerActivations
from ultrascale.cost.memory.chunk import (
    AlikeLayers,
    ChunkMemory,
    MemoryPoint,
    TensorLifetime,
    activation,
    buffer,
    fullest,
    walk,
)
from ultrascale.cost.memory.states import (
    FP32,
    autocast,
    compute_bytes,
    expert_slices,
    gathered_vocabularies,
    gradient_bytes,
)
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
    SECOND_LAYER = auto()
    """the next one in backward, beside what was reduced"""
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
    at_hand = weight if with_gradients else np.minimum(1, chunk.share.layers) * chunk.rank_params.layer
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
    framework, block, layers = chunk.job.framework, chunk.rank_params.layer, chunk.share.layers
    within, saved = MemoryPoint.nothing(len(columns)), np.zeros(len(columns))
    for alike in chunk.layers:
        there = alike.count > 0
        saved = np.maximum(saved, np.where(there, alike.saved.total, 0.0))
        for point in _within_layer(chunk, alike):
            within = fullest(within, where(there, point, MemoryPoint.nothing(len(columns))))
    fsdp, third = _is_fsdp(chunk), layers > 2
    for begin in (event.LAYER_BACKWARD, event.SECOND_LAYER, event.FIRST_LAYER):
        happens = np.where((begin != event.SECOND_LAYER) | third, 1.0, 0.0)
        yield activation("recomputed, and gradients of activations", happens * within.activations, begin, begin + 1)
        yield buffer("fresh weight gradients", happens * within.buffers, begin, begin + 1)
    # Engines that gather inputs again have a buffer for them, which stays.
    stays = event.LAYER_BACKWARD if framework.gathered_inputs else event.LOSS_FORWARD
    yield buffer("gathered sequence", chunk.gathered_sequence, stays, event.LAYER_REDUCE)
    gathers = _gathers(chunk) & (framework.live_parameters == 0)
    this_and_next = np.where(gathers, b * np.minimum(2, layers) * block, 0.0)
    yield buffer("gathered layers", this_and_next, event.LAYER_BACKWARD, event.LAYER_REDUCE)
    yield buffer("gathered layers", np.where(third, this_and_next, 0.0), event.SECOND_LAYER, event.FIRST_LAYER)
    next_one = np.where(gathers, b * np.minimum(1, layers - 1) * block, 0.0)
    reduced = np.where(fsdp, g * block, 0.0)
    ends = np.where(fsdp, b * block + g * _layer_share(chunk) / columns.shards, 0.0)
    for begin, end in ((event.LAYER_REDUCE, event.SECOND_LAYER), (event.BACKWARD_END, event.END)):
        yield buffer("gathered layer", next_one, begin, end)
        yield buffer("weight gradients and reduce-scatter output", ends, begin, end)
        yield buffer("reduce-scatter input", reduced, begin, end)
    yield buffer("reduce-scatter input", reduced, event.SECOND_LAYER, event.EMBEDDING)
    embedding = _embedding(chunk)
    with_embedding = np.where(gathers, b * (block + embedding), 0.0)
    yield buffer("gathered layer and embedding", with_embedding, event.FIRST_LAYER, event.EMBEDDING)
    # The gathered embedding is freed before its gradient is reduced.
    fresh = np.where(_adds_whole_gradients(chunk) | (fsdp & ~_sums_whole_gradients(chunk)), b, 0.0) * embedding
    whole = fresh + np.where(fsdp, (g + g / columns.shards) * embedding, 0.0)
    yield buffer("embedding's gradient, reduce-scatter input and output", whole, event.EMBEDDING, event.BACKWARD_END)
    yield activation("freed", -saved, event.SECOND_LAYER, event.FIRST_LAYER)
    yield activation("freed", saved - chunk.saved, event.FIRST_LAYER, event.EMBEDDING)
    yield activation("freed", -chunk.saved, event.EMBEDDING, event.END)


def _within_layer(chunk: ChunkMemory, alike: AlikeLayers) -> Iterator[MemoryPoint]:
    """What a layer's backward has beside what it saved and gathered: recomputed tensors, gradients of activations, and under
    FSDP all fresh weight gradients of the MLP.
    """
    job, columns, layer, nothing = chunk.job, chunk.columns, alike.saved, np.zeros(len(chunk.columns))
    fresh = (np.where(_is_fsdp(chunk), 2, 1) + job.model.gated) * chunk.mlp_weight_gradient[alike.moe]
    if alike.moe and job.framework.routing_format != "compute":
        yield from _within_experts(chunk, layer, fresh)
        return
    # Compiled, the gradient of the activation becomes that of one of the GEMMs before it.
    compiled = job.framework.states == "fp32" and not job.framework.eager_activation
    overwritten = compiled * chunk.full_sequence * _width(chunk, alike.kind) / columns.tp
    yield MemoryPoint(layer.recomputed + layer.gradients - overwritten, fresh, nothing, nothing)


def _within_experts(chunk: ChunkMemory, layer: LayerActivations, fresh: Array) -> Iterator[MemoryPoint]:
    """The same where routing weighs experts' outputs in fp32: in backward of the weighted sum, where all is in fp32, and of the
    up GEMMs. By then outputs and what GEMMs saved are freed; in compiled layers only what was recomputed is.
    """
    job, nothing, b = chunk.job, np.zeros(len(chunk.columns)), compute_bytes(chunk.job)
    rows, output, residual = layer.modules["expert input"], layer.modules["expert output"], chunk.residual
    gates = layer.modules["expert matmuls"]
    wide = gates / (1 + job.model.gated)
    if job.framework.eager_activation:
        in_fp32 = 3 * FP32 / b * rows  # of the sum; of it, times outputs for scores, and times scores
        yield MemoryPoint(layer.recomputed + residual + in_fp32, nothing, nothing, nothing)
        saved = output + gates + layer.modules["expert activation"]
        yield MemoryPoint(layer.recomputed + residual + 2 * rows + wide - saved, fresh, nothing, nothing)
    else:
        # Where layers are compiled whole; torchtitan compiled parts of those with experts until 0.2.
        whole = job.framework.routing_format == "fp32"
        again = whole * sum(layer.modules[name] - layer.kept[name] for name in EXPERTS)
        yield MemoryPoint(layer.recomputed - again + residual + 2 * rows + wide, fresh, nothing, nothing)


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
    captured = (columns.pp == 1) & (columns.ep == 1)
    keeps = {"always": ~captured | captured, "captured": captured, "never": ~captured & captured}[framework.keeps_gradients]
    late = ((columns.gas == 1) & ~keeps) | chunk.first_backward
    params = chunk.rank_params
    each = gradients / np.maximum(1, params.trunk + _expert_share(chunk) * params.experts)
    steady = np.where(late, 0.0, gradients)
    yield TensorLifetime("gradients", "gradients", steady, event.LOSS_FORWARD, event.FIRST_LAYER)
    first = np.where(late, each * _layer_share(chunk), 0.0)
    yield TensorLifetime("gradients of the first layer", "gradients", first, event.SECOND_LAYER, event.FIRST_LAYER)
    missing = each * np.where(late, _embedding(chunk), 0.0)
    yield TensorLifetime("gradients", "gradients", gradients - missing, event.FIRST_LAYER, event.EMBEDDING)
    missing = np.where(_adds_whole_gradients(chunk), 0.0, missing)  # else the sum is there beside the gradient
    yield TensorLifetime("gradients", "gradients", gradients - missing, event.EMBEDDING, event.BACKWARD_END)
    yield TensorLifetime("gradients", "gradients", -first, event.FIRST_LAYER, event.EMBEDDING)
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


def _layer_share(chunk: ChunkMemory) -> Array:
    """Elements of a layer, those of experts weighed by how much larger a rank's part of them is than of the rest."""
    params = chunk.rank_params
    return np.asarray(params.block + _expert_share(chunk) * (params.layer - params.block))


def _expert_share(chunk: ChunkMemory) -> Array:
    if chunk.job.model.moe is None:
        return np.ones(len(chunk.columns))
    shards, _ = expert_slices(chunk.job.model, chunk.columns, chunk.columns.shards)
    return np.where(_is_sharded(chunk) & ~_sums_whole_gradients(chunk), chunk.columns.shards / shards, 1.0)


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
