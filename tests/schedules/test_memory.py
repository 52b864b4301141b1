"""Live activations along the action lists, and what a split backward keeps."""

from __future__ import annotations

import pytest

from ultrascale.schedules import KINDS, ActionKind, build, counts


def test_a_split_backward_keeps_activations_until_the_weight_gradient() -> None:
    # The last rank of ZB-H1 puts off P − 1 weight gradients: it holds as much as the first rank, P, not 1 as in 1F1B.
    def peaks(name: str) -> list[float]:
        found = counts(name, 4, 8, 1)
        return (found.waiting + found.deferred).sum(axis=2).max(axis=1).tolist()

    assert peaks("zero-bubble") == [4, 4, 4, 4]
    assert peaks("1f1b") == [4, 3, 2, 1]


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
            assert found.backwards_done[rank, at].tolist() == ended
            assert found.after_first_backward[rank, at] == (ended[own] > 0)
            assert found.after_last_backward[rank, at].tolist() == [count == microbatches for count in ended]
            deferred[own] -= kind is ActionKind.W
            ended[own] += kind in (ActionKind.B, ActionKind.W)
        assert (found.kind[rank, len(schedule.actions[rank]) :] == -1).all()
