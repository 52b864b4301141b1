"""`ultrascale profile` in the terminal: each rank's step taken apart, whose exchanges stood in the open, findings; or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.measure.trace_analysis import Analysis
from ultrascale.measure.trace_times import RankTime
from ultrascale.show.compare import show_terms
from ultrascale.show.lines import bullets, heading, labelled
from ultrascale.specs.units import seconds

MOST_RANKS = 16  # that a table shows: the others are in the JSON


def show(console: Console, found: Analysis) -> None:
    console.print(_ranks(found.ranks))
    if len(found.ranks) > MOST_RANKS:
        console.print(f"and {len(found.ranks) - MOST_RANKS:,} ranks more (--json has them)")
    if any(one.techniques for one in found.ranks):
        console.print(_techniques(found.ranks))
    if found.terms:
        show_terms(console, "one step, by cause", ("planned", "measured"), found.terms)
    heading(console, "what this says")
    bullets(console, found.findings)
    for note in found.notes:
        labelled(console, "note:", "yellow", note)


def _ranks(ranks: Sequence[RankTime]) -> Table:
    count = len(ranks[0].steps)
    noun = "1 step" if count == 1 else f"{count} steps"
    table = Table(title=f"a step of each rank, the mean of {noun}", title_justify="left", title_style="bold")
    for name in ("rank", "on", "step", "computing", "exchanging", "both", "neither", "optimizer"):
        table.add_column(name, justify="right")
    for one in ranks[:MOST_RANKS]:
        means = [
            one.mean(lambda step: step.step_s),
            one.mean(lambda step: step.computing_s),
            one.mean(lambda step: step.exchanging_s),
            one.mean(lambda step: step.both_s),
            one.mean(lambda step: step.neither_s),
            one.mean(lambda step: step.optimizer_s),
        ]
        table.add_row("–" if one.rank is None else str(one.rank), one.device.upper(), *map(seconds, means))
    return table


def _techniques(ranks: Sequence[RankTime]) -> Table:
    table = Table(title="exchanges of a step, the mean over ranks", title_justify="left", title_style="bold")
    table.add_column("technique")
    table.add_column("collectives")
    for name in ("calls", "time", "in the open"):
        table.add_column(name, justify="right")
    order = list(dict.fromkeys(each.technique for one in ranks for each in one.techniques))
    for technique in order:
        mine = [each for one in ranks for each in one.techniques if each.technique == technique]
        kinds = dict.fromkeys(kind for each in mine for kind in each.kinds)
        of_kind = {kind: sum(each.kinds.get(kind, 0.0) for each in mine) / len(ranks) for kind in kinds}
        words = ", ".join(f"{number:,.0f} {kind}" for kind, number in of_kind.items())
        sums = [
            sum(values) / len(ranks)
            for values in zip(*((each.calls, each.time_s, each.exposed_s) for each in mine), strict=True)
        ]
        table.add_row(technique, words, f"{sums[0]:,.0f}", seconds(sums[1]), seconds(sums[2]))
    return table


def as_json(found: Analysis) -> dict[str, Any]:
    ranks = [{**asdict(one), "actions": _actions(one)} for one in found.ranks]
    return {
        "ranks": ranks,
        "bubble": None if found.bubble is None else asdict(found.bubble),
        "terms": [{**vars(term), "difference": term.difference} for term in found.terms],
        "findings": list(found.findings),
        "notes": list(found.notes),
    }


def _actions(one: RankTime) -> list[list[dict[str, Any]]]:
    return [[action._asdict() for action in step] for step in one.actions]
