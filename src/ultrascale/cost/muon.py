"""Muon's Newton–Schulz work on a pipeline stage: which rank orthogonalises which matrix, in which round, at which cost.

Matrices need to be whole. They are dealt in turns to the ranks that hold parts of them, the largest first: a turn is one matrix
for each rank, and a round some turns whose matrices are gathered together. Ranks that hold one copy of the stage exchange
parts by all-to-all; copies (data ranks without ZeRO, HSDP's replicas) take turns too, and all-gather the results.
The engine (train/muon.py) deals by `rounds`; the estimate counts what the first rank of a stage does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns, RankShare
from ultrascale.cost.memory.states import expert_slices
from ultrascale.specs.job import OPTIMIZERS, Job
from ultrascale.specs.weights import layer_weights, mlp

STEPS = 5  # Jordan 2024
ROUND_ELEMENTS = 2**24  # of one rank in a round; a larger matrix is a round of its own


def orthogonalizes(job: Job) -> bool:
    return OPTIMIZERS[job.optimizer].matrices is not None


def newton_schulz_flops(rows: int, width: int) -> float:
    """Of one matrix: the Gram matrix, its square, and their product with the matrix, in each step."""
    short, long = sorted((rows, width))
    return STEPS * (4.0 * short**2 * long + 2.0 * short**3)


def order(rows: int, width: int) -> tuple[float, int, int]:
    """The key by which matrices are dealt."""
    return -newton_schulz_flops(rows, width), rows, width


def rounds(sizes: Sequence[tuple[int, int]], ranks: int) -> Iterator[tuple[int, int]]:
    """Cuts the dealt matrices into rounds: positions from and to. `sizes`: elements of a matrix, and how many are alike."""
    total = sum(count for _, count in sizes)
    ends = np.cumsum([count for _, count in sizes])
    begin = at = elements = 0
    while at < total:
        largest = sizes[int(np.searchsorted(ends, at, side="right"))][0]  # they are in descending order of FLOPs
        if elements and elements + largest > ROUND_ELEMENTS:
            yield begin, at
            begin, elements = at, 0
        elements += largest
        at = min(at + ranks, total)
    if at > begin:
        yield begin, at


@dataclass(frozen=True)
class DealtMatrices:
    """Matrices of one shape and cut on one pipeline rank, a row per layout."""

    rows: int
    width: int
    first: Array
    """position of the first one among those dealt to the same ranks"""
    count: Array
    copies: Array
    """ranks that hold the same part, over which results are all-gathered"""
    pieces: Array
    """into which ZeRO cuts each part that tp leaves"""
    tp: Array
    tp_parts: Array
    """different parts that the tp ranks hold"""
    piece: Array
    """elements of the first rank's piece"""

    @property
    def ranks(self) -> Array:
        """Ranks that take turns."""
        return np.asarray(self.copies * self.pieces * self.tp)

    def taken(self, every: Array) -> Array:
        """How many of the positions are multiples of `every`."""
        return np.asarray(-(-(self.first + self.count) // every) + (-self.first // every))

    @property
    def owned(self) -> Array:
        """By the first rank, which orthogonalises them."""
        return self.taken(self.ranks)

    @property
    def served(self) -> Array:
        """Those of which the first rank sends its piece: to ranks of its copy that take the part from it."""
        return self.taken(self.copies * self.tp // self.tp_parts)

    @property
    def of_copy(self) -> Array:
        """Those that the first rank's copy of the stage orthogonalises."""
        return self.taken(self.copies)

    @property
    def is_gathered(self) -> Array:
        return np.asarray(self.pieces * self.tp_parts > 1)

    @property
    def is_scattered(self) -> Array:
        return np.asarray(self.pieces * self.tp > 1)

    @property
    def flops(self) -> Array:
        """Of the first rank."""
        return np.asarray(self.owned * newton_schulz_flops(self.rows, self.width))


@dataclass(frozen=True)
class MuonWork:
    dense: list[DealtMatrices]
    experts: list[DealtMatrices]

    @property
    def all(self) -> list[DealtMatrices]:
        return self.dense + self.experts


def work(job: Job, columns: LayoutColumns, share: RankShare) -> MuonWork:
    """Of a pipeline rank, in the order in which matrices are dealt."""
    model, tp, data = job.model, columns.tp, columns.data_ranks
    sharded = columns.zero > 0
    shards = np.where(sharded, columns.shards, 1)
    found: Counter[tuple[int, int, str]] = Counter()
    none = np.zeros(len(columns), dtype=np.int64)
    layers = {False: share.dense_layers + none, True: share.moe_layers + none}
    per_layer: dict[bool, Counter[tuple[int, int, str]]] = {
        moe: Counter((one.rows, one.width, one.cut) for one in layer_weights(model, moe) if one.is_hidden_matrix)
        for moe in (False, True)
        if not moe or model.moe is not None
    }
    for counted in per_layer.values():
        found.update(counted)
    dense, first = list[DealtMatrices](), none
    for rows, width, cut in sorted(found, key=lambda one: (order(*one[:2]), one[2])):
        count = sum((layers[moe] * counted[rows, width, cut] for moe, counted in per_layer.items()), none)
        parts = {"none": 1 + none, "kv rows": np.minimum(tp, model.kv_heads)}.get(cut, tp)
        tall = rows if cut == "width" else rows // parts
        piece = -(-tall // shards) * (width // parts if cut == "width" else width)
        dense.append(DealtMatrices(rows, width, first, count, data // shards, shards, tp, parts, piece))
        first = first + count
    experts, first = list[DealtMatrices](), none
    moe = model.moe
    if moe is not None:
        cut_into, slices = expert_slices(model, columns, shards)
        cut_into, slices = np.where(sharded, cut_into, 1), np.where(sharded, slices, 1)
        held = -(-(moe.experts // columns.ep * slices) // cut_into)  # slices of the first rank
        copies = np.where(sharded, data // shards, data // columns.ep)
        for weight in sorted(mlp(model, moe.expert_ffn), key=lambda one: (order(one.rows, one.width), one.cut)):
            if not weight.is_hidden_matrix:
                continue
            count = layers[True] * np.maximum(1, held // slices)
            piece = weight.elements // tp // slices
            experts.append(DealtMatrices(weight.rows, weight.width, first, count, copies, slices, tp, tp, piece))
            first = first + count
    return MuonWork(dense, experts)
