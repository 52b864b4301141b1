"""Closed forms of what the action lists show: activations in flight and the pipeline's time, for arrays of layouts.

The planner's search asks these for 10⁵–10⁶ layouts at once and simulates only the few that remain. Both were read off the
lists: `in_flight` equals `peak_held` exactly; how far `makespan` is from the simulator is said in formulas.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.schedules.formulas import Floats, Shape
from ultrascale.schedules.registry import spec_of

Ints = NDArray[np.int64]


def in_flight(name: str, ranks: ArrayLike, rank: ArrayLike, microbatches: ArrayLike, virtual_stages: ArrayLike = 1) -> Ints:
    """Chunk activations (one stage's share of one micro-batch) that `rank` holds at its peak, all chunks alike: exact."""
    p, r, m, v = (np.asarray(x, dtype=np.int64) for x in (ranks, rank, microbatches, virtual_stages))
    return spec_of(name).in_flight(p, r, m, v)


def deferred(name: str, ranks: ArrayLike, rank: ArrayLike, microbatches: ArrayLike, virtual_stages: ArrayLike = 1) -> Ints:
    """The most chunks of `rank` whose input gradient is done and whose weight gradient still waits; 0 without a split.

    A waiting chunk keeps what its weight gradients need: with recomputation that is more than what it kept before.
    """
    p, r, m, v = (np.asarray(x, dtype=np.int64) for x in (ranks, rank, microbatches, virtual_stages))
    owed = spec_of(name).deferred
    return 0 * (p + r + m) if owed is None else owed(p, r, m, v)


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
    x = Shape(
        *(p, m, v),
        *(others(tf, sf), others(ti, si), others(tw, sw)),
        *(sf + si + sw, sw / v, tf + ti + tw, send),
    )
    return spec_of(name).makespan(x)
