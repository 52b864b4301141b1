"""Verbs of running: quickstart, train, verify, convert, doctor, and those of data."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ultrascale.cli.common import NO, RUN, JsonOption, app, echo, print_json, terminal, write_json
from ultrascale.cli.data import app as data_verbs


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

    console, gpu = terminal(), launch.has_gpu()
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
    from ultrascale.specs.folders import folder_name
    from ultrascale.train import launch
    from ultrascale.train.checkpoint import run_of
    from ultrascale.train.log import batch_line
    from ultrascale.train.request import from_words
    from ultrascale.train.world import seat

    mine = seat() if nproc is None else None
    options = {"train.steps": steps, "train.seed": seed, "train.data": data, "job.seq": seq}
    request = from_words(words or [], options, mine.world if mine else nproc, launch.has_gpu(), model, resume, weights)
    if out is None:
        new = Path("runs") / f"{folder_name(request.job.model.name)}-{datetime.now():%Y%m%d-%H%M%S}"
        out = run_of(request.resume) if request.resume is not None else new
    console, first = terminal(to_errors=True), mine is None or mine.rank == 0
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
        print_json(show.run_json(run))
    else:
        show.show_end(terminal(), run)


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
    from ultrascale.train import launch

    launch.import_torch()
    from ultrascale.measure.verify import check as measure
    from ultrascale.measure.verify import small

    if (world is None) == (not words):
        raise SpecError("verify takes a plan or --world, one of them: try `ultrascale verify --world 4`")
    job, layouts, notes = small.to_verify(words or [], world, only, everything, model)
    for note in notes:
        echo(f"note: {note}", err=True)
    found = []
    for number, difference in enumerate(measure.verify(job, layouts), 1):
        found.append(difference)
        echo(f"{number:>{len(str(len(layouts)))}}/{len(layouts)}  {show.verify_row(difference)}")
    wrong = [one for one in found if not one.ok]
    write_json(json_file, show.verify_json(found))
    echo(
        f"{len(found) - len(wrong)} of {len(found)} layouts compute what one process computes "
        f"(bound {measure.BOUND:g} relative, {measure.STEPS} steps, fp32)"
    )
    if wrong:
        raise typer.Exit(NO)


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
    terminal().print(f"Wrote {made.folder}: {made.model.name}, {made.model.parameters:,} parameters; next: {follows}")


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
    from ultrascale.measure.doctor.facts import gather
    from ultrascale.measure.doctor.findings import machine_findings
    from ultrascale.measure.doctor.plan import plan_findings
    from ultrascale.show import doctor as show
    from ultrascale.show.lines import progress
    from ultrascale.specs.plan import Plan

    plan = None if file is None else Plan.load(file)
    with progress() as say:
        facts = gather(out, say)
        findings = machine_findings(facts) + ([] if plan is None else plan_findings(plan, facts))
    name = None if file is None else str(file)
    print_json(show.findings_json(findings, name)) if as_json else show.show_findings(terminal(), findings, name)
    if show.stopped(findings):
        raise typer.Exit(NO)


app.add_typer(data_verbs, rich_help_panel=RUN)
