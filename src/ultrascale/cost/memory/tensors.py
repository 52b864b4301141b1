"""What one chunk allocates and frees beside its layers' backward: loss, ends of a pass, deferred weight gradients.

Tables of tensors with lifetimes, as in layer_backward.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from enum import IntEnum, auto
from itertools import product

import numpy as np

from ultrascale.cost.columns import Array, where
from ultrascale.cost.memory import states
from ultrascale.cost.memory.activations import expert_rows
from ultrascale.cost.memory.chunk import (
    AlikeLayers,
    ChunkMemory,
    LiveMemory,
    MemoryPoint,
    TensorLifetime,
    activation,
    buffer,
    fullest,
    walk,
)
from ultrascale.cost.memory.states import compute_bytes, gradient_bytes, uses_fused_blocks


class ChunkEvent(IntEnum):
    """What happens to a chunk outside its layers' backward."""

    FORWARD_END = 0
    LOSS_FORWARD = auto()
    LOSS = auto()
    HEAD_BACKWARD = auto()
    FINAL_NORM = auto()
    HEAD_REDUCE_SCATTER = auto()
    BACKWARD_START = auto()
    """where ZeRO-3 gathers the head again"""
    WEIGHT_GRADS = auto()
    """deferred ones"""
    ROOT_REDUCE_SCATTER = auto()
    """of the embedding, with a tied head FSDP's root group: the last, or the first after deferred weight gradients"""
    LAYER_REDUCE_SCATTER = auto()
    """of the first layer after deferred weight gradients"""
    END = auto()


def chunk_events(chunk: ChunkMemory, gradients: Array) -> LiveMemory:
    """A chunk of a traced engine outside its layers' backward."""
    return walk(_chunk_tensors(chunk, gradients), ChunkEvent.END, len(chunk.columns))


def loss_peak(chunk: ChunkMemory, live: LiveMemory) -> MemoryPoint:
    """The peak of head and loss; the final norm in fp32 outweighs few logits."""
    found = fullest(live.at(ChunkEvent.LOSS), live.at(ChunkEvent.LOSS_FORWARD), live.at(ChunkEvent.HEAD_BACKWARD))
    scatters = chunk.reduce_scatters & (chunk.head_group > 0) & ~chunk.columns.split_backward
    found = where(scatters, fullest(found, live.at(ChunkEvent.HEAD_REDUCE_SCATTER)), found)
    return fullest(found, live.at(ChunkEvent.FINAL_NORM)) if chunk.job.model.norm == "rmsnorm" else found


def _chunk_tensors(chunk: ChunkMemory, gradients: Array) -> Iterator[TensorLifetime]:
    event, head = ChunkEvent, chunk.share.head
    none = np.zeros(len(chunk.columns))
    yield from _forward_end(chunk)
    yield from _loss(chunk)
    # ZeRO-3 and the last reduce-scatter, in a forward; layers are freed while deferred weight gradients are computed.
    between = chunk.unsharded_between_layers + chunk.rank_reduce_scatter_inputs
    yield buffer("unsharded parameters, reduce-scatter inputs", between, event.FORWARD_END, event.LOSS_FORWARD)
    yield buffer("unsharded parameters, reduce-scatter inputs", head * between, event.LOSS_FORWARD, event.HEAD_REDUCE_SCATTER)
    # Backward has yet to prefetch the last layer; the buffer of its all-gather in forward is freed where the head is a group.
    block = np.where(chunk.head_group > 0, chunk.unsharded_ends - chunk.unsharded_between_layers, 0.0)
    yield buffer("last layer, not gathered", block, event.LOSS_FORWARD, event.LOSS)
    in_forward = (chunk.head.backward > 0) & (chunk.columns.tp > 1)
    yield buffer("last layer, not gathered", np.where(in_forward, block, 0.0), event.LOSS, event.HEAD_BACKWARD)
    yield from _head_reduce_scatter(chunk)
    yield buffer("reduce-scatter inputs", chunk.rank_reduce_scatter_inputs, event.WEIGHT_GRADS, event.ROOT_REDUCE_SCATTER)
    frees = chunk.columns.split_backward & chunk.frees_gathered & (chunk.columns.zero == 3)
    freed = np.where(frees, -compute_bytes(chunk.job) * chunk.own.total, 0.0)
    yield TensorLifetime(
        "parameters freed with the input gradients", "parameters", freed, event.WEIGHT_GRADS, event.ROOT_REDUCE_SCATTER
    )
    yield from _backward_start(chunk)
    yield from _backward_end(chunk)
    accumulated = np.where(chunk.single_backward, none, gradients)
    yield TensorLifetime("gradients", "gradients", accumulated, event.FORWARD_END, event.BACKWARD_START)
    yield TensorLifetime("gradients", "gradients", gradients, event.BACKWARD_START, event.WEIGHT_GRADS)
    yield TensorLifetime("gradients", "gradients", accumulated, event.WEIGHT_GRADS, event.ROOT_REDUCE_SCATTER)
    # Of a step's only backward, shards whose reduce-scatter is running were not there before.
    arriving = np.where(chunk.columns.split_backward, chunk.own.total, chunk.embedding_or_tied_group) / chunk.rank_params.total
    there = gradients * (1 - np.where(chunk.single_backward, arriving, 0.0))
    yield TensorLifetime("gradients", "gradients", there, event.ROOT_REDUCE_SCATTER, event.END)


def _forward_end(chunk: ChunkMemory) -> Iterator[TensorLifetime]:
    """Where the last layer has experts: rows that return from them; the layer's output is not there yet. In a fused block: the
    gate's and the norm's output, which are not saved, and the last matmul's before it is scattered or added. Operator by
    operator: a gate's silu, before there is an output.
    """
    start, end = ChunkEvent.FORWARD_END, ChunkEvent.LOSS_FORWARD
    fused = uses_fused_blocks(chunk.job, chunk.columns)
    recomputes_none = chunk.columns.is_("recompute", "none")
    gates = states.eager(chunk.job, chunk.columns) & recomputes_none & chunk.job.model.gated
    for alike in chunk.layers:
        none_done = 0 * alike.count
        layer, last = alike.saved, chunk.is_next(alike, none_done) & (alike.count > 0)
        if alike.kind.mlp == "none":
            continue
        if not alike.moe:
            summed = np.where(chunk.gathered_sequence > 0, chunk.gathered_sequence, chunk.residual)
            wide, there = layer.modules["mlp activation"], (fused | gates) & last
            in_fp8, b = chunk.is_fp8_layer(none_done), compute_bytes(chunk.job)
            # In fp8 the gate's output is narrow and the norm's freed; the last matmul's weight is cast.
            weight = np.where(in_fp8 & last, chunk.mlp_weight_gradient[False] / b, 0.0)
            yield buffer("weight of the last matmul in fp8", weight, start, end)
            wide = wide / np.where(in_fp8, b, 1)
            not_saved = np.where(in_fp8, 0.0, chunk.residual) + summed + layer.fused - layer.total
            extra = np.where(fused, not_saved, np.where(chunk.sends_output, -chunk.residual, 0.0))
            yield activation("outputs of gate, norm and last matmul", np.where(there, wide + extra, 0.0), start, end)
            yield buffer("gradient sent to the previous stage", np.where(there, chunk.sent_gradient, 0.0), start, end)
            continue
        sizes = {
            "expert rows, received and weighted": 2 * expert_rows(chunk.job, chunk.columns),
            "sum of each token's rows": chunk.full_sequence,
            "gathered input": chunk.gathered_sequence,
            "layer's normed input": chunk.residual,
            "output to send, not there yet": np.where(chunk.sends_output, -chunk.residual, 0.0),
        }
        for name, size in sizes.items():
            yield activation(name, np.where(last, size, 0.0), start, end)


def _loss(chunk: ChunkMemory) -> Iterator[TensorLifetime]:
    event, head = ChunkEvent, chunk.share.head
    normed = 2 * chunk.residual + chunk.norm_workspace(chunk.residual)
    yield activation("head and loss, in forward", head * chunk.head.forward, event.LOSS_FORWARD, event.LOSS)
    yield activation("head and loss", head * chunk.head.peak, event.LOSS, event.HEAD_BACKWARD)
    yield activation("gradients of logits and hidden states", head * chunk.head.backward, event.HEAD_BACKWARD, event.FINAL_NORM)
    fresh = np.where(chunk.head.backward > 0, head * chunk.vocabulary_gradient, 0.0)
    yield buffer("head's fresh weight gradient", fresh, event.HEAD_BACKWARD, event.FINAL_NORM)
    yield activation("final norm's input, gradient, fp32", head * normed, event.FINAL_NORM, event.HEAD_REDUCE_SCATTER)
    yield buffer("gradient sent", head * chunk.sent_gradient, event.LOSS_FORWARD, event.BACKWARD_START)
    yield buffer("head's weight gradient", chunk.head_gradient, event.FINAL_NORM, event.BACKWARD_START)


def _head_reduce_scatter(chunk: ChunkMemory) -> Iterator[TensorLifetime]:
    """The head's weight is freed, the last layer prefetched; the input gradient of the layers is there."""
    start, end, elements = ChunkEvent.HEAD_REDUCE_SCATTER, ChunkEvent.BACKWARD_START, chunk.head_group
    b, g = compute_bytes(chunk.job), gradient_bytes(chunk.job)
    others = chunk.rank_reduce_scatter_inputs - chunk.reduce_scatter_input
    prefetched = chunk.unsharded(chunk.block_of_next(0 * chunk.share.layers), 0.0 * elements)
    yield activation("residual gradient", chunk.residual, start, end)
    yield buffer("weight gradient, reduce-scatter input", (b + g) * elements, start, end)
    yield buffer("reduce-scatter output", chunk.reduce_scatter_output(elements), start, end)
    yield buffer("prefetched parameters, reduce-scatter inputs of other chunks", prefetched + others, start, end)
    freed = np.where(chunk.frees_gathered, -b * elements, 0.0)
    yield TensorLifetime("freed parameters", "parameters", freed, start, end)


def _backward_start(chunk: ChunkMemory) -> Iterator[TensorLifetime]:
    """ZeRO-3 gathers the head again: as it arrives, and as it is used."""
    start, end, none_done = ChunkEvent.BACKWARD_START, ChunkEvent.WEIGHT_GRADS, 0 * chunk.share.layers
    gathers = (chunk.columns.zero == 3) & (chunk.columns.keep_gathered == 0)
    unsharded = chunk.unsharded(
        2 * (chunk.tied_group + chunk.head_group + chunk.block_of_next(none_done)), chunk.fp8_prefetched(none_done)
    )
    sizes = unsharded + chunk.rank_reduce_scatter_inputs
    yield activation("residual gradient", np.where(gathers, chunk.residual, 0.0), start, end)
    yield buffer("unsharded parameters, reduce-scatter inputs", np.where(gathers, sizes, 0.0), start, end)


def _backward_end(chunk: ChunkMemory) -> Iterator[TensorLifetime]:
    """Activations are freed. Root's gradients are FSDP's last group. After deferred weight gradients root is the first, and all
    of the chunk's gradients are there; those of the first layer are freed as they are copied for its reduce-scatter.
    """
    root, layer, end = ChunkEvent.ROOT_REDUCE_SCATTER, ChunkEvent.LAYER_REDUCE_SCATTER, ChunkEvent.END
    own, b, g, late = chunk.own, compute_bytes(chunk.job), gradient_bytes(chunk.job), chunk.columns.split_backward
    in_flight = chunk.saved + np.where(late, chunk.deferred, 0.0)
    yield activation("this micro-batch, in flight until now", -in_flight, root, end)
    whole, fresh = g * (own.total - own.padding), b * chunk.embedding_or_tied_group
    weight_grads = chunk.trained * np.where(late, whole, fresh)
    group = np.where(late & (chunk.embedding_or_tied_group == 0), chunk.head_group, chunk.embedding_or_tied_group)
    yield buffer("weight gradients", weight_grads, root, end)
    yield buffer("reduce-scatter input", chunk.trained * g * group, root, layer)
    yield buffer("reduce-scatter output", chunk.reduce_scatter_output(group), root, layer)
    rest = chunk.trained * g * (chunk.first_block - own.ends)
    yield buffer("reduce-scatter input, less the root's gradients", rest, layer, end)
    first_layers = np.where(late, 0.0, chunk.first_gradients(own.total - chunk.embedding_or_tied_group))
    yield buffer("gradients of the layers", first_layers, root, end)
    yield buffer("gradients of the root", chunk.first_gradients(own.ends), layer, end)
    others = chunk.rank_reduce_scatter_inputs - chunk.reduce_scatter_input
    yield buffer("reduce-scatter inputs of other chunks", others, root, end)
    yield TensorLifetime("freed parameters", "parameters", np.where(chunk.frees_gathered, -b * own.total, 0.0), root, end)


def backward_end(chunk: ChunkMemory, live: LiveMemory) -> MemoryPoint:
    """The fuller of the reduce-scatters that end a backward, where it has any."""
    late = chunk.columns.split_backward
    point = live.at(ChunkEvent.ROOT_REDUCE_SCATTER)
    after = live.at(ChunkEvent.LAYER_REDUCE_SCATTER)
    found = where(late & ((chunk.own.ends == 0) | (after.total > point.total)), after, point)
    return where(chunk.reduce_scatters, found, MemoryPoint.nothing(len(chunk.columns)))


def last_backward_end(chunk: ChunkMemory, gradients: Array) -> MemoryPoint:
    """The reduce-scatter of a step's accumulated gradients in ZeRO-1: of the embedding, or of a chunk's first layer.

    It follows the layers' in a whole backward, and comes first after deferred weight gradients.
    """
    own, b, late = chunk.own, compute_bytes(chunk.job), chunk.columns.split_backward
    ends = np.where(late & (chunk.embedding_or_tied_group == 0), chunk.head_group, chunk.embedding_or_tied_group)
    group = np.where(ends > 0, ends, chunk.first_block)
    reduced = np.where(late, 0.0, own.total - group)
    return MemoryPoint(
        activations=-chunk.saved - np.where(late, chunk.deferred, 0.0),
        buffers=chunk.trained * gradient_bytes(chunk.job) * group + chunk.reduce_scatter_output(group),
        gradients=gradients * (1 - reduced * (1 - 1 / chunk.columns.shards) / chunk.rank_params.total),
        parameters=-b * (group + reduced),
    )


def weight_grads_peak(chunk: ChunkMemory, live: LiveMemory) -> MemoryPoint:
    """While deferred weight gradients are computed, from the last layer to the first.

    Fresh gradients stay until all of the chunk are there, unless they are added to others of the same format.
    """
    base, job, columns = live.at(ChunkEvent.WEIGHT_GRADS), chunk.job, chunk.columns
    if not columns.split_backward.any():
        return base
    keeps = np.where(chunk.sharded, chunk.holds_fresh_gradients, gradient_bytes(job) != compute_bytes(job))
    ends = waiting_gradient(chunk, chunk.share.embedding + chunk.share.head)
    found = base
    for alike, last in product(chunk.layers, (False, True)):
        done = chunk.when_next(alike, np.maximum(0, (alike.count - 1) * last))
        held = chunk.saved_when_done(done) + chunk.deferred_when_done(done)
        of_layers_done = chunk.trained * compute_bytes(job) * chunk.elements_done(done)
        for activations, kept, fresh in _layer_weight_grads(chunk, alike, done):
            buffers = ends + fresh + np.where(keeps, of_layers_done + kept, 0.0)
            point = replace(base, activations=base.activations + activations - held, buffers=base.buffers + buffers)
            found = where((alike.count > 0) & (point.total > found.total), point, found)
    # All are there and, where they are summed in another format, were cast one by one, the last large matrix just now.
    matrix = chunk.mlp_weight_gradient[False]
    if job.model.moe is not None:
        matrix = np.where(chunk.share.moe_layers > 0, chunk.mlp_weight_gradient[True], matrix)
    cast = chunk.trained * gradient_bytes(job) * (chunk.own.total - chunk.own.padding) + matrix
    point = replace(base, activations=base.activations - chunk.saved - chunk.deferred, buffers=base.buffers + cast)
    there = chunk.sharded & (chunk.reduce_scatters | chunk.first_backward) & (gradient_bytes(job) > compute_bytes(job))
    found = where(there & (point.total > found.total), point, found)
    return where(columns.split_backward, found, base)


def _layer_weight_grads(chunk: ChunkMemory, alike: AlikeLayers, done: Array) -> Iterator[tuple[Array, Array | float, Array]]:
    """The weight gradients of one layer at which memory may peak: activations that are there beside what the layer keeps for
    them, or are freed by then (negative); weight gradients that were computed before, and that are being computed.

    Operands are freed with those of their GEMM; of the MLP of a fused block that tp cuts together, with two gathers at once.
    """
    job, columns, modules, gathered = chunk.job, chunk.columns, alike.saved.modules, chunk.gathered_sequence
    gated, matrix, b = job.model.gated, chunk.mlp_weight_gradient[alike.moe], compute_bytes(job)
    up, weights = 1 + gated, chunk.trained * b * alike.elements
    fused = uses_fused_blocks(job, columns)
    outputs = np.where(fused, chunk.residual, chunk.full_sequence)  # output gradients of the last matmuls
    attended = modules.get("attention output", 0.0 * matrix)
    if alike.moe:
        # Experts one after the other, each matrix stacked from those of each expert; then the rest, if it is larger.
        wide, nothing = modules["expert activation"], 0.0 * matrix
        down = expert_rows(job, chunk.columns) + wide
        yield nothing, nothing, 2 * matrix
        yield -down - gated * wide, gated * matrix + matrix, 2 * matrix
        freed = down + up * wide + modules["expert input"] + outputs + attended
        yield gathered - freed, (1 + up) * matrix, weights - (1 + up) * matrix
        return
    # In fp8 operands are transposed, too, once they are gathered.
    narrow, two = np.where(chunk.is_fp8_layer(done), b, 1), np.where(chunk.is_fp8_layer(done), 3 / b, 2) * gathered
    if alike.kind.mlp == "none":
        yield gathered, 0.0, weights
        return
    wide, together = modules["mlp activation"], fused & (gathered > 0)
    yield np.where(fused, two, 0.0), 0.0, matrix
    yield np.where(together, two, gathered - (outputs + wide) / narrow), matrix, up * matrix
    if alike.kind.is_dense:
        mlp = (1 + up) * wide + chunk.residual + 2 * outputs + attended
        yield gathered - mlp / narrow, (1 + up) * matrix, weights - (1 + up) * matrix


def fresh_gradient(chunk: ChunkMemory, there: Array) -> Array:
    """The weight gradient of embedding or head, which is never deferred, where backward is split."""
    return np.where(
        chunk.columns.split_backward & chunk.job.framework.exact_memory_trace, there * chunk.vocabulary_gradient, 0.0
    )


def waiting_gradient(chunk: ChunkMemory, there: Array) -> Array:
    """The same until the chunk's reduce-scatter, in the format that is reduced; in ZeRO-1 it is among the gradients."""
    separate = chunk.sharded & (chunk.reduce_scatters | chunk.first_backward)
    ratio = max(1.0, gradient_bytes(chunk.job) / compute_bytes(chunk.job))
    return np.where(separate, ratio * fresh_gradient(chunk, there), 0.0)


def embedding_backward(chunk: ChunkMemory) -> Array:
    """The embedding, its weight gradient, the output gradients of all tokens on a rank that has a part of the vocabulary, and
    the chunk's output, from which its backward started.
    """
    columns, traced = chunk.columns, chunk.job.framework.exact_memory_trace
    gradient = np.where(columns.tp > 1, chunk.full_sequence, chunk.residual)
    outputs = chunk.share.embedding * (gradient + np.where(chunk.sends_output, chunk.residual, 0.0))
    outputs = np.where(columns.split_backward & traced, outputs, 0.0)
    tied = chunk.unsharded(chunk.tied_group, 0.0 * chunk.tied_group)
    return np.asarray(fresh_gradient(chunk, chunk.share.embedding) + outputs + tied)


def unsplit_embedding_backward(chunk: ChunkMemory, gradients: Array) -> MemoryPoint:
    """The embedding's backward in one that is not split: what its layers saved is freed.

    In a schedule that splits others, the layers' gradients wait for the reduce-scatter with the embedding's, which is live in
    both formats where it is cast.
    """
    fresh = np.where(chunk.columns.split_backward, 0.0, chunk.share.embedding * chunk.vocabulary_gradient)
    own, b, g, nothing = chunk.own, compute_bytes(chunk.job), gradient_bytes(chunk.job), np.zeros(len(chunk.columns))
    waiting = chunk.trained * np.where(
        chunk.reduce_scatters, g * (own.total - own.ends) + np.where(g > b, g * own.ends, 0.0), 0.0
    )
    buffers = chunk.share.embedding * (waiting + chunk.rank_reduce_scatter_inputs)
    received = chunk.share.embedding * chunk.residual
    return MemoryPoint(embedding_backward(chunk) + fresh + received - chunk.saved, buffers, gradients, nothing)
