"""Several processes on this machine: forked, joined by a file, ended together.

A fork starts in a tenth of a second where a fresh interpreter with torch takes two. The parent only waits: it never touches a
GPU or starts threads of its own, which is what makes forking safe.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ultrascale.specs.errors import RunError, SpecError

GRACE_S = 5.0  # between asking the surviving ranks to end and ending them


class RankError(RunError):
    """A rank failed; `rank` says which, the text holds its traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} failed:\n{text.rstrip()}")
        self.rank = rank
        self.text = text


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str
    kind: type[Exception] | None = None
    """an error that is a sentence for the user: it is raised again as it was"""


def run(function: Callable[..., Any], nproc: int, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
    """`function(rank, nproc, store, *arguments)` in `nproc` processes; what each returned, in the order of ranks.

    `store` is an address that torch.distributed takes as `init_method`. The first rank that fails ends the others and is
    raised as RankError.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        store = f"file://{Path(folder) / 'store'}"
        pipes: list[Connection] = []
        processes = []
        for rank in range(nproc):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(function, rank, nproc, store, sending, arguments))
            process.start()
            sending.close()
            pipes.append(receiving)
            processes.append(process)
        try:
            results = _collect(pipes, processes, timeout_s)
            for process in processes:
                process.join(GRACE_S)
            return results
        finally:
            _end(processes)


def _rank(
    function: Callable[..., Any], rank: int, nproc: int, store: str, pipe: Connection, arguments: tuple[Any, ...]
) -> None:
    try:
        _send(pipe, True, function(rank, nproc, store, *arguments))
    except BaseException as error:
        kind = next((known for known in (SpecError, RunError) if isinstance(error, known)), None)
        _send(pipe, False, _Failure(rank, str(error) if kind else traceback.format_exc(), kind))
        pipe.close()
        os._exit(1)  # peers may be stuck in a collective with us: no clean-up that waits for them


def _send(pipe: Connection, fine: bool, value: Any) -> None:
    # Not pipe.send: there torch hands over tensors as files of the sender, which is gone when the parent opens them.
    pipe.send_bytes(pickle.dumps((fine, value)))


def _collect(pipes: list[Connection], processes: list[Any], timeout_s: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    limit = None if timeout_s is None else time.monotonic() + timeout_s
    failures: list[_Failure] = []
    while open_pipes and not failures:
        left = None if limit is None else max(0.0, limit - time.monotonic())
        ready = wait(list(open_pipes), timeout=left)
        if not ready:
            waiting = ", ".join(map(str, sorted(open_pipes.values())))
            raise RankError(min(open_pipes.values()), f"no answer within {timeout_s:g} s; still running: rank {waiting}")
        time.sleep(0.01)  # the rank that failed and those that failed because of it answer together
        ready = wait(list(open_pipes), timeout=0)
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                fine, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):  # nothing, or a message cut short
                processes[rank].join(GRACE_S)
                fine = False
                value = _Failure(rank, f"the process ended without a word ({_exit(processes[rank].exitcode)})")
            if fine:
                results[rank] = value
            else:
                failures.append(value)
    if failures:
        # A rank that lost its peer says so; the one that was lost says why. Prefer the latter.
        consequence = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
        first = min(failures, key=lambda one: (any(word in one.text for word in consequence), one.rank))
        raise first.kind(first.text) if first.kind else RankError(first.rank, first.text)
    return [results[rank] for rank in sorted(results)]


def _exit(code: int | None) -> str:
    if code is None:
        return "still running"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    limit = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
