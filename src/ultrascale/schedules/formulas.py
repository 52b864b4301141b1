"""Closed forms of the pipeline's time, one per schedule: the longest path through the dependency graph.

For equal stages that is a maximum over a handful of linear forms in F, I, W and the send time.

Largest error of `makespan` against the simulator, in percent, over 2 to 16 ranks, 1 to 4 stages per rank, F : I : W =
1 : 1 : 1 and 1 : 1.2 : 0.8, the last stage 1, 1.05 and 1.15 times as slow as the others, sends of 0, 1 and 5 % of F:

    schedule      P ≤ m < 2P    m ≥ 2P
    afab              0.0         0.0
    1f1b              0.0         0.0
    interleaved       0.0         0.0
    zero-bubble       1.4         0.4
    zb-v              3.9         0.7
    dualpipe-v      (illegal)     0.6
    v-half            3.8         2.3
    v-min             2.7         1.9

With the slow stage elsewhere than at the end (2 to 8 ranks) up to 6 % for m ≥ 2P, 7 % for m ≥ P, 8 % below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Shape(NamedTuple):
    """The arguments of `makespan` as arrays. f, i, w: the mean chunk of all ranks but the slowest."""

    p: Floats
    m: Floats
    v: Floats
    f: Floats
    i: Floats
    w: Floats
    slow: Floats  # the slowest rank's F + I + W over its chunks
    slow_w: Floats  # its W alone, of a mean chunk
    total: Floats
    send: Floats

    @property
    def hops(self) -> Floats:
        """Ranks a message passes on its way from the first rank to the last."""
        return self.p - 1

    @property
    def chunk(self) -> Floats:
        return self.f + self.i + self.w

    @property
    def even(self) -> Floats:
        """F + I + W of a rank that is not the slowest."""
        return self.v * self.chunk


def afab(x: Shape) -> Floats:
    """Fill with the first micro-batch, then the slowest rank sets the pace; forward and backward alike."""
    return x.total + (x.m - 1) * x.slow + 2 * x.hops * x.send


def longest(*spans: Floats) -> Floats:
    longest: Floats = np.maximum.reduce(np.broadcast_arrays(*spans))
    return longest


def one_f_one_b(x: Shape) -> Floats:
    """m·t + (P − 1)·t, and a share of the send time in every micro-batch.

    The first rank runs P micro-batches, then waits for the first gradient: once per P micro-batches the round trip of
    2·(P − 1) hops is exposed, unless the slowest rank sets the pace and hides it.
    """
    trips, rest = np.divmod(x.m - 1, x.p)
    exposed = 2 * x.hops * (1 + trips) + 2 * np.maximum(rest - 1, 0)
    return longest(
        x.total + (x.m - 1) * x.slow + 2 * x.hops * x.send,
        x.total + (x.m - 1) * x.total / x.p + exposed * x.send,
    )


def interleaved(x: Shape) -> Floats:
    """m·t + (P − 1)·t/v (Narayanan 2021); each further stage of a rank adds a loop of sends to fill and to drain."""
    fill = x.hops * (x.chunk + 2 * x.send) + (x.v - 1) * (_loop_wait(x, x.f) + _loop_wait(x, x.i + x.w))
    # A rank has 2·v·P − 1 chunks to do between a micro-batch's departure and its return.
    round_trip = (x.total + 2 * (x.p * x.v - 1) * x.send) * x.v / (2 * x.v * x.p - 1)
    return x.m * np.maximum(x.slow, round_trip) + fill


def _loop_wait(x: Shape, chunk: Floats) -> Floats:
    """What a rank waits, once, until the first micro-batch of a round has come round to its next stage.

    A round of exactly P micro-batches makes it wait for the P sends; a longer round hides them, a shorter one adds the
    chunks that are missing.
    """
    per_round = x.m // np.maximum(1, x.m // x.p)
    return np.maximum(0.0, x.p * x.send + (x.p - per_round) * chunk)


def zero_bubble(x: Shape) -> Floats:
    """(P − 1)(F + I − W) of Qi 2023 section 2, but never less than (P − 1)·max(F, I): the fill cannot be undone."""
    loops = (x.v - 1) * _loop_wait(x, x.f)
    # A rank has (2·v − 1)·P chunks to do between a micro-batch's departure and its return, which no W delays.
    stages = x.p * x.v
    trip = (x.total - (stages - 1) * x.w + 2 * (stages - 1) * x.send) * x.v / ((2 * x.v - 1) * x.p)
    # Too few micro-batches to fill the pipeline: one there and back, the others right behind it.
    underfull = (stages + x.m - 1) * (x.f + x.i) + x.w + 2 * (stages - 1) * x.send
    full = loops + longest(
        x.m * x.even + x.hops * (x.f + x.i - x.w + 4 * x.send),
        x.m * x.even + x.hops * (x.f + 3 * x.send),
        x.m * x.even + x.hops * (x.i + 2 * x.send),
        x.m * x.slow + x.hops * (x.f + x.i + 2 * x.send) + x.w - x.p * x.slow_w,
        x.m * np.maximum(x.slow, trip) + x.hops * (x.f + x.send),
    )
    return np.where(x.m < x.p, np.maximum(full, underfull), full)


def zb_v(x: Shape) -> Floats:
    """The longest of several ways through the V; with F = I = W they leave P − 1 chunks of bubble at the two ends.

    "Zero bubble" in the paper lets each rank start and end on its own; a step that ends for all ranks at once cannot.
    """
    fill = longest(
        x.hops * x.i + (5 * x.p - 7) * x.send,
        x.hops * 2 * (x.i - x.w) + (6 * x.p - 8) * x.send,
        x.i + (x.p - 2) * x.w + 3 * x.hops * x.send,
        x.f + (x.p - 2) * x.w + (3 * x.p - 5) * x.send,
        (2 * x.p - 3) * x.f - (x.p - 2) * x.i + (3 * x.p - 5) * x.send,
    )
    # Fewer than 2·P − 1 micro-batches do not fill the V: there are no weight gradients for some of the waiting.
    surplus = np.clip(x.m - x.p, 0, x.hops)
    missing = np.maximum(x.p - x.m, 0)
    short = longest(
        2 * missing * x.f + 2 * x.hops * (x.i + 2 * x.send) - 2 * surplus * x.w,
        2 * (x.hops - surplus) * x.i + 4 * x.hops * x.send,
        (x.hops + missing - surplus) * (x.f + x.i) + 2 * x.hops * x.send,
    )
    fill = np.where(x.m < 2 * x.p - 1, np.maximum(fill, short), fill)
    trip = (x.total - 2 * x.hops * x.w + 4 * x.hops * x.send) / (2 * x.p)
    slow_fill = longest((x.p - 2) * x.w + 3 * x.hops * x.send, x.hops * (x.i + 4 * x.send) - x.p * x.w)
    return np.where(x.p > 1, longest(x.m * x.even + fill, x.m * np.maximum(x.slow, trip) + slow_fill), x.m * x.slow)


def dualpipe_v(x: Shape) -> Floats:
    """(P − 1)(2F + I − W) and longer ways. Pairs start when both inputs are there: sends are exposed as in 1F1B."""
    fill = longest(
        x.hops * (2 * x.f + x.i - x.w) + 2 * (x.p - 2) * x.send,
        x.hops * 2 * x.f + (x.p - 3) * x.send,
        (x.p - 2) * x.f + x.hops * (2 * x.i - x.w) + (4 * x.p - 6) * x.send,
        (x.p - 2) * x.f + x.hops * x.i + (3 * x.p - 5) * x.send,
    )
    # The ways that fill and drain through all ranks pass the slowest rank's extra time in fewer micro-batches.
    extra = x.slow - x.even
    took = longest(
        x.m * (x.even + 2 * x.hops / x.p * x.send) + fill,
        x.m * x.slow - (2 * x.p - 1) * extra + fill + 2 * x.hops * x.send,
        x.m * x.slow - (2 * x.p - 3) * (extra - x.i) + x.hops * (x.f - x.w + 6 * x.send),
        x.m * x.slow + x.hops * (x.i - x.w + 4 * x.send),
        x.m * x.slow + 3 * x.hops * x.send,
    )
    return np.where(x.p > 1, took, x.m * x.slow)


def v_half(x: Shape) -> Floats:
    """Read off the lists: with F = I = W a fill of 13/4 chunks per rank, less 2. The turn at the fold depends on P."""
    odd = x.p % 2 == 1
    fill = x.p * (13 * x.f + 11.5 * x.i - 5 * x.w) / 6 - (2 * x.f + 8 * x.i - 4 * x.w) / 3 + (5.5 * x.p - 6) * x.send
    # The fill and the drain pass the slowest rank's extra time in fewer micro-batches.
    slow_fill = x.p * (14 * x.f + 11 * x.i - 7 * x.w) / 6 - x.f - x.i + (5 * x.p - 4) * x.send
    slow_fill = slow_fill - (x.p + 2) / 6 * (x.slow - x.even)
    # Down and up again takes three slots a rank: four passes of the slower kind and one more in every micro-batch.
    slower = np.where(x.p > 2, np.maximum(x.f, x.i), x.f)
    chain = 4 * slower + np.where(odd, x.w, x.f + x.i - slower) + 2 * x.send
    spans = (x.m * np.maximum(x.even, chain) + fill, x.m * x.slow + slow_fill)
    took = longest(*(span - odd * x.f for span in spans), x.m * x.slow)
    return np.where(x.p > 1, took, x.m * x.slow)


def v_min(x: Shape) -> Floats:
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
