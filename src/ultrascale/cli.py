"""The verbs. Each is one thin function over the Python API; heavy imports wait until a verb runs.

Exit codes: 0 done, 1 the answer is no (nothing fits, layouts differ, a run ended early), 2 the input cannot be used as given.
"""

from __future__ import annotations

import io
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultrascale.bench_cli import app as bench_verbs
from ultrascale.data.cli import app as data_verbs

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="ultrascale",
    help="The Ultra-Scale Playbook as software: plan a training run, with memory, time and reasons.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NO, BAD_INPUT = 1, 2
PLAN, RUN = "Plan", "Run"
app.add_typer(data_verbs, rich_help_panel=RUN)
app.add_typer(bench_verbs, rich_help_panel=RUN)

ModelArgument = Annotated[
    str, typer.Argument(help="A preset ([cyan]llama-3-70b[/]), a model file, or a Hugging Face [cyan]config.json[/].")
]
ClusterOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        "-c",
        help="[cyan]64xh100[/], [cyan]'8x8 h100'[/] (nodes x GPUs), a cluster file, or [cyan]here[/]: this machine.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from ultrascale import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.command(rich_help_panel=PLAN)
def plan(
    model: ModelArgument,
    cluster: ClusterOption,
    batch_tokens: Annotated[
        str,
        typer.Option(
            "--batch-tokens",
            "-b",
            help="Tokens in one optimizer step: [cyan]4M[/] is 4 x 2^20, [cyan]4e6[/] four million.",
        ),
    ],
    seq: Annotated[str, typer.Option("--seq", "-s", help="Sequence length in tokens: [cyan]8192[/] or [cyan]8k[/].")],
    top: Annotated[int, typer.Option("--top", help="How many layouts to show.")] = 10,
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="[cyan]throughput[/], [cyan]memory[/] (least peak) or [cyan]cost[/] (least GPU time a token, fewer GPUs too).",
        ),
    ] = "throughput",
    fix: Annotated[
        list[str] | None, typer.Option("--fix", help="Pin a field of the layout: [cyan]--fix tp=8 --fix zero=1[/].")
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option("--forbid", help="Rule out a technique or a value: [cyan]--forbid cp --forbid recompute=full[/]."),
    ] = None,
    precision: Annotated[str, typer.Option(help="bf16, fp8, fp16 or fp32.")] = "bf16",
    gradients: Annotated[str, typer.Option(help="In which gradients are accumulated and reduced: fp32 or bf16.")] = "fp32",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw-bf16, adamw-8bit, muon, sgd-momentum or sgd.")] = "adamw",
    attention: Annotated[str, typer.Option(help="flash, or plain (whole score matrices).")] = "flash",
    framework: Annotated[
        str,
        typer.Option(help="The engine that would run it: ultrascale, [cyan]megatron-core[/], [cyan]torchtitan[/]…"),
    ] = "ultrascale",
    total_tokens: Annotated[
        str | None, typer.Option("--total-tokens", help="Of the whole training, for days and cost: [cyan]15T[/].")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the best plan to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best layouts for a model on a cluster: memory, time and reasons, in seconds, without a GPU.

    [dim]ultrascale plan llama-3-70b --cluster 64xh100 --batch-tokens 4M --seq 8192 -o plan.yaml[/]
    """
    from ultrascale import asked
    from ultrascale.plan.search import plan as search
    from ultrascale.show import plan as show
    from ultrascale.show.lines import progress

    job = asked.job(model, cluster, batch_tokens, seq, precision, gradients, optimizer, attention, total_tokens, framework)
    with progress() as say:
        result = search(
            job,
            top=top,
            objective=objective,  # type: ignore[arg-type]  # checked there, with a sentence
            fix=fix or (),
            forbid=forbid or (),
            progress=say,
        )
    if output is not None and result.plans:
        result.plans[0].save(output)
    if as_json:
        _print_json(show.as_json(result))
    else:
        console = _console()
        show.show_result(console, result)
        if output is not None and result.plans:
            console.print(f"Wrote {output}; next: ultrascale explain {output}")
        elif output is not None:
            console.print(f"{output} was not written: there is no plan to keep")
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
        bool, typer.Option("--cheatsheet", help="The playbook's cheat-sheet with this plan's numbers in every cell.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="A change beside today: [cyan]zero=3[/], [cyan]recompute=selective,mbs=4[/], [cyan]gradients=bf16[/], "
            "[cyan]offload=optimizer[/], [cyan]zero_shards=8[/] (HSDP), [cyan]keep_gathered=true[/], [cyan]gpus=128[/].",
        ),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option("--largest", help="How far the layout goes before it no longer fits: mbs, seq or model."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a plan holds and does: memory by owner and stage, time by cause, traffic, reasons, rejected neighbours.

    [dim]ultrascale explain plan.yaml --what-if zero=3 --what-if recompute=selective,mbs=4[/]
    """
    from ultrascale.cost.legality import check
    from ultrascale.plan import what_if as changes
    from ultrascale.show import explain as show
    from ultrascale.specs.errors import SpecError
    from ultrascale.specs.plan import Plan

    if sum((cheatsheet, bool(what_if), largest is not None, row is not None)) > 1:
        raise SpecError("--row, --cheatsheet, --what-if and --largest answer different questions: ask one at a time")
    if row is not None:
        _explain_row(file, row, as_json)
        return
    loaded = Plan.load(file)
    check(loaded.job, loaded.layout)  # a file can be edited
    console = _console()
    if not as_json:
        show.show_staleness(console, loaded)
    if cheatsheet:
        _print_json(show.cheatsheet_json(loaded)) if as_json else show.show_cheatsheet(console, loaded)
    elif what_if:
        answers = [changes.what_if(loaded, change) for change in what_if]
        _print_json(show.what_if_json(answers)) if as_json else show.show_what_if(console, loaded, answers)
    elif largest is not None:
        answer = changes.largest(loaded, largest)
        if as_json:
            _print_json({**vars(answer), "estimate": answer.estimate.model_dump(mode="json")})
        else:
            show.show_largest(console, loaded, answer)
    elif as_json:
        _print_json(loaded.to_mapping())
    else:
        show.show_plan(console, loaded)


def _explain_row(file: Path, row: str, as_json: bool) -> None:
    from ultrascale.measure.accuracy import score
    from ultrascale.measure.runs import read
    from ultrascale.show import accuracy as show
    from ultrascale.specs.errors import SpecError, nearest

    runs, _ = read(file)
    found = [run for run in runs if run.id == row]
    if not found:
        raise SpecError(f"--row is '{row:.60}' but {file} has no such id: {nearest(row, [run.id for run in runs])[:200]}")
    (one,) = score(found[:1])
    _print_json(show.row_json(one)) if as_json else show.show_row(_console(), one)


@app.command(rich_help_panel=PLAN)
def accuracy(
    file: Annotated[Path, typer.Argument(help="A CSV of measured runs, published ones or your own.", metavar="RUNS.CSV")],
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write every prediction and the summary there.", metavar="OUT.JSON"),
    ] = None,
    group: Annotated[str, typer.Option("--by", help="Group errors by source, gpu or system.")] = "source",
    worst: Annotated[int, typer.Option("--worst", help="How many of the worst rows to show.")] = 10,
    report: Annotated[
        Path | None, typer.Option("--report", help="Also write the report as Markdown.", metavar="OUT.MD")
    ] = None,
) -> None:
    """Score the cost model on measured runs: speed, memory, fit or out of memory, ranking; worst rows and why not modelled.

    [dim]ultrascale accuracy data/published.csv --by gpu --worst 20[/]
    """
    from ultrascale.measure import accuracy as measure
    from ultrascale.measure.runs import read
    from ultrascale.show import accuracy as show
    from ultrascale.show.lines import progress
    from ultrascale.specs.errors import SpecError, nearest
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
        typer.echo(f"note: {line}", err=True)
    if not any(one.reason is None for one in scored):
        reasons = "; ".join(sorted({f"{one.run.id}: {one.reason}" for one in scored})[:3])
        raise SpecError(f"none of the {len(runs)} rows of {file} could be modelled: {reasons}")
    if json_file is not None:
        write_text(json_file, json.dumps(show.as_json(scored, left_out), indent=1, allow_nan=False) + "\n")
    if report is not None:
        write_text(report, show.markdown(file, scored, left_out))
    show.show(_console(), scored, left_out, group, worst)


@app.command(rich_help_panel=PLAN)
def presets(
    name: Annotated[str | None, typer.Argument(help="A model or GPU kind: every field, with the source of its number.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the models, GPU kinds and ways to name a cluster, with their sources."""
    from ultrascale.show import presets as show

    if as_json:
        _print_json(show.presets_json(name))
    else:
        show.show_presets(_console(), name)


@app.command(rich_help_panel=RUN)
def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.")] = Path("plan.yaml"),
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder. Default: runs/quickstart-TIME.")] = None,
    seconds: Annotated[int, typer.Option("--seconds", help="About how long to train.", min=1, max=3600)] = 45,
) -> None:
    """Close the loop on this machine: detect it, plan a small model, train it on real text, predicted beside measured."""
    from ultrascale import asked
    from ultrascale.plan.search import plan as search
    from ultrascale.show import plan as show_plan
    from ultrascale.show import run as show
    from ultrascale.show.lines import heading, progress
    from ultrascale.train import launch
    from ultrascale.train.log import batch_line
    from ultrascale.train.request import Overrides, from_plan

    console, gpu = _console(), launch.has_gpu()
    precision = "bf16" if gpu else "fp32"
    heading(console, f"$ ultrascale plan mini --cluster here --batch-tokens 4k --seq 256 --precision {precision} -o {output}")
    with progress() as say:
        say("measuring this machine")
        job = asked.job("mini", "here", "4k", "256", precision=precision)
        result = search(job, top=3, progress=say)
    best = result.plans[0]
    best.save(output)
    show_plan.show_result(console, result)
    steps = max(5, min(500, round(seconds / best.estimate.step_time_s)))
    folder = out or Path("runs") / f"quickstart-{datetime.now():%Y%m%d-%H%M%S}"
    world = best.layout.gpus
    heading(
        console,
        f"\n$ ultrascale train {output} --nproc {world} --steps {steps} --out {folder} train.lr=1e-3 train.eval_every={steps}",
    )
    request = from_plan(best, Overrides.parse([f"train.steps={steps}", "train.lr=1e-3", f"train.eval_every={steps}"]), world)
    console.print(f"{request.layout}; {batch_line(request.layout, request.job.seq)}; text: Python's standard library, as bytes")
    run = launch.train(request, folder, world, job.cluster)
    assert run is not None  # only ranks of torchrun get nothing back
    show.show_comparison(console, run)
    console.print(
        f"The plan is in {output}, the run in {folder}. Next: ultrascale verify {output}, ultrascale explain {output}"
    )


@app.command(rich_help_panel=RUN)
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A plan, and changes to it: [cyan]plan.yaml layout.tp=4 train.lr=1e-3 job.seq=2048[/]. "
            "dp follows from the processes, gas from the batch.",
            metavar="[PLAN.YAML] [SECTION.FIELD=VALUE]…",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Without a plan: a preset such as [cyan]tiny[/], or a model file.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps (train.steps).")] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, max=1024, help="Start so many processes here; not needed under torchrun or srun."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="stdlib, synthetic, token files, or a mixture [cyan]a/:0.7,b/:0.3[/] (train.data)."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Go on with a run's folder (or one of its checkpoints), cut as before or otherwise."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="Begin with the weights of a run or checkpoint, at step 0, with a new optimizer."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of weights and data order (train.seed).")] = None,
    seq: Annotated[str | None, typer.Option("--seq", help="Sequence length (job.seq).")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder: plan, metrics, measurement. Default: runs/MODEL-TIME.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a plan, or try a model: any layout, on CPUs or GPUs, measured and compared with the prediction.

    [dim]ultrascale train --model tiny --steps 20 --nproc 4 layout.dp=2 layout.tp=2[/]
    [dim]torchrun --nproc-per-node 8 -m ultrascale train plan.yaml --out runs/first layout.tp=4[/]
    [dim]ultrascale train --resume runs/first layout.tp=4[/]

    Sections: [cyan]layout.[/] dp tp pp cp zero sequence_parallel data_parallel context_parallel schedule virtual_stages mbs gas
    recompute offload; [cyan]train.[/] steps seed lr lr_schedule warmup_steps weight_decay clip eval_every data compress log …;
    [cyan]job.[/] seq batch_tokens precision gradients optimizer; [cyan]checkpoint.[/] every keep background save.
    """
    from ultrascale.show import run as show
    from ultrascale.show.lines import progress
    from ultrascale.train import launch
    from ultrascale.train.checkpoint import run_of
    from ultrascale.train.log import batch_line
    from ultrascale.train.request import from_words
    from ultrascale.train.world import seat

    mine = seat() if nproc is None else None
    options = {"train.steps": steps, "train.seed": seed, "train.data": data, "job.seq": seq}
    request = from_words(words or [], options, mine.world if mine else nproc, launch.has_gpu(), model, resume, weights)
    if out is None:
        new = Path("runs") / f"{request.job.model.name}-{datetime.now():%Y%m%d-%H%M%S}"
        out = run_of(request.resume) if request.resume is not None else new
    console, first = _console(to_errors=True), mine is None or mine.rank == 0
    if first:
        console.print(f"{request.job.model.name}: {request.layout}; {batch_line(request.layout, request.job.seq)}")
        if request.resume is not None:
            console.print(f"going on from {request.resume}, to step {request.training.steps}")
        for note in request.notes:
            console.print(f"note: {note}")
    with progress() as say:
        say("measuring this machine, for a prediction to compare with")
        machine = launch.machine(request.layout.gpus, request.job.precision) if first or launch.has_gpu() else None
    run = launch.train(request, out, nproc, machine)
    if run is None:
        return
    if as_json:
        _print_json(show.run_json(run))
    else:
        show.show_end(_console(), run)


@app.command(rich_help_panel=RUN)
def verify(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A plan, and changes to it.", metavar="[PLAN.YAML] [SECTION.FIELD=VALUE]…"),
    ] = None,
    world: Annotated[int | None, typer.Option("--world", help="Compositions of so many processes, without a plan.")] = None,
    only: Annotated[
        str | None, typer.Option("--only", help="Those that use each of these: [cyan]pp,cp[/] (dp tp pp cp zero recompute).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every composition, not a spread of them.")] = False,
    model: Annotated[str, typer.Option("--model", "-m", help="The model to verify on, with --world.")] = "tiny",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every difference there.", metavar="OUT.JSON")] = None,
) -> None:
    """Prove that a layout computes what one process computes: losses of three steps, every gradient, in fp32, within 1e-5.

    [dim]ultrascale verify plan.yaml[/]
    [dim]ultrascale verify --world 8 --only pp,cp[/]

    Exit 1 if any layout differs.
    """
    from ultrascale.show import run as show
    from ultrascale.specs.errors import SpecError
    from ultrascale.specs.files import write_text
    from ultrascale.train import launch

    launch.import_torch()
    from ultrascale.measure import small
    from ultrascale.measure import verify as measure

    if (world is None) == (not words):
        raise SpecError("verify takes a plan or --world, one of them: try `ultrascale verify --world 4`")
    job, layouts, notes = small.to_verify(words or [], world, only, everything, model)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    found = []
    for number, difference in enumerate(measure.verify(job, layouts), 1):
        found.append(difference)
        typer.echo(f"{number:>{len(str(len(layouts)))}}/{len(layouts)}  {show.verify_row(difference)}")
    wrong = [one for one in found if not one.ok]
    if json_file is not None:
        write_text(json_file, json.dumps(show.verify_json(found), indent=1, allow_nan=False) + "\n")
    typer.echo(
        f"{len(found) - len(wrong)} of {len(found)} layouts compute what one process computes "
        f"(bound {measure.BOUND:g} relative, {measure.STEPS} steps, fp32)"
    )
    if wrong:
        raise typer.Exit(NO)


@app.command(rich_help_panel=RUN)
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
        _print_json(compare_json(found))
    else:
        show_compare(_console(), found)


@app.command(rich_help_panel=RUN)
def rehearse(
    file: Annotated[Path, typer.Argument(help="A plan written by [cyan]ultrascale plan -o[/].", metavar="PLAN.YAML")],
    rank: Annotated[int | None, typer.Option("--rank", help="The rank to run; 0 unless told otherwise.")] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="[cyan]all[/]: one rank of each pipeline stage; or one stage's number.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="[cyan]meta[/]: without memory, on any machine; [cyan]cuda[/]: on one real GPU.")
    ] = "meta",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all of it there.", metavar="OUT.JSON")] = None,
) -> None:
    """Run the real training program of one rank alone, without its peers: memory, FLOPs, collectives, beside the Estimate.

    [dim]ultrascale rehearse plan.yaml --stage all[/]
    """
    from ultrascale.measure.rehearse_asked import check, ranks_of
    from ultrascale.show import rehearse as show
    from ultrascale.show.lines import progress
    from ultrascale.specs.files import write_text
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
    show.show(_console(), plan.job, plan.layout, predicted, found, told)
    if json_file is not None:
        data = show.as_json(plan.job, plan.layout, predicted, found, told, device)
        write_text(json_file, json.dumps(data, indent=1, allow_nan=False) + "\n")


@app.command(rich_help_panel=RUN)
def convert(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="[cyan]hf ./llama-dir runs/x[/]: a Hugging Face folder becomes a run to go on from. "
            "[cyan]runs/x hf ./out[/]: a run's newest checkpoint becomes such a folder.",
            metavar="hf FOLDER RUN | RUN hf FOLDER",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Of weights that are written out: bf16 or fp32.")] = "bf16",
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="A tokenizer.json, or a folder with one, to go with weights that are written out."),
    ] = None,
) -> None:
    """Weights in and out: Llama, Mistral, Qwen2.5, Qwen3 and GPT-2 folders of safetensors, one tensor in memory at a time.

    [dim]ultrascale convert hf ./llama-dir runs/x && ultrascale train --resume runs/x --nproc 4 job.seq=2048 layout.tp=2[/]
    [dim]ultrascale convert runs/x hf ./out --tokenizer ./llama-dir[/]
    """
    from ultrascale.show.lines import progress
    from ultrascale.specs.units import GIB
    from ultrascale.train import convert as weights

    with progress() as say:
        made = weights.convert(
            words or [],
            dtype,
            tokenizer,
            progress=lambda done, total: say(f"{done / GIB:,.2f} of {total / GIB:,.2f} GiB"),
        )
    follows = f"ultrascale train --resume {made.folder}" if made.is_run else "transformers loads it with AutoModelForCausalLM"
    _console().print(f"Wrote {made.folder}: {made.model.name}, {made.model.parameters:,} parameters; next: {follows}")


@app.command(rich_help_panel=RUN)
def doctor(
    file: Annotated[Path | None, typer.Argument(help="A plan: what would stop it here.", metavar="PLAN.YAML")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where runs are written.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Look this machine over: versions, memory, GPUs, links, network, ports, limits, disk; and what would stop a plan here.

    [dim]ultrascale doctor plan.yaml[/]

    Exit 1 if something would stop the plan, or any run.
    """
    from ultrascale.measure.doctor import machine_findings
    from ultrascale.measure.doctor_plan import plan_findings
    from ultrascale.measure.facts import gather
    from ultrascale.show import doctor as show
    from ultrascale.show.lines import progress
    from ultrascale.specs.plan import Plan

    plan = None if file is None else Plan.load(file)
    with progress() as say:
        facts = gather(out, say)
        findings = machine_findings(facts) + ([] if plan is None else plan_findings(plan, facts))
    name = None if file is None else str(file)
    _print_json(show.findings_json(findings, name)) if as_json else show.show_findings(_console(), findings, name)
    if show.stopped(findings):
        raise typer.Exit(NO)


def _console(to_errors: bool = False) -> Console:
    from ultrascale.show.lines import terminal

    return terminal(to_errors)


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def main() -> None:
    """Run the command line; a SpecError is one sentence and exit code 2, never a traceback."""
    from ultrascale.specs.errors import RunError, SpecError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # signs that a terminal's encoding lacks (×, ·, █) become `?`
            stream.reconfigure(errors="replace")
    try:
        app()
    except SpecError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(BAD_INPUT)
    except RunError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(NO)
    except BrokenPipeError:
        sys.exit(0)
