"""Action lists: the placement of stages, the textbook's warm-ups, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.schedules import SCHEDULES, Action, ActionKind, build, legal, legal_mask, lint
from ultrascale.specs.errors import SpecError


def warmup(name: str, ranks: int, rank: int, microbatches: int, virtual_stages: int) -> int:
    """Forwards before the first backward."""
    kinds = [action.kind for action in build(name, ranks, microbatches, virtual_stages).actions[rank]]
    return next(at for at, kind in enumerate(kinds) if kind is not ActionKind.F)


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_warms_up_with_one_forward_per_rank_that_follows(rank: int) -> None:
    # Narayanan 2021, section 2.2.1; the forward of the first one-forward-one-backward comes on top.
    assert warmup("1f1b", 4, rank, 8, 1) == (4 - rank - 1) + 1


@pytest.mark.parametrize("virtual_stages", [2, 3])
@pytest.mark.parametrize("rank", range(4))
def test_interleaved_warms_up_as_megatron_does(rank: int, virtual_stages: int) -> None:
    # Narayanan 2021, section 2.2.2: 2(p − r − 1) + (v − 1)p.
    assert warmup("interleaved", 4, rank, 8, virtual_stages) == 2 * (4 - rank - 1) + (virtual_stages - 1) * 4 + 1


def test_one_rank_accumulates() -> None:
    F, B = ActionKind.F, ActionKind.B
    assert build("1f1b", 1, 2).actions == ((Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)),)
    assert build("afab", 1, 2).actions == ((Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1)),)


def test_looped_and_v_shaped_placement() -> None:
    looped, v_shaped = build("interleaved", 4, 8, 2), build("zb-v", 4, 8, 2)
    assert [looped.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [v_shaped.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    for schedule in (looped, v_shaped):
        assert all(schedule.rank_of(stage) == rank for rank in range(4) for stage in schedule.stages_of(rank))


def test_only_dualpipe_pairs_and_always_a_forward_with_a_backward() -> None:
    for name, v in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2), ("zb-v", 2)):
        assert not any(action.paired for actions in build(name, 4, 8, v).actions for action in actions)
    # m − 2P + r + 1 double pairs (without the last rank's first) and P − 1 − r single ones.
    pairs = [sum(action.paired for action in actions) for actions in build("dualpipe-v", 4, 10, 2).actions]
    assert pairs == [2 * 3 + 3, 2 * 4 + 2, 2 * 5 + 1, 2 * 6 - 1]


@pytest.mark.parametrize(
    ("arguments", "field", "fix"),
    [
        (("1f2b", 4, 8, 1), "schedule", "'1f1b'"),
        (("1f1b", 0, 8, 1), "ranks", "use 1"),
        (("afab", 4, 0, 1), "microbatches", "use 1"),
        (("1f1b", 4, 8, 2), "virtual_stages", "use 1"),
        (("1f1b", 4, 3, 1), "microbatches", "use 4"),
        (("interleaved", 4, 8, 1), "virtual_stages", "use 2"),
        (("interleaved", 4, 9, 2), "microbatches", "8 or 12"),
        (("zero-bubble", 4, 11, 1), "microbatches", "8 or 12"),
        (("zb-v", 4, 8, 1), "virtual_stages", "use 2"),
        (("dualpipe-v", 4, 7, 2), "microbatches", "use 8"),
    ],
)
def test_refusals_name_the_field_and_a_value_that_works(arguments: tuple[str, int, int, int], field: str, fix: str) -> None:
    with pytest.raises(SpecError) as refusal:
        build(*arguments)
    assert str(refusal.value).startswith(field + ":")
    assert fix in str(refusal.value)


def test_legal_mask_of_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(SpecError, match="1f1b"):
        legal_mask("1f2b", 4, 8)


@given(name=st.sampled_from(SCHEDULES), data=st.data())
def test_the_legality_mask_agrees_with_the_error_message(name: str, data: st.DataObject) -> None:
    numbers = st.lists(st.integers(0, 70), min_size=5, max_size=5)
    ranks, microbatches = data.draw(numbers), data.draw(numbers)
    virtual_stages = data.draw(st.lists(st.integers(0, 4), min_size=5, max_size=5))
    expected = [legal(name, *row) is None for row in zip(ranks, microbatches, virtual_stages, strict=True)]
    assert legal_mask(name, np.array(ranks), np.array(microbatches), np.array(virtual_stages)).tolist() == expected


@given(
    name=st.sampled_from(SCHEDULES),
    ranks=st.integers(1, 9),
    microbatches=st.integers(1, 30),
    virtual_stages=st.integers(1, 4),
)
def test_every_legal_schedule_builds_without_lint(name: str, ranks: int, microbatches: int, virtual_stages: int) -> None:
    if legal(name, ranks, microbatches, virtual_stages) is None:
        assert lint(build(name, ranks, microbatches, virtual_stages)) == []
    else:
        with pytest.raises(SpecError):
            build(name, ranks, microbatches, virtual_stages)
