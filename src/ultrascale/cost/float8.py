"""Which weights ZeRO-3 gathers in fp8: one byte where others take two, and no cast where they meet.

Those of products in fp8, in an engine that gathers so (`fp8_gather`); first and last block, head and embedding stay in bf16, as
`train.fp8_keep` has it by default, and so do matrices whose sizes the kernels do not take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.activations import compute_bytes, lean, split_backward
from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.cost.stages import RankShare
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.training import FP8_MULTIPLE


@dataclass(frozen=True)
class Float8Gather:
    """What is gathered in fp8 of something on one rank."""

    elements: Array
    scales: Array
    """on which ranks agree once a step"""

    def scaled(self, factor: Array | float) -> Float8Gather:
        return Float8Gather(np.asarray(factor * self.elements), np.asarray(factor * self.scales))

    def __add__(self, other: Float8Gather) -> Float8Gather:
        return Float8Gather(np.asarray(self.elements + other.elements), np.asarray(self.scales + other.scales))


def less(job: Job, elements: Array) -> Array:
    """Bytes that so many elements are short of, gathered in fp8."""
    return np.asarray((compute_bytes(job) - 1) * elements)


def layer(job: Job, columns: LayoutColumns, moe: bool) -> Float8Gather:
    """Of one layer, if it is neither the first nor the last."""
    split = (columns.pp > 1) & split_backward(columns)
    return _layer(job, columns, moe, split).scaled(~columns.is_("offload", "parameters"))


def _layer(job: Job, columns: LayoutColumns, moe: bool, split: Array | bool) -> Float8Gather:
    model, tp, none = job.model, columns.tp, np.zeros(len(columns))
    if job.precision != "fp8" or not job.framework.fp8_gather or model.mla is not None:
        return Float8Gather(none, none)
    gathers = (columns.zero == 3) & (columns.shards > 1)
    h, q, kv = model.hidden, model.q_dim / tp, model.kv_dim / np.minimum(tp, model.kv_heads)
    by_hand = (tp > 1) | split  # products of one input, which are in fp8 together
    q_fits = fits(h, q) & (fits(h, kv) | ~by_hand)
    kv_fits = fits(h, kv) & (fits(h, q) | ~by_hand)
    width, matrices = _mlp_width(model, moe) / tp, (3 if model.gated else 2)
    mlp_fits = fits(h, width) & (width > 0)
    elements = h * (q * q_fits + 2 * kv * kv_fits + q * fits(h, q) + matrices * width * mlp_fits)
    # A fused block has one product for q, k and v, and one for gate and up, with one scale each.
    scales = np.where(lean(job, columns), 4, 1 * q_fits + 2 * kv_fits + fits(h, q) + matrices * mlp_fits)
    return Float8Gather(np.where(gathers, elements, 0.0), np.where(gathers, scales, 0))


def on_rank(job: Job, columns: LayoutColumns, share: RankShare) -> Float8Gather:
    found = layer(job, columns, moe=False).scaled(np.maximum(0, share.dense_layers - _ends(job.model, share, moe=False)))
    if job.model.moe is None:
        return found
    return found + layer(job, columns, moe=True).scaled(np.maximum(0, share.moe_layers - _ends(job.model, share, moe=True)))


def mean(job: Job, columns: LayoutColumns, moe: bool) -> Array:
    """Elements of a layer, averaged over the model with its first and last layer (components.py)."""
    return np.asarray(_layer(job, columns, moe, split=False).elements * max(0, job.model.layers - 2) / job.model.layers)


def block(job: Job, columns: LayoutColumns, share: RankShare) -> Array:
    """Elements of the largest layer on a rank, as one that is neither first nor last."""
    dense, moe = (layer(job, columns, each).elements for each in (False, True))
    return np.where(share.moe_layers > 0, moe if job.model.moe is not None else 0.0, dense)


def fits(rows: int, columns: Array) -> Array:
    multiple = FP8_MULTIPLE["tensor"]
    return np.asarray((rows % multiple == 0) & (columns % multiple == 0))


def _ends(model: Model, share: RankShare, moe: bool) -> Array:
    """First and last layer of the model, where a rank has them and they are of that kind."""
    first, last = (model.is_moe_layer(index) == moe for index in (0, model.layers - 1))
    if model.layers == 1:
        return share.embedding * first
    return np.asarray(share.embedding * first + share.head * last)


def _mlp_width(model: Model, moe: bool) -> int:
    if not moe or model.moe is None:
        return model.ffn
    return (model.moe.shared_expert_ffn or 0) if model.moe.shared_experts else 0
