"""Asynchronous tensor parallelism: GEMMs by chunks of tokens, which overlap with their all-gathers and reduce-scatters.

A rank's slice of the tokens is cut into chunks. While the GEMM of one chunk runs, the next chunk is gathered, or the previous
one is summed and scattered. A gathered chunk has the rows of all ranks, so that rows of a whole are in the order (chunk, rank,
token of the chunk); with one chunk this is the order of ranks, and the calls are those of parallel/comm.py. Without sequence
parallelism every rank has all tokens: there is nothing to gather, and sums are all-reduced.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ultrascale.parallel import comm
from ultrascale.parallel.comm import SINGLE_RANK, AsyncCollective, Axis


@dataclass(frozen=True)
class AsyncTensorParallel:
    """Collectives over tp of rows [n, h], this rank's slice, in `chunks`, together with GEMMs."""

    axis: Axis
    chunks: int = 1
    """whole sequences of a slice, or equal parts of one (train/supported.py)"""
    sequence: bool = True
    """sequence parallelism: a rank has a slice of the tokens"""

    @cached_property
    def slices(self) -> Axis:
        """The axis over which tokens are sharded, of size 1 without sequence parallelism."""
        return self.axis if self.sequence else SINGLE_RANK

    def sum_start(self, partial_sums: Tensor) -> AsyncCollective[Tensor]:
        """Sums over ranks, of which each gets its slice; `partial_sums` is not needed afterwards."""
        if self.sequence:
            return comm.reduce_scatter_start(partial_sums, self.axis)
        return comm.all_reduce_start(partial_sums, self.axis)

    def all_gather_start(self, x: Tensor) -> ChunkedAllGather:
        """Starts all chunks, into one tensor that `wait` returns."""
        return ChunkedAllGather(x, self.slices, self.chunks)

    def all_gather_operand(self, x: Tensor) -> Any:
        """The gathered rows as an operand of one GEMM, after which they are not needed: of several chunks two are live."""
        return comm.all_gather(x, self.slices) if self.chunks == 1 else GatheredOperand(x, self.axis, self.chunks)

    def matmul_reduce_scatter_start(self, rows: Tensor, weight: Tensor) -> AsyncCollective[Tensor]:
        """rows @ weight, summed over ranks, of which each gets its slice; of several chunks two are live."""
        if self.chunks == 1:
            partial_sums = rows @ weight
            del rows, weight  # copies, maybe, that the caller does not keep: freed before the result is allocated
            return self.sum_start(partial_sums)
        out = rows.new_empty(len(rows) // self.axis.size, weight.shape[1])
        parts = zip(rows.chunk(self.chunks), out.chunk(self.chunks), strict=True)
        first, own = next(parts)
        scattering = comm.reduce_scatter_start(first @ weight, self.axis, out=own)
        for part, own in parts:
            previous, scattering = scattering, comm.reduce_scatter_start(part @ weight, self.axis, out=own)
            previous.wait()
        return scattering.then(lambda _: out)

    def to_sequence_order(self, rows: Tensor, batch: int) -> Tensor:
        """Gathered rows [n, w] as [b, s, w]: a view if a chunk is one sequence (or the only one), else a copy."""
        groups, per_group = self._groups(batch)
        wide = _in_wide_words(rows)
        parts = wide.view(groups, per_group, self.slices.size, batch // groups, -1, wide.shape[1])
        return parts.transpose(1, 3).reshape(batch, -1, wide.shape[1]).view(rows.dtype)

    def to_chunk_order(self, x: Tensor) -> Tensor:
        """The inverse."""
        groups, per_group = self._groups(len(x))
        parts = torch.unflatten(torch.unflatten(_in_wide_words(x), 1, (self.slices.size, per_group, -1)), 0, (groups, -1))
        return parts.transpose(1, 3).flatten(0, 4).view(x.dtype)

    def _groups(self, batch: int) -> tuple[int, int]:
        """Groups of rows that are whole sequences and whole chunks, one of either; and the chunks in a group."""
        groups = min(batch, self.chunks)
        return groups, self.chunks // groups


def _in_wide_words(x: Tensor) -> Tensor:
    """Rows as words of 16 bytes, if they are whole ones: a GPU copies these three times as fast as bf16 entries."""
    entries = 16 // x.element_size()
    aligned = x.stride(-1) == 1 and all(n % entries == 0 for n in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
    return x.view(torch.complex128) if aligned else x


class ChunkedAllGather:
    """A pending all-gather. `gathering @ weight` runs the GEMM of each chunk while later ones are gathered."""

    def __init__(self, x: Tensor, axis: Axis, chunks: int) -> None:
        self.chunks = chunks
        self._whole = None if chunks == 1 else x.new_empty(axis.size * len(x), x.shape[1])
        outs = [None] if self._whole is None else self._whole.chunk(chunks)
        self._parts = [comm.all_gather_start(part, axis, out=out) for part, out in zip(x.chunk(chunks), outs, strict=True)]

    def wait(self) -> Tensor:
        gathered = [part.wait() for part in self._parts]
        self._whole, self._parts = gathered[0] if self._whole is None else self._whole, []
        return self._whole

    @property
    def operand(self) -> Any:
        """What a GEMM takes: this if there are several chunks, else the gathered rows, which any kernel takes."""
        return self.wait() if self.chunks == 1 else self

    def __matmul__(self, weight: Tensor) -> Tensor:
        if self._whole is None:
            return self.wait() @ weight
        out = self._whole.new_empty(len(self._whole), weight.shape[1])
        for part, rows in zip(self._parts, out.chunk(self.chunks), strict=True):
            torch.mm(part.wait(), weight, out=rows)
        return out


@dataclass(frozen=True)
class GatheredOperand:
    """The rows of all ranks for one GEMM: `operand @ weight` gathers each chunk during the GEMM of the previous one."""

    x: Tensor
    axis: Axis
    chunks: int

    def __matmul__(self, weight: Tensor) -> Tensor:
        out = self.x.new_empty(self.axis.size * len(self.x), weight.shape[1])
        first, *others = self.x.chunk(self.chunks)
        gathering = comm.all_gather_start(first, self.axis)
        for part, rows in zip((*others, None), out.chunk(self.chunks), strict=True):
            gathered = gathering.wait()  # frees the previous chunk before the next is allocated
            if part is not None:
                gathering = comm.all_gather_start(part, self.axis)
            torch.mm(gathered, weight, out=rows)
        return out
