"""Which layers sit on which pipeline rank, and layouts as the laws want them: tables with a row for each rank or chunk.

Layouts that are evaluated together share their tables: a law costs as much for thirty rows as for one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache

import numpy as np

from ultrascale.cost.columns import Array, LayoutColumns, Passes, RankShare, kinds_alternate, kinds_before, rows_of
from ultrascale.cost.communication import pipeline_hop
from ultrascale.cost.hardware import ClusterRates, Workload
from ultrascale.cost.memory.estimate import ChunkParts, chunk_parts, rank_states
from ultrascale.cost.memory.states import StateBytes, fsdp_shards, on_rank, states
from ultrascale.cost.step import ComponentTime, ComponentTimes, EndOfStep, component_times, end_of_step
from ultrascale.schedules import REGISTRY, StageTimes, TimedSchedule, simulate_makespans, stages_of
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.weights import mean_multiplied_elements, vocabulary

# Micro-batches simulated in full; more repeat the steady state (schedules.simulate_makespans).
SIMULATED = 64


@lru_cache(maxsize=4096)
def split_layers(layers: int, ranks: int, virtual_stages: int, head_layers: float) -> tuple[int, ...]:
    """Layers per chunk, in the order of the model, with the smallest slowest chunk; at least one each.

    The last chunk also computes the head, worth `head_layers` layers. Surplus layers go to the last loop first, so that the
    chunks that fill and drain the pipeline are the small ones, and there to the ranks after the first, because the first
    holds the most micro-batches in flight and the embedding.
    """
    chunks = ranks * virtual_stages
    if chunks == 1:
        return (layers,)
    # The others' share falls and the last chunk's grows with its layers: the best is next to where the two are equal.
    balanced = int((layers - (chunks - 1) * head_layers) / chunks)
    last = min(
        range(max(1, balanced - 2), max(2, min(balanced + 3, layers - chunks + 2))),
        key=lambda count: (max(-(-(layers - count) // (chunks - 1)), count + head_layers), -count),
    )
    even, surplus = divmod(layers - last, chunks - 1)
    counts = [even] * (chunks - 1) + [last]
    order = [loop * ranks + rank for loop in reversed(range(virtual_stages)) for rank in (*range(1, ranks), 0)]
    for chunk in [chunk for chunk in order if chunk != chunks - 1][:surplus]:
        counts[chunk] += 1
    return tuple(counts)


@lru_cache(maxsize=4096)
def nanotron_stage_split(layers: int, ranks: int, head_layers: float) -> tuple[int, ...]:
    """Layers per stage as nanotron deals them out: a stage closes with the block that reaches its share of the whole cost.

    Early stages are so never lighter than the mean and the last never heavier; each later stage keeps a layer at least.
    """
    share = (layers + head_layers) / ranks
    ends = [min(math.ceil(share * (rank + 1)), layers - (ranks - 1 - rank)) for rank in range(ranks - 1)]
    return tuple(np.diff((0, *ends, layers)).tolist())


@lru_cache(maxsize=4096)
def torchtitan_stage_split(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers per chunk as torchtitan deals them out, the larger ones first; the embedding and the head count as one each."""
    each, rest = divmod(layers + 2, chunks)
    counts = [each + (chunk < rest) for chunk in range(chunks)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(counts)


def head_in_layers(model: Model) -> float:
    """What the head weighs against a layer: the last pipeline stage gets that many layers less."""
    return vocabulary(model).elements / mean_multiplied_elements(model)


def chunk_layers(job: Job, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Layers of every chunk; the last one has those of multi-token prediction, too."""
    *others, last = _chunk_layers(job, ranks, virtual_stages)
    return (*others, last + job.model.mtp_depth)


def _chunk_layers(job: Job, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    model, split = job.model, job.framework.stage_split
    if split == "nanotron" and virtual_stages == 1:
        return nanotron_stage_split(model.layers, ranks, head_in_layers(model))
    if split == "torchtitan" and 1 < ranks * virtual_stages <= model.layers // 2 + 1:  # else a chunk has no layer
        return torchtitan_stage_split(model.layers, ranks * virtual_stages)
    if split == "layers-and-ends" and ranks * virtual_stages > 1:
        return torchtitan_stage_split(model.layers, ranks * virtual_stages)
    head_layers = {"layers": 0.0, "layers-and-head": 1.0}.get(split, (1 + model.mtp_depth) * head_in_layers(model))
    return split_layers(model.layers, ranks, virtual_stages, head_layers + model.mtp_depth)


@lru_cache(maxsize=512)
def chunk_table(ranks: int, virtual_stages: int, v_shaped: bool) -> Array:
    """Global chunk indices of all ranks: ranks × virtual stages."""
    return np.asarray([stages_of(rank, ranks, virtual_stages, v_shaped) for rank in range(ranks)])


def chunk_shares(job: Job, ranks: int, virtual_stages: int, recompute_layers: int = 0) -> RankShare:
    """Every chunk as if it were a rank of its own. `recompute_layers`: of each chunk the first ones recompute; 0: all."""
    model, counts = job.model, np.asarray(chunk_layers(job, ranks, virtual_stages))
    ends, position = np.cumsum(counts), np.arange(len(counts))
    begins, kept = ends - counts, np.maximum(0, counts - recompute_layers) if recompute_layers else 0 * counts
    before = kinds_before(model)
    return RankShare(
        position,
        before[ends] - before[begins],
        1 * (position == 0),
        1 * (position == len(counts) - 1),
        before[ends] - before[ends - kept],
        np.asarray(_first_alike(model, begins.tolist(), ends.tolist())),
        tuple(model.layer_kinds),
    )


def _first_alike(model: Model, begins: list[int], ends: list[int]) -> list[int]:
    """Of each chunk the first layer from which on layers follow each other as in the chunk: one for chunks that are alike."""
    if not kinds_alternate(model):
        return [0] * len(begins)
    letters = {kind: chr(number) for number, kind in enumerate(model.layer_kinds)}
    word = "".join(letters[kind] for kind in model.each_kind)
    return [word.find(word[begin:end]) for begin, end in zip(begins, ends, strict=True)]


def rank_shares(
    job: Job, ranks: int, virtual_stages: int, v_shaped: bool, recompute_layers: int = 0
) -> tuple[tuple[int, ...], ...]:
    """The numbers of `RankShare` of every rank."""
    share = chunk_shares(job, ranks, virtual_stages, recompute_layers)
    numbers = share.numbers[chunk_table(ranks, virtual_stages, v_shaped)].sum(axis=1)
    if virtual_stages > 1 and kinds_alternate(job.model):
        numbers[:, -1] = -1
    return tuple(map(tuple, numbers.tolist()))


def share_of(job: Job, columns: LayoutColumns, rank: Array) -> RankShare:
    """The share of `rank` (one per row); rows are grouped by their few distinct pipelines."""
    pipelines, inverse = columns.distinct(("pp", "virtual_stages", "schedule", "recompute_layers"))
    layouts = [pipelines.layout(row) for row in range(len(pipelines))]
    tables = [
        rank_shares(job, one.pp, one.virtual_stages, REGISTRY[one.schedule].v_shaped, one.recompute_layers or 0)
        for one in layouts
    ]
    table = np.zeros((len(tables), max(map(len, tables)), len(tables[0][0])), dtype=np.int64)
    for row, shares in enumerate(tables):
        table[row, : len(shares)] = shares
    return RankShare.of_numbers(job.model, rank, table[inverse, rank])


def recomputed_fraction(job: Job, layout: Layout) -> float:
    """Of the model's layers, those to which the layout's recomputation applies."""
    counts = chunk_layers(job, layout.pp, layout.virtual_stages)
    return sum(min(count, layout.recompute_layers or count) for count in counts) / job.model.all_layers


def representative_ranks(shares: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The first and the last rank of every kind of share: the peak and the slowest are among them.

    Activations in flight fall with the rank, deferred weight gradients grow with it; so among ranks that hold the same, one of
    the two ends has the peak. The ranks beside the ends are not enough: 61 layers over 32 ranks put the first two MoE layers
    of DeepSeek-V3 on rank 2.
    """
    first = {share: rank for rank, share in reversed(list(enumerate(shares)))}
    last = {share: rank for rank, share in enumerate(shares)}
    return tuple(sorted({*first.values(), *last.values()}))


# ------------------------------------------------------------------------------------------------------- layouts as rows


@dataclass(frozen=True)
class ChunkGradients:
    """Bytes of each chunk's gradients."""

    after_first_backward: Array
    after_last_backward: Array


@dataclass(frozen=True)
class LayoutRows:
    """One layout as rows: one per pipeline rank, and one per chunk."""

    layout: Layout
    group: _LayoutGroup
    """the layouts that it is evaluated with"""
    number: int
    """its place among them"""

    @classmethod
    def of(cls, job: Job, layout: Layout) -> LayoutRows:
        return views(job, [layout])[0]

    @property
    def job(self) -> Job:
        return self.group.job

    @property
    def machine(self) -> ClusterRates:
        return self.group.machine

    @cached_property
    def row(self) -> LayoutColumns:
        return self.group.rows.take(self._row)

    @cached_property
    def share(self) -> RankShare:
        return rows_of(self.group.share, self._ranks)

    @cached_property
    def rank_passes(self) -> Passes:
        """Of one micro-batch, on every rank."""
        return rows_of(self.group.rank_passes, self._ranks)

    def causes(self, rank: int) -> dict[str, float]:
        """Seconds of one micro-batch on a rank, by cause."""
        return {name: float(seconds[self._ranks][rank]) for name, seconds in self.group.rank_causes.items()}

    @property
    def chunks(self) -> Array:
        """Which chunks each rank holds: ranks × virtual stages."""
        return chunk_table(self.layout.pp, self.layout.virtual_stages, REGISTRY[self.layout.schedule].v_shaped)

    @property
    def chunk_share(self) -> RankShare:
        """Every chunk as if it were a rank of its own."""
        return rows_of(self.group.chunk_share, self._chunks)

    def parts(self, first: bool = False, last: bool = False) -> ChunkParts:
        """What every chunk holds, beside the states of its rank; until a step's first backward is over, or in its last."""
        group = self.group
        return rows_of(group.first_parts if first else group.last_parts if last else group.steady_parts, self._chunks)

    def chunk_gradients(self) -> ChunkGradients:
        return rows_of(self.group.chunk_gradients, self._chunks)

    @cached_property
    def state(self) -> StateBytes:
        """Of every rank."""
        return rows_of(self.group.state, self._ranks)

    @cached_property
    def after(self) -> EndOfStep:
        """What the first rank does after its last backward."""
        return rows_of(self.group.after, self._row)

    @property
    def hop_s(self) -> float:
        """From one stage to the next; 0 without a pipeline."""
        return float(self.group.hop_s[self.number])

    def stage_times(self) -> StageTimes:
        times = rows_of(self.group.chunk_passes, self._chunks)
        if self.layout.pp > 1:
            times = times.delayed(self.machine.efficiency.action_overhead_s)
        else:  # where one queue runs through the step, its idle time is all passes' alike
            times = times.scaled(1 + self.after.launch_s / (self.layout.gas * times.total))
        forward, input_grad, weight_grad = (tuple(map(float, each)) for each in times.parts)
        return StageTimes(forward, input_grad, weight_grad, self.hop_s)

    @property
    def _row(self) -> slice:
        return slice(self.number, self.number + 1)

    @property
    def _ranks(self) -> slice:
        return slice(self.number * self.layout.pp, (self.number + 1) * self.layout.pp)

    @property
    def _chunks(self) -> slice:
        return slice(*self.group.chunk_start[self.number : self.number + 2])


def views(job: Job, layouts: Sequence[Layout]) -> list[LayoutRows]:
    """Of each layout; those with the same number of pipeline ranks share their tables, as in a search."""
    found: dict[int, LayoutRows] = {}
    for pp in {layout.pp for layout in layouts}:
        numbers = [number for number, layout in enumerate(layouts) if layout.pp == pp]
        group = _LayoutGroup(job, tuple(layouts[number] for number in numbers))
        found.update({number: LayoutRows(layouts[number], group, place) for place, number in enumerate(numbers)})
    return [found[number] for number in range(len(layouts))]


def pipelines_s(rows: Sequence[LayoutRows]) -> list[float]:
    """From the first forward to the last backward of each pipeline, simulated, all of them together."""
    pipelines = [
        TimedSchedule(one.schedule, one.pp, one.gas, one.virtual_stages, view.stage_times())
        for view, one in ((view, view.layout) for view in rows)
    ]
    return simulate_makespans(pipelines, SIMULATED)


@dataclass(frozen=True)
class _LayoutGroup:
    """Layouts of one job with one number of pipeline ranks, row after row; each table is made when it is first wanted."""

    job: Job
    layouts: tuple[Layout, ...]

    @cached_property
    def machine(self) -> ClusterRates:
        return ClusterRates(self.job)

    @cached_property
    def rows(self) -> LayoutColumns:
        return LayoutColumns.of(self.layouts)

    @cached_property
    def work(self) -> Workload:
        return Workload(self.job, self.rows, self.machine)

    @cached_property
    def components(self) -> ComponentTimes[ComponentTime]:
        return component_times(self.work)

    @cached_property
    def on_ranks(self) -> ComponentTime:
        """Of one micro-batch, on every rank of every layout."""
        return rows_of(self.components, self._row_of_rank).on(self.share)

    @cached_property
    def rank_passes(self) -> Passes:
        return self.on_ranks.total

    @cached_property
    def rank_causes(self) -> dict[str, Array]:
        return {field.name: getattr(self.on_ranks, field.name).total for field in fields(ComponentTime)}

    @cached_property
    def chunk_passes(self) -> Passes:
        return rows_of(self.components.totals(), self._row_of_chunk).on(self.chunk_share)

    @cached_property
    def hop_s(self) -> Array:
        return pipeline_hop(self.work).time_s

    @cached_property
    def after(self) -> EndOfStep:
        share = share_of(self.job, self.rows, np.zeros(len(self.rows), dtype=np.int64))
        return end_of_step(self.work, share, self.components.totals())

    @cached_property
    def ranks(self) -> LayoutColumns:
        return self.rows.take(self._row_of_rank)

    @cached_property
    def share(self) -> RankShare:
        return share_of(self.job, self.ranks, np.tile(np.arange(self.layouts[0].pp), len(self.rows)))

    @cached_property
    def state(self) -> StateBytes:
        return rank_states(self.job, self.ranks, self.share)

    @cached_property
    def chunk_start(self) -> tuple[int, ...]:
        return (0, *np.cumsum([layout.pp * layout.virtual_stages for layout in self.layouts]).tolist())

    @cached_property
    def chunks(self) -> LayoutColumns:
        return self.rows.take(self._row_of_chunk)

    @cached_property
    def chunk_share(self) -> RankShare:
        shares = [chunk_shares(self.job, one.pp, one.virtual_stages, one.recompute_layers or 0) for one in self.layouts]
        ranks, numbers = (np.concatenate(each) for each in zip(*((one.rank, one.numbers) for one in shares), strict=True))
        return RankShare.of_numbers(self.job.model, ranks, numbers)

    @cached_property
    def holders(self) -> RankShare:
        """What the rank of each chunk holds."""
        chunks = [LayoutRows(layout, self, number).chunks for number, layout in enumerate(self.layouts)]
        ranks = [np.argsort(each, axis=None) // each.shape[1] for each in chunks]
        return share_of(self.job, self.chunks, np.concatenate(ranks))

    @cached_property
    def steady_parts(self) -> ChunkParts:
        return chunk_parts(self.job, self.chunks, self.chunk_share, self.holders)

    @cached_property
    def first_parts(self) -> ChunkParts:
        return chunk_parts(self.job, self.chunks, self.chunk_share, self.holders, first=True)

    @cached_property
    def last_parts(self) -> ChunkParts:
        return chunk_parts(self.job, self.chunks, self.chunk_share, self.holders, last=True)

    @cached_property
    def chunk_gradients(self) -> ChunkGradients:
        job, rows = self.job, self.chunks
        params = on_rank(job.model, rows, self.chunk_share, fsdp_shards(job, rows))
        cut = rows.changed(zero=np.maximum(rows.zero, 2))
        return ChunkGradients(*(states(job, each, params).gradients for each in (rows, cut)))

    @property
    def _row_of_rank(self) -> Array:
        return np.repeat(np.arange(len(self.rows)), self.layouts[0].pp)

    @property
    def _row_of_chunk(self) -> Array:
        return np.repeat(np.arange(len(self.rows)), np.diff(self.chunk_start))
