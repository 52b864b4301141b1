"""Roll-backs: what they set aside, that a kill at any time loses nothing, and that no abandoned checkpoint is resumed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from builders import SMALL, exit_in_call
from conftest import Run
from parallel.harness import family
from ultrascale.specs.errors import SpecError
from ultrascale.train import checkpoint, history
from ultrascale.train.checkpoint import CheckpointState
from ultrascale.train.request import Overrides, from_model

FORK = multiprocessing.get_context("fork")
REQUEST = from_model(family("llama"), Overrides.parse(["train.steps=8", "train.data=synthetic", "job.seq=32"]), 1)


def save(run: Path, step: int, branch: str, keep: int = 0) -> None:
    """A checkpoint without tensors, with the branch's name in a file."""
    folder = checkpoint.partial_folder(run, step)
    folder.mkdir(parents=True)
    (folder / "branch").write_text(branch)
    checkpoint.commit(
        run, CheckpointState(step=step, job=REQUEST.job, layout=REQUEST.layout, training=REQUEST.training), {}, keep
    )


def train(run: Path, first: int, last: int, branch: str) -> None:
    """Rows of these steps, a checkpoint at each even one."""
    for step in range(first, last + 1):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": 1.0, "branch": branch}) + "\n")
        if step % 2 == 0:
            save(run, step, branch)


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Checkpoints of steps 2, 4 and 6, and rows up to step 7."""
    run = tmp_path / "run"
    run.mkdir()
    train(run, 1, 7, "first")
    return run


def roll_back(run: Path, name: str) -> Path | None:
    history.record_rollback(run, run / "checkpoints" / name)
    return history.finish_rollback(run)


def rows(run: Path, file: str = "metrics.jsonl") -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (run / file).read_text().splitlines()]
    return [(row["step"], row["branch"]) for row in rows]


def branches(run: Path) -> dict[str, str]:
    """The branch that each complete checkpoint is of."""
    found = sorted((run / "checkpoints").rglob("step-*"))
    return {str(one.relative_to(run / "checkpoints")): (one / "branch").read_text() for one in found}


def test_a_rollback_sets_later_checkpoints_and_rows_aside(three: Path) -> None:
    source, planned = history.record_rollback(three, three / "checkpoints" / "step-000002")
    assert planned is not None
    assert branches(three) == dict.fromkeys(["step-000002", "step-000004", "step-000006"], "first")  # nothing has moved yet
    assert checkpoint.newest(three) == source
    text = history.describe_rollback(three, planned)
    assert text.startswith("step-000004, step-000006 of the branch that the run leaves are set aside in ")
    assert f"return to it with --resume {three}/checkpoints/abandoned-001/step-000006" in text
    assert history.finish_rollback(three) == three / "checkpoints" / "step-000002"
    assert list(branches(three)) == ["abandoned-001/step-000004", "abandoned-001/step-000006", "step-000002"]
    assert (three / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert [step for step, _ in rows(three)] == [1, 2]
    assert [step for step, _ in rows(three, "metrics.abandoned-001.jsonl")] == [1, 2, 3, 4, 5, 6, 7]


def test_resuming_from_the_newest_sets_nothing_aside(three: Path) -> None:
    assert history.record_rollback(three, three / "checkpoints" / "step-000006") == (
        three / "checkpoints" / "step-000006",
        None,
    )
    assert not (three / "checkpoints" / "rollback.json").exists()
    assert history.finish_rollback(three) is None


def test_no_abandoned_checkpoint_is_the_newest_when_latest_is_unreadable(three: Path) -> None:
    history.record_rollback(three, three / "checkpoints" / "step-000002")
    for _ in range(2):  # recorded, then finished
        (three / "checkpoints" / "latest").write_bytes(b"\xff")
        assert checkpoint.latest(three).step == 2
        history.finish_rollback(three)
    (three / "checkpoints" / "latest").unlink()
    assert checkpoint.latest(three).step == 2


def test_an_abandoned_checkpoint_that_is_named_returns_with_its_history(three: Path) -> None:
    roll_back(three, "step-000002")
    train(three, 3, 6, "second")
    assert roll_back(three, "abandoned-001/step-000004") == three / "checkpoints" / "step-000004"
    assert branches(three) == {
        "abandoned-001/step-000006": "first",
        "abandoned-002/step-000004": "second",
        "abandoned-002/step-000006": "second",
        "step-000002": "first",
        "step-000004": "first",
    }
    assert rows(three) == [(step, "first") for step in (1, 2, 3, 4)]
    assert rows(three, "metrics.abandoned-002.jsonl")[2:] == [(step, "second") for step in (3, 4, 5, 6)]
    train(three, 5, 6, "third")
    assert roll_back(three, "abandoned-002/step-000006") == three / "checkpoints" / "step-000006"
    assert rows(three) == [(1, "first"), (2, "first"), *((step, "second") for step in (3, 4, 5, 6))]
    assert branches(three)["step-000004"] == "second"
    assert branches(three)["abandoned-003/step-000004"] == "first"
    assert branches(three)["abandoned-003/step-000006"] == "third"
    assert not (three / "checkpoints" / "abandoned-002").exists()  # all of it returned


def test_rows_without_a_checkpoint_are_kept_when_the_run_returns_to_an_abandoned_one(three: Path) -> None:
    roll_back(three, "step-000002")
    train(three, 3, 3, "second")
    roll_back(three, "abandoned-001/step-000006")
    assert [step for step, _ in rows(three)] == [1, 2, 3, 4, 5, 6]
    assert rows(three, "metrics.abandoned-002.jsonl")[-1] == (3, "second")


def test_keep_counts_steps_of_the_current_branch_and_no_clock(three: Path) -> None:
    roll_back(three, "step-000002")
    save(three, 4, "second")
    os.utime(three / "checkpoints" / "step-000002" / "checkpoint.json", (2**31, 2**31))  # written by a clock ahead
    save(three, 6, "second", keep=2)
    assert sorted(branches(three)) == [
        *("abandoned-001/step-000004", "abandoned-001/step-000006"),
        *("step-000004", "step-000006"),
    ]


def test_a_damaged_record_is_refused(three: Path) -> None:
    (three / "checkpoints" / "rollback.json").write_text("{")
    with pytest.raises(SpecError, match=r"rollback\.json records a roll-back but cannot be read .*: delete it, and name"):
        checkpoint.newest(three)


def interrupted(run: Path, name: str, calls: int) -> None:
    """Rolls back, and dies before the given one of the calls that change the disk."""
    exit_in_call(calls, "fsync", "replace", "unlink", "rmdir", "rename", "mkdir", "chmod")
    roll_back(run, name)
    os._exit(0)


def contents(run: Path) -> dict[str, str]:
    """Every file but those that a resumed run deletes."""
    files = [one for one in run.rglob("*") if one.is_file() and not one.name.endswith(".tmp")]
    return {str(one.relative_to(run)): one.read_text() for one in sorted(files)}


@pytest.mark.quick_cases("step-000002")
@pytest.mark.parametrize("name", ["step-000002", "abandoned-001/step-000006"])
def test_a_kill_between_any_two_operations_loses_no_checkpoint(three: Path, tmp_path: Path, name: str) -> None:
    if name.startswith("abandoned"):
        roll_back(three, "step-000002")
        train(three, 3, 6, "second")
    finished = Path(shutil.copytree(three, tmp_path / "finished"))
    roll_back(finished, name)

    def source_of(run: Path) -> tuple[int, str]:
        found = checkpoint.latest(run)
        return found.step, (found.folder / "branch").read_text()

    before, after = source_of(three), source_of(finished)
    calls, code, found = 0, 9, []
    while code == 9:
        calls += 1
        run = Path(shutil.copytree(three, tmp_path / str(calls)))
        process = FORK.Process(target=interrupted, args=(run, name, calls))
        process.start()
        process.join()
        code = process.exitcode or 0
        found.append(source_of(run))
        if found[-1] == after:  # resumed by the run's folder, as a user or a launcher would
            history.record_rollback(run, checkpoint.latest(run).folder)
            history.finish_rollback(run)
            assert contents(run) == contents(finished), calls
    assert code == 0
    assert found == sorted(found, key=[before, after].index)  # once the record is written, it is the new one
    assert found.index(after) == 4  # mkdir, fsync, chmod and rename of the record
    assert calls > 15


def curve(run: Path, file: str = "metrics.jsonl") -> dict[int, float]:
    rows = [json.loads(line) for line in (run / file).read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


@pytest.fixture
def trained(tmp_path: Path, run: Run) -> Path:
    words = ("--seq", 32, "train.data=synthetic", "train.warmup_steps=0", "checkpoint.every=2", "checkpoint.keep=0")
    out = tmp_path / "run"
    code, _, err = run("train", "--model", SMALL, "--steps", 6, "--out", out, *words)
    assert code == 0, err
    return out


def test_a_killed_run_resumes_after_its_rollback(trained: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from ultrascale.train.engine import Engine

    first = curve(trained)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "backward", killed)
        code, _, err = run("train", "--resume", trained / "checkpoints" / "step-000002", "train.lr=1e-2")
    assert code != 0
    assert "step-000004, step-000006 of the branch that the run leaves are set aside" in err
    assert checkpoint.latest(trained).step == 2
    code, _, err = run("train", "--resume", trained)
    assert code == 0, err
    assert "as the last launch from this checkpoint was given, which saved none: train.lr=0.01" in err.replace("\n", " ")
    second = curve(trained)
    assert list(second) == [1, 2, 3, 4, 5, 6]
    assert [second[step] == first[step] for step in second] == [True, True, True, False, False, False]
    assert checkpoint.latest(trained).training.lr == 1e-2
    assert curve(trained, "metrics.abandoned-001.jsonl") == first
    code, _, err = run("train", "--resume", trained / "checkpoints" / "abandoned-001" / "step-000004", "--steps", 6)
    assert code == 0, err
    assert curve(trained) == first
    assert curve(trained, "metrics.abandoned-002.jsonl") == second
    assert [one.name for one in checkpoint.complete(trained)] == ["step-000002", "step-000004", "step-000006"]


def test_settings_of_a_launch_that_saved_are_those_of_its_checkpoint(trained: Path, run: Run) -> None:
    assert run("train", "--resume", trained, "--steps", 8, "train.lr=1e-2")[0] == 0
    code, _, err = run("train", "--resume", trained, "--steps", 10)
    assert code == 0, err
    assert "as the last launch" not in err
    assert checkpoint.latest(trained).training.lr == 1e-2


@pytest.mark.parametrize(
    "fields",
    [
        {"source": "../../step-000002"},
        {"moves": [["step-000006", "/tmp/step-000006"]]},
        {"abandoned_metrics": "../metrics.jsonl"},
    ],
    ids=["source", "moves", "metrics"],
)
def test_a_record_that_names_a_path_outside_the_run_is_refused(three: Path, fields: dict[str, Any]) -> None:
    good = {"source": "step-000002", "moves": [], "history": "metrics.jsonl", "abandoned_metrics": None}
    (three / "checkpoints" / "rollback.json").write_text(json.dumps({**good, **fields}))
    with pytest.raises(SpecError, match=r"rollback\.json records a roll-back but cannot be read"):
        history.finish_rollback(three)
    assert len(checkpoint.complete(three)) == 3
