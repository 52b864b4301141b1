"""Finds what is wrong with a schedule, in words: for schedules written by hand, read from a file, or changed.

An engine that runs a broken list hangs or, worse, swaps tensors and computes the wrong thing without a word.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from ultrascale.schedules.actions import Action, ActionKind, Schedule
from ultrascale.schedules.simulate import DeadlockError, StageTimes, simulate


def lint(schedule: Schedule, late_receives: bool = False) -> list[str]:
    """Every problem found; an empty list means that the schedule can be run.

    Messages from one stage to the next must be used in the order in which they are sent. That is enough for an engine
    that posts its receives in the order of the peer's sends, as torch does by default. An engine that posts a receive
    only when it is about to be used (torch's `defer_pp_recv`) needs that order per pair of ranks, whatever the stage:
    `late_receives=True` asks for it. The V-shaped schedules do not have it, and must not be run that way.
    """
    problems = _misplaced(schedule)
    if problems:
        return problems  # the checks below index by stage and micro-batch
    problems = _missing_or_doubled(schedule) + _out_of_order(schedule) + _bad_pairs(schedule)
    if not problems:
        try:
            simulate(schedule, StageTimes.uniform(schedule.stages, 1.0, 1.0, 1.0))
        except DeadlockError as error:
            problems.append(f"dependency cycle: {error}")
    return problems + _crossed_messages(schedule, late_receives)


def _misplaced(schedule: Schedule) -> list[str]:
    if len(schedule.actions) != schedule.ranks:
        return [f"{len(schedule.actions)} lists of actions for {schedule.ranks} ranks"]
    problems = []
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            if not 0 <= action.stage < schedule.stages:
                problems.append(f"rank {rank}: {action}: there are only stages 0 to {schedule.stages - 1}")
            elif not 0 <= action.microbatch < schedule.microbatches:
                problems.append(f"rank {rank}: {action}: there are only micro-batches 0 to {schedule.microbatches - 1}")
            elif schedule.rank_of(action.stage) != rank:
                problems.append(f"wrong rank: {action} is on rank {rank}, stage is on {schedule.rank_of(action.stage)}")
    return problems


def _missing_or_doubled(schedule: Schedule) -> list[str]:
    counts = Counter(action[:3] for actions in schedule.actions for action in actions)
    problems = [f"doubled: {Action(*key)} is there {n} times" for key, n in counts.items() if n > 1]
    for stage in range(schedule.stages):
        for k in range(schedule.microbatches):
            there = {kind for kind in ActionKind if counts[kind, stage, k]}
            if ActionKind.F not in there:
                problems.append(f"missing: {Action(ActionKind.F, stage, k)}")
            match ActionKind.B in there, ActionKind.I in there, ActionKind.W in there:
                case (False, False, False):
                    problems.append(f"missing: {Action(ActionKind.B, stage, k)} (or its I and W)")
                case (False, True, False):
                    problems.append(f"missing: {Action(ActionKind.W, stage, k)}")
                case (False, False, True):
                    problems.append(f"missing: {Action(ActionKind.I, stage, k)}")
                case (True, i, w) if i or w:
                    problems.append(f"doubled: {Action(ActionKind.B, stage, k)} beside its {'I' if i else 'W'}")
    return problems


def _out_of_order(schedule: Schedule) -> list[str]:
    problems = []
    for rank, actions in enumerate(schedule.actions):
        place = {action[:3]: at for at, action in enumerate(actions)}
        for (kind, stage, k), at in place.items():
            needed = {ActionKind.B: ActionKind.F, ActionKind.I: ActionKind.F, ActionKind.W: ActionKind.I}.get(kind)
            if needed is not None and place.get((needed, stage, k), -1) > at:
                problems.append(f"rank {rank}: {kind} before {needed}: {Action(kind, stage, k)}")
    return problems


def _bad_pairs(schedule: Schedule) -> list[str]:
    problems = []
    for rank, actions in enumerate(schedule.actions):
        for action, after in zip(actions, (*actions[1:], None), strict=True):
            if action.paired and (
                action.kind is not ActionKind.F or after is None or after.kind not in (ActionKind.B, ActionKind.I)
            ):
                problems.append(f"rank {rank}: bad pair: {action} with {after}; pairs are a forward, then a backward")
    return problems


def _crossed_messages(schedule: Schedule, late_receives: bool) -> list[str]:
    """Per link, the order of sends against the order of their use."""
    sends: dict[tuple[int, ...], list[str]] = defaultdict(list)
    uses: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for actions in schedule.actions:
        for kind, stage, k, _ in actions:
            if kind is ActionKind.W:
                continue
            step = 1 if kind is ActionKind.F else -1
            what = "activations" if kind is ActionKind.F else "gradients"
            for table, source, target in ((sends, stage, stage + step), (uses, stage - step, stage)):
                if min(source, target) < 0 or max(source, target) >= schedule.stages:
                    continue
                link = (schedule.rank_of(source), schedule.rank_of(target))
                if link[0] != link[1]:
                    key: tuple[int, ...] = link if late_receives else (*link, source, target)
                    table[key].append(f"{what} of micro-batch {k} from stage {source}")
    problems = []
    for key, sent in sends.items():
        crossed = [(a, b) for a, b in zip(sent, uses[key], strict=False) if a != b]
        if crossed:
            problems.append(
                f"link from rank {key[0]} to rank {key[1]}: {len(crossed)} of {len(sent)} messages are used in another "
                f"order than sent, first: {crossed[0][0]} is sent where {crossed[0][1]} is expected"
            )
    return problems
