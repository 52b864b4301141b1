"""Verbs of measuring: compare, calibrate, rehearse, profile, bench."""

from __future__ import annotations

import os
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ultrascale.cli.bench import app as bench_verbs
from ultrascale.cli.common import (
    MEASURE,
    NO,
    JsonFileOption,
    JsonOption,
    NprocOption,
    announce,
    app,
    detect_machine,
    echo,
    print_json,
    progress,
    terminal,
    write_json,
)
from ultrascale.specs.errors import SpecError

# Before a profile records: compilation, the step whose memory is measured, the profiler's slow first step; on a GPU also those
# before and in which CUDA graphs are captured (kernels/cuda_graphs.py).
STEPS_BEFORE, STEPS_BEFORE_ON_GPU = 3, 7

if TYPE_CHECKING:
    from ultrascale.measure.foreign.request import ForeignEngine
    from ultrascale.measure.trace_analysis import Analysis
    from ultrascale.specs.plan import Plan


@app.command(rich_help_panel=MEASURE)
def compare(
    first: Annotated[Path, typer.Argument(help="A plan file, or a run's folder.", metavar="PLAN|RUN")],
    second: Annotated[Path, typer.Argument(help="The other; differences are relative to it.", metavar="PLAN|RUN")],
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
def calibrate(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, folders of them, a JSONL file of runs, or a CSV with the columns of data/published.csv.",
            metavar="RUNS…",
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the cluster here, for `plan --cluster`.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit a cluster's constants to measured runs, and judge the fit on runs left out.

    [dim]ultrascale calibrate runs/* -o cluster.yaml[/]
    [dim]ultrascale plan llama-3.2-1b --cluster cluster.yaml[/]

    Exit 1 if the old constants predict left-out runs better: then nothing is written.
    """
    from ultrascale.measure.calibrate import calibrate as calibrated
    from ultrascale.measure.calibrate_runs import load
    from ultrascale.show.calibrate import calibrate_json, show_calibration

    with progress() as say:
        found = calibrated(load(runs, lambda line: echo(f"note: {line}", err=True)), say)
    written = out if found.improved else None
    if written is not None:
        found.cluster.save(written)
    if as_json:
        print_json(calibrate_json(found))
    else:
        show_calibration(terminal(), found, written)
    if not found.improved:
        raise typer.Exit(NO)


@app.command(rich_help_panel=MEASURE)
def rehearse(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A plan; after [cyan]--[/] the arguments of another program.", metavar="[PLAN.YAML] [-- ARG…]"),
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", help="The rank to run. Default: 0.")] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", help="[cyan]all[/]: one rank of each pipeline stage; or one stage's number.")
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="[cyan]meta[/]: without memory, on any machine; [cyan]cuda[/]: on one real GPU.")
    ] = "meta",
    kernels: Annotated[
        str | None,
        typer.Option(
            "--kernels",
            help="[cyan]fused[/]: as a GPU runs it; [cyan]eager[/]: operator by operator. Default: as on the plan's machines.",
        ),
    ] = None,
    script: Annotated[
        str | None, typer.Option("--script", help="Rehearse a PyTorch program instead of our engine.", metavar="TRAIN.PY")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="Rehearse another engine: [cyan]torchtitan[/], [cyan]accelerate[/] (also [cyan]transformers[/] or "
            "[cyan]fsdp[/]), [cyan]deepspeed[/], [cyan]megatron[/].",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", help="With --engine: its configuration, instead of a plan.", metavar="FILE[:FUNCTION]"),
    ] = None,
    world: Annotated[int | None, typer.Option("--world", min=1, help="Ranks of the other program's world.")] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", help="The step of the other program to count. Default: 2; on a GPU 10.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=1, help="Seconds until the other program is ended. Default: 600.")
    ] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Run the real training program of one rank alone, without its peers: memory, FLOPs, collectives, beside the estimate.

    Exit 1 if the rank does not fit the plan's GPU, or if another program ends before the step that is counted.

    [dim]ultrascale rehearse plan.yaml --stage all[/]
    [dim]ultrascale rehearse --script train.py --world 64 --rank 8 -- --lr 1e-4[/]
    [dim]ultrascale rehearse plan.yaml --engine torchtitan[/]
    """
    from ultrascale.measure import rehearse as measure
    from ultrascale.show import rehearse as show
    from ultrascale.specs.plan import Plan
    from ultrascale.train import import_torch

    if script is not None or engine is not None:
        given = {"--stage": stage, "--kernels": kernels}
        for name in (name for name, value in given.items() if value is not None):
            raise SpecError(f"{name} is for plans in our engine; leave it out, and name a rank, such as --rank 0")
        _rehearse_foreign(words or [], script, engine, config, world, rank or 0, device, steps, timeout, json_file)
        return
    for name, value in {"--config": config, "--world": world, "--steps": steps, "--timeout": timeout}.items():
        if value is not None:
            raise SpecError(f"{name} is for another program: name it with --script train.py or --engine torchtitan")
    if len(words or []) != 1:
        raise SpecError("rehearse takes one plan, or --script, or --engine: try `ultrascale rehearse plan.yaml`")
    plan = Plan.load(Path((words or [])[0]))
    measure.check(plan.job, plan.layout, device)
    ranks, kernels = measure.ranks_of(plan.layout, rank, stage), measure.kernels_of(plan.job, plan.layout, device, kernels)
    import_torch()
    with progress() as say:
        say(f"rehearsing {len(ranks)} of {plan.layout.gpus:,} ranks")
        found = measure.rehearse(plan.job, plan.layout, ranks, device, say, kernels)
    report = measure.report(plan, found, device, kernels)
    show.show(terminal(), report)
    write_json(json_file, show.as_json(report))
    if not report.room.fits:
        raise typer.Exit(NO)


def _rehearse_foreign(
    words: list[str],
    script: str | None,
    engine: str | None,
    config: str | None,
    world: int | None,
    rank: int,
    device: str,
    steps: int | None,
    timeout: float | None,
    json_file: Path | None,
) -> None:
    from ultrascale.measure.foreign import compare, request, run
    from ultrascale.show import foreign as show
    from ultrascale.specs.plan import Plan

    if (script is None) == (engine is None):
        raise SpecError("--script and --engine name two programs: give one of them, such as --script train.py")
    counted = request.GPU_STEPS if device == "cuda" else request.FIRST_STEPS
    options = {"rank": rank, "device": device, "engine": engine, "steps": counted if steps is None else steps}
    with ExitStack() as stack:
        plan = None
        if engine is not None and config is None:
            if not words:
                raise SpecError(f"--engine is {engine} without anything to run: name a plan, or --config config.py:plan")
            plan = Plan.load(Path(words.pop(0)))
            if world not in (None, plan.layout.gpus):
                raise SpecError(f"--world is {world} but the plan has {plan.layout.gpus} GPUs: leave it out")
            folder = stack.enter_context(TemporaryDirectory(prefix="ultrascale-"))
            named = request.engine_named(engine)
            config, world = _exported(plan, named, Path(folder)), plan.layout.gpus
            words = [*(request.arguments_of(plan) if named.library else ()), *words]
            options["gpus_per_node"] = plan.job.cluster.gpus_per_node
        elif script is not None and config is not None:
            raise SpecError("--config goes with --engine; a script gets its arguments after --")
        if world is None:
            raise SpecError("--world is missing: say how many ranks there are, such as --world 8")
        program = script if script is not None else str(config)
        asked = request.ForeignRequest(program, world, arguments=tuple(words), **options)  # type: ignore[arg-type]
        with progress() as say:
            found = run.rehearse_foreign(asked, run.TIMEOUT_S if timeout is None else timeout, say)
    beside = None if plan is None else compare.compared(plan, named, found)
    report = compare.ForeignReport(asked, found, beside)
    show.show(terminal(), report)
    write_json(json_file, show.as_json(report))
    if beside is not None and not (beside.stands_in or beside.room.fits):
        raise typer.Exit(NO)


def _exported(plan: Plan, engine: ForeignEngine, folder: Path) -> str:
    """The plan in the engine's own configuration, of the version that is installed."""
    from ultrascale.export import targets, write

    old = engine.installed().startswith("0.2.")
    style = None if engine.library else "toml" if old else "current"
    exported = targets.engine_files(plan, engine.name, style, str(folder))
    refused = next((check for check in exported.checks if not check.runs_plan), None)
    if refused is not None:
        raise SpecError(refused.refusal())
    write.into(folder, exported.files, force=True)
    return str(folder / exported.checks[0].engine.config)


@app.command(rich_help_panel=MEASURE)
def profile(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="A plan to run, and changes to it.", metavar="[PLAN.YAML] [SECTION.FIELD=VALUE]…"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=1000, help="Steps to record, after three warm-up steps.")] = 5,
    nproc: NprocOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The run's folder: traces, memory. Default: runs/MODEL-profile-TIME. With --trace a page of all ranks, .html, "
            "and their merged trace beside it.",
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            "--trace",
            help="Read traces instead of running: files of torch.profiler, of any engine, exports of Nsight Systems (.sqlite), "
            "or folders.",
        ),
    ] = None,
    against: Annotated[
        list[Path] | None, typer.Option("--against", help="With --trace: traces of another run to compare with.")
    ] = None,
    flight_recorder: Annotated[
        list[Path] | None,
        typer.Option(
            "--flight-recorder",
            help="Read dumps of torch's flight recorder, or the output of ncclras: which rank did not join which collective.",
        ),
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="With --trace: the plan to compare with.")] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Profile a plan's training program, or read existing traces: where a step's time went, why, and what to change.

    [dim]ultrascale profile plan.yaml --steps 5 -o runs/x[/]
    [dim]ultrascale profile --trace trace.json.gz --plan plan.yaml[/]
    [dim]ultrascale profile --trace rank*.json.gz -o page.html[/]
    [dim]ultrascale profile --flight-recorder dumps/[/]

    Exit 1 if the flight recorder shows ranks that did not join a collective, or joined different ones.
    """
    from ultrascale.cli import traces

    if flight_recorder:
        if words or trace or out or plan:
            raise SpecError("--flight-recorder reads dumps alone: try `ultrascale profile --flight-recorder dumps/`")
        traces.read_dumps(flight_recorder, json_file)
    elif trace:
        traces.read_traces(traces.all_named(trace, words or []), against or [], out, plan, json_file)
    else:
        if not words:
            raise SpecError(traces.ONE_OF)
        for option, value in (("--plan", plan), ("--against", against)):
            if value:
                raise SpecError(f"{option} goes with --trace: a plan to run is named alone, `ultrascale profile plan.yaml`")
        found = _profiled(words, steps, nproc, out)
        if found is not None:
            traces.show_analysis(found, json_file)


def _profiled(words: list[str], steps: int, nproc: int | None, out: Path | None) -> Analysis | None:
    """None on other ranks of torchrun."""
    from ultrascale.launch import launcher
    from ultrascale.launch.rank_info import rank_info_from_env
    from ultrascale.specs.folders import folder_name
    from ultrascale.train import import_torch
    from ultrascale.train.request import from_words

    if "=" in words[0]:
        raise SpecError(f"{words[0]!r} changes a plan but none is named: try `ultrascale profile plan.yaml {words[0]}`")
    if any(word.startswith("train.steps") for word in words):
        raise SpecError("train.steps is what --steps says here, and some steps before those that are recorded: leave it out")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch's profiler writes to the error stream
    mine = rank_info_from_env() if nproc is None else None
    before = STEPS_BEFORE_ON_GPU if launcher.has_gpu() else STEPS_BEFORE
    settings = {"train.steps": before + steps, "checkpoint.save": "false"}
    world = mine.world if mine else nproc
    request = from_words(words, settings, world, launcher.has_gpu(), devices=launcher.local_devices())
    if (ramp := request.training.batch_ramp) is not None:
        smaller = ramp.partition(":")[0]
        raise SpecError(
            f"train.batch_ramp is {ramp} but the steps of a profile have one batch: leave it out, or try "
            f"job.batch_tokens={smaller} for a step of the ramp"
        )
    if (stages := request.training.seq_stages) is not None:
        raise SpecError(
            f"train.seq_stages is {stages} but the steps of a profile have one length: leave it out, or try "
            f"job.seq={stages.partition(':')[0]} for a step of the first stage"
        )
    folder = out or Path("runs") / f"{folder_name(request.job.model.name)}-profile-{datetime.now():%Y%m%d-%H%M%S}"
    import_torch()
    from ultrascale.measure import profile as measure

    first = mine is None or mine.rank == 0
    if first:
        announce(request)
    machine = detect_machine(request, first)
    run = launcher.train(request, folder, nproc, machine, observe=partial(measure.Profiler, out=folder, steps=steps))
    return None if run is None else measure.combine_ranks(run)


app.add_typer(bench_verbs, rich_help_panel=MEASURE)
