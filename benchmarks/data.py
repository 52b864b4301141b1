"""Data's figures: `python benchmarks/data.py [--megabytes 12]`.

Prints two tables: how fast texts become tokens, with the memory that takes, and what reading tokens costs a run of two
processes. The texts are Python's own library, as often as it takes, and the tokenizer is trained on it here.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ultrascale import Model
from ultrascale.data.corpora import corpus, library_sources
from ultrascale.data.sets import open_set
from ultrascale.launch import launcher
from ultrascale.specs.training import Training
from ultrascale.train.data import Batches
from ultrascale.train.request import Overrides, from_model

VOCAB, SEQ, ROWS = 8192, 4096, 64

# In a process of its own, so that its memory is its own: the most it held, and the most that a worker held.
ONE = """
import json, re, resource, sys, time
from ultrascale.data.tokenize import tokenize
start = time.perf_counter()
facts = tokenize(sys.argv[1], sys.argv[2], sys.argv[3] or None, int(sys.argv[4]))
seconds = time.perf_counter() - start
mine = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(json.dumps([facts.tokens, seconds, mine, worker]))
"""


def texts(path: Path, megabytes: float) -> Path:
    """The library's files as documents of one .jsonl, over and over."""
    sources = [json.dumps({"text": source.read_text(encoding="utf-8")}) + "\n" for source in library_sources()]
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            for line in sources:
                written += file.write(line)
    return path


def trained_tokenizer(path: Path) -> Path:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train([str(source) for source in library_sources()[:200]], trainer)
    tokenizer.save(str(path))
    return path


def tokenizing(folder: Path, megabytes: float) -> Table:
    table = Table(title=f"Tokenizing on {platform.machine()}, {os.cpu_count()} cores", title_justify="left")
    for column in ("tokenizer", "text", "workers", "MB/s", "tokens/s", "most memory: job, a worker"):
        table.add_column(column, justify="right" if column != "tokenizer" else "left")
    bpe = trained_tokenizer(folder / "tokenizer.json")
    small, large = texts(folder / "small.jsonl", megabytes), texts(folder / "large.jsonl", 4 * megabytes)
    for name, tokenizer, source, workers in (
        ("bytes", "", small, 1),
        ("bytes", "", large, 1),
        ("bytes", "", large, 2),
        (f"BPE, {VOCAB}", bpe, small, 1),
        (f"BPE, {VOCAB}", bpe, small, 2),
    ):
        out = folder / f"{'bpe' if tokenizer else 'bytes'}-{source.stem}-{workers}"
        words = [sys.executable, "-c", ONE, str(source), str(out), str(tokenizer), str(workers)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        tokens, seconds, job, worker = json.loads(done.stdout)
        size = source.stat().st_size / 1e6
        table.add_row(
            name,
            f"{size:.0f} MB",
            str(workers),
            f"{size / seconds:.1f}",
            f"{tokens / seconds:,.0f}",
            f"{job:.0f}, {worker:.0f} MiB",
        )
    return table


def reading(folder: Path) -> Table:
    table = Table(title="Reading in a run of two processes (mini, dp=2)", title_justify="left")
    for column in ("train.data", "step", "reading", "tokens/s lost", "wanted"):
        table.add_column(column, justify="right" if column != "train.data" else "left")
    tokenized = folder / "bytes-small-1"
    flat = folder / "flat.bin"
    open_set(tokenized).tokens[: 2**22].tofile(flat)
    for name, data, more in (
        ("stdlib", "stdlib", []),
        ("a tokenized folder", str(tokenized), []),
        ("a flat file", str(flat), []),
        ("a mixture of three", f"{tokenized}:0.6,{flat}:0.3,stdlib:0.1", []),
        ("the folder, document_mask", str(tokenized), ["train.document_mask=true"]),
    ):
        words = ["train.steps=12", f"train.data={data}", "layout.dp=2", "job.seq=256", *more]
        run = launcher.train(from_model(Model.load("mini"), Overrides.parse(words), 2), None, 2, quiet=True)
        assert run is not None
        read_s, step_s = run.measured.time.overhead_s, run.measured.step_time_s
        assert read_s is not None  # every run of ours counts it
        table.add_row(name, f"{step_s * 1e3:.1f} ms", f"{read_s * 1e3:.2f} ms", f"{read_s / step_s:.2%}", "< 1 %")
    return table


def rows(folder: Path) -> str:
    """Rows of a long sequence, from memory and from a file that the system has let go of."""
    tokenized = folder / "bytes-large-1"
    timings = []
    for name, cold in (("from memory", False), ("after the file was let go of", True)):
        batches = Batches(corpus(Training(data=str(tokenized)), 256), SEQ, ROWS, 0)
        if cold:
            with (tokenized / "tokens.bin").open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        for step in range(8):
            batches.train(step + 8 * cold, slice(None))
        timings.append(f"{(time.perf_counter() - start) / 8 / ROWS * 1e6:.0f} µs {name}")
    return f"A row of {SEQ} tokens: {', '.join(timings)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=12, help="of the smaller text; the larger is four times as long")
    arguments = parser.parse_args()
    console = Console(width=120)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        console.print(tokenizing(folder, arguments.megabytes))
        console.print(reading(folder))
        console.print(rows(folder))


if __name__ == "__main__":
    main()
