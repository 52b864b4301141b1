"""The registry: one entry per schedule, and what others say of schedules follows from it."""

from __future__ import annotations

from typing import get_args

import pytest

from ultrascale.schedules import REGISTRY, SCHEDULES, ActionKind, build, legal
from ultrascale.specs import layout

every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def test_a_layout_takes_the_names_of_the_registry() -> None:
    assert get_args(layout.Schedule) == SCHEDULES
    assert all(spec.name == name for name, spec in REGISTRY.items())


@every_schedule
def test_the_entry_says_what_the_lists_show(name: str) -> None:
    spec = REGISTRY[name]
    schedule = build(name, 4, 8, spec.least_stages)
    kinds = [[action.kind for action in actions] for actions in schedule.actions]
    assert spec.split_backward == any(ActionKind.W in each for each in kinds)
    assert spec.holds_all == all(set(each[: each.count(ActionKind.F)]) == {ActionKind.F} for each in kinds)
    turn = schedule.stages_of(3)[-1]
    assert spec.v_shaped == (turn == 4)


@every_schedule
def test_the_fewest_stages_and_microbatches_are_legal_and_fewer_are_not(name: str) -> None:
    spec = REGISTRY[name]
    least = max(1, 4 * spec.least_rounds)
    assert legal(name, 4, least, spec.least_stages) is None
    assert legal(name, 4, least - 1, spec.least_stages) is not None
    assert legal(name, 4, least, spec.least_stages - 1) is not None
    assert (legal(name, 4, 8, 9) is None) == (spec.most_stages is None)
