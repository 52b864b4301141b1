"""`ultrascale train` in the terminal: predicted beside measured, or where a run was stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console

from ultrascale.measure.compare import terms
from ultrascale.show.compare import show_terms
from ultrascale.show.lines import labelled

if TYPE_CHECKING:
    from ultrascale.launch.launcher import Run


def show_end(console: Console, run: Run) -> None:
    """What a run came to: predicted beside measured, or where it was stopped; and where it lies."""
    outcome, again = run.outcome, f"ultrascale train --resume {run.folder}"
    if outcome.measured is not None:
        show_comparison(console, run)
    if outcome.stopped is not None:
        kept = f"; kept in {outcome.kept.name}: go on with {again}" if outcome.kept else "; nothing was kept"
        line = f"stopped by {outcome.stopped} after step {outcome.step} of {run.request.training.steps}{kept}"
        console.print(line, soft_wrap=True)  # a command in one piece, to copy
    elif outcome.measured is None:
        line = f"all {outcome.step} steps were done already; for more: {again} --steps {2 * outcome.step}"
        console.print(line, soft_wrap=True)
    console.print(f"The run is in {run.folder}", soft_wrap=True)


def show_comparison(console: Console, run: Run) -> None:
    """Predicted, measured, difference: what a step took and what a rank held."""
    show_terms(console, "predicted and measured, one step", ("predicted", "measured"), terms(run.predicted, run.measured))
    for note in run.measured.notes:
        labelled(console, "note:", "yellow", note)


def run_json(run: Run) -> dict[str, Any]:
    return {
        "folder": None if run.folder is None else str(run.folder),
        "layout": run.request.layout.model_dump(mode="json"),
        "predicted": None if run.predicted is None else run.predicted.model_dump(mode="json"),
        "step": run.outcome.step,
        "stopped": run.outcome.stopped,
        "checkpoint": None if run.outcome.kept is None else str(run.outcome.kept),
        "measured": None if run.outcome.measured is None else run.outcome.measured.model_dump(mode="json"),
    }
