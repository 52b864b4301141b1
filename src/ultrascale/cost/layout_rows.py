"""One layout as the laws want it: a table with a row for each pipeline rank, or for each chunk.

Layouts that are asked about together share their tables: a law costs as much for thirty rows as for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ultrascale.cost import communication, stages, step
from ultrascale.cost.columns import Array, LayoutColumns, Passes, rows_of
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.memory.estimate import ChunkParts, chunk_parts, peak_parts
from ultrascale.cost.memory.parameters import fsdp_shards, on_rank
from ultrascale.cost.memory.states import StateBytes, states
from ultrascale.cost.network import GroupPlacement, mesh
from ultrascale.cost.step import ComponentTime, ComponentTimes, ComponentTotals, component_times
from ultrascale.schedules import REGISTRY, StageTimes, TimedSchedule, simulate_makespans
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

# Micro-batches simulated in full; more repeat the steady state (schedules.simulate_makespans).
SIMULATED = 64


@dataclass(frozen=True)
class ChunkGradients:
    """Bytes of each chunk's gradients."""

    begun: Array
    """from its first backward on"""
    over: Array
    """after its last"""


@dataclass(frozen=True)
class LayoutRows:
    """One layout seen as rows: one per pipeline rank, and one per chunk."""

    layout: Layout
    together: _Together
    """the layouts among which it was asked about"""
    number: int
    """its place among them"""

    @classmethod
    def of(cls, job: Job, layout: Layout) -> LayoutRows:
        return views(job, [layout])[0]

    @property
    def job(self) -> Job:
        return self.together.job

    @property
    def machine(self) -> ClusterRates:
        return self.together.machine

    @cached_property
    def row(self) -> LayoutColumns:
        return self.together.rows.take(self._row)

    @cached_property
    def ranks(self) -> LayoutColumns:
        return self.together.ranks.take(self._ranks)

    @cached_property
    def share(self) -> stages.RankShare:
        return rows_of(self.together.share, self._ranks)

    @cached_property
    def rank_passes(self) -> Passes:
        """Of one micro-batch, on every rank."""
        return rows_of(self.together.rank_passes, self._ranks)

    def causes(self, rank: int) -> dict[str, float]:
        """Seconds of one micro-batch on a rank, by cause."""
        return {name: float(passes[self._ranks][rank]) for name, passes in self.together.rank_causes.items()}

    @property
    def v_shaped(self) -> bool:
        return REGISTRY[self.layout.schedule].v_shaped

    @property
    def chunks(self) -> Array:
        """Which chunks each rank holds: ranks × virtual stages."""
        return stages.chunk_table(self.layout.pp, self.layout.virtual_stages, self.v_shaped)

    def chunk_share(self) -> stages.RankShare:
        """Every chunk as if it were a rank of its own."""
        return rows_of(self.together.chunk_share, self._chunks)

    def chunk_ranks(self) -> Array:
        """The pipeline rank of every chunk."""
        return np.asarray(np.argsort(self.chunks, axis=None) // self.layout.virtual_stages)

    def parts(self, first: bool = False) -> ChunkParts:
        """What every chunk holds, beside the states of its rank; `first`: until a step's first backward is over."""
        return rows_of(self.together.first_parts if first else self.together.later_parts, self._chunks)

    def chunk_gradients(self) -> ChunkGradients:
        return rows_of(self.together.chunk_gradients, self._chunks)

    def state(self) -> StateBytes:
        """Of every rank."""
        return rows_of(self.together.state, self._ranks)

    def after(self) -> step.EndOfStep:
        """What the first rank does after its last backward."""
        return rows_of(self.together.after, self._row)

    def stage_times(self, send_s: float) -> StageTimes:
        times = rows_of(self.together.chunk_passes, self._chunks)
        if self.layout.pp > 1:
            times = times.delayed(self.machine.efficiency.action_overhead_s)
        else:  # where one queue runs through the step, its idle time is all passes' alike
            times = times.scaled(1 + self.after().launch_s / (self.layout.gas * times.total))
        return StageTimes(
            tuple(map(float, times.forward)),
            tuple(map(float, times.input_grad)),
            tuple(map(float, times.weight_grad)),
            send_s,
        )

    @property
    def _row(self) -> slice:
        return slice(self.number, self.number + 1)

    @property
    def _ranks(self) -> slice:
        return slice(self.number * self.layout.pp, (self.number + 1) * self.layout.pp)

    @property
    def _chunks(self) -> slice:
        return slice(*self.together.chunk_start[self.number : self.number + 2])


def views(job: Job, layouts: Sequence[Layout]) -> list[LayoutRows]:
    """Of each layout; those with the same number of pipeline ranks share their tables, as in a search."""
    machine = ClusterRates(job)
    found: dict[int, LayoutRows] = {}
    for pp in {layout.pp for layout in layouts}:
        numbers = [number for number, layout in enumerate(layouts) if layout.pp == pp]
        together = _Together(job, machine, tuple(layouts[number] for number in numbers))
        found.update({number: LayoutRows(layouts[number], together, place) for place, number in enumerate(numbers)})
    return [found[number] for number in range(len(layouts))]


def send_s(view: LayoutRows) -> float:
    return float(view.together.hop_s[view.number])


def pipelines_s(seen: Sequence[LayoutRows]) -> list[float]:
    """From the first forward to the last backward of each pipeline, simulated, all of them together."""
    layouts = [view.layout for view in seen]
    shapes = [(one.schedule, one.pp, one.gas, one.virtual_stages) for one in layouts]
    asked = [TimedSchedule(*shape, view.stage_times(send_s(view))) for shape, view in zip(shapes, seen, strict=True)]
    return simulate_makespans(asked, SIMULATED)


@dataclass(frozen=True)
class _Together:
    """Layouts of one job with one number of pipeline ranks, row after row; each table is made when it is first wanted."""

    job: Job
    machine: ClusterRates
    layouts: tuple[Layout, ...]

    @cached_property
    def rows(self) -> LayoutColumns:
        return LayoutColumns.of(self.layouts)

    @cached_property
    def components(self) -> ComponentTimes:
        return component_times(self.job, self.rows, self.machine)

    @cached_property
    def totals(self) -> ComponentTotals:
        return self.components.totals()

    @cached_property
    def on_ranks(self) -> ComponentTime:
        """Of one micro-batch, on every rank of every layout."""
        return self.components.take(self._row_of_rank).on(self.share)

    @cached_property
    def rank_passes(self) -> Passes:
        return self.on_ranks.total

    @cached_property
    def rank_causes(self) -> dict[str, Array]:
        return {field.name: getattr(self.on_ranks, field.name).total for field in fields(ComponentTime)}

    @cached_property
    def chunk_passes(self) -> Passes:
        return self.totals.take(self._row_of_chunk).on(self.chunk_share)

    @cached_property
    def places(self) -> GroupPlacement:
        return mesh(self.rows, self.machine.cluster)

    @cached_property
    def hop_s(self) -> Array:
        return communication.pipeline_hop(self.job, self.rows, self.places, self.machine).time_s

    @cached_property
    def after(self) -> step.EndOfStep:
        share = stages.share_of(self.job, self.rows, np.zeros(len(self.rows), dtype=np.int64))
        return step.end_of_step(self.job, self.rows, self.machine, self.places, share, self.totals)

    @cached_property
    def ranks(self) -> LayoutColumns:
        return self.rows.take(self._row_of_rank)

    @cached_property
    def share(self) -> stages.RankShare:
        return stages.share_of(self.job, self.ranks, np.tile(np.arange(self.layouts[0].pp), len(self.rows)))

    @cached_property
    def state(self) -> StateBytes:
        return peak_parts(self.job, self.ranks, self.share).state

    @cached_property
    def chunk_start(self) -> tuple[int, ...]:
        return (0, *np.cumsum([layout.pp * layout.virtual_stages for layout in self.layouts]).tolist())

    @cached_property
    def chunks(self) -> LayoutColumns:
        return self.rows.take(self._row_of_chunk)

    @cached_property
    def chunk_share(self) -> stages.RankShare:
        shares = [stages.chunk_shares(self.job, layout.pp, layout.virtual_stages) for layout in self.layouts]
        names = stages.RankShare.__dataclass_fields__
        return stages.RankShare(*(np.concatenate([getattr(share, name) for share in shares]) for name in names))

    @cached_property
    def holders(self) -> stages.RankShare:
        """What the rank of each chunk holds."""
        ranks = [LayoutRows(layout, self, number).chunk_ranks() for number, layout in enumerate(self.layouts)]
        return stages.share_of(self.job, self.chunks, np.concatenate(ranks))

    @cached_property
    def later_parts(self) -> ChunkParts:
        return chunk_parts(self.job, self.chunks, self.chunk_share, self.holders)

    @cached_property
    def first_parts(self) -> ChunkParts:
        return chunk_parts(self.job, self.chunks, self.chunk_share, self.holders, first=True)

    @cached_property
    def chunk_gradients(self) -> ChunkGradients:
        job, rows = self.job, self.chunks
        held = on_rank(job.model, rows, self.chunk_share, fsdp_shards(job, rows))
        cut = rows.changed(zero=np.maximum(rows.zero, 2))
        return ChunkGradients(*(states(job, each, held).gradients for each in (rows, cut)))

    @property
    def _row_of_rank(self) -> Array:
        return np.repeat(np.arange(len(self.rows)), self.layouts[0].pp)

    @property
    def _row_of_chunk(self) -> Array:
        return np.repeat(np.arange(len(self.rows)), np.diff(self.chunk_start))
