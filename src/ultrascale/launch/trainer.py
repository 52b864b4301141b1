"""The Python API of training: `Trainer(plan).run()`, the same as the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ultrascale.launch import launcher
from ultrascale.launch.launcher import Run
from ultrascale.launch.rank_info import rank_info_from_env
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError
from ultrascale.specs.plan import Plan
from ultrascale.specs.training import Training
from ultrascale.train.checkpoint import resolve, run_of
from ultrascale.train.request import Overrides, allowed_changes, from_checkpoint, from_plan


class Trainer:
    """Runs a plan. `processes` are started here; under torchrun or srun they already exist.

    They are forked: create them before this process has computed with torch or used a GPU, as a notebook may have. The children
    do not inherit torch's threads, and may wait for them for ever on a machine with several cores per process.
    """

    def __init__(
        self,
        plan: Plan,
        training: Training | None = None,
        processes: int | None = None,
        checkpoint: Checkpointing | None = None,
    ) -> None:
        env_rank = rank_info_from_env()
        if env_rank is not None and processes not in (None, env_rank.world):
            raise SpecError(f"processes is {processes} but torchrun or srun started {env_rank.world}: leave it out")
        self.world = env_rank.world if env_rank is not None else processes or plan.layout.gpus
        self.nproc = None if env_rank is not None else self.world
        request = from_plan(plan, Overrides(), self.world, training, gpu=launcher.has_gpu())
        self.request = replace(request, checkpoint=checkpoint or Checkpointing())

    @classmethod
    def resume(cls, run: str | Path, processes: int | None = None, allow_changed: str | None = None, **layout: Any) -> Trainer:
        """Resumes a run from its newest checkpoint (or from the checkpoint given), in the same or another layout.

        `allow_changed`: "data" if the data may differ from that of the run so far, like `train --allow-changed data`.
        """
        trainer, env_rank = cls.__new__(cls), rank_info_from_env()
        world = env_rank.world if env_rank is not None else processes
        first = env_rank is None or env_rank.rank == 0
        allowed = allowed_changes(allow_changed, Path(run))
        trainer.request = from_checkpoint(
            resolve(Path(run)), Overrides(layout=layout), world, gpu=launcher.has_gpu(), allowed=allowed, first=first
        )
        trainer.world = trainer.request.layout.gpus
        trainer.nproc = None if env_rank is not None else trainer.world
        return trainer

    def run(self, out: str | Path | None = None, quiet: bool = False) -> Run | None:
        """Trains, measures and compares; None on every rank of torchrun but the first. A resumed run stays in its folder."""
        if out is None and self.request.resume is not None:
            out = run_of(self.request.resume)
        machine = launcher.detect_cluster(self.request.layout.gpus, self.request.job.precision, self.request.training.timeout_s)
        return launcher.train(self.request, None if out is None else Path(out), self.nproc, machine, quiet)
