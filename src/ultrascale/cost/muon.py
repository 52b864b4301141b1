"""Muon's Newton–Schulz work on a pipeline stage: which rank orthogonalises which matrix, in which round, at which cost.

Matrices need to be whole. They are dealt in turns to the ranks that hold parts of them, the largest first: a turn is one matrix
for each rank, and a round some turns whose matrices are gathered together. Ranks that hold one copy of the stage exchange
parts by all-to-all; copies (data ranks without ZeRO, HSDP's replicas) take turns too, and all-gather the results.
The engine (train/muon.py) deals by `rounds`; the estimate counts what the first rank of a stage does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns, RankShare
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.memory.states import expert_slices
from ultrascale.cost.network import CollectiveTransfer, CommGroup, exposed, group, transfer
from ultrascale.specs.job import OPTIMIZERS, Job
from ultrascale.specs.model import Model
from ultrascale.specs.weights import layer_weights, mlp

STEPS = 5  # Jordan 2024
ROUND_ELEMENTS = 2**23  # of one rank in a round; a larger matrix is a round of its own


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

    def between(self, begin: int, end: int) -> DealtMatrices:
        """Those at positions from and to."""
        first = np.clip(self.first, begin, end)
        return replace(self, first=first, count=np.maximum(0, np.minimum(self.first + self.count, end) - first))

    def of_copies(self) -> Array:
        """Of one layout, how many each copy of the stage orthogonalises."""
        copies = np.arange(self.copies[0])
        return np.asarray((copies - self.first) // self.copies - (copies - self.first - self.count) // self.copies)


@dataclass(frozen=True)
class StackedMatrices:
    """Matrices that are dealt to the same ranks: of all weights but experts, or of experts."""

    kinds: list[DealtMatrices]
    stage: CommGroup
    """ranks that hold one copy of the stage"""
    copies: CommGroup
    bytes: int
    """of an element on its way"""

    @property
    def elements(self) -> tuple[Array, Array, Array]:
        """That the first rank sends to be gathered, scatters, and all-gathers with the other copies of the stage."""
        return self.sent, self.results, self.copies.size * self.copied

    def transfers(self, machine: ClusterRates, elements: Sequence[Array]) -> Iterator[CollectiveTransfer]:
        """Of so many elements each."""
        gathered, results, copied = (self.bytes * np.asarray(each, dtype=float) for each in elements)
        yield transfer(machine, "muon", "all_to_all", gathered, self.stage)
        yield transfer(machine, "muon", "all_to_all", results, self.stage)
        yield transfer(machine, "muon", "all_gather", copied, self.copies)

    def calls(self, machine: ClusterRates) -> Iterator[tuple[CollectiveTransfer, int]]:
        """Of one layout: the mean of each kind of call, and how many there are."""
        sizes = np.asarray([one.elements for one in self.by_round()])[:, :, 0]
        counts = (sizes > 0).sum(axis=0)
        means = (sizes.sum(axis=0) / np.maximum(1, counts))[:, None]
        for moved, count in zip(self.transfers(machine, [*means]), counts, strict=True):
            if count:
                yield moved, int(count)

    @cached_property
    def sent(self) -> Array:
        """Elements that the first rank sends to be gathered."""
        sent = np.asarray(sum(one.served * one.piece for one in self.kinds))
        return np.where(np.any([one.is_gathered for one in self.kinds], axis=0), sent, 0)

    @cached_property
    def results(self) -> Array:
        """Elements that it scatters."""
        return np.asarray(
            sum(one.owned * one.rows * one.width * one.tp // one.tp_parts * one.is_scattered for one in self.kinds)
        )

    @cached_property
    def copied(self) -> Array:
        """Elements that it sends to other copies: padded to what the copy with the most has; of many layouts at most that."""
        if len(self.stage.size) == 1:
            most = np.max(sum(one.of_copies() * one.piece for one in self.kinds), keepdims=True)
        else:
            most = sum(-(-one.count // one.copies) * one.piece for one in self.kinds)
        return np.where(self.copies.size > 1, most, 0)

    @cached_property
    def rounds(self) -> Array:
        """About how many, at least one."""
        elements = sum(one.owned * one.rows * one.width for one in self.kinds)
        turns = sum(one.owned for one in self.kinds)
        return np.maximum(1, np.minimum(turns, np.ceil(elements / ROUND_ELEMENTS)))

    def by_round(self) -> Iterator[StackedMatrices]:
        """Of one layout, each round's own."""
        sizes = [(one.rows * one.width, int(one.count[0])) for one in self.kinds]
        for begin, end in rounds(sizes, int(self.kinds[0].ranks[0])):
            kinds = [one.between(begin, end) for one in self.kinds]
            yield replace(self, kinds=[one for one in kinds if one.count[0]])


def stacks(job: Job, columns: LayoutColumns, share: RankShare) -> list[StackedMatrices]:
    """Of a pipeline rank, in the order in which matrices are dealt; empty for an optimizer that needs no whole matrices."""
    if OPTIMIZERS[job.optimizer].matrices is None or job.adapter_rank is not None:
        return []
    cluster, tp = job.cluster, columns.tp
    shards, bytes_ = np.where(columns.zero > 0, columns.shards, 1), 4 if job.precision == "fp32" else 2
    stage = group(shards * tp, np.ones_like(tp), cluster)
    found = []
    for kinds, apart in ((_dense(job.model, columns, share), 1), (_experts(job.model, columns, share), columns.ep)):
        if kinds:
            stride = np.where(columns.zero > 0, shards * tp, apart * tp)
            found.append(StackedMatrices(kinds, stage, group(kinds[0].copies, stride, cluster), bytes_))
    return found


def _dense(model: Model, columns: LayoutColumns, share: RankShare) -> list[DealtMatrices]:
    tp, none = columns.tp, np.zeros(len(columns), dtype=np.int64)
    shards = np.where(columns.zero > 0, columns.shards, 1)
    counts = [
        (count, Counter((one.rows, one.width, one.cut) for one in layer_weights(model, kind) if one.is_hidden_matrix))
        for kind, count, _ in share.each()
        if np.any(count)
    ]
    found, first = list[DealtMatrices](), none
    for rows, width, cut in sorted({key for _, each in counts for key in each}, key=lambda key: (order(*key[:2]), key[2])):
        count = sum((number * each[rows, width, cut] for number, each in counts), none)
        parts = {"none": 1 + none, "kv rows": np.minimum(tp, model.kv_heads)}.get(cut, tp)
        high, wide = (rows, width // parts) if cut == "width" else (rows // parts, width)
        piece = -(-high // shards) * wide
        found.append(DealtMatrices(rows, width, first, count, columns.data_ranks // shards, shards, tp, parts, piece))
        first = first + count
    return found


def _experts(model: Model, columns: LayoutColumns, share: RankShare) -> list[DealtMatrices]:
    moe, sharded = model.moe, columns.zero > 0
    if moe is None:
        return []
    shards = np.where(sharded, columns.shards, 1)
    pieces, slices = (np.where(sharded, each, 1) for each in expert_slices(model, columns, shards))
    held = np.maximum(1, -(-(moe.experts // columns.ep * slices) // pieces) // slices)  # by the first rank
    copies = columns.data_ranks // np.where(sharded, shards, columns.ep)
    found, first = list[DealtMatrices](), np.zeros(len(columns), dtype=np.int64)
    matrices = [one for one in mlp(model, moe.expert_ffn) if one.is_hidden_matrix]
    for one in sorted(matrices, key=lambda one: (order(one.rows, one.width), one.cut)):
        count = share.moe_layers * held + 0 * first
        piece = one.elements // columns.tp // slices
        found.append(DealtMatrices(one.rows, one.width, first, count, copies, slices, columns.tp, columns.tp, piece))
        first = first + count
    return found


def flops(job: Job, columns: LayoutColumns, share: RankShare) -> Array:
    """Of the first rank of a stage, in a step."""
    none = np.zeros(len(columns))
    return np.asarray(sum((kind.flops for one in stacks(job, columns, share) for kind in one.kinds), none))


@dataclass(frozen=True)
class _RoundBytes:
    """What a round of the first rank holds while it runs."""

    gathering: float
    iterating: float
    results: float
    scattering: float
    copying: float

    @classmethod
    def of(cls, one: StackedMatrices) -> _RoundBytes:
        def total(count: Callable[[DealtMatrices], Array]) -> float:
            return one.bytes * sum(float(count(kind)[0]) for kind in one.kinds)

        owned = total(lambda kind: kind.owned * kind.rows * kind.width)
        together: Counter[tuple[int, int]] = Counter()
        for kind in one.kinds:
            together[kind.rows, kind.width] += int(kind.owned[0])
        gram = max(count * min(shape) ** 2 for shape, count in together.items()) * one.bytes
        received, copies = total(lambda kind: kind.of_copy * kind.piece), int(one.copies.size[0])
        sent, results, copied = (one.bytes * float(each[0]) for each in (one.sent, one.results, one.copied))
        # Two buffers of the matrices and two of their Gram matrices.
        return cls(
            sent + owned, 2 * owned + 2 * gram, owned, results + received, (1 + copies) * copied if copies > 1 else received
        )


def step_buffers(job: Job, columns: LayoutColumns, share: RankShare) -> float:
    """Bytes that a step of the first rank of one layout's stage takes beyond the states: four rounds run at a time."""
    nothing = [_RoundBytes(0.0, 0.0, 0.0, 0.0, 0.0)] * 3
    each = [_RoundBytes.of(one) for stack in stacks(job, columns, share) for one in stack.by_round()]
    most, rounds = 0.0, [*nothing, *each, *nothing]
    for third, second, first, new in zip(rounds, rounds[1:], rounds[2:], rounds[3:], strict=False):
        iterating = max(first.iterating, first.results + first.scattering)
        iterates = new.gathering + iterating + second.scattering + third.copying
        most = max(most, iterates, new.gathering + first.scattering + second.copying + third.copying)
    return most


@dataclass(frozen=True)
class MuonTime:
    compute_s: Array
    exposed_s: Array
    """communication that no iteration hides"""


def time(work: Workload, share: RankShare) -> MuonTime:
    """Of the first rank of a stage, which has no less to do than others."""
    job, columns, machine = work.job, work.columns, work.machine
    compute = wait = np.zeros(len(columns))
    for stack in stacks(job, columns, share):
        own = np.zeros(len(columns))
        for one in stack.kinds:
            short, long = (np.full(len(columns), float(size)) for size in sorted((one.rows, one.width)))
            gram, square, product = (
                machine.matmul_s(short, n, k, in_fp8=False) for n, k in ((short, long), (short, short), (long, short))
            )
            own = own + one.owned * STEPS * (gram + square + product)
        each = [elements / stack.rounds for elements in stack.elements]
        sent = stack.rounds * sum(one.time_s for one in stack.transfers(machine, each))
        alone = sent / stack.rounds  # the first gather and the last results
        hidden = exposed(sent - alone, job.framework.overlap * own, machine.efficiency)
        compute, wait = compute + own, wait + alone + hidden
    return MuonTime(np.asarray(compute), np.asarray(wait))
