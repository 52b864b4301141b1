"""Orders of actions from which schedules are made: loops over the stages of a rank, and V shapes written out.

Those that torch.distributed.pipelining 2.13 has are torch's, action for action: that lets the engine run exactly what the
planner simulated; a test holds it. Where torch has a peculiarity (rounds that stretch beyond the number of ranks,
micro-batches struck from a longer ZB-V) it is kept. A search asks for lists of 10⁵ actions, so they are made as arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.schedules.actions import KINDS, ActionArrays, ActionKind

Ints = NDArray[np.int64]
Words = Callable[[int, int, int], list[int]]
F, B, I, W = (KINDS.index(kind) for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W))  # noqa: E741 - the papers' letters


def rounds(ranks: ArrayLike, microbatches: ArrayLike) -> Ints:
    """Into how many rounds a looped schedule divides its micro-batches: rounds of `ranks`, or a little longer."""
    return np.maximum(1, np.floor_divide(microbatches, ranks, dtype=np.int64))


def looped(
    ranks: int, microbatches: int, virtual_stages: int, warmup: Callable[[Ints, int, int, int], Ints], split: bool = False
) -> ActionArrays:
    """A rank's turns: in each a forward, the backward of `warmup` turns ago, and with `split` a weight gradient later still.

    `warmup` is given the ranks that follow, the length of a round, the micro-batches and the stages per rank. Micro-batches
    pass in rounds, a round on one stage, then on the next.
    """
    per_round = microbatches // int(rounds(ranks, microbatches))
    chunks = microbatches * virtual_stages
    rank = np.arange(ranks)[:, None]
    n = np.arange(chunks)
    turn, place = np.divmod(n, per_round)
    round_, chunk = np.divmod(turn, virtual_stages)
    microbatch = round_ * per_round + place
    ahead = np.minimum(warmup(ranks - 1 - rank, per_round, microbatches, virtual_stages), chunks)
    delayed: list[tuple[int, Ints]] = [(F, 0 * rank), (B, ahead)]
    if split:  # rank r runs r weight gradients late: as many as it must wait for at the end
        delayed = [(F, 0 * rank), (I, ahead), (W, ahead + rank)]
    table = np.empty((3, ranks, len(delayed) * chunks), dtype=np.int64)
    for order, (kind, delay) in enumerate(delayed):
        # Before the n-th of a kind come n of its own, and of each other kind those of earlier turns, or earlier in this one.
        others = [(before, other) for before, (_, other) in enumerate(delayed) if before != order]
        position = n + sum(np.clip(n + delay - other + (before < order), 0, chunks) for before, other in others)
        on = chunk if kind == F else virtual_stages - 1 - chunk
        for row, values in zip(table, (kind + 0 * position, on * ranks + rank, microbatch + 0 * rank), strict=True):
            np.put_along_axis(row, position, values, axis=1)
    kinds, stages, of = table.reshape(3, -1)
    start = np.arange(ranks + 1) * table.shape[2]
    return ActionArrays(ranks, virtual_stages, microbatches, kinds, stages, of, np.zeros(len(kinds), dtype=bool), start)


# Words of a V-shaped rank's list: kind, direction down to the fold (0) or up from it (1); the forward of a pair has its own.
_WORDS = ((F, 0), (F, 1), (B, 0), (B, 1), (I, 0), (I, 1), (W, 0), (W, 1), (F, 0), (F, 1))
FD, FU, BD, BU, ID, IU, WD, WU, PD, PU = range(10)


def v_shaped(ranks: int, microbatches: int, _: int, words_of: Words, fifo_weights: bool = False) -> ActionArrays:
    """Rank r holds stages r and 2·ranks − 1 − r; micro-batches are counted per kind and direction."""
    by_rank = [words_of(ranks, rank, microbatches) for rank in range(ranks)]
    words = np.asarray([word for each in by_rank for word in each])
    rank = np.repeat(np.arange(ranks), [len(each) for each in by_rank])
    kind, direction = np.asarray(_WORDS)[words].T
    turn = np.where(kind == B, I, kind)  # a full backward takes its turn among the input gradients
    microbatch = _count((rank * 2 + direction) * len(KINDS) + turn)
    if fifo_weights:  # weight gradients run in the order of their input gradients, whatever their direction
        inputs, weights = np.flatnonzero(kind == I), np.flatnonzero(kind == W)
        direction[weights], microbatch[weights] = direction[inputs], microbatch[inputs]
    stage = np.where(direction == 0, rank, 2 * ranks - 1 - rank)
    keep = microbatch < microbatches  # torch builds ZB-V for enough to fill the V and strikes those that do not exist
    start = np.searchsorted(rank[keep], np.arange(ranks + 1))
    return ActionArrays(ranks, 2, microbatches, kind[keep], stage[keep], microbatch[keep], words[keep] >= PD, start)


def _count(key: Ints) -> Ints:
    """How many entries before each have the same key."""
    order = np.argsort(key, kind="stable")
    sizes = np.bincount(key)
    count = np.empty(len(key), dtype=np.int64)
    count[order] = np.arange(len(key)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return count


def zb_v(ranks: int, rank: int, microbatches: int) -> list[int]:
    """ZB-V (Qi 2024): stages in a V, so that the rank with the loss is the rank with the embedding; memory of 1F1B."""
    full = max(2 * ranks - 1, microbatches)
    ahead = ranks - rank
    return [
        *[FD] * (2 * ahead - 1),
        *[FU, FD] * rank,
        *[FU, IU, WU] * ahead,
        *[FD, ID, WD, FU, IU, WU] * (full - 2 * ranks + rank + 1),
        *[ID, WD, FU, IU, WU] * (ahead - 1),
        *[ID, IU] * rank,
        *[ID, WD] * ahead,
        *[WU] * rank,
        *[WD] * rank,
    ]


def zb_v_in_flight(p: Ints, r: Ints, m: Ints) -> tuple[Ints, Ints]:
    """As `BuildingBlock.in_flight`: with a forward of the first stage or of the second, and when the most are put off."""
    first, second = (2 * p - r, r + 0 * p), (2 * p - r - 1, r + 1 + 0 * p)
    return np.minimum(m, np.asarray([first, second])), np.minimum(m, np.asarray([(r + 1, r)]))


def dualpipe_v(ranks: int, rank: int, microbatches: int) -> list[int]:
    """DualPipe (DeepSeek-V3, 2024) cut to a V (Sea AI Lab): forwards run paired with backwards to hide traffic."""
    ahead = ranks - 1 - rank
    pairs = [PD, BU, PU, BD] * (microbatches - 2 * ranks + rank + 1)
    if rank == ranks - 1:
        pairs[0] = FD  # unpaired: its backward needs the forward just before it, on the same rank
    # In the second half of the drain weight gradients are put off, to fill the bubble at the very end.
    whole, split = [BU, BD] * (rank + 1), [IU, ID] * (rank + 1)
    return [
        *[FD] * (2 * ahead),
        *[FD, FU] * (rank + 1),
        *[IU, WU, FU] * ahead,
        *pairs,
        *[BU, PU, BD] * ahead,
        *whole[: rank + 1],
        *split[rank + 1 :],
        *[WU, ID] * ahead,
        *[WU] * (rank + 1),
    ]


def dualpipe_v_in_flight(p: Ints, r: Ints, m: Ints) -> tuple[Ints, Ints]:
    """As `BuildingBlock.in_flight`: the forward of a pair starts before its backward ends."""
    return np.asarray([(2 * p - r + 0 * m, r + 1 + 0 * (p + m))]), np.asarray([((r + 2) // 2 + 0 * m, (r + 1) // 2 + 0 * m)])


# ------------------------------------------------------------------------------------------------------- building blocks of a V
#
# V-Half and V-Min: one block of passes, repeated for every micro-batch (Qi, Wan, Huang, Lin 2024, "Controllable Memory").
#
# Time is cut into slots, one pass each. A rank has six passes per micro-batch: F, I and W of its two chunks. The block says in
# which slot each runs for micro-batch 0; micro-batch k runs 6·k slots later, and no two passes of a rank share a slot. The
# lists are the passes in the order of their slots; each starts as soon as its input is there, which squeezes the empty slots of
# the fill and the drain. A chunk is in flight from its F to its W: the fewer slots from rank to rank, the less.

PASSES = 6
FORWARDS, INPUTS, WEIGHTS = slice(0, 2), slice(2, 4), slice(4, 6)
_KIND = np.repeat((F, I, W), 2)
_DIRECTION = np.asarray((0, 1, 0, 1, 0, 1))  # down to the fold with the first chunk, or up from it with the second


@dataclass(frozen=True)
class BuildingBlock:
    """Slots from a pass to the one that needs its result, such that no two passes of a rank fall on the same slot of six."""

    up: int  # to the rank before: forwards of the second chunk, input gradients of the first; down it is always one slot
    at_loss: Callable[[Ints], Ints]  # of P: from the last forward to the first input gradient, on the first rank
    at_fold: Callable[[Ints], Ints]  # of P: from one chunk's input gradient to the other's, on the last rank

    def slots(self, p: Ints, r: Ints) -> Ints:
        """Of F, I and W, each of the first and the second chunk."""
        last, from_last = p - 1, p - 1 - r
        there = last + 1 + self.up * last + self.at_loss(p)
        forwards = (r + 0 * p, last + 1 + self.up * from_last)
        inputs = (there + last + self.at_fold(p) + self.up * from_last, there + r)
        taken = (np.stack(forwards + inputs)[..., None] % PASSES == np.arange(PASSES)).any(axis=0)
        free = np.moveaxis(np.argsort(taken, axis=-1, kind="stable")[..., :2], -1, 0)
        waits = [(slot - np.stack(inputs)) % PASSES for slot in (free, free[::-1])]
        wait = np.where(waits[0].sum(axis=0) <= waits[1].sum(axis=0), *waits)
        return np.stack((*forwards, *inputs, *(np.stack(inputs) + wait)))

    def lists(self, ranks: int, microbatches: int, _: int) -> ActionArrays:
        rank = np.arange(ranks)
        slots = self.slots(np.asarray(ranks), rank).T[..., None] + PASSES * np.arange(microbatches)
        order = np.argsort(slots.reshape(ranks, -1), axis=1)
        which, microbatch = np.divmod(order, microbatches)
        stage = np.where(_DIRECTION[which] == 0, rank[:, None], 2 * ranks - 1 - rank[:, None])
        start = np.arange(ranks + 1) * order.shape[1]
        paired = np.zeros(order.size, dtype=bool)
        return ActionArrays(ranks, 2, microbatches, _KIND[which].ravel(), stage.ravel(), microbatch.ravel(), paired, start)

    def in_flight(self, p: Ints, r: Ints, m: Ints) -> tuple[Ints, Ints]:
        """Chunks in flight, and those whose weight gradient waits: times × stages of the rank × rows."""
        return self._levels(p, r, m, FORWARDS), self._levels(p, r, m, INPUTS)

    def _levels(self, p: Ints, r: Ints, m: Ints, begin: slice) -> Ints:
        """Chunks between `begin` and the end of their weight gradient, at every time when one begins."""
        p, r, m = np.broadcast_arrays(p, r, m)
        slots = self.slots(p, r)[..., None]
        begins, ends, m = slots[begin], slots[WEIGHTS], m[..., None]
        times = begins + PASSES * np.arange(slots.max() // PASSES + 1)
        levels = [
            np.clip((times - began) // PASSES + 1, 0, m) - np.clip((times - 1 - ended) // PASSES + 1, 0, m)
            for began, ended in zip(begins, ends, strict=True)
        ]
        by_time = np.moveaxis(np.stack(levels, axis=1), -1, 0)
        return by_time.reshape(-1, *by_time.shape[2:])


V_HALF = BuildingBlock(up=2, at_loss=lambda p: 1 + 0 * p, at_fold=lambda p: np.where(p % 2 == 0, 5, 2))
V_MIN = BuildingBlock(up=1, at_loss=lambda p: np.where(p % 3 == 0, 3, 1), at_fold=lambda p: 1 + 0 * p)
