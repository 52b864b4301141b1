"""Pipeline schedules as lists of actions: the cost model simulates them, the engine runs them, figures draw them."""

from ultrascale.schedules.actions import KINDS, Action, ActionKind, Schedule, stages_of
from ultrascale.schedules.lint import lint
from ultrascale.schedules.memory import InFlightCounts, counts
from ultrascale.schedules.registry import (
    DEFAULT_SCHEDULE,
    REGISTRY,
    SCHEDULES,
    ScheduleSpec,
    build,
    deferred,
    in_flight,
    in_flight_microbatches,
    legal,
    legal_mask,
    makespan,
    unnamed_schedule,
)
from ultrascale.schedules.simulate import (
    DeadlockError,
    Event,
    StageTimes,
    TimedSchedule,
    Timeline,
    draw,
    simulate,
    simulate_makespans,
)

__all__ = [
    "DEFAULT_SCHEDULE",
    "KINDS",
    "REGISTRY",
    "SCHEDULES",
    "Action",
    "ActionKind",
    "DeadlockError",
    "Event",
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
    "in_flight_microbatches",
    "legal",
    "legal_mask",
    "lint",
    "makespan",
    "simulate",
    "simulate_makespans",
    "stages_of",
    "unnamed_schedule",
]
