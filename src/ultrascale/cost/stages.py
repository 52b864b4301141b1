"""Which layers sit on which pipeline rank: balanced, with the head counted as the layers it weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ultrascale.cost.columns import CHOICES, Array, LayoutColumns
from ultrascale.schedules import REGISTRY, stages_of
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.weights import multiplied_elements, vocabulary


@lru_cache(maxsize=4096)
def split_layers(layers: int, ranks: int, virtual_stages: int, head_layers: float) -> tuple[int, ...]:
    """Layers per chunk, in the order of the model, with the smallest slowest chunk; at least one each.

    The last chunk also computes the head, worth `head_layers` layers. Surplus layers go to the last loop first, so that the
    chunks that fill and drain the pipeline are the small ones, and there to the ranks after the first, because the first
    holds the most micro-batches in flight and the embedding.
    """
    chunks = ranks * virtual_stages
    if chunks == 1:
        return (layers,)
    # The others' share falls and the last chunk's grows with its layers: the best is next to where the two meet.
    meet = int((layers - (chunks - 1) * head_layers) / chunks)
    last = min(
        range(max(1, meet - 2), max(2, min(meet + 3, layers - chunks + 2))),
        key=lambda count: (max(-(-(layers - count) // (chunks - 1)), count + head_layers), -count),
    )
    even, surplus = divmod(layers - last, chunks - 1)
    counts = [even] * (chunks - 1) + [last]
    order = [loop * ranks + rank for loop in reversed(range(virtual_stages)) for rank in (*range(1, ranks), 0)]
    for chunk in [chunk for chunk in order if chunk != chunks - 1][:surplus]:
        counts[chunk] += 1
    return tuple(counts)


@lru_cache(maxsize=4096)
def nanotron_stage_split(layers: int, ranks: int, head_layers: float) -> tuple[int, ...]:
    """Layers per stage as nanotron deals them out: a stage closes with the block that reaches its share of the whole cost.

    Early stages are so never lighter than the mean and the last never heavier; each later stage keeps a layer at least.
    """
    share = (layers + head_layers) / ranks
    ends = [min(math.ceil(share * (rank + 1)), layers - (ranks - 1 - rank)) for rank in range(ranks - 1)]
    return tuple(np.diff((0, *ends, layers)).tolist())


def head_in_layers(model: Model) -> float:
    """What the head weighs against a layer: the last pipeline stage gets that many layers less."""
    return vocabulary(model).elements / multiplied_elements(model, moe=model.moe_layers > 0)


def chunk_layers(job: Job, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    model, split = job.model, job.framework.stage_split
    if split == "nanotron" and virtual_stages == 1:
        return nanotron_stage_split(model.layers, ranks, head_in_layers(model))
    counted = {"layers": 0.0, "layers-and-head": 1.0}
    return split_layers(model.layers, ranks, virtual_stages, counted.get(split, head_in_layers(model)))


@lru_cache(maxsize=512)
def chunk_table(ranks: int, virtual_stages: int, v_shaped: bool) -> Array:
    """Global chunk indices of all ranks: ranks × virtual stages."""
    return np.asarray([stages_of(rank, ranks, virtual_stages, v_shaped) for rank in range(ranks)])


@dataclass(frozen=True)
class RankShare:
    """What one pipeline rank holds, per row."""

    rank: Array
    dense_layers: Array
    moe_layers: Array
    embedding: Array
    head: Array

    @property
    def layers(self) -> Array:
        return np.asarray(self.dense_layers + self.moe_layers)


def rank_shares(job: Job, ranks: int, virtual_stages: int, v_shaped: bool) -> tuple[tuple[int, ...], ...]:
    """(dense layers, MoE layers, embedding, head) of every rank."""
    return _rank_shares(job.model, chunk_layers(job, ranks, virtual_stages), ranks, virtual_stages, v_shaped)


@lru_cache(maxsize=4096)
def _rank_shares(
    model: Model, counts: tuple[int, ...], ranks: int, virtual_stages: int, v_shaped: bool
) -> tuple[tuple[int, ...], ...]:
    ends = np.cumsum((0, *counts))
    dense_until = model.layers if model.moe is None else model.moe.dense_layers
    shares = []
    for rank in range(ranks):
        chunks = stages_of(rank, ranks, virtual_stages, v_shaped)
        dense = sum(int(max(0, min(ends[c + 1], dense_until) - ends[c])) for c in chunks)
        total = sum(counts[c] for c in chunks)
        shares.append((dense, total - dense, int(0 in chunks), int(len(counts) - 1 in chunks)))
    return tuple(shares)


def chunk_shares(job: Job, ranks: int, virtual_stages: int) -> RankShare:
    """Every chunk as if it were a rank of its own."""
    model = job.model
    counts = np.asarray(chunk_layers(job, ranks, virtual_stages))
    dense_until = model.layers if model.moe is None else model.moe.dense_layers
    ends = np.cumsum(counts)
    dense = np.clip(np.minimum(ends, dense_until) - (ends - counts), 0, None)
    position = np.arange(len(counts))
    return RankShare(position, dense, counts - dense, 1 * (position == 0), 1 * (position == len(counts) - 1))


def share_of(job: Job, columns: LayoutColumns, rank: Array) -> RankShare:
    """The share of `rank` (one per row); rows are grouped by their few distinct pipelines."""
    pipelines, inverse = columns.distinct(("pp", "virtual_stages", "schedule"))
    tables = [
        rank_shares(job, int(pp), int(v), REGISTRY[CHOICES["schedule"][schedule]].v_shaped)
        for pp, v, schedule in zip(pipelines.pp, pipelines.virtual_stages, pipelines.schedule, strict=True)
    ]
    table = np.zeros((len(tables), max(map(len, tables)), 4), dtype=np.int64)
    for row, shares in enumerate(tables):
        table[row, : len(shares)] = shares
    picked = table[inverse, rank]
    return RankShare(rank, picked[:, 0], picked[:, 1], picked[:, 2], picked[:, 3])


def representative_ranks(shares: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The first and the last rank of every kind of share: the peak and the slowest are among them.

    Activations in flight fall with the rank, deferred weight gradients grow with it; so among ranks that hold the same, one of
    the two ends has the peak. The ranks beside the ends are not enough: 61 layers over 32 ranks put the first two MoE layers
    of DeepSeek-V3 on rank 2.
    """
    first = {share: rank for rank, share in reversed(list(enumerate(shares)))}
    last = {share: rank for rank, share in enumerate(shares)}
    return tuple(sorted({*first.values(), *last.values()}))


def constant_share(share: tuple[int, ...], rows: int) -> RankShare:
    """One rank's share repeated for a table of rows."""
    dense, moe, embedding, head = (np.full(rows, value) for value in share)
    return RankShare(np.zeros(rows, dtype=np.int64), dense, moe, embedding, head)
