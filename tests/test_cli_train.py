"""`ultrascale train` and `verify` as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from builders import SMALL
from ultrascale.launch import launcher, machine
from ultrascale.launch.cpu_rates import CPURates, LinkRate
from ultrascale.launch.machine import cpu_cluster
from ultrascale.specs.measurement import Measurement
from ultrascale.specs.plan import Plan

Run = Callable[..., tuple[int, str, str]]
FIELDS = ["step", "tokens", "loss", "grad_norm", "lr", "tokens_per_s_per_gpu", "mfu", "peak_gib"]


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured again for every test."""
    rates, link = CPURates(1e10, 1e10, 5e-6, 5e9, 5e9, 5e8), LinkRate(1e9, 1e-4)
    monkeypatch.setattr(launcher, "detect_cluster", lambda world, precision, *_: cpu_cluster(world, rates, link, 2.0**34))


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_short_run_writes_a_complete_folder(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ("--steps", 3, "--nproc", 4, "--seed", 1, "--out", out, "layout.dp=2", "layout.tp=2")
    code, printed, err = run("train", "--model", SMALL, *arguments)
    assert code == 0, err
    lines = metrics(out)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(list(line)[: len(FIELDS)] == FIELDS for line in lines)
    assert [line["tokens"] for line in lines] == [2048 * step for step in range(1, 4)]
    assert all(line["mfu"] is None for line in lines)
    assert "predicted" in printed
    assert "difference" in printed
    plan = Plan.load(out / "plan.yaml")
    assert (plan.layout.dp, plan.layout.tp) == (2, 2)
    measurement = Measurement.load(out / "measurement.json")
    memory, predicted = measurement.memory[0].memory, plan.estimate.memory[0].memory
    for owner in ("parameters", "gradients", "optimizer"):
        assert getattr(memory, owner) == pytest.approx(getattr(predicted, owner), rel=0.03)
    assert memory.activations == pytest.approx(predicted.activations + predicted.buffers, rel=0.1)
    assert measurement.time.tensor_s > 0
    assert json.loads((out / "env.json").read_text())["processes"] == 4


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize(
    "words",
    [("layout.pp=2", "layout.schedule=zero-bubble"), ("layout.cp=2", "layout.context_parallel=ulysses", "layout.zero=3")],
    ids=str,
)
def test_the_same_numbers_on_every_layout(run: Run, tmp_path: Path, words: tuple[str, ...]) -> None:
    for name, nproc, given in (("one", 1, ()), ("cut", 2, words)):
        arguments = ("--steps", 3, "--nproc", nproc, "--out", tmp_path / name, "train.eval_every=3", *given)
        code, _, err = run("train", "--model", SMALL, *arguments)
        assert code == 0, err
    for one, cut in zip(metrics(tmp_path / "one"), metrics(tmp_path / "cut"), strict=True):
        for field in ("loss", "grad_norm"):
            assert cut[field] == pytest.approx(one[field], rel=1e-5)
    assert metrics(tmp_path / "cut")[-1]["eval_loss"] == pytest.approx(metrics(tmp_path / "one")[-1]["eval_loss"], rel=1e-5)


def test_expert_loads_are_logged(run: Run, tmp_path: Path) -> None:
    words = ("train.balance_loss=0.01", "train.capacity_factor=1")
    code, _, err = run("train", "--model", "tiny-moe", "--steps", 2, "--nproc", 2, "--out", tmp_path / "run", *words)
    assert code == 0, err
    for line in metrics(tmp_path / "run"):
        assert len(line["expert_load"]) == 8
        assert all(1 <= load <= 8 for load in line["expert_load"])
        assert line["balance_loss"] == pytest.approx(1, abs=0.3)
        assert 0 < line["dropped_tokens"] < 2 * 8 * line["tokens"]
        tokens = line["tokens"] / line["step"]
        assert [sum(layer) for layer in line["expert_tokens"]] == [2 * tokens] * 8
        busiest = [max(layer) * len(layer) / sum(layer) for layer in line["expert_tokens"]]
        assert line["expert_load"] == pytest.approx(busiest)


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize(
    ("words", "is_measured"), [("layout.zero=2", False), ("layout.data_parallel=ddp", False), ("layout.zero=0", True)]
)
def test_collectives_inside_torch_are_not_reported_as_measured(run: Run, tmp_path: Path, words: str, is_measured: bool) -> None:
    code, printed, err = run("train", "--model", SMALL, "--steps", 2, "--nproc", 2, "--out", tmp_path / "run", words)
    assert code == 0, err
    measured = Measurement.load(tmp_path / "run" / "measurement.json")
    assert (measured.time.data_s is not None) == is_measured
    assert ("part of computing" in printed) != is_measured
    assert ("not measured" in printed) != is_measured


@pytest.mark.slow  # at the default level the README's commands do this
def test_a_plan_runs_unchanged_and_is_verified(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    arguments = (
        "--cluster",
        "2xh100",
        "--batch-tokens",
        2048,
        "--seq",
        128,
        "--fix",
        "pp=2",
        "--fix",
        "schedule=1f1b",
        "-o",
        plan,
    )
    assert run("plan", "tiny", *arguments)[0] == 0
    code, _, err = run("train", plan, "--nproc", 2, "--steps", 2, "--out", tmp_path / "run")
    assert code == 0, err
    assert "in fp32" in err
    code, printed, err = run("verify", plan, "--json", tmp_path / "out.json")
    assert code == 0, err
    assert "1 of 1 layouts compute the same as one process" in printed
    (row,) = json.loads((tmp_path / "out.json").read_text())["layouts"]
    assert row["ok"] is True
    assert row["layout"]["pp"] == 2
    assert max(row["loss_error"], row["grad_error"]) <= 1e-5


@pytest.mark.slow  # likewise
def test_random_runs_are_verified_and_feature_pairs_shown(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, err = run("verify", "--runs", 1, "--seed", 3, "--processes", 2, "--json", tmp_path / "out.json")
    assert code == 0, printed + err
    lines = printed.splitlines()
    assert lines[-1] == "1 of 1 runs are equal to one uninterrupted process, within rounding"
    assert any("pairs of features ran together" in line for line in lines)
    assert max(map(len, lines)) <= 100
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["programs"][0]["ok"] is True
    assert found["programs"][0]["over_bound"] <= 1
    assert len(found["pairs"]) > 10


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_memory_by_owner_is_what_was_predicted(run: Run, tmp_path: Path, zero: int) -> None:
    words = (f"layout.zero={zero}", "layout.mbs=4", "layout.gas=2")
    code, _, err = run("train", "--model", SMALL, "--steps", 2, "--nproc", 2, "--out", tmp_path, *words)
    assert code == 0, err
    predicted = Plan.load(tmp_path / "plan.yaml").estimate.memory[0].memory
    memory = Measurement.load(tmp_path / "measurement.json").memory[0].memory
    for owner in ("parameters", "master", "gradients", "optimizer"):
        assert getattr(memory, owner) == pytest.approx(getattr(predicted, owner), rel=0.03), owner
    assert memory.activations + memory.buffers == pytest.approx(predicted.activations + predicted.buffers, rel=0.1)


def test_a_run_in_this_process_restores_the_thread_count(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls are counted and threads not set: threads that a test used would be missing in ranks that other tests fork."""
    calls: list[int] = []
    monkeypatch.setattr(machine, "cores", lambda: 3)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    before = torch.get_num_threads()
    code, _, err = run("train", "--model", SMALL, "--steps", "2", "--seq", "32", "--out", tmp_path / "x")
    assert code == 0, err
    assert calls == [3, before]


def test_json_is_for_machines(run: Run, tmp_path: Path) -> None:
    code, printed, _ = run("train", "--model", SMALL, "--steps", 2, "--json", "--out", tmp_path / "run")
    assert code == 0
    output = json.loads(printed)
    assert set(output) == {"folder", "layout", "predicted", "step", "stopped", "reached_loss", "checkpoint", "measured"}
    assert (output["step"], output["stopped"], Path(output["checkpoint"]).name) == (2, None, "step-000002")
    assert output["measured"]["processes"] == 1


def test_a_nan_loss_ends_the_run_with_step_and_parameter(run: Run, tmp_path: Path) -> None:
    words = ("train.lr=100", "train.clip=0", "train.warmup_steps=0", "job.optimizer=sgd")
    code, _, err = run("train", "--model", SMALL, "--steps", 40, "--nproc", 2, "--out", tmp_path / "run", *words)
    assert code == 1
    assert "error: step" in err
    assert "Try a lower train.lr" in err
    assert "Traceback" not in err
    assert metrics(tmp_path / "run")


def test_a_rank_that_dies_fails_the_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ultrascale.launch import rank as loop

    def die(request: Any, rank_info: Any, *_: Any) -> None:
        if rank_info.rank == 1:
            os._exit(3)

    monkeypatch.setattr(loop, "run_rank", die)
    code, _, err = run("train", "--model", SMALL, "--steps", 2, "--nproc", 2, "--out", tmp_path / "run")
    assert code == 1
    assert "rank 1" in err
    assert "exit code 3" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train",), "a plan or --model"),
        (("train", "plan.yaml", "--model", "tiny"), "a plan or --model"),
        (("train", "--model", "tinny"), "tiny"),
        (("train", "nothing.yaml"), "nothing.yaml"),
        (("train", "--model", "tiny", "layout.dp=2"), "there is one process"),
        (("train", "--model", "tiny", "--nproc", "2", "layout.tq=2"), "did you mean 'tp'"),
        (("train", "--model", "tiny", "train.log=tensorbord"), "tensorboard"),
        (("verify",), "a plan, --world, --runs, --program or --dump"),
        (("verify", "--world", "2", "--runs", "2"), "one of them"),
        (("verify", "--world", "2", "--precision", "int4"), "--precision is 'int4' but must be one of fp32"),
        (("verify", "--program", "missing.yaml"), "does not exist"),
        (("verify", "--program", "missing.yaml", "--seed", "3"), "--seed is not for --program"),
        (("verify", "--runs", "2", "--precision", "bf16"), "--precision is not for --runs"),
        (("verify", "--world", "2", "--processes", "2"), "--processes is not for layouts, only for --runs"),
        (("verify", "--world", "99"), "from 1 to 16"),
        (("verify", "--world", "2", "--only", "ep"), "--only"),
        (("verify", "--world", "2", "--only", "pp,tp"), "no layout of 2 processes"),
        (("verify", "--world", "2", "--model", "llama-3-8b"), "try tiny"),
    ],
    ids=str,
)
def test_unusable_options_have_clear_errors(run: Run, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    code, _, err = run(*arguments, *(("--out", tmp_path / "x") if arguments[0] == "train" else ()))
    assert code == 2
    assert says in err
    assert "Traceback" not in err
    assert not (tmp_path / "x").exists()


def test_a_folder_with_a_run_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("kept\n")
    code, _, err = run("train", "--model", SMALL, "--steps", 1, "--out", tmp_path)
    assert code == 2
    assert "holds a run already" in err
    assert (tmp_path / "metrics.jsonl").read_text() == "kept\n"


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ultrascale"]
    words = ["train", "--model", "tiny", "--steps", "2", "--out", str(tmp_path / "run"), "layout.tp=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert len(metrics(tmp_path / "run")) == 2
