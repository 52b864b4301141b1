"""A layer's backward, moment by moment, on top of the activations that wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ultrascale.cost import moments_attention, moments_norm, moments_zero
from ultrascale.cost.activations import LayerActivations, compute_bytes, gradient_bytes, lean, split_backward, uncut
from ultrascale.cost.chunk_memory import ChunkMemory
from ultrascale.cost.columns import Array
from ultrascale.cost.memory_point import MemoryPoint, fullest


def in_layer(scene: ChunkMemory, gradients: Array, split: bool) -> MemoryPoint:
    """The fullest moment of the fullest layer's backward; `split`: what it dropped is counted with what waits for it."""
    nothing = np.zeros(len(scene.columns))
    if not scene.job.framework.exact_memory_trace:
        most = nothing
        for count, _, layer in scene.layers:
            most = np.maximum(most, np.where(count > 0, layer.gradients if split else layer.working, 0.0))
        return MemoryPoint(most, scene.at_once, gradients)
    found = none = MemoryPoint(nothing, nothing, nothing)
    apart = split_backward(scene.columns) & split
    for count, moe, layer in scene.layers:
        stages = (
            _on_a_gpu(scene, layer, moe, apart) if scene.job.framework.fused_blocks else _followed(scene, layer, moe, apart)
        )
        received = _received(scene, moe, apart)
        own = [_on_top(scene, one, layer, gradients, done, apart, received) for one in stages for done in _done(scene)]
        found = fullest(found, *(one.where(count > 0, none) for one in own))
    return found


def _done(scene: ChunkMemory) -> list[Array]:
    """Layers whose backward is over when a rank may be fullest: none, one, all but the last two, all but the last.

    Where their weights go with all that they keep, no more than one.
    """
    layers = scene.share.layers
    most = np.minimum(np.where(scene.lets_go & ~split_backward(scene.columns), 1, layers), layers - 1)
    return [np.maximum(0, np.minimum(done, most)) for done in (0, 1, layers - 2, layers - 1)]


def _received(scene: ChunkMemory, moe: bool, split: Array) -> Array:
    """The gradient that a chunk began with, which its backward has in hand to the end; where that is split, the last layer's
    product may wait with it anyway: not with one gathered from slices, nor where rows have gradients of their own.
    """
    model = scene.job.model.moe
    routed = moe and model is not None and not model.shared_experts
    return np.where((scene.share.head == 0) & (~split | (scene.columns.sequence_cut > 1) | routed), scene.residual, 0.0)


def _on_top(
    scene: ChunkMemory, one: MemoryPoint, layer: LayerActivations, gradients: Array, done: Array, split: Array, received: Array
) -> MemoryPoint:
    """With what every moment of a layer's backward has, after `done` others: fewer activations, more gradients, gathered
    weights, and what was scattered or sent and is not yet let go. A split backward frees none, and of what is counted for its
    weights' turn only the layers that are done have it.
    """
    job, held = scene.job, scene.held
    layers = np.maximum(1, scene.share.layers)
    ahead = scene.dropped + scene.settled - done / layers * (scene.dropped + scene.settled_layers)
    back = layer.whole - layer.total - np.where(split, ahead, done / layers * scene.kept_layers)
    late = split_backward(scene.columns)
    each = np.where(scene.scatters, gradient_bytes(job) * held.block, 0.0)
    scattered = np.where(late | (done == 0), moments_zero.left_over(scene), each)
    others = moments_zero.scattered_last(scene) - moments_zero.left_over(scene)
    fetched = np.minimum(2, layers - done) * held.block + (held.layer - held.block)
    narrow = scene.narrow_after(done)
    if one.scatters:  # whose weights go before its gradients do
        fetched, narrow = fetched - held.block, scene.narrow_behind(done)
    moving = moments_zero.gathered_elements(scene, held.ends + fetched, narrow)
    moving = moving + moments_zero.sent_gradient(scene) + moments_zero.head_gradients(scene)
    # What was scattered last goes when the next scatter begins.
    moving = moving + others + (np.where(late, scattered, 0.0) if one.scatters else scattered)
    # A whole backward of a chunk whose others are split has all its gradients scattered at its end, as theirs are.
    through = done / layers * (scene.own.total - scene.own.ends)
    moving = moving + np.where(late & ~split & scene.scatters, gradient_bytes(job) * through, 0.0)
    moving = moving + np.where(late, 0.0, moments_zero.made_first(scene, through))
    gone = np.where(scene.lets_go, compute_bytes(job) * (through + (held.block if one.scatters else 0.0)), 0.0)
    made = (gradients - gradients * held.ends / held.total) * done / layers
    return MemoryPoint(
        back + one.activations + np.where((done > 0) | one.apart, received, 0.0),
        one.buffers + moving - gone,
        np.where(scene.one_backward, made, gradients),
        gone,
    )


def _followed(scene: ChunkMemory, layer: LayerActivations, moe: bool, split: Array) -> list[MemoryPoint]:
    """What comes and goes in one layer's backward, beyond all that it keeps.

    Backward frees what it has used, so that a gate's output makes room for its gradient; a split one keeps the inputs of
    products. The gate's activation is not kept but written once more, beside the three gradients. Products of one input add
    their gradients to it in turns: one more of those for a moment.
    """
    model = scene.job.model
    wide, turns = (layer.modules["expert activation" if moe else "mlp activation"], 2 if model.gated else 1)
    used = np.where(split, 0.0, wide)  # the activation, once the last product has its gradients
    gathered = scene.gathered_slices
    owed = np.where(split, gathered, 0.0)
    out = layer.modules.get("expert output", 0.0 * wide)
    rows = layer.modules["expert input"] if moe else scene.uncut
    matrix = np.where(split, 0.0, _matrix(scene, moe))
    one_by_one = 2 if moe else 1  # experts' gradients are stacked from those of each
    nothing = 0.0 * wide
    last = np.where(scene.holds_gradients, matrix, 0.0)
    beside = nothing if moe else gathered
    stages = [
        # the last product: gradients of its output and of its input, and its weight's
        (wide + beside, one_by_one * matrix),
        # the gate
        ((turns + 1 + model.gated) * wide - used - out + owed, last),
        # the first products
        (turns * rows + beside + (turns - 1 - model.gated) * wide - used - out, last + matrix),
    ]
    if moe:  # rows as they came home: their gradients, and those of the weights by which they were added
        stages.append((2 * out + gathered, nothing))
    if moe:  # the last of the first ones' rows: each expert's, and all of them in one
        stages.append(((turns + 1) * rows + (turns - 1 - model.gated) * wide - used - out, last))
    if model.gated:
        # the second of them, when the first one's gradients are made; experts' are stacked, too
        stages.append((turns * rows + beside - np.where(split, 0.0, wide) - used - out, last + last + one_by_one * matrix))
    if not moe:  # cut by tp, products of one input have their weights' gradients all together, when their input's is summed
        stages.append((np.where(scene.columns.tp > 1, rows + scene.residual + beside - used, 0.0), last + turns * matrix))
    if model.norm == "rmsnorm":
        stages.append((moments_norm.of_mlp(scene, layer, moe, split), last))
    found = [MemoryPoint(scene.residual + act, moving, nothing) for act, moving in stages]
    act, moving = moments_attention.backward(scene, layer, moe, split, last)
    found.append(MemoryPoint(scene.residual + act, moving, nothing, apart=True))
    if model.norm == "rmsnorm":
        act = np.where(split, moments_norm.of_attention(scene, moe), 0.0)
        found.append(MemoryPoint(scene.residual + act, last, nothing, apart=True))
    b, g = compute_bytes(scene.job), gradient_bytes(scene.job)
    late = split_backward(scene.columns)
    whole = scene.held.block * (b + np.where(scene.scatters & ~(late & (g == b)), g, 0))
    whole = whole + np.where(scene.scatters & ~late, moments_zero.arriving(scene, scene.held.block), 0.0)
    end = np.where(scene.holds_gradients & ~split, scene.residual - layer.whole, -np.inf)
    return [*found, MemoryPoint(end, whole, nothing, scatters=True, apart=True)]


def _on_a_gpu(scene: ChunkMemory, layer: LayerActivations, moe: bool, split: Array) -> list[MemoryPoint]:
    """The same where whole layers are fused or compiled, and run operator by operator only where they are cut or put off."""
    *plain, end = _followed(scene, layer, moe, split)
    columns, nothing = scene.columns, 0.0 * scene.residual
    whole = uncut(columns)
    fused = lean(scene.job, columns) & ~columns.is_("recompute", "full") & (not moe)
    stages = [_rows(one, ~whole) for one in plain]
    if not moe:
        stages += [_rows(MemoryPoint(act, moving, nothing), fused) for act, moving in _fused(scene, layer)]
    return [*stages, _rows(MemoryPoint(layer.gradients, nothing, nothing), whole & ~fused), end]


def _rows(one: MemoryPoint, there: Array) -> MemoryPoint:
    """Where such a moment comes; elsewhere it adds nothing to what every moment has."""
    nothing = np.zeros(len(there))
    return replace(one.where(there, MemoryPoint(nothing, nothing, nothing)), scatters=one.scatters, apart=one.apart)


def _fused(scene: ChunkMemory, layer: LayerActivations) -> list[tuple[Array, Array]]:
    """A fused block's MLP, whose backward is one function: what it was given is there until it returns, and gradients of its
    weights are given back together. Nothing was dropped that comes back; products of weights that ZeRO gathered one by one
    copy them together.
    """
    residual, wide, matrix = scene.residual, layer.modules["mlp activation"], _matrix(scene, moe=False)
    back = layer.whole - layer.total
    stages = [
        # the gate: its output's gradient, those of both inputs, and its output once more
        (residual + 4 * wide, 0 * matrix),
        # the last product's weight
        (residual + 3 * wide, matrix),
        # the norm: gradients of its output and of its input, and its output once more
        (4 * residual + 2 * wide, matrix + np.where(scene.holds_gradients, 2 * matrix, 0.0)),
        # the first products' weights
        (3 * residual + 2 * wide, 3 * matrix),
    ]
    return [(np.asarray(act - back), moving) for act, moving in stages]


def _matrix(scene: ChunkMemory, moe: bool) -> Array:
    """Bytes of the gradient of one of the MLP's matrices as autograd makes it; of all experts' on the rank."""
    model, b = scene.job.model, compute_bytes(scene.job)
    if not moe or model.moe is None:
        return np.asarray(b * model.hidden * model.ffn / scene.columns.tp)
    each = model.hidden * model.moe.expert_ffn / scene.columns.expert_cut
    return np.asarray(b * each * model.moe.experts / scene.columns.ep)
