"""Pipeline schedules as lists of actions: the cost model simulates them, the engine runs them, figures draw them."""

from ultrascale.schedules.actions import KINDS, Action, ActionKind, Schedule, stages_of
from ultrascale.schedules.build import build
from ultrascale.schedules.closed import deferred, in_flight, makespan
from ultrascale.schedules.draw import draw
from ultrascale.schedules.lint import lint
from ultrascale.schedules.makespans import TimedSchedule, simulate_makespan, simulate_makespans
from ultrascale.schedules.memory import InFlightActivations, InFlightCounts, counts, peak_held, timeline
from ultrascale.schedules.registry import REGISTRY, SCHEDULES, ScheduleSpec, legal, legal_mask
from ultrascale.schedules.simulate import DeadlockError, Event, StageTimes, Timeline, simulate

__all__ = [
    "KINDS",
    "REGISTRY",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "DeadlockError",
    "Event",
    "InFlightActivations",
    "InFlightCounts",
    "Schedule",
    "ScheduleSpec",
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
    "stages_of",
    "timeline",
]
