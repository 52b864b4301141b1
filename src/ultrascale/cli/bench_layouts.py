"""`ultrascale bench layouts`: a plan's layout varied, or the planner's best raced against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ultrascale.cli.common import NO, JsonFileOption, PlanArgument, write_json


def layouts(
    plan: PlanArgument,
    vary: Annotated[
        str | None,
        typer.Option(
            "--vary",
            help="One field at a time from the plan's layout: [cyan]tp,mbs,recompute[/], or with values, [cyan]mbs=1:2:4[/].",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="So long at most: [cyan]30m[/]. Without --vary: race the planner's best candidates."),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="How many candidates of the planner are raced.", min=1, max=200)] = 8,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", help="Processes. Default: as many as the plan has GPUs.", min=1, max=1024)
    ] = None,
    steps: Annotated[int, typer.Option("--steps", help="Steps of a trial; the first two warm up.", min=3, max=2**20)] = 10,
    timeout: Annotated[str, typer.Option("--timeout", help="A trial that takes longer has failed.")] = "10m",
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            help="Where trials are kept: [cyan]sqlite:///study.db[/], or [cyan]postgresql://user@host/database[/], which "
            "several machines can share. Default: study.db in the folder.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A folder for runs and winner.yaml. Default: runs/layouts-MODEL.")
    ] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Measure layouts of a plan's job here, each in fresh processes of the real engine; predicted beside measured.

    [dim]ultrascale bench layouts plan.yaml --vary tp,mbs,recompute --nproc 2[/]
    [dim]ultrascale bench layouts plan.yaml --budget 30m[/]

    [cyan]--vary[/] changes one field at a time; dp and gas follow, so that processes and batch stay. [cyan]--budget[/] takes
    the planner's ranking for this machine, stops trials whose first steps are clearly slower than the best, writes winner.yaml
    and says how much slower the planner's first choice was.

    A trial that runs out of memory, crashes, hangs or is killed is a row that says so. The same command goes on where it was
    ended: what is measured or has failed is not repeated.
    """
    from ultrascale.launch import launcher, machine
    from ultrascale.measure import bench_layouts as measure
    from ultrascale.show.lines import progress, terminal
    from ultrascale.specs.errors import RunError, SpecError
    from ultrascale.specs.folders import folder_name
    from ultrascale.specs.plan import Plan

    if vary is None and budget is None:
        raise SpecError("bench layouts wants to know what to measure: try --vary tp,mbs,recompute or --budget 30m")
    budget_s = None if budget is None else measure.duration(budget, "--budget")
    limit_s = measure.duration(timeout, "--timeout")
    names, loaded = machine.gpu_names(), Plan.load(plan)
    base = measure.base_request(loaded, nproc, steps, len(names))
    measure.import_optuna()
    from ultrascale.measure.bench_layouts_study import Study, lock_file, study_name
    from ultrascale.show import bench as show

    folder = out or Path("runs") / f"layouts-{folder_name(base.job.model.name)}"
    address = storage or f"sqlite:///{folder / 'study.db'}"
    console = terminal()
    with lock_file(address):
        study = Study(address, study_name(base, names[0] if names else "cpu"))
        with progress() as say:
            say("looking at this machine, for predictions to compare with")
            cluster = launcher.detect_cluster(base.layout.gpus, base.job.precision)
            if vary is not None:
                asked = measure.varied(loaded, base, vary, cluster)
            elif cluster is None:
                raise SpecError(f"the planner knows no rates of {names[0] if names else 'this machine'}: try --vary tp,mbs")
            else:
                say("asking the planner")
                asked = measure.ranked(base, cluster, top)
        for note in base.notes:
            terminal(to_errors=True).print(f"note: {note}")
        stopped = False
        with show.watching(asked) as changed:
            sweep = measure.Sweep(asked, study, folder, cluster, limit_s, budget_s, changed)
            try:
                sweep.run()
            except KeyboardInterrupt:
                stopped = True
    rows, found, file = sweep.rows, measure.verdict(sweep.rows), None
    if found is not None and asked.ranked:
        file = measure.winning_plan(asked, found.winner.candidate, cluster).save(folder / "winner.yaml")
    write_json(json_file, show.layouts_json(asked, rows, found, study.shown, study.name))
    show.show_layouts(console, asked, rows, found, file)
    if stopped:
        raise RunError("stopped by Ctrl-C: what is measured is kept, and the same command goes on with the rest")
    if found is None:
        raise typer.Exit(NO)
