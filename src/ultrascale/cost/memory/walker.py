"""Tensors with lifetimes, walked over a list of events: live bytes by owner at every event, and the peak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ultrascale.cost.columns import Array

Owner = Literal["activations", "buffers", "gradients", "parameters"]
OWNERS: tuple[Owner, ...] = ("activations", "buffers", "gradients", "parameters")


@dataclass(frozen=True)
class TensorLifetime:
    """One tensor of every row of a table of layouts, and the events between which it is live."""

    name: str
    owner: Owner
    bytes: Array
    """negative: part of what is counted elsewhere is not live then"""
    allocated: int
    """the first event at which it is live"""
    freed: int
    """the first event at which it no longer is"""
    freed_if_split: int | None = None
    """the same in rows whose backward is split, where that differs: what weight gradients need lives on"""


def activation(name: str, bytes_: Array, allocated: int, freed: int, freed_if_split: int | None = None) -> TensorLifetime:
    return TensorLifetime(name, "activations", bytes_, allocated, freed, freed_if_split)


def buffer(name: str, bytes_: Array, allocated: int, freed: int) -> TensorLifetime:
    return TensorLifetime(name, "buffers", bytes_, allocated, freed)


@dataclass(frozen=True)
class MemoryPoint:
    """Live bytes of every row at one event, by owner, on top of micro-batches in flight and persistent states."""

    activations: Array
    buffers: Array
    gradients: Array
    """of weights, accumulated or sharded"""
    parameters: Array
    """negative where unsharded parameters that count as persistent have been freed"""

    @classmethod
    def nothing(cls, rows: int) -> MemoryPoint:
        return cls(*np.zeros((len(OWNERS), rows)))

    def where(self, there: Array, other: MemoryPoint) -> MemoryPoint:
        """This one in the rows that are `there`, the other in the rest."""
        return MemoryPoint(*(np.where(there, getattr(self, owner), getattr(other, owner)) for owner in OWNERS))

    @property
    def temporary(self) -> Array:
        """What the allocator hands out and takes back during a step."""
        return np.asarray(self.activations + self.buffers + self.parameters)

    @property
    def total(self) -> Array:
        return np.asarray(self.temporary + self.gradients)


def fullest(one: MemoryPoint, *others: MemoryPoint) -> MemoryPoint:
    for other in others:
        one = other.where(other.total > one.total, one)
    return one


@dataclass(frozen=True)
class Live:
    """Live bytes: owners × events × rows."""

    bytes: Array

    def __add__(self, other: Live) -> Live:
        return Live(self.bytes + other.bytes)

    def at(self, event: int) -> MemoryPoint:
        return MemoryPoint(*self.bytes[:, event])

    def peak(self, happens: Mapping[int, Array | bool]) -> MemoryPoint:
        """The fullest event of every row, of those that happen in it; an event that is not named happens in all."""
        totals = self.bytes.sum(axis=0)
        for event, there in happens.items():
            totals[event] = np.where(there, totals[event], -np.inf)
        fullest_event = totals.argmax(axis=0)[None, None]
        return MemoryPoint(*np.take_along_axis(self.bytes, fullest_event, axis=1)[:, 0])


def walk(tensors: Iterable[TensorLifetime], events: int, rows: int, split: Array | bool = False) -> Live:
    """`split`: rows whose backward is split."""
    by_lifetime: dict[tuple[Owner, int, int], Array] = {}
    for tensor in tensors:
        lifetimes = [(tensor.owner, tensor.allocated, tensor.freed, tensor.bytes)]
        if tensor.freed_if_split is not None:
            first, last = sorted((tensor.freed, tensor.freed_if_split))
            sign = 1 if tensor.freed_if_split > tensor.freed else -1
            lifetimes.append((tensor.owner, first, last, sign * np.where(split, tensor.bytes, 0.0)))
        for owner, allocated, freed, size in lifetimes:
            key = owner, int(allocated), int(freed)
            by_lifetime[key] = by_lifetime[key] + size if key in by_lifetime else size
    live = np.zeros((len(OWNERS), events, rows))
    for (owner, allocated, freed), size in by_lifetime.items():
        live[OWNERS.index(owner), allocated:freed] += size
    return Live(live)
