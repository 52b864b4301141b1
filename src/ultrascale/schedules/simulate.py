"""Runs a schedule against given stage times and says when everything happens.

Each rank works through its list in order; an action starts as soon as the rank is free and its input has arrived.
Sends are asynchronous: a hop delays the receiver and costs the sender nothing; a hop within a rank is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ultrascale.schedules.actions import Action, ActionKind, Schedule


class DeadlockError(RuntimeError):
    """The lists wait for each other (or for an action that is in none of them)."""


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
        match kind:
            case ActionKind.F:
                return self.forward_s
            case ActionKind.I:
                return self.input_grad_s
            case ActionKind.W:
                return self.weight_grad_s
            case ActionKind.B:
                return tuple(i + w for i, w in zip(self.input_grad_s, self.weight_grad_s, strict=True))


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


def simulate(schedule: Schedule, times: StageTimes) -> Timeline:
    """When every action starts and ends. Raises DeadlockError if some action can never start."""
    for field in ("forward_s", "input_grad_s", "weight_grad_s"):
        if len(getattr(times, field)) != schedule.stages:
            raise ValueError(f"{field} has {len(getattr(times, field))} entries, the schedule {schedule.stages} stages")
    m, last = schedule.microbatches, schedule.stages - 1
    hop = [times.send_s if schedule.rank_of(stage) != schedule.rank_of(stage + 1) else 0.0 for stage in range(last)]
    # When the output (or the input gradient) of stage × m + microbatch is there; negative: not yet.
    forward_end = [-1.0] * (schedule.stages * m)
    grad_end = [-1.0] * (schedule.stages * m)

    def ready_s(action: Action) -> float:
        """When the action's input is on its rank; negative: not yet known."""
        kind, stage, k, _ = action
        here = stage * m + k
        if kind is ActionKind.F:
            if stage == 0:
                return 0.0
            sent = forward_end[here - m]
            return sent if sent < 0 else sent + hop[stage - 1]
        if kind is ActionKind.W:
            return grad_end[here]
        if stage == last or forward_end[here] < 0:
            return forward_end[here]
        sent = grad_end[here + m]
        return sent if sent < 0 else sent + hop[stage]

    duration = {kind: times.of(kind) for kind in ActionKind}
    units = [list(_units(rank_actions)) for rank_actions in schedule.actions]
    cursor = [0] * schedule.ranks
    free_s = [0.0] * schedule.ranks
    busy_s = [0.0] * schedule.ranks
    events: list[list[Event]] = [[] for _ in range(schedule.ranks)]

    def advance(rank: int) -> bool:
        """Runs a rank until it has to wait; False when it has to wait at once."""
        todo, at, free = units[rank], cursor[rank], free_s[rank]
        while at < len(todo):
            unit = todo[at]
            start, took = free, 0.0
            for action in unit:
                ready = ready_s(action)
                if ready < 0:
                    start = -1.0
                    break
                start = max(start, ready)
                took += duration[action.kind][action.stage]
            if start < 0:
                break
            free = start + took
            busy_s[rank] += took
            for action in unit:
                here = action.stage * m + action.microbatch
                if action.kind is ActionKind.F:
                    forward_end[here] = free
                elif action.kind is not ActionKind.W:
                    grad_end[here] = free
                events[rank].append(Event(rank, action, start, free))
            at += 1
        moved = at > cursor[rank]
        cursor[rank], free_s[rank] = at, free
        return moved

    while sum(advance(rank) for rank in range(schedule.ranks)):  # not any(): every rank gets its turn
        pass
    waiting = [(rank, todo[at:]) for rank, (todo, at) in enumerate(zip(units, cursor, strict=True))]
    stuck = [f"rank {rank} at {todo[0][0]}" for rank, todo in waiting if todo]
    if stuck:
        raise DeadlockError(f"{schedule.name}: the lists wait for each other: " + ", ".join(stuck))
    makespan_s = max(free_s)
    return Timeline(
        tuple(event for rank_events in events for event in rank_events),
        makespan_s,
        tuple(busy_s),
        tuple(makespan_s - busy for busy in busy_s),
    )


def _units(actions: tuple[Action, ...]) -> Iterator[tuple[Action, ...]]:
    """What a rank starts as one: single actions, and pairs."""
    rest = iter(actions)
    for action in rest:
        yield (action, next(rest)) if action.paired else (action,)
