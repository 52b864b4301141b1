"""The learning rate at hand-computed steps of each schedule."""

from __future__ import annotations

import math

import pytest

from ultrascale.specs.training import Training
from ultrascale.train.optimizer import learning_rate


def rates(**fields: object) -> list[float]:
    training = Training.model_validate({"lr": 1.0, **fields})
    return [learning_rate(training, step) for step in range(training.steps)]


def test_warm_up_is_linear_from_one_part_to_the_top() -> None:
    assert rates(steps=9, warmup_steps=4, lr_schedule="constant") == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1])


def test_linear_falls_to_the_lowest_rate_at_the_last_step() -> None:
    assert rates(steps=6, warmup_steps=1, lr_schedule="linear", min_lr_ratio=0.2) == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2])


def test_cosine_is_halfway_in_the_middle() -> None:
    actual = rates(steps=5, warmup_steps=0, min_lr_ratio=0.1)
    assert actual == pytest.approx([1, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2, 0.55, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2, 0.1])


def test_wsd_is_constant_and_decays_in_the_last_steps() -> None:
    actual = rates(steps=10, warmup_steps=2, lr_schedule="wsd", decay_fraction=0.4, min_lr_ratio=0.0)
    assert actual == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])


def test_wsd_without_decay_is_constant() -> None:
    assert rates(steps=4, warmup_steps=0, lr_schedule="wsd", decay_fraction=0.0) == [1, 1, 1, 1]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_run_of_one_step_and_steps_beyond_the_end_have_a_rate(schedule: str) -> None:
    one = Training.model_validate({"steps": 1, "lr": 0.5, "lr_schedule": schedule})
    assert learning_rate(one, 0) == 0.5
    more = Training.model_validate({"steps": 20, "lr_schedule": schedule})
    assert learning_rate(more, 1000) == learning_rate(more, 19)


def test_the_usual_warm_up_is_a_tenth_of_the_steps() -> None:
    training = Training(steps=200, lr=1e-3)
    assert learning_rate(training, 0) == pytest.approx(1e-3 / 20)
    assert learning_rate(training, 19) == pytest.approx(1e-3)
    assert learning_rate(training, 199) == pytest.approx(1e-4)
