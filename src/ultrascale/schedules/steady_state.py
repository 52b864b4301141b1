"""The steady state of a simulated schedule: where its timeline repeats, and a copy without the repetitions."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median

from ultrascale.schedules.simulate import Event, Timeline

MIN_PERIODS = 3  # periods that are worth a mark in a figure
TOLERANCE = 1e-6  # of a period: rounding of sums of seconds


@dataclass(frozen=True)
class RepeatedPeriods:
    """Whole periods of the steady state that follow a drawn one and are left out."""

    start_s: float
    end_s: float
    count: int
    microbatches: int
    """of one period"""

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class ShortTimeline:
    """Warm-up, one period of each steady state, and cool-down. The events keep the times of the whole step."""

    events: tuple[Event, ...]
    left_out: tuple[RepeatedPeriods, ...]
    makespan_s: float

    def place_s(self, time_s: float) -> float:
        """Where a time of the step is drawn: without the periods left out before it."""
        return time_s - sum(max(0.0, min(time_s, one.end_s) - one.start_s) for one in self.left_out)

    def time_s(self, place_s: float) -> float:
        """The time of the step that is drawn there."""
        for one in self.left_out:
            if place_s > one.start_s:
                place_s += one.length_s
        return place_s


def shortened(timeline: Timeline) -> ShortTimeline:
    """Without the periods that repeat; whole if there is no steady state, as with unequal stages in AFAB."""
    ranks = len(timeline.busy_s)
    choices = [_repeated(timeline, microbatches) for microbatches in dict.fromkeys((1, 2, ranks, 2 * ranks))]
    left_out = max(choices, key=lambda found: sum(one.length_s for one in found))
    events = [event for event in timeline.events if not any(one.start_s <= event.start_s < one.end_s for one in left_out)]
    return ShortTimeline(tuple(events), left_out, timeline.makespan_s)


def _repeated(timeline: Timeline, microbatches: int) -> tuple[RepeatedPeriods, ...]:
    """Intervals in which every action recurs after one and the same time, for the micro-batch that many later.

    An action that begins before such an interval may end in it; its recurrence then ends after the interval, by as much. So
    the timeline closes up where the periods are taken out.
    """
    starts = {(event.rank, *event.action[:2], event.action.microbatch): event.start_s for event in timeline.events}
    runs: list[list[tuple[float, float]]] = [[]]  # of actions: start, and time until it recurs, which is the same in a run
    for event in sorted(timeline.events, key=lambda event: event.start_s):
        later = starts.get((event.rank, *event.action[:2], event.action.microbatch + microbatches))
        period = None if later is None else later - event.start_s
        if runs[-1] and (period is None or abs(period - runs[-1][0][1]) > TOLERANCE * period):
            runs.append([])
        if period:
            runs[-1].append((event.start_s, period))
    return tuple(one for run in runs if run and (one := _steady(run, microbatches)) is not None)


def _steady(run: list[tuple[float, float]], microbatches: int) -> RepeatedPeriods | None:
    """All whole periods of a run but one; ranks that are still to start make the first periods of a warm-up unequal."""
    begin, period = run[0][0], median(length for _, length in run)
    actions = Counter(int((start - begin) / period + TOLERANCE) for start, _ in run)
    whole = max(actions)  # the last one may not be whole
    first = whole
    while first > 0 and actions[first - 1] == actions[whole - 1]:
        first -= 1
    count = whole - first - 1
    if count < MIN_PERIODS:
        return None
    start = begin + (first + 1 - TOLERANCE) * period  # before the action that begins with the period
    return RepeatedPeriods(start, start + count * period, count, microbatches)
