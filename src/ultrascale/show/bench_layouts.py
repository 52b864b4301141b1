"""`ultrascale bench layouts` in the terminal: a live table while trials run, then predicted beside measured and who won."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ultrascale.measure.bench_layouts import CandidateSet, SweepProgress, SweepVerdict, TrialRow
from ultrascale.measure.bench_trial import tensors_gib
from ultrascale.show.lines import bullets, labelled, terminal

STYLES = {"measured": "green", "running": "yellow", "stopped early": "cyan", "failed": "bold red", "waiting": "dim"}


@contextmanager
def watching(asked: CandidateSet) -> Iterator[Callable[[SweepProgress], None]]:
    """On a terminal a table that is redrawn; elsewhere a line for each trial that ends. Both on the error stream."""
    console = terminal(to_errors=True)
    if not console.is_terminal:
        yield _Lines(console)
        return
    # Drawn by us alone: a thread that draws would be forked with the trials.
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda progress: live.update(Group(_table(asked, progress.rows), _now(progress)), refresh=True)


class _Lines:
    def __init__(self, console: Console) -> None:
        self.console, self.told = console, dict[str, int]()
        self.first = True

    def __call__(self, progress: SweepProgress) -> None:
        for row in progress.rows:
            record = row.record
            if record is None or not record.ended or self.told.get(row.candidate.name) == record.number:
                continue
            self.told[row.candidate.name] = record.number
            known = "known: " if self.first else ""
            self.console.print(f"{known}{row.candidate.name}: {_outcome(row)}{_left(progress)}", soft_wrap=True)
        self.first = False


def _left(progress: SweepProgress) -> str:
    counted = f"; {progress.finished} of {len(progress.rows)}"
    return counted if progress.eta_s is None else f"{counted}, about {_time(progress.eta_s)} left"


def _now(progress: SweepProgress) -> Text:
    doing = f"{progress.doing}: step {progress.step} of {progress.of_steps}" if progress.doing else "looking"
    return Text(f"{doing}{_left(progress)}")


def _outcome(row: TrialRow) -> str:
    record = row.record
    assert record is not None
    if record.state == "failed":
        return f"failed, {record.kind}: {record.reason}"
    speed = "–" if record.tokens_per_s is None else f"{record.tokens_per_s:,.0f} tokens/s"
    return speed if record.state == "measured" else f"{record.reason}: {speed}"


def show_layouts(
    console: Console, asked: CandidateSet, rows: Sequence[TrialRow], found: SweepVerdict | None, winner: Path | None
) -> None:
    console.print(_table(asked, rows))
    for row in rows:
        record = row.record
        if record is not None and record.state == "failed":
            labelled(console, f"{row.candidate.name}:", "bold red", f"{record.kind}: {record.reason}")
    if asked.left_out:
        labelled(console, "left out", "yellow", "since the engine does not run them here:")
        bullets(console, asked.left_out)
    if found is None:
        labelled(console, "nothing", "bold red", "was measured to its end")
        return
    console.print(_sentence(asked, found))
    waiting = sum(row.record is None or not row.record.finished for row in rows)
    if waiting:
        console.print(f"{waiting} of {len(rows)} are still to measure: the same command goes on with them")
    if winner is not None:
        console.print(f"The winner is in {winner}: ultrascale train {winner}", soft_wrap=True)


def _sentence(asked: CandidateSet, found: SweepVerdict) -> str:
    best, first = found.winner.candidate, found.first.candidate
    said = "the planner's first choice" if asked.ranked else "the plan"
    if best is first:
        return f"Fastest: {best.layout}. It is {said}: no regret."
    if found.regret is None:
        record = found.first.record
        why = "was not measured" if record is None or not record.reason else f"failed ({record.kind})"
        return f"Fastest: {best.name}, {best.layout}; {said} {why}."
    return f"Fastest: {best.name}, {best.layout}. {said.capitalize()} is {_slower(found.regret)} slower: its regret."


def _slower(regret: float) -> str:
    return f"{1 - 1 / (1 + regret):.1%}"


def _table(asked: CandidateSet, rows: Sequence[TrialRow]) -> Table:
    job, training = asked.base.job, asked.base.training
    title = f"{job.model.name}, {job.sequences} × {job.seq:,} tokens a step, {asked.base.layout.gpus} processes, "
    table = Table(title=f"{title}{training.steps} steps", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("layout", overflow="fold")
    heads = ("tokens/s predicted", "measured", "off by", f"over {rows[0].candidate.name}", "GiB predicted", "measured")
    for head in heads:
        table.add_column(head, justify="right", overflow="fold")
    table.add_column("state")
    base = rows[0].record.tokens_per_s if rows[0].record is not None else None
    for row in rows:
        table.add_row(row.candidate.name, str(row.candidate.layout), *_figures(row, base), _state(row))
    return table


def _figures(row: TrialRow, base: float | None) -> tuple[str, ...]:
    predicted, record = row.candidate.predicted, row.record
    rate = None if predicted is None else predicted.tokens_per_s
    seen = record.tokens_per_s if record is not None else None
    held = record.tensors_gib if record is not None else None
    return (
        "–" if rate is None else f"{rate:,.0f}",
        "–" if seen is None else f"{seen:,.0f}",
        "–" if seen is None or rate is None else f"{rate / seen - 1:+.0%}",
        "–" if seen is None or base is None else f"{seen / base:.2f}×",
        "–" if predicted is None else _gib(tensors_gib(predicted)),
        "–" if held is None else _gib(held),
    )


def _gib(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.4f}"


def _state(row: TrialRow) -> Text:
    record = row.record
    state = "waiting" if record is None else record.state
    detail = f": {record.kind}" if record is not None and record.state == "failed" else ""
    return Text(f"{state}{detail}", style=STYLES[state])


def _time(value: float) -> str:
    return f"{value:.0f} s" if value < 90 else f"{value / 60:.0f} min" if value < 5400 else f"{value / 3600:.1f} h"


def layouts_json(
    asked: CandidateSet, rows: Sequence[TrialRow], found: SweepVerdict | None, storage: str, study: str
) -> dict[str, Any]:
    return {
        "storage": storage,
        "study": study,
        "trials": [_row_json(row) for row in rows],
        "left_out": list(asked.left_out),
        "winner": None if found is None else found.winner.candidate.name,
        "first": rows[0].candidate.name,
        "regret": None if found is None else found.regret,
    }


def _row_json(row: TrialRow) -> dict[str, Any]:
    predicted, record = row.candidate.predicted, row.record
    return {
        "name": row.candidate.name,
        "layout": row.candidate.layout.model_dump(mode="json"),
        "predicted": None
        if predicted is None
        else {
            "tokens_per_s": predicted.tokens_per_s,
            "step_time_s": predicted.step_time_s,
            "tensors_gib": tensors_gib(predicted),
        },
        "trial": None if record is None else vars(record),
    }
