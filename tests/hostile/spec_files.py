"""Hostile input files: any content in any file that a command reads, and edited plans, models, clusters and tables."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hostile.cases import ESCAPES, SHORT, SPECIAL, TEXTS, Case, a_plan, content
from test_bad_input import CLUSTER, HF, MODEL, flags

# The commands that open a file, by the file name that they read.
READERS: dict[str, list[str]] = {
    "model.yaml": ["plan", "model.yaml", *SHORT],
    "config.json": ["plan", "config.json", *SHORT],
    "cluster.yaml": flags(cluster="cluster.yaml"),
    "explain.yaml": ["explain", "explain.yaml"],
    "rows.csv": ["explain", "rows.csv", "--row=x"],
    "runs.csv": ["accuracy", "runs.csv"],
    "train.yaml": ["train", "train.yaml"],
    "trained.json": ["train", "--model", "trained.json", "--steps=1"],
    "verify.yaml": ["verify", "verify.yaml"],
    "doctor.yaml": ["doctor", "doctor.yaml"],
    "rehearse.yaml": ["rehearse", "rehearse.yaml"],
    "profile.yaml": ["profile", "profile.yaml"],
    "layouts.yaml": ["bench", "layouts", "layouts.yaml", "--vary=mbs"],
    "compare.yaml": ["compare", "compare.yaml", "compare.yaml"],
    "calibrate.csv": ["calibrate", "calibrate.csv"],
    "calibrate.jsonl": ["calibrate", "calibrate.jsonl"],
    "report.yaml": ["report", "report.yaml", "-o", "page.html"],
    "export.yaml": ["export", "export.yaml", "--to=megatron", "-o", "out"],
    "run.sh": ["import", "run.sh"],
    "config.toml": ["import", "config.toml"],
    "config.py": ["import", "config.py"],
    "nanotron.yaml": ["import", "nanotron.yaml"],
    "ds_config.json": ["import", "ds_config.json", "--model=tiny", "--seq=128"],
    "trace.json": ["profile", "--trace", "trace.json"],
    "trace.json.gz": ["profile", "--trace", "trace.json.gz"],
    "trace.sqlite": ["profile", "--trace", "trace.sqlite"],
    "ras1.txt": ["profile", "--flight-recorder", "ras1.txt"],
    "a.bin": ["data", "info", "a.bin"],
    "text.jsonl": ["data", "tokenize", "text.jsonl", "-o", "out"],
    "text.jsonl.gz": ["data", "tokenize", "text.jsonl.gz", "-o", "out"],
    "text.parquet": ["data", "tokenize", "text.parquet", "-o", "out"],
    "tokenizer.json": ["data", "tokenize", "stdlib", "-o", "out", "--tokenizer", "tokenizer.json"],
}


def of_files() -> Iterator[Case]:
    for reader, words in READERS.items():
        for name, data in TEXTS.items():
            yield Case(f"{reader}-{name}", words, (lambda path, r=reader, d=data: content(d)(path / r),), codes=(0, 2))
        for name, make in SPECIAL.items():
            yield Case(f"{reader}-{name}", words, (lambda path, r=reader, m=make: m(path / r),), codes=(0, 2))


VALUES: dict[str, Any] = {
    "nan": float("nan"),
    "negative": -1,
    "vast": 10**30,
    "text": ESCAPES,
    "list": [[]],
    "null": None,
    "true": True,
    "tiny": 1e-300,
}


def leaves(data: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(data, dict):
        for name, value in data.items():
            yield from leaves(value, (*keys, name))
    elif isinstance(data, list) and data:
        yield from leaves(data[0], (*keys, 0))
    else:
        yield keys


def edited(data: Any, keys: tuple[str | int, ...], value: Any) -> Any:
    whole = copy.deepcopy(data)
    place = whole
    for name in keys[:-1]:
        place = place[name]
    place[keys[-1]] = value
    return whole


def write_edited(data: Any, keys: tuple[str | int, ...], value: Any, folder: Path) -> None:
    (folder / "p.yaml").write_text(yaml.safe_dump(edited(data, keys, value), sort_keys=False))


def of_plans() -> Iterator[Case]:
    """Every field of a plan, each with a value that no field should have."""
    plan = a_plan().to_mapping()
    for number, keys in enumerate(leaves(plan)):
        names = list(VALUES)
        for name in (names[number % len(names)], names[(number + 3) % len(names)]):
            written = partial(write_edited, plan, keys, VALUES[name])
            yield Case(f"plan-{'.'.join(map(str, keys))}-{name}", ["explain", "p.yaml"], (written,), codes=(0, 1, 2))


def of_models() -> Iterator[Case]:
    for base, file, words in (
        (MODEL, "m.yaml", ["plan", "m.yaml", *SHORT, "--top=1"]),
        (HF, "config.json", ["plan", "config.json", *SHORT, "--top=1"]),
        (CLUSTER, "c.yaml", [*flags(cluster="c.yaml"), "--top=1"]),
    ):
        for key in base:
            for name, value in VALUES.items():
                data = {**base, key: value}
                text = json.dumps(data) if file.endswith("json") else yaml.safe_dump(data)
                written = (lambda path, f=file, t=text: (path / f).write_text(t),)
                yield Case(f"{file}-{key}-{name}", words, written, codes=(0, 1, 2))


ROW = {"id": "a", "model": "llama-3-8b", "seq_len": "8192", "gpu": "h100", "gpus": "8", "tokens_per_s_per_gpu": "9000"}
CELLS = ["nan", "-1", "0", "1e999", "9" * 400, "²", '"', "=1+1", "\x1b[2J", "1,2", "a" * 140_000]


def of_tables() -> Iterator[Case]:
    for key in ROW:
        for number, cell in enumerate(CELLS):
            row = {**ROW, key: cell}
            text = ",".join(row) + "\n" + ",".join(row.values()) + "\n"
            for verb in ("accuracy", "calibrate") if number % 2 else ("accuracy",):
                written = (lambda path, t=text: (path / "r.csv").write_text(t),)
                yield Case(f"csv-{verb}-{key}-{number}", [verb, "r.csv"], written, codes=(0, 1, 2))
