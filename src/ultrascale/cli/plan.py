"""Verbs of planning: plan, explain, accuracy, presets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ultrascale.cli.common import (
    NO,
    PLAN,
    JsonFileOption,
    JsonOption,
    app,
    echo,
    job_from_options,
    print_json,
    progress,
    terminal,
    write_json,
)
from ultrascale.specs.errors import SpecError, nearest

ModelArgument = Annotated[
    str, typer.Argument(help="A preset ([cyan]llama-3-70b[/]), a model file, or a Hugging Face [cyan]config.json[/].")
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        "-c",
        help="[cyan]64xh100[/], [cyan]'8x8 h100'[/] (nodes x GPUs), a cluster file, or [cyan]here[/]: this machine. "
        "With --by or --budget a GPU kind: [cyan]h100[/].",
        show_default=False,
    ),
]


@app.command(rich_help_panel=PLAN)
def plan(
    model: ModelArgument,
    cluster: ClusterOption = None,
    batch_tokens: Annotated[
        str,
        typer.Option(
            "--batch-tokens",
            "-b",
            help="Tokens in one optimizer step: [cyan]4M[/] is 4 x 2^20, [cyan]4e6[/] four million.",
        ),
    ] = "4M",
    seq: Annotated[
        str | None,
        typer.Option(
            "--seq",
            "-s",
            help="Sequence length in tokens: [cyan]8192[/] or [cyan]8k[/].",
            show_default="8192, or what the model takes",
        ),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="How many layouts to show.")] = 10,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="[cyan]throughput[/], [cyan]memory[/] (least peak) or [cyan]cost[/] (least GPU time per token).",
        ),
    ] = "throughput",
    fix: Annotated[
        list[str] | None, typer.Option("--fix", help="Fix a field of the layout: [cyan]--fix tp=8 --fix zero=1[/].")
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option("--forbid", help="Exclude a technique or a value: [cyan]--forbid cp --forbid recompute=full[/]."),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp8, fp16 or fp32. Default: bf16, on a CPU fp32.", show_default=False)
    ] = None,
    gradients: Annotated[str, typer.Option(help="Format of gradient accumulation and reduction: fp32 or bf16.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw-bf16, adamw-8bit, muon, lion, sgd-momentum or sgd.")] = "adamw",
    ema: Annotated[bool, typer.Option("--ema", help="Keep a moving mean of the weights.")] = False,
    adapters: Annotated[
        int | None,
        typer.Option("--adapters", help="Train low-rank adapters (LoRA) of this rank, all other weights frozen."),
    ] = None,
    attention: Annotated[str, typer.Option(help="flash, or plain (materialised score matrices).")] = "flash",
    framework: Annotated[
        str,
        typer.Option(
            help="Plan for this engine, with layouts that it runs: ultrascale, [cyan]megatron-core[/], [cyan]torchtitan[/]…; "
            "[cyan]playbook[/] is an idealised engine."
        ),
    ] = "ultrascale",
    min_fit: Annotated[
        float, typer.Option("--min-fit", help="The least probability to fit, from the memory errors of measured runs.")
    ] = 0.9,
    min_free: Annotated[str, typer.Option("--min-free", help="Memory to leave free on every GPU: [cyan]4GiB[/].")] = "0GiB",
    total_tokens: Annotated[
        str | None,
        typer.Option("--total-tokens", "--tokens", help="Tokens of the whole training, for days and cost: [cyan]15T[/]."),
    ] = None,
    by: Annotated[
        str | None,
        typer.Option("--by", help="Find the fewest GPUs that train the tokens in this time: [cyan]30d[/], [cyan]12h[/]."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Find the fewest GPUs that train the tokens for this money: [cyan]2M$[/], [cyan]5e5[/]."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            "--compare", help="GPU kinds beside the cluster's: [cyan]h200,b200[/]; with --by or --budget the fewest of each."
        ),
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option("--price", help="US dollars for an hour of one GPU: [cyan]h100=2.5[/] or [cyan]h100=2.5,b200=4[/]."),
    ] = None,
    pue: Annotated[
        float, typer.Option("--pue", help="Power of the data centre over that of its computers, for the energy.")
    ] = 1.2,
    expert_imbalance: Annotated[
        float | None,
        typer.Option(
            "--expert-imbalance",
            min=1,
            max=64,
            help="Tokens of the busiest expert rank over the mean: 1.1 unless the cluster file says otherwise; "
            "[cyan]1.0[/] for benchmarks that force balanced routing.",
        ),
    ] = None,
    network_gb_s: Annotated[
        float | None,
        typer.Option(
            "--network-gb-s",
            help="What the network between nodes really carries, GB/s per GPU and direction: [cyan]13[/]. "
            "Default: the NIC's data sheet, or the cluster file.",
        ),
    ] = None,
    all_reasons: Annotated[
        bool, typer.Option("--all-reasons", help="Every reason for the first layout, not the main ones only.")
    ] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the best plan to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best layouts for a model on a cluster: memory, time and reasons, in seconds, without a GPU.

    [dim]ultrascale plan llama-3-70b --cluster 64xh100 --batch-tokens 4M --seq 8192 -o plan.yaml[/]

    [dim]ultrascale plan llama-3-8b --tokens 15T --by 30d --compare h100,h200,b200[/]
    """
    from ultrascale.cli import gpu_counts
    from ultrascale.plan.gpu_counts import check_pue
    from ultrascale.plan.search import plan as search
    from ultrascale.show import plan as show
    from ultrascale.specs import units

    check_pue(pue)
    clusters = gpu_counts.clusters(cluster, compare, price or (), by is not None or budget is not None)
    jobs = []
    for place in clusters:
        one = job_from_options(
            model, place, batch_tokens, seq, precision, gradients, optimizer, attention, total_tokens, framework
        )
        one = one if expert_imbalance is None else one.with_expert_imbalance(expert_imbalance)
        one = one.changed(ema=True) if ema else one
        one = one if adapters is None else one.changed(adapter_rank=adapters)
        jobs.append(one if network_gb_s is None else one.with_network_gb_s(network_gb_s))
    limits: dict[str, Any] = {
        "fix": fix or (),
        "forbid": forbid or (),
        "min_fit": min_fit,
        "min_free_gib": units.memory_gib(min_free, "--min-free"),
    }
    if by is not None or budget is not None or compare is not None:
        if objective != "throughput":
            words = f"--objective is '{objective:.40}' but --by, --budget and --compare are about the fastest layouts"
            raise SpecError(f"{words}: try --objective throughput")
        if by is None and budget is None:
            gpu_counts.finish(gpu_counts.compare_kinds(jobs, pue, limits, as_json), output, as_json)
            return
        command = gpu_counts.same_job(
            model,
            {
                "--batch-tokens": (batch_tokens, "4M"),
                "--seq": (seq, None),
                "--precision": (precision, None),
                "--gradients": (gradients, "fp32"),
                "--optimizer": (optimizer, "adamw"),
                "--ema": (ema, False),
                "--adapters": (adapters, None),
                "--attention": (attention, "flash"),
                "--framework": (framework, "ultrascale"),
                "--min-fit": (min_fit, 0.9),
                "--min-free": (min_free, "0GiB"),
                "--expert-imbalance": (expert_imbalance, None),
                "--fix": (",".join(fix or ()), ""),
                "--forbid": (",".join(forbid or ()), ""),
                "--tokens": (total_tokens, None),
            },
        )
        gpu_counts.finish(gpu_counts.fewest_gpus(jobs, by, budget, pue, limits, command, as_json), output, as_json)
        return
    (job,) = jobs
    with progress() as say:
        result = search(
            job,
            top=top,
            objective=objective,  # type: ignore[arg-type]  # checked there, with a sentence
            progress=say,
            **limits,
        )
    if output is not None and result.plans:
        result.plans[0].save(output)
    if as_json:
        print_json(show.as_json(result))
    else:
        console = terminal()
        show.show_result(console, result, all_reasons)
        if output is not None and result.plans:
            console.print(f"Wrote {output}; next: ultrascale explain {output}")
        elif output is not None:
            console.print(f"{output} was not written: there is no plan to write")
    if not result.plans:
        raise typer.Exit(NO)


@app.command(rich_help_panel=PLAN)
def explain(
    file: Annotated[
        Path,
        typer.Argument(help="A plan written by [cyan]ultrascale plan -o[/]; with --row, a CSV of runs.", metavar="PLAN.YAML"),
    ],
    row: Annotated[
        str | None,
        typer.Option("--row", help="The id of one run in the CSV: predicted against measured, term by term."),
    ] = None,
    cheatsheet: Annotated[
        bool, typer.Option("--cheatsheet", help="The playbook's cheat-sheet with this plan's numbers.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="Compare with a change: [cyan]zero=3[/], [cyan]recompute=selective,mbs=4[/], [cyan]gradients=bf16[/], "
            "[cyan]offload=optimizer[/], [cyan]zero_shards=8[/] (HSDP), [cyan]keep_gathered=true[/], [cyan]gpus=128[/], "
            "[cyan]gpu=h200[/], [cyan]network_gb_s=25[/] (per GPU), [cyan]expert_imbalance=1.0[/].",
        ),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option("--largest", help="The largest mbs, seq or model that fits this layout."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a plan: memory by owner and stage, time by cause, communication, reasons, rejected alternatives.

    [dim]ultrascale explain plan.yaml --what-if zero=3 --what-if recompute=selective,mbs=4[/]
    """
    from ultrascale.cost import cheatsheet as cheatsheets
    from ultrascale.cost.legality import check
    from ultrascale.plan import what_if as changes
    from ultrascale.show import explain as show
    from ultrascale.show.lines import attributes
    from ultrascale.specs.plan import Plan

    if sum((cheatsheet, bool(what_if), largest is not None, row is not None)) > 1:
        raise SpecError("--row, --cheatsheet, --what-if and --largest answer different questions: ask one at a time")
    if row is not None:
        _explain_row(file, row, as_json)
        return
    loaded = Plan.load(file)
    check(loaded.job, loaded.layout)  # the file may have been edited
    console = terminal()
    if not as_json:
        show.show_staleness(console, loaded)
    if cheatsheet:
        if as_json:
            print_json({"strategies": cheatsheets.strategies(loaded), "formulas": cheatsheets.formulas(loaded)})
        else:
            show.show_cheatsheet(console, loaded)
    elif what_if:
        answers = [changes.what_if(loaded, change) for change in what_if]
        if as_json:
            print_json([attributes(one, "change", "layout", "estimate", "problem") for one in answers])
        else:
            show.show_what_if(console, loaded, answers)
    elif largest is not None:
        answer = changes.largest(loaded, largest)
        print_json(answer) if as_json else show.show_largest(console, loaded, answer)
    elif as_json:
        print_json(loaded.to_mapping())
    else:
        show.show_plan(console, loaded)


def _explain_row(file: Path, row: str, as_json: bool) -> None:
    from ultrascale.measure.accuracy.runs import read
    from ultrascale.measure.accuracy.scores import score
    from ultrascale.show import accuracy as show

    runs, _ = read(file)
    found = [run for run in runs if run.id == row]
    if not found:
        raise SpecError(f"--row is '{row:.60}' but {file} has no such id: {nearest(row, [run.id for run in runs])[:200]}")
    (one,) = score(found[:1])
    print_json(show.row_json(one)) if as_json else show.show_row(terminal(), one)


@app.command(rich_help_panel=PLAN)
def accuracy(
    file: Annotated[Path, typer.Argument(help="A CSV of measured runs, published ones or your own.", metavar="RUNS.CSV")],
    json_file: JsonFileOption = None,
    group: Annotated[str, typer.Option("--by", help="Group errors by source, gpu or system.")] = "source",
    worst: Annotated[int, typer.Option("--worst", help="How many of the worst rows to show.")] = 10,
    report: Annotated[
        Path | None, typer.Option("--report", help="Also write the report as Markdown.", metavar="OUT.MD")
    ] = None,
) -> None:
    """Score the cost model on measured runs: speed, memory, fit or out of memory, ranking, the worst rows.

    [dim]ultrascale accuracy data/published.csv --by gpu --worst 20[/]
    """
    from ultrascale.measure.accuracy import scores as measure
    from ultrascale.measure.accuracy.runs import read
    from ultrascale.show import accuracy as show
    from ultrascale.specs.files import write_text

    if group not in show.GROUPS:
        raise SpecError(f"--by is '{group:.40}': {nearest(group, show.GROUPS)}")
    if not 0 <= worst <= 10_000:
        raise SpecError(f"--worst is {worst} but must be from 0 to 10000, such as 20")
    runs, problems = read(file)
    with progress() as say:
        scored = measure.score(runs, progress=lambda done: say(f"predicting run {done} of {len(runs)}"))
        say("predicting each run without its source")
        left_out = measure.score_left_out(runs)
    for line in problems:
        echo(f"note: {line}", err=True)
    if not any(one.reason is None for one in scored):
        reasons = "; ".join(sorted({f"{one.run.id}: {one.reason}" for one in scored})[:3])
        raise SpecError(f"none of the {len(runs)} rows of {file} could be modelled: {reasons}")
    write_json(json_file, show.as_json(scored, left_out))
    if report is not None:
        write_text(report, show.markdown(file, scored, left_out))
    show.show(terminal(), scored, left_out, group, worst)


@app.command(rich_help_panel=PLAN)
def presets(
    name: Annotated[str | None, typer.Argument(help="A model or GPU kind: every field, with the source of its number.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the models, GPU kinds and ways to name a cluster, with their sources."""
    from ultrascale.show import presets as show

    if as_json:
        print_json(show.presets_json(name))
    else:
        show.show_presets(terminal(), name)
