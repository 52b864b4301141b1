"""SIGKILL of a rank, the parent or all at any time from process start on: resumed to its end, the run is the same."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.harness import family
from ultrascale.launch import launcher
from ultrascale.launch.exit_reason import state
from ultrascale.train import checkpoint
from ultrascale.train.request import Overrides, Request, from_checkpoint, from_model

STEPS, TIMEOUT_S = 8, 20
GRACE_S = 10  # beyond the timeout: the two grace periods of launch/local.py, and a busy machine
WORDS = [
    *(f"train.steps={STEPS}", "train.data=synthetic", "train.eps=1e-4", f"train.timeout_s={TIMEOUT_S}", "job.seq=32"),
    *("train.eval_every=2", "train.eval_batches=1", "checkpoint.every=2", "checkpoint.keep=2"),
]
VICTIMS = ("rank 0", "rank 1", "parent", "all")
FORK = multiprocessing.get_context("fork")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def begin(request: Request, out: Path) -> Any:
    """A process that leads a session and starts two ranks, as the command line does."""

    def work() -> None:
        os.setsid()
        launcher.train(request, out, 2, quiet=True)

    process = FORK.Process(target=work)
    process.start()
    return process


def next_request(run: Path) -> Request:
    """The run from its first step if it has no checkpoint yet, or resumed."""
    if checkpoint.newest(run) is None:
        shutil.rmtree(run, ignore_errors=True)
        return from_model(family("llama"), Overrides.parse(WORDS), 2)
    return from_checkpoint(checkpoint.latest(run), Overrides())


def members(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            if os.getsid(pid) == leader and state(pid) not in ("Z", ""):
                found.append(pid)
        except ProcessLookupError:
            continue
    return sorted(found)


def kill(leader: int, victim: str) -> bool:
    """Whether a process was alive to be killed."""
    ranks = [pid for pid in members(leader) if pid != leader]
    victims = {"parent": [leader], "all": [*ranks, leader], "rank 0": ranks[:1], "rank 1": ranks[1:2]}[victim]
    alive = [pid for pid in victims if state(pid) not in ("Z", "")]
    for pid in alive:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
    return bool(alive)


def rows(run: Path) -> list[tuple[Any, ...]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], line.get("eval_loss")) for line in lines]


def assert_same(run: Path, reference: Path) -> None:
    assert rows(run) == rows(reference)
    mine, theirs = checkpoint.latest(run), checkpoint.latest(reference)
    assert mine.step == theirs.step == STEPS
    for name in theirs.shapes():
        assert torch.equal(mine.tensor(name), theirs.tensor(name)), name
    assert not list((run / "checkpoints").glob("abandoned-*"))  # a crash is no roll-back


@dataclass
class Tally:
    kills: int = 0
    resumed: int = 0
    """launches after a kill that ended by themselves or got as far as the next kill"""
    from_steps: set[int] = field(default_factory=set)
    longest_wait_s: float = 0.0


def killed_at_random(folder: Path, reference: Path, lasts_s: float, kills: int, seed: int) -> Tally:
    """Runs, killed so often all together, each of which ends as the reference did."""
    chance, tally, number = random.Random(seed), Tally(), 0
    while tally.kills < kills:
        number += 1
        run = folder / str(number)
        while checkpoint.newest(run) is None or checkpoint.latest(run).step < STEPS:
            request = next_request(run)
            process = begin(request, run)
            killed, started = False, time.monotonic()
            if tally.kills < kills:
                process.join(chance.uniform(0, lasts_s))
                killed = process.exitcode is None and kill(process.pid, chance.choice(VICTIMS))
                if process.exitcode is not None:  # faster than the reference was: later kills come earlier
                    lasts_s = min(lasts_s, time.monotonic() - started)
            at = time.monotonic()
            process.join(TIMEOUT_S + GRACE_S + (0 if killed else 60))
            while killed and members(process.pid):
                assert time.monotonic() - at < TIMEOUT_S + GRACE_S, members(process.pid)
                time.sleep(0.01)
            assert process.exitcode is not None, "the run neither went on nor ended"
            if killed:
                tally.kills += 1
                tally.longest_wait_s = max(tally.longest_wait_s, time.monotonic() - at)
                tally.from_steps.add(checkpoint.step_of(checkpoint.newest(run) or run))
            else:
                assert process.exitcode == 0
        assert_same(run, reference)
        tally.resumed = tally.kills
        shutil.rmtree(run)
    return tally


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run that is left alone, and the seconds that it takes."""
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("reference") / "run"
    at = time.monotonic()
    process = begin(next_request(run), run)
    process.join()
    assert process.exitcode == 0
    return run, time.monotonic() - at


def test_a_few_kills(tmp_path: Path, reference: tuple[Path, float]) -> None:
    tally = killed_at_random(tmp_path, *reference, kills=6, seed=3)
    assert tally.resumed == 6


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path, reference: tuple[Path, float], capsys: pytest.CaptureFixture[str]) -> None:
    tally = killed_at_random(tmp_path, *reference, kills=100, seed=4)
    with capsys.disabled():
        print(f"\n{tally}")
    assert tally.resumed == 100
    assert len(tally.from_steps) >= 3, "the kills fell on few steps: the moments are no longer spread over the run"
