"""Runs that are killed at any time and resume: no checkpoint is lost, and the curve is that of an undisturbed run."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import exit_in_call
from parallel.harness import family
from ultrascale.launch import launcher
from ultrascale.train import checkpoint
from ultrascale.train.checkpoint import CheckpointState
from ultrascale.train.dcp_io import TensorSlice, save
from ultrascale.train.request import Overrides, Request, from_checkpoint, from_model

STEPS = 8
WORDS = [
    f"train.steps={STEPS}",
    "train.data=synthetic",
    "train.eps=1e-4",
    "job.seq=32",
    "checkpoint.every=1",
    "checkpoint.keep=2",
]
FORK = multiprocessing.get_context("fork")


def request(*words: str, world: int = 2) -> Request:
    return from_model(family("llama"), Overrides.parse([*WORDS, *words]), world)


def in_a_group_of_its_own(work: Callable[..., Any], *arguments: Any) -> Any:
    """A process that leads a session, so that it and its ranks can be killed together."""

    def begin() -> None:
        os.setsid()
        work(*arguments)

    process = FORK.Process(target=begin)
    process.start()
    return process


def trained(requested: Request, out: Path) -> None:
    launcher.train(requested, out, requested.layout.gpus, quiet=True)


def curve(run: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """An undisturbed run, and the seconds from its first checkpoint to its end."""
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("peaceful") / "run"
    process = in_a_group_of_its_own(trained, request(), run)
    begun = wait_for(run)
    process.join()
    assert process.exitcode == 0
    return run, time.monotonic() - begun


def wait_for(run: Path, limit_s: float = 60) -> float:
    until = time.monotonic() + limit_s
    while checkpoint.newest(run) is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    return time.monotonic()


def killed_and_resumed(run: Path, delay_s: float, *words: str) -> int:
    """Kills the run so long after its first checkpoint and resumes it; returns the step it resumed from."""
    process = in_a_group_of_its_own(trained, request(), run)
    wait_for(run)
    time.sleep(delay_s)
    with contextlib.suppress(ProcessLookupError):  # it had ended
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    source = checkpoint.latest(run)
    if source.step < STEPS:
        again = in_a_group_of_its_own(trained, from_checkpoint(source, Overrides.parse(words)), run)
        again.join()
        assert again.exitcode == 0
        assert not list((run / "checkpoints").glob(".*"))  # a run that had all its steps when it was killed does not resume
    return source.step


def tried(tmp_path: Path, peaceful: tuple[Path, float], times: int, seed: int) -> None:
    reference, lasts_s = peaceful
    chance, steps = random.Random(seed), []
    for number in range(times):
        run = tmp_path / str(number)
        other = number % 5 == 4
        steps.append(killed_and_resumed(run, chance.uniform(0, lasts_s), *(["layout.tp=2"] if other else [])))
        if not other:
            assert curve(run) == curve(reference)
        for (step, *mine), (expected, *theirs) in zip(curve(run), curve(reference), strict=True):
            assert step == expected
            assert mine == pytest.approx(theirs, rel=1e-5)
        shutil.rmtree(run)
    assert len(set(steps)) > 1, "the kills fell on one step: the delays are no longer spread over the run"


def test_ten_runs_killed_at_random_resume(tmp_path: Path, peaceful: tuple[Path, float]) -> None:
    tried(tmp_path, peaceful, 10, seed=1)


@pytest.mark.slow
def test_a_hundred_runs_killed_at_random_resume(tmp_path: Path, peaceful: tuple[Path, float]) -> None:
    tried(tmp_path, peaceful, 100, seed=2)


def write(run: Path, value: float) -> None:
    """A checkpoint of one tensor, step = value."""
    requested, step = request(), int(value)
    folder = checkpoint.partial_folder(run, step)
    folder.mkdir(parents=True, exist_ok=True)
    state = CheckpointState(step=step, job=requested.job, layout=requested.layout, training=requested.training)
    pieces = {"model": {"weight": TensorSlice.whole((4,), lambda: torch.full((4,), value))}}
    save(pieces, folder, lambda sums: checkpoint.commit(run, state, sums, keep=1), None)


def write_until(run: Path, calls: int) -> None:
    """Writes step 2, and dies in the given one of the calls that touch the disk."""
    exit_in_call(calls, "fsync", "replace", "open", "unlink", "rmdir", "rename", "mkdir")
    write(run, 2.0)
    os._exit(0)


def test_a_kill_between_any_two_calls_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "first", 1.0)
    found, calls, code = [], 0, 9
    while code == 9:
        calls += 1
        run = Path(shutil.copytree(tmp_path / "first", tmp_path / str(calls)))
        process = FORK.Process(target=write_until, args=(run, calls))
        process.start()
        process.join()
        code = process.exitcode or 0
        newest = checkpoint.latest(run)
        assert torch.equal(newest.tensor("weight"), torch.full((4,), float(newest.step)))
        found.append(newest.step)
    assert code == 0
    assert calls > 8
    assert found == sorted(found)  # the old one up to some call, the new one from then on
    assert {1, 2} == set(found)


def test_the_newest_checkpoint_is_used_without_a_latest_file(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    (tmp_path / "checkpoints" / "latest").write_text("step-000099\n")
    assert checkpoint.latest(tmp_path).step == 1
    (tmp_path / "checkpoints" / "latest").write_bytes(b"\xff\xfe")
    assert checkpoint.latest(tmp_path).step == 1
    (tmp_path / "checkpoints" / "latest").write_text("../../elsewhere/step-000001\n")
    assert checkpoint.latest(tmp_path).folder.parent == tmp_path / "checkpoints"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `ultrascale train`; what still runs when the test ends is killed."""
    with contextlib.ExitStack() as ending:

        def call(run: Path, *words: str, **pipes: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "ultrascale", "train", "--model", "tiny", "--seq", "32", "--out", str(run), *words]
            process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, **pipes)
            ending.callback(process.kill)
            return process

        yield call


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_saves_and_ends_cleanly(tmp_path: Path, start: Any, number: signal.Signals, world: int) -> None:
    words = ["--nproc", str(world), "--steps", "100000", "train.data=synthetic"]
    process = start(tmp_path / "run", *words, stdout=subprocess.PIPE)
    until, metrics = time.monotonic() + 90, tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    source = checkpoint.latest(tmp_path / "run")
    assert source.step == curve(tmp_path / "run")[-1][0] >= 2
    assert f"stopped by {number.name} after step {source.step} of 100000; checkpoint {source.folder.name}" in output
    assert f"resume with ultrascale train --resume {tmp_path / 'run'}" in output.replace("\n", " ")
    assert (source.training.steps, source.layout.dp) == (100_000, world)


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(word) for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (
            signal.SIGKILL,
            [r"rank 1 \(tp 1\) failed", r"signal SIGKILL: it was killed from outside", r"it was at step \d+, "],
        ),
        (
            signal.SIGSTOP,
            [
                r"rank 0 \(tp 0\) has not moved for \d s: step \d+, .* waiting in (all_gather|reduce_scatter|all_reduce) over",
                r"rank 1 \(tp 1\) is silent",
                "The process of rank 1 is stopped",
            ],
        ),
    ],
    ids=["killed", "stopped"],
)
def test_a_dead_rank_is_named_and_no_checkpoint_is_lost(
    tmp_path: Path, start: Any, number: signal.Signals, expected: list[str]
) -> None:
    run = tmp_path / "run"
    words = [
        "--nproc",
        "2",
        "--steps",
        "100000",
        "train.data=synthetic",
        "layout.tp=2",
        "checkpoint.every=2",
        "train.timeout_s=3",
    ]
    process = start(run, *words, stderr=subprocess.PIPE)
    wait_for(run, 90)
    ranks = children(process)
    os.kill(ranks[1], number)
    at = time.monotonic()
    _, output = process.communicate(timeout=60)
    assert time.monotonic() - at < 3 + 10  # its limit, and what ending the ranks may take
    assert process.returncode == 1
    for line in expected:
        assert re.search(line, output), output
    kept = checkpoint.latest(run)
    assert f"The last checkpoint is {kept.folder.name}: go on with ultrascale train --resume {run}" in output
    assert all(tensor.isfinite().all() for tensor in map(kept.tensor, kept.shapes()))
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
