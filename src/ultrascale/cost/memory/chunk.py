"""Memory of one chunk of a pipeline rank: tensors with lifetimes and a walker over them, and the sizes that tensors have there.

Sizes are those of activations, of parameters and gradients as FSDP2 holds them, and of messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import Literal

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns, RankShare, kinds_alternate, kinds_before, where
from ultrascale.cost.memory import activations, states
from ultrascale.cost.memory.activations import LayerActivations
from ultrascale.cost.memory.states import FP32, compute_bytes, gradient_bytes, sharded_gradient_bytes
from ultrascale.specs import weights
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.job import OPTIMIZERS, Job

Owner = Literal["activations", "buffers", "gradients", "parameters"]
OWNERS: tuple[Owner, ...] = ("activations", "buffers", "gradients", "parameters")


@dataclass(frozen=True)
class TensorLifetime:
    """One tensor of every row of a table of layouts, and the events between which it is live."""

    name: str
    owner: Owner
    bytes: Array
    """negative: part of what is counted elsewhere is not live then"""
    allocated: int
    """the first event at which it is live"""
    freed: int
    """the first event at which it no longer is"""
    freed_if_split: int | None = None
    """the same in rows whose backward is split, where that differs: what weight gradients need lives on"""


def activation(name: str, bytes_: Array, allocated: int, freed: int, freed_if_split: int | None = None) -> TensorLifetime:
    return TensorLifetime(name, "activations", bytes_, allocated, freed, freed_if_split)


def buffer(name: str, bytes_: Array, allocated: int, freed: int) -> TensorLifetime:
    return TensorLifetime(name, "buffers", bytes_, allocated, freed)


@dataclass(frozen=True)
class MemoryPoint:
    """Live bytes of every row at one event, by owner, on top of micro-batches in flight and persistent states."""

    activations: Array
    buffers: Array
    gradients: Array
    """of weights, accumulated or sharded"""
    parameters: Array
    """negative where unsharded parameters that count as persistent have been freed"""

    @classmethod
    def nothing(cls, rows: int) -> MemoryPoint:
        return cls(*np.zeros((len(OWNERS), rows)))

    @property
    def temporary(self) -> Array:
        """What the allocator hands out and takes back during a step."""
        return np.asarray(self.activations + self.buffers + self.parameters)

    @property
    def total(self) -> Array:
        return np.asarray(self.temporary + self.gradients)


def fullest(one: MemoryPoint, *others: MemoryPoint) -> MemoryPoint:
    for other in others:
        one = where(other.total > one.total, other, one)
    return one


@dataclass(frozen=True)
class LiveMemory:
    """Live bytes: owners × events × rows."""

    bytes: Array

    def __add__(self, other: LiveMemory) -> LiveMemory:
        return LiveMemory(self.bytes + other.bytes)

    def at(self, event: int) -> MemoryPoint:
        return MemoryPoint(*self.bytes[:, event])

    def peak(self) -> MemoryPoint:
        """The fullest event of every row."""
        fullest_event = self.bytes.sum(axis=0).argmax(axis=0)[None, None]
        return MemoryPoint(*np.take_along_axis(self.bytes, fullest_event, axis=1)[:, 0])

    def peaks_of_segments(self, begins: Sequence[int], happens: Mapping[int, Array | bool]) -> LiveMemory:
        """The fullest event of each part of the events (`begins`, and the end), of those that happen in a row; an event that is
        not named happens in all. A part without an event holds minus infinity.
        """
        totals = self.bytes.sum(axis=0)
        for event, there in happens.items():
            totals[event] = np.where(there, totals[event], -np.inf)
        found = np.empty((len(OWNERS), len(begins) - 1, self.bytes.shape[-1]))
        for number, (begin, end) in enumerate(pairwise(begins)):
            event = begin + totals[begin:end].argmax(axis=0)[None]
            found[:, number] = np.take_along_axis(self.bytes, event[None], axis=1)[:, 0]
            found[0, number] = np.where(np.take_along_axis(totals, event, axis=0)[0] > -np.inf, found[0, number], -np.inf)
        return LiveMemory(found)


def walk(tensors: Iterable[TensorLifetime], events: int, rows: int, split: Array | bool = False) -> LiveMemory:
    """`split`: rows whose backward is split."""
    by_lifetime: dict[tuple[Owner, int, int], Array] = {}
    for tensor in tensors:
        lifetimes = [(tensor.owner, tensor.allocated, tensor.freed, tensor.bytes)]
        if tensor.freed_if_split is not None:
            first, last = sorted((tensor.freed, tensor.freed_if_split))
            sign = 1 if tensor.freed_if_split > tensor.freed else -1
            lifetimes.append((tensor.owner, first, last, sign * np.where(split, tensor.bytes, 0.0)))
        for owner, allocated, freed, size in lifetimes:
            key = owner, int(allocated), int(freed)
            by_lifetime[key] = by_lifetime[key] + size if key in by_lifetime else size
    live = np.zeros((len(OWNERS), events, rows))
    for (owner, allocated, freed), size in by_lifetime.items():
        live[OWNERS.index(owner), allocated:freed] += size
    return LiveMemory(live)


# ----------------------------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class AlikeLayers:
    """Layers of a chunk that are of one kind and recompute alike."""

    kind: LayerKind
    number: int
    """of the kind, among the model's"""
    recomputes: bool
    count: Array
    saved: LayerActivations
    """by one of them"""
    block: Array
    """elements of one of them that FSDP gathers together"""
    elements: Array
    """of one of them, experts included"""
    before: Array
    """of several chunks together, layers whose backward is over before theirs"""
    together: Array
    """of several chunks, so many layers in whose midst these are"""

    @property
    def moe(self) -> bool:
        return self.kind.has_experts


@dataclass(frozen=True)
class ChunkMemory:
    """One rank, or one chunk of it, of every row of a table of layouts."""

    job: Job
    columns: LayoutColumns
    share: RankShare
    """what the chunk computes"""
    rank_share: RankShare
    """what its rank holds, which may have other chunks"""
    first_backward: bool = False
    """until the end of a step's first backward: FSDP has neither allocated gradients nor reduce-scattered any"""
    last_backward: bool = True
    """in a step's last backward, or if that is not known: engines that add up whole gradients reduce them there alone"""

    @cached_property
    def shards(self) -> Array:
        return states.fsdp_shards(self.job, self.columns)

    @cached_property
    def rank_params(self) -> states.RankParameters:
        """Parameters of the rank."""
        matrices = OPTIMIZERS[self.job.optimizer].matrices is not None
        layers = self.layer_parameters
        return states.on_rank(self.job.model, self.columns, self.rank_share, self.shards, matrices, layers)

    @cached_property
    def own(self) -> states.RankParameters:
        """Parameters of the chunk."""
        if self.rank_share is self.share:
            return self.rank_params
        return states.on_rank(self.job.model, self.columns, self.share, self.shards, layers=self.layer_parameters)

    @cached_property
    def layer_parameters(self) -> dict[LayerKind, states.LayerParameters]:
        """One layer of each kind."""
        return {kind: states.layer_parameters(self.job.model, self.columns, kind, self.shards) for kind in self.share.kinds}

    @cached_property
    def layers(self) -> list[AlikeLayers]:
        """Those with experts first, and of a chunk those that recompute last, as backward meets them in most models."""
        found = list[AlikeLayers]()
        before = np.zeros(len(self.columns), dtype=np.int64)
        for moe, recomputes in product((True, False), (False, True)):
            counts = [
                (number, kind, count - kept if recomputes else kept)
                for number, (kind, count, kept) in enumerate(self.share.each())
                if kind.has_experts == moe
            ]
            together = counts[0][2] if len(counts) == 1 else np.asarray(sum((count for *_, count in counts), 0 * before))
            for number, kind, count in counts:
                if np.any(count):
                    saved = activations.layer(self.job, self.columns, kind, recomputes)
                    layer, place = self.layer_parameters[kind], (before, together)
                    found.append(AlikeLayers(kind, number, recomputes, count, saved, layer.block, layer.total, *place))
            before = before + together
        return found

    # Which layers backward has met: the last `done` of the chunk.

    @cached_property
    def _mixed(self) -> Array | None:
        """Rows whose layers of several kinds alternate as the model's do; None: there are none such."""
        rows = self.share.begin >= 0
        return rows if kinds_alternate(self.job.model) and rows.any() else None

    def _limits(self, alike: AlikeLayers) -> tuple[Array, Array, Array]:
        """Of a mixed chunk: between which layers of the model these are, and where the chunk ends."""
        begin = np.maximum(0, self.share.begin)
        end = begin + self.share.layers
        kept_from = end - self.share.kept_layers
        return (begin, kept_from, end) if alike.recomputes else (kept_from, end, end)

    def done_of(self, alike: AlikeLayers, done: Array) -> Array:
        """How many of these layers are among the last `done` of the chunk; of several runs of layers, in the mean."""
        found: Array = np.clip(done - alike.before, 0, alike.together)
        if alike.together is not alike.count:
            found = found * (alike.count / np.maximum(1, alike.together))
        if self._mixed is None:
            return found
        first, last, end = self._limits(alike)
        before = kinds_before(self.job.model)[:, alike.number]
        return np.where(self._mixed, before[last] - before[np.clip(end - done, first, last)], found)

    def is_next(self, alike: AlikeLayers, done: Array) -> Array:
        """Whether one of these layers is the next in backward when `done` of the chunk are through."""
        found: Array = (alike.before <= done) & (done < alike.before + alike.together) & (alike.count > 0)
        if self._mixed is None:
            return found
        return np.where(self._mixed, self.done_of(alike, done + 1) > self.done_of(alike, done), found)

    def when_next(self, alike: AlikeLayers, number: Array) -> Array:
        """How many layers of the chunk are done when backward meets the first (0), second, … of these."""
        found: Array = alike.before + number
        if self._mixed is None:
            return found
        _, last, end = self._limits(alike)
        places = np.flatnonzero(np.diff(kinds_before(self.job.model)[:, alike.number]))
        place = places[np.clip(np.searchsorted(places, last) - 1 - number, 0, len(places) - 1)]
        return np.where(self._mixed, end - 1 - place, found)

    def block_of_next(self, done: Array) -> Array:
        """Elements that FSDP gathers for the next layer in backward; 0 if there is none, of several chunks the most."""
        whole = np.where((done >= 0) & (done < self.share.layers), self.rank_params.block, 0.0)
        if len(self.share.kinds) == 1:
            return whole
        found = np.zeros(len(self.columns))
        for alike in self.layers:
            found = np.maximum(found, np.where(self.is_next(alike, done), alike.block, 0.0))
        return np.where(self.share.begin >= 0, found, whole)

    def elements_done(self, done: Array) -> Array:
        """Elements of the last `done` layers."""
        return np.asarray(sum((self.done_of(one, done) * one.elements for one in self.layers), np.zeros(len(self.columns))))

    @cached_property
    def first_block(self) -> Array:
        """Elements that FSDP gathers for the chunk's first layer, the last in backward."""
        return self.block_of_next(self.share.layers - 1)

    def saved_when_done(self, done: Array) -> Array:
        """Saved by the layers that are over when `done` of the chunk are through backward."""
        return np.asarray(sum((self.done_of(one, done) * one.saved.total for one in self.layers), np.zeros(len(self.columns))))

    @cached_property
    def head(self) -> activations.HeadActivations:
        return activations.head(self.job, self.columns)

    # Widths of activations.

    @cached_property
    def full_sequence(self) -> Array:
        """One activation as wide as the model, of all tokens of a micro-batch."""
        return np.asarray(compute_bytes(self.job) * self.columns.tokens(self.job.seq) * self.job.model.hidden)

    @cached_property
    def residual(self) -> Array:
        """The same as the residual stream has it: a slice, where sequence parallelism cuts it."""
        return np.asarray(self.full_sequence / self.columns.sequence_cut)

    @cached_property
    def gathered_sequence(self) -> Array:
        """A whole sequence gathered from slices, where sequence parallelism cuts it."""
        return np.where(self.columns.sequence_cut > 1, self.full_sequence, 0.0)

    @property
    def router_input(self) -> Array:
        """The router's copy of its input, in fp32."""
        return np.asarray(FP32 / compute_bytes(self.job) * self.full_sequence)

    def norm_workspace(self, normed: Array) -> Array:
        """Backward of a norm in fp32: five tensors of what is `normed`, four where nothing is cast, none where it is fused."""
        if self.job.framework.fused_blocks:
            return 0.0 * normed
        b = compute_bytes(self.job)
        return np.asarray((5 if b < FP32 else 4) * FP32 / b * normed)

    # Micro-batches in flight.

    @cached_property
    def saved_layers(self) -> Array:
        """Saved for backward by the chunk's layers for one micro-batch."""
        return self.saved_when_done(self.share.layers)

    @cached_property
    def saved(self) -> Array:
        """Live for one micro-batch in flight. A traced stage also keeps its output, from which its backward starts, and one
        table of rotary angles. At a V's turn that output is the next chunk's input, which the next chunk does not count again:
        the chunk at the turn is in flight before and after it.
        """
        if not self.job.framework.exact_memory_trace:
            # On the host but for the layer that computes and the one whose tensors are on their way.
            each = self.saved_layers / np.maximum(1, self.share.layers)
            here = np.minimum(2, self.share.layers) * each
            return np.where(self.columns.is_("offload", "activations"), here, self.saved_layers)
        model, b = self.job.model, compute_bytes(self.job)
        angles = 2 * b * self.job.seq / self.columns.cp * model.head_dim * (model.positions == "rotary")
        after_turn = self.columns.schedule_has("v_shaped") & (self.share.rank == self.columns.pp)
        ends = (1.0 * self.sends_output - after_turn) * self.residual
        return np.asarray(self.saved_layers + angles + ends)

    @cached_property
    def sends_output(self) -> Array:
        """Every chunk but the last."""
        return np.asarray((self.columns.pp > 1) & (self.share.head == 0))

    def deferred_when_done(self, done: Array) -> Array:
        """Live beyond `saved` in the layers of a micro-batch whose weight gradients are deferred, when `done` of them are
        through backward: what recomputation brought back, and output gradients in the place of what they were computed from.

        Of a dense layer they are as large, but gathered where sequence parallelism cuts them and the block is not fused. Of a
        layer with experts the router's input is freed and, without a shared expert, the layer's input; of attention what norms
        and the kernel need.
        """
        fused, total = states.uses_fused_blocks(self.job, self.columns), np.zeros(len(self.columns))
        if self.job.adapter_rank is not None:  # adapters' gradients are computed at once: nothing is kept for them
            return -self.saved_when_done(done)
        for alike in self.layers:
            moe, layer = alike.moe, alike.saved
            each = layer.recomputed
            if self.job.framework.exact_memory_trace:
                change = np.where(fused, 0.0, alike.kind.sublayers * (self.full_sequence - self.residual))
                for name in ("q, k before norm", "switched output", "copies of k, v", "outputs before norms"):
                    change = change - layer.modules.get(name, 0.0)
                if alike.kind.mixer == "attention":
                    change = change - self.value_padding
                    change = change - self.job.model.attention_gate * layer.modules["attention output"]
                elif alike.kind.mixer != "none":  # no GEMM with weights reads what the recurrence and its norm do
                    change = change - activations.recurrent_inputs(self.job, self.columns, alike.kind)
                if moe:
                    change = change - self.router_input - np.where(self.routed_only(moe), self.residual, 0.0)
                each = each + np.where(self.columns.split_backward, change, 0.0)
            total = total + self.done_of(alike, done) * each
        # Operands of fp8 weight gradients are kept in fp8.
        whole = self.layers[0].saved.whole if self.layers else 0.0
        return np.asarray(total - (1 - 1 / compute_bytes(self.job)) * self.fp8_layers(done) * whole)

    @cached_property
    def value_padding(self) -> Array:
        """Of a layer with latent attention: zeros beside values, and the kernel's output, which is as wide as keys."""
        return activations.value_padding(self.job, self.columns) if self.job.model.mla is not None else 0.0 * self.full_sequence

    def fp8_layers(self, done: Array) -> Array:
        """Of so many layers in the order of backward, those in fused fp8 blocks: neither the model's first nor its last."""
        if self.job.precision != "fp8":
            return np.zeros(len(self.columns))
        ends = self.share.head * (done > 0) + self.share.embedding * (done == self.share.layers) * (done > self.share.head)
        return np.where(states.uses_fused_blocks(self.job, self.columns), done - ends, 0)

    def is_fp8_layer(self, done: Array) -> Array:
        """Whether the layer in backward after so many is in a fused fp8 block."""
        return np.asarray(self.fp8_layers(np.minimum(done + 1, self.share.layers)) > self.fp8_layers(done))

    @cached_property
    def deferred(self) -> Array:
        """The same of the chunk: what it received stays, what it sent is freed."""
        if self.job.adapter_rank is not None:
            return -self.saved
        ends = np.where(self.share.embedding == 0, self.residual, 0.0) - np.where(self.sends_output, self.residual, 0.0)
        there = self.columns.split_backward & self.job.framework.exact_memory_trace
        return np.asarray(self.deferred_when_done(self.share.layers) + np.where(there, ends, 0.0))

    def routed_only(self, moe: bool) -> bool:
        """A layer of experts without a shared one: all its rows have gradients of their own."""
        return moe and self.job.model.moe is not None and not self.job.model.moe.shared_experts

    # FSDP2: which rows shard, and when they reduce and free.

    @cached_property
    def sharded(self) -> Array:
        return np.asarray((self.columns.zero >= 1) & (self.columns.shards > 1))

    @cached_property
    def single_backward(self) -> Array:
        """One micro-batch a step: gradients exist only as far as backward has come."""
        return np.asarray(self.sharded & (self.columns.gas == 1))

    @cached_property
    def reduce_scatters(self) -> Array:
        """Every backward reduce-scatters its gradients."""
        return np.asarray(self.sharded & ((self.columns.zero >= 2) | self.single_backward))

    @cached_property
    def holds_fresh_gradients(self) -> Array:
        """FSDP holds a layer's fresh gradients until its backward ends, unless autograd adds each to one of the same format."""
        added = ~self.reduce_scatters & (not self.first_backward) & (compute_bytes(self.job) == gradient_bytes(self.job))
        return np.asarray(self.sharded & ~added)

    @cached_property
    def gathers_joined(self) -> Array:
        """FSDP gathers the weights of a fused block's joined GEMMs into adjacent memory, if ranks have equal shards of them."""
        rows = self.job.model.ffn / self.columns.tp
        return np.asarray((rows % self.columns.shards == 0) & (self.job.precision != "fp8"))

    @cached_property
    def uses_expert_views(self) -> Array:
        """Experts whose weight gradients may be deferred, that ep cuts or FSDP slices, are multiplied through views, all made
        before the first GEMM: in backward, gradients wait at them until the last one's is there.
        """
        _, slices = states.expert_slices(self.job.model, self.columns, self.shards)
        return np.asarray(self.columns.split_backward | (self.columns.ep > 1) | (slices > 1))

    @cached_property
    def frees_gathered(self) -> Array:
        """Parameters that stay gathered are freed by the step's last backward in ZeRO-1 and 2, by every one in ZeRO-3."""
        keeps = self.columns.keep_gathered == 1
        return np.asarray((self.single_backward & (self.columns.zero < 3)) | (self.sharded & keeps))

    # FSDP2: bytes of parameters.

    def unsharded(self, elements: Array, fp8_elements: Array) -> Array:
        """Parameters that ZeRO-3 has gathered, `fp8_elements` of them in fp8."""
        columns = self.columns
        gathers = (columns.zero == 3) & (columns.keep_gathered == 0) & (columns.shards > 1)
        gathered = compute_bytes(self.job) * elements - states.fp8_saving(self.job, fp8_elements)
        return np.where(gathers, gathered, 0.0)

    @cached_property
    def fp8_block(self) -> Array:
        """Elements of a layer that are gathered in fp8, if it is neither the model's first nor its last."""
        return states.fp8_of_largest_layer(self.job, self.columns, self.share)

    def fp8_prefetched(self, done: Array, this_layer: bool = True) -> Array:
        """The same of the layer in backward and of the one prefetched, when `done` layers are through; or of the latter."""
        layers, head, embedding = self.share.layers, self.share.head, self.share.embedding
        left = layers - done
        if not this_layer:
            return np.asarray((left >= 2) * (1 - embedding * (left == 2)) * self.fp8_block)
        in_bf16 = head * (done == 0) + embedding * (left <= 2)
        return np.asarray(np.maximum(0, np.minimum(2, left) - in_bf16) * self.fp8_block)

    @cached_property
    def tied_group(self) -> Array:
        """Elements of an embedding that is tied to the head beside it, FSDP's root group, with the final norm."""
        tied = (self.embeds > 0) & (self.share.head == 1) & self.job.model.tied_embeddings
        return np.where(tied, self.own.ends, 0.0)

    @cached_property
    def embeds(self) -> Array:
        """Whether the chunk looks up embeddings: the first does, with multi-token prediction the last, too."""
        return np.asarray(self.share.embedding + self._embedding_copies(self.share))

    def _embedding_copies(self, share: RankShare) -> Array:
        return np.asarray(share.head * self.columns.has_pipeline * (self.job.model.mtp_depth > 0))

    @cached_property
    def embedding_group(self) -> Array:
        """Elements of an embedding that is a group of its own: in ZeRO-3 freed after forward, and backward needs it not."""
        own = states.on_tp_rank(weights.embedding(self.job.model), self.job.model, self.columns, self.shards)
        return np.where(self.tied_group > 0, 0.0, self.embeds * own)

    @cached_property
    def head_group(self) -> Array:
        """Elements of a head that is a group of its own: gathered until its backward ends."""
        return np.asarray(self.own.ends - self.tied_group - self.embedding_group)

    @cached_property
    def embedding_or_tied_group(self) -> Array:
        """Elements of embedding, or of embedding and head, whose gradients are the last of a whole backward."""
        return np.asarray(self.tied_group + self.embedding_group)

    @cached_property
    def unsharded_ends(self) -> Array:
        """The head, which ZeRO-3 gathers in a forward and frees in the next backward of the chunk."""
        return self.unsharded(self.tied_group + self.head_group, 0.0 * self.own.ends)

    @cached_property
    def unsharded_between_layers(self) -> Array:
        """The head, and the chunk's last layer."""
        share = self.share
        in_bf16 = (share.head == 1) | ((share.embedding == 1) & (share.layers == 1))
        elements = self.tied_group + self.head_group + self.block_of_next(0 * share.layers)
        return self.unsharded(elements, np.where(in_bf16, 0.0, self.fp8_block))

    @cached_property
    def last_group(self) -> Array:
        """Elements of FSDP's last parameter group: a layer, or its experts, which are their own group where ep cuts them."""
        last = self.block_of_next(0 * self.share.layers)
        if self.job.model.moe is None:
            return last
        experts = next(layer.experts for kind, layer in self.layer_parameters.items() if kind.has_experts)
        return np.where((self.columns.ep > 1) & (self.rank_share.moe_layers > 0), experts, last)

    # FSDP2: bytes of gradients.

    @cached_property
    def trained(self) -> float:
        """Share of the weights that have gradients."""
        return states.trained_fraction(self.job)

    @cached_property
    def reduce_scatter_input(self) -> Array:
        """Input of the chunk's last reduce-scatter, which FSDP keeps until the next: the embedding where the chunk has it, else
        its first layer; where a split backward reduce-scatters after the weight gradients, its last group.
        """
        first = np.where(self.embedding_or_tied_group > 0, self.embedding_or_tied_group, self.first_block)
        return self._kept_reduce_scatter_input(np.where(self.columns.split_backward, self.last_group, first))

    @cached_property
    def rank_reduce_scatter_inputs(self) -> Array:
        """The same of all chunks of the rank, kept through the next forward."""
        columns, rank = self.columns, self.rank_share
        model, tied = self.job.model, (columns.pp == 1) & self.job.model.tied_embeddings
        embedding = states.on_tp_rank(weights.embedding(model), model, columns, self.shards)
        copies = self._embedding_copies(rank)
        last = np.where(model.tied_embeddings, self.rank_params.ends - rank.embedding * embedding, embedding)
        ends = np.where(tied, self.rank_params.ends, rank.embedding * embedding + copies * last)
        first = ends + np.maximum(0, columns.virtual_stages - rank.embedding - copies) * self.first_block
        last = columns.virtual_stages * self.last_group
        return self._kept_reduce_scatter_input(np.where(columns.split_backward, last, first))

    def _kept_reduce_scatter_input(self, elements: Array) -> Array:
        columns = self.columns
        keeps = (columns.zero >= 2) & (columns.shards > 1) & (columns.gas > 1) & (not self.first_backward)
        return np.where(keeps, self.trained * gradient_bytes(self.job) * elements, 0.0)

    def reduce_scatter_output(self, elements: Array) -> Array:
        """A rank's shard as it arrives, and in the format in which it is kept, where that is wider."""
        g, kept = gradient_bytes(self.job), sharded_gradient_bytes(self.job)
        return np.asarray(self.trained * (g + np.where(kept > g, kept, 0)) * elements / self.columns.shards)

    def first_gradients(self, elements: Array) -> Array:
        """Gradients that a step's first backward has allocated for so many elements: shards, or whole ones in ZeRO-1."""
        shards = sharded_gradient_bytes(self.job) * elements / self.columns.shards
        allocated = np.where(self.reduce_scatters, shards, gradient_bytes(self.job) * elements)
        return np.where(self.sharded & self.first_backward, self.trained * allocated, 0.0)

    @cached_property
    def hsdp_reduced_grads(self) -> Array:
        """A split backward all-reduces HSDP's shards after every reduce-scatter, and FSDP keeps the last result."""
        columns = self.columns
        reduces = self.reduce_scatters & columns.split_backward & (columns.data_ranks > columns.shards)
        there = reduces & self.job.framework.exact_memory_trace
        return np.where(there, self.trained * gradient_bytes(self.job) * self.own.total / columns.shards, 0.0)

    @cached_property
    def vocabulary_gradient(self) -> Array:
        """Fresh gradient of the embedding's or the head's matrix."""
        model = self.job.model
        if self.job.adapter_rank is not None:
            return np.zeros(len(self.columns))
        return compute_bytes(self.job) * states.on_tp_rank([weights.vocabulary(model)], model, self.columns)

    @cached_property
    def head_gradient(self) -> Array:
        """Fresh gradient of a head that is tied to the embedding beside it, whose part is yet to come, or whose reduce-scatter
        waits for deferred weight gradients.
        """
        tied = self.job.model.tied_embeddings & (self.embeds > 0)
        waits = self.holds_fresh_gradients & self.columns.split_backward
        return np.where(waits | tied, self.share.head * self.vocabulary_gradient, 0.0)

    @cached_property
    def mlp_weight_gradient(self) -> dict[bool, Array]:
        """Fresh gradient of one of the MLP's matrices, by whether the layer has experts: of all those on the rank."""
        model, columns, b = self.job.model, self.columns, compute_bytes(self.job)
        found = {False: np.asarray(self.trained * b * model.hidden * model.ffn / columns.tp)}
        if model.moe is not None:
            expert = model.hidden * model.moe.expert_ffn / columns.expert_cut
            found[True] = np.asarray(self.trained * b * expert * model.moe.experts / columns.ep)
        return found

    @cached_property
    def sent_gradient(self) -> Array:
        """An input gradient on its way to the previous stage, live until that has used it; none was sent yet where the peak is
        in the first backward, with all micro-batches in flight.
        """
        columns, several = self.columns, self.columns.virtual_stages > 1
        all_in_flight = columns.schedule_has("holds_all") | (columns.gas <= columns.pp - self.share.rank)
        sent_before = several | ~(all_in_flight | self.first_backward)
        sends = (columns.pp > 1) & ((self.share.embedding == 0) | several) & sent_before
        return np.where(sends, self.residual, 0.0)
