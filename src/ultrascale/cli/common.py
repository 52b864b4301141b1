"""The app, help panels, options, exit codes and output functions that the verbs share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ultrascale.specs.errors import SpecError, nearest

if TYPE_CHECKING:
    from rich.console import Console

    from ultrascale.specs.cluster import Cluster
    from ultrascale.specs.job import Job
    from ultrascale.train.request import Request

app = typer.Typer(
    name="ultrascale",
    help="The Ultra-Scale Playbook as software: plan a training run, run it, verify it, measure it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NO, BAD_INPUT = 1, 2
DEFAULT_SEQ = 8192
PLAN, RUN, MEASURE, EXPORT = "Plan", "Run", "Measure", "Report and export"

PlanArgument = Annotated[Path, typer.Argument(help="A plan written by [cyan]ultrascale plan -o[/].", metavar="PLAN.YAML")]
NprocOption = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        min=1,
        max=1024,
        help="Processes to start here; not needed under torchrun or srun. Default: as many as the plan has GPUs, if this "
        "machine has as many GPUs (or cores); otherwise one.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
JsonFileOption = Annotated[Path | None, typer.Option("--json", help="Also write all figures as JSON.", metavar="OUT.JSON")]


def terminal(to_errors: bool = False) -> Console:
    from ultrascale.show import lines

    return lines.terminal(to_errors)


def progress() -> AbstractContextManager[Callable[[str], None]]:
    from ultrascale.show import lines

    return lines.progress()


def echo(text: str, err: bool = False) -> None:
    """Print a line that may contain text of a user."""
    from ultrascale.specs.printable import printable

    typer.echo(printable(text), err=err)


def plain(value: Any) -> Any:
    """A dataclass, a pydantic model or a path as JSON has it; for `default` of json.dumps."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return str(value) if isinstance(value, Path) else value.model_dump(mode="json")


def print_json(data: Any) -> None:
    from ultrascale.specs.printable import CONTROL_CODES

    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False, default=plain)
    # json escapes the first 32 of them in texts, and ends lines with one.
    sys.stdout.write(text.translate({code: f"\\u{code:04x}" for code in CONTROL_CODES if code >= 32}) + "\n")


def write_json(file: Path | None, data: Any) -> None:
    """Write the figures to the file of `--json`, if given."""
    from ultrascale.specs.files import write_text

    if file is not None:
        write_text(file, json.dumps(data, indent=1, allow_nan=False, default=plain) + "\n")


def announce(request: Request) -> None:
    """What is about to run, on the error stream."""
    from ultrascale.launch import launcher
    from ultrascale.train.log import batch_line

    console = terminal(to_errors=True)
    training = request.training
    batch = batch_line(request.layout, request.job.seq, training.batch_ramp, training.seq_stages)
    console.print(f"{request.job.model.name}: {request.layout}; {batch}")
    if launcher.has_gpu():
        console.print(request.job.mfu_convention)
    if request.resume is not None:
        console.print(f"resuming from {request.resume}, to step {request.training.steps}")
    for note in request.notes:
        console.print(f"note: {note}")


def detect_machine(request: Request, first: bool) -> Cluster | None:
    """This machine, for a prediction to compare with; on a CPU only its first process measures it."""
    from ultrascale.launch import launcher

    if not first and not launcher.has_gpu():
        return None
    with progress() as say:
        say("measuring this machine, for a prediction to compare with")
        return launcher.detect_cluster(request.layout.gpus, request.job.precision, request.training.timeout_s)


def select(only: str | None, known: Sequence[str], noun: str) -> list[str]:
    """Which of the known words `--only` names, in their order; all of them without it."""
    from ultrascale.specs.validate import shown

    if only is None:
        return list(known)
    words = [word.strip().lower().replace("-", "_") for word in only.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise SpecError(f"--only is {shown(only)}: {nearest(word, known)}")
    if not words:
        raise SpecError(f"--only names no {noun}: try {known[0]}, or several of {','.join(known)}")
    return [word for word in known if word in words]


def job_from_options(
    model: str,
    cluster: str | Cluster,
    batch_tokens: str,
    seq: str | None,
    precision: str | None = None,
    gradients: str = "fp32",
    optimizer: str = "adamw",
    attention: str = "flash",
    total_tokens: str | None = None,
    framework: str = "ultrascale",
) -> Job:
    """A Job from words of the command line: presets or files, sizes such as 4M and 8k, `here`.

    Without a sequence length it is 8192 tokens, or as many as the model takes; without a precision bf16, on a
    CPU fp32.
    """
    from ultrascale.specs import units
    from ultrascale.specs.framework import Framework
    from ultrascale.specs.job import Job
    from ultrascale.specs.model import Model
    from ultrascale.specs.validate import build

    known, place = Model.load(model), cluster_named(cluster) if isinstance(cluster, str) else cluster
    engine = Framework.own(place.gpu.name) if framework == "ultrascale" else Framework.load(framework)
    return build(
        Job,
        {
            "model": known,
            "cluster": place,
            "seq": min(DEFAULT_SEQ, known.max_positions or DEFAULT_SEQ)
            if seq is None
            else units.tokens(seq, "--seq", "8192 or 8k"),
            "batch_tokens": units.tokens(batch_tokens, "--batch-tokens"),
            "precision": precision or ("fp32" if place.gpu.name == "cpu" else "bf16"),
            "gradients": gradients,
            "optimizer": optimizer,
            "attention": "plain" if engine.attention.startswith("plain") else attention,
            "framework": engine,
            "total_tokens": None if total_tokens is None else units.total_tokens(total_tokens, "--total-tokens"),
        },
        "job",
    )


def cluster_named(name: str) -> Cluster:
    """A preset, a file, or `here`: this machine, its GPUs or two processes of its CPU; `4xhere` for four."""
    from ultrascale.specs.cluster import Cluster

    count, _, place = name.strip().lower().rpartition("x")
    if place != "here" or not (count == "" or (count.isascii() and count.isdigit() and 1 <= len(count) <= 4 and int(count))):
        return Cluster.load(name)
    from ultrascale.launch import machine
    from ultrascale.train import import_torch

    import_torch()
    return machine.detect(int(count) if count else len(machine.gpu_names()) or 2)
