"""Rehearse a foreign program in a process of its own, which may crash, exit, hang or write without end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

import ultrascale
from ultrascale.measure.foreign.request import ForeignRehearsal, ForeignRequest
from ultrascale.measure.rehearse import require_gpu
from ultrascale.specs.errors import RunError

TIMEOUT_S = 600
KEPT_BYTES = 16384
"""of a program's output: its end"""
SHOWN_LINES = 6
OF_GPU = ("triton", "cuda error", "nvidia driver")
NEEDS_GPU = "a kernel of the program's own needs a GPU: try --device cuda, on a machine that has one"
ROOT = str(Path(ultrascale.__file__).resolve().parent.parent)
CHILD = (sys.executable, "-m", "ultrascale.measure.foreign.child")
REQUEST, RESULT = "request.json", "result.json"
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
"""a dataset that is not on this machine is an error at once, rather than after many attempts"""
QUIET = {"WANDB_MODE": "disabled"}


class _Tail(threading.Thread):
    """Reads a stream to its end and keeps the last bytes."""

    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(daemon=True)
        self.stream, self.kept = stream, b""
        self.start()

    def run(self) -> None:
        while chunk := os.read(self.stream.fileno(), 65536):
            self.kept = (self.kept + chunk)[-KEPT_BYTES:]

    def lines(self) -> list[str]:
        self.join(timeout=1)
        found = [line.rstrip()[:200] for line in self.kept.decode(errors="replace").splitlines()]
        return [line for line in found if line][-SHOWN_LINES:]


def rehearse_foreign(
    request: ForeignRequest, timeout_s: float = TIMEOUT_S, progress: Callable[[str], None] = lambda _: None
) -> ForeignRehearsal:
    """RunError where the program does not complete the step that is counted."""
    request = request.checked()
    if request.on_gpu:
        require_gpu()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        Path(folder, REQUEST).write_text(json.dumps(request.to_json()), encoding="utf-8")
        code, tail = _run(request, folder, timeout_s, progress)
        result = Path(folder, RESULT)
        found = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
    if "peak" in found:
        return replace(ForeignRehearsal.of_json(found), seconds=time.perf_counter() - start)
    lines = [] if "refused" in found else tail
    said = [line.lower() for line in lines if "No module named" not in line]
    if not request.on_gpu and any(word in line for line in said for word in OF_GPU):
        lines = [*lines, NEEDS_GPU]
    sentence = _sentence(request, found, code, timeout_s)
    raise RunError("\n  ".join([sentence if lines else sentence.removesuffix(":"), *lines, *request.notes]))


def _run(
    request: ForeignRequest, folder: str, timeout_s: float, progress: Callable[[str], None]
) -> tuple[int | None, list[str]]:
    """The exit code, None after the timeout, and the last lines that it wrote."""
    environment = {**OFFLINE, **os.environ, **QUIET, **request.environment}
    # The child is of this package, wherever it was imported from; what the user has put before stays before.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), ROOT)))
    with subprocess.Popen(
        [*CHILD, folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        tail, started = _Tail(process.stdout), time.monotonic()
        try:
            while process.poll() is None:
                passed = time.monotonic() - started
                if passed > timeout_s:
                    return None, _ended(process, tail)
                progress(f"rank {request.rank} of {request.world:,} runs {request.program}: {passed:.0f} s")
                time.sleep(min(0.1, timeout_s))
        finally:
            _end(process)
        return process.returncode, tail.lines()


def _ended(process: subprocess.Popen[bytes], tail: _Tail) -> list[str]:
    _end(process)
    return tail.lines()


def _end(process: subprocess.Popen[bytes]) -> None:
    """With the processes that it started: they are of its session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _sentence(request: ForeignRequest, found: dict[str, object], code: int | None, timeout_s: float) -> str:
    program, steps = request.program, found.get("steps", 0)
    if "refused" in found:
        return f"{program} cannot be rehearsed: {found['refused']}"
    if code is None:
        return f"{program} did not complete {request.steps} optimizer steps in {timeout_s:g} s: try a longer --timeout"
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{program} {how} before it completed {request.steps} optimizer steps:"
    if not found.get("initialised"):
        return (
            f"{program} never called torch.distributed.init_process_group, so that it has no rank to rehearse: call it, as a "
            "program under torchrun does"
        )
    return f"{program} ended after {steps} optimizer steps and {request.steps} are needed: let it run more steps"
