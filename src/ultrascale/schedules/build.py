"""Builds a schedule by its name: its action lists, as arrays for a search and spelled out for the engine."""

from __future__ import annotations

from functools import lru_cache

from ultrascale.schedules.actions import KINDS, Action, ActionArrays, Schedule
from ultrascale.schedules.registry import REGISTRY, legal
from ultrascale.specs.errors import SpecError


@lru_cache(maxsize=256)
def build(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The schedule `name` (one of `SCHEDULES`) for so many ranks, micro-batches and stages per rank."""
    made = lists(name, ranks, microbatches, virtual_stages)
    columns = (made.kind.tolist(), made.stage.tolist(), made.microbatch.tolist(), made.paired.tolist())
    actions = [Action(KINDS[kind], stage, k, paired) for kind, stage, k, paired in zip(*columns, strict=True)]
    by_rank = (tuple(actions[start:end]) for start, end in zip(made.start, made.start[1:], strict=False))
    return Schedule(name, ranks, virtual_stages, microbatches, tuple(by_rank), REGISTRY[name].v_shaped)


@lru_cache(maxsize=512)
def lists(name: str, ranks: int, microbatches: int, virtual_stages: int = 1) -> ActionArrays:
    """The same as arrays."""
    problem = legal(name, ranks, microbatches, virtual_stages)
    if problem is not None:
        raise SpecError(problem)
    return REGISTRY[name].lists(ranks, microbatches, virtual_stages)
