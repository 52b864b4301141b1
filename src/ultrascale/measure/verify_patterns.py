"""What a difference between two tensors correlates with: a constant factor, mesh coordinates, a slice, another order."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ultrascale.measure.dump_tensors import Region, StepTensors
from ultrascale.measure.verify_recording import RelativeError

Copy = tuple[int, Region, Tensor]
"""a rank, the region that it has, its entries"""
LONGEST_PERMUTATION = 2**20
CLOSE = 32.0
"""how many bounds a scaled or permuted tensor may be away: both were computed from other numbers"""


@dataclass(frozen=True)
class Pattern:
    """Facts about one difference."""

    first_name: str
    """the tensor's name in the first program"""
    factor: float | None = None
    """the first is this times the second, where it differs"""
    factor_words: str = ""
    ranks: str = ""
    """which ranks of the first program have the wrong entries, if not all"""
    copies: str = ""
    """ranks that should have equal copies, and do not"""
    slices: tuple[str, ...] = ()
    permuted: str = ""
    not_finite: str = ""

    def sentences(self) -> list[str]:
        found = [self.not_finite, self.factor_words, self.permuted, self.ranks, self.copies, *self.slices]
        return [one for one in found if one]


def pattern_of(
    first_name: str,
    a: Tensor,
    b: Tensor,
    copies: Sequence[Copy],
    others: Sequence[Copy],
    bound: RelativeError,
    size: RelativeError,
    first: StepTensors,
    second: StepTensors,
) -> Pattern:
    """`copies`: all parts and replicas of `a`; `others`: those of `b`."""
    whole_second = b
    tolerance = bound.largest * size.largest
    infinite = [(~value.isfinite()).sum() for value in (a, *(value for _, _, value in copies))]
    if count := int(max(infinite)):
        return Pattern(first_name, not_finite=f"{count:,} of {a.numel():,} entries are not finite")
    ranks = {rank for rank, region, value in copies if _differs(value, b[region], tolerance)}
    everyone = {rank for rank, _, _ in copies}
    if not _differs(a, b, tolerance):  # only a further copy is wrong
        a, b = next(((value, b[region]) for _, region, value in copies if _differs(value, b[region], tolerance)), (a, b))
    wrong = (a.double() - b.double()).abs() > tolerance
    some = bool(wrong.any()) and not bool(wrong.all())
    factor = _factor(a, b, bound)
    everywhere = factor is not None or not some
    if not everywhere:
        factor = _factor(a[wrong], b[wrong], bound)
    permuted = "" if factor is not None else _permuted(a, b, tolerance)
    return Pattern(
        first_name,
        factor,
        "" if factor is None else factor_words(factor, {**second.axes, **first.axes}, everywhere),
        _ranks(first, ranks, everyone),
        _unequal(first, copies, whole_second, bound, size, "")
        or _unequal(second, others, whole_second, bound, size, f" of {second.folder}"),
        () if permuted or (factor is not None and everywhere) else tuple(_slices(wrong)),
        permuted,
    )


def _differs(value: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return bool(((value.double() - wanted.double()).abs() > tolerance).any())


def _factor(a: Tensor, b: Tensor, bound: RelativeError) -> float | None:
    """The number that `a` is times `b`, entry by entry."""
    a, b = a.double(), b.double()
    square = float((b * b).sum())
    if not square or a.numel() < 2:
        return None
    factor = float((a * b).sum()) / square
    rest = float((a - factor * b).norm()) / math.sqrt(square)
    near_one = abs(factor - 1) <= CLOSE * bound.rms
    return factor if rest <= CLOSE * bound.rms * max(1.0, abs(factor)) and not near_one else None


def factor_words(factor: float, axes: Mapping[str, int], everywhere: bool = True) -> str:
    where = "" if everywhere else "there "
    if abs(factor) < 1e-6:
        return f"{where}all entries are zero"
    meaning = next(_meanings(factor, axes), "")
    return f"{where}every entry is {factor:.4g} times the other's" + (f" ({meaning})" if meaning else "")


def _meanings(factor: float, axes: Mapping[str, int]) -> Iterator[str]:
    sizes: dict[int, list[str]] = defaultdict(list)
    for axis, size in axes.items():
        sizes[size].append(axis)
    for (one, first), (two, second) in combinations(axes.items(), 2):
        sizes[first * second].append(f"{one}·{two}")
    for size, names in sorted(sizes.items()):
        if size > 1:
            words = " or ".join(names)
            if abs(factor - size) < 1e-3 * size:
                yield f"the size of {words}"
            if abs(factor - 1 / size) < 1e-3 / size:
                yield f"1 over the size of {words}"


def _ranks(step: StepTensors, wrong: set[int], everyone: set[int]) -> str:
    """The ranks with wrong entries, as mesh coordinates where these say it."""
    if not wrong or wrong == everyone or step.world == 1:
        return ""
    mesh = {index.rank: index.mesh for index in step.indexes}
    for axis in step.axes:
        values = {mesh[rank][axis][0] for rank in wrong if axis in mesh[rank]}
        if {rank for rank in everyone if axis in mesh[rank] and mesh[rank][axis][0] in values} == wrong:
            return f"only ranks with {axis}={','.join(map(str, sorted(values)))} differ"
    names = [f"{rank} ({', '.join(f'{axis}={place}' for axis, (place, _) in mesh[rank].items())})" for rank in sorted(wrong)]
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"only rank {', '.join(names[:4])}{rest} of {step.world} differs"


def _unequal(
    step: StepTensors, copies: Sequence[Copy], right: Tensor, bound: RelativeError, size: RelativeError, where: str
) -> str:
    """Replicas that differ: over which axis, and whether their sum or mean is the right tensor."""
    mesh = {index.rank: index.mesh for index in step.indexes}
    tolerance = bound.largest * size.largest
    for axis in step.axes:
        for group in _peers(copies, mesh, axis):
            _, region, first = group[0]
            if not any(_differs(value, first, tolerance) for _, _, value in group):
                continue
            text = f"copies that should be equal differ between ranks{where} over {axis}"
            total = torch.stack([value.double() for _, _, value in group]).sum(0)
            for result, words in ((total, "sum"), (total / len(group), "mean")):
                if not _differs(result, right[region], CLOSE * tolerance):
                    return f"{text}, and their {words} is right: they were not reduced"
            return text
    return ""


def _peers(copies: Sequence[Copy], mesh: Mapping[int, Mapping[str, tuple[int, int]]], axis: str) -> Iterable[list[Copy]]:
    """Copies of one region on ranks that differ in one axis alone."""
    groups: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        rank, region, _ = copy
        others = {name: place for name, (place, _) in mesh[rank].items() if name != axis}
        groups[f"{region} {others}"].append(copy)
    return [group for group in groups.values() if len(group) > 1]


def _slices(wrong: Tensor) -> Iterable[str]:
    """Dimensions in which only some entries are wrong."""
    for dim, length in enumerate(wrong.shape):
        others = tuple(number for number in range(wrong.ndim) if number != dim)
        here = (wrong.any(dim=others) if others else wrong).nonzero().flatten().tolist()
        if not here or len(here) == length:
            continue
        first, last = here[0], here[-1]
        together = last - first + 1 == len(here)
        place = f"only entries {first} to {last}" if together and len(here) > 1 else f"only {len(here):,} entries"
        if together and len(here) == 1:
            place = f"only entry {first}"
        half = ""
        if together and 2 * len(here) == length and first in (0, length // 2):
            half = f", its {'second' if first else 'first'} half"
        yield f"{place} of {length:,} in dimension {dim} of {wrong.ndim}{half}"


def _permuted(a: Tensor, b: Tensor, tolerance: float) -> str:
    """Whether `a` has the slices of `b` along a dimension in another order, which a random sum of each slice finds."""
    random = torch.Generator().manual_seed(0)
    for dim, length in enumerate(a.shape):
        if not 1 < length <= LONGEST_PERMUTATION:
            continue
        one, two = (tensor.double().movedim(dim, 0).reshape(length, -1) for tensor in (a, b))
        weights = torch.randn(one.shape[1], generator=random, dtype=torch.float64)
        if not _differs(one[(one @ weights).argsort()], two[(two @ weights).argsort()], CLOSE * tolerance):
            return f"the same entries stand in another order along dimension {dim} of {a.ndim}"
    return ""
