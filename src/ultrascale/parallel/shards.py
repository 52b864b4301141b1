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
    rows: tuple[int, int] | None = None
    """experts over ep: the first that this rank holds and their number, along the first dimension"""
    pieces: Axis | None = None
    """ranks over which ZeRO cuts this part further, along its first dimension"""
    slices: int = 1
    """experts over more such ranks than there are of them: as how many each matrix is stored, along the second dimension"""
    copies: Axis | None = None
    """ranks that hold the same numbers"""

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        part = whole if self.rows is None else whole.narrow(0, *self.rows)
        return part if self.dim is None else part.narrow(self.dim, self.start, self.length)

    def piece(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds where ZeRO cuts its part, as torch chunks it: the last ranks may have less, or nothing."""
        part = self.of(whole)
        if self.slices > 1:
            part = part.reshape(len(part) * self.slices, part.shape[1] // self.slices, *part.shape[2:])
        return part if self.pieces is None else part[self._rows(len(part))]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where the piece begins in the whole parameter."""
        found = [self.start if dim == self.dim else 0 for dim in range(len(self.shape))]
        count = self.length if self.dim == 0 else self.shape[0]
        if self.rows is not None:
            found[0], count = self.rows
        if self.pieces is not None:
            first, within = divmod(self._rows(count * self.slices).start, self.slices)
            found[0] += first
            if within:
                found[1] += within * (self.length if self.dim == 1 else self.shape[1]) // self.slices
        return tuple(found)

    def _rows(self, count: int) -> slice:
        assert self.pieces is not None
        each = -(-count // self.pieces.size)
        return slice(min(self.pieces.rank * each, count), min((self.pieces.rank + 1) * each, count))

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices; norms and biases are left alone."""
        return len(self.shape) > 1
