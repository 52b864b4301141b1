"""The verbs, each a thin function over the Python API. Heavy imports happen when a verb runs.

Exit codes: 0 success, 1 the answer is no (nothing fits, layouts differ, a run ended early), 2 the input cannot be used.
"""

from __future__ import annotations

import errno
import inspect
import io
import sys
from typing import Annotated

import typer

from ultrascale.cli.common import BAD_INPUT, NO, app, echo
from ultrascale.specs.errors import RunError, SpecError

# Each adds its verbs to the app; the panels of `--help` have this order.
# isort: off
from ultrascale.cli import plan, run, generate, measure, export  # noqa: F401


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from ultrascale import __version__

        typer.echo(__version__)
        raise typer.Exit


def _reflow(group: typer.Typer) -> None:
    """Joins the lines of each paragraph of help, for a terminal of any width; commands keep a line each."""
    for command in group.registered_commands:
        paragraphs = inspect.cleandoc(getattr(command.callback, "__doc__", None) or "").split("\n\n")
        shown = [text if text.startswith("[dim]") else text.replace("\n", " ") for text in paragraphs]
        command.help = "\n\n".join(shown)
    for inner in group.registered_groups:
        if inner.typer_instance:
            _reflow(inner.typer_instance)


_reflow(app)

# Errors of the system about a file name that a user gave.
_OF_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES)


def main() -> None:
    """Run the command line; a SpecError is one sentence and exit code 2, never a traceback."""

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # signs that a terminal's encoding lacks (×, ·, █) become `?`
            stream.reconfigure(errors="replace")
    try:
        _refuse_control_characters(sys.argv[1:])
        app()
    except SpecError as error:
        echo(f"error: {error}", err=True)
        sys.exit(BAD_INPUT)
    except RunError as error:
        echo(f"error: {error}", err=True)
        sys.exit(NO)
    except BrokenPipeError:
        sys.exit(0)
    except OSError as error:
        if error.errno not in _OF_NAMES or error.filename is None:
            raise
        name, reason = str(error.filename), (error.strerror or "").lower()
        echo(f"error: {name:.80} cannot be used ({reason}): name another file or folder", err=True)
        sys.exit(BAD_INPUT)


def _refuse_control_characters(words: list[str]) -> None:
    """Before typer, which prints unusable arguments unescaped."""
    from ultrascale.specs.printable import printable

    for word in words:
        if printable(word) != word:
            raise SpecError(f"the argument {word!r:.80} has a control character: rename what it names, or leave it out")
