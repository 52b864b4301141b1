"""How lines are printed, the same for every verb: names and paths come from users, so no markup or escape in them is obeyed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ultrascale.specs.printable import printable
from ultrascale.specs.units import GIB

PIPE_WIDTH = 150  # where there is no terminal: wide enough that no table is cut


class PlainConsole(Console):
    """A console that reads no markup from text, and passes none of its control characters to the terminal."""

    def __init__(self, to_errors: bool = False, width: int | None = None) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, stderr=to_errors, width=width)

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
    """A line on the error stream that says what is being done, gone when it is done; silent where nobody watches."""
    with PlainConsole(to_errors=True).status("starting") as status:
        yield lambda text: status.update(Text(text))


def told_now_and_then(doing: str) -> Callable[[int, int], None]:
    """Takes bytes done and in all; says how far it is on the error stream, first after two seconds, then every ten."""
    due = time.monotonic() + 2.0

    def tell(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + 10.0
            sys.stderr.write(f"{doing}: {done / GIB:,.1f} of {total / GIB:,.1f} GiB\n")

    return tell


def heading(console: Console, text: str) -> None:
    console.print(text, style="bold")


def labelled(console: Console, label: str, style: str, text: str) -> None:
    """`note: …` with only the label in colour."""
    console.print(Text.assemble((label, style), " ", text))


def bullets(console: Console, lines: Iterable[str]) -> None:
    """A list whose longer lines are indented under their first word."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=3, justify="right")
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("•", line)
    console.print(grid)


def count_of(number: int, noun: str) -> str:
    """`1 node`, `8 nodes`, `1,024 sequences`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
