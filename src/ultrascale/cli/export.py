"""Verbs of reports and exports: export, import, report, studio, mcp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ultrascale.cli.common import EXPORT, NO, JsonOption, PlanArgument, app, cluster_named, print_json, progress, terminal
from ultrascale.specs.errors import SpecError
from ultrascale.specs.folders import REPORT


@app.command(rich_help_panel=EXPORT)
def export(
    file: PlanArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Another engine: [cyan]torchtitan[/], [cyan]megatron[/], [cyan]nanotron[/], [cyan]deepspeed[/], "
            "[cyan]accelerate[/]. A launcher for ours: [cyan]torchrun[/], [cyan]slurm[/], [cyan]kubernetes[/], "
            "[cyan]skypilot[/], [cyan]dstack[/], [cyan]ray[/].",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write into; new or empty.", metavar="OUT/")],
    style: Annotated[
        str | None,
        typer.Option("--style", help="torchtitan: [cyan]toml[/] (0.2), [cyan]current[/] (0.3, Python) or [cyan]both[/]."),
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            "--launcher", help="A launcher for the other engine, one of those above; it goes beside the engine's files."
        ),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option("--image", help="The container image that a launcher starts. Default: the engine's name with :latest."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Write the file even if its engine would run something else than planned.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as another engine's own configuration, or as a launcher for ours.

    [dim]ultrascale export plan.yaml --to megatron -o out/[/]
    [dim]ultrascale export plan.yaml --to megatron --launcher slurm -o out/[/]
    [dim]ultrascale export plan.yaml --to slurm -o job/ && cd job && sbatch job.sbatch[/]

    The file is read back as its engine reads it. If step time or memory differ from the plan by more than 2 %, the fields that
    the engine cannot express are named with their cost, nothing is written, and the exit code is 1; so it is if the plan fits,
    but not in that engine. Plan for the engine
    ([cyan]plan --framework megatron-core[/]) to get a layout that it runs. Data and tokenizer are placeholders.
    """
    from ultrascale.cost.legality import check
    from ultrascale.export import targets, write
    from ultrascale.show import export as show
    from ultrascale.specs.plan import Plan

    targets.check(to, style, launcher, image)
    plan = Plan.load(file)
    check(plan.job, plan.layout)  # the file may have been edited
    if to in targets.LAUNCHERS:
        from ultrascale.specs.training import Training
        from ultrascale.train import supported

        supported.check(plan.job, plan.layout, Training())
        files, follows = targets.launcher_files(plan, to, image, str(output))
        exported = targets.EngineExport(files, [], follows, [])
    else:
        exported = targets.engine_files(plan, to, style, str(output))
        if launcher is not None:
            exported = targets.with_launcher(exported, plan, launcher, image, str(output))
    refused = not exported.same and not allow_different
    written = [] if refused else write.into(output, exported.files, force)
    if as_json:
        print_json(show.exported_json(exported, written))
    else:
        show.show_exported(terminal(), plan, exported, written)
    if refused:
        raise typer.Exit(NO)


@app.command("import", rich_help_panel=EXPORT)
def import_(
    file: Annotated[
        Path,
        typer.Argument(
            help="[cyan]run.sh[/] (Megatron-LM), [cyan]config.toml[/] or [cyan].py[/] (torchtitan), [cyan]config.yaml[/] "
            "(nanotron, Accelerate), [cyan]ds_config.json[/] (DeepSpeed).",
            metavar="FILE",
        ),
    ],
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", help="The GPUs: [cyan]64xh100[/]; needed if the file does not say."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="The model, if the file has none: a preset or a model file.")
    ] = None,
    seq: Annotated[str | None, typer.Option("--seq", "-s", help="Sequence length, if the file has none.")] = None,
    framework: Annotated[
        str | None, typer.Option("--framework", help="The engine to predict for; default: the file's own.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it as a plan to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Read another engine's configuration as a plan, and predict memory and time.

    [dim]ultrascale import run.sh --cluster 64xh100 -o plan.yaml[/]
    [dim]ultrascale import ds_config.json --model llama-3-8b --seq 4096 --cluster 8xh100[/]

    Scripts and Python files are read, never run. Assumptions are printed as notes; settings without a place in a plan are
    listed as not read. Exit 0 even if the layout does not fit.
    """
    from ultrascale.export.read import ImportOptions, plan_from
    from ultrascale.show import export as show
    from ultrascale.specs.framework import Framework
    from ultrascale.specs.model import Model
    from ultrascale.specs.units import tokens

    given = ImportOptions(
        cluster=None if cluster is None else cluster_named(cluster),
        model=None if model is None else Model.load(model),
        seq=None if seq is None else tokens(seq, "--seq", "8192 or 8k"),
        framework=None if framework is None else Framework.load(framework),
    )
    found = plan_from(file, given)
    if output is not None:
        found.plan.save(output)
    if as_json:
        print_json(show.imported_json(found))
        return
    console = terminal()
    show.show_imported(console, found)
    if output is not None:
        console.print(f"Wrote {output}; next: ultrascale explain {output}", soft_wrap=True)


@app.command(rich_help_panel=EXPORT)
def report(
    source: Annotated[Path, typer.Argument(help="A plan file, or a run's folder.", metavar="PLAN.YAML|RUN")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page. Default: report.html beside the plan.")
    ] = None,
) -> None:
    """Write a plan or a run as one HTML page: memory, time, schedule, other layouts, cheat-sheet. The page works offline.

    [dim]ultrascale report plan.yaml -o report.html[/]
    [dim]ultrascale report runs/first[/]
    """
    from ultrascale.figures import style
    from ultrascale.report.of_plan import plan_page
    from ultrascale.report.of_run import run_page
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


@app.command(rich_help_panel=EXPORT)
def studio(
    runs: Annotated[Path, typer.Option("--runs", help="The folder of runs to show.")] = Path("runs"),
    accuracy: Annotated[
        Path | None,
        typer.Option("--accuracy", help="A CSV of measured runs for the accuracy page. Default: data/published.csv, if there."),
    ] = None,
    port: Annotated[int, typer.Option("--port", "-p", help="On 127.0.0.1.")] = 8765,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Open a local web page to plan with: layouts, schedules, live runs, accuracy. Ctrl-C ends it.

    [dim]ultrascale studio --port 9000 --no-browser[/]
    """
    from ultrascale.studio.serve import serve

    published = Path("data/published.csv")
    if accuracy is not None and not accuracy.is_file():
        raise SpecError(f"--accuracy {accuracy} does not exist: give a CSV of measured runs, such as {published}")
    if runs.exists() and not runs.is_dir():
        raise SpecError(f"--runs is {runs}, which is not a folder: name the folder of runs, such as runs")
    serve(runs, accuracy or (published if published.is_file() else None), port, browser)


@app.command(rich_help_panel=EXPORT)
def mcp(
    folder: Annotated[
        Path, typer.Option("--folder", help="The folder that plans and runs are in; tools reach no file outside it.")
    ] = Path(),
    timeout_s: Annotated[float, typer.Option("--timeout", min=1, max=86400, help="Seconds that one call may take.")] = 900,
) -> None:
    """Serve plan, explain, rehearse, verify, profile and other verbs as tools for agents (Model Context Protocol, stdio).

    [dim]ultrascale mcp --folder runs[/]
    """
    if not folder.is_dir():
        raise SpecError(f"--folder is {str(folder)!r:.80} but must be a folder: try .")
    try:
        import anyio

        from ultrascale.cli import mcp_server
    except ImportError:
        raise SpecError("`ultrascale mcp` needs the extra mcp: pip install 'ultrascale[mcp]'") from None
    anyio.run(mcp_server.serve, folder.resolve(), timeout_s)
