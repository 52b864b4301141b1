"""What FSDP2 adds so that the rows of every tensor divide among its shards: the first ranks hold more by it, all send more."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model

Shapes = Iterable[tuple[Array | float, Array | float]]
"""rows of a tensor on one rank before ZeRO cuts them, and what is in a row"""


def shards_of(job: Job, columns: LayoutColumns) -> Array:
    """Parts into which each tensor is cut by its rows; 1: by nobody."""
    cuts = (columns.zero > 0) & (job.framework.states == "fp32")
    return np.where(cuts, columns.shards, 1)


def added(shapes: Shapes, shards: Array) -> Array:
    if not np.any(shards > 1):
        return np.asarray(0.0 * shards)
    return np.asarray(sum(((-rows) % shards * each for rows, each in shapes), 0.0 * shards))


def attention(model: Model, columns: LayoutColumns) -> Shapes:
    if model.mla is not None:
        return
    h, tp = model.hidden, columns.tp
    q, kv = model.q_dim // tp, model.kv_dim // np.minimum(tp, model.kv_heads)
    for rows in (q, kv, kv):
        yield rows, h + model.qkv_bias * 1
    yield h, q
    if model.attention_output_bias:
        yield h, 1
    if model.qk_norm:
        yield from [(model.head_dim, 1)] * 2


def keys(model: Model, columns: LayoutColumns, shards: Array) -> Array:
    """Of one layer's keys and values, with their biases."""
    rows = model.kv_dim // np.minimum(columns.tp, model.kv_heads)
    return added([(rows, 2 * (model.hidden + model.qkv_bias * 1))], shards)


def biases(model: Model, columns: LayoutColumns, shards: Array) -> Array:
    """Of one layer's attention, with what is added."""
    if model.mla is not None:
        return 0.0 * columns.tp
    q, kv = model.q_dim // columns.tp, model.kv_dim // np.minimum(columns.tp, model.kv_heads)
    of_products = _whole(q, shards) + 2 * _whole(kv, shards)
    return np.asarray(model.qkv_bias * of_products + model.attention_output_bias * _whole(model.hidden, shards))


def mlp_biases(model: Model, columns: LayoutColumns, shards: Array) -> Array:
    inner = (1 + model.gated) * _whole(model.ffn // columns.tp, shards)
    return np.asarray(model.mlp_bias * (inner + _whole(model.hidden, shards)))


def _whole(rows: Array | int, shards: Array) -> Array:
    return np.asarray(rows + (-rows) % shards)


def norms(model: Model, count: int) -> Shapes:
    yield model.hidden, count * (2 if model.norm == "layernorm" else 1)


def mlp(model: Model, columns: LayoutColumns, width: int) -> Shapes:
    inner, bias = width // columns.tp, 1 * model.mlp_bias
    yield inner, (1 + model.gated) * (model.hidden + bias)
    yield model.hidden, inner + bias


def router(model: Model) -> Shapes:
    if model.moe is not None:
        yield model.moe.experts, model.hidden
        if model.moe.shared_gate:
            yield 1, model.hidden


def experts(model: Model, columns: LayoutColumns, shards: Array) -> Shapes:
    """In slices, where shards are a multiple of experts (parallel/zero.py)."""
    if model.moe is not None:
        rows, width, h = model.moe.experts // columns.ep, model.moe.expert_ffn // columns.expert_cut, model.hidden
        slices = np.maximum(1, shards // rows)
        divides = (rows * slices == shards) & (width % slices == 0) & (h % slices == 0)
        slices = np.where(divides, slices, 1)
        yield rows * slices, (2 + model.gated) * h * width / slices


def vocabulary(model: Model, columns: LayoutColumns) -> Shapes:
    yield model.vocab // columns.tp, model.hidden
