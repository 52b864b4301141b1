"""Consoles, tables and lists of every verb. Names and paths come from users, so markup and escapes in them are not obeyed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ultrascale.specs.printable import printable
from ultrascale.specs.units import GIB

PIPE_WIDTH = 150  # without a terminal: wide enough that no table is cut
NARROW = 110  # columns of a terminal below which wide tables have a smaller form


class PlainConsole(Console):
    """A console that reads no markup in text and passes no control characters to the terminal."""

    def __init__(self, to_errors: bool = False, width: int | None = None) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, stderr=to_errors, width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich prints, but tables keep their words whole: without lines in a pipe or where they are too wide with them, and
        row by row where they are too wide without.
        """
        super().print(*(self._readable(one) if isinstance(one, Table) else one for one in objects), **options)

    def _readable(self, grid: Table) -> RenderableType:
        if not grid.columns[1:]:
            return grid
        if grid.box is not None and (not self.is_terminal or self._measured(grid).minimum > self.width):
            grid = compact(grid)
        measured = self._measured(grid)
        if measured.minimum > self.width:
            return rows_as_lines(grid)
        if measured.maximum > self.width:
            share_width(grid, self.width - measured.minimum)
        return grid

    def _measured(self, grid: Table) -> Measurement:
        return Measurement.get(self, self.options.update(max_width=10_000), grid)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)  # before a table measures it

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def terminal(to_errors: bool = False) -> Console:
    console = PlainConsole(to_errors)
    return console if console.is_terminal else PlainConsole(to_errors, PIPE_WIDTH)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A status line on the error stream while the block runs; silent without a terminal."""
    with PlainConsole(to_errors=True).status("starting") as status:
        yield lambda text: status.update(Text(text))


def periodic_progress(doing: str) -> Callable[[int, int], None]:
    """A callback for bytes done and in total: a line on the error stream after two seconds, then every ten."""
    due = time.monotonic() + 2.0

    def update(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + 10.0
            sys.stderr.write(f"{doing}: {done / GIB:,.1f} of {total / GIB:,.1f} GiB\n")

    return update


def heading(console: Console, text: str) -> None:
    console.print(text, style="bold")


def labelled(console: Console, label: str, style: str, text: str) -> None:
    """`note: …` with only the label in colour."""
    console.print(Text.assemble((label, style), " ", text))


def notes(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        labelled(console, "note:", "yellow", line)


def bullets(console: Console, lines: Iterable[str]) -> None:
    """A list whose longer lines are indented under their first word."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("  •", line)
    console.print(grid)


def table(title: str | None, *columns: str, left: Collection[str] | None = None, no_wrap: bool = False) -> Table:
    """A table with a bold title; columns are right-aligned except the first, or those in `left`."""
    grid = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        aligned = "left" if column in (columns[:1] if left is None else left) else "right"
        grid.add_column(column, justify=aligned, overflow="fold", no_wrap=no_wrap)  # type: ignore[arg-type]
    return grid


def compact(grid: Table) -> Table:
    """The table without lines, for narrow terminals."""
    grid.box, grid.pad_edge, grid.padding = None, False, (0, 1, 0, 0)
    return grid


def share_width(grid: Table, spare: int) -> None:
    """Gives every column the width of its longest word, and the spare width to those that wrap, the narrowest first."""
    texts = {id(column): [str(text) for text in (column.header, *column.cells)] for column in grid.columns}
    words = {key: max((len(word) for text in all_ for word in text.split()), default=0) for key, all_ in texts.items()}
    lines = {key: max(len(line) for text in all_ for line in text.splitlines() or [""]) for key, all_ in texts.items()}
    left = len(grid.columns)
    for column in sorted(grid.columns, key=lambda one: lines[id(one)] - words[id(one)]):
        key = id(column)
        more = min(lines[key] - words[key], spare // left)
        column.width, column.no_wrap, spare, left = words[key] + more, False, spare - more, left - 1


def rows_as_lines(grid: Table) -> Table:
    """The table with a line for each cell, under the row's first."""
    first, *others = grid.columns
    lines = Table.grid(padding=(0, 1))
    lines.title, lines.title_justify, lines.title_style = grid.title, "left", "bold"
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for name, *cells in zip(first.cells, *(column.cells for column in others), strict=True):
        lines.add_row(name, "", style="bold")
        for column, cell in zip(others, cells, strict=True):
            lines.add_row(f"  {str(column.header).replace(chr(10), ' ')}", cell)
    return lines


def attributes(value: object, *names: str) -> dict[str, Any]:
    """Some attributes of an object, for JSON."""
    return {name: getattr(value, name) for name in names}


def count_of(number: int, noun: str) -> str:
    """`1 node`, `8 nodes`, `1,024 sequences`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
