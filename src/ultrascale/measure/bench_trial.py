"""Train one layout for a few steps in processes of its own: what was measured, or how it failed.

A trial leads a process group, which is killed as a whole, and dies with the process that started it. The output of its ranks
goes into the run's folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

from ultrascale.launch import launcher, local
from ultrascale.launch.exit_reason import describe_exit, oom_kills
from ultrascale.launch.out_of_memory import is_out_of_memory
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.estimate import OWNERS, Estimate
from ultrascale.specs.folders import METRICS
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.units import GIB
from ultrascale.train import import_torch
from ultrascale.train.request import Request

Kind = Literal["out of memory", "timed out", "killed", "crashed", "refused", "stopped", "interrupted"]
LOG = "log.txt"
POLL_S = 0.2  # between reads of a trial's metrics
WARM_UP_STEPS = 2  # steps that say nothing of speed: the first warms up, in the second memory is measured
_KINDS: dict[str, Kind] = {
    "ran out of memory|out-of-memory killer": "out of memory",
    "has not moved for": "timed out",  # the run's own watchdog
    "SIGKILL|SIGTERM": "killed",
}
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b")


@dataclass(frozen=True)
class TrialResult:
    """A trial that reached its last step."""

    measured: Measurement
    predicted: Estimate | None
    loss: float
    """of the last step"""
    first_step_s: float
    """with compilation and first allocations"""


@dataclass(frozen=True)
class TrialFailure:
    kind: Kind
    reason: str


@dataclass(frozen=True)
class TrialStep:
    number: int
    tokens_per_s: float


def tensors_gib(side: Estimate | Measurement) -> float:
    """Of the fullest stage, without the memory of driver and allocator."""
    memory = side.memory[side.peak_stage].memory
    return sum(float(getattr(memory, owner)) for owner in OWNERS if owner != "runtime") / GIB


def run(
    request: Request,
    folder: Path,
    predict: Cluster | None = None,
    limit_s: float | None = None,
    on_steps: Callable[[list[TrialStep]], bool] = lambda steps: False,
) -> TrialResult | TrialFailure:
    """Run the request in a fresh process, with as many ranks as its layout has.

    `on_steps` is called every so often with the settled steps since its last call, also with none; True stops the trial.
    """
    import_torch()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as scratch:
        receiving, sending = context.Pipe(duplex=False)
        arguments = (request, folder, predict, sending, scratch, os.getpid())
        kills = oom_kills()
        process = context.Process(target=_in_child, args=arguments)
        process.start()
        try:
            sending.close()
            return _wait(process, receiving, kills, _MetricsTail(folder / METRICS, request), limit_s, on_steps)
        finally:
            _end(process)
            receiving.close()


def _wait(
    process: Any,
    pipe: Connection,
    kills: int | None,
    tail: _MetricsTail,
    limit_s: float | None,
    on_steps: Callable[[list[TrialStep]], bool],
) -> TrialResult | TrialFailure:
    until = None if limit_s is None else time.monotonic() + limit_s
    while not wait([pipe], timeout=POLL_S):
        if on_steps(tail.new()):
            return TrialFailure("stopped", f"stopped after step {tail.done}")
        if until is not None and time.monotonic() > until:
            return TrialFailure("timed out", f"no end within {limit_s:,.0f} s; it had done {tail.done} of {tail.steps} steps")
    try:
        answer = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):  # nothing, or a message cut short
        process.join()
        how = describe_exit(process.exitcode, kills)
        return TrialFailure(_kind(how), f"the trial ended without a word ({how})")
    on_steps(tail.new())
    assert isinstance(answer, TrialResult | TrialFailure)
    return answer


def _in_child(request: Request, folder: Path, predict: Cluster | None, pipe: Connection, scratch: str, parent: int) -> None:
    """In the fresh process: train, and send the result through the pipe."""
    os.setpgid(0, 0)
    local.die_with_parent(parent)
    tempfile.tempdir = scratch  # the parent removes what a killed trial leaves
    answer: TrialResult | TrialFailure
    try:
        _redirect_output(folder)
        answer = _train(request, folder, predict)
    except BaseException as error:
        answer = failure(error)
    pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)


def _train(request: Request, folder: Path, predict: Cluster | None) -> TrialResult | TrialFailure:
    done = launcher.train(request, folder, request.layout.gpus, predict, quiet=True)
    assert done is not None
    if done.outcome.measured is None:
        return TrialFailure("interrupted", f"stopped by {done.outcome.stopped} after step {done.outcome.step}")
    lines = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    return TrialResult(done.measured, done.predicted, lines[-1]["loss"], lines[0]["step_time_s"])


def _redirect_output(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise SpecError(f"{folder} cannot be written ({error.strerror}): name another folder, on a disk with room") from None
    sys.stdout.flush()
    sys.stderr.flush()
    for stream in (1, 2):
        os.dup2(handle, stream)


class _MetricsTail:
    """New steps in a run's metrics file."""

    def __init__(self, file: Path, request: Request) -> None:
        self.file, self.steps, self.gpus = file, request.training.steps, request.layout.gpus
        self.done = 0
        self._read = 0

    def new(self) -> list[TrialStep]:
        try:
            with self.file.open("rb") as file:
                file.seek(self._read)
                text, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._read += len(text) + len(newline)
        records = [json.loads(line) for line in text.splitlines()]
        self.done = records[-1]["step"] if records else self.done
        steps = [TrialStep(one["step"], self.gpus * one["tokens_per_s_per_gpu"]) for one in records]
        return [step for step in steps if step.number > WARM_UP_STEPS]


def _end(process: Any) -> None:
    """Kill the trial with all its ranks."""
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group yet
            process.kill()
    process.join()


def failure(error: BaseException) -> TrialFailure:
    """An exception as it is recorded."""
    text = str(error).strip()
    if is_out_of_memory(error):
        return TrialFailure("out of memory", f"{type(error).__name__}: {text.splitlines()[0] if text else 'no more memory'}")
    if isinstance(error, SpecError):
        return TrialFailure("refused", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, RunError):
        errors = [line for line in lines if _ERROR.match(line)]  # of a traceback, which may end in notes
        line = errors[-1] if errors else " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
        return TrialFailure(_kind(text), line)
    return TrialFailure("crashed", f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def _kind(text: str) -> Kind:
    return next((kind for words, kind in _KINDS.items() if re.search(words, text)), "crashed")
