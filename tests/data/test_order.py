"""Mixtures: exact proportions, evenly dealt, each set read once an epoch, all of it a function of the sample's number."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.data.order import LONGEST_PATTERN, MixturePattern, SampleOrder, seed_of


def dealt(weights: list[str], samples: int) -> list[tuple[int, int]]:
    pattern = MixturePattern([Fraction(weight) for weight in weights])
    return [pattern.locate(sample) for sample in range(samples)]


def test_seven_to_three_by_hand() -> None:
    pattern = MixturePattern([Fraction("0.7"), Fraction("0.3")])
    assert (pattern.length, pattern.counts) == (10, [7, 3])
    # The middles of sevenths, 1/14, 3/14 …, among those of thirds, 1/6, 3/6, 5/6; of equal ones, the first set goes first.
    assert [owner for owner, _ in dealt(["0.7", "0.3"], 10)] == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0]


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=6), blocks=st.integers(1, 3))
def test_every_block_has_exact_proportions(weights: list[int], blocks: int) -> None:
    pattern = MixturePattern([Fraction(weight) for weight in weights])
    assert [Fraction(count, pattern.length) for count in pattern.counts] == [Fraction(one, sum(weights)) for one in weights]
    places = [pattern.locate(sample) for sample in range(blocks * pattern.length)]
    for owner, count in enumerate(pattern.counts):
        assert [place for found, place in places if found == owner] == list(range(blocks * count))


@pytest.mark.parametrize("weights", [["0.7", "0.3"], ["1", "1", "1"], ["5", "0.25", "1e-2"], ["1", "0.999"]])
def test_any_prefix_of_a_run_has_the_proportions(weights: list[str]) -> None:
    total, counts = sum(map(Fraction, weights)), [0] * len(weights)
    for sample, (owner, place) in enumerate(dealt(weights, 3000), 1):
        assert place == counts[owner]
        counts[owner] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction(weight) / total * sample) <= len(weights) / 2 + 0.5


def test_weights_are_rounded_to_the_pattern_and_none_becomes_zero() -> None:
    weights = [Fraction(1, 3**12), Fraction(2, 7**6), Fraction(1)]
    pattern = MixturePattern(weights)
    assert pattern.length == sum(pattern.counts) == LONGEST_PATTERN
    assert min(pattern.counts) >= 1
    assert abs(pattern.counts[2] / LONGEST_PATTERN - weights[2] / sum(weights)) < 2 / LONGEST_PATTERN


def test_datasets_of_a_mixture_are_shuffled_independently() -> None:
    first, second = (SampleOrder(100, seed_of(7, place)) for place in range(2))
    one, other = ([order.train(sample) for sample in range(98)] for order in (first, second))
    assert sorted(one) == sorted(other) == list(range(98))
    assert one != other
    assert [first.train(sample) for sample in range(98, 196)] != one  # another epoch
    assert [first.evaluation(sample) for sample in range(3)] == [98, 99, 98]


def test_an_evaluation_dataset_is_fully_held_out() -> None:
    order = SampleOrder(5, 0, held_out=1.0)
    assert [order.evaluation(sample) for sample in range(6)] == [0, 1, 2, 3, 4, 0]
