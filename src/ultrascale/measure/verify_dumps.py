"""Compares the dumps of two programs: whole tensors, within bounds of rounding, in the order of computation.

Bounds are measured where the second program was also run with its outputs changed by one rounding (`Dump(perturb=...)`).
Otherwise they follow from the format and the number of modules that were computed before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ultrascale.measure.dump_names import NameMap, match
from ultrascale.measure.dump_tensors import StepTensors, Whole, open_steps
from ultrascale.measure.verify_patterns import Copy, Pattern, pattern_of
from ultrascale.measure.verify_recording import FACTOR, Bounds, RelativeError
from ultrascale.specs.errors import SpecError

SMALLEST = 1e-3
"""errors are relative to a tensor's largest entry, or to this much of the largest in its section, if that is more: what is
zero but for rounding, such as the gradient of a key's bias, has no scale of its own"""


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that differs by more than rounding."""

    step: int
    section: str
    name: str
    """in the second program"""
    error: RelativeError
    largest: float
    """largest absolute difference"""
    bound: float
    """of the largest difference, relative to the largest entry"""
    excess: float
    pattern: Pattern

    @property
    def first_name(self) -> str:
        return self.pattern.first_name


@dataclass(frozen=True)
class DumpSide:
    """A dump in words."""

    folder: str
    program: str
    world: int
    axes: Mapping[str, int]

    @classmethod
    def of(cls, step: StepTensors) -> DumpSide:
        return cls(str(step.folder), step.program, step.world, step.axes)


@dataclass(frozen=True)
class DumpComparison:
    """Two dumps compared."""

    first: DumpSide
    second: DumpSide
    steps: tuple[int, ...]
    compared: Mapping[str, int]
    """tensors by section"""
    sampled: int
    """of those, how many were compared in a sample of their entries"""
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    """keys without a partner"""
    other_shapes: tuple[str, ...]
    """pairs of outputs that cannot be compared"""
    excess: float
    """the largest difference over its bound; up to 1, rounding explains it"""
    worst: str
    measured_bounds: bool
    differences: tuple[TensorDifference, ...]
    """in the order of computation"""
    names: tuple[tuple[str, str], ...] = ()
    """section and name of everything that was compared, for counts"""

    @property
    def ok(self) -> bool:
        return not self.differences


def compare_dumps(
    first: Path,
    second: Path,
    names: NameMap | None = None,
    perturbed: Sequence[Path] = (),
    say: Callable[[str], None] = lambda text: None,
) -> DumpComparison:
    """Compare all steps that both dumps have. `perturbed`: the second program's, with `perturb`."""
    given, wanted, moved = open_steps(first), open_steps(second), [open_steps(folder) for folder in perturbed]
    steps = sorted(given.keys() & wanted.keys())
    if not steps:
        raise SpecError(
            f"dump {first} has step {min(given)} and dump {second} has step {min(wanted)}, and none in common: record the same"
        )
    if any(step not in run for step in steps for run in moved):
        raise SpecError(f"--perturbed has not all steps of {second}: record step {steps[0]} with the same program")
    pairs = [(given[step], wanted[step], [run[step] for run in moved]) for step in steps]
    return compare_steps(pairs, names or NameMap(), say)


def compare_steps(
    pairs: Sequence[tuple[StepTensors, StepTensors, Sequence[StepTensors]]], names: NameMap, say: Callable[[str], None]
) -> DumpComparison:
    """Compare steps of two programs; with each pair, runs of the second that were changed by one rounding."""
    comparison = _Comparison()
    for first, second, perturbed in pairs:
        comparison.step(first, second, names, perturbed, say)
    worst = max(comparison.excess, key=lambda key: comparison.excess[key], default="")
    return DumpComparison(
        DumpSide.of(pairs[0][0]),
        DumpSide.of(pairs[0][1]),
        tuple(second.step for _, second, _ in pairs),
        Counter(section for section, _ in comparison.names),
        comparison.sampled,
        tuple(dict.fromkeys(comparison.only_first)),
        tuple(dict.fromkeys(comparison.only_second)),
        tuple(dict.fromkeys(comparison.other_shapes)),
        comparison.excess.get(worst, 0.0),
        worst,
        bool(pairs[0][2]),
        tuple(comparison.differences),
        tuple(comparison.names),
    )


class _Comparison:
    """Collects the differences of several steps."""

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []
        self.only_first: list[str] = []
        self.only_second: list[str] = []
        self.other_shapes: list[str] = []
        self.differences: list[TensorDifference] = []
        self.excess: dict[str, float] = {}
        self.sampled = 0
        self.depth = 0
        """modules computed so far, in all steps"""

    def step(
        self,
        first: StepTensors,
        second: StepTensors,
        names: NameMap,
        perturbed: Sequence[StepTensors],
        say: Callable[[str], None],
    ) -> None:
        found = match(first.keys, second.keys, names)
        if not any(key != "loss" for key in found.pairs):
            raise SpecError(
                f"dumps {first.folder} and {second.folder} have no names in common, such as {_example(found.only_first)} and "
                f"{_example(found.only_second)}: name them in --map"
            )
        self.only_first += found.only_first
        self.only_second += found.only_second
        eps = max(float(torch.finfo(getattr(torch, dtype)).eps) for dtype in first.dtypes | second.dtypes)
        largest: dict[str, float] = {}
        for number, (key, theirs) in enumerate(found.pairs.items(), 1):
            say(f"step {second.step}: tensor {number} of {len(found.pairs)}")
            section, _, name = key.partition("/")
            self.depth += section in ("forward", "backward")
            one, other = first.whole(theirs), second.whole(key)
            pair = _in_common(one, other)
            if pair is None:
                self._refuse_shapes(section, key, theirs, (first, one), (second, other))
                continue
            a, b = pair
            self.sampled += (one.stride or other.stride) is not None
            size = RelativeError.size(b[b.isfinite()])
            largest[section] = max(largest.get(section, 0.0), size.largest)
            depth = 0 if section == "weight" and not self.depth else self.depth
            bounds = _bounds(key, b, eps, depth, SMALLEST * largest[section], perturbed)
            copies = _copies(a, one, other)
            others = _copies(b, other, one) if len(one.tensor.shape) == len(other.tensor.shape) else []
            errors = [bounds.excess(key, value, b[region]) for _, region, value in (*copies, *others)]
            at = f"{second.step}/{key}"
            self.excess[at] = max(excess for _, excess in errors)
            self.names.append((section, name))
            if self.excess[at] > 1:
                bound, size = bounds.by_key[key], bounds.sizes[key]
                pattern = pattern_of(theirs.partition("/")[2], a, b, copies, others, bound, size, first, second)
                self.differences.append(
                    TensorDifference(
                        second.step,
                        section,
                        name,
                        RelativeError(max(value for value, _ in errors), _relative_norm(copies, b)),
                        max(_largest(value, b[region]) for _, region, value in (*copies, *others)),
                        bound.largest,
                        self.excess[at],
                        pattern,
                    )
                )

    def _refuse_shapes(
        self, section: str, key: str, theirs: str, first: tuple[StepTensors, Whole], second: tuple[StepTensors, Whole]
    ) -> None:
        (one, a), (two, b) = first, second
        shapes = list(a.tensor.shape), list(b.tensor.shape)
        if section in ("weight", "gradient"):
            raise SpecError(
                f"dump {one.folder} has {theirs} of shape {shapes[0]} and dump {two.folder} {key} of {shapes[1]}: "
                f"these are different models, or Dump needs placements={{'{theirs.partition('/')[2]}': 'tp:0'}}"
            )
        self.other_shapes.append(f"{theirs} {shapes[0]} and {key} {shapes[1]}")


def _example(keys: Sequence[str]) -> str:
    return next((key.partition("/")[2] for key in keys if "/" in key), "none")


def _copies(common: Tensor, own: Whole, other: Whole) -> list[Copy]:
    """All parts and replicas of a tensor."""
    found = [(rank, region, common[region]) for rank, region in own.regions]
    return found + [(copy.rank, copy.region, _sliced(copy.tensor, own, other)) for copy in own.replicas]


def _relative_norm(copies: Sequence[Copy], wanted: Tensor) -> float:
    """Norm of the difference over the norm, all copies together."""
    difference = sum(float((value.double() - wanted[region].double()).square().sum()) for _, region, value in copies)
    whole = sum(float(wanted[region].double().square().sum()) for _, region, _ in copies)
    return math.sqrt(difference / whole) if whole else math.inf


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _in_common(one: Whole, other: Whole) -> tuple[Tensor, Tensor] | None:
    """The entries of two tensors that both kept; None if their shapes differ. A flattened batch is no difference."""
    a, b = _sliced(one.tensor, one, other), _sliced(other.tensor, other, one)
    if a.shape != b.shape:
        if a.numel() != b.numel() or one.stride or other.stride:
            return None
        b = b.reshape(a.shape)
    return a, b


def _sliced(tensor: Tensor, own: Whole, other: Whole) -> Tensor:
    """Of a tensor, the entries that the other kept too."""
    if other.stride is None:
        return tensor
    dim, stride = other.stride
    if own.stride is not None and own.stride[0] == dim:
        stride = max(1, stride // own.stride[1])  # strides are powers of two
    return tensor[(slice(None),) * dim + (slice(None, None, stride),)]


def _bounds(key: str, wanted: Tensor, eps: float, depth: int, smallest: float, perturbed: Sequence[StepTensors]) -> Bounds:
    """Measured, or 8 roundings times the root of the number of modules before: errors of independent roundings add so."""
    if perturbed:
        runs = [run.whole(key).tensor for run in perturbed if key in run.keys]
        if len(runs) < len(perturbed) or any(run.numel() != wanted.numel() for run in runs):
            raise SpecError(
                f"--perturbed has no {key} of shape {list(wanted.shape)}: record it with the same program and max_bytes"
            )
        return Bounds.measured({key: wanted}, [{key: run.reshape(wanted.shape)} for run in runs], eps)
    size = RelativeError.size(wanted[wanted.isfinite()])
    bound = FACTOR * eps * math.sqrt(1 + depth)
    return Bounds({key: RelativeError(bound, bound)}, {key: RelativeError(*(max(value, smallest) for value in size))})
