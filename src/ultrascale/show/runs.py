"""Output of `ultrascale runs`: the runs of a folder, and the checkpoints of one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ultrascale.measure.run_list import StoredRun
from ultrascale.show.lines import notes, table
from ultrascale.specs.units import gib


def show_runs(console: Console, runs: Sequence[StoredRun]) -> None:
    columns = ("run", "model", "layout", "GPUs", "step", "loss", "state", "size", "checkpoints")
    grid = table(None, *columns, left=("run", "model", "layout", "state", "checkpoints"))
    for run in runs:
        saved = [one for one in run.checkpoints if one.complete]
        steps = ", ".join(str(one.step) for one in saved[-3:])
        grid.add_row(
            run.name,
            run.model,
            run.layout,
            str(run.gpus),
            f"{run.steps:,}",
            "–" if run.loss is None else f"{run.loss:.4f}",
            "finished" if run.finished else "unfinished",
            gib(run.bytes),
            f"{len(saved)}: … {steps}" if len(saved) > 3 else steps or "none",
        )
    console.print(grid)
    notes(console, (f"{run.name}: {run.problem}" for run in runs if run.problem))
    notes(
        console,
        (
            f"{run.name}: the save of step {one.step:,} was not completed; nothing resumes from it"
            for run in runs
            for one in run.checkpoints
            if not one.complete
        ),
    )


def show_checkpoints(console: Console, run: StoredRun) -> None:
    grid = table(f"Checkpoints of {run.name}", "step", "size", "state", left=("state",))
    for one in run.checkpoints:
        grid.add_row(f"{one.step:,}", gib(one.bytes), "complete" if one.complete else "not completed")
    console.print(grid)
