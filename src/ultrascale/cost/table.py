"""Peak memory and step time of whole tables of layouts, in closed form: what the search evaluates a million times.

A table is cores × variants: a core is a row of everything but the schedule, a variant is a schedule with its virtual stages.
States, activations and layer times depend on the core alone; a variant only repeats and orders them. The closed forms are
those of schedules/closed.py, held to the simulator by tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ultrascale.cost import memory, pipeline, stages
from ultrascale.cost.columns import Array, Columns, encode
from ultrascale.cost.hardware import Machine
from ultrascale.cost.mesh import mesh
from ultrascale.cost.passes import Passes
from ultrascale.cost.pieces import depends_on, pieces
from ultrascale.cost.step import end_of_step
from ultrascale.schedules import closed, legal_mask
from ultrascale.specs.job import Job

Variant = tuple[str, int]
BLOCK = 16_384  # cores at a time: the working arrays of a block stay in the cache


@dataclass(frozen=True)
class Table:
    """Cores of one pipeline degree under every variant; step time is infinite where a layout is illegal or does not fit."""

    cores: Columns
    variants: tuple[Variant, ...]
    legal: Array
    peak_bytes: Array
    step_s: Array

    def layouts(self, core: Array, variant: Array) -> Columns:
        """The chosen cells as rows."""
        rows = {name: getattr(self.cores, name)[core] for name in self.cores.__dataclass_fields__}
        rows["schedule"] = np.asarray([encode("schedule", name) for name, _ in self.variants])[variant]
        rows["virtual_stages"] = np.asarray([loops for _, loops in self.variants])[variant]
        return Columns.from_mapping(rows)


def evaluate(job: Job, cores: Columns, variants: Sequence[Variant], machine: Machine, capacity_bytes: float) -> Table:
    """All cores must share one pp. Time is computed only where memory fits."""
    blocks = [
        _evaluate_block(job, cores.take(slice(start, start + BLOCK)), variants, machine, capacity_bytes)
        for start in range(0, len(cores), BLOCK)
    ]
    legal, peak, step = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    return Table(cores, tuple(variants), legal, peak, step)


def _evaluate_block(
    job: Job, cores: Columns, variants: Sequence[Variant], machine: Machine, capacity_bytes: float
) -> tuple[Array, Array, Array]:
    pp = int(cores.pp[0])
    shape = (len(cores), len(variants))
    legal = np.ones(shape, dtype=bool)
    if pp > 1:
        gas, of = np.unique(cores.gas, return_inverse=True)
        legal = np.stack([legal_mask(name, pp, gas, loops) for name, loops in variants], axis=1)[of]
    peak = _peaks(job, cores, variants, pp)
    step = np.full(shape, np.inf)
    fits = legal & (peak <= capacity_bytes)
    rows = np.flatnonzero(fits.any(axis=1))
    if len(rows):
        times = _steps(job, cores.take(rows), variants, machine, pp)
        step[rows] = np.where(fits[rows], times, np.inf)
    return legal, peak, step


def _shares(job: Job, pp: int, variant: Variant) -> list[tuple[int, tuple[int, ...]]]:
    """(rank, its share) of the ranks that can hold the peak or set the pace."""
    name, loops = variant
    shares = stages.rank_shares(job, pp, loops, name in stages.V_SHAPED)
    return [(rank, shares[rank]) for rank in stages.representative_ranks(shares)]


def _fullest(job: Job, pp: int, variant: Variant) -> list[tuple[int, tuple[int, ...]]]:
    """Those that can hold the peak: where nothing is put off, what waits only falls with the rank."""
    name, _ = variant
    if name not in ("afab", "1f1b", "interleaved"):
        return _shares(job, pp, variant)
    first: dict[tuple[int, ...], int] = {}
    for rank, share in _shares(job, pp, variant):
        first.setdefault(share, rank)
    return [(rank, share) for share, rank in first.items()]


def _peaks(job: Job, cores: Columns, variants: Sequence[Variant], pp: int) -> Array:
    parts: dict[tuple[int, ...], memory.PeakParts] = {}
    gas, of = np.unique(cores.gas, return_inverse=True)
    columns = []
    for variant in variants:
        name, loops = variant
        peak = np.zeros(len(cores))
        for rank, share in _fullest(job, pp, variant):
            if share not in parts:
                parts[share] = memory.peak_parts(job, cores, stages.constant_share(share, len(cores)))
            here = waiting(name, pp, rank, gas, loops)
            peak = np.maximum(peak, parts[share].total(job, here.take(of)))
        columns.append(peak)
    return np.stack(columns, axis=1)


def waiting(name: str, pp: int, rank: int, gas: Array, loops: int) -> memory.Waiting:
    """The closed forms of schedules/closed.py in micro-batches' worth: chunks over chunks per rank."""
    one, none = np.ones(len(gas)), np.zeros(len(gas))
    if pp == 1:
        return memory.Waiting(one, none, none)
    held = closed.in_flight(name, pp, rank, gas, loops) / loops
    put_off = closed.deferred(name, pp, rank, gas, loops) / loops
    losses = np.asarray(held - 1 if name == "afab" else none)
    return memory.Waiting(held, np.asarray(put_off), losses, together=name not in stages.V_SHAPED, one=1 / loops)


def _steps(job: Job, cores: Columns, variants: Sequence[Variant], machine: Machine, pp: int) -> Array:
    distinct, inverse = cores.distinct(depends_on(job))
    totals = pieces(job, distinct, machine).totals().take(inverse)
    places = mesh(cores, machine.cluster)
    send = pipeline.hop(job, cores, places, machine).time_s
    model, rows = job.model, len(cores)
    whole = totals.on(stages.constant_share((model.dense_layers, model.moe_layers, 1, 1), rows))
    by_share: dict[tuple[int, ...], Passes] = {}
    after: dict[tuple[int, ...], Array] = {}
    columns = []
    for variant in variants:
        shares = list(dict.fromkeys(share for _, share in _shares(job, pp, variant)))
        for share in shares:
            if share not in by_share:
                by_share[share] = totals.on(stages.constant_share(share, rows))
        first = shares[0]
        if first not in after:
            share_of_first = stages.constant_share(first, rows)
            after[first] = end_of_step(job, cores, machine, places, share_of_first, totals).total
        slowest = _slowest([by_share[share] for share in shares])
        columns.append(_makespan(variant, pp, cores, whole, slowest, send, machine.efficiency.action_overhead_s) + after[first])
    return np.stack(columns, axis=1)


def _slowest(ranks: list[Passes]) -> Passes:
    best = ranks[0]
    for other in ranks[1:]:
        slower = other.total > best.total
        best = Passes(
            np.where(slower, other.forward, best.forward),
            np.where(slower, other.input_grad, best.input_grad),
            np.where(slower, other.weight_grad, best.weight_grad),
        )
    return best


def _makespan(
    variant: Variant, pp: int, cores: Columns, whole: Passes, slowest: Passes, send: Array, overhead_s: float
) -> Array:
    if pp == 1:
        return np.asarray(cores.gas * slowest.total)
    name, loops = variant
    whole, slowest = whole.delayed(overhead_s * pp * loops), slowest.delayed(overhead_s * loops)
    return closed.makespan(
        name,
        pp,
        cores.gas,
        loops,
        whole.forward,
        whole.input_grad,
        whole.weight_grad,
        slowest.forward,
        slowest.input_grad,
        slowest.weight_grad,
        send,
    )
