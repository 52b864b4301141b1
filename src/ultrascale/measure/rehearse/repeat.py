"""How few micro-batches show a whole step: a schedule's list is a beginning, a stretch that repeats itself, and an end.

A rehearsal runs the shortest list that holds as much at its peak and differs from the whole one only in how often that stretch
is repeated; what is seen there then counts as often as the whole list has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ultrascale.schedules import Action, ActionKind, Schedule
from ultrascale.specs.layout import Layout
from ultrascale.train.build import schedule_of

Step = tuple[ActionKind, int]


@dataclass(frozen=True)
class ShortSchedule:
    """So many micro-batches instead of all, and the stretch of their list that the whole list repeats."""

    microbatches: int
    begin: int = 0
    end: int = 0
    times: int = 1
    """that the whole list has the stretch"""

    def weight(self, place: int | None) -> int:
        """How often the whole step does what was seen at this place of the list; None: outside of it, once."""
        return self.times if place is not None and self.begin <= place < self.end else 1


def shorten(layout: Layout, rank: int) -> ShortSchedule:
    """For one pipeline rank of a layout."""
    whole = schedule_of(layout)
    full = _steps(whole.actions[rank])
    # What HSDP's replicas met with is there from a chunk's second backward on: most must be held after that, too.
    replicas = layout.zero > 0 and layout.shards < layout.dp * layout.cp
    moments = (0, 2 * layout.virtual_stages) if replicas else (0,)
    for count in range(1, layout.gas):
        short = _steps(cut(whole, count).actions[rank])
        if (
            all(_holds(short, ended) == _holds(full, ended) for ended in moments)
            and (found := _stretch(short, full)) is not None
        ):
            return ShortSchedule(count, *found)
    return ShortSchedule(layout.gas)


def cut(schedule: Schedule, microbatches: int) -> Schedule:
    """The same schedule with its first micro-batches alone."""
    kept = tuple(tuple(action for action in actions if action.microbatch < microbatches) for actions in schedule.actions)
    return replace(schedule, microbatches=microbatches, actions=kept)


def _steps(actions: Sequence[Action]) -> list[Step]:
    return [(action.kind, action.stage) for action in actions]


def _holds(steps: list[Step], ended: int) -> tuple[int, int]:
    """The most that wait at a time: chunks whose backward has not ended, and of those the ones that owe weight gradients; once
    so many backwards have ended.
    """
    held, owed, over = [0], [0], [0]
    for kind, _ in steps:
        held.append(held[-1] + {ActionKind.F: 1, ActionKind.I: 0}.get(kind, -1))
        owed.append(owed[-1] + {ActionKind.I: 1, ActionKind.W: -1}.get(kind, 0))
        over.append(over[-1] + (kind in (ActionKind.B, ActionKind.W)))
    late = [place for place, count in enumerate(over) if count >= ended]
    return max((held[place] for place in late), default=0), max((owed[place] for place in late), default=0)


def _stretch(short: list[Step], full: list[Step]) -> tuple[int, int, int] | None:
    """The part of `short` whose repetition makes `full`. Not its first turn, in which ZeRO gathers and gradients are written
    and not added to, nor its last, in which gradients meet.
    """
    more = len(full) - len(short)
    for length in range(2, len(short) + 1):
        if more % length:
            continue
        for begin in range(len(short) - length, -1, -1):
            end = begin + length
            block = short[begin:end]
            known = set(block) <= set(short[:begin]) and {step for step in block if step[0] is not ActionKind.F} <= set(
                short[end:]
            )
            if known and full[begin : end + more] == block * (1 + more // length) and _around(short, full, end, more):
                return begin, end, 1 + more // length
    return None


def _around(short: list[Step], full: list[Step], end: int, more: int) -> bool:
    return short[:end] == full[:end] and short[end:] == full[end + more :]
