"""Parameters on one rank: which tensors tp cuts, which the kv heads limit, which every rank repeats, which ep spreads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost import padding
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.stages import RankShare
from ultrascale.specs.model import Model


@dataclass(frozen=True)
class Shardable:
    """Element counts by how tensor parallelism treats them."""

    cut: float = 0.0
    """cut by tp: columns of the first matrix, rows of the second, heads, vocabulary"""
    kv: float = 0.0
    """cut by tp, but never below one kv head: with kv_heads < tp each is repeated tp / kv_heads times"""
    whole: float = 0.0
    """on every tp rank: norms, biases of row-parallel matrices, routers, MLA's down-projections, positions"""

    def on_rank(self, tp: Array, kv_heads: int) -> Array:
        return np.asarray(self.cut / tp + self.kv / np.minimum(tp, kv_heads) + self.whole)

    @property
    def total(self) -> float:
        return self.cut + self.kv + self.whole


def attention(model: Model) -> Shardable:
    h, bias = model.hidden, float(model.qkv_bias)
    out_bias = h * float(model.attention_output_bias)
    if model.mla is None:
        norms = 2.0 * model.head_dim * model.qk_norm
        return Shardable(
            cut=h * model.q_dim + bias * model.q_dim + model.q_dim * h,
            kv=2 * (h * model.kv_dim + bias * model.kv_dim),
            whole=norms + out_bias,
        )
    mla = model.mla
    query = model.heads * model.qk_head_dim
    down: float = h * (mla.kv_lora_rank + mla.qk_rope_head_dim) + mla.kv_lora_rank
    up = mla.kv_lora_rank * model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if mla.q_lora_rank is None:
        query_up = h * query
    else:
        down += h * mla.q_lora_rank + mla.q_lora_rank
        query_up = mla.q_lora_rank * query
    # The biases of attention_bias sit on the down-projections (and on the output), as in DeepSeek's own modules.
    down += bias * (mla.kv_lora_rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0))
    return Shardable(cut=query_up + up + model.heads * mla.v_head_dim * h, whole=down + out_bias)


def mlp(model: Model, width: int) -> Shardable:
    matrices, bias = (3 if model.gated else 2), float(model.mlp_bias)
    return Shardable(
        cut=matrices * model.hidden * width + bias * (matrices - 1) * width, whole=bias * model.hidden if width else 0
    )


def norms(model: Model) -> float:
    """The two norms of a layer: one vector each, two for LayerNorm's bias."""
    return 2.0 * model.hidden * (2 if model.norm == "layernorm" else 1)


def embedding(model: Model) -> Shardable:
    positions = model.hidden * (model.max_positions or 0) if model.positions == "learned" else 0
    return Shardable(cut=model.vocab * model.hidden, whole=positions)


def head(model: Model) -> Shardable:
    """The output matrix. A tied one is the embedding's, but a last stage without the embedding holds its own copy."""
    return Shardable(cut=model.vocab * model.hidden)


def final_norm(model: Model) -> float:
    return norms(model) / 2


def router(model: Model) -> float:
    """What chooses experts in one layer, with the gate of a shared one."""
    moe = model.moe
    if moe is None:
        return 0.0
    return moe.experts * model.hidden + moe.experts * moe.router_bias + model.hidden * moe.shared_gate


def partial_on_tp(model: Model, share: RankShare, sequence_parallel: bool, shards: Array | int = 1) -> Array:
    """Elements on a rank whose gradients are sums over the tp ranks, each of which has all of them and saw a part.

    Norms of queries and keys see a rank's own heads, routers what a rank's part of the experts sends back; with sequence
    parallelism everything that tp does not cut sees a slice of the sequence. All of them are vectors or have experts' rows.
    """
    moe = model.moe
    cut = np.asarray(shards)
    chooses = np.asarray(0.0)
    if moe is not None:
        chooses = router(model) - moe.experts * moe.router_bias + padding.added(padding.router(model), cut)
    head_norms = 2.0 * (model.head_dim + -model.head_dim % cut) * model.qk_norm if model.mla is None else 0.0
    if not sequence_parallel:
        return np.asarray(share.layers * head_norms + share.moe_layers * chooses)
    wider = (model.hidden + -model.hidden % cut) / model.hidden  # biases and norms of the model's width
    trunk = (attention(model).whole - (0.0 if model.mla else 2.0 * model.head_dim * model.qk_norm)) * wider + head_norms
    trunk = trunk + norms(model) * wider
    dense = mlp(model, model.ffn).whole * wider if model.ffn else 0.0
    ends = share.embedding * embedding(model).whole + share.head * final_norm(model) * wider
    return np.asarray(share.layers * trunk + share.dense_layers * dense + share.moe_layers * chooses + ends)


def outside_products(model: Model, columns: LayoutColumns, share: RankShare, shards: Array | int = 1) -> Array:
    """Elements on a rank whose gradients no schedule puts off: norms, biases, routers, embedding and head."""
    cut = np.asarray(shards)
    head_norms = 2.0 * (model.head_dim + -model.head_dim % cut) * model.qk_norm if model.mla is None else 0.0
    vectors = norms(model) + padding.added(padding.norms(model, 2), cut) + head_norms
    vectors = vectors + padding.biases(model, columns, cut)
    layers = share.layers * vectors + share.moe_layers * (router(model) + padding.added(padding.router(model), cut))
    layers = layers + share.dense_layers * padding.mlp_biases(model, columns, cut)
    return np.asarray(layers + on_rank(model, columns, share, shards).ends)


@dataclass(frozen=True)
class LayerParameters:
    dense: Array
    """one dense layer on one rank"""
    moe: Array
    """one MoE layer without its routed experts"""
    experts: Array
    """the routed experts of one MoE layer on one rank"""


def per_layer(model: Model, columns: LayoutColumns, shards: Array | int = 1) -> LayerParameters:
    """`shards`: ranks among whom the rows of each tensor are made to divide."""
    tp, cut = columns.tp, np.asarray(shards)
    trunk = attention(model).on_rank(tp, model.kv_heads) + norms(model)
    trunk = trunk + padding.added((*padding.attention(model, columns), *padding.norms(model, 2)), cut)
    dense = trunk + mlp(model, model.ffn).on_rank(tp, model.kv_heads)
    dense = dense + padding.added(padding.mlp(model, columns, model.ffn), cut)
    if model.moe is None:
        zero = np.zeros(len(columns))
        return LayerParameters(dense, zero, zero)
    moe = model.moe
    width = (moe.shared_expert_ffn or 0) if moe.shared_experts else 0
    shared = (mlp(model, width) if width else Shardable()).on_rank(tp, model.kv_heads)
    shared = shared + (padding.added(padding.mlp(model, columns, width), cut) if width else 0.0)
    expert = mlp(model, moe.expert_ffn).on_rank(columns.expert_cut, model.kv_heads) * moe.experts / columns.ep
    expert_cut = np.maximum(1, cut * tp // columns.expert_cut // columns.ep)
    return LayerParameters(
        dense,
        trunk + router(model) + shared + padding.added(padding.router(model), cut),
        expert + padding.added(padding.experts(model, columns, expert_cut), expert_cut),
    )


@dataclass(frozen=True)
class RankParameters:
    """Elements on one rank. Experts are apart because their data-parallel group is ep times smaller."""

    trunk: Array
    experts: Array
    ends: Array
    """embedding, head and final norm, already counted in trunk"""
    layer: Array
    """the largest single layer, experts included: what ZeRO-3 gathers at a time"""
    block: Array
    """the same as FSDP groups it: without experts where ep cuts them, which are gathered apart"""

    padding: Array
    """of these, what only makes rows divide among shards"""

    @property
    def total(self) -> Array:
        return np.asarray(self.trunk + self.experts)


def on_rank(model: Model, columns: LayoutColumns, share: RankShare, shards: Array | int = 1) -> RankParameters:
    layer, cut = per_layer(model, columns, shards), np.asarray(shards)
    # A tied head is the embedding's own where the model is in one piece: two chunks of a rank have a copy each.
    owns_head = share.head * np.where(model.tied_embeddings & (columns.pp == 1), 0, 1)
    rest = padding.added(padding.vocabulary(model, columns), cut)
    ends = share.embedding * (embedding(model).on_rank(columns.tp, model.kv_heads) + rest)
    ends = ends + owns_head * (head(model).on_rank(columns.tp, model.kv_heads) + rest)
    ends = ends + share.head * (final_norm(model) + padding.added(padding.norms(model, 1), cut))
    dense_layer = np.where(share.dense_layers > 0, layer.dense, 0)
    moe_layer, moe_block = (
        np.where(share.moe_layers > 0, each, 0)
        for each in (layer.moe + layer.experts, layer.moe + np.where(columns.ep > 1, 0, layer.experts))
    )
    trunk, experts = share.dense_layers * layer.dense + share.moe_layers * layer.moe + ends, share.moe_layers * layer.experts
    bare = on_rank(model, columns, share).total if np.any(cut > 1) else trunk + experts
    return RankParameters(
        trunk=trunk,
        experts=experts,
        ends=np.asarray(ends),
        layer=np.maximum(dense_layer, moe_layer),
        block=np.maximum(dense_layer, moe_block),
        padding=trunk + experts - bare,
    )
