"""References for the schedules' tests: what a rank holds, and when its actions end, one action at a time."""

from __future__ import annotations

from ultrascale.schedules import Action, ActionKind, Schedule, StageTimes


def most_in_flight(schedule: Schedule, rank: int) -> int:
    """From its forward to its backward, or to its weight gradient where the backward is split."""
    in_flight = most = 0
    for action in schedule.actions[rank]:
        in_flight += {ActionKind.F: 1, ActionKind.I: 0}.get(action.kind, -1)
        most = max(most, in_flight)
    assert in_flight == 0
    return most


def ends_s(schedule: Schedule, times: StageTimes) -> dict[Action, float]:
    """When each action ends: ranks take turns, each runs its list until it lacks an input."""
    ends: dict[Action, float] = {}
    results: dict[tuple[bool, int, int], float] = {}  # of forwards and of input gradients
    cursor, free = [0] * schedule.ranks, [0.0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while cursor[rank] < len(actions):
                unit = actions[cursor[rank] : cursor[rank] + 1 + actions[cursor[rank]].paired]
                inputs = [_input_s(schedule, times, action, results) for action in unit]
                if None in inputs:
                    break
                start = max(free[rank], *(ready for ready in inputs if ready is not None))
                free[rank] = start + sum(times.of(action.kind)[action.stage] for action in unit)
                for action in unit:
                    ends[action] = free[rank]
                    if action.kind is not ActionKind.W:
                        results[action.kind is ActionKind.F, action.stage, action.microbatch] = free[rank]
                cursor[rank] += len(unit)
                moved = True
    return ends


def _input_s(
    schedule: Schedule, times: StageTimes, action: Action, results: dict[tuple[bool, int, int], float]
) -> float | None:
    """When the input is on the action's rank; None: not yet known."""
    kind, stage, microbatch, _ = action
    forward = kind is ActionKind.F
    source = stage - 1 if forward else stage + 1
    if kind is ActionKind.W or not 0 <= source < schedule.stages:
        return 0.0
    sent = results.get((forward, source, microbatch))
    hop = times.send_s if schedule.rank_of(source) != schedule.rank_of(stage) else 0.0
    return None if sent is None else sent + hop
