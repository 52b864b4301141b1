"""Output of `ultrascale compare` and of a finished run: two sides of a step, term by term."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ultrascale.cost.estimate import estimate
from ultrascale.measure.compare import ComparedTerm, Comparison, terms
from ultrascale.show.lines import attributes, bullets, labelled, notes, table
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import byte_size, seconds

if TYPE_CHECKING:
    from ultrascale.launch.launcher import Run

STEADY = 0.05  # a change of step time that another measurement of the same machine may show
UNITS: dict[str, Callable[[float], str]] = {"s": seconds, "B": byte_size, "%": "{:.1%}".format, "": "{:,.0f}".format}


def show_compare(console: Console, found: Comparison) -> None:
    sides = found.first, found.second
    words = [side.word for side in sides]
    heads = words if words[0] != words[1] else [side.name for side in sides]
    show_terms(console, f"{found.first.name} and {found.second.name}, one step", (heads[0], heads[1]), found.terms)
    bullets(console, found.sentences)
    if found.differences:
        labelled(console, "the two differ in", "yellow", "; ".join(found.differences))


def show_terms(console: Console, title: str, sides: tuple[str, str], compared: Iterable[ComparedTerm]) -> None:
    grid, found = table(title, "", *sides, "difference"), tuple(compared)
    for term, (name, *cells) in zip(found, rows(found, sides), strict=True):
        grid.add_row(f"{'  ' * term.part}{name}", *cells)
    console.print(grid)


def rows(terms: Iterable[ComparedTerm], sides: tuple[str, str]) -> list[tuple[str, str, str, str]]:
    """Name, both values with their units, and the difference of every term; report and studio show the same."""
    return [
        (
            term.name,
            _shown(term.first, term.unit, sides[0]),
            _shown(term.second, term.unit, sides[1]),
            "" if term.difference is None or not term.first else f"{term.difference:+.1%}",
        )
        for term in terms
    ]


def compare_json(found: Comparison) -> dict[str, Any]:
    return {
        "sides": [{"name": side.name, "is": side.word} for side in (found.first, found.second)],
        "terms": [{**vars(term), "difference": term.difference} for term in found.terms],
        "largest": found.sentences,
        "apart": found.differences,
    }


def _shown(value: float | None, unit: str, side: str) -> str:
    if value is None:
        return "not measured" if side == "measured" else "–"
    return UNITS[unit](value)


def show_end(console: Console, run: Run) -> None:
    """The end of a run: predicted beside measured, or where it was stopped; and its folder."""
    outcome, again = run.outcome, f"ultrascale train --resume {run.folder}"
    if outcome.measured is not None:
        show_measured(console, run)
    if outcome.stopped is not None:
        kept = f"; checkpoint {outcome.kept.name}: resume with {again}" if outcome.kept else "; no checkpoint was saved"
        line = f"stopped by {outcome.stopped} after step {outcome.step} of {run.request.training.steps}{kept}"
        console.print(line, soft_wrap=True)  # a command in one piece, to copy
    elif (loss := outcome.reached_loss) is not None:
        training = run.request.training
        kind = "evaluation's loss" if training.eval_every else "loss"
        kept = f"; checkpoint {outcome.kept.name}" if outcome.kept else "; no checkpoint was saved"
        goal = f"at most train.stop_at_loss = {training.stop_at_loss:g}"
        console.print(
            f"ended after step {outcome.step} of {training.steps}: the {kind} is {loss:.4g}, {goal}{kept}", soft_wrap=True
        )
    elif outcome.measured is None:
        line = f"all {outcome.step} steps were done already; for more: {again} --steps {2 * outcome.step}"
        console.print(line, soft_wrap=True)
    console.print(f"The run is in {run.folder}", soft_wrap=True)


def show_measured(console: Console, run: Run) -> None:
    """Predicted, measured, difference of time and memory of one step."""
    compared = terms(run.predicted, run.measured)
    of = f" of {batch:,} tokens" if (batch := run.measured.batch_tokens) else ""
    show_terms(console, f"predicted and measured, one step{of}", ("predicted", "measured"), compared)
    notes(console, run.measured.notes)


def show_drift(console: Console, job: Job, layout: Layout, now: Cluster, measured_s: float) -> None:
    """How the machine has changed since it was measured for the prediction, which is no error of the model."""
    then_s, now_s = (estimate(one, layout).step_time_s for one in (job, job.changed(cluster=now)))
    change = now_s / then_s - 1
    words = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} than" if abs(change) >= STEADY else "about as fast as"
    console.print(
        f"Measured again after training, this machine is {words} before: the prediction would now be {seconds(now_s)} "
        f"({now_s / measured_s - 1:+.0%})."
    )


def run_json(run: Run) -> dict[str, Any]:
    outcome = run.outcome
    return {
        **attributes(run, "folder", "predicted"),
        "layout": run.request.layout,
        **attributes(outcome, "step", "stopped", "reached_loss", "measured"),
        "checkpoint": outcome.kept,
    }
