"""Verbs of `ultrascale bench`: layouts, kernels, ladders, collectives, hardware."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from ultrascale.cli.common import NO, JsonFileOption, PlanArgument, progress, select, terminal, write_json
from ultrascale.specs.errors import RunError, SpecError

app = typer.Typer(
    name="bench",
    help="Measure on this machine: layouts, techniques step by step, collectives, kernels, hardware.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


ForceOption = Annotated[bool, typer.Option("--force", help="On CPUs: more processes than this machine has cores.")]


def check_cores(nproc: int | None, gpus: int, force: bool) -> None:
    """Refuses processes that would share a core, whose times say nothing about a machine."""
    from ultrascale.launch.machine import cores

    most = max(2, cores())  # two are the least that communicate
    if nproc is not None and not gpus and nproc > most and not force:
        raise SpecError(f"--nproc is {nproc} but this machine has {cores()} cores: try {most}, or add --force")


@app.command()
def layouts(
    plan: PlanArgument,
    vary: Annotated[
        str | None,
        typer.Option(
            "--vary",
            help="Change one field at a time of the layout: [cyan]tp,mbs,recompute[/], or with values, [cyan]mbs=1:2:4[/].",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", help="Time limit: [cyan]30m[/]. Without --vary: measure the planner's best candidates."),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="How many of the planner's candidates to measure.", min=1, max=200)] = 8,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", help="Processes. Default: as many as the plan has GPUs.", min=1, max=1024)
    ] = None,
    force: ForceOption = False,
    steps: Annotated[int, typer.Option("--steps", help="Steps of a trial; the first two warm up.", min=3, max=2**20)] = 10,
    timeout: Annotated[str, typer.Option("--timeout", help="A trial that takes longer has failed.")] = "10m",
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            help="Where trials are stored: [cyan]sqlite:///study.db[/], or [cyan]postgresql://user@host/db[/], which "
            "several machines can share. Default: study.db in the folder.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A folder for runs and winner.yaml. Default: runs/layouts-MODEL.")
    ] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Measure layouts of a plan's job here, each in new processes of the real engine; predicted beside measured.

    [dim]ultrascale bench layouts plan.yaml --vary tp,mbs,recompute --nproc 2[/]
    [dim]ultrascale bench layouts plan.yaml --budget 30m[/]

    [cyan]--vary[/] changes one field at a time; dp and gas follow, so processes and batch stay the same. [cyan]--budget[/]
    takes the planner's ranking for this machine, stops trials that are clearly slower than the best, writes winner.yaml and
    prints how much slower the planner's first choice was.

    A trial that runs out of memory, crashes, hangs or is killed is a row with the reason. The same command resumes an
    interrupted bench: measured and failed trials are not repeated.
    """
    from ultrascale.launch import launcher, machine
    from ultrascale.measure import bench_layouts as measure
    from ultrascale.specs.folders import folder_name
    from ultrascale.specs.plan import Plan

    if vary is None and budget is None:
        raise SpecError("bench layouts needs to know what to measure: try --vary tp,mbs,recompute or --budget 30m")
    budget_s = None if budget is None else measure.duration(budget, "--budget")
    limit_s = measure.duration(timeout, "--timeout")
    names, loaded = machine.gpu_names(), Plan.load(plan)
    check_cores(nproc, len(names), force)
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
            say("measuring this machine, for predictions to compare with")
            cluster = launcher.detect_cluster(base.layout.gpus, base.job.precision)
            if vary is not None:
                candidates = measure.varied(loaded, base, vary, cluster)
            elif cluster is None:
                raise SpecError(f"the planner knows no rates of {names[0] if names else 'this machine'}: try --vary tp,mbs")
            else:
                say("asking the planner")
                candidates = measure.ranked(base, cluster, top)
        for note in base.notes:
            terminal(to_errors=True).print(f"note: {note}")
        stopped = False
        with show.watching(candidates) as changed:
            sweep = measure.Sweep(candidates, study, folder, cluster, limit_s, budget_s, changed)
            try:
                sweep.run()
            except KeyboardInterrupt:
                stopped = True
    rows, found, file = sweep.rows, measure.verdict(sweep.rows), None
    if found is not None and candidates.ranked:
        file = measure.winning_plan(candidates, found.winner.candidate, cluster).save(folder / "winner.yaml")
    write_json(json_file, show.layouts_json(candidates, rows, found, study.shown, study.name))
    show.show_layouts(console, candidates, rows, found, file)
    if stopped:
        raise RunError("stopped by Ctrl-C: measured trials are kept, and the same command continues with the rest")
    if found is None:
        raise typer.Exit(NO)


@app.command()
def kernels(
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            help="A selection: [cyan]norm,rotary,gate[/] (of a block), [cyan]loss,adamw[/] (of a step), "
            "[cyan]window,documents[/] (attention under a mask).",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="Tokens in a micro-batch: [cyan]16k[/]. Default: 32k for 1b, 16k for 3b.")
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(
            "--hidden", help="One model of this width, MLPs of four times it and heads of 128, instead of the two of 1b and 3b."
        ),
    ] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Compare our GPU kernels with plain torch, torch.compile and Liger-Kernel: same inputs, forward and backward.

    [dim]ultrascale bench kernels --only norm,gate --json kernels.json[/]

    Times are medians of GPU events with a cold L2 cache; the largest difference is that from plain torch, over the largest
    number. A kernel of ours stays where it is faster than the best other: the last column says [cyan]keep[/] or
    [cyan]slower[/].
    """
    kernel_contest().run(only, tokens, hidden, json_file)


def kernel_contest() -> ModuleType:
    """benchmarks/kernel_contest: in the package if it was installed from a wheel, in a clone beside src/."""

    package = Path(__file__).parents[1]
    places = package / "_benchmarks", package.parents[1] / "benchmarks"
    folder = next((place for place in places if (place / "kernel_contest").is_dir()), None)
    if folder is None:
        raise SpecError(f"the kernels to compare are not in {' or '.join(map(str, places))}: install ultrascale again")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return import_module("kernel_contest.contest")


@app.command()
def ladders(
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            help="A selection: [cyan]data, zero, tensor, context, pipeline[/] (several processes), "
            "[cyan]recompute, precision, kernels[/] (one). Default: all.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A preset or a model file. Default: llama-3.2-1b on GPUs, tiny on a CPU."),
    ] = None,
    seq: Annotated[
        str | None, typer.Option("--seq", "-s", help="Tokens of a sequence. Default: 4096 on GPUs, 128 on a CPU.")
    ] = None,
    mbs: Annotated[
        int | None,
        typer.Option("--mbs", help="Sequences in a micro-batch. Default: 8 on GPUs, 2 on a CPU.", min=1, max=2**20),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", "-n", help="Processes. Default: one per GPU, or 2 on a CPU.", min=1, max=1024)
    ] = None,
    force: ForceOption = False,
    steps: Annotated[int, typer.Option("--steps", help="Measured steps, after two warm-up steps.", min=1, max=2**20)] = 8,
    json_file: JsonFileOption = None,
) -> None:
    """Run each technique step by step in the real engine: time, memory, and the gain of each step over the one before.

    [dim]ultrascale bench ladders --only data,pipeline[/]
    [dim]ultrascale bench ladders --only kernels --model llama-3.2-1b --seq 4096 --mbs 8[/]

    Each rung is a separate run. Step time, tensors at the peak, exposed communication and pipeline bubble are printed beside
    the estimate for this machine. A rung that cannot run here, or runs out of memory, is a row with the reason.
    """
    from functools import cache

    from ultrascale.launch import launcher, machine
    from ultrascale.measure import bench_ladders as measure
    from ultrascale.show import bench as show
    from ultrascale.specs.model import Model
    from ultrascale.specs.units import tokens as count
    from ultrascale.train import import_torch

    names, gpus = select(only, measure.LADDERS, "ladder"), len(machine.gpu_names())
    check_cores(nproc, gpus, force)
    usual = ("llama-3.2-1b", "4096", 8, gpus) if gpus else ("tiny", "128", 2, 2)
    world = nproc or usual[3]
    if gpus and world > gpus:
        raise SpecError(f"--nproc is {world} but this machine shows {gpus} GPUs: try {gpus}")
    length, size = count(seq or usual[1], "--seq", "4096"), mbs or usual[2]
    here = measure.LadderMachine(
        Model.load(model or usual[0]), length, size, steps, world, gpus, cache(launcher.detect_cluster)
    )
    import_torch()
    found, console = list[measure.Ladder](), terminal()
    with progress() as say:
        for name in names:
            found.append(measure.climb(name, here, say))
            show.show_ladder(console, found[-1])
            write_json(json_file, {"ladders": found})  # after each, so an interrupted bench keeps its results
    if not any(rung.measured for ladder in found for rung in ladder.rungs):
        raise typer.Exit(NO)


@app.command()
def collectives(
    only: Annotated[
        str | None,
        typer.Option("--only", help="A selection: [cyan]all_reduce,all_gather[/]. Default: all ten."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", "-n", help="Processes. Default: one per GPU, or 2 on a CPU; under torchrun its own.", min=2),
    ] = None,
    force: ForceOption = False,
    sizes: Annotated[str, typer.Option("--sizes", help="Bytes: [cyan]1k..64M[/] in fours, or [cyan]4k,1M[/].")] = "1k..64M",
    groups: Annotated[
        str | None, typer.Option("--groups", help="Group sizes: [cyan]2,4[/]. Default: powers of two, and all.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", "-o", help="Also write every figure there, for machines.", metavar="OUT.JSON")
    ] = None,
) -> None:
    """Time the playbook's collectives over sizes and groups: gloo between processes, NCCL between GPUs.

    [dim]ultrascale bench collectives --nproc 4 --sizes 1k..16M --groups 2,4[/]
    [dim]torchrun --nproc-per-node 8 -m ultrascale bench collectives --json collectives.json[/]

    Algorithm and bus bandwidth are those of nccl-tests. Each collective on each group also gets its line: a latency (alpha) and
    a bandwidth (beta), fitted to the relative errors of all sizes.
    """
    from ultrascale.launch import machine
    from ultrascale.launch.rank_info import rank_info_from_env
    from ultrascale.measure import bench_collectives as measure
    from ultrascale.show import bench as show

    mine, gpus = (rank_info_from_env() if nproc is None else None), len(machine.gpu_names())
    check_cores(nproc, gpus, force)
    world = mine.world if mine else nproc or gpus or 2
    if world == 1 or (mine is None and gpus == 1):
        alone = "this machine shows one GPU" if gpus else "there is one process"
        raise SpecError(f"{alone}, so there is nothing to measure: on CPUs try CUDA_VISIBLE_DEVICES= with --nproc 2")
    if mine is None and gpus and world > gpus:
        raise SpecError(f"--nproc is {world} but this machine shows {gpus} GPUs: try {gpus}")
    params = select(only, measure.OPS, "collective"), measure.sizes(sizes), measure.groups(groups, world)
    with progress() as say:
        report = measure.measure_as(mine, *params, bool(gpus)) if mine else measure.measure(*params, world, bool(gpus), say)
    if report is None:
        return
    write_json(json_file, show.collectives_json(report))
    show.show_collectives(terminal(), report)
    if not report.points:
        raise typer.Exit(NO)


@app.command()
def hardware(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the cluster there, for `plan --cluster`.")] = None,
    nproc: Annotated[
        int, typer.Option("--nproc", "-n", help="Processes that will train: one per GPU, or so many on a CPU.", min=1, max=1024)
    ] = 1,
    force: ForceOption = False,
    json_file: JsonFileOption = None,
) -> None:
    """Measure this machine's rates in a training step, and write them as a cluster to plan with.

    [dim]ultrascale bench hardware -o cluster.yaml[/]
    [dim]ultrascale plan llama-3.2-1b --cluster cluster.yaml[/]

    On a GPU, matmuls, attention and copies alternate for some seconds, until the power limit sets the clock as in training;
    the links of several GPUs are timed by all-reduces. On a CPU, matmuls, attention, copies and gloo are timed in as many
    processes as will train.
    """
    from ultrascale.launch import launcher
    from ultrascale.measure import bench_hardware
    from ultrascale.show.bench import show_hardware
    from ultrascale.train import import_torch

    check_cores(nproc, int(launcher.has_gpu()), force)
    with progress() as say:
        say("measuring this machine, some ten seconds")
        import_torch()
        from ultrascale.launch.machine import detect
        from ultrascale.measure.bench_collectives import fit_link, measure, sizes

        found = detect(nproc)
        if launcher.has_gpu():
            found = bench_hardware.measured(found)
            if nproc > 1:
                say(f"timing all-reduces between {nproc} GPUs")
                found = fit_link(found, measure(["all_reduce"], sizes("1k..256M"), [nproc], nproc, True, say).points)
    if out is not None:
        found.save(out)
    write_json(json_file, {"cluster": found.to_mapping()})
    show_hardware(terminal(), found, out)
