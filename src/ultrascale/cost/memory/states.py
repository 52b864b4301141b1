"""Parameters of one rank, and bytes of its parameters, master weights, gradients and optimizer states; fp8 gathers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns, RankShare
from ultrascale.specs import weights
from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.training import FP8_MULTIPLE, FP8_TOKENS
from ultrascale.specs.weights import WeightShape, embedding, layer_weights, mlp, norm, positions, router_bias, vocabulary

FP32 = 4
ALTERNATE = ("alternate", "alternate-unjoined")  # selective recomputation of every second GEMM
DELTA_RULE_WIDTHS = (64, 128)  # of a head's keys and values, for our GPU kernels


def compute_bytes(job: Job) -> int:
    """Bytes of an activation: fp8 is a format of matmul operands, saved tensors stay in bf16."""
    return 4 if job.precision == "fp32" else 2


def operand_bytes(job: Job) -> int:
    """Bytes of a matmul's input as it is saved: an engine may save the fp8 copy instead of the tensor it was cast from."""
    return 1 if job.precision == "fp8" and job.framework.transformer_engine else compute_bytes(job)


def gradient_bytes(job: Job) -> int:
    return FP32 if (job.gradients == "fp32" and job.framework.states != "pure") or job.precision == "fp32" else 2


def adapter_weights(job: Job, kind: LayerKind) -> list[WeightShape]:
    """Of one layer. Our engine has an adapter beside each of q, k and v."""
    if job.adapter_rank is None:
        return []
    joint = not job.framework.exact_memory_trace
    return weights.adapters(job.model, kind, job.adapter_rank, job.adapter_targets == "all", joint)


def adapters_on_rank(
    job: Job,
    columns: LayoutColumns,
    share: RankShare,
    shards: Array | int = 1,
    wanted: Callable[[WeightShape], bool] = lambda _: True,
) -> Array:
    """Elements of the wanted adapters of all layers of a rank."""
    found = np.zeros(len(columns))
    for kind, count, _ in share.each():
        own = [weight for weight in adapter_weights(job, kind) if wanted(weight)]
        found = found + count * on_tp_rank(own, job.model, columns, shards)
    return found


def trained_fraction(job: Job) -> float:
    """Elements with gradients and optimizer states over those of the model: all, or the adapters."""
    if job.adapter_rank is None:
        return 1.0
    kinds = job.model.layer_kinds.items()
    return sum(count * weights.elements(adapter_weights(job, kind)) for kind, count in kinds) / job.model.parameters


def sharded_gradient_bytes(job: Job) -> int:
    """Bytes in a rank's shard: FSDP casts the result of a reduce-scatter to the format of its parameter shards."""
    return FP32 if job.framework.states == "fp32" else gradient_bytes(job)


def routes_slices(job: Job, columns: LayoutColumns) -> Array:
    """Rows in which each tp rank routes its slice of the sequence."""
    sliced = job.framework.sliced_routing
    return np.asarray((sliced == "always") | ((sliced == "with-ep") & (columns.ep > 1)))


def scatters_scores(job: Job, columns: LayoutColumns) -> Array:
    """Rows whose tp ranks route all tokens, but reduce gradients of scores to slices, for the router's backward."""
    return np.asarray((job.framework.sliced_routing == "with-ep") & (columns.ep == 1) & (columns.sequence_cut > 1))


def autocast(job: Job, columns: LayoutColumns) -> Array:
    """Rows that compute under torch.autocast, whose casts of weights belong to the forward that makes them."""
    plain = (columns.zero == 0) & (columns.tp == 1) & (columns.pp == 1)
    return np.asarray(plain & (job.framework.autocast and job.precision != "fp32"))


def has_master(job: Job) -> bool:
    """Whether fp32 weights exist beside the copy that computes."""
    return job.precision != "fp32" and job.framework.states != "pure"


def uncut(columns: LayoutColumns) -> Array:
    """Layers that one GPU computes whole, with an unsplit backward: they can be compiled."""
    return np.asarray((columns.tp == 1) & (columns.cp == 1) & ~columns.split_backward)


def compiled(job: Job, columns: LayoutColumns) -> Array:
    """Layers of our engine that a GPU compiles if it has no fused blocks for them."""
    return np.asarray(uncut(columns) & job.framework.fused_blocks & can_compile(job))


def can_compile(job: Job) -> bool:
    """The plain gated delta rule and Mamba-2 are loops over chunks."""
    return job.model.recurrence is None or delta_rule_problem(job) is None


def delta_rule_kernels(job: Job) -> bool:
    """Whether our engine computes linear attention by its GPU kernels."""
    return job.framework.fused_blocks and delta_rule_problem(job) is None


def delta_rule_problem(job: Job) -> str | None:
    """What keeps the gated delta rule from our GPU kernels (kernels/delta_rule_triton.py), in words; None: nothing does."""
    linear = job.model.linear_attention
    if linear is None:
        return f"{job.model.name} has no linear attention"
    if job.precision == "fp32":
        return "they have matmuls in bf16 and fp16"
    widths = linear.key_head_dim, linear.value_head_dim
    if not set(widths) <= set(DELTA_RULE_WIDTHS):
        return f"keys and values of a head are {widths[0]} and {widths[1]} wide: they take {DELTA_RULE_WIDTHS}"
    return None


def gathered_vocabularies(job: Job, columns: LayoutColumns) -> Array:
    """Of the matrices that FSDP gathers with the head: DTensor distributes a tied one twice, and both are gathered."""
    return np.where(job.framework.sums_in_backward & job.model.tied_embeddings & (columns.tp > 1), 2, 1)


def stops_early(job: Job, columns: LayoutColumns) -> Array:
    """Rows whose full recomputation ends before a layer's last GEMM, which no backward needs. The linear layers of DeepSpeed's
    ZeRO-3 save their tensors after their GEMM (LinearFunctionForZeroStage3), so there it is repeated.
    """
    own_linears = (columns.zero == 3) & (job.framework.live_parameters > 0)
    return np.asarray(job.framework.stops_early & ~own_linears)


def eager(job: Job, columns: LayoutColumns) -> Array:
    """Layers that run operator by operator in an engine whose allocations were traced."""
    fused = compiled(job, columns) | uses_fused_blocks(job, columns)
    return np.asarray(job.framework.exact_memory_trace & ~fused)


def uses_fused_blocks(job: Job, columns: LayoutColumns) -> Array:
    """Layers in fused blocks: their backward kernels compute norm and gate outputs again, whatever `recompute` is.

    In fp8, layers whose GEMMs all have sizes that it supports.
    """
    fits = job.framework.fused_blocks and job.attention == "flash"
    fits = fits and fused_blocks_problem(job) is None
    sizes = supports_fp8(job, columns) if job.precision == "fp8" else np.ones(len(columns), dtype=bool)
    return np.asarray(sizes & fits)


def supports_fp8(job: Job, columns: LayoutColumns) -> Array:
    """Dense layers without a GEMM that stays in bf16 for its sizes (kernels/selection.py), with a scale per tensor."""
    model, tp = job.model, columns.tp
    widths = model.q_dim // tp, model.kv_dim // np.minimum(tp, model.kv_heads), model.ffn // tp
    tokens = columns.tokens(job.seq) % FP8_TOKENS["tensor"] == 0
    return np.asarray(tokens & np.all([fits_fp8(model.hidden, width) for width in widths], axis=0))


def selective_policy(job: Job) -> str:
    """What selective recomputation repeats for this model: cheap operators, `half` the GEMMs too, `latents` (the
    up-projections of latent attention), `experts` (their norm and activation), `attention`, or with plain attention `scores`.
    """
    if job.attention != "flash":
        return "scores"
    if job.framework.selective != "modules":
        return job.framework.selective
    if job.model.mla is not None:
        return "latents"
    return "attention" if job.model.moe is None else "experts"


def fused_blocks_problem(job: Job) -> str | None:
    """What keeps a model's whole layers from being fused, in words; None: nothing does."""
    model, seq = job.model, job.seq
    if job.adapter_rank is not None:
        return "adapters stand beside linear layers"
    if model.moe is not None:
        return f"{model.name} has experts"
    if model.mtp_depth:
        return f"{model.name} predicts several tokens"
    if model.mla is not None:
        return f"{model.name} has latent attention"
    if model.recurrence is not None or model.attention_gate:
        return f"{model.name} has {model.recurrence or 'gates of attention'}"
    if model.one_sublayer:
        return f"layers of {model.name} have one sublayer"
    if model.norm != "rmsnorm" or model.activation != "swiglu" or model.positions != "rotary":
        return f"{model.name} is not of RMSNorm, SwiGLU and rotary positions"
    if model.norm_placement != "pre" or model.parallel_residual != "none" or model.residual_scale != 1:
        return f"norms and residuals of {model.name} are not Llama's"
    if model.rotary_dim is not None or model.rope_pattern or model.local_rope_theta is not None:
        return f"{model.name} does not rotate all layers and heads alike"
    if model.attention_scale is not None or model.attention_softcap is not None:
        return f"attention scores of {model.name} are scaled or capped"
    if model.attention_sinks:
        return f"attention of {model.name} has sinks"
    if model.qkv_bias or model.attention_output_bias or model.mlp_bias or model.qk_norm or model.qk_l2_norm:
        return f"{model.name} has biases, or norms of queries and keys"
    if model.sliding_window is not None and model.sliding_window < seq:
        return f"attention sees a window of {model.sliding_window} tokens"
    if model.head_dim & (model.head_dim - 1):
        return f"heads of {model.head_dim} are no power of two"
    return None


def on_one_gpu(job: Job, columns: LayoutColumns) -> Array:
    """The whole job runs on one GPU, AdamW included."""
    ranks = columns.data_ranks * columns.tp * columns.pp * columns.ep
    return np.asarray((ranks == 1) & columns.is_("offload", "none") & (job.optimizer == "adamw"))


def accumulates_nothing(job: Job, columns: LayoutColumns) -> Array:
    """One micro-batch on one GPU: there is no other gradient to add one to."""
    return np.asarray((columns.gas == 1) & on_one_gpu(job, columns))


# ------------------------------------------------------------------------------------------------------------ parameters


def _cut(cut: str, columns: LayoutColumns, kv_heads: int) -> Array | int:
    if cut == "none":
        return 1
    return np.minimum(columns.tp, kv_heads) if cut == "kv rows" else columns.tp


def _padding(weight: WeightShape, columns: LayoutColumns, kv_heads: int, shards: Array) -> Array:
    """Elements that FSDP2 adds on one rank so that a weight's rows divide among `shards`."""
    cut = _cut(weight.cut, columns, kv_heads)
    rows, width = (weight.rows, weight.width // cut) if weight.cut == "width" else (weight.rows // cut, weight.width)
    return np.asarray(-rows % shards * width)


def on_tp_rank(weights: Iterable[WeightShape], model: Model, columns: LayoutColumns, shards: Array | int = 1) -> Array:
    """Elements of the weights on one tp rank, with FSDP's padding for `shards`."""
    by_cut: dict[str, float] = {}
    weights = tuple(weights)
    for weight in weights:
        by_cut[weight.cut] = by_cut.get(weight.cut, 0.0) + weight.elements
    total = np.zeros(len(columns))
    for cut, elements in by_cut.items():
        total = total + elements / _cut(cut, columns, model.kv_heads)
    if np.any(np.asarray(shards) > 1):
        total = total + sum(_padding(weight, columns, model.kv_heads, np.asarray(shards)) for weight in weights)
    return np.asarray(total)


def fsdp_shards(job: Job, columns: LayoutColumns) -> Array:
    """Ranks among which FSDP shards the rows of each tensor; 1: it does not."""
    return np.where((columns.zero > 0) & (job.framework.states == "fp32"), columns.shards, 1)


@dataclass(frozen=True)
class LayerParameters:
    """Of one layer on one rank."""

    trunk: Array
    """without routed experts"""
    experts: Array
    """those"""
    block: Array
    """as FSDP groups it: without experts where ep cuts them, which are a group of their own"""

    @property
    def total(self) -> Array:
        return np.asarray(self.trunk + self.experts)


def layer_parameters(model: Model, columns: LayoutColumns, kind: LayerKind, shards: Array | int = 1) -> LayerParameters:
    """`shards`: ranks among whom the rows of each tensor are padded to divide."""
    trunk = on_tp_rank(layer_weights(model, kind), model, columns, shards)
    if not kind.has_experts:
        return LayerParameters(trunk, np.zeros(len(columns)), trunk)
    trunk, experts = trunk + router_bias(model), _experts(model, columns, np.asarray(shards))
    return LayerParameters(trunk, experts, np.asarray(trunk + np.where(columns.ep > 1, 0, experts)))


def _experts(model: Model, columns: LayoutColumns, shards: Array) -> Array:
    """All experts of a layer on one rank, with FSDP's padding."""
    moe, cut = model.moe, columns.expert_cut
    assert moe is not None
    each = sum(weight.elements / (cut if weight.cut != "none" else 1) for weight in mlp(model, moe.expert_ffn))
    elements = np.asarray(each * moe.experts / columns.ep)
    shards, slices = expert_slices(model, columns, shards)
    padding = -(moe.experts // columns.ep * slices) % shards
    return np.asarray(elements + padding * each / slices)


def _expert_matrices(model: Model, columns: LayoutColumns) -> Array:
    """Share of an expert's elements on a rank that are no biases."""
    if model.moe is None:
        return np.ones(len(columns))
    own = [(one, one.elements / np.where(one.cut == "none", 1, columns.expert_cut)) for one in mlp(model, model.moe.expert_ffn)]
    return np.asarray(sum(size for one, size in own if one.is_hidden_matrix) / sum(size for _, size in own))


def expert_slices(model: Model, columns: LayoutColumns, shards: Array) -> tuple[Array, Array]:
    """Shards of a layer's experts: FSDP cuts their stack, in slices of each where shards are a multiple of experts."""
    moe, cut = model.moe, columns.expert_cut
    assert moe is not None
    shards = np.maximum(1, shards * columns.tp // cut // columns.ep)
    rows, width, h = moe.experts // columns.ep, moe.expert_ffn // cut, model.hidden
    slices = np.maximum(1, shards // rows)
    divides = (rows * slices == shards) & (width % slices == 0) & (h % slices == 0)
    return shards, np.where(divides, slices, 1)


@dataclass(frozen=True)
class RankParameters:
    """Elements on one rank. Experts are separate because their data-parallel group is ep times smaller."""

    trunk: Array
    experts: Array
    ends: Array
    """embedding, head and final norm, already counted in trunk"""
    layer: Array
    """the largest single layer, experts included: what ZeRO-3 gathers at a time"""
    block: Array
    """the same as FSDP groups it"""
    padding: Array
    """of these, what only makes rows divide among shards"""
    share: RankShare
    """the rank's"""
    matrices: Array
    """of trunk, hidden matrices, where the optimizer steps these otherwise; experts are such matrices too"""

    @property
    def total(self) -> Array:
        return np.asarray(self.trunk + self.experts)


def on_rank(
    model: Model,
    columns: LayoutColumns,
    share: RankShare,
    shards: Array | int = 1,
    count_matrices: bool = False,
    layers: Mapping[LayerKind, LayerParameters] | None = None,
) -> RankParameters:
    """`layers`: one of each kind, if they are known."""
    # A tied head is the embedding's own where the model is in one piece: two chunks of a rank have a copy each.
    owns_head = share.head * np.where(model.tied_embeddings & (columns.pp == 1), 0, 1)
    ends = share.embedding * on_tp_rank(embedding(model), model, columns, shards)
    ends = ends + owns_head * on_tp_rank([vocabulary(model)], model, columns, shards)
    ends = ends + share.head * on_tp_rank([norm(model)], model, columns, shards)
    ends = ends + embedding_copy(model, columns, share, shards)
    trunk, experts, largest, largest_block = np.zeros((4, len(columns)))
    for kind, count, _ in share.each():
        layer = layers[kind] if layers is not None else layer_parameters(model, columns, kind, shards)
        trunk, experts = trunk + count * layer.trunk, experts + count * layer.experts
        largest = np.maximum(largest, np.where(count > 0, layer.total, 0))
        largest_block = np.maximum(largest_block, np.where(count > 0, layer.block, 0))
    trunk = trunk + ends
    matrices = np.zeros(len(columns))
    if count_matrices:
        matrices = _of_layers(model, columns, share, shards, lambda weight: weight.is_hidden_matrix)
    unpadded = on_rank(model, columns, share).total if np.any(np.asarray(shards) > 1) else trunk + experts
    return RankParameters(
        trunk=trunk,
        experts=experts,
        ends=np.asarray(ends),
        layer=largest,
        block=largest_block,
        padding=trunk + experts - unpadded,
        share=share,
        matrices=matrices,
    )


def embedding_copy(model: Model, columns: LayoutColumns, share: RankShare, shards: Array | int = 1) -> Array:
    """Elements of the last pipeline stage's copy of the embedding, for multi-token prediction; a tied head is one already."""
    if not model.mtp_depth or model.tied_embeddings:
        return np.zeros(len(columns))
    return np.asarray(share.head * columns.has_pipeline * on_tp_rank(embedding(model), model, columns, shards))


def partial_on_tp(
    model: Model, columns: LayoutColumns, share: RankShare, sequence_parallel: bool, shards: Array | int = 1
) -> Array:
    """Elements on a rank whose gradients are sums over the tp ranks, each of which has all of them and saw a part.

    Norms of queries and keys see a rank's own heads, routers what a rank's part of the experts sends back; with sequence
    parallelism everything that tp does not cut sees a slice of the sequence.
    """

    def wanted(weight: WeightShape) -> bool:
        return weight.partial or (sequence_parallel and weight.cut == "none")

    found = _of_layers(model, columns, share, shards, wanted)
    if not sequence_parallel:
        return found
    ends = share.embedding * on_tp_rank(positions(model), model, columns, shards)
    return np.asarray(found + ends + share.head * on_tp_rank([norm(model)], model, columns, shards))


def partial_experts_on_tp(model: Model, columns: LayoutColumns, share: RankShare, shards: Array) -> Array:
    """The same of routed experts: the biases of their outputs, of which each tp rank adds its share."""
    if model.moe is None or not model.mlp_bias:
        return np.zeros(len(columns))
    shards, slices = expert_slices(model, columns, shards)
    rows = model.moe.experts // columns.ep * slices
    return np.asarray(share.moe_layers * (rows + -rows % shards) * model.hidden / slices)


def never_deferred_experts(model: Model, columns: LayoutColumns, share: RankShare, shards: Array) -> Array:
    """Elements of routed experts on a rank whose gradients no split backward defers: biases."""
    each = _experts(model, columns, shards) if model.moe is not None else np.zeros(len(columns))
    return np.asarray(share.moe_layers * each * (1 - _expert_matrices(model, columns)))


def never_deferred(model: Model, columns: LayoutColumns, share: RankShare, shards: Array | int = 1) -> Array:
    """The same of all others: norms, biases, routers, embedding and head."""
    found = _of_layers(model, columns, share, shards, lambda weight: not weight.matmul)
    return np.asarray(found + share.moe_layers * router_bias(model) + on_rank(model, columns, share, shards).ends)


def _of_layers(
    model: Model, columns: LayoutColumns, share: RankShare, shards: Array | int, wanted: Callable[[WeightShape], bool]
) -> Array:
    """Elements of the wanted weights in all layers of a rank, routed experts left out."""

    found = np.zeros(len(columns))
    for kind, count, _ in share.each():
        own = [weight for weight in layer_weights(model, kind) if wanted(weight)]
        found = found + count * on_tp_rank(own, model, columns, shards)
    return found


# ---------------------------------------------------------------------------------------------------------------- states


@dataclass(frozen=True)
class StateBytes:
    """The playbook's four persistent owners on one rank."""

    parameters: Array
    master: Array
    gradients: Array
    optimizer: Array


def expert_shards(columns: LayoutColumns) -> Array:
    """Ranks that shard the same experts: of the data ranks, those that ep leaves them."""
    return np.asarray(np.maximum(1, columns.shards * columns.tp / columns.expert_cut / columns.ep))


def states(job: Job, columns: LayoutColumns, params: RankParameters, fp8_elements: Array | float = 0.0) -> StateBytes:
    """ZeRO divides each owner by the ranks that shard it; experts by the data ranks that ep leaves them.

    `fp8_elements` of the parameters are gathered in fp8. Beside adapters, frozen weights are in the compute format alone.
    """
    if job.adapter_rank is not None:
        return _states_with_adapters(job, columns, params)
    zero, shards = columns.zero, columns.shards
    among_experts = expert_shards(columns)

    def sharded(bytes_each: Array | float, is_sharded: Array) -> Array:
        cut, expert_cut = np.where(is_sharded, shards, 1), np.where(is_sharded, among_experts, 1)
        return np.asarray(bytes_each * (params.trunk / cut + params.experts / expert_cut))

    spec = job.optimizer_spec
    optimizer = sharded(spec.state_bytes, zero >= 1)
    if spec.matrices is not None:
        cut, expert_cut = np.where(zero >= 1, shards, 1), np.where(zero >= 1, among_experts, 1)
        matrices = params.matrices / cut + _expert_matrices(job.model, columns) * params.experts / expert_cut
        optimizer = optimizer + (spec.matrices.state_bytes - spec.state_bytes) * matrices
    keeps = columns.keep_gathered == 1
    compute, optimizer_sharded = compute_bytes(job), zero >= 1
    # ZeRO-3 that keeps its layers gathered holds the whole copy through the step, as ZeRO-2 does.
    parameters_sharded = (zero == 3) & ~keeps
    parameters = sharded(compute, parameters_sharded) - np.where((zero == 3) & keeps, fp8_saving(job, fp8_elements), 0.0)
    master = sharded(FP32 if has_master(job) else 0, optimizer_sharded)
    if job.framework.fused_blocks and job.optimizer == "adamw" and job.precision in ("bf16", "fp8"):
        master = np.where((shards == 1) | (zero == 0), sharded(FP32 - compute, optimizer_sharded), master)
    gradients_sharded = zero >= 2
    if job.framework.states == "fp32":
        # FSDP's shards are the fp32 weights. A copy in the compute format exists only where it is gathered; in fp32 a copy that
        # stays gathered exists beside them.
        no_copy = parameters_sharded & (shards > 1) & (job.precision != "fp32")
        parameters = np.where(no_copy | autocast(job, columns), 0.0, parameters)
        beside = optimizer_sharded & ~parameters_sharded & (shards > 1) & (job.precision == "fp32")
        master = np.where(beside, sharded(FP32, optimizer_sharded), master)
        # With one micro-batch each layer's gradients are reduce-scattered as soon as they are made, in ZeRO-1 too.
        gradients_sharded = gradients_sharded | (optimizer_sharded & (columns.gas == 1))
    if job.framework.accumulation == "unsharded":
        gradients_sharded = gradients_sharded & (columns.gas == 1)
    elif job.framework.accumulation == "unsharded-in-pipelines":
        gradients_sharded = gradients_sharded & (columns.pp == 1)
    whole = gradient_bytes(job) * (params.total - params.padding)
    in_shard = np.where(shards > 1, sharded_gradient_bytes(job), gradient_bytes(job))
    on_gpu = ~columns.offloads_states
    gradients = np.where(gradients_sharded, sharded(in_shard, gradients_sharded), whole)
    if job.framework.accumulation == "bf16-and-fp32":
        # Of ZeRO-1 those of backward, which the next micro-batch finds; of ZeRO-2 shards, from the first reduction.
        first = columns.gas == 1
        gradients = np.where((zero == 2) & first, 0.0, gradients)
        gradients = gradients + np.where((zero == 1) & ~first, compute * params.total, 0.0)
    if job.framework.accumulation == "stepped":  # the embedding's is the largest that is live
        gradients = gradient_bytes(job) * np.maximum(params.layer, params.ends)
    return StateBytes(
        parameters=np.where(columns.is_("offload", "parameters"), 0.0, parameters),
        master=np.where(on_gpu, master, 0.0),
        gradients=gradients,
        optimizer=np.where(on_gpu, optimizer, 0.0),
    )


def _states_with_adapters(job: Job, columns: LayoutColumns, params: RankParameters) -> StateBytes:
    nothing = np.zeros(len(columns))
    shards = fsdp_shards(job, columns)
    share = params.share
    total, alone = (adapters_on_rank(job, columns, share, of) for of in (shards, 1))
    layer = np.zeros(len(columns))
    for kind, count, _ in share.each():
        each = on_tp_rank(adapter_weights(job, kind), job.model, columns, shards)
        layer = np.maximum(layer, np.where(count > 0, each, 0.0))
    adapters = RankParameters(total, nothing, nothing, layer, layer, total - alone, share, nothing)
    trained = states(job.model_copy(update={"adapter_rank": None}), columns, adapters)
    here = ~columns.is_("offload", "parameters")
    frozen = np.zeros(len(columns))
    for elements, among in ((params.trunk, columns.shards), (params.experts, expert_shards(columns))):
        cut = np.where(columns.zero >= 1, among, 1)
        gathered = (columns.zero < 3) | (columns.keep_gathered == 1) | (cut == 1)
        # FSDP keeps its shards beside what it has gathered.
        beside = (job.framework.states == "fp32") & (cut > 1) & gathered
        frozen = frozen + compute_bytes(job) * elements * (np.where(gathered, 1, 1 / cut) + np.where(beside, 1 / cut, 0))
    return replace(trained, parameters=trained.parameters + np.where(here, frozen, 0.0))


@dataclass(frozen=True)
class Float8Gather:
    """What ZeRO-3 gathers in fp8: one byte where others take two.

    These are the weights of fp8 matmuls, in an engine that gathers so (`fp8_gather`). First and last block, head and embedding
    stay in bf16, as `train.fp8_keep` has it by default, and so do matrices whose sizes the kernels do not take.
    """

    elements: Array
    scales: Array
    """on which ranks agree once a step"""

    def scaled(self, factor: Array | float) -> Float8Gather:
        return Float8Gather(np.asarray(factor * self.elements), np.asarray(factor * self.scales))

    def __add__(self, other: Float8Gather) -> Float8Gather:
        return Float8Gather(np.asarray(self.elements + other.elements), np.asarray(self.scales + other.scales))


def fp8_saving(job: Job, elements: Array | float) -> Array:
    """Bytes that so many elements need less, gathered in fp8."""
    return np.asarray((compute_bytes(job) - 1) * elements)


def fp8_of_layer(job: Job, columns: LayoutColumns, kind: LayerKind) -> Float8Gather:
    """Of one layer, if it is neither the first nor the last."""
    split = (columns.pp > 1) & columns.split_backward
    return _fp8_of_layer(job, columns, kind, split).scaled(~columns.is_("offload", "parameters"))


def fp8_on_rank(job: Job, columns: LayoutColumns, share: RankShare) -> Float8Gather:
    total = Float8Gather(np.zeros(len(columns)), np.zeros(len(columns)))
    for kind, layers, _ in share.each():
        if np.any(layers):
            inner = np.maximum(0, layers - _end_layers(job.model, share, kind))
            total = total + fp8_of_layer(job, columns, kind).scaled(inner)
    return total


def fp8_layer_mean(job: Job, columns: LayoutColumns, kind: LayerKind) -> Array:
    """Elements of a layer, averaged over the model with its first and last layer."""
    found = _fp8_of_layer(job, columns, kind, split=False)
    return np.asarray(found.elements * max(0, job.model.all_layers - 2) / job.model.all_layers)


def fp8_of_largest_layer(job: Job, columns: LayoutColumns, share: RankShare) -> Array:
    """Elements of the largest layer on a rank, as one that is neither first nor last."""
    found = np.zeros(len(columns))
    for kind, layers, _ in share.each():
        if np.any(layers):
            found = np.maximum(found, np.where(layers > 0, fp8_of_layer(job, columns, kind).elements, 0.0))
    return found


def fits_fp8(rows: int, columns: Array) -> Array:
    multiple = FP8_MULTIPLE["tensor"]
    return np.asarray((rows % multiple == 0) & (columns % multiple == 0))


def _fp8_of_layer(job: Job, columns: LayoutColumns, kind: LayerKind, split: Array | bool) -> Float8Gather:
    model, tp, none = job.model, columns.tp, np.zeros(len(columns))
    if job.precision != "fp8" or not job.framework.fp8_gather or model.mla is not None:
        return Float8Gather(none, none)
    gathers = (columns.zero == 3) & (columns.shards > 1)
    h, (inputs, output) = model.hidden, _mixer_widths(model, columns, kind)
    together = (tp > 1) | split  # what has one input is one autograd function, in fp8 together or not at all
    all_fit = np.all([fits_fp8(h, width) for width in inputs], axis=0) if inputs else np.asarray(True)
    width = {"dense": model.ffn, "moe": model.moe.shared_expert_ffn if model.moe else 0, "none": 0}[kind.mlp] / tp
    fits = [(width, fits_fp8(h, width) & (all_fit | ~together)) for width in inputs]
    fits += [(output, fits_fp8(h, output))] if inputs else []
    fits += [(width, fits_fp8(h, width) & (width > 0))] * (3 if model.gated else 2)
    # A fused block has one matmul for q, k and v, and one for gate and up, with one scale each.
    scales = np.where(uses_fused_blocks(job, columns), 4, sum(1 * there for _, there in fits))
    elements = h * sum(width * there for width, there in fits)
    return Float8Gather(np.where(gathers, elements, 0.0), np.where(gathers, scales, 0))


def _mixer_widths(model: Model, columns: LayoutColumns, kind: LayerKind) -> tuple[list[Array], Array]:
    """On one rank: rows of the matrices that a layer's attention, or what is in its place, begins with, and the width of the
    last.
    """
    tp, linear, mamba = columns.tp, model.linear_attention, model.mamba
    if kind.mixer == "linear" and linear is not None:
        rows = [linear.key_dim] * 2 + [linear.value_dim] * 2 + [linear.value_heads] * 2
        return [each / tp for each in rows], linear.value_dim / tp
    if kind.mixer == "mamba" and mamba is not None:
        rows = [mamba.inner_dim] * 2 + [mamba.group_dim] * 2 + [mamba.heads]
        return [each / tp for each in rows], mamba.inner_dim / tp
    if kind.mixer == "none":
        return [], 0 * tp
    q, kv = model.q_dim / tp, model.kv_dim / np.minimum(tp, model.kv_heads)
    return [q, *[q] * model.attention_gate, kv, kv], q


def fused_fp8_layers(job: Job, columns: LayoutColumns, share: RankShare) -> Array:
    """Dense layers of a share in fused fp8 blocks: all but the model's first and last (the default of `train.fp8_keep`)."""
    inner = sum(np.maximum(0, count - _end_layers(job.model, share, kind)) for kind, count, _ in share.each())
    return np.where(uses_fused_blocks(job, columns) & (job.precision == "fp8"), inner, 0)


def _end_layers(model: Model, share: RankShare, kind: LayerKind) -> Array:
    """First and last layer of the model, where a rank has them and they are of that kind."""
    first, last = (model.kind(index) == kind for index in (0, model.all_layers - 1))
    if model.all_layers == 1:
        return share.embedding * first
    return np.asarray(share.embedding * first + share.head * last)
