"""The registry: one entry per schedule, and what others say of schedules follows from it."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from schedules.references import most_in_flight
from ultrascale.schedules import REGISTRY, SCHEDULES, ActionKind, build, counts, deferred, legal, lint
from ultrascale.schedules.orders import PASSES, V_HALF, V_MIN, BuildingBlock
from ultrascale.specs import layout

every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def test_a_layout_accepts_the_names_of_the_registry() -> None:
    assert get_args(layout.ScheduleName) == SCHEDULES
    assert all(spec.name == name for name, spec in REGISTRY.items())


@every_schedule
def test_registry_entries_match_the_action_lists(name: str) -> None:
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


@pytest.mark.parametrize(("name", "share"), [("v-half", 1 / 2), ("v-min", 1 / 3)])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_controllable_memory(name: str, share: float, ranks: int) -> None:
    """Qi 2024: about a half and a third of what 1F1B's first rank holds, which is 2P chunks of half the size."""
    for microbatches in (1, 2, ranks, 2 * ranks + 1, 4 * ranks):
        schedule = build(name, ranks, microbatches, 2)
        assert lint(schedule) == []
        in_flight = [most_in_flight(schedule, rank) for rank in range(ranks)]
        assert max(in_flight) <= min(share * 2 * ranks + 3, 2 * microbatches)
    assert max(in_flight) >= share * 2 * ranks


@pytest.mark.parametrize("block", [V_HALF, V_MIN])
def test_no_two_passes_of_a_rank_share_a_slot(block: BuildingBlock) -> None:
    for ranks in range(1, 65):
        slots = block.slots(np.asarray(ranks), np.arange(ranks)) % PASSES
        assert (np.sort(slots, axis=0) == np.arange(PASSES)[:, None]).all()


@every_schedule
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_deferred_is_no_less_than_the_lists_show(name: str, ranks: int) -> None:
    spec = REGISTRY[name]
    for microbatches in (2 * ranks, 4 * ranks):
        in_flight = counts(name, ranks, microbatches, spec.least_stages)
        listed = in_flight.deferred.sum(axis=2).max(axis=1)
        found = deferred(name, ranks, np.arange(ranks), microbatches, spec.least_stages)
        assert found.tolist() == listed.tolist()
