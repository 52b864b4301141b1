"""Every pipeline schedule and what is particular to it: one entry here, and everybody else reads it.

The rules are those of torch.distributed.pipelining 2.13 for the schedules it has: what is legal here builds and runs there.
Letters of the closed forms: P ranks, r the rank, m micro-batches, v stages per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.schedules import formulas
from ultrascale.schedules.actions import KINDS, Action, ActionArrays, Schedule
from ultrascale.schedules.formulas import Floats, Shape
from ultrascale.schedules.orders import (
    V_HALF,
    V_MIN,
    Ints,
    dualpipe_v,
    dualpipe_v_in_flight,
    looped,
    rounds,
    v_shaped,
    zb_v,
    zb_v_in_flight,
)
from ultrascale.specs.errors import SpecError, nearest

Counts = Callable[[Ints, Ints, Ints, Ints], Ints]  # of P, r, m and v
StageCounts = Callable[[Ints, Ints, Ints], tuple[Ints, Ints]]  # of P, r and m: times × stages of the rank × rows, each


@dataclass(frozen=True)
class ScheduleSpec:
    """What a schedule is, which sizes it accepts, what it holds and how long it takes."""

    name: str
    label: str  # a sentence for people: what it does, gains and costs
    lists: Callable[[int, int, int], ActionArrays]  # of P, m and v
    in_flight: Counts  # chunks at the peak
    makespan: Callable[[Shape], Floats]
    least_stages: int = 1  # per rank, and how many there are unless others are asked for
    most_stages: int | None = 1  # None: as many as there are layers
    least_rounds: int = 0  # micro-batches over ranks
    in_rounds: bool = False  # micro-batches pass the stages of a rank in equal rounds
    v_shaped: bool = False  # rank r holds stages r and 2·P − 1 − r
    deferred: Counts | None = None  # the most chunks that wait for their weight gradient; None: the backward is not split
    by_stage: StageCounts | None = None  # of a V: chunks in flight and deferred, by stage of the rank
    defers_last: bool = False  # weight gradients wait only while the pipeline drains
    holds_all: bool = False  # no backward begins before the last forward has ended
    ladder: tuple[str, str] | None = None  # its rung in the playbook's ladder of schedules: name, and what it changes
    torch_name: str | None = None  # its class in torch.distributed.pipelining, less the word Schedule
    engines: tuple[str, ...] = ()  # other engines that have it, beside torchtitan, which has torch's

    @property
    def split_backward(self) -> bool:
        """Weight gradients are separate from input gradients."""
        return self.deferred is not None

    def runs_in(self, engine: str) -> bool:
        """Whether an engine of specs/presets/engines.yaml has it; ours has all."""
        return engine == "ultrascale" or engine in self.engines or (engine == "torchtitan" and self.torch_name is not None)

    def takes(self, virtual_stages: int) -> bool:
        """Whether a rank may have so many stages."""
        return virtual_stages >= self.least_stages and virtual_stages <= (self.most_stages or virtual_stages)


def _v_shaped(name: str, by_stage: StageCounts, **fields: Any) -> ScheduleSpec:
    return ScheduleSpec(
        name,
        in_flight=lambda p, r, m, v: by_stage(p, r, m)[0].sum(axis=1).max(axis=0),
        deferred=lambda p, r, m, v: by_stage(p, r, m)[1].sum(axis=1).max(axis=0),
        by_stage=by_stage,
        least_stages=2,
        most_stages=2,
        v_shaped=True,
        **fields,
    )


REGISTRY = {
    spec.name: spec
    for spec in (
        ScheduleSpec(  # Huang 2019, GPipe
            name="afab",
            label="All forwards, then all backwards: simple, and keeps every micro-batch's activations.",
            lists=partial(looped, warmup=lambda hops, per_round, m, v: m + 0 * hops),
            in_flight=lambda p, r, m, v: m + 0 * (p + r),
            makespan=formulas.afab,
            holds_all=True,
            ladder=("AFAB", "all forwards, then all backwards"),
            torch_name="GPipe",
            engines=("nanotron",),
        ),
        ScheduleSpec(  # Narayanan 2019; 2021, section 2.2.1: forwards until the first gradient can be back
            name="1f1b",
            label="One forward, one backward: the same bubble, with at most as many micro-batches alive as there are stages.",
            lists=partial(looped, warmup=lambda hops, per_round, m, v: hops),
            in_flight=lambda p, r, m, v: np.minimum(m, p - r),
            makespan=formulas.one_f_one_b,
            least_rounds=1,
            ladder=("1F1B", "backwards as early as they can: fewer micro-batches are held"),
            torch_name="1F1B",
            engines=("megatron", "nanotron"),
        ),
        ScheduleSpec(  # Narayanan 2021, section 2.2.2: a forward and a backward hop for every rank further from the loss
            name="interleaved",
            label="Several chunks a rank: the bubble shrinks by their number, messages grow by it.",
            lists=partial(looped, warmup=lambda hops, per_round, m, v: (v - 1) * per_round + 2 * hops),
            in_flight=lambda p, r, m, v: np.minimum((v - 1) * (m // rounds(p, m)) + 2 * (p - 1 - r) + 1, m * v),
            makespan=formulas.interleaved,
            least_stages=2,
            most_stages=None,
            in_rounds=True,
            ladder=("interleaved", "two chunks of layers each: half the bubble"),
            torch_name="Interleaved1F1B",
            engines=("megatron",),
        ),
        ScheduleSpec(  # ZB-H1 of Qi 2023: the gradient comes back without waiting for weight gradients on its way
            name="zero-bubble",
            label="The weights' gradient waits and fills the bubble.",
            lists=partial(looped, warmup=lambda hops, per_round, m, v: (v - 1) * per_round + hops, split=True),
            # P − 1 − r forwards ahead, then r more whose weight gradients are put off: the same on every rank.
            in_flight=lambda p, r, m, v: np.minimum((v - 1) * (m // rounds(p, m)) + p, m * v) + 0 * r,
            makespan=formulas.zero_bubble,
            most_stages=None,
            in_rounds=True,
            deferred=lambda p, r, m, v: np.minimum(r + 1, m * v),
            ladder=("zero bubble", "weight gradients apart, where the bubble was"),
            torch_name="InterleavedZeroBubble",
        ),
        _v_shaped(  # Qi 2024
            name="zb-v",
            label="Stages folded into a V, so that the first rank has the loss: almost no bubble, as little memory as 1f1b.",
            lists=partial(v_shaped, words_of=zb_v),
            by_stage=zb_v_in_flight,
            makespan=formulas.zb_v,
            defers_last=True,
            torch_name="ZBVZeroBubble",
        ),
        _v_shaped(  # DeepSeek-V3 2024, cut to a V by Sea AI Lab
            name="dualpipe-v",
            label="A forward and a backward at once, so that each one's messages hide behind the other.",
            lists=partial(v_shaped, words_of=dualpipe_v, fifo_weights=True),
            by_stage=dualpipe_v_in_flight,
            makespan=formulas.dualpipe_v,
            least_rounds=2,
            defers_last=True,
            ladder=("DualPipe", "two chunks folded to a V, weight gradients apart"),
            torch_name="DualPipeV",
        ),
        _v_shaped(  # Qi, Wan, Huang, Lin 2024, with V-Min
            name="v-half",
            label="A V whose passes follow each other closely: half the activations of 1f1b, and half its bubble.",
            lists=V_HALF.lists,
            by_stage=V_HALF.in_flight,
            makespan=formulas.v_half,
        ),
        _v_shaped(
            name="v-min",
            label="A V whose passes follow each other at once: a third of the activations of 1f1b, if F, I and W are alike.",
            lists=V_MIN.lists,
            by_stage=V_MIN.in_flight,
            makespan=formulas.v_min,
        ),
    )
}

SCHEDULES = tuple(REGISTRY)
DEFAULT_SCHEDULE = "1f1b"  # of a layout that names none, and of one without a pipeline


def unnamed_schedule(ranks: int, microbatches: int, virtual_stages: int) -> str:
    """What an engine runs that names none: 1F1B; interleaved with several stages per rank; AFAB with too few micro-batches."""
    if ranks == 1 or (virtual_stages == 1 and microbatches >= ranks):
        return DEFAULT_SCHEDULE
    return "interleaved" if virtual_stages > 1 else "afab"


def _unknown(name: str) -> str:
    return f"schedule: there is no '{name}'; {nearest(name, REGISTRY)}"


def spec_of(name: str) -> ScheduleSpec:
    """The entry of a schedule, or SpecError."""
    if name not in REGISTRY:
        raise SpecError(_unknown(name))
    return REGISTRY[name]


def legal(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> str | None:
    """None when the schedule can be built, else a sentence: the field, what was given, and a value that works."""
    if name not in REGISTRY:
        return _unknown(name)
    spec = REGISTRY[name]
    for field, given in (("ranks", ranks), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if given < 1:
            return f"{field}: {name} needs at least 1, given {given}; use 1 or more"
    if not spec.takes(virtual_stages):
        return _stages_sentence(spec, virtual_stages)
    least = spec.least_rounds * ranks
    if microbatches < least:
        return (
            f"microbatches: {name} on {ranks} ranks needs at least {least} to fill the pipeline, "
            f"given {microbatches}; use {least}"
        )
    if spec.in_rounds and microbatches % rounds(ranks, microbatches):
        below, above = microbatches // ranks * ranks, -(-microbatches // ranks) * ranks
        return (
            f"microbatches: {name} on {ranks} ranks runs them in {rounds(ranks, microbatches)} equal rounds, "
            f"given {microbatches}; use a multiple of {ranks} such as {below} or {above}"
        )
    return None


def _stages_sentence(spec: ScheduleSpec, given: int) -> str:
    if spec.most_stages == 1:
        return f"virtual_stages: {spec.name} has one stage per rank, given {given}; use 1, or schedule 'interleaved'"
    if spec.most_stages == spec.least_stages:
        return f"virtual_stages: {spec.name} has exactly two stages per rank, given {given}; use 2"
    return f"virtual_stages: {spec.name} needs 2 stages per rank or more, given {given}; use 2, or '1f1b'"


def legal_mask(name: str, ranks: ArrayLike, microbatches: ArrayLike, virtual_stages: ArrayLike = 1) -> NDArray[np.bool_]:
    """`legal(...) is None` for whole arrays at once, broadcast against each other."""
    spec = spec_of(name)
    p, m, v = np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (ranks, microbatches, virtual_stages)))
    mask: NDArray[np.bool_] = (p >= 1) & (m >= np.maximum(1, spec.least_rounds * p)) & (v >= spec.least_stages)
    if spec.most_stages is not None:
        mask &= v <= spec.most_stages
    if spec.in_rounds:
        mask &= m % rounds(np.maximum(p, 1), m) == 0
    return mask


# ------------------------------------------------------------------------------------------------------------- lists of actions


@lru_cache(maxsize=256)
def build(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule `name` (one of `SCHEDULES`) for so many ranks, micro-batches and stages per rank."""
    arrays = lists(name, ranks, microbatches, virtual_stages)
    columns = (arrays.kind.tolist(), arrays.stage.tolist(), arrays.microbatch.tolist(), arrays.paired.tolist())
    actions = [Action(KINDS[kind], stage, k, paired) for kind, stage, k, paired in zip(*columns, strict=True)]
    by_rank = (tuple(actions[start:end]) for start, end in zip(arrays.start, arrays.start[1:], strict=False))
    return Schedule(name, ranks, virtual_stages, microbatches, tuple(by_rank), REGISTRY[name].v_shaped)


@lru_cache(maxsize=512)
def lists(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> ActionArrays:
    """The same as arrays."""
    problem = legal(name, ranks, microbatches, virtual_stages)
    if problem is not None:
        raise SpecError(problem)
    return REGISTRY[name].lists(ranks, microbatches, virtual_stages)


# ----------------------------------------------------------------------------------------------------------------- closed forms
# The search asks these for 10⁵ to 10⁶ layouts at once and simulates only the few that remain. `in_flight` is exact; how far
# `makespan` is from the simulator stands in formulas.py.


def in_flight(name: str, ranks: ArrayLike, rank: ArrayLike, microbatches: ArrayLike, virtual_stages: ArrayLike = 1) -> Ints:
    """Chunk activations (one stage's share of one micro-batch) that `rank` holds at its peak, all chunks alike: exact."""
    p, r, m, v = np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (ranks, rank, microbatches, virtual_stages)))
    return spec_of(name).in_flight(p, r, m, v)


def deferred(name: str, ranks: ArrayLike, rank: ArrayLike, microbatches: ArrayLike, virtual_stages: ArrayLike = 1) -> Ints:
    """The most chunks of `rank` whose input gradient is done and whose weight gradient still waits; 0 without a split.

    A waiting chunk keeps what its weight gradients need: with recomputation that is more than what it kept before.
    """
    p, r, m, v = np.broadcast_arrays(*(np.asarray(x, dtype=np.int64) for x in (ranks, rank, microbatches, virtual_stages)))
    count = spec_of(name).deferred
    return 0 * (p + r + m) if count is None else count(p, r, m, v)


def in_flight_microbatches(
    name: str, ranks: int, rank: ArrayLike, microbatches: ArrayLike, layers: ArrayLike
) -> tuple[Floats, Floats]:
    """`in_flight` and `deferred` in micro-batches' worth of ranks whose stages have so many layers each (ranks × stages), for
    several numbers of micro-batches: ranks × numbers.

    Exact for one stage per rank and for a V; where more stages are looped they are taken for alike.
    """
    spec, of_ranks = spec_of(name), np.asarray(layers, dtype=np.float64)
    p, r, m = np.broadcast_arrays(ranks, np.asarray(rank)[:, None], np.asarray(microbatches))
    v = of_ranks.shape[1]
    if spec.by_stage is None:
        return in_flight(name, p, r, m, v) / v, deferred(name, p, r, m, v) / v
    weights = of_ranks / of_ranks.sum(axis=1, keepdims=True)
    chunks, put_off = (np.einsum("rs,tsrm->trm", weights, levels).max(axis=0) for levels in spec.by_stage(p, r, m))
    return chunks, put_off


def makespan(
    name: str,
    ranks: ArrayLike,
    microbatches: ArrayLike,
    virtual_stages: ArrayLike,
    total: Sequence[ArrayLike],
    slowest: Sequence[ArrayLike],
    send_s: ArrayLike = 0.0,
) -> Floats:
    """Seconds from the first forward to the last backward of a step.

    `total` are F, I and W of one micro-batch summed over all stages, `slowest` over the stages of the slowest rank; a full
    backward is I + W.
    """
    p, m, v, *total_s, send = (np.asarray(x, dtype=np.float64) for x in (ranks, microbatches, virtual_stages, *total, send_s))
    slowest_s = [np.asarray(x, dtype=np.float64) for x in slowest]
    f, i, w = (
        np.where(p > 1, all_s - slow_s, slow_s) / (v * np.maximum(p - 1, 1))
        for all_s, slow_s in zip(total_s, slowest_s, strict=True)
    )
    send = np.where(p > 1, send, 0.0)  # one rank sends to nobody
    slow, whole = (np.asarray(parts[0] + parts[1] + parts[2]) for parts in (slowest_s, total_s))
    return spec_of(name).makespan(Shape(p, m, v, f, i, w, slow, slowest_s[2] / v, whole, send))
