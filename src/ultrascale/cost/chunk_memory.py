"""One rank, or chunk of it, as the moments of its step see it: widths of its tensors, and what waits on it from forward on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ultrascale.cost import activations, buffers, float8, padding, params
from ultrascale.cost.activations import LayerActivations, compute_bytes, gradient_bytes, split_backward
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.stages import RankShare
from ultrascale.specs.job import Job


@dataclass(frozen=True)
class ChunkMemory:
    """One rank (or chunk of it) of every row: what it computes, and what its rank holds."""

    job: Job
    columns: LayoutColumns
    share: RankShare
    holder: RankShare
    """what its rank holds, which may have other chunks besides"""
    first: bool = False
    """before the end of a step's first backward: FSDP has neither made room for gradients nor scattered any"""

    @cached_property
    def shards(self) -> Array:
        """Parts into which FSDP cuts the rows of each tensor."""
        return padding.shards_of(self.job, self.columns)

    @cached_property
    def held(self) -> params.RankParameters:
        return params.on_rank(self.job.model, self.columns, self.holder, self.shards)

    @cached_property
    def own(self) -> params.RankParameters:
        """Of what it computes itself."""
        if self.holder is self.share:
            return self.held
        return params.on_rank(self.job.model, self.columns, self.share, self.shards)

    @cached_property
    def last_group(self) -> Array:
        """Of FSDP's groups of parameters the last: of a layer, or of its experts, which are apart where ep cuts them."""
        if self.job.model.moe is None:
            return self.held.block
        experts = params.per_layer(self.job.model, self.columns, self.shards).experts
        return np.where((self.columns.ep > 1) & (self.holder.moe_layers > 0), experts, self.held.block)

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
        return np.asarray(buffers.at_once(self.job, self.columns, self.held, self.narrow, self.narrow_fetched) + self.beside)

    @property
    def narrow(self) -> Array:
        """Elements on the rank that ZeRO-3 gathers in fp8."""
        return float8.on_rank(self.job, self.columns, self.holder).elements

    @cached_property
    def narrow_block(self) -> Array:
        """Of a layer, if it is neither the model's first nor its last."""
        return float8.block(self.job, self.columns, self.share)

    @property
    def narrow_fetched(self) -> Array:
        """Of the layer at work and the one fetched behind it, where least are."""
        return np.minimum(self.narrow_after(0 * self.share.layers), self.narrow_after(np.maximum(0, self.share.layers - 2)))

    def narrow_after(self, done: Array) -> Array:
        """Of those two when `done` layers are through their backward."""
        layers, head, embedding = self.share.layers, self.share.head, self.share.embedding
        there = np.minimum(2, layers - done)
        wide = head * (done == 0) + embedding * (layers - done <= 2)
        return np.asarray(np.maximum(0, there - wide) * self.narrow_block)

    def narrow_behind(self, done: Array) -> Array:
        """Of the one fetched behind alone."""
        left = self.share.layers - done
        return np.asarray((left >= 2) * (1 - self.share.embedding * (left == 2)) * self.narrow_block)

    @property
    def beside(self) -> Array:
        """Where the experts' exchange hides behind another micro-batch: one layer of that one's forward."""
        overlaps = self.job.framework.expert_overlap == "microbatches"
        whole = [np.where(count > 0, layer.whole, 0.0) for count, moe, layer in self.layers if moe and overlaps]
        return np.asarray(sum(whole, np.zeros(len(self.columns))))

    @cached_property
    def uncut(self) -> Array:
        """One activation as wide as the model, of all tokens."""
        return np.asarray(compute_bytes(self.job) * self.columns.tokens(self.job.seq) * self.job.model.hidden)

    @property
    def router_copy(self) -> Array:
        """The router's input, in fp32."""
        return np.asarray(activations.FP32 / compute_bytes(self.job) * self.uncut)

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
        return np.asarray(self.sharded & (self.columns.gas == 1))

    @property
    def holds_gradients(self) -> Array:
        """FSDP has a unit's fresh gradients until the unit is through, unless each is added at once to a whole one like it."""
        added = ~self.scatters & (not self.first) & (compute_bytes(self.job) == gradient_bytes(self.job))
        return np.asarray(self.sharded & ~added)

    @property
    def scatters(self) -> Array:
        """Each backward scatters its gradients."""
        return np.asarray(self.sharded & ((self.columns.zero >= 2) | self.one_backward))

    @property
    def lets_go(self) -> Array:
        """Weights that ZeRO-1 and 2 keep gathered go as the step's last backward comes to them, those of ZeRO-3 as any does."""
        return np.asarray((self.one_backward & (self.columns.zero < 3)) | (self.sharded & (self.columns.keep_gathered == 1)))

    @cached_property
    def kept(self) -> Array:
        """Activations of one micro-batch in flight.

        A stage that was followed keeps what it sent, whose graph its backward starts from, and one table of rotary angles.
        """
        kept = self.kept_layers
        if not self.job.framework.exact_memory_trace:
            return kept
        model, b = self.job.model, compute_bytes(self.job)
        angles = 2 * b * self.job.seq / self.columns.cp * model.head_dim * (model.positions == "rotary")
        return np.asarray(kept + angles + np.where(self.sends_output, self.residual, 0.0))

    @cached_property
    def kept_layers(self) -> Array:
        """Of these, what goes as its layers' backwards come by."""
        return np.asarray(sum((count * layer.total for count, _, layer in self.layers), np.zeros(len(self.columns))))

    @property
    def sends_output(self) -> Array:
        """Neither the last chunk nor, in a V, the one at the turn, whose output is the next one's input."""
        columns = self.columns
        turn = columns.schedule_has("v_shaped") & (self.share.rank == columns.pp - 1)
        return np.asarray((columns.pp > 1) & (self.share.head == 0) & ~turn)

    @cached_property
    def dropped(self) -> Array:
        """What recomputation left out of them; a put-off weight gradient keeps its output's gradient gathered, too."""
        owed = np.zeros(len(self.columns))
        if self.job.framework.exact_memory_trace:
            kept_whole = split_backward(self.columns) & (self.columns.sequence_cut > 1)
            owed = np.where(kept_whole, 2 * (self.uncut - self.residual), 0.0)
        return np.asarray(sum((count * (layer.whole - layer.total + owed) for count, _, layer in self.layers), 0.0 * owed))

    @cached_property
    def settled(self) -> Array:
        """How much less (below zero) waits for the weights' turn once a chunk's input gradients are all made.

        Gradients of outputs stand in the place of what they were made from: in a dense layer one for one. Routed rows have
        theirs; the router's fp32 copy goes, and so does the layer's input, but for a shared expert, whose output's gradient
        takes its place. What a chunk received stays, what it sent goes.
        """
        if not self.job.framework.exact_memory_trace:
            return np.zeros(len(self.columns))
        ends = np.where(self.share.embedding == 0, self.residual, 0.0) - np.where(self.sends_output, self.residual, 0.0)
        return np.where(split_backward(self.columns), ends, 0.0) + self.settled_layers

    @cached_property
    def settled_layers(self) -> Array:
        """Of these, what its layers have less; of attention, what only norms and the kernel itself asked for."""
        moe, gone = self.job.model.moe, np.zeros(len(self.columns))
        if not self.job.framework.exact_memory_trace:
            return gone
        for count, _, layer in self.layers:
            own = (layer.modules.get(name, 0.0) for name in ("q, k before norm", "switched output", "copies of k, v"))
            gone = gone + count * sum(own, gone * 0)
        if moe is not None:
            gone = gone + self.share.moe_layers * (self.router_copy + (not moe.shared_experts) * self.residual)
        return np.where(split_backward(self.columns), -gone, 0.0)
