"""Hostile traces, safetensors, checkpoints, token files and run folders."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hostile.cases import ESCAPES, SPECIAL, TEXTS, Build, Case, a_plan
from test_bad_input import HF
from ultrascale.specs.measurement import Measurement

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

        def beside(path: Path, build: Build = make) -> None:
            safetensors(b"{}")(path)
            (path / "hf" / "model.safetensors").unlink()
            here = Path.cwd()
            os.chdir(path / "hf")
            try:
                build(Path("model.safetensors"))
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
        record = data() if callable(data) else data
        if index is not None:
            record = {**record, "files": {".metadata": [[0, len(index), zlib.crc32(index)]]}}
            (folder / ".metadata").write_bytes(index)
        if sign and isinstance(record, dict):
            record = {**record, "checksum": zlib.crc32(json.dumps(record, sort_keys=True, separators=(",", ":")).encode())}
        (folder / "checkpoint.json").write_bytes(record if isinstance(record, bytes) else json.dumps(record).encode())

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

            def replaced(path: Path, f: str = file, build: Build = make) -> None:
                checkpoint(manifest, b"x")(path)
                folder = path / "run" / "checkpoints" / "step-000004"
                (folder / f).unlink()
                here = Path.cwd()
                os.chdir(folder)
                try:
                    build(Path(f))
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

            def placed(path: Path, f: str = file, build: Build = make) -> None:
                folder, here = a_run(path), Path.cwd()
                os.chdir(folder)
                try:
                    build(Path(f))
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
