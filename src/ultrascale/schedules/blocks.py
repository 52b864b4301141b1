"""V-Half and V-Min: one block of passes, repeated for every micro-batch (Qi, Wan, Huang, Lin 2024, "Controllable Memory").

Time is cut into slots, one pass each. A rank has six passes per micro-batch: F, I and W of its two chunks. The block says in
which slot each runs for micro-batch 0; micro-batch k runs 6·k slots later, and no two passes of a rank share a slot. The lists
are the passes in the order of their slots; what executes them starts each as soon as its input is there, which squeezes the
empty slots of the fill and the drain. A chunk is held from its F to its W: the fewer slots from rank to rank, the less.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ultrascale.schedules.actions import ActionArrays
from ultrascale.schedules.formulas import Floats, Shape, longest
from ultrascale.schedules.orders import F, I, Ints, W

PASSES = 6
FORWARDS, INPUTS, WEIGHTS = slice(0, 2), slice(2, 4), slice(4, 6)
_KIND = np.repeat((F, I, W), 2)
_WAY = np.asarray((0, 1, 0, 1, 0, 1))  # down to the fold with the first chunk, or up from it with the second


@dataclass(frozen=True)
class BuildingBlock:
    """Slots from a pass to the one that needs its result, such that no two passes of a rank fall on the same slot of six."""

    up: int  # to the rank before: forwards of the second chunk, input gradients of the first; down it is always one slot
    at_loss: Callable[[Ints], Ints]  # of P: from the last forward to the first input gradient, on the first rank
    at_fold: Callable[[Ints], Ints]  # of P: from one chunk's input gradient to the other's, on the last rank

    def slots(self, p: Ints, r: Ints) -> Ints:
        """Of F, I and W, each of the first and the second chunk."""
        last, follow = p - 1, p - 1 - r
        there = last + 1 + self.up * last + self.at_loss(p)
        forwards = (r + 0 * p, last + 1 + self.up * follow)
        inputs = (there + last + self.at_fold(p) + self.up * follow, there + r)
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
        stage = np.where(_WAY[which] == 0, rank[:, None], 2 * ranks - 1 - rank[:, None])
        start = np.arange(ranks + 1) * order.shape[1]
        paired = np.zeros(order.size, dtype=bool)
        return ActionArrays(ranks, 2, microbatches, _KIND[which].ravel(), stage.ravel(), microbatch.ravel(), paired, start)

    def in_flight(self, p: Ints, r: Ints, m: Ints, v: Ints) -> Ints:
        return self._most(p, r, m, FORWARDS)

    def deferred(self, p: Ints, r: Ints, m: Ints, v: Ints) -> Ints:
        return self._most(p, r, m, INPUTS)

    def _most(self, p: Ints, r: Ints, m: Ints, begin: slice) -> Ints:
        """The most chunks between `begin` and the end of their weight gradient, looked at whenever one begins."""
        p, r, m = np.broadcast_arrays(p, r, m)
        slots = self.slots(p, r)[..., None]
        begins, ends, m = slots[begin], slots[WEIGHTS], m[..., None]
        moments = begins + PASSES * np.arange(slots.max() // PASSES + 1)
        level = np.zeros(moments.shape, dtype=np.int64)
        for began, ended in zip(begins, ends, strict=True):
            level += np.clip((moments - began) // PASSES + 1, 0, m) - np.clip((moments - 1 - ended) // PASSES + 1, 0, m)
        return np.asarray(level.max(axis=(0, -1)))


V_HALF = BuildingBlock(up=2, at_loss=lambda p: 1 + 0 * p, at_fold=lambda p: np.where(p % 2 == 0, 5, 2))
V_MIN = BuildingBlock(up=1, at_loss=lambda p: np.where(p % 3 == 0, 3, 1), at_fold=lambda p: 1 + 0 * p)


def v_half_makespan(x: Shape) -> Floats:
    """Read off the lists: with F = I = W a fill of 13/4 chunks per rank, less 2. The turn at the fold depends on P."""
    odd = x.p % 2 == 1
    fill = x.p * (13 * x.f + 11.5 * x.i - 5 * x.w) / 6 - (2 * x.f + 8 * x.i - 4 * x.w) / 3 + (5.5 * x.p - 6) * x.send
    # The fill and the drain pass the slowest rank's extra time in fewer micro-batches.
    slow_fill = x.p * (14 * x.f + 11 * x.i - 7 * x.w) / 6 - x.f - x.i + (5 * x.p - 4) * x.send
    slow_fill = slow_fill - (x.p + 2) / 6 * (x.slow - x.even)
    # Down and up again takes three slots a rank: four passes of the slower kind and one more in every micro-batch.
    slower = np.where(x.p > 2, np.maximum(x.f, x.i), x.f)
    chain = 4 * slower + np.where(odd, x.w, x.f + x.i - slower) + 2 * x.send
    ways = (x.m * np.maximum(x.even, chain) + fill, x.m * x.slow + slow_fill)
    took = longest(*(way - odd * x.f for way in ways), x.m * x.slow)
    return np.where(x.p > 1, took, x.m * x.slow)


def v_min_makespan(x: Shape) -> Floats:
    """A micro-batch there and back without waiting, the others behind it at the pace of the slowest.

    Down and up again takes two slots a rank: six passes of the slower kind in every micro-batch, fewer on two ranks.
    """
    turn = np.where(x.p % 3 == 0, 2 * np.minimum(x.w, x.f + x.i - x.w), 0.0)  # the one at the loss is longer
    trip = x.total - (2 * x.p - 1) * x.w + 4 * x.hops * x.send + turn
    slower = np.maximum(x.f, x.i)
    of_two = np.maximum(0.75 * (x.total - 4 * x.w), x.chunk + 3 * slower)
    chain = np.where(x.p > 2, 6 * slower, of_two) + 6 * x.hops / x.p * x.send
    took = longest(trip + (x.m - 1) * longest(x.slow, chain), x.m * x.slow)
    return np.where(x.p > 1, took, x.m * x.slow)
