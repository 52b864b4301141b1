"""How lines are printed, the same for every verb: no markup is read from text, since names and paths come from users."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ultrascale.specs.units import GIB

PIPE_WIDTH = 150  # where there is no terminal: wide enough that no table is cut


def terminal(to_errors: bool = False) -> Console:
    console = Console(markup=False, emoji=False, highlight=False, stderr=to_errors)
    if console.is_terminal:
        return console
    return Console(markup=False, emoji=False, highlight=False, stderr=to_errors, width=PIPE_WIDTH)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line on the error stream that says what is being done, gone when it is done; silent where nobody watches."""
    with Console(stderr=True).status("starting") as status:
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
