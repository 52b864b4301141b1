"""The files of a dump: one safetensors file and one JSON index for each rank and step. No torch.

A dump holds tensors that a program saved with `measure.dump.Dump`. The index says of each tensor what it is, which part of
the whole it is, and in which order it was computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import mapping_of, read_named
from ultrascale.specs.folders import STEP_FOLDER, step_folder
from ultrascale.specs.validate import FrozenSpec, build, shown

MICROBATCH = "microbatch"
MAX_INDEX_BYTES = 2**28
SECTIONS = ("weight", "forward", "loss", "backward", "gradient")
"""in the order of a step"""
_PLACEMENT = re.compile(r"(?P<axis>[A-Za-z_][\w-]*):(?P<kind>\d+|sum|mean)(?P<zigzag>:zigzag)?")


class Part(FrozenSpec):
    """How a tensor is cut over one axis: this rank's coordinate, and the dimension, or that parts are added up."""

    axis: str
    """an axis of the mesh, or `microbatch`"""
    index: NonNegativeInt
    size: PositiveInt
    dim: NonNegativeInt | None = None
    """None: parts are added up"""
    reduce: Literal["sum", "mean"] = "sum"
    zigzag: bool = False
    """coordinate i of n has the slices i and 2n − 1 − i of 2n"""


Coordinates = Mapping[str, tuple[NonNegativeInt, PositiveInt]]
"""by axis: the rank's coordinate and the size of the axis"""


class Entry(FrozenSpec):
    """One tensor of a rank."""

    key: str = Field(pattern=rf"^(({'|'.join(SECTIONS)})/.+|loss)$")
    """SECTION/NAME, or `loss`"""
    tensor: str
    """its name in the safetensors file"""
    dtype: str = Field(pattern=r"^b?float\d+(_e\dm\d\w*)?$")
    shape: tuple[NonNegativeInt, ...]
    parts: tuple[Part, ...] = ()
    """outermost first"""
    scale: float = 1.0
    """factor that makes it a gradient of the whole batch's loss"""
    stride: tuple[NonNegativeInt, PositiveInt] | None = None
    """dimension and step of the entries that were kept, if the tensor was too large"""
    time: float
    """clock of the rank, in seconds"""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        cut = [part.dim for part in self.parts if part.dim is not None]
        largest = max([*cut, *(self.stride or ())[:1]], default=-1)
        if largest >= len(self.shape):
            raise ValueError(
                f"{self.key} of shape {list(self.shape)} has no dimension {largest}: give Dump a placement that it has"
            )
        return self


class Index(FrozenSpec):
    """The tensors of one rank in one step."""

    format: Literal[1] = 1
    program: str
    torch: str
    step: NonNegativeInt
    rank: NonNegativeInt
    world: PositiveInt
    mesh: Coordinates
    bytes: NonNegativeInt
    """of the safetensors file"""
    entries: tuple[Entry, ...]
    without_gradient: tuple[str, ...] = ()


def files_of(folder: Path, step: int, rank: int) -> tuple[Path, Path]:
    """The index and the tensors of a rank in a step."""
    stem = folder / step_folder(step) / f"rank-{rank:04d}"
    return stem.with_suffix(".json"), stem.with_suffix(".safetensors")


def parse_placement(text: str, mesh: Coordinates, strict: bool = True) -> list[Part]:
    """`dp:0 cp:1:zigzag tp:sum` with a rank's coordinates. A micro-batch's number is set when a tensor is recorded.

    `strict`: refuse axes that the mesh does not have; otherwise they are left out.
    """
    found = []
    for word in text.split():
        match = _PLACEMENT.fullmatch(word)
        if match is None:
            raise SpecError(
                f"placement is {shown(text)} but must be words AXIS:DIM, AXIS:DIM:zigzag, AXIS:sum or AXIS:mean, such as 'tp:0'"
            )
        axis, kind = match["axis"], match["kind"]
        if axis != MICROBATCH and axis not in mesh:
            if strict:
                known = ", ".join(mesh) or "none"
                raise SpecError(f"placement {shown(text)} names axis {axis} but mesh has {known}: add {axis} to mesh")
            continue
        index, size = mesh.get(axis, (0, 1))
        cut: dict[str, Any] = {"dim": int(kind)} if kind.isdigit() else {"reduce": kind}
        found.append(Part(axis=axis, index=index, size=size, zigzag=match["zigzag"] is not None, **cut))
    return found


def steps_of(folder: Path) -> list[int]:
    """The steps of a dump, ascending."""
    if not folder.is_dir():
        raise SpecError(f"dump {folder} is no folder: name one that ultrascale.measure.dump.Dump wrote")
    found = sorted(int(match[1]) for one in folder.iterdir() if (match := STEP_FOLDER.fullmatch(one.name)))
    if not found:
        raise SpecError(f"dump {folder} has no steps: name a folder that ultrascale.measure.dump.Dump wrote")
    return found


def read_indexes(folder: Path, step: int) -> list[Index]:
    """The indexes of all ranks in one step, by rank."""
    found = [_read_index(file) for file in sorted((folder / step_folder(step)).glob("rank-*.json"))]
    if not found:
        raise SpecError(f"dump {folder} has no index in step {step}: its program ended before that, run it again")
    world, numbers = found[0].world, [one.rank for one in found]
    if any(one.world != world or one.step != step for one in found):
        raise SpecError(f"dump {folder} mixes runs of different worlds in step {step}: delete it and run its program again")
    if missing := sorted(set(range(world)) - set(numbers)):
        raise SpecError(
            f"dump {folder} has {len(found)} of {world} ranks in step {step}: copy the files of rank {missing[0]} into it too"
        )
    return sorted(found, key=lambda one: one.rank)


def _read_index(file: Path) -> Index:
    what = f"index {file}"
    return build(Index, mapping_of(read_named(file, what, "run the program again", MAX_INDEX_BYTES), what, "JSON"), what)
