"""The five-line way: model, plan, trainer, run. The command line does the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.train import launch
from ultrascale.train.checkpoint import resolve, run_of
from ultrascale.train.launch import Run
from ultrascale.train.rank_info import rank_info_from_env
from ultrascale.train.request import Overrides, allowed_changes, from_checkpoint, from_plan


class Trainer:
    """Runs a plan. `processes` are started here; under torchrun or srun they are there already.

    They are forked: start them before this process has computed with torch or used a GPU, as a notebook may have. What torch's
    threads had open then is closed to the children, which may wait for ever on a machine with several cores for each.
    """

    def __init__(
        self,
        plan: Plan,
        training: Training | None = None,
        processes: int | None = None,
        checkpoint: Checkpointing | None = None,
    ) -> None:
        mine = rank_info_from_env()
        if mine is not None and processes not in (None, mine.world):
            raise SpecError(f"processes is {processes} but torchrun or srun started {mine.world}: leave it out")
        self.world = mine.world if mine is not None else processes or plan.layout.gpus
        self.nproc = None if mine is not None else self.world
        request = from_plan(plan, Overrides(), self.world, training, gpu=launch.has_gpu())
        self.request = replace(request, checkpoint=checkpoint or Checkpointing())

    @classmethod
    def resume(cls, run: str | Path, processes: int | None = None, allow_changed: str | None = None, **layout: Any) -> Trainer:
        """A run that goes on from its newest checkpoint (or from the one that is named), cut as before or otherwise.

        `allow_changed`: "data" where the data may differ from that of the run so far, as `train --allow-changed data`.
        """
        trainer, mine = cls.__new__(cls), rank_info_from_env()
        world = mine.world if mine is not None else processes
        first = mine is None or mine.rank == 0
        allowed = allowed_changes(allow_changed, Path(run))
        trainer.request = from_checkpoint(
            resolve(Path(run)), Overrides(layout=layout), world, gpu=launch.has_gpu(), allowed=allowed, first=first
        )
        trainer.world = trainer.request.layout.gpus
        trainer.nproc = None if mine is not None else trainer.world
        return trainer

    def run(self, out: str | Path | None = None, quiet: bool = False) -> Run | None:
        """Trains, measures and compares; None on every rank of torchrun but the first. A resumed run stays in its folder."""
        if out is None and self.request.resume is not None:
            out = run_of(self.request.resume)
        machine = launch.machine(self.request.layout.gpus, self.request.job.precision, self.request.training.timeout_s)
        return launch.train(self.request, None if out is None else Path(out), self.nproc, machine, quiet)
