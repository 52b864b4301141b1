"""What a rank holds at the moments that can be its fullest, on top of the activations that wait.

A planner that must not promise too much counts all that is on its way at once (buffers.py). An engine that was followed
operator by operator has it where it lives: gradients of a gate when the layer's other transfers are not there yet, gathered
sequences beside products, whole gradients at a layer's end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ultrascale.cost import activations, moments_attention, moments_zero, params
from ultrascale.cost.activations import LayerActivations, compute_bytes, gradient_bytes, split_backward
from ultrascale.cost.columns import Array
from ultrascale.cost.scene import Scene


@dataclass(frozen=True)
class Moment:
    activations: Array
    """beyond those that wait"""
    buffers: Array
    gradients: Array
    """of weights, accumulated or sharded: those that exist then"""
    scatters: bool = False
    """a layer's gradients are just being scattered"""

    def at(self, rows: Array) -> Moment:
        return Moment(self.activations[rows], self.buffers[rows], self.gradients[rows])

    def where(self, there: Array, other: Moment) -> Moment:
        """This one in the rows that are `there`, the other in the rest."""
        return Moment(
            np.where(there, self.activations, other.activations),
            np.where(there, self.buffers, other.buffers),
            np.where(there, self.gradients, other.gradients),
        )

    @property
    def moving(self) -> Array:
        return np.asarray(self.activations + self.buffers)

    @property
    def total(self) -> Array:
        return np.asarray(self.moving + self.gradients)


def fullest(one: Moment, *others: Moment) -> Moment:
    for other in others:
        one = other.where(other.total > one.total, one)
    return one


def at_loss(scene: Scene, gradients: Array) -> Moment:
    peak = np.asarray(scene.share.head * scene.head.peak)
    if not scene.job.framework.followed:
        return Moment(peak, scene.at_once, gradients)
    # One layer is there: fetched for backward, or where the loss is fullest in forward (a cut vocabulary) not yet let go.
    moving = moments_zero.gathered(scene) + moments_zero.scattered_last(scene) + _sent_gradient(scene)
    return Moment(peak, np.asarray(scene.share.head * moving), np.where(scene.one_backward, 0.0, gradients))


def beginning(scene: Scene, gradients: Array) -> Moment:
    """Of a backward before which ZeRO-3 must gather embedding and head again: as they arrive, and as they are used."""
    there = scene.job.framework.followed & (scene.columns.zero == 3) & (scene.columns.keep_gathered == 0)
    elements, narrow = 2 * scene.held.ends + 2 * scene.held.block, scene.narrow_after(0 * scene.share.layers)
    moving = moments_zero.gathered_elements(scene, elements, narrow) + moments_zero.scattered_last(scene)
    nothing = 0.0 * scene.residual
    return Moment(np.where(there, scene.residual, nothing), np.where(there, moving, nothing), gradients)


def in_forward(scene: Scene, gradients: Array) -> Moment:
    """At the end of a forward. Where experts' rows come home: those, as they came and times their weights, the sum of each
    token's, and the layer's normed input, whole; the layer's output is not there yet.
    """
    one = between(scene, gradients)
    if not scene.job.framework.followed:
        return one
    home = [2 * layer.modules["expert output"] * (count > 0) for count, moe, layer in scene.layers if moe]
    if not home:
        return one
    here = home[0] + scene.uncut + scene.gathered_slices + scene.residual - np.where(scene.sends_output, scene.residual, 0.0)
    return replace(one, activations=here * (scene.share.moe_layers > 0))


def between(scene: Scene, gradients: Array) -> Moment:
    """While weight gradients that were put off are computed."""
    nothing = np.zeros(len(scene.columns))
    if not scene.job.framework.followed:
        return Moment(nothing, scene.at_once, gradients)
    moving = moments_zero.gathered(scene) + moments_zero.scattered_last(scene)
    return Moment(nothing, moving, np.where(scene.one_backward, 0.0, gradients))


def in_layer(scene: Scene, gradients: Array, split: bool) -> Moment:
    """The fullest moment of the fullest layer's backward; `split`: what it dropped is counted with what waits for it."""
    nothing = np.zeros(len(scene.columns))
    if not scene.job.framework.followed:
        most = nothing
        for count, _, layer in scene.layers:
            most = np.maximum(most, np.where(count > 0, layer.gradients if split else layer.working, 0.0))
        return Moment(most, scene.at_once, gradients)
    found = none = Moment(nothing, nothing, nothing)
    apart = split_backward(scene.columns) & split
    for count, moe, layer in scene.layers:
        stages = _followed(scene, layer, moe, apart)
        own = [_on_top(scene, one, layer, gradients, done, apart) for one in stages for done in _done(scene)]
        found = fullest(found, *(one.where(count > 0, none) for one in own))
    return found


def scattering(scene: Scene, gradients: Array) -> Moment:
    """The end of a chunk's backward, when its activations are gone: embedding and head, which are FSDP's last group, are on
    their way. Where backward is split they are the first, after the weights' turn, and all of the chunk's gradients are there.
    """
    nothing, own = np.zeros(len(scene.columns)), scene.own
    split, there = split_backward(scene.columns), scene.scatters & scene.job.framework.followed
    group = np.where((own.ends > 0) | ~split, own.ends, own.block)
    made = np.where(split, gradient_bytes(scene.job) * (own.total - own.padding), compute_bytes(scene.job) * own.ends)
    whole = made + gradient_bytes(scene.job) * group + moments_zero.arriving(scene, group)
    gone = scene.kept + np.where(split, scene.dropped + scene.settled, 0.0)
    moving = whole + moments_zero.scattered_last(scene) - moments_zero.left_over(scene)
    moving = moving - np.where(scene.lets_go, compute_bytes(scene.job) * own.total, 0.0)
    return Moment(np.where(there, -gone, nothing), np.where(there, moving, nothing), gradients)


def _done(scene: Scene) -> list[Array]:
    """Layers whose backward is over when a rank may be fullest: none, one, all but the last two, all but the last.

    Where their weights go with them, no more than one.
    """
    layers = scene.share.layers
    most = np.minimum(np.where(scene.lets_go, 1, layers), layers - 1)
    return [np.maximum(0, np.minimum(done, most)) for done in (0, 1, layers - 2, layers - 1)]


def _on_top(scene: Scene, one: Moment, layer: LayerActivations, gradients: Array, done: Array, split: Array) -> Moment:
    """With what every moment of a layer's backward has, after `done` others: fewer activations, more gradients, gathered
    weights, and what was scattered or sent and is not yet let go. A split backward frees none, and of what is counted for its
    weights' turn only the layers that are done have it.
    """
    job, columns, held = scene.job, scene.columns, scene.held
    layers = np.maximum(1, scene.share.layers)
    ahead = scene.dropped + scene.settled - done / layers * (scene.dropped + scene.settled_layers)
    back = layer.whole - layer.total - np.where(split, ahead, done / layers * scene.kept)
    scattered = np.where(scene.scatters, gradient_bytes(job) * held.block, 0.0)
    others = moments_zero.scattered_last(scene) - moments_zero.left_over(scene)
    fetched = np.minimum(2, layers - done) * held.block + (held.layer - held.block)
    narrow = scene.narrow_after(done)
    if one.scatters:  # whose weights go before its gradients do
        fetched, narrow = fetched - held.block, scene.narrow_behind(done)
    # FSDP's root, embedding and head, has its gradients whole until all layers are through.
    head = np.where(scene.sharded, scene.share.head * params.head(job.model).on_rank(columns.tp, job.model.kv_heads), 0.0)
    moving = (
        moments_zero.gathered_elements(scene, held.ends + fetched, narrow) + _sent_gradient(scene) + compute_bytes(job) * head
    )
    # What was scattered last goes when the next scatter begins.
    moving = moving + others + np.where(one.scatters, 0.0, np.where(done > 0, scattered, moments_zero.left_over(scene)))
    moving = moving - np.where(scene.lets_go, compute_bytes(job) * held.block * (done > 0), 0.0)
    made = (gradients - gradients * held.ends / held.total) * done / layers
    return Moment(
        back + one.activations,
        one.buffers + moving,
        np.where(scene.one_backward, made, gradients),
    )


def _followed(scene: Scene, layer: LayerActivations, moe: bool, split: Array) -> list[Moment]:
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
    last = np.where(scene.sharded, matrix, 0.0)  # FSDP holds gradients until the layer is through
    beside = nothing if moe else gathered
    stages = [
        # the last product: gradients of its output and of its input, and its weight's
        (wide + beside, one_by_one * matrix),
        # the gate
        ((turns + 1 + model.gated) * wide - used - out + owed, last),
        # the first products
        (turns * rows + beside + (turns - 1 - model.gated) * wide - used - out, last + matrix),
        moments_attention.backward(scene, layer, moe, split, last),
    ]
    if moe:  # rows as they came home: their gradients, and those of the weights by which they were added
        stages.append((2 * out + gathered, nothing))
    if moe and model.gated:
        # the second of them, when the first one's gradients are made; theirs are stacked, too
        stages.append((turns * rows - np.where(split, 0.0, wide) - used - out, last + last + one_by_one * matrix))
    if model.norm == "rmsnorm":
        stages.append((_norm(scene, layer, moe, split), last))
    found = [Moment(scene.residual + act, moving, nothing) for act, moving in stages]
    b, g = compute_bytes(scene.job), gradient_bytes(scene.job)
    whole = scene.held.block * (b + np.where(scene.scatters, g, 0))
    whole = whole + np.where(scene.scatters, moments_zero.arriving(scene, scene.held.block), 0.0)
    end = np.where(scene.sharded & ~split, scene.residual - layer.whole, -np.inf)
    return [*found, Moment(end, whole, nothing, scatters=True)]


def _norm(scene: Scene, layer: LayerActivations, moe: bool, split: Array) -> Array:
    """The norm before the MLP: its gradient, and five tensors in fp32 (four where nothing is cast). The MLP's own are gone, but
    as much as they were waits for its weights' turn where backward is split: all but the router's copy.
    """
    b = compute_bytes(scene.job)
    wide = (5 if b < activations.FP32 else 4) * activations.FP32 / b * scene.residual
    gone = sum(
        held for name, held in layer.modules.items() if name.startswith(("mlp input", "mlp products", "mlp act", "expert"))
    )
    return np.asarray(scene.residual + wide - np.where(split, scene.router_copy * moe - scene.gathered_slices, gone))


def _matrix(scene: Scene, moe: bool) -> Array:
    """Bytes of the gradient of one of the MLP's matrices as autograd makes it; of all experts' on the rank."""
    model, b = scene.job.model, compute_bytes(scene.job)
    if not moe or model.moe is None:
        return np.asarray(b * model.hidden * model.ffn / scene.columns.tp)
    each = model.hidden * model.moe.expert_ffn / scene.columns.expert_cut
    return np.asarray(b * each * model.moe.experts / scene.columns.ep)


def fresh(scene: Scene, there: Array) -> Array:
    """The gradient of the embedding or of the head as autograd makes it, where backward is split."""
    each = compute_bytes(scene.job) * params.head(scene.job.model).on_rank(scene.columns.tp, scene.job.model.kv_heads)
    return np.where(split_backward(scene.columns) & scene.job.framework.followed, there * each, 0.0)


def looked_up(scene: Scene) -> Array:
    """Gradients of all tokens' embeddings on a rank that has a part of the vocabulary."""
    there = split_backward(scene.columns) & (scene.columns.tp > 1) & scene.job.framework.followed
    return np.where(there, scene.share.embedding * scene.uncut, 0.0)


def _sent_gradient(scene: Scene) -> Array:
    """A pipeline's gradient on its way to the stage before, until that has used it."""
    sends = (scene.columns.pp > 1) & ((scene.share.embedding == 0) | (scene.columns.virtual_stages > 1))
    return np.where(sends, scene.residual, 0.0)
