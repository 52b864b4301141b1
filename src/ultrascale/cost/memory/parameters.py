"""Parameters on one rank: every weight tensor as data, how tp and ep cut it, and FSDP's padding of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.stages import RankShare
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model


@dataclass(frozen=True)
class WeightShape:
    """One tensor: its rows, among which FSDP shards it, and the elements of a row."""

    rows: int
    width: float = 1.0
    cut: str = "none"
    """what tp cuts: "rows"; "kv rows", never below one kv head, which is repeated tp / kv_heads times; "width"; or "none" """
    matmul: bool = True
    """multiplied by activations, so that a schedule with a split backward defers its gradient"""
    partial: bool = False
    """every tp rank has all of it but sees only its own heads or experts: its gradient is summed over tp"""

    @property
    def elements(self) -> float:
        return self.rows * self.width

    def padding(self, columns: LayoutColumns, kv_heads: int, shards: Array) -> Array:
        """Elements that FSDP2 adds on one rank so that its rows divide among `shards`."""
        cut = _cut(self.cut, columns, kv_heads)
        rows, width = (self.rows, self.width // cut) if self.cut == "width" else (self.rows // cut, self.width)
        return np.asarray(-rows % shards * width)


def _cut(cut: str, columns: LayoutColumns, kv_heads: int) -> Array | int:
    if cut == "none":
        return 1
    return np.minimum(columns.tp, kv_heads) if cut == "kv rows" else columns.tp


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
        total = total + sum(weight.padding(columns, model.kv_heads, np.asarray(shards)) for weight in weights)
    return np.asarray(total)


def norm(model: Model) -> WeightShape:
    return WeightShape(model.hidden, 2 if model.norm == "layernorm" else 1, matmul=False)


def attention(model: Model) -> list[WeightShape]:
    h, bias = model.hidden, [WeightShape(model.hidden, matmul=False)] * model.attention_output_bias
    if model.mla is not None:
        return _latent_attention(model) + bias
    q, kv = (model.q_dim, "rows"), (model.kv_dim, "kv rows")
    weights = [WeightShape(rows, h, cut) for rows, cut in (q, kv, kv)] + [WeightShape(h, model.q_dim, "width")]
    if model.qkv_bias:
        weights += [WeightShape(rows, 1, cut, matmul=False) for rows, cut in (q, kv, kv)]
    return weights + [WeightShape(model.head_dim, matmul=False, partial=True)] * (2 * model.qk_norm) + bias


def _latent_attention(model: Model) -> list[WeightShape]:
    """DeepSeek's: down-projections to latents on every tp rank, up-projections cut by heads, biases on the former."""
    mla, h, query = model.mla, model.hidden, model.heads * model.qk_head_dim
    assert mla is not None
    down = mla.kv_lora_rank + mla.qk_rope_head_dim
    weights = [
        WeightShape(down, h),
        WeightShape(mla.kv_lora_rank, matmul=False),
        WeightShape(model.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, "rows"),
        WeightShape(h, model.heads * mla.v_head_dim, "width"),
    ]
    biased = [down]
    if mla.q_lora_rank is None:
        weights.append(WeightShape(query, h, "rows"))
    else:
        weights += [WeightShape(mla.q_lora_rank, h), WeightShape(mla.q_lora_rank, matmul=False)]
        weights.append(WeightShape(query, mla.q_lora_rank, "rows"))
        biased.append(mla.q_lora_rank)
    return weights + [WeightShape(rows, matmul=False) for rows in biased if model.qkv_bias]


def mlp(model: Model, width: int) -> list[WeightShape]:
    if not width:
        return []
    inner = [WeightShape(width, model.hidden, "rows")] * (1 + model.gated)
    biases = [WeightShape(width, 1, "rows", matmul=False)] * (1 + model.gated) + [WeightShape(model.hidden, matmul=False)]
    return [*inner, WeightShape(model.hidden, width, "width"), *(biases if model.mlp_bias else [])]


def router(model: Model) -> list[WeightShape]:
    """What chooses experts in one layer, with the gate of a shared one. Its balancing bias is a buffer that no rank shards."""
    moe = model.moe
    if moe is None:
        return []
    weights = [WeightShape(moe.experts, model.hidden, matmul=False, partial=True)]
    return weights + [WeightShape(1, model.hidden, matmul=False, partial=True)] * moe.shared_gate


def router_bias(model: Model) -> float:
    return float(model.moe.experts * model.moe.router_bias) if model.moe is not None else 0.0


def shared_expert(model: Model) -> list[WeightShape]:
    moe = model.moe
    return mlp(model, (moe.shared_expert_ffn or 0) if moe is not None and moe.shared_experts else 0)


def layer_weights(model: Model, moe: bool) -> list[WeightShape]:
    """Of one layer, routed experts left out."""
    trunk = [*attention(model), norm(model), norm(model)]
    return [*trunk, *(router(model) + shared_expert(model) if moe else mlp(model, model.ffn))]


def positions(model: Model) -> list[WeightShape]:
    return [WeightShape(model.max_positions or 0, model.hidden, matmul=False)] if model.positions == "learned" else []


def vocabulary(model: Model) -> WeightShape:
    """The matrix of the embedding, and of the head."""
    return WeightShape(model.vocab, model.hidden, "rows")


def embedding(model: Model) -> list[WeightShape]:
    return [vocabulary(model), *positions(model)]


def fsdp_shards(job: Job, columns: LayoutColumns) -> Array:
    """Ranks among which FSDP shards the rows of each tensor; 1: it does not."""
    return np.where((columns.zero > 0) & (job.framework.states == "fp32"), columns.shards, 1)


@dataclass(frozen=True)
class LayerParameters:
    dense: Array
    """one dense layer on one rank"""
    moe: Array
    """one MoE layer without its routed experts"""
    experts: Array
    """the routed experts of one MoE layer on one rank"""


def per_layer(model: Model, columns: LayoutColumns, shards: Array | int = 1) -> LayerParameters:
    """`shards`: ranks among whom the rows of each tensor are padded to divide."""
    dense = on_tp_rank(layer_weights(model, moe=False), model, columns, shards)
    if model.moe is None:
        zero = np.zeros(len(columns))
        return LayerParameters(dense, zero, zero)
    moe = on_tp_rank(layer_weights(model, moe=True), model, columns, shards) + router_bias(model)
    return LayerParameters(dense, moe, _experts(model, columns, np.asarray(shards)))


def _experts(model: Model, columns: LayoutColumns, shards: Array) -> Array:
    """All experts of a layer on one rank. FSDP shards their stack, in slices where shards are a multiple of experts."""
    moe, cut = model.moe, columns.expert_cut
    assert moe is not None
    each = sum(weight.elements / (cut if weight.cut != "none" else 1) for weight in mlp(model, moe.expert_ffn))
    elements = np.asarray(each * moe.experts / columns.ep)
    shards = np.maximum(1, shards * columns.tp // cut // columns.ep)
    if not np.any(shards > 1):
        return elements
    rows, width, h = moe.experts // columns.ep, moe.expert_ffn // cut, model.hidden
    slices = np.maximum(1, shards // rows)
    divides = (rows * slices == shards) & (width % slices == 0) & (h % slices == 0)
    slices = np.where(divides, slices, 1)
    return np.asarray(elements + -(rows * slices) % shards * ((2 + model.gated) * h * width / slices))


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
    """the same as FSDP groups it: without experts where ep cuts them, which are a group of their own"""
    padding: Array
    """of these, what only makes rows divide among shards"""

    @property
    def total(self) -> Array:
        return np.asarray(self.trunk + self.experts)


def on_rank(model: Model, columns: LayoutColumns, share: RankShare, shards: Array | int = 1) -> RankParameters:
    layer = per_layer(model, columns, shards)
    # A tied head is the embedding's own where the model is in one piece: two chunks of a rank have a copy each.
    owns_head = share.head * np.where(model.tied_embeddings & (columns.pp == 1), 0, 1)
    ends = share.embedding * on_tp_rank(embedding(model), model, columns, shards)
    ends = ends + owns_head * on_tp_rank([vocabulary(model)], model, columns, shards)
    ends = ends + share.head * on_tp_rank([norm(model)], model, columns, shards)
    dense_layer = np.where(share.dense_layers > 0, layer.dense, 0)
    moe_layer, moe_block = (
        np.where(share.moe_layers > 0, each, 0)
        for each in (layer.moe + layer.experts, layer.moe + np.where(columns.ep > 1, 0, layer.experts))
    )
    trunk, experts = share.dense_layers * layer.dense + share.moe_layers * layer.moe + ends, share.moe_layers * layer.experts
    unpadded = on_rank(model, columns, share).total if np.any(np.asarray(shards) > 1) else trunk + experts
    return RankParameters(
        trunk=trunk,
        experts=experts,
        ends=np.asarray(ends),
        layer=np.maximum(dense_layer, moe_layer),
        block=np.maximum(dense_layer, moe_block),
        padding=trunk + experts - unpadded,
    )


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


def never_deferred(model: Model, columns: LayoutColumns, share: RankShare, shards: Array | int = 1) -> Array:
    """Elements on a rank whose gradients no split backward defers: norms, biases, routers, embedding and head."""
    found = _of_layers(model, columns, share, shards, lambda weight: not weight.matmul)
    return np.asarray(found + share.moe_layers * router_bias(model) + on_rank(model, columns, share, shards).ends)


def _of_layers(
    model: Model, columns: LayoutColumns, share: RankShare, shards: Array | int, wanted: Callable[[WeightShape], bool]
) -> Array:
    """Elements of the wanted weights in all layers of a rank, routed experts left out."""
    dense, moe = (
        on_tp_rank([weight for weight in layer_weights(model, moe) if wanted(weight)], model, columns, shards)
        for moe in (False, True)
    )
    return np.asarray(share.dense_layers * dense + share.moe_layers * moe)
