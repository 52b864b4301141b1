"""Run a program of `verify --runs` and compare its records and its last checkpoint with one uninterrupted process.

Each launch is `ultrascale train` in a process group of its own, which can be killed as a whole. The reference takes the same
steps in one process, each with the settings of the launch that computed it. A program that fails is shortened while it still
fails, and runs once more with every module traced in the first step that differs.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from ultrascale.launch import launcher, local
from ultrascale.measure.verify import RankResult, Reference, compare_items, first_difference, make_reference
from ultrascale.measure.verify_programs import SEQUENCES, STEPS, TIMEOUT_S, Launch, Program, simpler
from ultrascale.measure.verify_recording import StepPlan, Tracer, items_of
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.folders import METRICS, TRACES
from ultrascale.train import checkpoint
from ultrascale.train.checkpoint import Checkpoint
from ultrascale.train.dcp_io import TensorSlice, load
from ultrascale.train.engine import Engine
from ultrascale.train.loop import Observer
from ultrascale.train.optimizer import learning_rate
from ultrascale.train.request import from_words

LONGEST_LAUNCH_S = 3 * TIMEOUT_S
MAX_SHRINK_TRIES = 60  # of shorter programs


@dataclass(frozen=True)
class ProgramResult:
    """A program compared with one process."""

    program: Program
    excess: float = 0.0
    """the largest difference over its bound; up to 1, rounding explains it"""
    worst: str = ""
    problem: str = ""
    """why nothing could be compared, or what is wrong in the run's files"""
    difference: str = ""
    """the first number that differs"""
    first: tuple[int, int] | None = None
    """its step and launch"""
    where: str = ""
    """the first module of that step that differs"""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problem and self.excess <= 1


@dataclass(frozen=True)
class History:
    """Which launch computed each step of the run as it is now."""

    starts: tuple[tuple[int, int], ...] = ()
    """of each launch that ran: steps done before it, and its index in the program"""
    rows: tuple[dict[str, Any], ...] = ()
    """of metrics.jsonl after the last of these launches"""

    def launch_of(self, step: int) -> int:
        """The launch that computed a step, counted from 1: the last one that started before it."""
        return next(number for start, number in reversed(self.starts) if start < step)


def _rows(run: Path) -> tuple[dict[str, Any], ...]:
    try:
        lines = (run / METRICS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # killed before its first step
        return ()
    return tuple(json.loads(line) for line in lines if line.endswith("}"))  # a kill may cut the last line short


def check_program(program: Program) -> ProgramResult:
    """Run a program in a temporary folder and compare."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        run = Path(folder) / "run"
        try:
            histories = execute(program, run)
            verdict: ProgramResult
            (verdict,) = local.run(_compare_run, 1, program, run, histories, Path(folder), timeout_s=LONGEST_LAUNCH_S)
        except (RunError, SpecError) as failure:
            verdict = ProgramResult(program, math.inf, problem=str(failure).strip().splitlines()[-1])
    return replace(verdict, seconds=time.monotonic() - began)


def execute(program: Program, run: Path, traced: int | None = None, **tracing: Any) -> list[History]:
    """Run all launches of a program: the run's history after each. RunError where one ends in another way than planned.

    `traced`: the launch whose ranks compare modules, as `_ModuleComparer` with `tracing`.
    """
    _, model = program.save(run.parent / "program")
    histories = [History()]
    for number, one in enumerate(program.launches):
        source = _source(run, one)
        if source is None and run.exists():
            shutil.rmtree(run)  # killed before its first checkpoint
        start = 0 if source is None else checkpoint.step_of(source)
        if start >= one.steps:
            continue
        before = histories[-1].starts if source is not None else ()
        observe = partial(_ModuleComparer, launch=one, **tracing) if number == traced else partial(_PlannedEnd, launch=one)
        _launch(program, number, run, source, model, observe)
        histories.append(History((*before, (start, number)), _rows(run)))
    return histories[1:]


def _source(run: Path, one: Launch) -> Path | None:
    """The checkpoint that a launch resumes from."""
    newest = checkpoint.newest(run)
    if newest is None or one.roll_back is None:
        return newest
    steps = {checkpoint.step_of(folder): folder for folder in checkpoint.complete(run)}
    return steps[max((step for step in steps if step <= one.roll_back), default=min(steps))]


def _launch(
    program: Program, number: int, run: Path, source: Path | None, model: Path, observe: Callable[[Engine], Observer]
) -> None:
    """One launch in a process group of its own."""
    one = program.launches[number]
    first = number if source is not None else 0  # a run that starts again needs the settings of its first launch too
    words = [word for earlier in range(first, number + 1) for word in program.words(earlier)]
    errors = run.parent / f"launch-{number}.txt"

    def start() -> None:
        os.setsid()
        with errors.open("w") as file:
            os.dup2(file.fileno(), 2)
        try:
            options: dict[str, Any] = {"model": str(model)} if source is None else {"resume": source}
            request = from_words(words, {}, one.layout.gpus, False, **options)
            launcher.train(request, run, one.layout.gpus, quiet=True, observe=observe)
        except (SpecError, RunError) as error:
            sys.stderr.write(f"\n{error}\n")
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    process = local.fork(start)
    process.join(LONGEST_LAUNCH_S)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
        raise RunError(f"launch {number + 1} was still running after {LONGEST_LAUNCH_S:g} s")
    killed = one.end == "kill" and process.exitcode != 0
    if process.exitcode != 0 and not killed:
        raise RunError(f"launch {number + 1} ended with exit code {process.exitcode}: {_last_line(errors)}")


def _last_line(file: Path) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


class _PlannedEnd(Observer):
    """Ends a launch at the planned point."""

    def __init__(self, engine: Engine, launch: Launch) -> None:
        super().__init__(engine)
        self.launch, self.rank = launch, engine.mesh.rank

    def phase(self, step: int, doing: str) -> None:
        one = self.launch
        if one.end == "done" or (step, doing) != (one.at, one.phase):
            return
        if one.end == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        elif one.rank is None:
            os.killpg(0, signal.SIGKILL)
        elif one.rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


def _compare_run(
    rank: int, nproc: int, store: str, program: Program, run: Path, histories: list[History], folder: Path
) -> ProgramResult:
    """Compare the run's files with a reference that this process computes."""
    history, rows = histories[-1], histories[-1].rows
    steps = [row["step"] for row in rows]
    if steps != list(range(1, STEPS + 1)):
        return ProgramResult(program, math.inf, problem=f"metrics.jsonl has the steps {steps}, not each of 1 to {STEPS} once")
    plans = step_plans(program, history)
    rates = [learning_rate(plan.training, plan.number) for plan in plans]
    for row, wanted in zip(rows, rates, strict=True):
        if wanted != row["lr"]:
            return ProgramResult(
                program, math.inf, problem=f"step {row['step']} has the learning rate {row['lr']}, not {wanted}"
            )
    reference = make_reference(program.job(1), SEQUENCES, plans, folder / "reference.pt")
    whole = reference.whole()
    errors: dict[str, tuple[float, float, int]] = {}
    """by key: relative difference, that over its bound, and the launch that computed it"""

    def compare(history: History, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for key, value in named:
            if key in whole:
                found = (*reference.bounds.excess(key, value, whole[key]), history.launch_of(int(key.split("/")[0])))
                errors[key] = max(found, errors.get(key, found))

    final = [*_metrics(rows), *_checkpoint_tensors(checkpoint.latest(run), STEPS)]
    if unknown := sorted({key for key, _ in final} ^ set(whole)):
        return ProgramResult(program, math.inf, problem=f"of the run and one process, only one has {unknown[0]}")
    compare(history, final)
    for earlier in histories[:-1]:  # what a kill or roll-back discarded, while its learning rates are the same
        same = takewhile(lambda row: row["lr"] == rates[row["step"] - 1], earlier.rows)
        compare(earlier, _metrics(list(same)))
    worst = max(errors, key=lambda key: errors[key][1])
    first = next((key for key in reference.keys if errors[key][1] > 1), None)
    if first is None:
        return ProgramResult(program, errors[worst][1], worst)
    step, section, *name = first.split("/")
    error, _, number = errors[first]
    what = " ".join([section, *name]) + ("" if name else f" (in one process {float(whole[first].max()):.6g})")
    difference = f"step {step} of launch {number + 1}: {what} is off by {error:.1e} of its largest entry"
    return ProgramResult(program, errors[worst][1], worst, difference=difference, first=(int(step), number))


def step_plans(program: Program, history: History, traced: int | None = None) -> list[StepPlan]:
    """The run's steps for one process; `traced`: the step whose modules are compared."""
    plans = []
    for step in range(1, STEPS + 1):
        one = program.launches[history.launch_of(step)]
        training = program.base_training.changed(steps=one.steps, lr=one.lr, eval_every=one.eval_every)
        evaluate = bool(one.eval_every) and step % one.eval_every == 0
        trace = step == traced
        plans.append(StepPlan(step - 1, training, evaluate, gradients=trace, trace=trace, weights=step == STEPS))
    return plans


def _metrics(rows: Sequence[dict[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    found = []
    for row in rows:
        for name in ("loss", "z_loss", "mtp_loss", "grad_norm", "expert_tokens", "eval_loss"):
            if name in row:
                value = math.inf if row[name] is None else row[name]
                found.append((f"{row['step']}/{name}", torch.tensor(value, dtype=torch.float64)))
    return found


def _checkpoint_tensors(source: Checkpoint, step: int) -> list[tuple[str, torch.Tensor]]:
    """Weights and optimizer states of a checkpoint, whole."""
    tensors: dict[str, torch.Tensor] = {}
    pieces: dict[str, dict[str, TensorSlice]] = {}
    sections = ("model", *(f"optimizer.{moment}" for moment in source.moments))
    for stored, entry in source.names.items():
        section = next((known for known in sections if stored.startswith(f"{known}.")), None)
        if section is not None:
            name, shape = stored.removeprefix(f"{section}."), tuple(entry.size)
            key = f"{step}/{'weight' if section == 'model' else section.removeprefix('optimizer.')}/{name}"
            tensors[key] = torch.empty(shape)
            pieces.setdefault(section, {})[name] = TensorSlice.whole(shape, lambda tensor=tensors[key]: tensor)  # type: ignore[misc]
    load(pieces, source.folder, source.files, None)
    return list(tensors.items())


def shrink(failed: ProgramResult, say: Callable[[str], None] = lambda text: None) -> ProgramResult:
    """The shortest program found that still fails."""
    best, tries = failed, 0
    while tries < MAX_SHRINK_TRIES:
        for candidate in simpler(best.program):
            if candidate.problem() is not None:
                continue
            tries += 1
            say(f"making it shorter: try {tries}, {len(best.program.launches)} launches")
            verdict = check_program(candidate)
            if not verdict.ok and bool(verdict.problem) == bool(failed.problem):
                best = verdict
                break
            if tries >= MAX_SHRINK_TRIES:
                break
        else:
            break
    return replace(best, where=_first_difference(best))


def _first_difference(failed: ProgramResult) -> str:
    """The first module that differs, in the first step that differs."""
    if failed.first is None:
        return ""
    step, number = failed.first
    with tempfile.TemporaryDirectory(prefix="ultrascale-") as folder:
        run, program = Path(folder) / "run", failed.program
        try:
            history = next(one for one in reversed(execute(program, run)) if one.launch_of(step) == number)
            plans = step_plans(program, history, traced=step)
            reference = make_reference(program.job(1), SEQUENCES, plans, Path(folder) / "traced.pt")
            out = Path(folder) / TRACES
            out.mkdir()
            shutil.rmtree(run)
            execute(program, run, traced=number, step=step, reference=reference, out=out)
        except (RunError, SpecError):
            return ""
        ranks = [RankResult(**torch.load(file, weights_only=True)) for file in sorted(out.iterdir())]
        return first_difference(program.launches[number].layout, reference, ranks) if ranks else ""


class _ModuleComparer(_PlannedEnd):
    """Compares every module of one step with the reference, too."""

    def __init__(self, engine: Engine, launch: Launch, step: int, reference: Reference, out: Path) -> None:
        super().__init__(engine, launch)
        self.step, self.reference, self.out = step, reference, out
        self.tracer = Tracer(engine)

    def phase(self, step: int, doing: str) -> None:
        trace = self.tracer.take() if doing == "update" else None
        if trace is not None and step == self.step:
            result = RankResult()
            compare_items(items_of(self.engine, step, trace, gradients=True), self.reference, self.reference.whole(), result)
            torch.save(vars(result), self.out / f"{self.rank:04d}.pt")
        super().phase(step, doing)
