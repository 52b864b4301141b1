"""Verbs of handing over: export and import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ultrascale.cli.common import HAND_OVER, JsonOption, PlanArgument, app, print_json, terminal


@app.command(rich_help_panel=HAND_OVER)
def export(
    file: PlanArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            help="Another engine: [cyan]torchtitan[/], [cyan]megatron[/], [cyan]nanotron[/], [cyan]deepspeed[/], "
            "[cyan]accelerate[/]. A launcher for ours: [cyan]torchrun[/], [cyan]slurm[/], [cyan]kubernetes[/].",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write into; new or empty.", metavar="OUT/")],
    style: Annotated[
        str | None,
        typer.Option("--style", help="torchtitan: [cyan]toml[/] (0.2), [cyan]current[/] (0.3, Python) or [cyan]both[/]."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option("--image", help="kubernetes: the container image, with ultrascale in it. Default: ultrascale:latest."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a plan as another engine's own configuration, or as a launcher for ours.

    [dim]ultrascale export plan.yaml --to megatron -o out/[/]
    [dim]ultrascale export plan.yaml --to slurm -o job/ && cd job && sbatch job.sbatch[/]

    What an engine cannot say (a schedule it lacks, ZeRO-2 where it has ZeRO-1) stands in the header of its file, a line each;
    [cyan]ultrascale import[/] reads both back. Data and tokenizer are stand-ins there: put yours in their places.
    """
    from ultrascale.cost.legality import check
    from ultrascale.export import targets, write
    from ultrascale.show import export as show
    from ultrascale.specs.plan import Plan

    targets.check(to, style, image)
    plan = Plan.load(file)
    check(plan.job, plan.layout)  # a file can be edited
    said: list[str] = []
    if to in targets.LAUNCHERS:
        from ultrascale.specs.training import Training
        from ultrascale.train import supported

        supported.check(plan.job, plan.layout, Training())
        files, follows = targets.launcher_files(plan, to, image, str(output))
    else:
        files, said, follows = targets.engine_files(plan, to, style, str(output))
    written = write.into(output, files, force)
    if as_json:
        print_json(show.written_json(written, said, follows))
    else:
        show.show_written(terminal(), written, said, follows)


@app.command("import", rich_help_panel=HAND_OVER)
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
        typer.Option("--cluster", "-c", help="On which GPUs: [cyan]64xh100[/]; needed where the file does not say."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Which model, where the file has none: a preset or a model file.")
    ] = None,
    seq: Annotated[str | None, typer.Option("--seq", "-s", help="Sequence length, where the file has none.")] = None,
    framework: Annotated[
        str | None, typer.Option("--framework", help="The engine to predict for; default: the file's own.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it as a plan to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Read another engine's configuration as a plan: will it fit? how fast would it be? where does the time go?

    [dim]ultrascale import run.sh --cluster 64xh100 -o plan.yaml[/]
    [dim]ultrascale import ds_config.json --model llama-3-8b --seq 4096 --cluster 8xh100[/]

    Scripts and Python files are read, never run. What is assumed is said as a note; settings that have no place in a plan are
    listed as not read. Exit 0 even where the layout does not fit.
    """
    from ultrascale import asked
    from ultrascale.export.read import Given, plan_from
    from ultrascale.show import export as show
    from ultrascale.specs.framework import Framework
    from ultrascale.specs.model import Model
    from ultrascale.specs.units import tokens

    given = Given(
        cluster=None if cluster is None else asked.cluster_named(cluster),
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
