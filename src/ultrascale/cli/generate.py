"""The verb `generate`: text of a trained model."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from ultrascale.cli.common import RUN, JsonOption, app, print_json, terminal


@app.command(rich_help_panel=RUN)
def generate(
    path: Annotated[
        str,
        typer.Argument(
            help="A run (its newest checkpoint), a checkpoint of any layout, a Hugging Face folder, or [cyan]hf://ORG/NAME[/].",
            metavar="RUN_OR_CHECKPOINT",
        ),
    ],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue. Default: the start of a document.")] = "",
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="The most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0: always the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from this many of the likeliest tokens; 0: from all.")] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Of the draws.", min=0, max=2**63 - 1)] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="A tokenizer.json, or [cyan]hf://ORG/NAME[/]. Default: that of the run's data, or of the folder.",
        ),
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="cpu or cuda. Default: a GPU if there is one.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text with a trained model, on one device.

    [dim]ultrascale generate runs/first --prompt "def main" --tokens 64[/]
    """
    from ultrascale.train import import_torch

    import_torch()
    from ultrascale import generate as work
    from ultrascale.specs.printable import printable

    sampling = work.Sampling(temperature, top_k, seed)
    model = work.load(path, tokenizer, device)
    pieces: list[str] = []
    started = time.perf_counter()
    for piece in work.text(model, prompt, tokens, sampling):
        if not as_json:
            sys.stdout.write(printable(piece if pieces else prompt + piece))
            sys.stdout.flush()
        pieces.append(piece)
    seconds = time.perf_counter() - started
    if as_json:
        print_json({"prompt": prompt, "text": "".join(pieces), "seconds": seconds})
    else:
        sys.stdout.write("\n")
        terminal(to_errors=True).print(f"{seconds:.1f} s on {model.device}")
