"""What a rank holds at the moments that can be its fullest, on top of the activations that wait.

A planner that must not promise too much counts all that is on its way at once (buffers.py). An engine that was followed
operator by operator has it where it lives: gradients of a gate when the layer's other transfers are not there yet, gathered
sequences beside products, whole gradients at a layer's end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ultrascale.cost import activations, float8, params
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
    moving = _gathered(scene) + _scattered_last(scene) + _sent_gradient(scene)
    return Moment(peak, np.asarray(scene.share.head * moving), np.where(scene.one_backward, 0.0, gradients))


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
    moving = _gathered(scene) + _scattered_last(scene)
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
    for count, moe, layer in scene.layers:
        back = -scene.settled if split else layer.whole - layer.total
        apart = split_backward(scene.columns) & split
        stages = _followed(scene, layer, moe, apart)
        own = [_on_top(scene, one, back, gradients, done) for one in stages for done in _done(scene)]
        found = fullest(found, *(one.where(count > 0, none) for one in own))
    return found


def _done(scene: Scene) -> list[Array]:
    """Layers whose backward is over when a rank may be fullest: none, one, all but the last two, all but the last.

    Where their weights go with them, no more than one.
    """
    layers = scene.share.layers
    most = np.minimum(np.where(scene.lets_go, 1, layers), layers - 1)
    return [np.maximum(0, np.minimum(done, most)) for done in (0, 1, layers - 2, layers - 1)]


def _on_top(scene: Scene, one: Moment, back: Array, gradients: Array, done: Array) -> Moment:
    """With what every moment of a layer's backward has, after `done` others: fewer activations, more gradients, gathered
    weights, and what was scattered or sent and is not yet let go.
    """
    job, columns, held = scene.job, scene.columns, scene.held
    layers = np.maximum(1, scene.share.layers)
    scatters = (columns.zero >= 2) | scene.one_backward
    scattered = np.where(scatters & scene.sharded, gradient_bytes(job) * held.block, 0.0)
    others = _scattered_last(scene) - _scattered_by_own(scene)
    fetched = np.minimum(2, layers - done) * held.block + (held.layer - held.block)
    # FSDP's root, embedding and head, has its gradients whole until all layers are through.
    head = np.where(scene.sharded, scene.share.head * params.head(job.model).on_rank(columns.tp, job.model.kv_heads), 0.0)
    moving = (
        _gathered_elements(scene, held.ends + fetched, scene.narrow_after(done))
        + _sent_gradient(scene)
        + compute_bytes(job) * head
    )
    # What was scattered last goes when the next scatter begins.
    moving = moving + others + np.where(one.scatters, 0.0, np.where(done > 0, scattered, _scattered_by_own(scene)))
    moving = moving - np.where(scene.lets_go, compute_bytes(job) * held.block * (done > 0), 0.0)
    made = (gradients - gradients * held.ends / held.total) * done / layers
    return Moment(
        back + one.activations - done / layers * scene.kept,
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
    ]
    if moe and model.gated:
        # the second of them, when the first one's gradients are made; theirs are stacked, too
        stages.append((turns * rows - np.where(split, 0.0, wide) - used - out, last + last + one_by_one * matrix))
    if model.norm == "rmsnorm":
        stages.append((_norm(scene, layer, moe, split), last))
    found = [Moment(scene.residual + act, moving, nothing) for act, moving in stages]
    b, g, columns = compute_bytes(scene.job), gradient_bytes(scene.job), scene.columns
    scatters = (columns.zero >= 2) | scene.one_backward
    whole = scene.held.block * (b + np.where(scatters, g, 0))
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
    return np.asarray(scene.residual + wide - np.where(split, scene.router_copy * moe, gone))


def _matrix(scene: Scene, moe: bool) -> Array:
    """Bytes of the gradient of one of the MLP's matrices as autograd makes it; of all experts' on the rank."""
    model, b = scene.job.model, compute_bytes(scene.job)
    if not moe or model.moe is None:
        return np.asarray(b * model.hidden * model.ffn / scene.columns.tp)
    each = model.hidden * model.moe.expert_ffn / scene.columns.expert_cut
    return np.asarray(b * each * model.moe.experts / scene.columns.ep)


def _gathered(scene: Scene) -> Array:
    """ZeRO-3's whole copies: embedding and head through the micro-batch, and the chunk's last layer."""
    share = scene.share
    last = np.where((share.head == 1) | ((share.embedding == 1) & (share.layers == 1)), 0.0, scene.narrow_block)
    return _gathered_elements(scene, scene.held.ends + scene.held.block, last)


def _gathered_elements(scene: Scene, elements: Array, narrow: Array) -> Array:
    """`narrow` of them in fp8."""
    columns = scene.columns
    gathers = (columns.zero == 3) & (columns.keep_gathered == 0) & (columns.shards > 1)
    return np.where(gathers, compute_bytes(scene.job) * elements - float8.less(scene.job, narrow), 0.0)


def _scattered_last(scene: Scene) -> Array:
    """FSDP keeps what each of a rank's chunks scattered last until that scatters again: through the next forward."""
    columns, held, holder = scene.columns, scene.held, scene.holder
    without_ends = np.maximum(0, columns.virtual_stages - holder.embedding - holder.head)
    whole = held.ends + without_ends * held.block
    return _left_over(scene, np.where(split_backward(columns), columns.virtual_stages * _last_group(scene), whole))


def _scattered_by_own(scene: Scene) -> Array:
    """Embedding and head, where a chunk has them, or its first layer; where scatters follow the weights' turn, its last."""
    own = params.on_rank(scene.job.model, scene.columns, scene.share)
    whole = np.where(own.ends > 0, own.ends, own.block)
    return _left_over(scene, np.where(split_backward(scene.columns), _last_group(scene), whole))


def _last_group(scene: Scene) -> Array:
    """Of FSDP's groups of parameters the last: of a layer, or of its experts, which are apart where ep cuts them."""
    experts = params.per_layer(scene.job.model, scene.columns).experts
    return np.where((scene.columns.ep > 1) & (scene.holder.moe_layers > 0), experts, scene.held.block)


def _left_over(scene: Scene, elements: Array) -> Array:
    columns = scene.columns
    keeps = (columns.zero >= 2) & (columns.shards > 1) & ((columns.gas > 1) | (columns.pp > 1)) & (not scene.first)
    return np.where(keeps, gradient_bytes(scene.job) * elements, 0.0)


def _sent_gradient(scene: Scene) -> Array:
    """A pipeline's gradient on its way to the stage before, until that has used it."""
    sends = (scene.columns.pp > 1) & ((scene.share.embedding == 0) | (scene.columns.virtual_stages > 1))
    return np.where(sends, scene.residual, 0.0)
