"""The five-line way: model, plan, trainer, run. The command line does the same."""

from __future__ import annotations

from pathlib import Path

from ultrascale.specs.errors import SpecError
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.train import launch
from ultrascale.train.launch import Run
from ultrascale.train.request import Overrides, from_plan
from ultrascale.train.world import seat


class Trainer:
    """Runs a plan. `processes` are started here; under torchrun or srun they are there already."""

    def __init__(self, plan: Plan, training: Training | None = None, processes: int | None = None) -> None:
        mine = seat()
        if mine is not None and processes not in (None, mine.world):
            raise SpecError(f"processes is {processes} but torchrun or srun started {mine.world}: leave it out")
        self.world = mine.world if mine is not None else processes or plan.layout.gpus
        self.nproc = None if mine is not None else self.world
        self.request = from_plan(plan, Overrides(), self.world, training, gpu=launch.has_gpu())

    def run(self, out: str | Path | None = None, quiet: bool = False) -> Run | None:
        """Trains, measures and compares; None on every rank of torchrun but the first."""
        machine = launch.machine(self.request.layout.gpus, self.request.job.precision)
        return launch.train(self.request, None if out is None else Path(out), self.nproc, machine, quiet)
