"""Time of a piece of the model in its three parts; pipeline schedules move the parts independently."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array


@dataclass(frozen=True)
class Passes:
    """Seconds of one operator group per micro-batch: forward, gradient of the input, gradient of the weights."""

    forward: Array
    input_grad: Array
    weight_grad: Array

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.input_grad + other.input_grad, self.weight_grad + other.weight_grad)

    def __sub__(self, other: Passes) -> Passes:
        return self + other.scaled(-1.0)

    def scaled(self, factor: Array | float) -> Passes:
        return Passes(self.forward * factor, self.input_grad * factor, self.weight_grad * factor)

    def delayed(self, seconds: float) -> Passes:
        """Forward and backward each start that much later: what the host needs for one action."""
        return Passes(self.forward + seconds, self.input_grad + seconds, self.weight_grad)

    def take(self, rows: Array) -> Passes:
        return Passes(self.forward[rows], self.input_grad[rows], self.weight_grad[rows])

    @property
    def total(self) -> Array:
        return np.asarray(self.forward + self.input_grad + self.weight_grad)
