"""What a rank holds at the moments that can be its fullest, on top of the activations that wait.

A planner that must not promise too much counts all that is on its way at once (buffers.py). An engine that was followed
operator by operator has it where it lives: gradients of a gate when the layer's other transfers are not there yet, gathered
sequences beside products, whole gradients at a layer's end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultrascale.cost import activations, buffers, params
from ultrascale.cost.activations import LayerActivations, compute_bytes, gradient_bytes, split_backward
from ultrascale.cost.columns import Array, Columns
from ultrascale.cost.stages import V_SHAPED, RankShare
from ultrascale.specs.job import Job


@dataclass(frozen=True)
class Moment:
    activations: Array
    """beyond those that wait"""
    buffers: Array
    gradients: Array
    """of weights, accumulated or sharded: those that exist then"""

    @property
    def moving(self) -> Array:
        return np.asarray(self.activations + self.buffers)

    @property
    def total(self) -> Array:
        return np.asarray(self.moving + self.gradients)


def fullest(one: Moment, *others: Moment) -> Moment:
    for other in others:
        more = other.total > one.total
        one = Moment(
            np.where(more, other.activations, one.activations),
            np.where(more, other.buffers, one.buffers),
            np.where(more, other.gradients, one.gradients),
        )
    return one


@dataclass(frozen=True)
class Scene:
    """One rank (or chunk of it) of every row: what it computes, and what its rank holds."""

    job: Job
    columns: Columns
    share: RankShare
    held: params.RankParameters

    @cached_property
    def layers(self) -> list[tuple[Array, bool, LayerActivations]]:
        """How many layers of each kind, are they of experts, and what one keeps."""
        kinds = ((self.share.dense_layers, False), (self.share.moe_layers, True))
        return [(count, moe, activations.layer(self.job, self.columns, moe)) for count, moe in kinds if np.any(count)]

    @cached_property
    def head(self) -> activations.HeadActivations:
        return activations.head(self.job, self.columns)

    @cached_property
    def at_once(self) -> Array:
        return np.asarray(buffers.at_once(self.job, self.columns, self.held) + self.beside)

    @property
    def beside(self) -> Array:
        """Where the experts' exchange hides behind another micro-batch: one layer of that one's forward."""
        overlaps = self.job.framework.expert_overlap > 0
        whole = [np.where(count > 0, layer.whole, 0.0) for count, moe, layer in self.layers if moe and overlaps]
        return np.asarray(sum(whole, np.zeros(len(self.columns))))

    @cached_property
    def uncut(self) -> Array:
        """One activation as wide as the model, of all tokens."""
        return np.asarray(compute_bytes(self.job) * self.columns.tokens(self.job.seq) * self.job.model.hidden)

    @property
    def residual(self) -> Array:
        return np.asarray(self.uncut / self.columns.sequence_cut)

    @cached_property
    def gathered_slices(self) -> Array:
        """A whole sequence gathered from slices, where sequence parallelism cuts it."""
        return np.where(self.columns.sequence_cut > 1, self.uncut, 0.0)

    @property
    def sharded(self) -> Array:
        return np.asarray((self.columns.zero >= 1) & (self.columns.shards > 1))

    @property
    def one_backward(self) -> Array:
        """One micro-batch a step under ZeRO: gradients exist only as far as backward has come."""
        return np.asarray(self.sharded & (self.columns.gas == 1) & (self.columns.pp == 1))

    @cached_property
    def kept(self) -> Array:
        """Activations of one micro-batch in flight.

        A stage that was followed keeps what it sent, whose graph its backward starts from, and one table of rotary angles.
        """
        kept = np.asarray(sum((count * layer.total for count, _, layer in self.layers), np.zeros(len(self.columns))))
        if not self.job.framework.followed:
            return kept
        model, b = self.job.model, compute_bytes(self.job)
        angles = 2 * b * self.job.seq / self.columns.cp * model.head_dim * (model.positions == "rotary")
        return np.asarray(kept + angles + np.where(self.sends_output, self.residual, 0.0))

    @property
    def sends_output(self) -> Array:
        """Neither the last chunk nor, in a V, the one at the turn, whose output is the next one's input."""
        columns = self.columns
        v_shaped = np.logical_or.reduce([columns.is_("schedule", name) for name in V_SHAPED])
        turn = v_shaped & (self.share.rank == columns.pp - 1)
        return np.asarray((columns.pp > 1) & (self.share.head == 0) & ~turn)

    @cached_property
    def dropped(self) -> Array:
        """What recomputation left out of them; a put-off weight gradient keeps its output's gradient gathered, too."""
        owed = np.zeros(len(self.columns))
        if self.job.framework.followed:
            kept_whole = split_backward(self.columns) & (self.columns.sequence_cut > 1)
            owed = np.where(kept_whole, 2 * (self.uncut - self.residual), 0.0)
        return np.asarray(sum((count * (layer.whole - layer.total + owed) for count, _, layer in self.layers), 0.0 * owed))


def at_loss(scene: Scene, gradients: Array) -> Moment:
    peak = np.asarray(scene.share.head * scene.head.peak)
    if not scene.job.framework.followed:
        return Moment(peak, scene.at_once, gradients)
    # One layer is there: fetched for backward, or where the loss is fullest in forward (a cut vocabulary) not yet let go.
    moving = _gathered(scene, 1) + _scattered_last(scene) + _sent_gradient(scene)
    return Moment(peak, np.asarray(scene.share.head * moving), np.where(scene.one_backward, 0.0, gradients))


def between(scene: Scene, gradients: Array) -> Moment:
    """At the end of a forward, or while weight gradients that were put off are computed."""
    nothing = np.zeros(len(scene.columns))
    if not scene.job.framework.followed:
        return Moment(nothing, scene.at_once, gradients)
    moving = _gathered(scene, 1) + _scattered_last(scene)
    return Moment(nothing, moving, np.where(scene.one_backward, 0.0, gradients))


def in_layer(scene: Scene, gradients: Array, split: bool) -> Moment:
    """The fullest moment of the fullest layer's backward; `split`: what it dropped is counted with what waits for it."""
    nothing = np.zeros(len(scene.columns))
    if not scene.job.framework.followed:
        most = nothing
        for count, _, layer in scene.layers:
            most = np.maximum(most, np.where(count > 0, layer.gradients if split else layer.working, 0.0))
        return Moment(most, scene.at_once, gradients)
    found = Moment(nothing, nothing, nothing)
    for count, moe, layer in scene.layers:
        back = nothing if split else layer.whole - layer.total
        own = [_on_top(scene, one, back, gradients, done) for one in _followed(scene, layer, moe) for done in _done(scene)]
        there = count > 0
        found = fullest(found, *(Moment(*(np.where(there, part, 0.0) for part in _parts(one))) for one in own))
    return found


def _done(scene: Scene) -> list[Array]:
    """Layers whose backward is over when a rank may be fullest: none, one, all but the last two, all but the last."""
    layers = scene.share.layers
    return [np.maximum(0, np.minimum(done, layers - 1)) for done in (0, 1, layers - 2, layers - 1)]


def _parts(one: Moment) -> tuple[Array, Array, Array]:
    return one.activations, one.buffers, one.gradients


def _on_top(scene: Scene, one: Moment, back: Array, gradients: Array, done: Array) -> Moment:
    """With what every moment of a layer's backward has, after `done` others: fewer activations, more gradients, gathered
    weights, and what was scattered or sent and is not yet let go.
    """
    job, columns, held = scene.job, scene.columns, scene.held
    layers = np.maximum(1, scene.share.layers)
    scatters = (columns.zero >= 2) | scene.one_backward
    scattered = np.where(scatters & scene.sharded, gradient_bytes(job) * held.block, 0.0)
    fetched = np.minimum(2, layers - done) * held.block + (held.layer - held.block)
    # FSDP's root, embedding and head, has its gradients whole until all layers are through.
    head = np.where(scene.sharded, scene.share.head * params.head(job.model).on_rank(columns.tp, job.model.kv_heads), 0.0)
    moving = _gathered_elements(scene, held.ends + fetched) + _sent_gradient(scene) + compute_bytes(job) * head
    moving = moving + np.where(done > 0, scattered, _scattered_last(scene))
    made = (gradients - gradients * held.ends / held.total) * done / layers
    return Moment(
        back + one.activations - done / layers * scene.kept,
        one.buffers + moving,
        np.where(scene.one_backward, made, gradients),
    )


def _followed(scene: Scene, layer: LayerActivations, moe: bool) -> list[Moment]:
    """What comes and goes in one layer's backward, beyond all that it keeps.

    Backward frees what it has used, so that a gate's output makes room for its gradient; a split one keeps the inputs of
    products. The gate's activation is not kept but written once more, beside the three gradients. Products of one input add
    their gradients to it in turns: one more of those for a moment.
    """
    model, split = scene.job.model, split_backward(scene.columns)
    wide, turns = (layer.modules["expert activation" if moe else "mlp activation"], 2 if model.gated else 1)
    used = np.where(split, 0.0, wide)  # the activation, once the last product has its gradients
    gathered = scene.gathered_slices
    owed = np.where(split, gathered, 0.0)
    out = layer.modules.get("expert output", 0.0 * wide)
    rows = layer.modules["expert input"] if moe else scene.uncut
    matrix = _matrix(scene, moe)
    one_by_one = 2 if moe else 1  # experts' gradients are stacked from those of each
    nothing = 0.0 * wide
    last = np.where(scene.sharded, matrix, 0.0)  # FSDP holds gradients until the layer is through
    beside = nothing if moe else gathered
    stages = [
        # the last product: gradients of its output and of its input, and its weight's
        (wide + beside if not moe else wide, np.where(split, 0.0, one_by_one * matrix)),
        # the gate
        ((turns + 1 + model.gated) * wide - used - out + owed, last),
        # the first products
        (turns * rows + (0.0 if moe else 1.0) * gathered + (turns - 1 - model.gated) * wide - used - out, last + matrix),
    ]
    if model.norm == "rmsnorm":
        stages.append((_norm(scene, layer, split), last))
    found = [Moment(scene.residual + act, moving, nothing) for act, moving in stages]
    b, g, columns = compute_bytes(scene.job), gradient_bytes(scene.job), scene.columns
    scatters = (columns.zero >= 2) | scene.one_backward
    whole = scene.held.block * (b + np.where(scatters, g, 0))
    end = np.where(scene.sharded & ~split, scene.residual - layer.whole, -np.inf)
    return [*found, Moment(end, whole, nothing)]


def _norm(scene: Scene, layer: LayerActivations, split: Array) -> Array:
    """The norm before the MLP: its gradient, and five tensors in fp32 (four where nothing is cast). The MLP's own are gone, but
    as much as they were waits for its weights' turn where backward is split.
    """
    b = compute_bytes(scene.job)
    wide = (5 if b < activations.FP32 else 4) * activations.FP32 / b * scene.residual
    gone = sum(
        held for name, held in layer.modules.items() if name.startswith(("mlp input", "mlp products", "mlp act", "expert"))
    )
    return np.asarray(scene.residual + wide - np.where(split, 0.0, gone))


def _matrix(scene: Scene, moe: bool) -> Array:
    """Bytes of the gradient of one of the MLP's matrices as autograd makes it; of all experts' on the rank."""
    model, b = scene.job.model, compute_bytes(scene.job)
    if not moe or model.moe is None:
        return np.asarray(b * model.hidden * model.ffn / scene.columns.tp)
    each = model.hidden * model.moe.expert_ffn / scene.columns.expert_cut
    return np.asarray(b * each * model.moe.experts / scene.columns.ep)


def _gathered(scene: Scene, layers: int) -> Array:
    """ZeRO-3's whole copies: embedding and head through the micro-batch, and so many layers."""
    return _gathered_elements(scene, scene.held.ends + layers * scene.held.block)


def _gathered_elements(scene: Scene, elements: Array) -> Array:
    columns = scene.columns
    gathers = (columns.zero == 3) & (columns.keep_gathered == 0) & (columns.shards > 1)
    return np.where(gathers, compute_bytes(scene.job) * elements, 0.0)


def _scattered_last(scene: Scene) -> Array:
    """FSDP keeps what it scattered last until it scatters again: embedding and head through the next forward."""
    columns, held = scene.columns, scene.held
    keeps = (columns.zero >= 2) & (columns.shards > 1) & ((columns.gas > 1) | (columns.pp > 1))
    return np.where(keeps, gradient_bytes(scene.job) * np.where(held.ends > 0, held.ends, held.block), 0.0)


def _sent_gradient(scene: Scene) -> Array:
    """A pipeline's gradient on its way to the stage before, until that has used it."""
    sends = (scene.columns.pp > 1) & ((scene.share.embedding == 0) | (scene.columns.virtual_stages > 1))
    return np.where(sends, scene.residual, 0.0)
