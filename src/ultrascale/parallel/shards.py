"""Which part of each parameter a rank holds. Written by tensor parallelism; read by init, reduction, norm and checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ultrascale.parallel.comm import Axis


@dataclass(frozen=True)
class Shard:
    """A rank's part of one parameter: rows `start` … `start + length` along `dim`, or all of it."""

    name: str
    """the parameter's name in the whole model"""
    shape: tuple[int, ...]
    """of the whole parameter"""
    dim: int | None = None
    start: int = 0
    length: int = 0
    partial: Axis | None = None
    """ranks that each computed a share of this gradient: it is their sum"""
    counted: bool = True
    """among equal copies one counts in the norm"""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.dim is None else whole.narrow(self.dim, self.start, self.length)

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices; norms and biases are left alone."""
        return len(self.shape) > 1
