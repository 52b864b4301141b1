"""Verbs of running: quickstart, train, verify, convert, doctor, data."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from ultrascale.cli.common import (
    NO,
    RUN,
    JsonFileOption,
    JsonOption,
    NprocOption,
    announce,
    app,
    detect_machine,
    echo,
    job_from_options,
    print_json,
    progress,
    terminal,
    write_json,
)
from ultrascale.cli.data import app as data_verbs
from ultrascale.specs.errors import SpecError


@app.command(rich_help_panel=RUN)
def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the plan is written.")] = Path("plan.yaml"),
    out: Annotated[Path | None, typer.Option("--out", help="The run's folder. Default: runs/quickstart-TIME.")] = None,
    seconds: Annotated[int, typer.Option("--seconds", help="Approximate training time.", min=1, max=3600)] = 45,
) -> None:
    """Detect this machine, plan a small model, train it on real text, and print predicted beside measured."""
    from ultrascale.launch import launcher, machine
    from ultrascale.plan.search import plan as search
    from ultrascale.show import compare as show
    from ultrascale.show import plan as show_plan
    from ultrascale.show.lines import heading
    from ultrascale.train.log import batch_line
    from ultrascale.train.request import Overrides, from_plan

    console = terminal()
    heading(console, f"$ ultrascale plan mini --cluster here --batch-tokens 4k --seq 256 -o {output}")
    with progress() as say:
        say("measuring this machine")
        job = job_from_options("mini", "here", "4k", "256")
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
    run = launcher.train(request, folder, world, job.cluster)
    assert run is not None  # None only on other ranks of torchrun
    show.show_measured(console, run)
    if job.cluster.efficiency.synchronous:  # a CPU's rates are measured, and change with what else it does
        with progress() as say:
            say("measuring this machine again")
            now = machine.detect(job.cluster.gpus_per_node, again=True)
        show.show_drift(console, best.job, best.layout, now.resized(world), run.measured.step_time_s)
    console.print(
        f"The plan is in {output}, the run in {folder}. Next: ultrascale verify {output}, ultrascale explain {output}"
    )


@app.command(rich_help_panel=RUN)
def train(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="A plan, and changes to it: [cyan]plan.yaml layout.tp=4 train.lr=1e-3 job.seq=2048[/]. "
            "dp follows from the number of processes, gas from the batch.",
            metavar="[PLAN.YAML] [SECTION.FIELD=VALUE]…",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Without a plan: a preset such as [cyan]tiny[/], or a model file.")
    ] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="Optimizer steps (train.steps).")] = None,
    nproc: NprocOption = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="stdlib, synthetic, token files, or a mixture [cyan]a/:0.7,b/:0.3[/] (train.data)."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", help="Resume a run's folder (or one of its checkpoints), under any layout."),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option("--weights", help="Start from the weights of a run or checkpoint, at step 0, with a new optimizer."),
    ] = None,
    allow_changed: Annotated[
        str | None,
        typer.Option("--allow-changed", help="With --resume: what may have changed, [cyan]data[/], [cyan]seed[/] or both."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of weights and data order (train.seed).")] = None,
    seq: Annotated[str | None, typer.Option("--seq", help="Sequence length (job.seq).")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder: plan, metrics, measurement. Default: runs/MODEL-TIME.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a plan or a model under any layout, on CPUs or GPUs, measured and compared with the prediction.

    [dim]ultrascale train --model tiny --steps 20 --nproc 4 layout.dp=2 layout.tp=2[/]
    [dim]torchrun --nproc-per-node 8 -m ultrascale train plan.yaml --out runs/first layout.tp=4[/]
    [dim]ultrascale train --resume runs/first layout.tp=4[/]

    Sections: [cyan]layout.[/] dp tp pp cp zero sequence_parallel data_parallel context_parallel schedule virtual_stages mbs gas
    recompute offload; [cyan]train.[/] steps seed lr lr_schedule warmup_steps weight_decay clip eval_every data compress log …;
    [cyan]job.[/] seq batch_tokens precision gradients optimizer ema adapter_rank adapter_targets; [cyan]checkpoint.[/] every
    keep background save.
    """
    from ultrascale.launch import launcher
    from ultrascale.launch.rank_info import rank_info_from_env
    from ultrascale.show import compare as show
    from ultrascale.show.lines import periodic_progress
    from ultrascale.specs.folders import folder_name
    from ultrascale.train.checkpoint import run_named, run_of
    from ultrascale.train.request import from_words

    mine = rank_info_from_env() if nproc is None else None
    if resume is not None and mine is not None and (run_folder := run_named(resume)).resolve() == (out or run_folder).resolve():
        # A restart resumes from the newest checkpoint; the one on the command line may have been moved or deleted since.
        resume = run_folder if launcher.is_restart(run_folder, mine) else resume
    options = {"train.steps": steps, "train.seed": seed, "train.data": data, "job.seq": seq}
    first = mine is None or mine.rank == 0
    request = from_words(
        words or [],
        options,
        mine.world if mine else nproc,
        launcher.has_gpu(),
        model,
        resume,
        weights,
        allow_changed,
        first,
        periodic_progress("comparing train.data with the run's"),
        launcher.local_devices(),
    )
    if out is None:
        new = Path("runs") / f"{folder_name(request.job.model.name)}-{datetime.now():%Y%m%d-%H%M%S}"
        out = run_of(request.resume) if request.resume is not None else new
    if first:
        announce(request)
    run = launcher.train(request, out, nproc, detect_machine(request, first))
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
    world: Annotated[int | None, typer.Option("--world", help="Layouts of this many processes, without a plan.")] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", help="Layouts that use all of [cyan]pp,cp[/] (dp tp pp cp ep zero recompute)."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every layout, not a selection.")] = False,
    model: Annotated[str, typer.Option("--model", "-m", help="The model to verify on, with --world.")] = "tiny",
    precision: Annotated[
        str, typer.Option("--precision", help="fp32, bf16, fp16 or fp8; the bounds follow from its rounding.")
    ] = "fp32",
    runs: Annotated[
        int | None, typer.Option("--runs", min=1, max=100_000, help="This many random runs: killed, resumed, rolled back.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the random runs, with --runs.")] = 0,
    processes: Annotated[int, typer.Option("--processes", min=1, max=8, help="Most processes of one launch, with --runs.")] = 4,
    program: Annotated[
        Path | None, typer.Option("--program", help="One run from a file, such as --runs writes when one fails.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="[cyan]torchtitan[/], [cyan]megatron[/]: its program on the plan's ranks, not ours."),
    ] = None,
    dump: Annotated[
        Path | None, typer.Option("--dump", help="Tensors that any program saved with [cyan]measure.dump.Dump[/].")
    ] = None,
    against: Annotated[Path | None, typer.Option("--against", help="The tensors to compare --dump with.")] = None,
    name_map: Annotated[
        Path | None, typer.Option("--map", help="YAML: names in --dump to names in --against, with * and {}.")
    ] = None,
    perturbed: Annotated[
        list[Path] | None,
        typer.Option("--perturbed", help="--against's program with Dump(perturb=SEED), to measure bounds; several."),
    ] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Verify that a layout, or a whole run, computes the same as one process, within rounding.

    [dim]ultrascale verify plan.yaml[/]
    [dim]ultrascale verify --world 8 --only pp,cp[/]
    [dim]ultrascale verify --runs 50 --seed 7[/]
    [dim]ultrascale verify --dump a --against b[/]
    [dim]ultrascale verify --engine megatron plan.yaml[/]

    A layout: losses of three steps and every gradient; where they differ, the first module. A run: every loss, gradient norm,
    evaluation and expert count, and at its end every weight and optimizer state. Dumps: every tensor of two programs.
    Exit 1 if anything differs.
    """

    modes = [words, world is not None, runs is not None, program is not None, dump is not None]
    if sum(map(bool, modes)) != 1:
        raise SpecError(
            "verify takes a plan, --world, --runs, --program or --dump, one of them: try `ultrascale verify --world 4`"
        )
    of_layouts = {"--only": only, "--all": everything, "--model": model != "tiny", "--precision": precision != "fp32"}
    of_drawing = {"--seed": seed, "--processes": processes != 4}
    of_dumps = {"--against": against, "--map": name_map, "--perturbed": perturbed}
    if dump is None:
        _refuse(of_dumps, "this, only for --dump")
    else:
        _refuse({**of_layouts, **of_drawing}, "--dump, whose program has it")
        if not _verify_dumps(dump, against, name_map, perturbed or [], json_file):
            raise typer.Exit(NO)
        return
    if program is not None:
        _refuse({**of_layouts, **of_drawing}, "--program, whose file says it")
    elif runs is not None:
        _refuse(of_layouts, "--runs, which draws it")
    else:
        _refuse(of_drawing, "layouts, only for --runs")
    if engine is not None:
        _refuse({"--world": world, "--runs": runs, "--program": program}, "--engine, which runs a plan")
        same = _verify_engine(engine, words or [], precision, json_file)
    elif runs is not None or program is not None:
        same = _verify_runs(runs, seed, processes, program, json_file)
    else:
        same = _verify_layouts(words or [], world, only, everything, model, precision, json_file)
    if not same:
        raise typer.Exit(NO)


def _refuse(given: Mapping[str, object], what: str) -> None:

    for option, value in given.items():
        if value:
            raise SpecError(f"{option} is not for {what}: leave it out")


def _verify_layouts(
    words: list[str],
    world: int | None,
    only: str | None,
    everything: bool,
    model: str,
    precision: str,
    json_file: Path | None,
) -> bool:
    from ultrascale.show import verify as show
    from ultrascale.train import import_torch

    import_torch()
    from ultrascale.measure import verify as measure
    from ultrascale.measure.verify_layouts import to_verify

    job, layouts, notes = to_verify(words, world, only, everything, model, precision)
    for note in notes:
        echo(f"note: {note}", err=True)
    found = []
    echo(show.HEADING)
    for number, difference in enumerate(measure.verify(job, layouts), 1):
        found.append(difference)
        echo(f"{number:>{len(str(len(layouts)))}}/{len(layouts)}  {show.layout_row(difference)}")
    same = sum(one.ok for one in found)
    write_json(json_file, show.layouts_json(found))
    echo(f"{same} of {len(found)} layouts compute the same as one process ({measure.STEPS} steps, {job.precision})")
    return same == len(found)


def _verify_engine(engine: str, words: list[str], precision: str, json_file: Path | None) -> bool:
    from ultrascale.measure.verify_layouts import ENGINES, to_verify
    from ultrascale.show import verify as show
    from ultrascale.train import import_torch

    if engine not in ENGINES:
        raise SpecError(
            f"--engine is '{engine:.40}' but must be {' or '.join(ENGINES)}: "
            f"try `ultrascale verify --engine {ENGINES[0]} plan.yaml`"
        )
    job, (layout,), notes = to_verify(words, None, None, False, "", precision, few_layers=True)
    import_torch()
    from ultrascale.measure.verify_engine import check_installed, check_plan, runner_of, verify_engine

    runner = runner_of(engine)
    check_plan(runner, job, layout)
    with progress() as say:
        say(f"importing {engine}")
        check_installed(runner)
    if (seq := runner.seq(job, layout)) != job.seq:
        notes = (*notes, f"sequences of {seq} tokens, a multiple of cp times the 128 of FlexAttention's blocks")
    for note in notes:
        echo(f"note: {note}", err=True)
    with progress() as say:
        found = verify_engine(runner, job, layout, say)
    echo(f"{job.model.name}: {layout}")
    for line in show.dumps_report(found):
        echo(line)
    write_json(json_file, show.dumps_json(found))
    return found.ok


def _verify_dumps(
    dump: Path, against: Path | None, name_map: Path | None, perturbed: list[Path], json_file: Path | None
) -> bool:
    from ultrascale.show import verify as show
    from ultrascale.train import import_torch

    if against is None:
        raise SpecError(f"--dump needs another dump to compare with: try `ultrascale verify --dump {dump} --against b`")
    import_torch()
    from ultrascale.measure.dump_names import NameMap
    from ultrascale.measure.verify_dumps import compare_dumps

    names = None if name_map is None else NameMap.load(name_map)
    with progress() as say:
        found = compare_dumps(dump, against, names, perturbed, say)
    for line in show.dumps_report(found):
        echo(line)
    write_json(json_file, show.dumps_json(found))
    return found.ok


def _verify_runs(runs: int | None, seed: int, processes: int, program: Path | None, json_file: Path | None) -> bool:
    from ultrascale.measure.verify_programs import Program, ProgramGenerator
    from ultrascale.show import verify as show
    from ultrascale.train import import_torch

    given = None if program is None else Program.load(program)
    import_torch()
    from ultrascale.measure.verify_runs import check_program, shrink

    drawing, verdicts, count = ProgramGenerator(seed, processes), [], runs or 1
    echo(show.RUNS_HEADING)
    with progress() as say:
        for number in range(1, count + 1):
            say(f"run {number} of {count}")
            verdict = check_program(given or drawing.next())
            echo(f"{number:>{len(str(count))}}/{count}  {show.program_row(verdict)}")
            if not verdict.ok:
                verdict = shrink(verdict, say)
                folder = Path("verify-failed") / f"seed-{seed}-{number}"
                for line in show.failure(verdict, folder):
                    echo(line)
            verdicts.append(verdict)
    same = sum(one.ok for one in verdicts)
    write_json(json_file, show.programs_json(verdicts, drawing.covered))
    if runs is not None:
        for line in show.coverage(drawing):
            echo(line)
    echo(f"{same} of {count} runs are equal to one uninterrupted process, within rounding")
    return same == count


@app.command(rich_help_panel=RUN)
def runs(
    folder: Annotated[Path, typer.Argument(help="A folder of runs, or one run.", metavar="FOLDER")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """List runs: model, layout, last step and loss, size on the disk, and the checkpoints that can be resumed.

    [dim]ultrascale runs[/]
    [dim]ultrascale runs runs/first[/]
    """
    from ultrascale.measure.run_list import runs_in
    from ultrascale.show.runs import show_checkpoints, show_runs

    found = runs_in(folder)
    console = terminal()
    if as_json:
        print_json(found)
    elif not found:
        console.print(f"There is no run in {folder}: `ultrascale train --out {folder}/first …` writes one")
    else:
        show_runs(console, found)
        if len(found) == 1 and found[0].checkpoints:
            show_checkpoints(console, found[0])


@app.command(rich_help_panel=RUN)
def convert(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="[cyan]hf ./llama-dir runs/x[/]: convert a Hugging Face folder to a run. "
            "[cyan]runs/x hf ./out[/]: convert a run's newest checkpoint to such a folder, adapters merged. "
            "[cyan]runs/x peft ./out[/]: write its adapters alone.",
            metavar="hf FOLDER RUN | RUN hf FOLDER | RUN peft FOLDER",
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Format of written weights: bf16 or fp32.")] = "bf16",
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="A tokenizer.json, or a folder with one, to copy beside written weights."),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema", help="Write the moving mean of the weights, of a run with job.ema=true.")
    ] = False,
) -> None:
    """Convert weights from and to Hugging Face folders of safetensors, one tensor in memory at a time.

    Families: Llama, Llama4-text, Mistral, Ministral, Mixtral, Qwen2, Qwen3, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3,
    Kimi-K2, Gemma, Gemma2, Gemma3-text, Phi3, OLMo2, OLMo3, OLMoE, Granite, GraniteMoE, GLM, GLM4, GLM4-MoE, MiniMax-M2,
    SmolLM3, Starcoder2, GPT-2, GPT-NeoX, StableLM, Cohere, Cohere2, Nemotron, Arcee, Seed-OSS, Ernie4-5, EXAONE4,
    GPT-OSS, Qwen3-Next, Qwen3-5-text, Qwen3-5-MoE-text and Nemotron-H.

    [dim]ultrascale convert hf ./llama-dir runs/x && ultrascale train --resume runs/x --nproc 4 job.seq=2048 layout.tp=2[/]
    [dim]ultrascale convert runs/x hf ./out --tokenizer ./llama-dir[/]
    """
    from ultrascale import convert as weights
    from ultrascale.convert import PEFT
    from ultrascale.launch import launcher
    from ultrascale.show.lines import notes
    from ultrascale.specs.units import GIB

    with progress() as say:
        dest = weights.convert(
            words or [],
            dtype,
            tokenizer,
            progress=lambda done, total: say(f"{done / GIB:,.2f} of {total / GIB:,.2f} GiB"),
            gpu=launcher.has_gpu(),
            ema=ema,
        )
    loads = "peft loads it with PeftModel" if PEFT in (words or []) else "transformers loads it with AutoModelForCausalLM"
    follows = f"ultrascale train --resume {dest.folder}" if dest.is_run else loads
    notes(terminal(), dest.model.notes)
    terminal().print(f"Wrote {dest.folder}: {dest.model.name}, {dest.model.parameters:,} parameters; next: {follows}")


@app.command(rich_help_panel=RUN)
def doctor(
    file: Annotated[Path | None, typer.Argument(help="A plan to check on this machine.", metavar="PLAN.YAML")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Where runs are written.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Check this machine: versions, memory, GPUs, links, network, ports, limits, disk; and what would stop a plan here.

    [dim]ultrascale doctor plan.yaml[/]

    Exit 1 if something would stop the plan, or any run.
    """
    from ultrascale.measure.doctor import machine_findings, plan_findings
    from ultrascale.measure.doctor_facts import gather
    from ultrascale.show import doctor as show
    from ultrascale.specs.plan import Plan

    plan = None if file is None else Plan.load(file)
    with progress() as say:
        facts = gather(out, say)
        findings = machine_findings(facts) + ([] if plan is None else plan_findings(plan, facts))
    name = None if file is None else str(file)
    stopped = show.stopped(findings)
    if as_json:
        print_json({"plan": name, "stopped": stopped, "findings": findings})
    else:
        show.show_findings(terminal(), findings, name)
    if stopped:
        raise typer.Exit(NO)


app.add_typer(data_verbs, rich_help_panel=RUN)
