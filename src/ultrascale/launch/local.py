"""Runs several ranks as forked processes on this machine, with a file store as rendezvous, and ends them together.

A fork starts in 0.1 s; a fresh interpreter with torch takes 2 s. The parent only waits: it never touches a GPU or starts
threads, which makes forking safe.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ultrascale.launch.exit_reason import LOST_PEER_MESSAGES, describe_exit, oom_kills, state
from ultrascale.launch.heartbeat import SharedMemoryHeartbeat
from ultrascale.launch.signals import forward_signals
from ultrascale.specs.errors import RunError, SpecError

GRACE_S = 4.0  # between SIGTERM and SIGKILL to the surviving ranks
FOLLOW_UP_MESSAGES = (*LOST_PEER_MESSAGES, "lost a peer")  # texts of a rank's error when another rank is the one that failed


class RankError(RunError):
    """A rank failed. `rank` is its number, `text` its traceback."""

    def __init__(self, rank: int, text: str, place: str = "") -> None:
        super().__init__(f"rank {rank}{f' ({place})' if place else ''} failed:\n{text.rstrip()}")
        self.rank = rank
        self.text = text


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str
    kind: type[Exception] | None = None
    """the class of an error with a message for the user: it is raised again as it was"""


def run(
    function: Callable[..., Any],
    nproc: int,
    *arguments: Any,
    timeout_s: float | None = None,
    heartbeat: SharedMemoryHeartbeat | None = None,
    describe: Callable[[int], str] | None = None,
    stoppable: bool = False,
    last_s: float | None = None,
) -> list[Any]:
    """Runs `function(rank, nproc, store, *arguments)` in `nproc` processes; returns the results in rank order.

    `store` is an address that torch.distributed accepts as `init_method`. The first rank that fails ends the others and is
    raised as RankError, with its last status from `heartbeat` and its coordinates from `describe`. `stoppable`: ranks save
    and return on SIGTERM, SIGINT and SIGUSR1, so these signals are forwarded to them and the parent waits. `last_s`: how long
    the last rank may take after the first one has returned.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        store = f"file://{Path(folder) / 'store'}"
        ranks = _Ranks([], [], oom_kills(), heartbeat, describe or (lambda rank: ""))
        try:
            for rank in range(nproc):
                receiving, sending = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(function, rank, nproc, store, sending, arguments, os.getpid()))
                process.start()
                sending.close()
                ranks.pipes.append(receiving)
                ranks.processes.append(process)
            with forward_signals(ranks.processes) if stoppable else nullcontext():
                results = _collect(ranks, timeout_s, last_s)
            for process in ranks.processes:
                process.join(GRACE_S)
            return results
        finally:
            _end(ranks.processes)
            for pipe in ranks.pipes:
                pipe.close()


def fork(function: Callable[[], None]) -> Any:
    """Starts a process that runs `function`; it may lead its own session, so that it and its ranks end together."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


@dataclass(frozen=True)
class _Ranks:
    """The parent's state of its child processes."""

    pipes: list[Connection]
    processes: list[Any]
    kills_before: int | None
    heartbeat: SharedMemoryHeartbeat | None
    describe: Callable[[int], str]

    def exit_failure(self, rank: int) -> _Failure:
        process = self.processes[rank]
        process.join(GRACE_S)
        text = f"the process ended without a word ({describe_exit(process.exitcode, self.kills_before)})"
        status = self.heartbeat.last(rank) if self.heartbeat is not None else ""
        return _Failure(rank, f"{text}; it was at {status}" if status else text)

    def timeout_message(self, ranks: list[int], timeout_s: float) -> str:
        """The error message for ranks that have not returned in time, with their last status."""
        status = {rank: self.heartbeat.last(rank) if self.heartbeat is not None else "" for rank in ranks}
        waiting = ", ".join(f"{rank} (at {last})" if last else str(rank) for rank, last in status.items())
        return f"no answer within {timeout_s:g} s; still running: rank {waiting}{self.stopped()}"

    def stopped(self) -> str:
        """A line of the error message about processes in state T (stopped)."""
        found = [str(rank) for rank, process in enumerate(self.processes) if process.pid and state(process.pid) == "T"]
        return f"\nThe process of rank {', '.join(found)} is stopped (SIGSTOP): SIGCONT would let it run." if found else ""


def _rank(
    function: Callable[..., Any],
    rank: int,
    nproc: int,
    store: str,
    pipe: Connection,
    arguments: tuple[Any, ...],
    parent: int,
) -> None:
    die_with_parent(parent)
    _result_pipes.append((rank, pipe))
    try:
        _send(True, function(rank, nproc, store, *arguments))
    except BaseException as error:
        kind = next((known for known in (SpecError, RunError) if isinstance(error, known)), None)
        _send(False, _Failure(rank, str(error) if kind else traceback.format_exc(), kind))
        pipe.close()
        os._exit(1)  # peers may hang in a collective with this rank: no clean-up that waits for them


_result_pipes: list[tuple[int, Connection]] = []  # last: the rank that runs in this process; empty in the first parent
_sending = threading.Lock()


def _send(ok: bool, value: Any) -> None:
    """Sends a rank's result to its parent; only the first message counts, whichever thread sends it."""
    # Not pipe.send: with it torch shares tensors as files of the sender, which has exited when the parent opens them.
    message = pickle.dumps((ok, value))
    with _sending:
        _result_pipes[-1][1].send_bytes(message)


def report(text: str) -> None:
    """Ends the run with `text` as its error message; may be called in any thread of a rank. The caller ends the process."""
    _send(False, _Failure(_result_pipes[-1][0], text, RunError))


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies: no other process would end it."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died before prctl was called
            os._exit(1)


def _collect(ranks: _Ranks, timeout_s: float | None, last_s: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(ranks.pipes)}
    limit = None if timeout_s is None else time.monotonic() + timeout_s
    failures: list[_Failure] = []
    while open_pipes and not failures:
        left = None if limit is None else max(0.0, limit - time.monotonic())
        ready = wait(list(open_pipes), timeout=left)
        if not ready:
            raise RankError(min(open_pipes.values()), ranks.timeout_message(sorted(open_pipes.values()), timeout_s or 0.0))
        time.sleep(0.01)  # so that the rank that failed and those that failed because of it are read together
        for pipe in wait(list(open_pipes), timeout=0):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):  # no message, or a truncated one
                ok, value = False, ranks.exit_failure(rank)
            if ok:
                if not results and last_s is not None:
                    timeout_s, limit = last_s, time.monotonic() + last_s
                results[rank] = value
            else:
                failures.append(value)
    if failures:
        # A rank that lost its peer reports the loss; the lost rank reports the cause. Prefer the latter.
        first = min(failures, key=lambda one: (any(word in one.text for word in FOLLOW_UP_MESSAGES), one.rank))
        text = first.text + ranks.stopped()
        raise first.kind(text) if first.kind else RankError(first.rank, text, ranks.describe(first.rank))
    return [results[rank] for rank in sorted(results)]


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive() and state(process.pid) == "T":
            process.kill()  # a stopped process handles no other signal
        elif process.is_alive():
            process.terminate()
    limit = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
