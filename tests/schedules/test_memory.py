"""Activations held: levels along the list, the peak, and what a split backward keeps."""

from __future__ import annotations

import pytest

from ultrascale.schedules import KINDS, ActionKind, build, counts, peak_held, timeline


def test_level_after_every_action() -> None:
    assert timeline(build("1f1b", 2, 3), 0, [10.0, 7.0]) == (10.0, 20.0, 10.0, 20.0, 10.0, 0.0)
    assert timeline(build("1f1b", 2, 3), 1, [10.0, 7.0]) == (7.0, 0.0, 7.0, 0.0, 7.0, 0.0)


def test_the_peak_says_where_and_of_what() -> None:
    schedule = build("interleaved", 2, 4, 2)
    held = peak_held(schedule, 0, [1.0, 0.0, 100.0, 0.0])  # F0 F1 f0 f1 F2, then the first backward
    assert held.peak_bytes == 203.0
    assert held.at == 4
    assert held.count == (3, 2)
    assert timeline(schedule, 0, [1.0, 0.0, 100.0, 0.0])[held.at] == 203.0
    assert schedule.actions[0][held.at].kind is ActionKind.F


def test_a_split_backward_holds_until_the_weight_gradient() -> None:
    # The last rank of ZB-H1 puts off P − 1 weight gradients: it holds as much as the first rank, P, not 1 as in 1F1B.
    assert [peak_held(build("zero-bubble", 4, 8), rank, [1.0] * 4).peak_bytes for rank in range(4)] == [4, 4, 4, 4]
    assert [peak_held(build("1f1b", 4, 8), rank, [1.0] * 4).peak_bytes for rank in range(4)] == [4, 3, 2, 1]


def test_nothing_is_left_at_the_end() -> None:
    for name, v in (("afab", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 2), ("zb-v", 2), ("dualpipe-v", 2)):
        for rank in range(4):
            assert timeline(build(name, 4, 8, v), rank, [0.1] * 4 * v)[-1] == 0.0


def test_a_rank_without_activations_has_no_peak() -> None:
    held = peak_held(build("1f1b", 2, 2), 0, [0.0, 0.0])
    assert (held.peak_bytes, held.at, held.count) == (0.0, 0, (0,))


@pytest.mark.parametrize(
    ("name", "virtual_stages"),
    [
        ("afab", 1),
        ("1f1b", 1),
        ("interleaved", 3),
        ("zero-bubble", 2),
        ("zb-v", 2),
        ("dualpipe-v", 2),
        ("v-half", 2),
        ("v-min", 2),
    ],
)
def test_counts_of_all_ranks_follow_their_lists(name: str, virtual_stages: int) -> None:
    ranks, microbatches = 4, 12
    schedule, found = build(name, ranks, microbatches, virtual_stages), counts(name, ranks, microbatches, virtual_stages)
    for rank in range(ranks):
        waiting, deferred, ended = [0] * virtual_stages, [0] * virtual_stages, [0] * virtual_stages
        local = {stage: index for index, stage in enumerate(schedule.stages_of(rank))}
        for at, (kind, stage, _, _) in enumerate(schedule.actions[rank]):
            own = local[stage]
            waiting[own] += {ActionKind.F: 1, ActionKind.W: 0}.get(kind, -1)
            deferred[own] += kind is ActionKind.I
            assert found.waiting[rank, at].tolist() == waiting
            assert found.deferred[rank, at].tolist() == deferred
            assert KINDS[found.kind[rank, at]] is kind
            assert found.stage[rank, at] == stage
            assert found.ended[rank, at].tolist() == ended
            assert found.begun[rank, at] == (ended[own] > 0)
            assert found.over[rank, at].tolist() == [count == microbatches for count in ended]
            deferred[own] -= kind is ActionKind.W
            ended[own] += kind in (ActionKind.B, ActionKind.W)
        assert (found.kind[rank, len(schedule.actions[rank]) :] == -1).all()
