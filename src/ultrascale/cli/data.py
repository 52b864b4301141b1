"""Verbs of `ultrascale data`: make token sets from texts, and inspect them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ultrascale.cli.common import JsonOption, echo, print_json

if TYPE_CHECKING:
    from ultrascale.data.sets import TokenSetSummary
    from ultrascale.data.tokenize import TokenizeProgress

app = typer.Typer(
    name="data",
    help="Make token sets from texts, and inspect them.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EVERY_S = (0.2, 10.0)  # between two lines of progress: on a terminal, elsewhere


@app.command()
def tokenize(
    source: Annotated[
        str,
        typer.Argument(
            help="A [cyan].txt[/] (one document), [cyan].jsonl[/], [cyan].jsonl.gz[/] or [cyan].parquet[/] file (one per line "
            "or row), a folder of them, [cyan]stdlib[/]: Python's own library, or [cyan]hf://datasets/ORG/NAME[/].",
            metavar="INPUT",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the set; it must be new or empty.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            "-t",
            help="A Hugging Face [cyan]tokenizer.json[/], or [cyan]hf://ORG/NAME[/]. Default: bytes, a vocabulary of 256.",
            metavar="FILE",
        ),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", help="Processes; the output does not depend on their number.")] = 2,
    field: Annotated[str, typer.Option("--field", help="The field or column that holds the text.")] = "text",
    eod: Annotated[
        str | None,
        typer.Option("--eod", help="The end-of-document token, if the tokenizer does not define one.", metavar="TOKEN"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tokenize texts into a token set to train on. After a kill, the same command resumes.

    [dim]ultrascale data tokenize ./texts -o data/web --tokenizer tokenizer.json --workers 8[/]
    [dim]ultrascale train --model tiny train.data=data/web[/]
    """
    from ultrascale.data.tokenize import tokenize as work

    with _Line() as line:
        facts = work(source, out, tokenizer, workers, field, eod, line.show)
    if as_json:
        print_json({"path": str(out), **facts.model_dump()})
    else:
        echo(
            f"{out}: {facts.tokens:,} tokens ({facts.dtype}) in {facts.documents:,} documents, vocabulary {facts.vocab:,} "
            f"({facts.tokenizer}). Train on it with train.data={out}"
        )


@app.command()
def chat(
    source: Annotated[
        str,
        typer.Argument(
            help="A [cyan].jsonl[/], [cyan].jsonl.gz[/] or [cyan].parquet[/] file of conversations (one per line or row), a "
            "folder of them, or [cyan]hf://datasets/ORG/NAME[/].",
            metavar="INPUT",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder of the set; it must be new or empty.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            "-t",
            help="The folder of a Hugging Face tokenizer or model, its [cyan]tokenizer.json[/], or [cyan]hf://ORG/NAME[/]. "
            "Default: bytes, with a plain template.",
            metavar="FOLDER",
        ),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option("--template", help="A chat template (Jinja), if not the tokenizer's own.", metavar="FILE"),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", help="Processes; the output does not depend on their number.")] = 2,
    eod: Annotated[
        str | None,
        typer.Option("--eod", help="The token for padding, if the tokenizer names no end of a document.", metavar="TOKEN"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Tokenize conversations through a chat template, to train on the assistant's answers alone. A repeated command resumes.

    [dim]ultrascale data chat chats.jsonl -o data/chats --tokenizer ./llama[/]
    [dim]ultrascale train --weights runs/llama job.adapter_rank=16 train.data=data/chats[/]
    """
    from ultrascale.data.tokenize import tokenize_chats

    with _Line() as line:
        facts = tokenize_chats(source, out, tokenizer, workers, template, eod, line.show)
    if as_json:
        print_json({"path": str(out), **facts.model_dump()})
    else:
        echo(
            f"{out}: {facts.documents:,} conversations, {facts.tokens:,} tokens ({facts.dtype}), {facts.answers or 0:,} of "
            f"them in answers, vocabulary {facts.vocab:,} ({facts.tokenizer}). Train on it with train.data={out}"
        )


@app.command()
def info(
    path: Annotated[
        str,
        typer.Argument(help="A folder of [cyan]data tokenize[/], a [cyan].bin[/], or the name of Megatron's two files."),
    ],
    as_json: JsonOption = False,
) -> None:
    """Print tokens, documents, vocabulary and source of a token set.

    [dim]ultrascale data info data/web[/]
    """
    from ultrascale.data.sets import info as summarize

    found = summarize(path)
    if as_json:
        print_json(found)
        return
    for name, value in _rows(found):
        echo(f"{name:<18}{value}")


def _rows(found: TokenSetSummary) -> list[tuple[str, str]]:
    kinds = {"ultrascale": "ultrascale", "megatron": "Megatron .bin and .idx", "flat": "flat, without a header"}
    vocab = f"{found.vocab:,}" if found.vocab is not None else f"not stated; tokens up to {found.largest_seen:,} found"
    documents = f"{found.documents:,}" if found.kind != "flat" else "not marked"
    rows = [
        ("format", kinds[found.kind]),
        ("tokens", f"{found.tokens:,} ({found.dtype})"),
        ("documents", documents),
        ("longest document", f"{found.longest_document:,} tokens"),
        ("mean document", f"{found.mean_document:,.1f} tokens"),
        ("vocabulary", vocab),
    ]
    if found.facts is not None and found.facts.answers is not None:
        rows.append(("answers", f"{found.facts.answers:,} tokens, {found.facts.answers / found.tokens:.1%}"))
    if found.facts is not None:
        inputs, end = found.facts.inputs, "documents end with" if found.facts.answers is None else "padding"
        rows += [
            ("tokenizer", f"{found.facts.tokenizer}, {end} {found.facts.eod}"),
            ("made from", f"{inputs.path}: {inputs.files:,} files, {inputs.bytes:,} bytes"),
        ]
    return rows


class _Line:
    """Progress on the error stream: one line that is rewritten on a terminal, a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty()
        self.shown_at = time.monotonic() if not self.terminal else 0.0

    def show(self, progress: TokenizeProgress) -> None:
        now = time.monotonic()
        if now - self.shown_at < _EVERY_S[0 if self.terminal else 1]:
            return
        self.shown_at = now
        text = progress_line(progress)
        sys.stderr.write(f"\r{text}\x1b[K" if self.terminal else f"{text}\n")
        sys.stderr.flush()

    def __enter__(self) -> _Line:
        return self

    def __exit__(self, *_: object) -> None:
        if self.terminal and self.shown_at:
            sys.stderr.write("\n")


def progress_line(progress: TokenizeProgress) -> str:
    left = progress.eta_s
    minutes, seconds = divmod(round(left or 0), 60)
    hours, minutes = divmod(minutes, 60)
    ends = "" if left is None else f", {hours}:{minutes:02}:{seconds:02} left"
    share = progress.bytes / max(1, progress.total_bytes)
    return (
        f"{share:6.1%}  {progress.documents:,} documents, {progress.bytes_per_s / 1e6:.1f} MB/s, "
        f"{progress.tokens_per_s:,.0f} tokens/s{ends}"
    )
