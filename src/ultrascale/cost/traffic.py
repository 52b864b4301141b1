"""Every technique's communication of one step on one GPU: bytes sent, calls, time, and what of it is exposed.

Ranks of one pipeline stage send the same; stages differ by their layers and by what the ends have besides. Beside the large
collectives, which communication.py times, the small ones are here: a loss over a cut vocabulary, gradients of what every tp
rank repeats, counts of tokens by expert. They take no time worth a law, but a rehearsal counts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import cast

import numpy as np

from ultrascale.cost import communication, muon, operators, prefetch, stages
from ultrascale.cost.columns import Array, LayoutColumns, RankShare
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.memory import activations, states
from ultrascale.cost.memory.states import (
    FP32,
    compute_bytes,
    fp8_on_rank,
    gradient_bytes,
    sharded_gradient_bytes,
    uses_fused_blocks,
)
from ultrascale.cost.network import CollectiveTransfer, CommGroup, Op, group, transfer
from ultrascale.schedules import REGISTRY, ActionKind, build, stages_of
from ultrascale.specs import weights
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.estimate import Time, Traffic
from ultrascale.specs.job import OPTIMIZERS, Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.weights import WeightShape, adapter_inputs


def by_technique(job: Job, layout: Layout, machine: ClusterRates, time: Time) -> list[Traffic]:
    """The rank with the most layers, between two others if there is one.

    The exposed seconds of a technique are shared out over its calls by their time.
    """
    layers = stages.share_of(job, LayoutColumns.of([layout] * layout.pp), np.arange(layout.pp)).layers
    busiest = max(range(layout.pp), key=lambda stage: (layers[stage], hops(layout, stage)))
    exposed = {
        "tensor": time.tensor_s,
        "context": time.context_s,
        "expert": time.expert_s,
        "zero": time.zero_s + (time.data_s if layout.zero else 0.0),
        "data": time.data_s if not layout.zero else 0.0,
        "pipeline": time.send_s,
        "muon": 0.0,
    }
    if OPTIMIZERS[job.optimizer].matrices is not None:
        row = LayoutColumns.of([layout])
        first = stages.share_of(job, row, np.zeros(1, dtype=np.int64))
        exposed["muon"] = float(muon.time(Workload(job, row, machine), first).exposed_s[0])
    rows = list(of_stage(job, layout, machine, busiest))
    spent: dict[str, float] = defaultdict(float)
    for one in rows:
        spent[one.technique] += one.time_s
    shares = {technique: exposed[technique] / time_s if time_s else 0.0 for technique, time_s in spent.items()}
    return [one.model_copy(update={"exposed_s": shares[one.technique] * one.time_s}) for one in rows]


def of_stage(job: Job, layout: Layout, machine: ClusterRates, stage: int) -> Iterator[Traffic]:
    """What a rank of that pipeline stage sends, each collective once, without what computation hides of it."""
    for moved, calls in calls_of(Stage(job, layout, machine, stage)):
        yield Traffic(
            technique=moved.technique,
            collective=moved.collective,
            group=int(moved.group.size[0]),
            per_domain=int(moved.group.per_domain[0]),
            bytes=calls * float(moved.wire_bytes[0]),
            calls=calls,
            time_s=calls * float(moved.time_s[0]),
            exposed_s=0.0,
        )


Calls = Iterator[tuple[CollectiveTransfer, float]]
COUNT_BYTES = 8  # of a number of tokens


@dataclass(frozen=True)
class Stage:
    """One pipeline rank of one layout."""

    job: Job
    layout: Layout
    machine: ClusterRates
    index: int

    @cached_property
    def row(self) -> LayoutColumns:
        return LayoutColumns.of([self.layout])

    @cached_property
    def work(self) -> Workload:
        return Workload(self.job, self.row, self.machine)

    @cached_property
    def share(self) -> RankShare:
        return stages.share_of(self.job, self.row, np.asarray([self.index]))

    @property
    def embedding(self) -> int:
        return int(self.share.embedding[0])

    @property
    def head(self) -> int:
        return int(self.share.head[0])

    @cached_property
    def losses(self) -> int:
        """Per token: of the next and, with multi-token prediction, of further ones."""
        return self.head * (1 + self.job.model.mtp_depth)

    @cached_property
    def lookups(self) -> int:
        """Of embeddings per token."""
        depth = self.job.model.mtp_depth
        return self.embedding + depth * self.head

    def count(self, of: Callable[[LayerKind], int], kept: bool = False) -> int:
        """What its layers have so many of each, or those that recompute nothing though others do."""
        return sum(of(kind) * int((own if kept else count)[0]) for kind, count, own in self.share.each())

    @cached_property
    def layers(self) -> int:
        return self.count(lambda kind: 1)

    @cached_property
    def kept_layers(self) -> int:
        return self.count(lambda kind: 1, kept=True)

    @cached_property
    def regions(self) -> int:
        """Of tensor parallelism, which are entered and left: attention and MLP."""
        return self.count(self._regions)

    @cached_property
    def kept_regions(self) -> int:
        return self.count(self._regions, kept=True)

    def _regions(self, kind: LayerKind) -> int:
        """Experts that are sent a rank's slice are entered by what is sent (`_sliced_experts`), but for shared ones."""
        outside = kind.has_experts and self.routes_slices and not self.has_shared_experts
        return kind.sublayers - outside

    @cached_property
    def routes_slices(self) -> bool:
        return bool(states.routes_slices(self.job, self.row)[0])

    @property
    def has_shared_experts(self) -> bool:
        return self.job.model.moe is not None and bool(self.job.model.moe.shared_experts)

    @cached_property
    def moe_layers(self) -> int:
        return self.count(lambda kind: kind.has_experts)

    @cached_property
    def kept_moe_layers(self) -> int:
        return self.count(lambda kind: kind.has_experts, kept=True)

    @cached_property
    def attention_layers(self) -> int:
        return self.count(_has_attention)

    @cached_property
    def kept_attention_layers(self) -> int:
        return self.count(_has_attention, kept=True)

    @cached_property
    def shards(self) -> Array:
        return states.fsdp_shards(self.job, self.row)

    @cached_property
    def params(self) -> states.RankParameters:
        return states.on_rank(self.job.model, self.row, self.share, self.shards)

    @cached_property
    def adapters(self) -> Array:
        """Elements of the stage's adapters."""
        return states.adapters_on_rank(self.job, self.row, self.share, self.shards)

    @cached_property
    def fp8_layers(self) -> int:
        """In fused blocks."""
        return int(states.fused_fp8_layers(self.job, self.row, self.share)[0])

    @property
    def last_gradient(self) -> float:
        """Bytes of an element's gradient when they are reduced at the end: FSDP and ZeRO-2 have cut it in parts, FSDP's are
        in fp32.
        """
        if self.cuts_gradients:
            return sharded_gradient_bytes(self.job) / self.layout.shards
        return gradient_bytes(self.job)

    @property
    def last_expert_gradient(self) -> float:
        """The same of routed experts, which fewer ranks share."""
        shards, _ = states.expert_slices(self.job.model, self.row, np.asarray([self.layout.shards]))
        return self.last_gradient * (self.layout.shards / float(shards[0]) if self.cuts_gradients else 1)

    @property
    def cuts_gradients(self) -> bool:
        least = 1 if self.job.framework.states == "fp32" else 2
        return self.layout.zero >= least and self.layout.shards > 1


def _has_attention(kind: LayerKind) -> int:
    return int(kind.mixer == "attention")


def calls_of(stage: Stage) -> Calls:
    layout = stage.layout
    if layout.tp > 1:
        yield from _tensor(stage)
        yield from _repeated_weights(stage)
    if layout.cp > 1:
        yield from _context(stage)
    if stage.moe_layers and stage.job.framework.sliced_routing == "always":
        yield from _sliced_experts(stage)
    elif stage.moe_layers and layout.ep > 1:
        yield from _expert(stage)
    if layout.pp > 1:
        yield from _pipeline(stage)
    if layout.data_ranks > 1:
        yield from _zero(stage) if layout.zero else _data(stage)
    for stack in muon.stacks(stage.job, stage.row, stage.share):
        yield from stack.calls(stage.machine)


def _adapters(stage: Stage) -> Calls:
    """What tensor parallelism sends beside frozen weights, as wide as the rank: of inputs all adapters' together."""
    job, layout, gas = stage.job, stage.layout, stage.layout.gas
    assert job.adapter_rank is not None
    everywhere = job.adapter_targets == "all"
    cut = [len(one.outputs) for one in adapter_inputs(job.model) if one.outputs[0][1] != "none"]
    # Of attention in all layers, and of dense MLPs: a rank's part of shared experts is summed with the layer's output.
    dense, kept_dense = stage.layers - stage.moe_layers, stage.kept_layers - stage.kept_moe_layers
    inputs = [(each, stage.layers, stage.kept_layers) for each in cut]
    inputs += [(1 + job.model.gated, dense, kept_dense)] * everywhere
    outputs = [(1, stage.layers, stage.kept_layers), (1, dense, kept_dense)] if everywhere else []

    def sent(op: Op, adapters: int) -> CollectiveTransfer:
        size = compute_bytes(job) * stage.row.tokens(job.seq) * adapters * job.adapter_rank
        return transfer(stage.machine, "tensor", op, size, stage.work.places.tensor)

    for (adapters, layers, kept), first, second in (
        *((each, "all_gather", "reduce_scatter") for each in inputs),
        *((each, "reduce_scatter", "all_gather") for each in outputs),
    ):
        forwards = gas * _forwards(stage, layers, kept)
        if layout.sequence_parallel:
            yield sent(cast(Op, first), adapters), forwards
            yield sent(cast(Op, second), adapters), gas * layers
        else:  # backward of what enters, forward of what leaves
            yield sent("all_reduce", adapters), gas * layers if first == "all_gather" else forwards


def _recompute_entries(stage: Stage) -> tuple[int, int]:
    """How often recomputation enters the regions of a stage's layers anew, and leaves them.

    Selective recomputation keeps matmuls with their collectives, but what experts are sent is gathered to be sorted again. A
    fused block has the input of gate and up gathered in backward anyway, unless its weight gradients are deferred.
    torch.utils.checkpoint stops before a layer's last collective, which no backward asks for.
    """
    entered = stage.regions - stage.kept_regions
    if stage.layout.recompute == "full":
        early = stage.count(_stops_early) - stage.count(_stops_early, kept=True)
        return entered, entered - int(states.stops_early(stage.job, stage.row)[0]) * early
    if stage.layout.recompute == "selective" and stage.job.framework.selective in states.ALTERNATE:
        return entered, 0  # reduce-scatters are kept, all-gathers are not
    if not _repeats(stage):
        return 0, 0
    again = stage.count(_norm_follows_experts) - stage.count(_norm_follows_experts, kept=True)
    return stage.moe_layers - stage.kept_moe_layers, again


def _stops_early(kind: LayerKind) -> int:
    """Whether a layer ends with a collective that its backward does not ask for: no norm follows."""
    return not kind.predicts


def _norm_follows_experts(kind: LayerKind) -> int:
    return kind.predicts and kind.has_experts


def _repeats(stage: Stage) -> bool:
    """Whether recomputation repeats collectives of a layer that are not part of a matmul."""
    policy = stage.layout.recompute
    selective = policy == "selective" and stage.job.framework.exact_memory_trace
    return policy == "full" or (selective and not uses_fused_blocks(stage.job, stage.row)[0])


def _tensor(stage: Stage) -> Calls:
    job, layout, gas = stage.job, stage.layout, stage.layout.gas
    inside = communication.tensor_traffic(stage.work)
    entered, left = _recompute_entries(stage)
    regions = stage.regions
    chunked = bool(activations.chunked_loss(job, stage.row)[0])
    head, lookups = 0 if chunked else stage.losses, stage.lookups
    frozen = job.adapter_rank is not None and job.framework.exact_memory_trace
    unasked = stage.embedding if frozen else 0  # gradients of a frozen embedding
    # And of the first layer's input, which projections to latents do not communicate.
    mla = job.model.mla
    unasked_input = unasked if mla is None or mla.q_lora_rank is None else 0
    if frozen:
        yield from _adapters(stage)
    if layout.sequence_parallel:
        # Each pass enters and leaves a region once; backward also gathers the saved inputs again, but for those of experts,
        # which are kept as they were routed. Slices leave the embedding and enter the head.
        gathered = job.framework.gathered_inputs
        with_experts = 0 if stage.routes_slices and not stage.has_shared_experts else stage.moe_layers
        kept_slices = 0 if gathered or frozen else regions - with_experts
        gathers = 2 * regions + kept_slices + entered + lookups + (1 if gathered or frozen else 2) * head
        gathers -= unasked
        narrow = _narrow_gathers(stage)
        scatters = 2 * regions + left + lookups + head - unasked_input
        if inside.latents:
            layers = stage.attention_layers
            full = layers - stage.kept_attention_layers if layout.recompute == "full" else 0
            gathers -= (1 if frozen else 2) * layers + full
            scatters -= layers
            for latent in inside.latents:
                # The rotated key is no part of a GEMM: selective recomputation gathers it too.
                again = layers if latent.gathered_again and not frozen else 0
                repeated = full if latent.gathered_again else _forwards(stage, layers, stage.kept_attention_layers) - layers
                yield latent.gather, gas * (layers + again + repeated)
                yield latent.scatter, gas * layers
        if stage.moe_layers and job.model.moe is not None and states.scatters_scores(job, stage.row)[0]:
            scores = FP32 * stage.row.tokens(job.seq) * job.model.moe.top_k
            yield transfer(stage.machine, "tensor", "reduce_scatter", scores, stage.work.places.tensor), gas * stage.moe_layers
            gathers += stage.moe_layers  # of the gradient of the router's input
        yield inside.gather, gas * gathers + _gathers_again(stage) - narrow
        if narrow:
            inner = gas * communication.SUBLAYERS * stage.fp8_layers
            yield inside.narrow_gather, narrow
            yield inside.scales, inner + gas * communication.SUBLAYERS * _recomputed_fp8_layers(stage)
            yield inside.agreement, inner
        yield inside.scatter, gas * scatters
    else:
        reductions = 2 * regions + left + lookups + head - stage.attention_layers * bool(inside.latents) - unasked_input
        yield inside.reduce, gas * reductions
        for latent in inside.latents:
            yield latent.reduce, gas * stage.attention_layers
    if job.model.qk_norm and job.model.qk_norm_over == "all" and job.framework.exact_memory_trace:
        # Sums of squares of all heads, of queries and of keys, in forward and backward.
        sums = transfer(stage.machine, "tensor", "all_reduce", FP32 * stage.row.tokens(job.seq), stage.work.places.tensor)
        layers = stage.attention_layers
        yield sums, 2 * gas * (_forwards(stage, layers, stage.kept_attention_layers) + layers)
    if head:
        # The maximum over the vocabulary; then the sum of exponentials and the target's logit.
        one = FP32 * stage.row.tokens(job.seq)
        yield transfer(stage.machine, "tensor", "all_reduce", one, stage.work.places.tensor), gas * head
        yield transfer(stage.machine, "tensor", "all_reduce", 2 * one, stage.work.places.tensor), gas * head
    elif stage.head:
        yield from _chunked_loss(stage)


def _chunked_loss(stage: Stage) -> Calls:
    """Of each chunk the hidden states, their gradients, and two numbers per token and rank: log-sum-exp and target's logit."""
    job, row = stage.job, stage.row
    tokens = row.tokens(job.seq)
    chunks = int(np.ceil(tokens / activations.loss_chunk(job, row))[0])
    wide = compute_bytes(job) * tokens * job.model.hidden
    calls: list[tuple[Op, Array]] = [("all_gather", 2 * FP32 * row.tp * tokens)]
    calls += [("all_gather", wide), ("reduce_scatter", wide)] if stage.layout.sequence_parallel else [("all_reduce", wide)]
    for collective, size in calls:
        one = transfer(stage.machine, "tensor", collective, size / chunks, stage.work.places.tensor)
        yield one, stage.layout.gas * chunks * stage.losses


def _gathers_again(stage: Stage, in_fp8: bool = False) -> int:
    """Gathers for deferred weight gradients of fused blocks; of all of them, or of those in fp8."""
    if not communication.tensor_traffic(stage.work).gathers_gradients_again[0]:
        return 0
    recomputed = _deferred_layers(stage, stage.layout.recompute_layers, in_fp8) if stage.layout.recompute == "selective" else 0
    return communication.SUBLAYERS * _deferred_layers(stage, None, in_fp8) + recomputed


def _narrow_gathers(stage: Stage) -> int:
    """Gathers in fp8 of one step: in each forward, of output gradients, and of what the norm's output was."""
    layers = 3 * stage.fp8_layers + _recomputed_fp8_layers(stage)
    again = _gathers_again(stage, in_fp8=True) if stage.fp8_layers else 0
    return stage.layout.gas * communication.SUBLAYERS * layers + again


def _recomputed_fp8_layers(stage: Stage) -> int:
    """Layers in fp8 whose forward is recomputed in full, on all chunks of a stage."""
    if stage.layout.recompute != "full" or not stage.fp8_layers:
        return 0
    own = stages_of(stage.index, stage.layout.pp, stage.layout.virtual_stages, REGISTRY[stage.layout.schedule].v_shaped)
    each = _first_layers(stage, stage.layout.recompute_layers, in_fp8=True)
    return sum(each[chunk] for chunk in own)


def _deferred_layers(stage: Stage, most: int | None, in_fp8: bool) -> int:
    """Layers of all micro-batches whose weight gradients are deferred."""
    layout = stage.layout
    actions = build(layout.schedule, layout.pp, layout.gas, layout.virtual_stages).actions[stage.index]
    each = _first_layers(stage, most, in_fp8)
    return sum(each[action.stage] for action in actions if action.kind is ActionKind.W)


def _first_layers(stage: Stage, most: int | None, in_fp8: bool) -> list[int]:
    """The first layers of every chunk, at most so many, less the model's first and last where only those in fp8 count."""
    layers = stages.chunk_layers(stage.job, stage.layout.pp, stage.layout.virtual_stages)
    each = [min(count, most or count) for count in layers]
    if in_fp8:
        each[0] -= 1
        each[-1] -= each[-1] == layers[-1] - (len(layers) == 1)
    return [max(0, count) for count in each]


def _repeated_weights(stage: Stage) -> Calls:
    """Gradients of weights that several tp ranks hold and each of which saw a part: summed once a step, or as they are made."""
    layout, model, g, times = stage.layout, stage.job.model, stage.last_gradient, 1
    if stage.job.framework.sums_in_backward:
        g, times = compute_bytes(stage.job), layout.gas
    if stage.job.adapter_rank is None:
        partial = g * states.partial_on_tp(model, stage.row, stage.share, layout.sequence_parallel, stage.shards)
        if stage.moe_layers:
            of_experts = states.partial_experts_on_tp(model, stage.row, stage.share, stage.shards)
            partial = partial + stage.last_expert_gradient * of_experts
    else:
        partial = g * _adapters_of(stage, lambda one: one.partial or (one.cut == "none" and layout.sequence_parallel))
    if float(partial[0]):
        yield transfer(stage.machine, "tensor", "all_reduce", partial, stage.work.places.tensor), times
    copies = layout.tp // min(layout.tp, model.kv_heads)
    if copies > 1 and model.mla is None:
        repeated = [weight for weight in weights.attention(model) if weight.cut == "kv rows"]
        each = stage.attention_layers * states.on_tp_rank(repeated, model, stage.row, stage.shards)
        if stage.job.adapter_rank is not None:
            each = _adapters_of(stage, lambda one: one.cut == "kv rows")
        alike = group(np.asarray([copies]), np.asarray([1]), stage.machine.cluster)
        yield transfer(stage.machine, "tensor", "all_reduce", g * each, alike), times


def _adapters_of(stage: Stage, wanted: Callable[[WeightShape], bool]) -> Array:
    return states.adapters_on_rank(stage.job, stage.row, stage.share, stage.shards, wanted)


def _forwards(stage: Stage, layers: int, kept: int) -> int:
    """How often so many layers' forwards communicate: once more where recomputation repeats all but matmuls and attention."""
    return layers + (layers - kept if _repeats(stage) else 0)


def _context(stage: Stage) -> Calls:
    job, layout, row = stage.job, stage.layout, stage.row
    clock = operators.clock(job, row, stage.machine)
    attention = operators.layer(job, row, stage.machine, LayerKind(), at=clock).attention
    around = communication.context_traffic(stage.work, attention)
    layers = stage.attention_layers
    forwards, backwards = layout.gas * _forwards(stage, layers, stage.kept_attention_layers), layout.gas * layers
    if job.framework.context == "flex":
        recomputed = 0 if layout.recompute == "none" else layers - stage.kept_attention_layers
        yield around.gather, layout.gas * (layers + recomputed)
        yield around.scatter, backwards
    elif job.framework.context != "layout":
        yield around.gather, forwards + (backwards if job.framework.context == "ring" else 0)
        yield around.gradients, layout.cp * backwards
    elif layout.context_parallel == "allgather":
        yield around.gather, forwards + backwards
        yield around.scatter, backwards
    elif layout.context_parallel == "ulysses":
        yield around.switch, forwards + backwards
    else:
        # Backward's blocks carry the gradients too: two blocks' bytes each.
        yield around.block, (layout.cp - 1) * (forwards + 2 * backwards)
    for mixer in ("linear", "mamba"):

        def has_state(kind: LayerKind, mixer: str = mixer) -> bool:
            return kind.mixer == mixer

        if count := stage.count(has_state):
            passes = count + _forwards(stage, count, stage.count(has_state, kept=True))
            yield communication.state_exchange(stage.work, mixer), layout.gas * passes
    if stage.moe_layers and job.model.moe is not None and job.framework.sliced_routing == "never":
        # How often each expert was chosen in a sequence, all of its parts together: what a balance loss pulls at.
        counts = np.asarray([FP32 * layout.mbs * job.model.moe.experts])
        yield transfer(stage.machine, "context", "all_reduce", counts, stage.work.places.context), stage.moe_layers * layout.gas


def _expert(stage: Stage) -> Calls:
    moe = stage.job.model.moe
    assert moe is not None
    gas, layers = stage.layout.gas, stage.moe_layers
    forwards = gas * _forwards(stage, layers, stage.kept_moe_layers)
    passes = forwards + gas * layers
    if stage.layout.dispatcher == "allgather":
        gather, scatter = communication.gathered_tokens(stage.work)
        yield gather, passes
        yield scatter, passes
    else:
        all_to_all = communication.expert_traffic(stage.work).all_to_all
        yield all_to_all, communication.ALL_TO_ALLS * passes
    # Each rank tells the others how many rows come.
    counts = np.asarray([COUNT_BYTES * moe.experts])
    yield transfer(stage.machine, "expert", "all_to_all", counts, stage.work.places.expert), forwards


def _sliced_experts(stage: Stage) -> Calls:
    """Where each tp rank routes its slice of the sequence: weights of the routing travel with the rows. Experts that tp cuts
    gather the rows that arrived at any of its ranks, and their outputs are summed (Megatron-Core's token_dispatcher.py).
    """
    job, layout, row, moe = stage.job, stage.layout, stage.row, stage.job.model.moe
    assert moe is not None
    backwards = layout.gas * stage.moe_layers
    forwards = layout.gas * _forwards(stage, stage.moe_layers, stage.kept_moe_layers)
    b, cut, places = compute_bytes(job), int(row.expert_cut[0]), stage.work.places
    ranks = layout.ep * cut
    everywhere = places.expert if cut == 1 else group(np.asarray([ranks]), np.asarray([1]), stage.machine.cluster)
    tokens = row.tokens(job.seq) / row.routed_cut(sliced=True)

    def sent(op: Op, size: Array, among: CommGroup) -> CollectiveTransfer:
        return transfer(stage.machine, "expert", op, size, among)

    def gathered(rows: Array, width: int, weights: int, among: CommGroup) -> Calls:
        """Rows and what routing says of each, forward; their gradients are scattered."""
        yield sent("all_gather", b * rows * width, among), forwards + backwards
        yield sent("reduce_scatter", b * rows * width, among), forwards + backwards
        yield sent("all_gather", weights * rows, among), forwards

    if layout.dispatcher == "allgather":
        # With each token's weights and choices of all experts.
        yield from gathered(tokens * ranks, job.model.hidden, (1 + b) * moe.experts, everywhere)
        yield sent("reduce_scatter", b * tokens * ranks * moe.experts, everywhere), backwards
    else:
        rows = tokens * moe.top_k * job.cluster.efficiency.expert_imbalance
        all_to_all = communication.expert_traffic(stage.work).all_to_all
        yield all_to_all, communication.ALL_TO_ALLS * (forwards + backwards)
        yield sent("all_to_all", b * rows, places.expert), forwards + backwards
        yield sent("all_gather", COUNT_BYTES * moe.experts * ranks + 0 * rows, everywhere), forwards
        if cut > 1:
            yield from gathered(cut * rows, job.model.hidden, b, places.tensor)
            yield sent("reduce_scatter", b * cut * rows, places.tensor), backwards
    # How often each expert was chosen, for a loss that balances them.
    counts = np.asarray([COUNT_BYTES * moe.experts * (layout.mbs if moe.router_bias else 1)])
    together = group(row.tp * row.cp, np.asarray([1]), stage.machine.cluster)
    yield sent("all_reduce", counts, together), backwards


def hops(layout: Layout, stage: int) -> int:
    """Boundaries over which a rank sends per micro-batch: activations to the next chunk's rank, gradients to the one before."""
    return _hops(layout.pp, layout.virtual_stages, REGISTRY[layout.schedule].v_shaped)[stage]


@lru_cache(maxsize=512)
def _hops(pp: int, virtual_stages: int, v_shaped: bool) -> tuple[int, ...]:
    """Of every rank."""
    ranks = {chunk: rank for rank in range(pp) for chunk in stages_of(rank, pp, virtual_stages, v_shaped)}
    found = [0] * pp
    for chunk, rank in ranks.items():
        found[rank] += sum(ranks.get(chunk + offset, rank) != rank for offset in (-1, 1))
    return tuple(found)


def _pipeline(stage: Stage) -> Calls:
    row, model = stage.row, stage.job.model
    hop = communication.pipeline_hop(stage.work)
    both = group(np.asarray([2]), row.tp * row.data_ranks, stage.machine.cluster)
    yield replace(hop, group=both), float(hops(stage.layout, stage.index) * stage.layout.gas)
    copied = model.tied_embeddings or model.mtp_depth > 0
    if copied and stage.embedding != stage.head and stage.job.adapter_rank is None:
        # Two stages hold a copy each, whose gradients are summed.
        elements = states.on_tp_rank([weights.vocabulary(model)], model, row, stage.shards)
        whole = stage.last_gradient * elements
        yield transfer(stage.machine, "pipeline", "all_reduce", whole, both), 1


def _data(stage: Stage) -> Calls:
    if stage.job.adapter_rank is not None:
        size = gradient_bytes(stage.job) * stage.adapters
        yield transfer(stage.machine, "data", "all_reduce", size, stage.work.places.data), 1
        return
    reduce, expert_reduce = communication.data_traffic(stage.work, stage.params)
    yield reduce, 1
    if stage.moe_layers and int(expert_reduce.group.size[0]) > 1:
        yield expert_reduce, 1


def _embedding_gathers(layout: Layout) -> int:
    """In every forward or, where parameters stay gathered until a backward, in each that follows one."""
    if layout.pp == 1 or not layout.keep_gathered:
        return layout.gas
    schedule = build(layout.schedule, layout.pp, layout.gas, layout.virtual_stages)
    kinds = [action.kind for action in schedule.actions[schedule.rank_of(0)] if action.stage == 0]
    kinds = [kind for kind in kinds if kind is not ActionKind.W]
    return 1 + sum(kind is ActionKind.F and before is not ActionKind.F for before, kind in pairwise(kinds))


def _zero_with_adapters(stage: Stage) -> Calls:
    """All weights are gathered; gradients are those of adapters."""
    job, layout, gas = stage.job, stage.layout, stage.layout.gas
    none, b = np.zeros(1), compute_bytes(job)
    gradients = gradient_bytes(job) * stage.adapters
    if layout.shards > 1:
        ends = stage.params.ends if layout.zero == 3 else none
        gathers = 1 if layout.zero < 3 else gas * (1 if layout.keep_gathered else 2)
        layers = stage.params.trunk - ends + stage.adapters
        frozen = communication.ZeroTraffic(stage.work, layers, stage.params.experts)
        yield frozen.gather, gathers
        if stage.moe_layers and int(frozen.expert_gather.group.size[0]) > 1:
            yield frozen.expert_gather, gathers
        if layout.zero == 3:
            embedding = stage.share.embedding * states.on_tp_rank(
                weights.embedding(job.model), job.model, stage.row, stage.shards
            )
            embedding = np.where(job.model.tied_embeddings & (layout.pp == 1), 0.0, embedding)
            yield transfer(stage.machine, "zero", "all_gather", b * (ends - embedding), stage.work.places.shard), gas
            yield (
                transfer(stage.machine, "zero", "all_gather", b * embedding, stage.work.places.shard),
                _embedding_gathers(layout),
            )
        yield (
            transfer(stage.machine, "zero", "reduce_scatter", gradients, stage.work.places.shard),
            1 if layout.zero == 1 else gas,
        )
    if layout.data_ranks > layout.shards:
        yield transfer(stage.machine, "zero", "all_reduce", gradients / layout.shards, stage.work.places.replica), 1


def _zero(stage: Stage) -> Calls:
    if stage.job.adapter_rank is not None:
        yield from _zero_with_adapters(stage)
        return
    job, layout, params = stage.job, stage.layout, stage.params
    narrow = fp8_on_rank(job, stage.row, stage.share)
    moved = communication.ZeroTraffic(stage.work, params.trunk, params.experts, narrow.elements)
    piped = layout.pp > 1 and job.framework.accumulation == "unsharded-in-pipelines"
    kept = piped and layout.keep_gathered  # until all gradients are reduced
    gathers = {1: 1, 2: 1, 3: 1 if kept else layout.gas * (1 if layout.keep_gathered else 2)}[layout.zero]
    if piped and not layout.keep_gathered and layout.zero == 3:  # a backward leaves them gathered for the next forward
        gathers = layout.gas + 1
    scatters = 1 if layout.zero == 1 or piped or job.framework.accumulation == "unsharded" else layout.gas
    if layout.shards > 1:
        if job.framework.head_gathers and layout.zero == 3:
            yield from _by_group(stage, gathers, piped)
        elif job.framework.live_parameters and layout.zero == 3:
            found = prefetch.gathered_elements(job, stage.row)
            yield communication.ZeroTraffic(stage.work, found.each_microbatch, params.experts).gather, layout.gas
            yield communication.ZeroTraffic(stage.work, found.each_step, params.experts).gather, 1
            gathers = 0  # experts are among these
        elif job.framework.states == "fp32" and layout.zero == 3:
            # The head stays gathered from forward to backward, which does not need the embedding.
            elements = stage.share.embedding * states.on_tp_rank(
                weights.embedding(job.model), job.model, stage.row, stage.shards
            )
            embedding = np.where(job.model.tied_embeddings & (layout.pp == 1), 0.0, elements)
            copy = states.embedding_copy(job.model, stage.row, stage.share, stage.shards)
            layers, head, alone = (
                communication.ZeroTraffic(stage.work, elements, params.experts, in_fp8).gather
                for elements, in_fp8 in (
                    (params.trunk - params.ends, narrow.elements),
                    (params.ends - embedding - copy, 0.0),
                    (embedding + copy, 0.0),
                )
            )
            yield layers, gathers
            if stage.head:
                yield head, layout.gas
            if embedding[0] or copy[0]:
                yield alone, _embedding_gathers(layout)
        else:
            yield moved.gather, gathers
        if narrow.scales[0]:
            yield transfer(stage.machine, "zero", "all_reduce", FP32 * narrow.scales, stage.work.places.shard), 1
        if job.framework.accumulation == "bf16-and-fp32" and layout.zero < 3:
            whole = communication.reduced_bytes(job) * params.trunk
            yield transfer(stage.machine, "zero", "all_reduce", whole, stage.work.places.shard), scatters
        else:
            for elements, times in _scattered(stage, scatters):
                yield communication.ZeroTraffic(stage.work, elements, params.experts).scatter, times
        if stage.moe_layers and int(moved.expert_gather.group.size[0]) > 1:
            yield moved.expert_gather, gathers
            for elements, times in _scattered(stage, scatters, experts=True):
                yield communication.ZeroTraffic(stage.work, params.trunk, elements).expert_scatter, times
    if layout.data_ranks > layout.shards:
        # Replicas are all-reduced once a step; after a split backward with every scatter, since not every one has all weights.
        split = job.framework.states == "fp32" and layout.zero >= 2 and layout.shards > 1 and bool(stage.row.split_backward[0])
        # Of experts fewer ranks of a replica have parts.
        fewer = layout.shards / moved.expert_gather.group.size
        reduced = [(params.trunk + fewer * params.experts, 1)]
        if split:
            of_experts = _scattered(stage, scatters, experts=True)
            reduced = [*_scattered(stage, scatters), *((fewer * elements, times) for elements, times in of_experts)]
        for elements, times in reduced:
            own = gradient_bytes(job) * elements / layout.shards
            yield transfer(stage.machine, "zero", "all_reduce", own, stage.work.places.replica), times


def _by_group(stage: Stage, gathers: int, piped: bool) -> Calls:
    """Where head and final norm are an FSDP group of their own, or with a tied embedding: gathers, and reductions beside those
    of the trunk. `piped`: a pipeline's, which reduce in a step's last backward and leave gathered what a backward has gathered.
    """
    job, params, gas, row = stage.job, stage.params, stage.layout.gas, stage.row
    norm, vocabulary = (
        np.where(stage.head, states.on_tp_rank([weight], job.model, row, stage.shards), 0.0)
        for weight in (weights.norm(job.model), weights.vocabulary(job.model))
    )
    of_norm, of_vocabulary, of_head, others = (
        communication.ZeroTraffic(stage.work, elements, params.experts)
        for elements in (
            norm,
            vocabulary,
            norm + states.gathered_vocabularies(job, row) * vocabulary,
            params.trunk - norm - vocabulary,
        )
    )
    yield others.gather, gathers
    if not stage.head:
        return
    times = job.framework.head_gathers
    yield of_head.gather, max(gathers, 1 + gas * (times - 1)) if piped else gas * times
    if job.framework.loss in activations.CHUNKED_GRADIENTS:  # the head's are reduced with the loss
        if piped:
            yield of_vocabulary.scatter, gas - 1
            yield of_norm.scatter, _backward_runs(stage) - 1
        elif job.model.tied_embeddings and stage.embedding:
            yield of_vocabulary.scatter, gas


def _backward_runs(stage: Stage) -> int:
    """How often backwards of the last stage follow its forwards: what they leave is reduced with the next loss."""
    layout = stage.layout
    schedule = build(layout.schedule, layout.pp, layout.gas, layout.virtual_stages)
    last = layout.pp * layout.virtual_stages - 1
    kinds = [action.kind for action in schedule.actions[stage.index] if action.stage == last]
    kinds = [kind for kind in kinds if kind is not ActionKind.W]
    return sum(before is ActionKind.F and kind is not ActionKind.F for before, kind in pairwise(kinds))


def _scattered(stage: Stage, scatters: int, experts: bool = False) -> Iterator[tuple[Array, int]]:
    """Elements besides experts, or those of experts, and how often a step scatters their gradients.

    Where backward is split, FSDP scatters a chunk's after the weights' turn. What was not put off goes with the first turn
    after it, of several micro-batches together if so many came before.
    """
    job, layout, whole = stage.job, stage.layout, stage.params.experts if experts else stage.params.trunk
    if not (job.framework.states == "fp32" and layout.zero >= 2 and stage.row.split_backward[0]):
        yield whole, scatters
        return
    chunks = stages.chunk_shares(job, layout.pp, layout.virtual_stages)
    rows = stage.row.take(np.zeros(len(chunks.layers), dtype=np.int64))
    of_each = states.never_deferred_experts if experts else states.never_deferred
    never_deferred = of_each(job.model, rows, chunks, states.fsdp_shards(job, rows))
    actions = build(layout.schedule, layout.pp, layout.gas, layout.virtual_stages).actions[stage.index]
    own = sorted({action.stage for action in actions})
    yield whole - never_deferred[own].sum(), scatters
    if not never_deferred[own].any():
        return
    for chunk in own:
        kinds = [action.kind for action in actions if action.stage == chunk and action.kind is not ActionKind.F]
        turns = zip((None, *kinds), kinds, strict=False)
        yield (
            never_deferred[chunk : chunk + 1],
            sum(kind is ActionKind.B or (kind is ActionKind.W and before is ActionKind.I) for before, kind in turns),
        )
