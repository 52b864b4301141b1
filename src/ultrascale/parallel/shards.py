"""Parameter shards: which part of each parameter a rank holds, for initialization, reduction, norm and checkpoints."""

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
    """shape of the whole parameter"""
    dim: int | None = None
    start: int = 0
    length: int = 0
    partial: Axis | None = None
    """ranks whose gradients of this part are partial sums: the gradient is their sum"""
    counted: bool = True
    """whether this copy counts in the gradient norm: one of several equal copies does"""
    rows: tuple[int, int] | None = None
    """experts under ep: the first one that this rank holds and their number, along the first dimension"""
    pieces: Axis | None = None
    """ranks over which ZeRO shards this part further, along its first dimension"""
    slices: int = 1
    """into how many slices each expert's matrix is split along the second dimension, if ZeRO has more ranks than experts"""
    copies: Axis | None = None
    """ranks that hold the same values"""

    def model_parallel_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part under tp and ep, before ZeRO shards it."""
        part = whole if self.rows is None else whole.narrow(0, *self.rows)
        return part if self.dim is None else part.narrow(self.dim, self.start, self.length)

    def piece(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's ZeRO shard of its part, chunked like torch.chunk: the last ranks may hold fewer rows, or none."""
        part = self.model_parallel_part(whole)
        if self.slices > 1:
            part = part.reshape(len(part) * self.slices, part.shape[1] // self.slices, *part.shape[2:])
        return part if self.pieces is None else part[self._rows(len(part))]

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offsets of the ZeRO shard in the whole parameter."""
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
        """Whether weight decay applies: to matrices, not to norms and biases."""
        return len(self.shape) > 1
