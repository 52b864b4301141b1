"""Peak memory and step time of whole tables of layouts, in closed form: what the search evaluates a million times.

A table is cores × variants: a core is a row of everything but the schedule, a variant is a schedule with its virtual stages.
States, activations and layer times depend on the core and on whether backward is split; a variant only repeats and orders
them. The closed forms are those of schedules/registry.py, held to the simulator by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np

from ultrascale.cost import communication, stages
from ultrascale.cost.columns import Array, LayoutColumns, Passes, RankShare, encode, rows_of, where
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.memory.estimate import InFlightMicrobatches, lower_bound_parts, peak_parts
from ultrascale.cost.step import component_totals, compute_depends_on, compute_totals, end_of_step
from ultrascale.schedules import REGISTRY, in_flight_microbatches, legal_mask, makespan
from ultrascale.specs.job import Job
from ultrascale.specs.units import groups_up_to

ScheduleVariant = tuple[str, int]  # a schedule and its virtual stages
Share: TypeAlias = tuple[int, ...]
# With unequal ranks, closed forms of split backwards are up to 12 % below those with equal ones: others' W fills the bubble.
SPLIT_MARGIN = 0.85
BLOCK = 16_384  # rows at a time: the working arrays of a block stay in the cache
BOUND_MARGIN = 0.99  # of what the bound adds up: it was 0.2 % above the walked peak of a V schedule


@dataclass(frozen=True)
class Table:
    """Cores of one pipeline degree under every variant, as arrays of cores × variants."""

    cores: LayoutColumns
    variants: tuple[ScheduleVariant, ...]
    legal: Array
    peak_bytes: Array
    """exact where it fits, elsewhere a lower bound"""
    fits: Array
    """legal, within capacity and not slower than asked for"""
    step_s: Array
    """infinite elsewhere"""

    def layouts(self, core: Array, variant: Array) -> LayoutColumns:
        """The selected cells as rows."""
        rows = {name: getattr(self.cores, name)[core] for name in self.cores.__dataclass_fields__}
        rows["schedule"] = np.asarray([encode("schedule", name) for name, _ in self.variants])[variant]
        rows["virtual_stages"] = np.asarray([loops for _, loops in self.variants])[variant]
        return LayoutColumns.from_mapping(rows)


@dataclass(frozen=True)
class SearchTable:
    """Cores of one pipeline degree and their variants: lower bounds of all, exact figures of those asked for."""

    job: Job
    cores: LayoutColumns
    variants: tuple[ScheduleVariant, ...]
    machine: ClusterRates

    @cached_property
    def groups(self) -> list[tuple[list[int], _VariantGroup]]:
        """Variants by number; in an engine whose kernels depend on it, those with a split backward are a group of their own."""
        split = [REGISTRY[name].split_backward and self.job.framework.fused_blocks for name, _ in self.variants]
        found = []
        for kind in (False, True):
            numbers = [number for number, one in enumerate(split) if one == kind]
            if numbers:
                variants = [self.variants[number] for number in numbers]
                rows = self.cores.changed(schedule=np.full(len(self.cores), encode("schedule", variants[0][0])))
                found.append((numbers, _VariantGroup(self.job, rows, variants, self.machine)))
        return found

    def part(self, rows: Array) -> SearchTable:
        """Some cores, with the lower bounds of their step times."""
        if len(rows) == len(self.cores):
            return self
        found = replace(self, cores=self.cores.take(rows))
        for (_, group), (_, whole) in zip(found.groups, self.groups, strict=True):
            vars(group)["step_lower_bound_s"] = whole.step_lower_bound_s[rows]
        return found

    @property
    def legal_cells(self) -> int:
        return sum(int(group.legal(slice(None)).sum()) for _, group in self.groups)

    def step_lower_bound_s(self) -> Array:
        """A lower bound of each core's step time under any variant."""
        return np.asarray(np.min([group.step_lower_bound_s for _, group in self.groups], axis=0))

    def peak_lower_bound_bytes(self) -> Array:
        """A lower bound of each core's peak under any variant; infinite where none is legal."""
        every = slice(None)
        least = [np.where(one.legal(every), one.peak_lower_bounds, np.inf).min(axis=0) for _, one in self.groups]
        return np.asarray(np.min(least, axis=0))

    def evaluate(self, capacity_bytes: float, longest_s: float | None = np.inf, rows: Array | None = None) -> Table:
        """Of some cores, or all: which cells fit and take `longest_s` or less. None: at any speed, and no times."""
        return evaluate([self], [np.arange(len(self.cores)) if rows is None else rows], capacity_bytes, longest_s)[0]


# Many tables at once: most of the time goes into calls, not into rows.


def compute_lower_bounds(tables: Sequence[SearchTable], of: Literal["step", "peak"]) -> None:
    """Of all tables' step times or peaks."""
    groups = [group for table in tables for _, group in table.groups]
    bounds = _step_lower_bounds_s(groups) if of == "step" else _peaks([(one, one.every) for one in groups], lower_bounds=True)
    for group, of_group in zip(groups, bounds, strict=True):
        vars(group)["step_lower_bound_s" if of == "step" else "peak_lower_bounds"] = of_group


def evaluate(
    tables: Sequence[SearchTable],
    rows: Sequence[Array],
    capacity_bytes: float,
    longest_s: float | None = np.inf,
    slowest_wanted: Callable[[Array], float] = lambda _: np.inf,
) -> list[Table]:
    """Of some cores of each table: which cells fit and take `longest_s` or less. None: at any speed, and no times.

    `slowest_wanted`, given the times of all cells that may fit, is the longest that the caller wants to know: slower ones count
    as not fitting.
    """
    asked = [(group, some) for table, some in zip(tables, rows, strict=True) for _, group in table.groups]
    bounds = _peaks(asked, lower_bounds=True)
    cells = [_Cells(*pair, least, capacity_bytes) for pair, least in zip(asked, bounds, strict=True)]
    if longest_s is not None:
        timed = [one.cores_with(one.fits & (one.group.step_lower_bound_s[one.rows] <= longest_s)) for one in cells]
        for one, some, times in zip(cells, timed, _steps(_rows_of_groups(cells, timed)), strict=True):
            one.step[:, some] = times
            one.fits &= one.step <= longest_s
    while True:
        times = np.concatenate([one.step[one.fits] for one in cells])
        most_s = np.inf if longest_s is None else slowest_wanted(times)
        if not any(np.any(one.unknown & (one.step <= most_s)) for one in cells):
            break
        # Some of them will not fit: as many more at once, since each round has its price.
        most_s = np.partition(times, more)[more] if (more := 2 * int((times <= most_s).sum())) < len(times) else np.inf
        wanted = [one.cores_with(one.unknown & (one.step <= most_s)) for one in cells]
        for one, some, peaks in zip(cells, wanted, _peaks(_rows_of_groups(cells, wanted)), strict=True):
            one.peak[:, some], one.exact[some] = peaks, True
            one.fits &= one.peak <= capacity_bytes
    parts = iter(cells)
    return [_table(table, some, [next(parts) for _ in table.groups]) for table, some in zip(tables, rows, strict=True)]


def _table(table: SearchTable, rows: Array, parts: Sequence[_Cells]) -> Table:
    # Variants × cores: arrays are filled variant by variant, so that is how they lie in memory.
    shape = len(table.variants), len(rows)
    legal, fits, peak, step = np.empty(shape, bool), np.empty(shape, bool), np.empty(shape), np.empty(shape)
    for (numbers, _), part in zip(table.groups, parts, strict=True):
        legal[numbers], peak[numbers], fits[numbers] = part.legal, part.peak, part.fits & part.exact
        step[numbers] = np.where(part.fits & part.exact, part.step, np.inf)
    return Table(table.cores.take(rows), table.variants, legal.T, peak.T, fits.T, step.T)


class _Cells:
    """Some cores of a group under its variants, as far as they are known. Arrays are variants × cores."""

    def __init__(self, group: _VariantGroup, rows: Array, peak: Array, capacity_bytes: float) -> None:
        self.group, self.rows, self.legal, self.peak = group, rows, group.legal(rows), peak
        self.step, self.exact = np.full(peak.shape, np.inf), np.zeros(len(rows), dtype=bool)
        self.fits = self.legal & (peak <= capacity_bytes)
        """as far as is known"""

    @property
    def unknown(self) -> Array:
        return self.fits & ~self.exact

    @staticmethod
    def cores_with(cells: Array) -> Array:
        return np.flatnonzero(cells.any(axis=0))


def _rows_of_groups(cells: Sequence[_Cells], some: Sequence[Array]) -> list[_GroupRows]:
    return [(one.group, one.rows[rows]) for one, rows in zip(cells, some, strict=True)]


def _blocks(rows: int, most: int) -> list[slice]:
    """Of about the same size each."""
    count = max(1, -(-rows // most))
    ends = [rows * number // count for number in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)] if rows else []


@dataclass(frozen=True)
class _VariantGroup:
    """Variants whose layers run the same kernels. Arrays are variants × cores."""

    job: Job
    cores: LayoutColumns
    variants: Sequence[ScheduleVariant]
    machine: ClusterRates

    @cached_property
    def pp(self) -> int:
        return int(self.cores.pp[0])

    @property
    def every(self) -> Array:
        return np.arange(len(self.cores))

    @cached_property
    def gas(self) -> tuple[Array, Array]:
        """The few distinct numbers of micro-batches and, per core, which of them it has."""
        return np.unique(self.cores.gas, return_inverse=True)

    @cached_property
    def _legal_by_gas(self) -> Array:
        gas, _ = self.gas
        return np.stack([(gas > 0) if self.pp == 1 else legal_mask(name, self.pp, gas, loops) for name, loops in self.variants])

    def legal(self, rows: Array | slice) -> Array:
        return self._legal_by_gas.take(self.gas[1][rows], axis=1)

    @cached_property
    def ranks(self) -> list[list[tuple[int, Share]]]:
        """For each variant (rank, its share) of the ranks that can hold the peak or set the pace."""
        found = []
        for name, loops in self.variants:
            shares = stages.rank_shares(self.job, self.pp, loops, REGISTRY[name].v_shaped)
            found.append([(rank, shares[rank]) for rank in stages.representative_ranks(shares)])
        return found

    # Memory.

    @cached_property
    def peak_lower_bounds(self) -> Array:
        """From one rank of each variant."""
        return _peaks([(self, self.every)], lower_bounds=True)[0]

    @cached_property
    def by_share(self) -> list[tuple[Share, list[tuple[int, int]]]]:
        """The shares that can hold a peak, with the variants (by number) and ranks that have them; first those that together
        are in every variant.
        """
        found: dict[Share, list[tuple[int, int]]] = {}
        for number, (name, _) in enumerate(self.variants):
            # Where nothing is deferred, what is in flight only falls with the rank: the first of each share is the fullest.
            seen: set[Share] = set()
            for rank, share in self.ranks[number]:
                if share not in seen or REGISTRY[name].split_backward:
                    found.setdefault(share, []).append((number, rank))
                seen.add(share)
        ordered, uncovered = [], set(range(len(self.variants)))
        while found:
            share = max(
                found, key=lambda one: (len(uncovered.intersection(number for number, _ in found[one])), len(found[one]))
            )
            uncovered.difference_update(number for number, _ in found[share])
            ordered.append((share, found.pop(share)))
        return ordered

    @property
    def covering(self) -> list[tuple[Share, list[tuple[int, int]]]]:
        """Of these, those that together are in every variant."""
        uncovered, found = set(range(len(self.variants))), []
        for share, holders in self.by_share:
            if uncovered:
                found.append((share, holders))
            uncovered.difference_update(number for number, _ in holders)
        return found

    @cached_property
    def in_flight(self) -> dict[tuple[int, int], InFlightMicrobatches]:
        """By variant and rank, for each number of micro-batches."""
        ranks: dict[int, list[int]] = {}
        for number, rank in (holder for _, some in self.by_share for holder in some):
            ranks.setdefault(number, []).append(rank)
        return {
            (number, rank): found
            for number, some in ranks.items()
            for rank, found in zip(some, self._of_variant(*self.variants[number], some), strict=True)
        }

    def _of_variant(self, name: str, loops: int, ranks: list[int]) -> Iterator[InFlightMicrobatches]:
        """The closed forms of schedules/registry.py in micro-batches' worth of each rank's layers."""
        gas, spec, none = self.gas[0], REGISTRY[name], np.zeros(len(self.gas[0]))
        if self.pp == 1:
            yield InFlightMicrobatches(np.ones(len(gas)), none, none)
            return
        layers = np.asarray(stages.chunk_layers(self.job, self.pp, loops))
        own = layers[stages.chunk_table(self.pp, loops, spec.v_shaped)[ranks]]
        for in_flight, deferred in zip(*in_flight_microbatches(name, self.pp, ranks, gas, own), strict=True):
            losses = in_flight - 1 if spec.holds_all else none
            yield InFlightMicrobatches(in_flight, deferred, losses, together=not spec.defers_last, one=1 / loops)

    # Time.

    @cached_property
    def step_lower_bound_s(self) -> Array:
        return _step_lower_bounds_s([self])[0]

    def least_step_s(self, cores: LayoutColumns, microbatch: Passes) -> Array:
        """Under any variant, with all ranks as fast as the mean, sends in no time and nothing after the last backward."""
        slowest, overhead_s = microbatch.scaled(1 / self.pp), self.machine.efficiency.action_overhead_s
        busy, least = cores.gas * slowest.total, np.full(len(cores), np.inf)
        for name, loops in self.variants:
            times = _makespan((name, loops), self.pp, cores, microbatch, slowest, 0.0, overhead_s)
            if REGISTRY[name].split_backward:
                times = np.maximum(busy, SPLIT_MARGIN * times)
            legal = legal_mask(name, self.pp, cores.gas, loops) if self.pp > 1 else True
            np.minimum(least, np.where(legal, times, np.inf), out=least)
        return least


_GroupRows: TypeAlias = tuple[_VariantGroup, Array]


def _peaks(asked: Sequence[_GroupRows], lower_bounds: bool = False) -> list[Array]:
    """Of some cores of each group the fullest rank; or from the fewest ranks, and without all that is costly, a lower bound."""
    found = [np.zeros((len(group.variants), len(rows))) for group, rows in asked]
    parts_of = lower_bound_parts if lower_bounds else peak_parts
    pieces = [
        (number, share, holders, block)
        for number, (group, rows) in enumerate(asked)
        for share, holders in (group.covering if lower_bounds else group.by_share)
        for block in _blocks(len(rows), BLOCK)
    ]
    for batch in groups_up_to(BLOCK, pieces, lambda piece: piece[3].stop - piece[3].start):
        job = asked[batch[0][0]][0].job
        cores = [asked[number][0].cores.take(asked[number][1][block]) for number, _, _, block in batch]
        shares = np.repeat([share for _, share, _, _ in batch], list(map(len, cores)), axis=0)
        share = RankShare.of_numbers(job.model, np.zeros(len(shares), dtype=np.int64), shares)
        parts, start = parts_of(job, LayoutColumns.joined(cores), share), 0
        for (number, _, holders, block), rows in zip(batch, cores, strict=True):
            mine, start = parts.rows(slice(start, start + len(rows))), start + len(rows)
            group, peak = asked[number][0], found[number]
            of_gas = group.gas[1][asked[number][1][block]]
            for variant, rank in holders:
                waiting = rows_of(group.in_flight[variant, rank], of_gas)
                np.maximum(peak[variant, block], mine.total(job, waiting), out=peak[variant, block])
    return [BOUND_MARGIN * one for one in found] if lower_bounds else found


def _step_lower_bounds_s(groups: Sequence[_VariantGroup]) -> list[Array]:
    """Of all cores of each group, without ZeRO's transfers: what is left is the same for many."""
    if not groups:
        return []
    job, machine, model = groups[0].job, groups[0].machine, groups[0].job.model
    depends_on = compute_depends_on(job)
    alike = [group.cores.distinct((*dict.fromkeys((*depends_on, "gas")),)) for group in groups]
    layers, of_layers = LayoutColumns.joined([rows for rows, _ in alike]).distinct(depends_on)
    share = RankShare.whole(model, len(layers))
    microbatch = compute_totals(Workload(job, layers, machine)).on(share)
    found, start = [], 0
    for group, (rows, of) in zip(groups, alike, strict=True):
        of_group, start = of_layers[start : start + len(rows)], start + len(rows)
        least = group.least_step_s(rows, rows_of(microbatch, of_group))
        found.append((1 - 1e-9) * least[of])  # less a little for rounding
    return found


def _steps(asked: Sequence[_GroupRows]) -> list[Array]:
    """Of some cores of each group, step times under each variant."""
    found, start = [np.empty((len(group.variants), len(rows))) for group, rows in asked], 0
    if not any(map(len, (rows for _, rows in asked))):
        return found
    job, machine, model = asked[0][0].job, asked[0][0].machine, asked[0][0].job.model
    joined = Workload(job, LayoutColumns.joined([group.cores.take(rows) for group, rows in asked]), machine)
    of_all, sends = component_totals(joined), communication.pipeline_hop(joined).time_s
    for (group, rows), times in zip(asked, found, strict=True):
        count = len(rows)
        mine, start = slice(start, start + count), start + count
        if not count:
            continue
        cores, totals = joined.columns.take(mine), rows_of(of_all, mine)
        work = Workload(job, cores, machine)
        whole = totals.on(RankShare.whole(model, count))
        by_share: dict[Share, Passes] = {}
        after: dict[Share, Array] = {}
        for number, variant in enumerate(group.variants):
            shares = list(dict.fromkeys(share for _, share in group.ranks[number]))
            for share in shares:
                if share not in by_share:
                    by_share[share] = totals.on(RankShare.repeated(model, share, count))
            first = shares[0]
            if first not in after:
                after[first] = end_of_step(work, RankShare.repeated(model, first, count), totals).total
            slowest = _slowest([by_share[share] for share in shares])
            overhead_s = machine.efficiency.action_overhead_s
            times[number] = _makespan(variant, group.pp, cores, whole, slowest, sends[mine], overhead_s) + after[first]
    return found


def _slowest(ranks: list[Passes]) -> Passes:
    best = ranks[0]
    for other in ranks[1:]:
        best = where(other.total > best.total, other, best)
    return best


def _makespan(
    variant: ScheduleVariant,
    pp: int,
    cores: LayoutColumns,
    whole: Passes,
    slowest: Passes,
    send: Array | float,
    overhead_s: float,
) -> Array:
    if pp == 1:
        return np.asarray(cores.gas * slowest.total)
    name, loops = variant
    whole, slowest = whole.delayed(overhead_s * pp * loops), slowest.delayed(overhead_s * loops)
    return makespan(name, pp, cores.gas, loops, whole.parts, slowest.parts, send)
