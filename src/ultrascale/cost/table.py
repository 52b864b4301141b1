"""Peak memory and step time of whole tables of layouts, in closed form: what the search evaluates a million times.

A table is cores × variants: a core is a row of everything but the schedule, a variant is a schedule with its virtual stages.
States, activations and layer times depend on the core and on whether backward is split; a variant only repeats and orders
them. The closed forms are those of schedules/registry.py, held to the simulator by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ultrascale.cost import communication, stages
from ultrascale.cost.columns import Array, LayoutColumns, Passes, RankShare, encode, rows_of, where
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.memory.estimate import InFlightMicrobatches, PeakParts, lower_bound_parts, peak_parts
from ultrascale.cost.step import ComponentTimes, component_times, depends_on, end_of_step
from ultrascale.schedules import REGISTRY, in_flight_microbatches, legal_mask, makespan, stages_of
from ultrascale.specs.job import Job

ScheduleVariant = tuple[str, int]  # a schedule and its virtual stages
Share: TypeAlias = tuple[int, ...]
BLOCK = 16_384  # rows at a time: the working arrays of a block stay in the cache


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
    def _groups(self) -> list[tuple[list[int], _VariantGroup]]:
        """Variants by number; in an engine with a chunked loss and compiled layers, those with a split backward, which have
        neither, are a group of their own.
        """
        split = [REGISTRY[name].split_backward and self.job.framework.fused_blocks for name, _ in self.variants]
        found = []
        for kind in (False, True):
            numbers = [number for number, one in enumerate(split) if one == kind]
            if numbers:
                variants = [self.variants[number] for number in numbers]
                rows = self.cores.changed(schedule=np.full(len(self.cores), encode("schedule", variants[0][0])))
                found.append((numbers, _VariantGroup(self.job, rows, variants, self.machine)))
        return found

    def within(self, capacity_bytes: float) -> SearchTable:
        """The table without cores whose lower bound is above the capacity in every variant."""
        rows = np.flatnonzero(self.peak_lower_bound_bytes() <= capacity_bytes)
        part = replace(self, cores=self.cores.take(rows))
        vars(part)["_groups"] = [(numbers, group.take(rows)) for numbers, group in self._groups]
        return part

    @property
    def legal_cells(self) -> int:
        return sum(int(group.legal(slice(None)).sum()) for _, group in self._groups)

    def step_lower_bound_s(self) -> Array:
        """A lower bound of each core's step time under any variant."""
        return np.asarray(np.min([group.step_lower_bound_s for _, group in self._groups], axis=0))

    def peak_lower_bound_bytes(self) -> Array:
        """A lower bound of each core's peak under any variant; infinite where none is legal."""
        every = slice(None)
        least = [np.where(one.legal(every), one.peak_lower_bounds, np.inf).min(axis=0) for _, one in self._groups]
        return np.asarray(np.min(least, axis=0))

    def evaluate(self, capacity_bytes: float, longest_s: float | None = np.inf, rows: Array | None = None) -> Table:
        """Of some cores, or all: which cells fit and take `longest_s` or less. None: at any speed, and no times."""
        rows = np.arange(len(self.cores)) if rows is None else rows
        # Variants × cores: arrays are filled variant by variant, so that is how they lie in memory.
        shape = len(self.variants), len(rows)
        legal, fits, peak, step = np.empty(shape, bool), np.empty(shape, bool), np.empty(shape), np.empty(shape)
        for numbers, group in self._groups:
            for block in _blocks(len(rows), BLOCK):
                parts = group.evaluate(rows[block], capacity_bytes, longest_s)
                for whole, part in zip((legal, peak, fits, step), parts, strict=True):
                    whole[numbers, block] = part
        return Table(self.cores.take(rows), self.variants, legal.T, peak.T, fits.T, step.T)


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

    def take(self, rows: Array) -> _VariantGroup:
        """Some cores, with what is known of them."""
        part, (gas, of) = replace(self, cores=self.cores.take(rows)), self._gas
        vars(part).update(peak_lower_bounds=self.peak_lower_bounds[:, rows], _gas=(gas, of[rows]))
        vars(part).update({name: getattr(self, name) for name in ("pp", "_legal_by_gas", "_ranks", "_by_share", "_in_flight")})
        return part

    @cached_property
    def pp(self) -> int:
        return int(self.cores.pp[0])

    @cached_property
    def _gas(self) -> tuple[Array, Array]:
        """The few distinct numbers of micro-batches and, per core, which of them it has."""
        return np.unique(self.cores.gas, return_inverse=True)

    @cached_property
    def _legal_by_gas(self) -> Array:
        gas, _ = self._gas
        return np.stack([(gas > 0) if self.pp == 1 else legal_mask(name, self.pp, gas, loops) for name, loops in self.variants])

    def legal(self, rows: Array | slice) -> Array:
        return self._legal_by_gas.take(self._gas[1][rows], axis=1)

    @cached_property
    def _ranks(self) -> list[list[tuple[int, Share]]]:
        """For each variant (rank, its share) of the ranks that can hold the peak or set the pace."""
        found = []
        for name, loops in self.variants:
            shares = stages.rank_shares(self.job, self.pp, loops, REGISTRY[name].v_shaped)
            found.append([(rank, shares[rank]) for rank in stages.representative_ranks(shares)])
        return found

    def evaluate(self, rows: Array, capacity_bytes: float, longest_s: float | None) -> tuple[Array, Array, Array, Array]:
        legal = self.legal(rows)
        peak, step = self.peak_lower_bounds[:, rows], np.full(legal.shape, np.inf)
        fits = legal & (peak <= capacity_bytes)
        if longest_s is not None:
            some = np.flatnonzero(fits.any(axis=0) & (self.step_lower_bound_s[rows] <= longest_s))
            step[:, some] = self._steps(rows[some])
            fits &= step <= longest_s
        some = np.flatnonzero(fits.any(axis=0))
        for block in _blocks(len(some), max(1, BLOCK // len(self._by_share))):
            peak[:, some[block]] = self._peaks(rows[some[block]], peak_parts, self._by_share)
        fits &= peak <= capacity_bytes
        return legal, peak, fits, np.where(fits, step, np.inf)

    # Memory.

    @cached_property
    def peak_lower_bounds(self) -> Array:
        """A lower bound, from one rank of each variant."""
        uncovered, covering = set(range(len(self.variants))), []
        for share, holders in self._by_share:
            if uncovered:
                covering.append((share, holders))
            uncovered.difference_update(number for number, _ in holders)
        found = np.empty((len(self.variants), len(self.cores)))
        for block in _blocks(len(self.cores), max(1, BLOCK // len(covering))):
            found[:, block] = self._peaks(np.arange(block.start, block.stop), lower_bound_parts, covering)
        return found

    def _peaks(
        self,
        rows: Array,
        parts_of: Callable[[Job, LayoutColumns, RankShare], PeakParts],
        by_share: Sequence[tuple[Share, Sequence[tuple[int, int]]]],
    ) -> Array:
        """The fullest of the ranks given; those with one share follow those with another, as rows of one table."""
        count, columns, of_gas = len(rows), self.cores.take(rows), self._gas[1][rows]
        shares = np.repeat(np.asarray([share for share, _ in by_share]), count, axis=0)
        share = RankShare(np.zeros(len(shares), dtype=np.int64), *shares.T)
        parts = parts_of(self.job, columns.take(np.tile(np.arange(count), len(by_share))), share)
        peak = np.zeros((len(self.variants), count))
        for position, (_, holders) in enumerate(by_share):
            mine = parts.rows(slice(position * count, (position + 1) * count))
            for number, rank in holders:
                waiting = rows_of(self._in_flight[number, rank], of_gas)
                np.maximum(peak[number], mine.total(self.job, waiting), out=peak[number])
        return peak

    @cached_property
    def _by_share(self) -> list[tuple[Share, list[tuple[int, int]]]]:
        """The shares that can hold a peak, with the variants (by number) and ranks that have them; first those that together
        are in every variant.
        """
        found: dict[Share, list[tuple[int, int]]] = {}
        for number, (name, _) in enumerate(self.variants):
            # Where nothing is deferred, what is in flight only falls with the rank: the first of each share is the fullest.
            seen: set[Share] = set()
            for rank, share in self._ranks[number]:
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

    @cached_property
    def _in_flight(self) -> dict[tuple[int, int], InFlightMicrobatches]:
        """By variant and rank, for each number of micro-batches."""
        holders = [holder for _, some in self._by_share for holder in some]
        return {
            (number, rank): microbatches_in_flight(self.job, name, self.pp, rank, self._gas[0], loops)
            for number, rank in holders
            for name, loops in [self.variants[number]]
        }

    # Time.

    @cached_property
    def _components(self) -> tuple[ComponentTimes[Passes], Array]:
        """Of the distinct cores as far as layers' times go and, per core, which of them it is."""
        distinct, inverse = self.cores.distinct(depends_on(self.job))
        return component_times(Workload(self.job, distinct, self.machine)).totals(), inverse

    @cached_property
    def _microbatch(self) -> Passes:
        """One micro-batch through all layers, for each distinct core."""
        model, (totals, inverse) = self.job.model, self._components
        share = RankShare.constant((model.dense_layers, model.moe_layers, 1, 1), int(inverse.max(initial=-1)) + 1)
        return totals.on(share)

    @cached_property
    def step_lower_bound_s(self) -> Array:
        """A lower bound: the mean rank's work, which is no longer than the slowest rank's, less a little for rounding."""
        each = self._microbatch.total[self._components[1]]
        return np.asarray((1 - 1e-9) * self.cores.gas * each / self.pp)

    def _steps(self, rows: Array) -> Array:
        cores, count = self.cores.take(rows), len(rows)
        times = np.empty((len(self.variants), count))
        if not count:
            return times
        of_components = self._components[1][rows]
        totals, whole = rows_of(self._components[0], of_components), rows_of(self._microbatch, of_components)
        work = Workload(self.job, cores, self.machine)
        send = communication.pipeline_hop(work).time_s
        by_share: dict[Share, Passes] = {}
        after: dict[Share, Array] = {}
        for number, variant in enumerate(self.variants):
            shares = list(dict.fromkeys(share for _, share in self._ranks[number]))
            for share in shares:
                if share not in by_share:
                    by_share[share] = totals.on(RankShare.constant(share, count))
            first = shares[0]
            if first not in after:
                after[first] = end_of_step(work, RankShare.constant(first, count), totals).total
            slowest = _slowest([by_share[share] for share in shares])
            overhead_s = self.machine.efficiency.action_overhead_s
            times[number] = _makespan(variant, self.pp, cores, whole, slowest, send, overhead_s) + after[first]
        return times


def microbatches_in_flight(job: Job, name: str, pp: int, rank: int, gas: Array, loops: int) -> InFlightMicrobatches:
    """The closed forms of schedules/registry.py in micro-batches' worth of the rank's layers."""
    one, none = np.ones(len(gas)), np.zeros(len(gas))
    if pp == 1:
        return InFlightMicrobatches(one, none, none)
    spec, layers = REGISTRY[name], stages.chunk_layers(job, pp, loops)
    own = [layers[chunk] for chunk in stages_of(rank, pp, loops, spec.v_shaped)]
    in_flight, put_off = in_flight_microbatches(name, pp, rank, gas, own)
    losses = np.asarray(in_flight - 1 if spec.holds_all else none)
    return InFlightMicrobatches(in_flight, np.asarray(put_off), losses, together=not spec.defers_last, one=1 / loops)


def _slowest(ranks: list[Passes]) -> Passes:
    best = ranks[0]
    for other in ranks[1:]:
        best = where(other.total > best.total, other, best)
    return best


def _makespan(
    variant: ScheduleVariant, pp: int, cores: LayoutColumns, whole: Passes, slowest: Passes, send: Array, overhead_s: float
) -> Array:
    if pp == 1:
        return np.asarray(cores.gas * slowest.total)
    name, loops = variant
    whole, slowest = whole.delayed(overhead_s * pp * loops), slowest.delayed(overhead_s * loops)
    return makespan(name, pp, cores.gas, loops, whole.parts, slowest.parts, send)
