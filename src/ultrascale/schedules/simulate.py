"""The pipeline simulator: when every action of a schedule runs, and how long many pipelines take at once.

Each rank works through its list in order; an action starts as soon as the rank is free and its input has arrived. Sends are
asynchronous: a hop delays the receiver and costs the sender nothing; a hop within a rank is free. All ranks of all pipelines
take a turn together: a rank that has its input computes one more action, the others wait. A weight gradient waits for nobody
and nobody waits for it, so it only keeps its rank busy for longer after the action before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrascale.schedules.actions import KINDS, Action, ActionArrays, ActionKind, Schedule, rank_of
from ultrascale.schedules.registry import REGISTRY, legal, lists
from ultrascale.specs.errors import SpecError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# Three places in nobody's list: an input that is there from the beginning, the end of a list, an input that never comes.
GIVEN, END, ABSENT = 0, 1, 2
FIRST_ACTION = 3
ROUNDS_PER_CHECK = 16  # between two looks for ranks that have finished


class DeadlockError(RuntimeError):
    """The lists wait for each other (or for an action that is in none of them)."""

    def __init__(self, text: str, waiting: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__(text)
        self.waiting = waiting  # ranks and places of their next actions


@dataclass(frozen=True)
class StageTimes:
    """Seconds one micro-batch takes, per global stage; a full backward takes input and weight gradient together."""

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    send_s: float = 0.0  # activation or gradient from one stage to the next, when they live on different ranks

    @classmethod
    def uniform(
        cls, stages: int, forward_s: float, input_grad_s: float, weight_grad_s: float, send_s: float = 0.0
    ) -> StageTimes:
        """All stages alike."""
        return cls((forward_s,) * stages, (input_grad_s,) * stages, (weight_grad_s,) * stages, send_s)

    def of(self, kind: ActionKind) -> tuple[float, ...]:
        """How long an action of this kind computes, per global stage."""
        if kind is ActionKind.B:
            return tuple(i + w for i, w in zip(self.input_grad_s, self.weight_grad_s, strict=True))
        return {ActionKind.F: self.forward_s, ActionKind.I: self.input_grad_s, ActionKind.W: self.weight_grad_s}[kind]

    @property
    def by_kind(self) -> Floats:
        """Of all kinds and stages, in the order of KINDS."""
        return np.concatenate([self.of(kind) for kind in KINDS])


class TimedSchedule(NamedTuple):
    """A schedule, and how long its stages take."""

    name: str
    ranks: int
    microbatches: int
    virtual_stages: int
    times: StageTimes


class Event(NamedTuple):
    """An action in time. The two actions of a pair share one interval: both results are there at its end."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """What happened: the events of every rank in order, and what they add up to."""

    events: tuple[Event, ...]
    makespan_s: float
    busy_s: tuple[float, ...]  # per rank
    bubble_s: tuple[float, ...]  # per rank: makespan − busy

    @property
    def bubble_fraction(self) -> float:
        """Idle share of all rank-time (Narayanan 2021 divides by busy time instead)."""
        return sum(self.bubble_s) / (len(self.bubble_s) * self.makespan_s) if self.makespan_s else 0.0


# ----------------------------------------------------------------------------------------------------------------- one pipeline


def simulate(schedule: Schedule, times: StageTimes) -> Timeline:
    """When every action starts and ends. Raises DeadlockError if some action can never start."""
    for field in ("forward_s", "input_grad_s", "weight_grad_s"):
        if len(getattr(times, field)) != schedule.stages:
            raise ValueError(f"{field} has {len(getattr(times, field))} entries, the schedule {schedule.stages} stages")
    arrays = schedule.arrays()
    waits = _dependencies(arrays)
    took, after = _durations(waits, times)
    try:
        ends, _ = _run(waits.source, took, after, waits.first + FIRST_ACTION, np.full(schedule.ranks, times.send_s))
    except DeadlockError as error:
        at = [
            f"rank {rank} at {_action_at(schedule, rank, place - FIRST_ACTION - waits.first[rank])}"
            for rank, place in error.waiting
        ]
        raise DeadlockError(f"{schedule.name}: the lists wait for each other: " + ", ".join(at)) from None
    places = iter((waits.place + FIRST_ACTION).tolist())
    duration = {kind: times.of(kind) for kind in ActionKind}
    events, busy_s, free_s = [], [], []
    for rank, actions in enumerate(schedule.actions):
        free = 0.0
        for action in actions:
            if action.kind is ActionKind.W:
                start, free = free, free + duration[action.kind][action.stage]
            else:
                place = next(places)
                free = float(ends[place])
                start = free - float(took[place])
            events.append(Event(rank, action, start, free))
        busy_s.append(sum(duration[action.kind][action.stage] for action in actions))
        free_s.append(free)
    makespan_s = max(free_s)
    return Timeline(tuple(events), makespan_s, tuple(busy_s), tuple(makespan_s - busy for busy in busy_s))


def _action_at(schedule: Schedule, rank: int, place: int) -> Action:
    """The rank's action, weight gradients not counted; of a pair that waits, its forward."""
    actions = [action for action in schedule.actions[rank] if action.kind is not ActionKind.W]
    return actions[place - 1] if place and actions[place - 1].paired else actions[place]


# --------------------------------------------------------------------------------------------------------------- many pipelines


@dataclass(frozen=True)
class _Dependencies:
    """Where ranks may have to wait: actions other than weight gradients, rank after rank, each list with an end behind it."""

    source: Ints
    """the place whose result is needed; GIVEN, END or ABSENT"""
    first: Ints
    """where each rank begins"""
    place: Ints
    """of each action, where its result is made: both of a pair at the second, as they end together"""
    duration: Ints
    """of the same action, where its time stands in `StageTimes.by_kind`"""
    weights_after: Ints
    """of each weight gradient, the place after which it runs"""
    weights_duration: Ints


def _dependencies(arrays: ActionArrays) -> _Dependencies:
    weights = arrays.kind == KINDS.index(ActionKind.W)
    waits = ~weights
    kind, stage, microbatch, rank = (each[waits] for each in (arrays.kind, arrays.stage, arrays.microbatch, arrays.rank))
    own = np.arange(len(kind)) + rank
    place = own + arrays.paired[waits]
    ends = np.searchsorted(rank, np.arange(arrays.ranks), side="right") + np.arange(arrays.ranks)
    forward = 1 * (kind == KINDS.index(ActionKind.F))
    results = np.full((2, arrays.stages, arrays.microbatches), ABSENT - FIRST_ACTION)
    results[forward, stage, microbatch] = place
    holder = np.full(arrays.stages, -1)
    holder[stage] = rank
    before = stage + np.where(forward, -1, 1)
    needs = (before >= 0) & (before < arrays.stages)
    needed = results[forward[needs], before[needs], microbatch[needs]]
    source = np.full(len(kind) + arrays.ranks, GIVEN)
    # What the rank itself makes, it must have made earlier: then there is nothing to wait for.
    earlier = (holder[before[needs]] == rank[needs]) & (needed >= 0) & (needed < own[needs])
    source[own[needs]] = np.where(earlier, GIVEN, FIRST_ACTION + needed)
    source[own[(forward == 0) & (results[1, stage, microbatch] >= own)]] = ABSENT  # a backward before its forward
    source[ends] = END
    duration = arrays.kind * arrays.stages + arrays.stage
    weights_after = own[np.cumsum(waits)[weights] - 1]
    first = np.append(0, ends[:-1] + 1)
    source = np.append((GIVEN, END, ABSENT), source)
    return _Dependencies(source, first, place, duration[waits], weights_after, duration[weights])


@lru_cache(maxsize=512)
def _dependencies_of(name: str, ranks: int, microbatches: int, virtual_stages: int) -> _Dependencies:
    return _dependencies(lists(name, ranks, microbatches, virtual_stages))


def _durations(waits: _Dependencies, times: StageTimes) -> tuple[Floats, Floats]:
    """Of every place: seconds of its action, and of the weight gradients after it."""
    each, size = times.by_kind, len(waits.source)

    def summed(place: Ints, duration: Ints) -> Floats:
        return np.bincount(place + FIRST_ACTION, each[duration], size).astype(np.float64)

    return summed(waits.place, waits.duration), summed(waits.weights_after, waits.weights_duration)


def _run(source: Ints, took: Floats, after: Floats, begin: Ints, hop: Floats) -> tuple[Floats, Floats]:
    """When each place has its result, and when each rank has done its list, which begins at a given place."""
    result = np.full(len(source), np.inf)  # infinite: not yet known
    result[GIVEN] = -np.inf
    done, free = np.zeros(len(begin)), np.zeros(len(begin))
    rank, at = np.arange(len(begin)), begin
    while len(rank):
        stood = at
        for _ in range(ROUNDS_PER_CHECK):
            ready = result.take(source.take(at)) + hop
            end = np.maximum(free, ready) + took.take(at)
            result[at] = end
            moves = ready < np.inf
            free = np.where(moves, end + after.take(at), free)
            at = at + moves
        goes_on = source[at] != END
        if goes_on.any() and (at == stood).all():
            waiting = zip(rank[goes_on].tolist(), at[goes_on].tolist(), strict=True)
            raise DeadlockError("the lists wait for each other", tuple(waiting))
        done[rank[~goes_on]] = free[~goes_on]
        rank, at, free, hop = rank[goes_on], at[goes_on], free[goes_on], hop[goes_on]
    return result, done


def makespans(pipelines: Sequence[TimedSchedule]) -> list[float]:
    """Seconds from the first forward to the last backward of each, every action simulated."""
    if not pipelines:
        return []
    all_waits = [_dependencies_of(*pipeline[:-1]) for pipeline in pipelines]
    shifts = np.cumsum([0, *(len(waits.source) for waits in all_waits)]).tolist()
    sources = [
        np.where(waits.source >= FIRST_ACTION, waits.source + shift, waits.source)
        for waits, shift in zip(all_waits, shifts, strict=False)
    ]
    begins = [waits.first + FIRST_ACTION + shift for waits, shift in zip(all_waits, shifts, strict=False)]
    durations = [_durations(waits, one.times) for waits, one in zip(all_waits, pipelines, strict=True)]
    took, after = (np.concatenate(parts) for parts in zip(*durations, strict=True))
    ranks = [pipeline.ranks for pipeline in pipelines]
    hops = np.repeat([pipeline.times.send_s for pipeline in pipelines], ranks)
    _, done = _run(np.concatenate(sources), took, after, np.concatenate(begins), hops)
    return [float(end) for end in np.maximum.reduceat(done, np.cumsum([0, *ranks[:-1]]))]


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
        sizes_of = {n: _two_sizes(pipelines[n], most) for n, most in large.items()}
        wanted = [pipelines[n]._replace(microbatches=size) for n, sizes in sizes_of.items() for size in sizes]
        spans = iter(makespans(wanted))
        for n, sizes in sizes_of.items():
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


# ------------------------------------------------------------------------------------------------------------ a picture in text


def draw(schedule: Schedule, input_grad: int = 1, weight_grad: int = 1) -> str:
    """A Gantt chart with F = 1 column, I and W as given (whole columns), and sends that take no time.

    A cell names the kind and the micro-batch: capitals for a rank's first stage, small letters for its later ones.
    `-` continues a longer action, `+` is paired with the one before it, `.` is a bubble.
    """
    timeline = simulate(schedule, StageTimes.uniform(schedule.stages, 1.0, input_grad, weight_grad))
    width = len(str(schedule.microbatches - 1)) + 1 + any(a.paired for actions in schedule.actions for a in actions)
    columns = round(timeline.makespan_s)
    rows = [["." * width] * columns for _ in range(schedule.ranks)]
    joined: dict[tuple[int, int], str] = {}  # (rank, start) of a pair's forward: its label
    for rank, action, start_s, end_s in timeline.events:
        first = action.stage == schedule.stages_of(rank)[0]
        label = f"{action.kind if first else action.kind.lower()}{action.microbatch}"
        start, end = round(start_s), round(end_s)
        if action.paired:
            joined[rank, start] = label
            continue
        cells = [label, *["-" * width] * (end - start - 1)]
        if (rank, start) in joined:
            cells = [joined.pop((rank, start)), "+" + label, *cells[2:]]
        rows[rank][start:end] = cells
    name = len(str(schedule.ranks - 1))
    return "\n".join(
        f"rank {rank:>{name}} |" + " ".join(cell.ljust(width) for cell in row) + "|" for rank, row in enumerate(rows)
    )
