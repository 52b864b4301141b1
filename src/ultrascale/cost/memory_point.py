"""A moment of a step: what a rank holds then, for every row of a table of layouts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost.columns import Array


@dataclass(frozen=True)
class MemoryPoint:
    activations: Array
    """beyond those that wait"""
    buffers: Array
    gradients: Array
    """of weights, accumulated or sharded: those that exist then"""
    gone: Array | float = 0.0
    """of the rank's parameters, what is not there then; its buffers are less by it"""
    scatters: bool = False
    """a layer's gradients are just being scattered"""
    apart: bool = False
    """the residual's gradient is another tensor by then than the one that the layer began with"""

    def at(self, rows: Array) -> MemoryPoint:
        return MemoryPoint(self.activations[rows], self.buffers[rows], self.gradients[rows])

    def where(self, there: Array, other: MemoryPoint) -> MemoryPoint:
        """This one in the rows that are `there`, the other in the rest."""
        return MemoryPoint(
            np.where(there, self.activations, other.activations),
            np.where(there, self.buffers, other.buffers),
            np.where(there, self.gradients, other.gradients),
            np.where(there, self.gone, other.gone),
        )

    @property
    def moving(self) -> Array:
        return np.asarray(self.activations + self.buffers)

    @property
    def total(self) -> Array:
        return np.asarray(self.moving + self.gradients)


def fullest(one: MemoryPoint, *others: MemoryPoint) -> MemoryPoint:
    for other in others:
        one = other.where(other.total > one.total, one)
    return one
