"""Peak memory and step time of whole tables of layouts, in closed form: what the search evaluates a million times.

A table is cores × variants: a core is a row of everything but the schedule, a variant is a schedule with its virtual stages.
States, activations and layer times depend on the core and on whether backward is split; a variant only repeats and orders
them. The closed forms are those of schedules/registry.py, held to the simulator by tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ultrascale.cost import communication, stages
from ultrascale.cost.columns import Array, LayoutColumns, Passes, RankShare, encode, rows_of, where
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.memory.estimate import InFlightMicrobatches, peak_parts
from ultrascale.cost.step import component_times, depends_on, end_of_step
from ultrascale.schedules import REGISTRY, in_flight_microbatches, legal_mask, makespan, stages_of
from ultrascale.specs.job import Job

ScheduleVariant = tuple[str, int]  # a schedule and its virtual stages
Variants = Sequence[ScheduleVariant]
BLOCK = 16_384  # cores at a time: the working arrays of a block stay in the cache


@dataclass(frozen=True)
class Table:
    """Cores of one pipeline degree under every variant, as arrays of cores × variants."""

    cores: LayoutColumns
    variants: tuple[ScheduleVariant, ...]
    legal: Array
    peak_bytes: Array
    """exact where it fits; where it does not, of the first ranks that were found to hold too much"""
    fits: Array
    """legal and within capacity"""
    step_s: Array
    """infinite where it does not fit, or takes longer than `longest_s`"""

    def layouts(self, core: Array, variant: Array) -> LayoutColumns:
        """The selected cells as rows."""
        rows = {name: getattr(self.cores, name)[core] for name in self.cores.__dataclass_fields__}
        rows["schedule"] = np.asarray([encode("schedule", name) for name, _ in self.variants])[variant]
        rows["virtual_stages"] = np.asarray([loops for _, loops in self.variants])[variant]
        return LayoutColumns.from_mapping(rows)


def evaluate(
    job: Job,
    cores: LayoutColumns,
    variants: Variants,
    machine: ClusterRates,
    capacity_bytes: float,
    longest_s: float = np.inf,
) -> Table:
    """All cores must share one pp. Time is computed only where memory fits and a step might take `longest_s` or less."""
    # Variants × cores: arrays are filled variant by variant, so that is how they lie in memory.
    legal, fits = (np.empty((len(variants), len(cores)), dtype=bool) for _ in range(2))
    peak, step = (np.empty((len(variants), len(cores))) for _ in range(2))
    for group in _groups(job, variants):
        of_group = [variants[number] for number in group]
        schedule = np.full(len(cores), encode("schedule", of_group[0][0]))
        rows = cores.changed(schedule=schedule)
        for block in _blocks(len(cores)):
            parts = _evaluate_block(job, rows.take(block), of_group, machine, capacity_bytes, longest_s)
            for whole, part in zip((legal, peak, fits, step), parts, strict=True):
                whole[group, block] = part
    return Table(cores, tuple(variants), legal.T, peak.T, fits.T, step.T)


def step_times(job: Job, cores: LayoutColumns, variants: Variants, machine: ClusterRates) -> Array:
    """Cores × variants: the step time of every legal cell, whether or not it fits; infinite where it is not legal."""
    step = np.empty((len(variants), len(cores)))
    for group in _groups(job, variants):
        of_group = [variants[number] for number in group]
        rows = cores.changed(schedule=np.full(len(cores), encode("schedule", of_group[0][0])))
        for block in _blocks(len(cores)):
            part = rows.take(block)
            _, times = _steps(job, part, of_group, machine, np.inf)
            step[group, block] = np.where(_legal(part, of_group), times, np.inf)
    return step.T


def _groups(job: Job, variants: Variants) -> list[list[int]]:
    """Variants by number, those with a split backward apart in an engine that fuses no such layers."""
    split = [REGISTRY[name].split_backward and job.framework.fused_blocks for name, _ in variants]
    groups = [[number for number, one in enumerate(split) if one == kind] for kind in (False, True)]
    return [group for group in groups if group]


def _blocks(rows: int) -> list[slice]:
    """Of about the same size each."""
    count = -(-rows // BLOCK)
    ends = [rows * number // count for number in range(count + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def _evaluate_block(
    job: Job, cores: LayoutColumns, variants: Variants, machine: ClusterRates, capacity_bytes: float, longest_s: float
) -> tuple[Array, Array, Array, Array]:
    legal = _legal(cores, variants)
    peak = _peaks(job, cores, variants, legal, capacity_bytes)
    fits = legal & (peak <= capacity_bytes)
    step = np.full(legal.shape, np.inf)
    rows = np.flatnonzero(fits.any(axis=0))
    if len(rows) and longest_s > 0:
        selected, times = _steps(job, cores.take(rows), variants, machine, longest_s)
        rows = rows[selected]
        step[:, rows] = np.where(fits[:, rows], times, np.inf)
    return legal, peak, fits, step


def _legal(cores: LayoutColumns, variants: Variants) -> Array:
    """Variants × cores."""
    pp = int(cores.pp[0])
    if pp == 1:
        return np.ones((len(variants), len(cores)), dtype=bool)
    gas, of = np.unique(cores.gas, return_inverse=True)
    return np.stack([legal_mask(name, pp, gas, loops) for name, loops in variants]).take(of, axis=1)


def _shares(job: Job, pp: int, variant: ScheduleVariant) -> list[tuple[int, tuple[int, ...]]]:
    """(rank, its share) of the ranks that can hold the peak or set the pace."""
    name, loops = variant
    shares = stages.rank_shares(job, pp, loops, REGISTRY[name].v_shaped)
    return [(rank, shares[rank]) for rank in stages.representative_ranks(shares)]


def _fullest(job: Job, pp: int, variant: ScheduleVariant) -> list[tuple[int, tuple[int, ...]]]:
    """Those that can hold the peak: where nothing is put off, what waits only falls with the rank."""
    name, _ = variant
    if REGISTRY[name].split_backward:
        return _shares(job, pp, variant)
    first: dict[tuple[int, ...], int] = {}
    for rank, share in _shares(job, pp, variant):
        first.setdefault(share, rank)
    return [(rank, share) for share, rank in first.items()]


def _peaks(job: Job, cores: LayoutColumns, variants: Variants, legal: Array, capacity_bytes: float) -> Array:
    """Variants × cores. Share after share; cores that no variant makes fit any more are not evaluated for the rest."""
    pp = int(cores.pp[0])
    gas, of = np.unique(cores.gas, return_inverse=True)
    peak = found = np.zeros(legal.shape)
    rows: Array | None = None  # all, so far
    for share, holders in _by_share(job, pp, variants):
        parts = peak_parts(job, cores, RankShare.constant(share, len(cores)))
        for number, rank in holders:
            name, loops = variants[number]
            here = rows_of(microbatches_in_flight(job, name, pp, rank, gas, loops), of)
            np.maximum(found[number], parts.total(job, here), out=found[number])
        if rows is not None:
            peak[:, rows] = found
        still = np.flatnonzero((legal & (found <= capacity_bytes)).any(axis=0))
        if not len(still):
            break
        if len(still) < len(cores):
            rows = still if rows is None else rows[still]
            cores, of = cores.take(still), of[still]
            legal, found = legal.take(still, axis=1), found.take(still, axis=1)
    return peak


def _by_share(job: Job, pp: int, variants: Variants) -> list[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """The shares that can hold a peak, with the variants (by number) and ranks that have them; first those that together are
    in every variant, since no core is out before each of its variants was asked about once.
    """
    found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for number, variant in enumerate(variants):
        for rank, share in _fullest(job, pp, variant):
            found.setdefault(share, []).append((number, rank))
    ordered, unasked = [], set(range(len(variants)))
    while found:
        share = max(found, key=lambda one: (len(unasked.intersection(number for number, _ in found[one])), len(found[one])))
        unasked.difference_update(number for number, _ in found[share])
        ordered.append((share, found.pop(share)))
    return ordered


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


def _steps(job: Job, cores: LayoutColumns, variants: Variants, machine: ClusterRates, longest_s: float) -> tuple[Array, Array]:
    """Which cores might take no longer, and their times: variants × those."""
    pp = int(cores.pp[0])
    distinct, inverse = cores.distinct(depends_on(job))
    totals = rows_of(component_times(Workload(job, distinct, machine)).totals(), inverse)
    model = job.model
    whole = totals.on(RankShare.constant((model.dense_layers, model.moe_layers, 1, 1), len(cores)))
    # No step is shorter than the slowest rank's work, which is no less than the mean rank's; the rest is for rounding.
    selected = np.flatnonzero(cores.gas * whole.total / pp <= longest_s * (1 + 1e-9))
    if len(selected) < len(cores):
        cores, totals, whole = cores.take(selected), rows_of(totals, selected), rows_of(whole, selected)
    rows = len(cores)
    if not rows:
        return selected, np.zeros((len(variants), 0))
    work = Workload(job, cores, machine)
    send = communication.pipeline_hop(work).time_s
    by_share: dict[tuple[int, ...], Passes] = {}
    after: dict[tuple[int, ...], Array] = {}
    times = np.empty((len(variants), rows))
    for number, variant in enumerate(variants):
        shares = list(dict.fromkeys(share for _, share in _shares(job, pp, variant)))
        for share in shares:
            if share not in by_share:
                by_share[share] = totals.on(RankShare.constant(share, rows))
        first = shares[0]
        if first not in after:
            share_of_first = RankShare.constant(first, rows)
            after[first] = end_of_step(work, share_of_first, totals).total
        slowest = _slowest([by_share[share] for share in shares])
        overhead_s = machine.efficiency.action_overhead_s
        times[number] = _makespan(variant, pp, cores, whole, slowest, send, overhead_s) + after[first]
    return selected, times


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
