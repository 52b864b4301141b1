"""Which schedules exist, and which numbers of ranks, micro-batches and stages per rank each accepts.

The rules are those of torch.distributed.pipelining 2.13: what is legal here builds and runs there.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.schedules.actions import V_SHAPED
from ultrascale.specs.errors import SpecError, nearest

SCHEDULES: tuple[str, ...] = ("afab", "1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v")

# Schedules that send micro-batches through the stages of a rank in equal rounds.
_IN_ROUNDS = frozenset({"interleaved", "zero-bubble"})


def rounds(ranks: int, microbatches: int) -> int:
    """Into how many rounds a looped schedule divides its micro-batches: rounds of `ranks`, or a little longer."""
    return max(1, microbatches // ranks)


def legal(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> str | None:
    """None when the schedule can be built, else a sentence: the field, what was given, and a value that works."""
    if name not in SCHEDULES:
        return f"schedule: there is no '{name}'; {nearest(name, SCHEDULES)}"
    for field, given in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if given < 1:
            return f"{field}: {name} needs at least 1, given {given}; use 1 or more"
    if name in ("afab", "1f1b") and virtual_stages != 1:
        return f"virtual_stages: {name} has one stage per rank, given {virtual_stages}; use 1, or schedule 'interleaved'"
    if name == "interleaved" and virtual_stages < 2:
        return f"virtual_stages: interleaved needs 2 stages per rank or more, given {virtual_stages}; use 2, or '1f1b'"
    if name in V_SHAPED and virtual_stages != 2:
        return f"virtual_stages: {name} has exactly two stages per rank, given {virtual_stages}; use 2"
    least = least_microbatches(name, ranks)
    if microbatches < least:
        return (
            f"microbatches: {name} on {ranks} ranks needs at least {least} to fill the pipeline, "
            f"given {microbatches}; use {least}"
        )
    if name in _IN_ROUNDS and microbatches % rounds(ranks, microbatches):
        below, above = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        return (
            f"microbatches: {name} on {ranks} ranks runs them in {rounds(ranks, microbatches)} equal rounds, "
            f"given {microbatches}; use a multiple of {ranks} such as {below} or {above}"
        )
    return None


def least_microbatches(name: str, ranks: int) -> int:
    """The fewest micro-batches with which a schedule works at all."""
    return {"1f1b": ranks, "dualpipe-v": 2 * ranks}.get(name, 1)


def legal_mask(name: str, ranks: ArrayLike, microbatches: ArrayLike, virtual_stages: ArrayLike = 1) -> NDArray[np.bool_]:
    """`legal(...) is None` for whole arrays at once, broadcast against each other."""
    if name not in SCHEDULES:
        raise SpecError(f"schedule: there is no '{name}'; {nearest(name, SCHEDULES)}")
    p, m, v = np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (ranks, microbatches, virtual_stages)))
    mask: NDArray[np.bool_] = (p >= 1) & (m >= 1) & (v >= 1)
    if name in ("afab", "1f1b"):
        mask &= v == 1
    elif name == "interleaved":
        mask &= v >= 2
    elif name in V_SHAPED:
        mask &= v == 2
    if name == "1f1b":
        mask &= m >= p
    elif name == "dualpipe-v":
        mask &= m >= 2 * p
    elif name in _IN_ROUNDS:
        mask &= m % np.maximum(1, m // np.maximum(p, 1)) == 0
    return mask
