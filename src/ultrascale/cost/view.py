"""One layout as the laws want it: a table with a row for each pipeline rank, or for each chunk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ultrascale.cost import pipeline, stages
from ultrascale.cost.columns import Array, Columns
from ultrascale.cost.hardware import Machine
from ultrascale.cost.mesh import mesh
from ultrascale.cost.pieces import Pieces, pieces
from ultrascale.schedules import StageTimes
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout


@dataclass(frozen=True)
class View:
    """One layout seen as rows: one per pipeline rank, and one per chunk."""

    job: Job
    layout: Layout
    machine: Machine
    row: Columns
    ranks: Columns
    share: stages.RankShare
    pieces: Pieces

    @classmethod
    def of(cls, job: Job, layout: Layout) -> View:
        machine = Machine(job)
        row = Columns.of([layout])
        ranks = row.take(np.zeros(layout.pp, dtype=np.int64))
        share = stages.share_of(job, ranks, np.arange(layout.pp))
        return cls(job, layout, machine, row, ranks, share, pieces(job, row, machine))

    @property
    def v_shaped(self) -> bool:
        return self.layout.schedule in stages.V_SHAPED

    def chunk_share(self) -> stages.RankShare:
        """Every chunk as if it were a rank of its own."""
        return stages.chunk_shares(self.job, self.layout.pp, self.layout.virtual_stages)

    def chunk_ranks(self) -> Array:
        """The pipeline rank of every chunk."""
        ranks = {
            chunk: rank
            for rank in range(self.layout.pp)
            for chunk in stages.chunks_of(rank, self.layout.pp, self.layout.virtual_stages, self.v_shaped)
        }
        return np.asarray([ranks[chunk] for chunk in sorted(ranks)])

    def stage_times(self, send_s: float) -> StageTimes:
        times = self.pieces.totals().on(self.chunk_share())
        if self.layout.pp > 1:
            times = times.delayed(self.machine.efficiency.action_overhead_s)
        return StageTimes(
            tuple(map(float, times.forward)),
            tuple(map(float, times.input_grad)),
            tuple(map(float, times.weight_grad)),
            send_s,
        )


def send_s(view: View) -> float:
    places = mesh(view.row, view.machine.cluster)
    return float(pipeline.hop(view.job, view.row, places, view.machine).time_s[0])
