"""What every verb shares: the app, the panels of `--help`, options, exit codes, and how an answer is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="ultrascale",
    help="The Ultra-Scale Playbook as software: plan a training run, run it, prove it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NO, BAD_INPUT = 1, 2
PLAN, RUN, MEASURE, HAND_OVER = "Plan", "Run", "Measure", "See and hand over"

PlanArgument = Annotated[Path, typer.Argument(help="A plan written by [cyan]ultrascale plan -o[/].", metavar="PLAN.YAML")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]
JsonFileOption = Annotated[
    Path | None, typer.Option("--json", help="Also write every figure there, for machines.", metavar="OUT.JSON")
]


def terminal(to_errors: bool = False) -> Console:
    from ultrascale.show import lines

    return lines.terminal(to_errors)


def echo(text: str, err: bool = False) -> None:
    """Print a line that may hold words of a user."""
    from ultrascale.specs.printable import printable

    typer.echo(printable(text), err=err)


def print_json(data: Any) -> None:
    from ultrascale.specs.printable import CONTROL_CODES

    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    # json escapes the first 32 of them in texts, and ends lines with one.
    sys.stdout.write(text.translate({code: f"\\u{code:04x}" for code in CONTROL_CODES if code >= 32}) + "\n")


def write_json(file: Path | None, data: Any) -> None:
    """Write the figures to the file that was asked for, if one was."""
    from ultrascale.specs.files import write_text

    if file is not None:
        write_text(file, json.dumps(data, indent=1, allow_nan=False) + "\n")
