"""Builds the action lists of every schedule, action for action those of torch.distributed.pipelining 2.13.

Equality with torch is what lets the engine run exactly what the planner simulated; a test holds it. Where torch has a
peculiarity (rounds that stretch beyond the number of ranks, micro-batches struck from a longer ZB-V) it is kept.
A search asks for lists of 10⁵ actions, so they are made as arrays; `build` spells them out.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ultrascale.schedules.actions import KINDS, Action, ActionArrays, ActionKind, Schedule
from ultrascale.schedules.legal import legal, rounds
from ultrascale.specs.errors import SpecError

Ints = NDArray[np.int64]
F, B, I, W = (KINDS.index(kind) for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W))  # noqa: E741 - the papers' letters


@lru_cache(maxsize=256)
def build(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule `name` (one of `SCHEDULES`) for so many ranks, micro-batches and stages per rank."""
    made = lists(name, ranks, microbatches, virtual_stages)
    columns = (made.kind.tolist(), made.stage.tolist(), made.microbatch.tolist(), made.paired.tolist())
    actions = [Action(KINDS[kind], stage, k, paired) for kind, stage, k, paired in zip(*columns, strict=True)]
    by_rank = (tuple(actions[start:end]) for start, end in zip(made.start, made.start[1:], strict=False))
    return Schedule(name, ranks, virtual_stages, microbatches, tuple(by_rank))


@lru_cache(maxsize=512)
def lists(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> ActionArrays:
    """The same as arrays."""
    problem = legal(name, ranks, microbatches, virtual_stages)
    if problem is not None:
        raise SpecError(problem)
    if name in _V_SHAPES:
        return _v_shaped(name, ranks, microbatches)
    return _looped(name, ranks, microbatches, virtual_stages)


def _looped(name: str, ranks: int, microbatches: int, virtual_stages: int) -> ActionArrays:
    """A rank's turns: in each a forward, the backward of `warmup` turns ago, the weight gradient of `late` more turns ago.

    Micro-batches pass in rounds, a round on one stage, then on the next.
    """
    per_round = microbatches // rounds(ranks, microbatches)
    chunks = microbatches * virtual_stages
    rank = np.arange(ranks)[:, None]
    n = np.arange(chunks)
    turn, place = np.divmod(n, per_round)
    round_, chunk = np.divmod(turn, virtual_stages)
    microbatch = round_ * per_round + place
    warmup = np.minimum(_warmup(name, ranks, rank, per_round, microbatches, virtual_stages), chunks)
    delayed: list[tuple[int, Ints]] = [(F, 0 * rank), (B, warmup)]
    if name == "zero-bubble":  # rank r runs r weight gradients late: as many as it must wait for at the end
        delayed = [(F, 0 * rank), (I, warmup), (W, warmup + rank)]
    made = np.empty((3, ranks, len(delayed) * chunks), dtype=np.int64)
    for order, (kind, delay) in enumerate(delayed):
        # Before the n-th of a kind come n of its own, and of each other kind those of earlier turns, or earlier in this one.
        others = [(before, other) for before, (_, other) in enumerate(delayed) if before != order]
        position = n + sum(np.clip(n + delay - other + (before < order), 0, chunks) for before, other in others)
        on = chunk if kind == F else virtual_stages - 1 - chunk
        for row, values in zip(made, (kind + 0 * position, on * ranks + rank, microbatch + 0 * rank), strict=True):
            np.put_along_axis(row, position, values, axis=1)
    kinds, stages, of = made.reshape(3, -1)
    start = np.arange(ranks + 1) * made.shape[2]
    return ActionArrays(name, ranks, virtual_stages, microbatches, kinds, stages, of, np.zeros(len(kinds), dtype=bool), start)


def _warmup(name: str, ranks: int, rank: Ints, per_round: int, microbatches: int, virtual_stages: int) -> Ints:
    """Forwards before the turn of the first backward."""
    hops = ranks - 1 - rank
    match name:
        case "afab":  # all forwards, then all backwards (Huang 2019, GPipe)
            return microbatches + 0 * rank
        case "1f1b":  # forwards until the first gradient can be back (Narayanan 2019, 2021)
            return hops
        case "interleaved":  # a forward and a backward hop for every rank further from the loss (Narayanan 2021, section 2.2)
            return (virtual_stages - 1) * per_round + 2 * hops
        case _:  # ZB-H1 of Qi 2023: one per hop, as the gradient comes back without waiting for weight gradients on its way
            return (virtual_stages - 1) * per_round + hops


# Words of a V-shaped rank's list: kind and way, down to the fold (0) or up from it (1); the forward of a pair has its own.
_WORDS = ((F, 0), (F, 1), (B, 0), (B, 1), (I, 0), (I, 1), (W, 0), (W, 1), (F, 0), (F, 1))
FD, FU, BD, BU, ID, IU, WD, WU, PD, PU = range(10)


def _v_shaped(name: str, ranks: int, microbatches: int) -> ActionArrays:
    """Rank r holds stages r and 2·ranks − 1 − r; micro-batches are counted per kind and way."""
    by_rank = [_V_SHAPES[name](ranks, rank, microbatches) for rank in range(ranks)]
    words = np.asarray([word for each in by_rank for word in each])
    rank = np.repeat(np.arange(ranks), [len(each) for each in by_rank])
    kind, way = np.asarray(_WORDS)[words].T
    counted = np.where(kind == B, I, kind)  # a full backward takes its turn among the input gradients
    microbatch = _count((rank * 2 + way) * len(KINDS) + counted)
    if name == "dualpipe-v":  # weight gradients are paid in the order in which they were owed, whatever their way
        owed, paid = np.flatnonzero(kind == I), np.flatnonzero(kind == W)
        way[paid], microbatch[paid] = way[owed], microbatch[owed]
    stage = np.where(way == 0, rank, 2 * ranks - 1 - rank)
    keep = microbatch < microbatches  # torch builds ZB-V for enough to fill the V and strikes those that do not exist
    start = np.searchsorted(rank[keep], np.arange(ranks + 1))
    return ActionArrays(name, ranks, 2, microbatches, kind[keep], stage[keep], microbatch[keep], words[keep] >= PD, start)


def _count(key: Ints) -> Ints:
    """How many entries before each have the same key."""
    order = np.argsort(key, kind="stable")
    sizes = np.bincount(key)
    count = np.empty(len(key), dtype=np.int64)
    count[order] = np.arange(len(key)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return count


def _zb_v(ranks: int, rank: int, microbatches: int) -> list[int]:
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


def _dualpipe_v(ranks: int, rank: int, microbatches: int) -> list[int]:
    """DualPipe (DeepSeek-V3, 2024) cut to a V (Sea AI Lab): forwards run paired with backwards to hide traffic."""
    ahead = ranks - 1 - rank
    pairs = [PD, BU, PU, BD] * (microbatches - 2 * ranks + rank + 1)
    if rank == ranks - 1:
        pairs[0] = FD  # left apart: its backward needs the forward just before it, on the same rank
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


_V_SHAPES = {"zb-v": _zb_v, "dualpipe-v": _dualpipe_v}
