"""Closed forms of what the action lists show: activations in flight and the pipeline's time, for arrays of layouts.

The planner's search asks these for 10⁵–10⁶ layouts at once and simulates only the few that remain. Both were read off
the lists: `in_flight` equals `peak_held` exactly; `makespan` is the longest path through the dependency graph, which
for equal stages is a maximum over a handful of linear forms in F, I, W and the send time.

Largest error of `makespan` against the simulator, in percent, over 2 to 16 ranks, 1 to 4 stages per rank, F : I : W =
1 : 1 : 1 and 1 : 1.2 : 0.8, the last stage 1, 1.05 and 1.15 times as slow as the others, sends of 0, 1 and 5 % of F:

    schedule      P ≤ m < 2P    m ≥ 2P
    afab              0.0         0.0
    1f1b              0.0         0.0
    interleaved       0.0         0.0
    zero-bubble       1.4         0.4
    zb-v              3.9         0.7
    dualpipe-v      (illegal)     0.6

With the slow stage elsewhere than at the end (2 to 8 ranks) up to 6 % for m ≥ 2P, 7 % for m ≥ P, 8 % below.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.schedules.legal import SCHEDULES
from ultrascale.specs.errors import SpecError, nearest

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def in_flight(name: str, ranks: ArrayLike, rank: ArrayLike, microbatches: ArrayLike, virtual_stages: ArrayLike = 1) -> Ints:
    """Chunk activations (one stage's share of one micro-batch) that `rank` holds at its peak, all chunks alike.

    Exact for every legal schedule. Sources: Huang 2019 (AFAB), Narayanan 2021 section 2.2 (1F1B, interleaved), Qi 2023
    and 2024 (zero bubble, ZB-V); DualPipe-V as counted on the list.
    """
    p, r, m, v = (np.asarray(x, dtype=np.int64) for x in (ranks, rank, microbatches, virtual_stages))
    per_round = m // np.maximum(1, m // p)
    held: Ints
    match name:
        case "afab":
            held = m + 0 * (p + r)
        case "1f1b":
            held = np.minimum(m, p - r)
        case "interleaved":
            held = np.minimum((v - 1) * per_round + 2 * (p - 1 - r) + 1, m * v)
        case "zero-bubble":
            # P − 1 − r forwards ahead, then r more whose weight gradients are put off: the same on every rank.
            held = np.minimum((v - 1) * per_round + p, m * v) + 0 * r
        case "zb-v":
            held = np.minimum(np.minimum(2 * m, m + 1 + r), 2 * p)
        case "dualpipe-v":
            held = 2 * p + 1 + 0 * (m + r)
        case _:
            raise SpecError(f"schedule: there is no '{name}'; {nearest(name, SCHEDULES)}")
    return held


def deferred(name: str, ranks: ArrayLike, rank: ArrayLike, microbatches: ArrayLike, virtual_stages: ArrayLike = 1) -> Ints:
    """The most chunks of `rank` whose input gradient is done and whose weight gradient still waits; 0 without a split.

    A waiting chunk keeps what its weight gradients need: with recomputation that is more than what it kept before.
    """
    p, r, m, v = (np.asarray(x, dtype=np.int64) for x in (ranks, rank, microbatches, virtual_stages))
    waiting: Ints
    match name:
        case "zero-bubble" | "dualpipe-v":
            waiting = np.minimum(r + 1, m * v)
        case "zb-v":
            waiting = np.minimum(2 * r + 1, m * v)
        case _:
            waiting = 0 * (p + r + m)
    return waiting


class _Shape(NamedTuple):
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


def makespan(
    name: str,
    ranks: ArrayLike,
    microbatches: ArrayLike,
    virtual_stages: ArrayLike,
    total_f: ArrayLike,
    total_i: ArrayLike,
    total_w: ArrayLike,
    slowest_f: ArrayLike,
    slowest_i: ArrayLike,
    slowest_w: ArrayLike,
    send_s: ArrayLike = 0.0,
) -> Floats:
    """Seconds from the first forward to the last backward of a step.

    `total_*` is the time of one micro-batch summed over all stages, `slowest_*` over the stages of the slowest rank.
    Times of F, I and W are those of one micro-batch; a full backward is I + W.
    """
    p, m, v, tf, ti, tw, sf, si, sw, send = (
        np.asarray(x, dtype=np.float64)
        for x in (
            *(ranks, microbatches, virtual_stages),
            *(total_f, total_i, total_w),
            *(slowest_f, slowest_i, slowest_w),
            send_s,
        )
    )

    def others(total: Floats, slowest: Floats) -> Floats:
        return np.where(p > 1, total - slowest, slowest) / (v * np.maximum(p - 1, 1))

    send = np.where(p > 1, send, 0.0)  # one rank sends to nobody
    x = _Shape(
        *(p, m, v),
        *(others(tf, sf), others(ti, si), others(tw, sw)),
        *(sf + si + sw, sw / v, tf + ti + tw, send),
    )
    match name:
        case "afab":
            # Fill with the first micro-batch, then the slowest rank sets the pace; forward and backward alike.
            return x.total + (m - 1) * x.slow + 2 * x.hops * send
        case "1f1b":
            return _1f1b(x)
        case "interleaved":
            return _interleaved(x)
        case "zero-bubble":
            return _zero_bubble(x)
        case "zb-v":
            return np.where(p > 1, _zb_v(x), m * x.slow)
        case "dualpipe-v":
            return np.where(p > 1, _dualpipe_v(x), m * x.slow)
    raise SpecError(f"schedule: there is no '{name}'; {nearest(name, SCHEDULES)}")


def _longest(*ways: Floats) -> Floats:
    longest: Floats = np.maximum.reduce(np.broadcast_arrays(*ways))
    return longest


def _1f1b(x: _Shape) -> Floats:
    """m·t + (P − 1)·t, and a share of the send time in every micro-batch.

    The first rank runs P micro-batches, then waits for the first gradient: once per P micro-batches the round trip of
    2·(P − 1) hops is exposed, unless the slowest rank sets the pace and hides it.
    """
    trips, rest = np.divmod(x.m - 1, x.p)
    exposed = 2 * x.hops * (1 + trips) + 2 * np.maximum(rest - 1, 0)
    return _longest(
        x.total + (x.m - 1) * x.slow + 2 * x.hops * x.send,
        x.total + (x.m - 1) * x.total / x.p + exposed * x.send,
    )


def _interleaved(x: _Shape) -> Floats:
    """m·t + (P − 1)·t/v (Narayanan 2021); each further stage of a rank adds a loop of sends to fill and to drain."""
    fill = x.hops * (x.chunk + 2 * x.send) + (x.v - 1) * (_loop_wait(x, x.f) + _loop_wait(x, x.i + x.w))
    # A rank has 2·v·P − 1 chunks to do between a micro-batch's departure and its return.
    round_trip = (x.total + 2 * (x.p * x.v - 1) * x.send) * x.v / (2 * x.v * x.p - 1)
    return x.m * np.maximum(x.slow, round_trip) + fill


def _loop_wait(x: _Shape, chunk: Floats) -> Floats:
    """What a rank waits, once, until the first micro-batch of a round has come round to its next stage.

    A round of exactly P micro-batches makes it wait for the P sends; a longer round hides them, a shorter one adds the
    chunks that are missing.
    """
    per_round = x.m // np.maximum(1, x.m // x.p)
    return np.maximum(0.0, x.p * x.send + (x.p - per_round) * chunk)


def _zero_bubble(x: _Shape) -> Floats:
    """(P − 1)(F + I − W) of Qi 2023 section 2, but never less than (P − 1)·max(F, I): the fill cannot be undone."""
    loops = (x.v - 1) * _loop_wait(x, x.f)
    # A rank has (2·v − 1)·P chunks to do between a micro-batch's departure and its return, which no W delays.
    stages = x.p * x.v
    trip = (x.total - (stages - 1) * x.w + 2 * (stages - 1) * x.send) * x.v / ((2 * x.v - 1) * x.p)
    # Too few micro-batches to fill the pipeline: one there and back, the others right behind it.
    unfilled = (stages + x.m - 1) * (x.f + x.i) + x.w + 2 * (stages - 1) * x.send
    filled = loops + _longest(
        x.m * x.even + x.hops * (x.f + x.i - x.w + 4 * x.send),
        x.m * x.even + x.hops * (x.f + 3 * x.send),
        x.m * x.even + x.hops * (x.i + 2 * x.send),
        x.m * x.slow + x.hops * (x.f + x.i + 2 * x.send) + x.w - x.p * x.slow_w,
        x.m * np.maximum(x.slow, trip) + x.hops * (x.f + x.send),
    )
    return np.where(x.m < x.p, np.maximum(filled, unfilled), filled)


def _zb_v(x: _Shape) -> Floats:
    """The longest of several ways through the V; with F = I = W they leave P − 1 chunks of bubble at the two ends.

    "Zero bubble" in the paper lets each rank start and end on its own; a step that ends for all ranks at once cannot.
    """
    fill = _longest(
        x.hops * x.i + (5 * x.p - 7) * x.send,
        x.hops * 2 * (x.i - x.w) + (6 * x.p - 8) * x.send,
        x.i + (x.p - 2) * x.w + 3 * x.hops * x.send,
        x.f + (x.p - 2) * x.w + (3 * x.p - 5) * x.send,
        (2 * x.p - 3) * x.f - (x.p - 2) * x.i + (3 * x.p - 5) * x.send,
    )
    # Fewer than 2·P − 1 micro-batches do not fill the V: there are no weight gradients for some of the waiting.
    surplus = np.clip(x.m - x.p, 0, x.hops)
    missing = np.maximum(x.p - x.m, 0)
    short = _longest(
        2 * missing * x.f + 2 * x.hops * (x.i + 2 * x.send) - 2 * surplus * x.w,
        2 * (x.hops - surplus) * x.i + 4 * x.hops * x.send,
        (x.hops + missing - surplus) * (x.f + x.i) + 2 * x.hops * x.send,
    )
    fill = np.where(x.m < 2 * x.p - 1, np.maximum(fill, short), fill)
    trip = (x.total - 2 * x.hops * x.w + 4 * x.hops * x.send) / (2 * x.p)
    slow_fill = _longest((x.p - 2) * x.w + 3 * x.hops * x.send, x.hops * (x.i + 4 * x.send) - x.p * x.w)
    return _longest(x.m * x.even + fill, x.m * np.maximum(x.slow, trip) + slow_fill)


def _dualpipe_v(x: _Shape) -> Floats:
    """(P − 1)(2F + I − W) and longer ways. Pairs start when both inputs are there: sends are exposed as in 1F1B."""
    fill = _longest(
        x.hops * (2 * x.f + x.i - x.w) + 2 * (x.p - 2) * x.send,
        x.hops * 2 * x.f + (x.p - 3) * x.send,
        (x.p - 2) * x.f + x.hops * (2 * x.i - x.w) + (4 * x.p - 6) * x.send,
        (x.p - 2) * x.f + x.hops * x.i + (3 * x.p - 5) * x.send,
    )
    # The ways that fill and drain through all ranks pass the slowest rank's extra time in fewer micro-batches.
    extra = x.slow - x.even
    return _longest(
        x.m * (x.even + 2 * x.hops / x.p * x.send) + fill,
        x.m * x.slow - (2 * x.p - 1) * extra + fill + 2 * x.hops * x.send,
        x.m * x.slow - (2 * x.p - 3) * (extra - x.i) + x.hops * (x.f - x.w + 6 * x.send),
        x.m * x.slow + x.hops * (x.i - x.w + 4 * x.send),
        x.m * x.slow + 3 * x.hops * x.send,
    )
