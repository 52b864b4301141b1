"""Two sides of a step in the terminal, term by term."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.measure.compare import ComparedTerm, Comparison
from ultrascale.show.lines import bullets, labelled
from ultrascale.specs.units import GIB, seconds


def show_compare(console: Console, found: Comparison) -> None:
    sides = found.first, found.second
    words = [side.word for side in sides]
    heads = words if words[0] != words[1] else [side.name for side in sides]
    show_terms(console, f"{found.first.name} and {found.second.name}, one step", (heads[0], heads[1]), found.terms)
    bullets(console, found.sentences)
    if found.apart:
        labelled(console, "the two differ in", "yellow", "; ".join(found.apart))


def show_terms(console: Console, title: str, sides: tuple[str, str], terms: Iterable[ComparedTerm]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("")
    for column in (*sides, "difference"):
        table.add_column(column, justify="right")
    found = tuple(terms)
    for term, (name, *cells) in zip(found, rows(found, sides), strict=True):
        table.add_row(f"{'  ' * term.part}{name}", *cells)
    console.print(table)


def rows(terms: Iterable[ComparedTerm], sides: tuple[str, str]) -> list[tuple[str, str, str, str]]:
    """Name, both values with their units, and the difference, of every term; pages show the same."""
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
        "largest": list(found.sentences),
        "apart": list(found.apart),
    }


def _shown(value: float | None, unit: str, side: str) -> str:
    if value is None:
        return "not measured" if side == "measured" else "–"
    if unit == "s":
        return seconds(value)
    if unit == "%":
        return f"{value:.1%}"
    if unit == "B":
        return f"{value / GIB:,.2f} GiB" if value >= GIB / 10 else f"{value / 2**20:,.2f} MiB"
    return f"{value:,.0f}"
