"""Verbs of measuring: rehearse, compare, and those of bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ultrascale.cli.bench import app as bench_verbs
from ultrascale.cli.common import MEASURE, JsonFileOption, JsonOption, PlanArgument, app, print_json, terminal, write_json


@app.command(rich_help_panel=MEASURE)
def compare(
    first: Annotated[Path, typer.Argument(help="A plan file, or a run's folder.", metavar="PLAN|RUN")],
    second: Annotated[Path, typer.Argument(help="The other: its numbers are what the difference is of.", metavar="PLAN|RUN")],
    as_json: JsonOption = False,
) -> None:
    """Compare a plan with a run, two runs, or two plans: time by cause, memory by owner, and which part differs most.

    [dim]ultrascale compare plan.yaml runs/first[/]
    [dim]ultrascale compare runs/a runs/b[/]
    """
    from ultrascale.measure.compare import compare as compared
    from ultrascale.measure.compare import load
    from ultrascale.show.compare import compare_json, show_compare

    found = compared(load(first), load(second))
    if as_json:
        print_json(compare_json(found))
    else:
        show_compare(terminal(), found)


@app.command(rich_help_panel=MEASURE)
def rehearse(
    file: PlanArgument,
    rank: Annotated[int | None, typer.Option("--rank", help="The rank to run; 0 unless told otherwise.")] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="[cyan]all[/]: one rank of each pipeline stage; or one stage's number.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="[cyan]meta[/]: without memory, on any machine; [cyan]cuda[/]: on one real GPU.")
    ] = "meta",
    json_file: JsonFileOption = None,
) -> None:
    """Run the real training program of one rank alone, without its peers: memory, FLOPs, collectives, beside the Estimate.

    [dim]ultrascale rehearse plan.yaml --stage all[/]
    """
    from ultrascale.measure.rehearse_asked import check, ranks_of
    from ultrascale.show import rehearse as show
    from ultrascale.show.lines import progress
    from ultrascale.specs.plan import Plan
    from ultrascale.train import launch

    plan = Plan.load(file)
    check(plan.job, plan.layout, device)
    ranks = ranks_of(plan.layout, rank, stage)
    launch.import_torch()
    from ultrascale.measure import rehearse as measure
    from ultrascale.measure.rehearse_compare import notes, prediction

    with progress() as say:
        say(f"rehearsing {len(ranks)} of {plan.layout.gpus:,} ranks")
        found = measure.rehearse(plan.job, plan.layout, ranks, device, say)
    predicted, told = prediction(plan.job, plan.layout, device), notes(plan.job, plan.layout, device)
    show.show(terminal(), plan.job, plan.layout, predicted, found, told)
    write_json(json_file, show.as_json(plan.job, plan.layout, predicted, found, told, device))


app.add_typer(bench_verbs, rich_help_panel=MEASURE)
