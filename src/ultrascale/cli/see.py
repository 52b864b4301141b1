"""Verbs of seeing: report, studio."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ultrascale.cli.common import HAND_OVER, app, terminal
from ultrascale.specs.folders import REPORT


@app.command(rich_help_panel=HAND_OVER)
def report(
    source: Annotated[Path, typer.Argument(help="A plan file, or a run's folder.", metavar="PLAN.YAML|RUN")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page. Default: report.html beside the plan.")
    ] = None,
) -> None:
    """Write a plan or a run as one HTML page: memory, time, schedule, other layouts, cheat-sheet; it works offline and prints.

    [dim]ultrascale report plan.yaml -o report.html[/]
    [dim]ultrascale report runs/first[/]
    """
    from ultrascale.figures import style
    from ultrascale.report.of_plan import plan_page
    from ultrascale.report.of_run import run_page
    from ultrascale.show.lines import progress
    from ultrascale.specs.errors import SpecError
    from ultrascale.specs.files import write_text
    from ultrascale.specs.plan import Plan

    style.graph_objects()
    if not source.exists():
        raise SpecError(f"{source} does not exist: give a plan file, such as plan.yaml, or a run's folder, such as runs/first")
    target = output or (source if source.is_dir() else source.parent) / REPORT
    with progress() as say:
        say("drawing")
        page = run_page(source, say) if source.is_dir() else plan_page(Plan.load(source), str(source), say)
        write_text(target, page, example=REPORT)
    terminal().print(f"Wrote {target} ({len(page.encode()) / 2**20:.1f} MiB); open it in any browser")


@app.command(rich_help_panel=HAND_OVER)
def studio(
    runs: Annotated[Path, typer.Option("--runs", help="The folder of runs; the page reads no other.")] = Path("runs"),
    accuracy: Annotated[
        Path | None,
        typer.Option("--accuracy", help="A CSV of measured runs for the accuracy page. Default: data/published.csv, if there."),
    ] = None,
    port: Annotated[int, typer.Option("--port", "-p", help="On 127.0.0.1.")] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Open a local web page to plan with: layouts as you move the controls, schedules, live runs, accuracy. Ctrl-C ends it.

    [dim]ultrascale studio --port 9000 --no-browser[/]
    """
    from ultrascale.specs.errors import SpecError
    from ultrascale.studio.serve import serve

    published = Path("data/published.csv")
    if accuracy is not None and not accuracy.is_file():
        raise SpecError(f"--accuracy {accuracy} does not exist: give a CSV of measured runs, such as {published}")
    if runs.exists() and not runs.is_dir():
        raise SpecError(f"--runs is {runs}, which is no folder: name the one that holds runs, such as runs")
    serve(runs, accuracy or (published if published.is_file() else None), port, browser)
