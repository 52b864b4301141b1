"""Whole tensors from the parts that ranks saved in a dump, and which rank has which region of each.

Parts are joined along the axes that cut them, outermost first. Ranks with the same part are replicas: they have to be equal,
and the first one counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ultrascale.measure.dump_index import MICROBATCH, SECTIONS, Entry, Index, Part, files_of, read_indexes, steps_of
from ultrascale.specs.errors import SpecError

Region = tuple[slice, ...]


@dataclass(frozen=True)
class Replica:
    """A rank's copy of a region, which another rank has too."""

    rank: int
    region: Region
    tensor: Tensor


@dataclass(frozen=True)
class Whole:
    """A tensor put together from all ranks."""

    tensor: Tensor
    regions: tuple[tuple[int, Region], ...] = ()
    """the rank and region of each part that was joined; of partial sums, the region is that of the sum"""
    replicas: tuple[Replica, ...] = ()
    """further copies"""
    stride: tuple[int, int] | None = None
    """the dimension and step of the entries that were kept"""

    def moved(self, dim: int, start: int) -> Whole:
        """The same as a part of a larger tensor, `start` entries along a dimension."""
        return replace(
            self,
            regions=tuple((rank, _shifted(region, dim, start)) for rank, region in self.regions),
            replicas=tuple(replace(one, region=_shifted(one.region, dim, start)) for one in self.replicas),
        )


def _shifted(region: Region, dim: int, start: int) -> Region:
    own = region[dim]
    return (*region[:dim], slice(own.start + start, own.stop + start), *region[dim + 1 :])


@dataclass(frozen=True)
class _Piece:
    rank: int
    entry: Entry
    file: Path


class StepTensors(Protocol):
    """The tensors of one step of a program, by keys in the order of computation."""

    @property
    def folder(self) -> Path: ...
    @property
    def step(self) -> int: ...
    @property
    def world(self) -> int: ...
    @property
    def program(self) -> str: ...
    @property
    def axes(self) -> Mapping[str, int]: ...
    @property
    def dtypes(self) -> set[str]: ...
    @property
    def indexes(self) -> tuple[Index, ...]: ...
    @property
    def keys(self) -> Sequence[str]: ...
    def whole(self, key: str) -> Whole: ...


@dataclass(frozen=True)
class DumpStep:
    """One step of a dump."""

    folder: Path
    indexes: tuple[Index, ...]

    @property
    def step(self) -> int:
        return self.indexes[0].step

    @property
    def keys(self) -> list[str]:
        return list(self.pieces)

    @classmethod
    def open(cls, folder: Path, step: int) -> DumpStep:
        """Reads the indexes and checks the files; tensors are read one key at a time."""
        found = cls(folder, tuple(read_indexes(folder, step)))
        for index in found.indexes:
            _, file = files_of(folder, step, index.rank)
            size = file.stat().st_size if file.is_file() else 0
            if size != index.bytes:
                raise SpecError(f"{file} has {size:,} bytes but its index says {index.bytes:,}: copy it again")
        return found

    @property
    def world(self) -> int:
        return self.indexes[0].world

    @property
    def program(self) -> str:
        return self.indexes[0].program or self.folder.name

    @cached_property
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh."""
        return {axis: size for index in self.indexes for axis, (_, size) in index.mesh.items()}

    @cached_property
    def dtypes(self) -> set[str]:
        return {entry.dtype for index in self.indexes for entry in index.entries if entry.key != "loss"}

    @cached_property
    def pieces(self) -> dict[str, list[_Piece]]:
        """By key, in the order of computation: by section, then by the clock; gradients from the last layer to the first."""
        found: dict[str, list[_Piece]] = defaultdict(list)
        for index in self.indexes:
            _, file = files_of(self.folder, self.step, index.rank)
            for entry in index.entries:
                found[entry.key].append(_Piece(index.rank, entry, file))
        times = {key: min(piece.entry.time for piece in pieces) for key, pieces in found.items()}
        owners = {key.partition("/")[2]: time for key, time in times.items() if key.startswith("forward/")}

        def order(key: str) -> tuple[int, float, float]:
            section, _, name = key.partition("/")
            number = SECTIONS.index(section) if section in SECTIONS else len(SECTIONS)
            if section != "gradient":
                return number, times[key], 0.0
            return number, -owners.get(name.rpartition(".")[0], 0.0), -times[key]

        return {key: found[key] for key in sorted(found, key=order)}

    def whole(self, key: str) -> Whole:
        """A tensor of all ranks."""
        loaded = [(piece.rank, _with_calls(piece.entry, self.pieces[key]), _load(piece)) for piece in self.pieces[key]]
        strides = {entry.stride for _, entry, _ in loaded}
        if len(strides) > 1:
            raise SpecError(f"dump {self.folder}: ranks kept different samples of {key}: raise max_bytes in Dump")
        return replace(self._join(key, loaded, 0), stride=next(iter(strides)))

    def _join(self, key: str, parts: Sequence[tuple[int, Entry, Tensor]], depth: int) -> Whole:
        """Join along axis number `depth` what the axes inside it make."""
        _, first, _ = parts[0]
        if any(
            [(part.axis, part.dim) for part in entry.parts] != [(part.axis, part.dim) for part in first.parts]
            for _, entry, _ in parts
        ):
            raise SpecError(f"dump {self.folder}: ranks say different placements of {key}: give the same to Dump on every rank")
        if depth == len(first.parts):
            if len(shapes := {entry.shape for _, entry, _ in parts}) > 1:
                words = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
                raise SpecError(
                    f"dump {self.folder}: copies of {key} have shapes {words}, so they are parts: "
                    f"give Dump its placement, such as placements={{'{key.partition('/')[2]}': 'tp:0'}}"
                )
            return _replicas([(rank, tensor) for rank, _, tensor in parts])
        groups: dict[int, list[tuple[int, Entry, Tensor]]] = defaultdict(list)
        for part in parts:
            groups[part[1].parts[depth].index].append(part)
        cut = first.parts[depth]
        missing = sorted(set(range(cut.size)) - groups.keys())
        if missing and cut.axis == MICROBATCH:
            raise SpecError(
                f"dump {self.folder} has no {key} of forward {missing[0] + 1} of {cut.size}: torch's pipelines run one more in "
                f"their first step, to infer shapes; record a later step"
            )
        if missing:
            raise SpecError(
                f"dump {self.folder}: {key} has no part of {cut.axis}={missing[0]} but {cut.axis} has {cut.size} ranks: "
                f"give Dump the mesh and placements of every rank"
            )
        inner = [self._join(key, groups[number], depth + 1) for number in sorted(groups)]
        try:
            return _combine(cut, inner)
        except (RuntimeError, IndexError):
            words = " and ".join(str(list(one.tensor.shape)) for one in inner[:2])
            raise SpecError(
                f"dump {self.folder}: parts of {key} over {cut.axis} have shapes {words}, which do not fit: "
                f"give Dump its placement, such as placements={{'{key.partition('/')[2]}': '{cut.axis}:1'}}"
            ) from None


def _with_calls(entry: Entry, pieces: Sequence[_Piece]) -> Entry:
    """A rank does not know how many micro-batches follow when it records one."""
    if all(part.axis != MICROBATCH for part in entry.parts):
        return entry
    calls = 1 + max(part.index for piece in pieces for part in piece.entry.parts if part.axis == MICROBATCH)
    size = {"size": calls}
    return entry.model_copy(
        update={"parts": tuple(one.model_copy(update=size) if one.axis == MICROBATCH else one for one in entry.parts)}
    )


def _load(piece: _Piece) -> Tensor:
    from safetensors import SafetensorError, safe_open

    entry = piece.entry
    try:
        with safe_open(piece.file, "pt") as file:
            tensor: Tensor = file.get_tensor(entry.tensor)
    except (OSError, SafetensorError):
        raise SpecError(f"{piece.file} cannot be read as safetensors: it is truncated, copy it again") from None
    if tuple(tensor.shape) != entry.shape or str(tensor.dtype) != f"torch.{entry.dtype}":
        raise SpecError(f"{piece.file} does not hold {entry.key} as its index says: copy both files again")
    return tensor if entry.scale == 1.0 else tensor * entry.scale


def _replicas(copies: Sequence[tuple[int, Tensor]]) -> Whole:
    (rank, tensor), *others = copies
    region = tuple(slice(0, length) for length in tensor.shape)
    return Whole(tensor, ((rank, region),), tuple(Replica(other, region, copy) for other, copy in others))


def _combine(cut: Part, inner: Sequence[Whole]) -> Whole:
    regions: list[Any] = []
    replicas: list[Replica] = []
    if cut.dim is None:
        total = sum((one.tensor.double() for one in inner), torch.zeros((), dtype=torch.float64))
        total = total / (len(inner) if cut.reduce == "mean" else 1)
        for one in inner:
            regions += one.regions
        # Copies of a term cannot be compared with the sum, but with the term that was added.
        for one in inner:
            for copy in one.replicas:
                changed = total.clone()
                scale = 1 / len(inner) if cut.reduce == "mean" else 1.0
                changed[copy.region] += scale * (copy.tensor.double() - one.tensor[copy.region].double())
                replicas.append(replace(copy, tensor=changed[copy.region]))
        return Whole(total.to(inner[0].tensor.dtype), tuple(regions), tuple(replicas))
    if cut.zigzag:
        halves = [_halves(one, cut.dim) for one in inner]
        ordered = [first for first, _ in halves] + [second for _, second in reversed(halves)]
    else:
        ordered = list(inner)
    start = 0
    for one in ordered:
        placed = one.moved(cut.dim, start)
        regions += placed.regions
        replicas += placed.replicas
        start += one.tensor.shape[cut.dim]
    return Whole(torch.cat([one.tensor for one in ordered], cut.dim), tuple(regions), tuple(replicas))


def _halves(whole: Whole, dim: int) -> tuple[Whole, Whole]:
    middle = whole.tensor.shape[dim] // 2
    first, second = (_slice_of(whole, dim, *ends) for ends in ((0, middle), (middle, whole.tensor.shape[dim])))
    return first, second


def _slice_of(whole: Whole, dim: int, start: int, stop: int) -> Whole:
    def inside(region: Region) -> Region | None:
        first, last = max(region[dim].start, start), min(region[dim].stop, stop)
        return (*region[:dim], slice(first - start, last - start), *region[dim + 1 :]) if first < last else None

    copies = []
    for one in whole.replicas:
        if (part := inside(one.region)) is not None:
            offset = max(start - one.region[dim].start, 0)
            copies.append(Replica(one.rank, part, one.tensor.narrow(dim, offset, part[dim].stop - part[dim].start)))
    regions = [(rank, part) for rank, region in whole.regions if (part := inside(region)) is not None]
    return Whole(whole.tensor.narrow(dim, start, stop - start), tuple(regions), tuple(copies))


def open_steps(folder: Path) -> Mapping[int, DumpStep]:
    """All steps of a dump, by number."""
    return {step: DumpStep.open(folder, step) for step in steps_of(folder)}
