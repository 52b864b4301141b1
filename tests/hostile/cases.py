"""A case of hostile input: files to write into an empty folder, and the command to run on them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from test_bad_input import ALIAS_BOMB, NINES
from ultrascale import Cluster, Job, Layout, Model, Plan, estimate

Build = Callable[[Path], object]

ESCAPES = "\x1b[2J\x1b]0;x\x07[bold]y[/]"
SHORT = ["--cluster=1xh100", "--batch-tokens=8k", "--seq=1024"]


@dataclass(frozen=True)
class Case:
    """What to write into the folder, and the command to give; `codes`: how it may end."""

    name: str
    words: list[str]
    build: tuple[Build, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    codes: tuple[int, ...] = (2,)


# Contents of any file, whatever the file is for.

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


def a_plan() -> Plan:
    job = Job(model=Model.load("tiny"), cluster=Cluster.load("2xh100"), seq=128, batch_tokens=2048)
    layout = Layout(dp=2, mbs=8)
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))
