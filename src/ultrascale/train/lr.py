"""Learning-rate schedules: a pure function of the Training and the step."""

from __future__ import annotations

import math

from ultrascale.specs.training import Training


def learning_rate(training: Training, step: int) -> float:
    """The learning rate of step `step`, counted from 0: linear warm-up, then the schedule down to lr × min_lr_ratio.

    Warm-up begins at lr / warmup, not at 0, so that no step is wasted. The last step has the lowest rate.
    """
    if step < training.warmup:
        return training.lr * (step + 1) / training.warmup
    lowest = training.min_lr_ratio
    return training.lr * (lowest + (1 - lowest) * _height(training, min(step, training.steps - 1)))


def _height(training: Training, step: int) -> float:
    """1 at the highest rate, 0 at the lowest, for a step after warm-up."""
    last = training.steps - 1
    if training.lr_schedule == "constant":
        return 1.0
    if training.lr_schedule == "wsd":
        left = last - step  # MiniCPM's third phase, linear: each of its steps falls by the same amount
        return min(1.0, left / training.decay_steps) if training.decay_steps else 1.0
    # A single step after warm-up stays at the top.
    progress = (step - training.warmup) / max(1, last - training.warmup)
    return 0.5 * (1 + math.cos(math.pi * progress)) if training.lr_schedule == "cosine" else 1 - progress
