"""Elastic launchers: a failed job restarts and resumes from its last checkpoint, on one host and on two."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ultrascale.train import checkpoint

STEPS = 12
COMMAND = [
    *("-m", "ultrascale", "train", "--model", "tiny", "--steps", str(STEPS), "--seq", "32"),
    *("train.data=synthetic", "checkpoint.every=2", "checkpoint.keep=2"),
]
LIMIT_S = 150


def agent(out: Path, *options: str, restarts: int = 3) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--max-restarts={restarts}", "--nproc-per-node=2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    command = [*torchrun, *COMMAND, "--out", str(out)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def worker_of(parent: int, local_rank: int) -> int:
    """The process that an agent started for a rank, by the environment it was given."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            status = (folder / "status").read_text()
            given = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"PPid:\t{parent}\n" in status and f"LOCAL_RANK={local_rank}".encode() in given:
            return int(folder.name)
    raise AssertionError(f"agent {parent} has no worker {local_rank}")


def wait_for_a_checkpoint(run: Path, agents: list[subprocess.Popen[str]]) -> None:
    until = time.monotonic() + LIMIT_S
    while checkpoint.newest(run) is None:
        assert time.monotonic() < until
        assert all(one.poll() is None for one in agents), [one.communicate()[0] for one in agents]
        time.sleep(0.05)


def ended(agents: list[subprocess.Popen[str]]) -> str:
    output = "".join(one.communicate(timeout=LIMIT_S)[0] for one in agents)
    assert [one.returncode for one in agents] == [0] * len(agents), output
    return output


def curve(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_killed_worker_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    one = agent(run, "--standalone")
    wait_for_a_checkpoint(run, [one])
    os.kill(worker_of(one.pid, 1), signal.SIGKILL)
    output = ended([one])
    assert "resuming from" in output
    assert [step for step, _ in curve(run)] == list(range(1, STEPS + 1))
    environment = json.loads((run / "env.json").read_text())
    assert environment["resumed_from"] is not None
    assert len(environment["earlier"]) == 1
    assert checkpoint.latest(run).step == STEPS


@pytest.mark.slow
def test_two_hosts_recover_from_a_killed_worker(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two-hosts"]
    run = tmp_path / "run"
    agents = [agent(run, *rendezvous, "--local-addr=127.0.0.1") for _ in range(2)]
    wait_for_a_checkpoint(run, agents)
    os.kill(worker_of(agents[1].pid, 0), signal.SIGKILL)
    ended(agents)
    assert [step for step, _ in curve(run)] == list(range(1, STEPS + 1))
    assert json.loads((run / "env.json").read_text())["processes"] == 4
    assert checkpoint.latest(run).layout.dp == 4
