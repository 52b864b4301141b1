"""Several processes on this machine: forked, joined by a file, ended together.

A fork starts in a tenth of a second where a fresh interpreter with torch takes two. The parent only waits: it never touches a
GPU or starts threads of its own, which is what makes forking safe.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from ultrascale.parallel.exit_reason import LOST, ending, oom_kills, state
from ultrascale.specs.errors import RunError, SpecError

GRACE_S = 4.0  # between asking the surviving ranks to end and ending them
SAME_S = 2.0  # a terminal signals the whole group and a launcher forwards it: what comes this soon is the same wish
STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # of a launcher or Slurm, of Ctrl-C, of Slurm before the limit

CONSEQUENCE = (*LOST, "lost a peer")  # what a rank says, or we for it, when another one is what failed


class RankError(RunError):
    """A rank failed; `rank` says which, the text holds its traceback."""

    def __init__(self, rank: int, text: str, place: str = "") -> None:
        super().__init__(f"rank {rank}{f' ({place})' if place else ''} failed:\n{text.rstrip()}")
        self.rank = rank
        self.text = text


class HeartbeatReader(Protocol):
    """What each rank did last; train/heartbeat.py implements it."""

    def last(self, rank: int) -> str: ...


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str
    kind: type[Exception] | None = None
    """an error that is a sentence for the user: it is raised again as it was"""


def run(
    function: Callable[..., Any],
    nproc: int,
    *arguments: Any,
    timeout_s: float | None = None,
    heartbeat: HeartbeatReader | None = None,
    describe: Callable[[int], str] | None = None,
    stoppable: bool = False,
    last_s: float | None = None,
) -> list[Any]:
    """`function(rank, nproc, store, *arguments)` in `nproc` processes; what each returned, in the order of ranks.

    `store` is an address that torch.distributed takes as `init_method`. The first rank that fails ends the others and is
    raised as RankError, with its last status of the `heartbeat` and its place as `describe` gives it. `stoppable`: ranks
    save and return on SIGTERM, SIGINT and SIGUSR1, so such signals are handed on to them and waited for. `last_s`: how long
    after the first rank has returned the last one may take.
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
            with _handed_on(ranks.processes) if stoppable else nullcontext():
                results = _collect(ranks, timeout_s, last_s)
            for process in ranks.processes:
                process.join(GRACE_S)
            return results
        finally:
            _end(ranks.processes)
            for pipe in ranks.pipes:
                pipe.close()


def fork(function: Callable[[], None]) -> Any:
    """A started process that runs `function`; it may lead a session of its own, so that it and its ranks end together."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    return process


@dataclass(frozen=True)
class _Ranks:
    """What the parent knows of its children."""

    pipes: list[Connection]
    processes: list[Any]
    kills_before: int | None
    heartbeat: HeartbeatReader | None
    describe: Callable[[int], str]

    def died(self, rank: int) -> _Failure:
        process = self.processes[rank]
        process.join(GRACE_S)
        text = f"the process ended without a word ({ending(process.exitcode, self.kills_before)})"
        said = self.heartbeat.last(rank) if self.heartbeat is not None else ""
        return _Failure(rank, f"{text}; it was at {said}" if said else text)

    def unanswered(self, ranks: list[int], timeout_s: float) -> str:
        """A sentence about ranks that have not returned in time, with what they last said."""
        said = {rank: self.heartbeat.last(rank) if self.heartbeat is not None else "" for rank in ranks}
        waiting = ", ".join(f"{rank} (at {word})" if word else str(rank) for rank, word in said.items())
        return f"no answer within {timeout_s:g} s; still running: rank {waiting}{self.stopped()}"

    def stopped(self) -> str:
        """A line about processes that are alive but do not run."""
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
    end_with(parent)
    _mine.append(_ResultPipe(rank, pipe))
    try:
        _mine[-1].say(True, function(rank, nproc, store, *arguments))
    except BaseException as error:
        kind = next((known for known in (SpecError, RunError) if isinstance(error, known)), None)
        _mine[-1].say(False, _Failure(rank, str(error) if kind else traceback.format_exc(), kind))
        pipe.close()
        os._exit(1)  # peers may be stuck in a collective with us: no clean-up that waits for them


class _ResultPipe:
    """A rank's way to its parent; the first message counts, whichever thread sends it."""

    def __init__(self, rank: int, pipe: Connection) -> None:
        self.rank = rank
        self._pipe = pipe
        self._lock = threading.Lock()

    def say(self, fine: bool, value: Any) -> None:
        # Not pipe.send: there torch hands over tensors as files of the sender, which is gone when the parent opens them.
        message = pickle.dumps((fine, value))
        with self._lock:
            self._pipe.send_bytes(message)


_mine: list[_ResultPipe] = []  # of the rank that this process is; the parent has none


def report(text: str) -> None:
    """From any thread of a rank: the run ends with this text, told as it is. The caller ends the process."""
    _mine[-1].say(False, _Failure(_mine[-1].rank, text, RunError))


def end_with(parent: int) -> None:
    """A parent that is killed takes its ranks along: nobody would be left to end them."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


@contextmanager
def _handed_on(processes: list[Any]) -> Iterator[None]:
    """Signals that ask to stop go to the ranks; a second wish, after a while, ends everything at once."""
    first: list[float] = []

    def hand_on(number: int, _: object) -> None:
        now = time.monotonic()
        if first and now - first[0] > SAME_S and number != signal.SIGUSR1:
            for process in processes:
                process.kill()
            raise RunError(f"ended at once, without saving: {signal.Signals(number).name} came a second time")
        if not first:
            first.append(now)
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, number)

    before = {number: signal.signal(number, hand_on) for number in STOP}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _collect(ranks: _Ranks, timeout_s: float | None, last_s: float | None) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(ranks.pipes)}
    limit = None if timeout_s is None else time.monotonic() + timeout_s
    failures: list[_Failure] = []
    while open_pipes and not failures:
        left = None if limit is None else max(0.0, limit - time.monotonic())
        ready = wait(list(open_pipes), timeout=left)
        if not ready:
            raise RankError(min(open_pipes.values()), ranks.unanswered(sorted(open_pipes.values()), timeout_s or 0.0))
        time.sleep(0.01)  # the rank that failed and those that failed because of it answer together
        for pipe in wait(list(open_pipes), timeout=0):
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                fine, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):  # nothing, or a message cut short
                fine, value = False, ranks.died(rank)
            if fine:
                if not results and last_s is not None:
                    timeout_s, limit = last_s, time.monotonic() + last_s
                results[rank] = value
            else:
                failures.append(value)
    if failures:
        # A rank that lost its peer says so; the one that was lost says why. Prefer the latter.
        first = min(failures, key=lambda one: (any(word in one.text for word in CONSEQUENCE), one.rank))
        text = first.text + ranks.stopped()
        raise first.kind(text) if first.kind else RankError(first.rank, text, ranks.describe(first.rank))
    return [results[rank] for rank in sorted(results)]


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive() and state(process.pid) == "T":
            process.kill()  # a stopped process hears nothing else
        elif process.is_alive():
            process.terminate()
    limit = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, limit - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
