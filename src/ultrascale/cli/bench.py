"""`ultrascale bench`: measure on this machine, one thing beside another in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ultrascale.cli.common import JsonFileOption, write_json

app = typer.Typer(
    name="bench",
    help="Measure on this machine: kernels against each other, techniques step by step.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
def kernels(
    only: Annotated[
        str | None,
        typer.Option(
            "--only",
            help="Some of them: [cyan]norm,rotary,gate[/] (of a block), [cyan]loss,adamw[/] (of a step), "
            "[cyan]window,documents[/] (attention under a mask).",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", help="In a micro-batch: [cyan]16k[/]. Default: 32k for 1b, 16k for 3b.")
    ] = None,
    hidden: Annotated[
        int | None,
        typer.Option(
            "--hidden", help="One model of this width, MLPs of four times it and heads of 128, instead of the two of 1b and 3b."
        ),
    ] = None,
    json_file: JsonFileOption = None,
) -> None:
    """Race each of our GPU kernels against plain torch, torch.compile and Liger-Kernel: same inputs, forward and backward.

    [dim]ultrascale bench kernels --only norm,gate --json kernels.json[/]

    Times are medians of GPU events with a cold L2 cache; the largest difference is that from plain torch, over the largest
    number. A kernel of ours stays where it is faster than the best other: the last column says [cyan]keep[/] or
    [cyan]slower[/].
    """
    from ultrascale.measure.kernels import chosen, shapes
    from ultrascale.show import kernels as show
    from ultrascale.show.lines import progress, terminal
    from ultrascale.specs.errors import SpecError
    from ultrascale.specs.units import tokens as count
    from ultrascale.train import launch

    names, asked = chosen(only), shapes(None if tokens is None else count(tokens, "--tokens", "16k"), hidden)
    if not launch.has_gpu():
        raise SpecError(
            "bench kernels races kernels on a GPU but nvidia-smi shows none here: run it on a machine that has one; "
            "docs/kernels/README.md holds the table of an H200"
        )
    launch.import_torch()
    from ultrascale.measure.kernels_timed import measure

    with progress() as say:
        for report in measure(names, asked, say):
            write_json(json_file, show.kernels_json(report))  # after each, so that a bench that is ended keeps what it found
    show.show_kernels(terminal(), report)


@app.command()
def ladders(
    only: Annotated[str | None, typer.Option("--only", help="[cyan]kernels[/]: eager, compile, fused. Default: all.")] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A preset ([cyan]llama-3.2-1b[/]) or a model file.")
    ] = "llama-3.2-1b",
    seq: Annotated[str, typer.Option("--seq", "-s", help="Sequence length in tokens: [cyan]4096[/] or [cyan]4k[/].")] = "4096",
    mbs: Annotated[int, typer.Option("--mbs", help="Sequences in a step.", min=1, max=2**20)] = 8,
    steps: Annotated[int, typer.Option("--steps", help="Steps that count, after those that warm up.", min=1, max=2**20)] = 10,
    json_file: JsonFileOption = None,
) -> None:
    """Climb a technique step by step in the real engine: what each step costs, holds, and bought over the one before.

    [dim]ultrascale bench ladders --only kernels --model llama-3.2-1b --seq 4096 --mbs 8[/]

    Each rung trains in a process of its own on one GPU. One that runs out of memory is a row that says so.
    """
    from ultrascale.measure import ladders as climb
    from ultrascale.show import kernels as show
    from ultrascale.show.lines import progress, terminal
    from ultrascale.specs.errors import SpecError
    from ultrascale.specs.model import Model
    from ultrascale.specs.units import tokens as count
    from ultrascale.train import launch

    climb.chosen(only)
    loaded, length = Model.load(model), count(seq, "--seq", "4096")
    if not launch.has_gpu():
        raise SpecError(
            "--only kernels climbs from eager to torch.compile to fused kernels, which the engine uses on a GPU alone, and "
            "nvidia-smi shows none here: a CPU runs operator by operator, and `ultrascale train` measures that"
        )
    with progress() as say:
        say("looking at this machine")
        machine = launch.machine(1, "bf16")
        found = climb.kernels(loaded, machine, length, mbs, steps, say)
    write_json(json_file, show.ladder_json(found))
    show.show_ladder(terminal(), found)


@app.command()
def hardware(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write the cluster there, for `plan --cluster`.")] = None,
    nproc: Annotated[
        int, typer.Option("--nproc", "-n", help="Processes that will train: one per GPU, or so many on a CPU.", min=1, max=1024)
    ] = 1,
    json_file: JsonFileOption = None,
) -> None:
    """Measure what this machine gives a training step, and write it down as a cluster to plan with.

    [dim]ultrascale bench hardware -o cluster.yaml[/]
    [dim]ultrascale plan llama-3.2-1b --cluster cluster.yaml[/]

    On a GPU, products, attention and copies take turns for some seconds, until the power limit sets the clock as it does in
    training; links between GPUs are not measured. On a CPU, products, attention, copies and gloo are timed in as many
    processes as will train.
    """
    from ultrascale.measure import hardware as measuring
    from ultrascale.show.hardware import hardware_json, show_hardware
    from ultrascale.show.lines import progress, terminal
    from ultrascale.train import launch

    with progress() as say:
        say("measuring this machine, some ten seconds")
        launch.import_torch()
        from ultrascale.train.machine import detect

        found = detect(nproc)
        if launch.has_gpu():
            found = measuring.measured(found)
    if out is not None:
        found.save(out)
    write_json(json_file, hardware_json(found))
    show_hardware(terminal(), found, out)
