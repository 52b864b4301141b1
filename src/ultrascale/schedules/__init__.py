"""Pipeline schedules as lists of actions: the cost model simulates them, the engine runs them, figures draw them."""

from ultrascale.schedules.actions import KINDS, Action, ActionKind, Schedule
from ultrascale.schedules.build import build
from ultrascale.schedules.closed import deferred, in_flight, makespan
from ultrascale.schedules.draw import draw
from ultrascale.schedules.legal import SCHEDULES, legal, legal_mask
from ultrascale.schedules.lint import lint
from ultrascale.schedules.makespans import TimedSchedule, simulate_makespan, simulate_makespans
from ultrascale.schedules.memory import InFlightActivations, InFlightCounts, counts, peak_held, timeline
from ultrascale.schedules.simulate import DeadlockError, Event, StageTimes, Timeline, simulate

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "DeadlockError",
    "Event",
    "InFlightActivations",
    "InFlightCounts",
    "Schedule",
    "StageTimes",
    "TimedSchedule",
    "Timeline",
    "build",
    "counts",
    "deferred",
    "draw",
    "in_flight",
    "legal",
    "legal_mask",
    "lint",
    "makespan",
    "peak_held",
    "simulate",
    "simulate_makespan",
    "simulate_makespans",
    "timeline",
]
