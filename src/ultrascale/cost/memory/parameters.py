"""Parameters on one rank: how tp and ep cut the weights of a model, and FSDP's padding of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.stages import RankShare
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.weights import WeightShape, embedding, layer_weights, mlp, norm, positions, router_bias, vocabulary


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
