"""A table of malformed and hostile inputs over every verb: each ends in time, with exit code 0, 1 or 2, and no traceback.

`tests/test_bad_input.py` checks what a sentence says; here it is enough that there is one. Inputs are built in an empty folder,
commands run in this process, under an alarm.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import re
import signal
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from test_bad_input import ALIAS_BOMB, CLUSTER, HF, MODEL, NINES, flags
from ultrascale import Cluster, Job, Layout, Model, Plan, estimate
from ultrascale.specs.measurement import Measurement

Run = Callable[..., tuple[int, str, str]]
Build = Callable[[Path], object]

LIMIT_S = 120  # of wall-clock time, on machines that others use too; a hang never ends
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
ESCAPES = "\x1b[2J\x1b]0;x\x07[bold]y[/]"


@dataclass(frozen=True)
class Case:
    """What to write into the folder, and the command to give; `codes`: how it may end."""

    name: str
    words: list[str]
    build: tuple[Build, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (2,)


class TookTooLongError(BaseException):
    """No Exception: nothing on the way may take it for an error of its own."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TookTooLongError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# What can stand in a file, whatever the file is for.

TEXTS: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(64),
    "no-utf8": b"\xff\xfe\xfa\x00\x80",
    "utf16": "layers: 4".encode("utf-16"),
    "deep-list": b"[" * 1500,
    "deep-map": b'{"a":' * 1500,
    "alias-bomb": ALIAS_BOMB.encode(),
    "alias-of-itself": b"a: &a {b: *a, c: [*a]}\nlayers: *a\n",
    "long-number": b'{"layers": ' + NINES.encode() + b"}",
    "base-60": b"layers: " + b":".join([b"1"] * 5000),
    "not-numbers": b'{"layers": NaN, "nodes": Infinity, "step": -Infinity}',
    "list": b"[1, 2, 3]",
    "text": b"hello",
    "null": b"null",
    "twice": b'{"a": 1, "a": 2}',
    "python-tag": b"!!python/object/apply:os.system ['exit 9']",
    "escapes": ("{" + json.dumps(ESCAPES) + ": 1}").encode(),
    "half-a-character": b'{"name": "\\ud800", "layers": "\\udfff"}',
    "one-long-line": b"a" * 300_000,
    "markup": b"[bold red]x[/]: [/nothing]\n",
}


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to(target: str) -> Build:
    return lambda path: path.symlink_to(target)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(path.name)  # the folder is the current one: a socket's path is short


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(300 * 2**20)


SPECIAL: dict[str, Build] = {
    "fifo": fifo,
    "dev-zero": link_to("/dev/zero"),
    "dev-null": link_to("/dev/null"),
    "socket": unix_socket,
    "folder": lambda path: path.mkdir(),
    "dangling": link_to("nowhere"),
    "itself": lambda path: path.symlink_to(path.name),
    "sparse": sparse,
}


def content(data: bytes) -> Build:
    return lambda path: path.write_bytes(data)


# Verbs that open a file, with the name that makes them read it.

SHORT = ["--cluster=1xh100", "--batch-tokens=8k", "--seq=1024"]
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


# Files of one kind, malformed in ways of their own.


def a_plan() -> Plan:
    job = Job(model=Model.load("tiny"), cluster=Cluster.load("2xh100"), seq=128, batch_tokens=2048)
    layout = Layout(dp=2, mbs=8)
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))


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


def leaves(data: Any, way: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(data, dict):
        for name, value in data.items():
            yield from leaves(value, (*way, name))
    elif isinstance(data, list) and data:
        yield from leaves(data[0], (*way, 0))
    else:
        yield way


def edited(data: Any, way: tuple[str | int, ...], value: Any) -> Any:
    whole = copy.deepcopy(data)
    place = whole
    for name in way[:-1]:
        place = place[name]
    place[way[-1]] = value
    return whole


def of_plans() -> Iterator[Case]:
    """Every field of a plan, each with a value that no field should have."""
    plan = a_plan().to_mapping()
    for number, way in enumerate(leaves(plan)):
        names = list(VALUES)
        for name in (names[number % len(names)], names[(number + 3) % len(names)]):
            text = yaml.safe_dump(edited(plan, way, VALUES[name]), sort_keys=False)
            written = (lambda path, t=text: (path / "p.yaml").write_text(t),)
            yield Case(f"plan-{'.'.join(map(str, way))}-{name}", ["explain", "p.yaml"], written, codes=(0, 1, 2))


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


EVENT = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10, "dur": 5}
EVENTS: dict[str, dict[str, Any]] = {
    "nan-start": {"ts": float("nan")},
    "infinite-end": {"dur": float("inf")},
    "negative-end": {"dur": -5},
    "text-time": {"ts": "12"},
    "vast-time": {"ts": 10**300},
    "long-time": {"ts": 10**4000},
    "list-time": {"ts": [1]},
    "true-time": {"dur": True},
    "list-thread": {"pid": [1], "tid": {"a": 1}},
    "list-args": {"args": [1, 2]},
    "list-stream": {"args": {"stream": [1], "correlation": [2]}},
    "escapes": {"name": f"ncclDevKernel_AllReduce{ESCAPES}", "args": {"Collective name": ESCAPES, "In msg nelems": ESCAPES}},
    "list-collective": {"name": "ncclDevKernel_AllReduce", "args": {"Collective name": [1], "Process Group Name": {"a": 1}}},
    "nan-elements": {"name": "ncclDevKernel_AllReduce", "args": {"In msg nelems": float("nan"), "Group size": "x", "dtype": 3}},
    "nan-bytes": {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "args": {"bytes": float("nan")}},
    "list-category": {"cat": ["kernel"]},
    "step-of-nothing": {"cat": "user_annotation", "name": "ProfilerStep#99999999999999999999999999", "dur": 0},
    "call-without-facts": {"cat": "cpu_op", "name": "c10d::allreduce_", "args": {"Collective name": None}},
}
FACTS: dict[str, dict[str, Any]] = {
    "base-time": {"baseTimeNanoseconds": "soon"},
    "rank": {"distributedInfo": {"rank": 10**400, "pg_config": 3}},
    "groups": {"distributedInfo": {"rank": 0, "pg_config": [1, {"pg_name": [], "ranks": "x"}]}},
    "devices": {"deviceProperties": {"id": []}},
    "our-run": {"ultrascale": {"model": [], "layers": {}, "layout": [], "schedule": 3, "ranks": None}},
    "our-layout": {"ultrascale": {"layout": {"pp": "x", "tp": []}, "stages": [[]]}},
}


def of_traces() -> Iterator[Case]:
    for name, change in EVENTS.items():
        text = json.dumps({"traceEvents": [EVENT, {**EVENT, **change}, {**EVENT, "ts": 30}]})
        written = (lambda path, t=text: (path / "t.json").write_text(t),)
        yield Case(f"trace-{name}", ["profile", "--trace", "t.json"], written, codes=(0, 2))
    for name, facts in FACTS.items():
        text = json.dumps({**facts, "traceEvents": [EVENT, {**EVENT, "name": "ncclDevKernel_AllReduce"}]})
        written = (lambda path, t=text: (path / "t.json").write_text(t),)
        yield Case(f"trace-{name}", ["profile", "--trace", "t.json"], written, codes=(0, 2))
        beside = (*written, lambda path: a_plan().save(path / "p.yaml"))
        yield Case(f"trace-{name}-plan", ["profile", "--trace", "t.json", "--plan", "p.yaml"], beside, codes=(0, 2))
    long_rank = (lambda path: (path / f"rank{'9' * 240}.json").write_text(json.dumps([EVENT])),)
    yield Case("trace-long-rank", ["profile", "--trace", f"rank{'9' * 240}.json"], long_rank, codes=(0, 2))
    cut = gzip.compress(json.dumps({"traceEvents": [EVENT] * 50}).encode())[:-9]
    yield Case("trace-cut", ["profile", "--trace", "t.gz"], (lambda path: (path / "t.gz").write_bytes(cut),), codes=(0, 2))


def safetensors(header: bytes, length: int | None = None, data: bytes = b"") -> Build:
    def build(path: Path) -> None:
        (path / "hf").mkdir()
        (path / "hf" / "config.json").write_text(json.dumps(HF))
        packed = struct.pack("<Q", len(header) if length is None else length) + header + data
        (path / "hf" / "model.safetensors").write_bytes(packed)

    return build


def entry(**change: Any) -> bytes:
    return json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **change}}).encode()


HEADERS: dict[str, Build] = {
    "no-bytes": lambda path: (safetensors(b"")(path), (path / "hf" / "model.safetensors").write_bytes(b"")),
    "vast-header": safetensors(b"{}", 2**63),
    "header-beyond-the-end": safetensors(b"{}", 1000),
    "no-json": safetensors(b"{{{{{{{{"),
    "list": safetensors(b"[]      "),
    "deep": safetensors(b"[" * 5000),
    "no-utf8": safetensors(b"\xff\xff\xff\xff"),
    "no-tensors": safetensors(b"{}"),
    "beyond-the-end": safetensors(entry(data_offsets=[0, 10**12])),
    "backwards": safetensors(entry(data_offsets=[16, 0]), data=bytes(16)),
    "negative-shape": safetensors(entry(shape=[-2, -2]), data=bytes(16)),
    "vast-shape": safetensors(entry(shape=[2**62, 2**62]), data=bytes(16)),
    "other-dtype": safetensors(entry(dtype="X99"), data=bytes(16)),
    "integers": safetensors(entry(dtype="I32"), data=bytes(16)),
    "other-tensors": safetensors(entry(), data=bytes(16)),
    "escapes": safetensors(
        json.dumps({ESCAPES: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode(), data=bytes(16)
    ),
}
INDICES: dict[str, Any] = {
    "no-map": {},
    "list": {"weight_map": [1]},
    "numbers": {"weight_map": {"a": 3}},
    "outside": {"weight_map": {"a": "../../etc/passwd"}},
    "absolute": {"weight_map": {"a": "/dev/zero"}},
    "pickle": {"weight_map": {"a": "model.bin"}},
    "missing": {"weight_map": {"a": "b.safetensors"}},
}


def of_hugging_face() -> Iterator[Case]:
    for name, build in HEADERS.items():
        yield Case(f"safetensors-{name}", ["convert", "hf", "hf", "runs/x"], (build,))
    for name, index in INDICES.items():

        def written(path: Path, text: str = json.dumps(index)) -> None:
            safetensors(b"{}")(path)
            (path / "hf" / "model.safetensors").unlink()
            (path / "hf" / "model.safetensors.index.json").write_text(text)

        yield Case(f"index-{name}", ["convert", "hf", "hf", "runs/x"], (written,))
    for name, make in SPECIAL.items():

        def beside(path: Path, made: Build = make) -> None:
            safetensors(b"{}")(path)
            (path / "hf" / "model.safetensors").unlink()
            here = Path.cwd()
            os.chdir(path / "hf")
            try:
                made(Path("model.safetensors"))
            finally:
                os.chdir(here)

        yield Case(f"safetensors-{name}", ["convert", "hf", "hf", "runs/x"], (beside,))


class Command:
    """A pickle that would write a file when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch pickle-was-run",)


def manifest(**change: Any) -> dict[str, Any]:
    from ultrascale.specs.plan import job_to_mapping
    from ultrascale.specs.training import Training

    plan = a_plan()
    return {
        "format": "ultrascale checkpoint 1",
        "step": 4,
        "updates": 4,
        "moments": [],
        "loss_scale": None,
        "good_steps": 0,
        "job": job_to_mapping(plan.job),
        "layout": plan.layout.model_dump(mode="json"),
        "training": Training().model_dump(mode="json"),
        "checkpointing": {},
        "data": None,
        "files": {},
        **change,
    }


def checkpoint(data: Any, index: bytes | None = None, sign: bool = True) -> Build:
    def build(path: Path) -> None:
        folder = path / "run" / "checkpoints" / "step-000004"
        folder.mkdir(parents=True)
        told = data() if callable(data) else data
        if index is not None:
            told = {**told, "files": {".metadata": [[0, len(index), zlib.crc32(index)]]}}
            (folder / ".metadata").write_bytes(index)
        if sign and isinstance(told, dict):
            told = {**told, "checksum": zlib.crc32(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())}
        (folder / "checkpoint.json").write_bytes(told if isinstance(told, bytes) else json.dumps(told).encode())

    return build


CHECKPOINTS: dict[str, Build] = {
    "empty": checkpoint(b""),
    "no-utf8": checkpoint(b"\xff\xfe"),
    "deep": checkpoint(b"[" * 100_000),
    "list": checkpoint([1]),
    "other-format": checkpoint({"format": ESCAPES}),
    "unsigned": checkpoint(manifest, sign=False),
    "format-alone": checkpoint({"format": "ultrascale checkpoint 1"}),
    **{
        f"{key}-{name}": checkpoint(lambda k=key, v=value: manifest(**{k: v}))
        for key in ("step", "updates", "moments", "good_steps", "job", "layout", "training", "checkpointing", "files")
        for name, value in (("text", "x"), ("null", None), ("negative", -1), ("list", [["x"]]))
    },
    "loss-scale-nan": checkpoint(lambda: manifest(loss_scale=float("nan"))),
    "no-index": checkpoint(manifest),
    "index-empty": checkpoint(manifest, b""),
    "index-text": checkpoint(manifest, b"no pickle"),
    "index-number": checkpoint(manifest, pickle.dumps(3)),
    "index-command": checkpoint(manifest, pickle.dumps(Command())),
    "index-cut": checkpoint(manifest, pickle.dumps({"a": [1] * 100})[:-20]),
    "index-deep": checkpoint(manifest, b"\x80\x04" + b"]" * 100_000 + b"."),
}


def of_checkpoints() -> Iterator[Case]:
    for name, build in CHECKPOINTS.items():
        yield Case(f"checkpoint-{name}", ["convert", "run", "hf", "out"], (build,))
    for name in ("empty", "deep", "files-list", "step-text", "job-null", "unsigned"):
        yield Case(f"resume-{name}", ["train", "--resume", "run"], (CHECKPOINTS[name],))
        yield Case(f"weights-{name}", ["train", "--model=tiny", "--weights", "run"], (CHECKPOINTS[name],))
    for file in ("checkpoint.json", ".metadata"):
        for name, make in SPECIAL.items():

            def replaced(path: Path, f: str = file, made: Build = make) -> None:
                checkpoint(manifest, b"x")(path)
                folder = path / "run" / "checkpoints" / "step-000004"
                (folder / f).unlink()
                here = Path.cwd()
                os.chdir(folder)
                try:
                    made(Path(f))
                finally:
                    os.chdir(here)

            yield Case(f"checkpoint-{file}-{name}", ["convert", "run", "hf", "out"], (replaced,))


def header_of_tokens(width: int = 2, version: int = 1, tokens: int = 8, documents: int = 1, vocab: int = 256) -> bytes:
    fields = struct.pack("<8sIIQQQ", b"ultratok", version, width, tokens, documents, vocab)
    return (fields + struct.pack("<I", zlib.crc32(fields))).ljust(64, b"\0")


TOKENS: dict[str, bytes] = {
    "magic-alone": b"ultratok",
    "vast": header_of_tokens(tokens=2**63),
    "vast-documents": header_of_tokens(documents=2**62),
    "wide": header_of_tokens(width=2**31),
    "no-width": header_of_tokens(width=0),
    "no-tokens": header_of_tokens(tokens=0, documents=0),
    "unsummed": header_of_tokens()[:40] + bytes(24),
    "ends-elsewhere": header_of_tokens() + bytes(16) + struct.pack("<Q", 2**60),
    "llm.c": struct.pack("<IQ", 20240520, 1),
    "odd": b"abc",
}


def of_tokens() -> Iterator[Case]:
    for name, data in TOKENS.items():
        written = (lambda path, d=data: (path / "a.bin").write_bytes(d),)
        yield Case(f"tokens-{name}", ["data", "info", "a.bin"], written)
        yield Case(f"train-on-{name}", ["train", "--model=tiny", "--steps=1", "--data", "a.bin"], written)
    for name, text in TEXTS.items():

        def folder(path: Path, data: bytes = text) -> None:
            (path / "set").mkdir()
            (path / "set" / "data.json").write_bytes(data)

        yield Case(f"data.json-{name}", ["data", "info", "set"], (folder,))
    for name, head in (
        ("vast", struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2**62, 2**62)),
        ("cut", b"MMIDIDX\0\0" + bytes(4)),
        ("code", struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 255, 0, 1)),
    ):
        pair = (
            lambda path, d=head: (path / "m.idx").write_bytes(d),
            lambda path: (path / "m.bin").write_bytes(b"\0\0"),
        )
        yield Case(f"megatron-{name}", ["data", "info", "m"], pair)


def a_run(path: Path) -> Path:
    folder = path / "run"
    folder.mkdir()
    a_plan().save(folder / "plan.yaml")
    return folder


METRICS: dict[str, bytes] = {
    "no-utf8": b"\xff\xfe\n",
    "broken": b'{"step": 1\n{"step": 2}\n',
    "deep": b"[" * 5000 + b'\n{"step": 1}\n',
    "text-step": b'{"step": "1"}\n',
    "vast-step": b'{"step": 1' + b"0" * 400 + b"}\n",
    "text-loss": b'{"step": 1, "loss": "low"}\n',
    "null-loss": b'{"step": 1, "loss": null}\n',
    "nan-loss": b'{"step": 1, "loss": NaN, "tokens_per_s_per_gpu": Infinity}\n',
    "list-rate": b'{"step": 1, "loss": 1.0, "tokens_per_s_per_gpu": []}\n',
    "true-step": b'{"step": true}\n',
    "no-object": b"3\n4\n",
}


def of_runs() -> Iterator[Case]:
    for name, data in METRICS.items():
        written = (lambda path, d=data: (a_run(path) / "metrics.jsonl").write_bytes(d),)
        yield Case(f"metrics-{name}", ["report", "run", "-o", "page.html"], written, codes=(0, 2))
    for name, make in SPECIAL.items():
        for file in ("metrics.jsonl", "env.json", "measurement.json"):

            def placed(path: Path, f: str = file, made: Build = make) -> None:
                folder, here = a_run(path), Path.cwd()
                os.chdir(folder)
                try:
                    made(Path(f))
                finally:
                    os.chdir(here)

            yield Case(f"{file}-{name}", ["report", "run", "-o", "page.html"], (placed,), codes=(0, 2))
    for name, data in TEXTS.items():
        measured = (lambda path, d=data: (a_run(path) / "measurement.json").write_bytes(d),)
        yield Case(f"measurement-{name}", ["compare", "run/plan.yaml", "run"], measured)
        yield Case(f"calibrated-{name}", ["calibrate", "run"], measured)
    for key in Measurement.model_fields:
        measured = (lambda path, k=key: (a_run(path) / "measurement.json").write_text(json.dumps({k: float("nan")})),)
        yield Case(f"measurement-{key}", ["compare", "run", "run"], measured)


VARIABLES = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_ID": "7"}


def of_environment() -> Iterator[Case]:
    for given in (VARIABLES, SLURM):
        for name in given:
            for number, value in enumerate(("²", "٣", "-1", NINES, "\x1b[31m", "1.5", "")):
                words = (["train", "--model=tiny"], ["bench", "collectives"])[number % 2]
                yield Case(f"{name}-{number}", words, environment={**given, name: value})


ARGUMENTS: list[list[str]] = [
    [],
    ["nothing"],
    ["--nothing"],
    ["plan"],
    ["plan", "tiny"],
    ["presets", "nothing"],
    ["presets", "x" * 10_000],
    ["presets", "["],
    ["presets", "[/bold]"],
    flags(cluster="²xh100"),
    flags(cluster="²xhere"),
    flags(cluster=f"{NINES}xhere"),
    flags(cluster="0xhere"),
    flags(cluster="8x" * 3000),
    flags(batch="²"),
    flags(batch="1" + "0" * 4200),
    flags(seq="٣k"),
    flags(model="x" * 5000),
    flags(model="[/]"),
    flags(model="../" * 2000),
    [*flags(), "--fix=tp=" + "9" * 4000],
    [*flags(), "--fix=tp=²"],
    [*flags(), "--fix=" + "tp=1," * 5000],
    [*flags(), "--forbid=" + "zero=1," * 5000],
    [*flags(), "-o", "/dev/full"],
    [*flags(), "-o", "/dev/null/plan.yaml"],
    [*flags(), "-o", "x" * 5000],
    ["accuracy", "nothing.csv", "--worst=-1"],
    ["accuracy", "nothing.csv", "--by=["],
    ["train"],
    ["train", "--model=tiny", "--steps=0"],
    ["train", "--model=tiny", "--steps=" + NINES],
    ["train", "--model=tiny", "--steps=-1"],
    ["train", "--model=tiny", "--nproc=0"],
    ["train", "--model=tiny", "--nproc=99999"],
    ["train", "--model=tiny", "--seed=-1"],
    ["train", "--model=tiny", "--seed=" + "9" * 4000],
    ["train", "--model=tiny", "--seq=nan"],
    ["train", "--model=tiny", "--data=nothing:1,:"],
    ["train", "--model=tiny", "--data=" + "stdlib:1," * 2000],
    ["train", "--model=tiny", "layout.tp=²"],
    ["train", "--model=tiny", "layout.tp"],
    ["train", "--model=tiny", "train.lr=nan"],
    ["train", "--model=tiny", "train.lr=inf"],
    ["train", "--model=tiny", "train.nothing=1"],
    ["train", "--model=tiny", "nothing.lr=1"],
    ["train", "--model=tiny", "=" * 500],
    ["train", "--model=tiny", "train.clip=-1"],
    ["train", "--resume", "nothing"],
    ["train", "--resume", "/dev/null"],
    ["train", "--weights", "nothing", "--model=tiny"],
    ["verify"],
    ["verify", "--world=0"],
    ["verify", "--world=" + "9" * 4000],
    ["verify", "--world=4", "--only=nothing"],
    ["verify", "--world=4", "--model=nothing"],
    ["data", "info", "/dev/zero"],
    ["data", "info", ""],
    ["data", "info", "x" * 5000],
    ["data", "tokenize", "stdlib", "-o", "/dev/null"],
    ["data", "tokenize", "stdlib", "-o", "out", "--workers=0"],
    ["data", "tokenize", "stdlib", "-o", "out", "--workers=" + "9" * 4000],
    ["data", "tokenize", "/dev/zero", "-o", "out"],
    ["data", "tokenize", "", "-o", "out"],
    ["data", "tokenize", "stdlib", "-o", "out", "--eod=x"],
    ["convert"],
    ["convert", "hf"],
    ["convert", "hf", "nothing", "out"],
    ["convert", "hf", "/dev/null", "out"],
    ["convert", "nothing", "hf", "out"],
    ["convert", "hf", "hf", "hf", "hf"],
    ["convert", "nothing", "hf", "out", "--dtype=int4"],
    ["doctor", "nothing.yaml"],
    ["rehearse", "nothing.yaml"],
    ["profile"],
    ["profile", "--steps=0"],
    ["profile", "--trace", ""],
    ["profile", "--trace", "x" * 5000],
    ["bench", "nothing"],
    ["bench", "collectives", "--sizes=nan"],
    ["bench", "collectives", "--sizes=1..9" + "9" * 4000],
    ["bench", "collectives", "--sizes=²"],
    ["bench", "collectives", "--groups=²"],
    ["bench", "collectives", "--groups=0"],
    ["bench", "collectives", "--groups=" + "9" * 4000],
    ["bench", "collectives", "--only=["],
    ["bench", "layouts", "nothing.yaml", "--budget=²m"],
    ["bench", "layouts", "nothing.yaml", "--budget=" + "9" * 4000 + "h"],
    ["bench", "layouts", "nothing.yaml", "--vary=tp", "--timeout=nan"],
    ["compare", "nothing", "nothing"],
    ["compare", "", ""],
    ["calibrate", "nothing"],
    ["calibrate", "/dev/zero"],
    ["report", "nothing"],
    ["report", "/dev/zero"],
    ["studio", "--port=0"],
    ["studio", "--port=" + "9" * 4000],
    ["studio", "--port=-1"],
    ["studio", "--accuracy=/dev/zero"],
    ["studio", "--runs=/dev/null"],
    ["export", "nothing.yaml", "--to=nothing", "-o", "out"],
    ["export", "nothing.yaml", "--to=slurm", "-o", "out"],
    ["import", "nothing"],
    ["import", ""],
    ["import", "/dev/zero"],
    ["import", "x" * 5000],
    ["compare", "x" * 5000, "x" * 5000],
    ["calibrate", "x" * 5000],
    ["report", "x" * 5000],
    ["explain", "x" * 5000],
    ["doctor", "x" * 5000],
    ["train", "--resume", "x" * 5000],
    ["train", "--model=tiny", "--steps=1", "--out", "x" * 5000],
    ["convert", "x" * 5000, "hf", "out"],
    ["studio", "--runs", "x" * 5000, "--port=1"],
    ["\x1b[2J"],
    ["train", "\x9b2J=\x07"],
]
WITH_PLAN: list[list[str]] = [
    ["explain", "p.yaml", "--what-if=tp=" + "9" * 4000],
    ["explain", "p.yaml", "--what-if=" + "=" * 500],
    ["explain", "p.yaml", "--what-if=gpus=٣"],
    ["explain", "p.yaml", "--largest=["],
    ["explain", "p.yaml", "--row=x"],
    ["train", "p.yaml", "layout.tp=" + "9" * 4000],
    ["train", "p.yaml", "--nproc=3"],
    ["verify", "p.yaml", "layout.tp=nan"],
    ["rehearse", "p.yaml", "--rank=-1"],
    ["rehearse", "p.yaml", "--rank=" + "9" * 4000],
    ["rehearse", "p.yaml", "--stage=²"],
    ["rehearse", "p.yaml", "--stage=" + "9" * 4000],
    ["rehearse", "p.yaml", "--device=["],
    ["rehearse", "p.yaml", "--kernels=["],
    ["profile", "p.yaml", "layout.tp=²"],
    ["profile", "p.yaml", "--nproc=3"],
    ["bench", "layouts", "p.yaml", "--vary=mbs=²", "--nproc=2"],
    ["bench", "layouts", "p.yaml", "--vary=mbs=" + "9" * 4000, "--nproc=2"],
    ["bench", "layouts", "p.yaml", "--vary=" + "mbs=1:" * 3000, "--nproc=2"],
    ["bench", "layouts", "p.yaml", "--vary=mbs", "--nproc=2", "--storage=nothing://"],
    ["bench", "layouts", "p.yaml", "--vary=mbs", "--nproc=2", "--storage=sqlite:////dev/null"],
    ["compare", "p.yaml", "nothing"],
    ["compare", "p.yaml", "/dev/zero"],
    ["calibrate", "p.yaml"],
    ["report", "p.yaml", "-o", "/dev/full"],
    ["export", "p.yaml", "--to=kubernetes", "-o", "out", "--image=\n"],
    ["export", "p.yaml", "--to=megatron", "-o", "/dev/null"],
    ["export", "p.yaml", "--to=torchtitan", "-o", "out", "--style=["],
    ["import", "p.yaml"],
    ["accuracy", "p.yaml"],
    ["plan", "p.yaml", *SHORT],
    ["data", "info", "p.yaml"],
    ["profile", "--trace", "p.yaml"],
]


def of_arguments() -> Iterator[Case]:
    for number, words in enumerate(ARGUMENTS):
        yield Case(f"words-{number}-{re.sub('[^a-z0-9=-]+', '-', ' '.join(words))[:40]}", words, codes=(0, 2))
    for number, words in enumerate(WITH_PLAN):
        written = (lambda path: a_plan().save(path / "p.yaml"),)
        name = f"plan-words-{number}-{re.sub('[^a-z0-9=-]+', '-', ' '.join(words))[:40]}"
        yield Case(name, words, written, codes=(0, 1, 2))


FOREIGN: dict[str, str] = {
    "run.sh-unclosed": 'torchrun pretrain_gpt.py --num-layers "4',
    "run.sh-endless": "A=$B\nB=$A\ntorchrun pretrain_gpt.py --num-layers $A",
    "run.sh-grows": "".join(f"A{n}=$A{n - 1}$A{n - 1}\n" for n in range(1, 60)) + "torchrun pretrain_gpt.py --num-layers $A59",
    "run.sh-digits": f"torchrun pretrain_gpt.py --num-layers {NINES} --hidden-size ² --seq-length -1",
    "run.sh-continued": "torchrun pretrain_gpt.py \\\n" * 2000,
    "config.toml-digits": "[training]\nseq_len = " + "9" * 4000 + "\n[parallelism]\ntensor_parallel_degree = -1\n",
    "config.toml-nan": "[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nseq_len = nan\nlocal_batch_size = inf\n",
    "config.toml-lists": "[model]\nname = []\nflavor = {}\n[training]\nseq_len = [1]\n[parallelism]\ntensor_parallel_degree=[]",
    "config.toml-date": "[training]\nseq_len = 1979-05-27\n[model]\nname='llama3'\nflavor='8B'\n",
    "config.toml-deep": "a = " + "[" * 3000,
    "config.toml-keys": "[" + ".".join("a" * 1 for _ in range(5000)) + "]\nb = 1\n",
    "config.py-command": "import os\nos.system('touch config-was-run')\n",
    "config.py-deep": "x = " + "(" * 500 + "1" + ")" * 500,
    "config.py-digits": "config = Trainer.Config(training=TrainingConfig(seq_len=" + "9" * 5000 + "))",
    "config.py-zeros": "x = '\\0'\n\0",
    "nanotron.yaml-lists": "parallelism: []\nmodel: {model_config: []}\ntokens: 3\noptimizer: x\n",
    "nanotron.yaml-values": "parallelism: {dp: x, tp: -1, pp: .nan}\nmodel: {model_config: {hidden_size: .inf}}\ntokens: {}\n",
    "nanotron.yaml-accelerate": "distributed_type: FSDP\nfsdp_config: []\nnum_processes: .nan\nnum_machines: -1\n",
    "ds_config.json-values": '{"train_batch_size": -1, "zero_optimization": {"stage": "x"}, "fp16": [], "bf16": 3}',
    "ds_config.json-nan": '{"train_micro_batch_size_per_gpu": NaN, "gradient_accumulation_steps": 1e999, "fp16": []}',
    "ds_config.json-vast": '{"train_batch_size": 1' + "0" * 4000 + ', "train_micro_batch_size_per_gpu": 1}',
}


def of_engines() -> Iterator[Case]:
    for name, text in FOREIGN.items():
        file = name.partition("-")[0]
        written = (lambda path, f=file, t=text: (path / f).write_text(t),)
        yield Case(f"import-{name}", READERS[file], written, codes=(0, 2))
        words = ["import", file, "--model=tiny", "--seq=128", "--cluster=8xh100", "-o", "p.yaml"]
        yield Case(f"import-given-{name}", words, written, codes=(0, 2))


LARGE = [*of_files(), *of_plans(), *of_models(), *of_tables()]
QUICK = [
    *LARGE[::7],
    *of_traces(),
    *of_hugging_face(),
    *of_checkpoints(),
    *of_tokens(),
    *of_runs(),
    *of_environment(),
    *of_arguments(),
    *of_engines(),
]
CASES = [*LARGE, *QUICK[len(LARGE[::7]) :]]


@pytest.fixture(autouse=True, scope="module")
def _torch() -> None:
    """Imported without an alarm, which would leave it half imported; a loaded machine takes a minute."""
    from ultrascale.train import import_torch

    import_torch()


def test_the_table_is_large_and_names_each_case_once() -> None:
    names = [case.name for case in CASES]
    assert len(CASES) >= 1500
    assert len(QUICK) * 2 // 5 >= 250  # two of five are in the default suite
    assert len(set(names)) == len(names)
    verbs = {case.words[0] for case in CASES if case.words}
    wanted = "plan explain accuracy presets train verify data convert doctor rehearse profile bench compare calibrate report"
    assert verbs >= {*wanted.split(), "studio", "export", "import"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if place % 10 else []) for place, case in enumerate(QUICK)],
)
def test_a_hostile_input_ends_in_time_and_in_words(
    case: Case, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(case, run, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_the_rest_of_the_table(part: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, case in enumerate([case for place, case in enumerate(LARGE) if place % 7 == part + 1]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patched:
            answered(case, run, folder, patched)


def answered(case: Case, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for build in case.build:
        build(tmp_path)
    for name, value in case.environment.items():
        monkeypatch.setenv(name, value)
    with within(LIMIT_S):
        code, out, err = run(*case.words)
    assert code in case.codes, (case.name, err)
    assert "Traceback (most recent call last)" not in out + err, case.name
    assert not OBEYED.search(out + err), case.name
    assert not (tmp_path / "pickle-was-run").exists()
    assert not (tmp_path / "config-was-run").exists()
    if code == 2:
        assert (out + err).strip(), case.name
