"""A rank that stops or hangs in any phase, from the rendezvous to the end: the run ends and names the rank and the phase."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from parallel.harness import family
from ultrascale.launch import launcher
from ultrascale.train.request import Overrides, from_model

TIMEOUT_S = 3
SCRIPT = Path(__file__).with_name("stopping.py")
WORDS = ["train.data=synthetic", f"train.timeout_s={TIMEOUT_S}", "checkpoint.every=2", "train.eval_every=2"]
# The phase, and its message; a rank that has not joined under torchrun has written no heartbeat that others could read.
MESSAGES = {
    "join": "joining",
    "build": "building",
    "restore": "restoring",
    "step": "step 3, forward and backward",
    "save": "step 4, saving",
    "evaluate": "step 4, evaluating",
    "gather": "gathering measurements",
    "leave": "leaving",
}
SLOW = pytest.mark.slow
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of step 2."""
    from ultrascale.specs.model import Model

    run = tmp_path_factory.mktemp("begun") / "run"
    words = ["train.steps=2", "train.data=synthetic", "job.seq=32"]
    launcher.train(from_model(Model.load("tiny"), Overrides.parse(words), 2), run, 2, quiet=True)
    return run


def ended(start: list[str], begun: Path, out: Path, phase: str, how: str, limit_s: float) -> str:
    """The output of the run, which must end in time with an error."""
    command = [*start, str(SCRIPT), phase, how, "train", "--resume", str(begun), "--out", str(out), "--steps", "5", *WORDS]
    command += ["checkpoint.background=false"] if phase == "save" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert time.monotonic() - begin < limit_s, output
    return output


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("join", "stop"),
        ("build", "stop"),
        ("restore", "sleep"),
        ("save", "stop"),
        ("leave", "stop"),
        *(pytest.param(phase, "stop", marks=SLOW) for phase in ("restore", "step", "evaluate", "gather")),
        *(pytest.param(phase, "sleep", marks=SLOW) for phase in ("join", "build", "step", "evaluate", "gather", "leave")),
    ],
)
def test_local_processes(begun: Path, tmp_path: Path, phase: str, how: str) -> None:
    # Some 10 s to start on a busy machine; twice the limit where only the process that started the ranks can notice.
    output = ended([sys.executable], begun, tmp_path / "run", phase, how, 2 * TIMEOUT_S + 25)
    assert re.search(rf"rank 1\b.*{MESSAGES[phase]}|rank 1\b.*never said anything", output), output
    assert "The process of rank 1 is stopped" in output or how == "sleep"


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("build", "sleep"),
        *(pytest.param(phase, "stop", marks=SLOW) for phase in ("join", "build", "restore", "step", "save", "gather")),
    ],
)
def test_processes_of_torchrun(begun: Path, tmp_path: Path, phase: str, how: str) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    # torchrun gives a stopped worker 30 s to end by itself.
    output = ended(start, begun, tmp_path / "run", phase, how, 2 * TIMEOUT_S + 25 + (30 if how == "stop" else 0))
    # A stopped process no longer sends its last status, so that the one before it may be what is known.
    never = r"rank 1\b.*never said anything|ranks did not come \(rank 1\)" + (r"|rank 1\b.* is silent" if how == "stop" else "")
    assert re.search(rf"rank 1\b.*{MESSAGES[phase]}|{never}", output), output


def test_a_measurement_that_fails_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ultrascale.launch import local, machine

    def hung(*_: object, **__: object) -> None:
        raise local.RankError(0, "no answer within 60 s; still running: rank 0")

    monkeypatch.setattr(machine, "gpu_names", list)
    monkeypatch.setattr(machine, "measure_cpu", hung)
    monkeypatch.setattr(machine, "_measured", {})
    assert launcher.detect_cluster(2, "fp32") is None
    assert capsys.readouterr().err == (
        "note: no prediction to compare with, since this machine could not be measured: no answer within 60 s; still running: "
        "rank 0\n"
    )
    request = from_model(family("llama"), Overrides.parse(["train.steps=1", "train.data=synthetic", "job.seq=32"]), 1)
    ended = launcher.train(request, tmp_path / "run", predict=launcher.detect_cluster(1, "fp32"), quiet=True)
    assert ended is not None
    assert ended.predicted is None
