"""How long whole pipelines take, many at once: what a search asks, which wants no event but the last.

The same rules as in `simulate`, with which tests compare it. All ranks of all pipelines take a turn together: who has its
input computes one more action, the others wait. A weight gradient waits for nobody and nobody waits for it, so it only
keeps its rank busy for longer after the action before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrascale.schedules.actions import KINDS, ActionKind, rank_of
from ultrascale.schedules.build import lists
from ultrascale.schedules.registry import REGISTRY, legal
from ultrascale.schedules.simulate import DeadlockError, StageTimes
from ultrascale.specs.errors import SpecError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# Two places in nobody's list: what is there from the beginning, and what never comes.
GIVEN, NEVER = 0, 1
TURNS = 16  # between two looks for ranks that have finished


class TimedSchedule(NamedTuple):
    """A schedule, and how long its stages take."""

    name: str
    ranks: int
    microbatches: int
    virtual_stages: int
    times: StageTimes


@dataclass(frozen=True)
class _Places:
    """Where the ranks of a schedule may have to wait: its actions but weight gradients, rank after rank, each with an end."""

    source: Ints
    """the place of another rank whose result is needed; GIVEN where there is none, NEVER at an end"""
    first: Ints
    """where each rank begins"""
    place: Ints
    """of each action, where its result is made: both of a pair at the second, as they end together"""
    duration: Ints
    """of the same action, where its time stands among those of all kinds and stages"""
    weights_after: Ints
    """of each weight gradient, the place after which it runs"""
    weights_duration: Ints


@lru_cache(maxsize=512)
def _places(name: str, ranks: int, microbatches: int, virtual_stages: int) -> _Places:
    made = lists(name, ranks, microbatches, virtual_stages)
    weights = made.kind == KINDS.index(ActionKind.W)
    waits = ~weights
    kind, stage, microbatch, rank = (each[waits] for each in (made.kind, made.stage, made.microbatch, made.rank))
    own = np.arange(len(kind)) + rank  # an end stands behind each rank
    place = own + made.paired[waits]
    ends = np.searchsorted(rank, np.arange(ranks), side="right") + np.arange(ranks)
    holder = np.empty(made.stages, dtype=np.int64)
    holder[stage] = rank
    forward = kind == KINDS.index(ActionKind.F)
    before = np.where(forward, stage - 1, stage + 1)
    comes = (before >= 0) & (before < made.stages)
    comes[comes] = holder[before[comes]] != rank[comes]  # what the rank itself made, it made earlier
    results = np.empty((2, made.stages, microbatches), dtype=np.int64)
    results[1 * forward, stage, microbatch] = place
    source = np.full(len(kind) + ranks, GIVEN)
    source[own[comes]] = 2 + results[1 * forward[comes], before[comes], microbatch[comes]]
    source[ends] = NEVER
    duration = made.kind * made.stages + made.stage
    weights_after = own[np.cumsum(waits)[weights] - 1]
    return _Places(source, np.append(0, ends[:-1] + 1), place, duration[waits], weights_after, duration[weights])


def makespans(pipelines: Sequence[TimedSchedule]) -> list[float]:
    """Seconds from the first forward to the last backward of each, every action simulated."""
    if not pipelines:
        return []
    shapes = [_places(*pipeline[:-1]) for pipeline in pipelines]
    nothing: Floats = np.zeros(2)
    sources, took, after, begins = [np.asarray([GIVEN, NEVER])], [nothing], [nothing], []
    shift = 0
    for pipeline, shape in zip(pipelines, shapes, strict=True):
        size, each = len(shape.source), np.concatenate([pipeline.times.of(kind) for kind in KINDS])
        sources.append(np.where(shape.source > NEVER, shape.source + shift, shape.source))
        took.append(_summed(shape.place, each[shape.duration], size))
        after.append(_summed(shape.weights_after, each[shape.weights_duration], size))
        begins.append(shape.first + 2 + shift)
        shift += size
    ranks = [pipeline.ranks for pipeline in pipelines]
    hops = np.repeat([pipeline.times.send_s for pipeline in pipelines], ranks)
    ends = _run(np.concatenate(sources), np.concatenate(took), np.concatenate(after), np.concatenate(begins), hops)
    return [float(end) for end in np.maximum.reduceat(ends, np.cumsum([0, *ranks[:-1]]))]


def _summed(place: Ints, seconds: Floats, size: int) -> Floats:
    return np.asarray(np.bincount(place, seconds, size), dtype=np.float64)


def _run(source: Ints, took: Floats, after: Floats, begin: Ints, hop: Floats) -> Floats:
    """When each rank has done its list, which begins at a given place; its results need a `hop` to where they go."""
    there = np.full(len(source), np.inf)  # when the result of a place is where it goes; infinite: not yet known
    there[GIVEN] = 0.0
    ends, free = np.zeros(len(begin)), np.zeros(len(begin))
    rank, at = np.arange(len(begin)), begin
    while len(rank):
        stood = at
        for _ in range(TURNS):
            ready = there.take(source.take(at))
            end = np.maximum(free, ready) + took.take(at)
            there[at] = end + hop
            moves = ready < np.inf
            free = np.where(moves, end + after.take(at), free)
            at = at + moves
        goes_on = source[at] != NEVER
        if goes_on.any() and (at == stood).all():
            raise DeadlockError("the lists wait for each other")
        ends[rank[~goes_on]] = free[~goes_on]
        rank, at, free, hop = rank[goes_on], at[goes_on], free[goes_on], hop[goes_on]
    return ends


def simulate_makespans(pipelines: Sequence[TimedSchedule], cap: int = 64) -> list[float]:
    """Seconds from the first forward to the last backward of each, simulating at most about `cap` micro-batches.

    Beyond `cap` the makespan is extrapolated linearly from two smaller simulations that differ by whole rounds: once
    the pipeline is full every further round costs the same. In the long run no micro-batch costs less than the slowest
    rank's work on it; while the two simulations still show less, and that could matter by 0.1 %, `cap` is doubled.
    """
    for pipeline in pipelines:
        problem = legal(*pipeline[:-1])
        if problem is not None:
            raise SpecError(problem)
    found: dict[int, float] = {}
    large = {n: max(cap, 4 * one.ranks, 2 * REGISTRY[one.name].least_rounds * one.ranks) for n, one in enumerate(pipelines)}
    while large:
        asked = {n: _two_sizes(pipelines[n], most) for n, most in large.items()}
        wanted = [pipelines[n]._replace(microbatches=size) for n, sizes in asked.items() for size in sizes]
        spans = iter(makespans(wanted))
        for n, sizes in asked.items():
            one, spans_s = pipelines[n], [next(spans) for _ in sizes]
            makespan_s, settled = spans_s[0], len(sizes) == 1
            if not settled:
                pace_s = (spans_s[1] - spans_s[0]) / (sizes[1] - sizes[0])
                rest = one.microbatches - sizes[1]
                makespan_s = spans_s[1] + pace_s * rest
                settled = (_slowest_s(one) - pace_s) * rest <= 1e-3 * makespan_s
            if settled:
                found[n] = makespan_s
                large.pop(n)
            else:
                large[n] = 2 * sizes[1]
    return [found[n] for n in range(len(pipelines))]


def _two_sizes(pipeline: TimedSchedule, most: int) -> tuple[int, ...]:
    """Numbers of micro-batches to extrapolate from, whole rounds away from what is asked; or that alone."""
    name, ranks, microbatches, virtual_stages, _ = pipeline
    large = most - (most - microbatches) % ranks
    small = large - max(1, large // (2 * ranks)) * ranks
    if microbatches <= large or any(legal(name, ranks, n, virtual_stages) for n in (small, large)):
        return (microbatches,)
    return small, large


def _slowest_s(pipeline: TimedSchedule) -> float:
    """The slowest rank's work on one micro-batch."""
    times, work_s = pipeline.times, [0.0] * pipeline.ranks
    for stage, parts in enumerate(zip(times.forward_s, times.input_grad_s, times.weight_grad_s, strict=True)):
        work_s[rank_of(stage, pipeline.ranks, REGISTRY[pipeline.name].v_shaped)] += sum(parts)
    return max(work_s)


def simulate_makespan(name: str, ranks: int, microbatches: int, virtual_stages: int, times: StageTimes, cap: int = 64) -> float:
    """The same of one."""
    return simulate_makespans([TimedSchedule(name, ranks, microbatches, virtual_stages, times)], cap)[0]
