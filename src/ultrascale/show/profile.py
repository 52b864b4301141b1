"""Output of `ultrascale profile`: time of each rank's step, exposed communication by technique, findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.measure.trace_analysis import Analysis
from ultrascale.measure.trace_times import RankTime
from ultrascale.show.compare import show_terms
from ultrascale.show.lines import attributes, bullets, compact, count_of, heading, notes, table
from ultrascale.specs.units import seconds

MOST_RANKS = 16  # in the table; all are in the JSON
WIDE = 100  # columns for the ranks between lines


def show(console: Console, found: Analysis) -> None:
    grid = _ranks(found.ranks)
    console.print(grid if console.width >= WIDE else compact(grid))
    if len(found.ranks) > MOST_RANKS:
        console.print(f"and {len(found.ranks) - MOST_RANKS:,} more ranks (--json has them)")
    if any(one.techniques for one in found.ranks):
        console.print(_techniques(found.ranks))
    if found.terms:
        show_terms(console, "one step, by cause", ("planned", "measured"), found.terms)
    heading(console, "findings")
    bullets(console, found.findings)
    notes(console, found.notes)


def _ranks(ranks: Sequence[RankTime]) -> Table:
    parts = ("step", "computing", "exchanging", "both", "neither", "optimizer")
    words = ("step", "computing", "exposed comm.", "overlapped", "idle", "optimizer")
    title = f"one step of each rank, mean of {count_of(len(ranks[0].steps), 'step')}"
    grid = table(title, "rank", "on", *words, left=())
    for one in ranks[:MOST_RANKS]:
        means = (seconds(one.mean(f"{part}_s")) for part in parts)
        grid.add_row("–" if one.rank is None else str(one.rank), one.device.upper(), *means)
    return grid


def _techniques(ranks: Sequence[RankTime]) -> Table:
    columns = ("technique", "collectives", "calls", "time", "exposed")
    grid = table("communication per step, mean over ranks", *columns, left=columns[:2])
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
        grid.add_row(technique, words, f"{sums[0]:,.0f}", seconds(sums[1]), seconds(sums[2]))
    return grid


def as_json(found: Analysis) -> dict[str, Any]:
    return {
        "ranks": [
            {**vars(one), "actions": [[action._asdict() for action in step] for step in one.actions]} for one in found.ranks
        ],
        "terms": [{**vars(term), "difference": term.difference} for term in found.terms],
        **attributes(found, "bubble", "findings", "notes"),
    }
