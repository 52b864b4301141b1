"""Activations held: levels along the list, the peak, and what a split backward keeps."""

from __future__ import annotations

from ultrascale.schedules import Kind, build, peak_held, timeline


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
    assert schedule.actions[0][held.at].kind is Kind.F


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
