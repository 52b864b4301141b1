"""Every kind of mistake, planted in a good schedule, is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ultrascale.schedules import Action, ActionKind, Schedule, build, lint

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741


def changed(schedule: Schedule, rank: int, change: Callable[[list[Action]], None]) -> list[str]:
    """The problems after a change of one rank's list."""
    lists = [list(actions) for actions in schedule.actions]
    change(lists[rank])
    return lint(replace(schedule, actions=tuple(tuple(actions) for actions in lists)))


def swap(first: Action, second: Action) -> Callable[[list[Action]], None]:
    def change(actions: list[Action]) -> None:
        a, b = actions.index(first), actions.index(second)
        actions[a], actions[b] = actions[b], actions[a]

    return change


@pytest.mark.parametrize("removed", [Action(F, 1, 2), Action(I, 1, 2), Action(W, 1, 2)])
def test_missing(removed: Action) -> None:
    problems = changed(build("zero-bubble", 4, 8), 1, lambda actions: actions.remove(removed))
    assert problems[0] == f"missing: {removed}"


def test_missing_backward() -> None:
    problems = changed(build("1f1b", 4, 8), 1, lambda actions: actions.remove(Action(B, 1, 2)))
    assert problems[0] == "missing: B2 of stage 1 (or its I and W)"


def test_doubled() -> None:
    problems = changed(build("1f1b", 4, 8), 2, lambda actions: actions.append(Action(F, 2, 7)))
    assert problems[0] == "doubled: F7 of stage 2 is there 2 times"
    problems = changed(build("1f1b", 4, 8), 2, lambda actions: actions.append(Action(W, 2, 7)))
    assert problems == ["doubled: B7 of stage 2 beside its W"]


def test_backward_before_forward() -> None:
    problems = changed(build("1f1b", 4, 8), 3, swap(Action(F, 3, 1), Action(B, 3, 1)))
    assert "rank 3: B before F: B1 of stage 3" in problems


def test_weight_gradient_before_input_gradient() -> None:
    problems = changed(build("zero-bubble", 4, 8), 0, swap(Action(I, 0, 3), Action(W, 0, 3)))
    assert problems == ["rank 0: W before I: W3 of stage 0"]


def test_dependency_cycle() -> None:
    # The first rank receives its first gradient before it has sent what the last rank waits for.
    problems = changed(build("afab", 2, 2), 0, swap(Action(F, 0, 1), Action(B, 0, 0)))
    assert problems[0].startswith("dependency cycle: ")


def test_crossed_messages() -> None:
    problems = changed(build("afab", 2, 3), 0, swap(Action(F, 0, 1), Action(F, 0, 2)))
    assert problems == [
        "link from rank 0 to rank 1: 2 of 3 messages are used in another order than sent, first: "
        "activations of micro-batch 2 from stage 0 is sent where activations of micro-batch 1 from stage 0 is expected"
    ]
    assert "gradients" in changed(build("afab", 2, 3), 1, swap(Action(B, 1, 1), Action(B, 1, 2)))[0]


@pytest.mark.parametrize(("name", "crossed"), [("zb-v", 4 + 3 + 2), ("dualpipe-v", 3 + 2)])
def test_v_schedules_cross_when_receives_are_late(name: str, crossed: int) -> None:
    # The numbers of swapped messages when torch 2.13 runs these with `defer_pp_recv=True` on 4 ranks.
    problems = lint(build(name, 4, 8, 2), late_receives=True)
    assert sum(int(problem.split(": ")[1].split(" of ")[0]) for problem in problems) == crossed


@pytest.mark.parametrize(("name", "virtual_stages"), [("afab", 1), ("1f1b", 1), ("interleaved", 2)])
def test_looped_schedules_may_receive_late(name: str, virtual_stages: int) -> None:
    for ranks in (2, 3, 4, 8):
        assert lint(build(name, ranks, 2 * ranks, virtual_stages), late_receives=True) == []


def test_wrong_rank() -> None:
    problems = changed(build("1f1b", 4, 8), 0, lambda actions: actions.append(Action(F, 2, 0)))
    assert problems == ["wrong rank: F0 of stage 2 is on rank 0, stage is on 2"]


def test_stages_and_microbatches_that_do_not_exist() -> None:
    problems = changed(build("1f1b", 4, 8), 0, lambda actions: actions.extend([Action(F, 4, 0), Action(F, 0, 8)]))
    assert problems == [
        "rank 0: F0 of stage 4: there are only stages 0 to 3",
        "rank 0: F8 of stage 0: there are only micro-batches 0 to 7",
    ]


def test_as_many_lists_as_ranks() -> None:
    schedule = build("1f1b", 4, 8)
    assert lint(replace(schedule, actions=schedule.actions[:3])) == ["3 lists of actions for 4 ranks"]


def test_bad_pair() -> None:
    def pair_last(actions: list[Action]) -> None:
        actions[-1] = actions[-1]._replace(paired=True)

    problems = changed(build("1f1b", 4, 8), 0, pair_last)
    assert problems[0].startswith("rank 0: bad pair: B7 of stage 0 with None")


def test_zero_bubble_crosses_on_two_ranks_when_receives_are_late() -> None:
    # Forwards of one stage and gradients of another share the only link; torch's own lowering crosses there too.
    assert lint(build("zero-bubble", 2, 8, 2)) == []
    assert lint(build("zero-bubble", 2, 8, 2), late_receives=True) != []
    assert lint(build("zero-bubble", 4, 8, 2), late_receives=True) == []
