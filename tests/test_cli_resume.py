"""`train --resume` and `--weights`: resuming, with another layout too, and every impossible request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from builders import SMALL, write_tokens
from conftest import Run
from ultrascale.launch import launcher
from ultrascale.launch.launcher import Trainer
from ultrascale.measure.compare import load
from ultrascale.specs.errors import SpecError
from ultrascale.train import checkpoint

WORDS = ("--seq", 32, "train.data=synthetic", "train.lr=1e-3", "train.warmup_steps=0")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four of six steps in two processes, stopped as it were; checkpoints of steps 2, 3 and 4."""
    from ultrascale.launch import launcher
    from ultrascale.specs.model import Model
    from ultrascale.train.request import Overrides, from_model

    run = tmp_path_factory.mktemp("kept") / "run"
    words = [*(str(word) for word in WORDS[2:]), "job.seq=32", "train.steps=4", "checkpoint.every=1", "layout.tp=2"]
    launcher.train(from_model(Model.load(SMALL), Overrides.parse(words), 2), run, 2, quiet=True)
    return run


@pytest.fixture
def copied(kept: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "run"))


def curve(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def test_a_run_resumes_in_its_folder(run: Run, copied: Path) -> None:
    before = curve(copied)
    code, _, err = run("train", "--resume", copied, "--steps", 6)
    assert code == 0, err
    assert "resuming from" in err
    assert "step-000004" in err
    assert "6 steps instead of 4 change the learning rates to come: step 5" in err
    after = curve(copied)
    assert list(after) == [1, 2, 3, 4, 5, 6]
    assert {step: after[step] for step in before} == before
    assert checkpoint.latest(copied).step == 6
    assert len(checkpoint.complete(copied)) == 3
    assert checkpoint.latest(copied).checkpointing.every == 1  # as the run was begun


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_run_ends_at_its_loss(run: Run, tmp_path: Path, evaluating: bool) -> None:
    out, every = tmp_path / "run", 2 if evaluating else 0
    words = ("--seq", 32, "--nproc", 2, "train.lr=1e-2", "train.warmup_steps=0", "layout.tp=2", f"train.eval_every={every}")
    ends = ("train.stop_at_loss=4.5", "checkpoint.every=1")
    code, printed, err = run("train", "--model", SMALL, "--steps", 40, "--out", out, *words, *ends)
    assert code == 0, err
    kept = checkpoint.latest(out)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row.get("eval_loss") if evaluating else row["loss"] for row in rows}
    below = [step for step, loss in losses.items() if loss is not None and loss <= 4.5]
    assert below == [kept.step] == [max(losses)]
    assert 1 < kept.step < 40
    which = "evaluation's loss" if evaluating else "loss"
    line = f"ended after step {kept.step} of 40: the {which} is {losses[kept.step]:.4g}, at most train.stop_at_loss = 4.5"
    assert f"{line}; checkpoint {kept.folder.name}" in printed
    assert "difference" in printed  # it is measured like a run that is complete
    code, _, err = run("train", "--resume", out)
    assert code == 2
    problem = f"train.stop_at_loss is 4.5 and {kept.folder} has reached it with {losses[kept.step]:.4g}: to go on, try "
    assert problem in err.replace("\n", " ")
    code, printed, err = run("train", "--resume", out, "--steps", kept.step + 1, "train.stop_at_loss=null")
    assert code == 0, err
    assert checkpoint.latest(out).step == kept.step + 1
    assert checkpoint.latest(out).reached_loss is None


def test_a_restart_of_a_run_that_has_reached_its_loss_does_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    words = ("--seq", 32, "--steps", 40, "--out", out, "train.stop_at_loss=100")
    monkeypatch.setattr(launcher, "is_restart", lambda folder, rank_info: (folder / "checkpoints").exists())
    for _ in range(2):
        code, printed, err = run("train", "--model", SMALL, *words)
        assert code == 0, err
        assert "ended after step 1 of 40: the loss is 5." in printed
        assert list(curve(out)) == [1]


def test_a_run_that_resumes_inside_a_ramp_is_the_run_that_was_not_interrupted(run: Run, tmp_path: Path) -> None:
    """Batches of 2, 2, 4, 8 and 8 sequences, resumed after the first."""
    words = ("--seq", 16, "job.batch_tokens=128", "train.batch_ramp=32:64,64:128", "train.eval_every=2", *WORDS[2:])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    code, _, err = run(
        "train", "--model", SMALL, "--steps", 5, "--out", whole, *words, "checkpoint.every=1", "checkpoint.keep=0"
    )
    assert code == 0, err
    assert "ramp: 32 for 2 steps, 64 for 1 step, then 128 tokens" in " ".join(err.split())
    code, _, err = run("train", "--resume", whole / "checkpoints" / "step-000001", "--out", cut)
    assert code == 0, err

    def rows(folder: Path) -> list[tuple[object, ...]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [tuple(line.get(name) for name in ("step", "tokens", "loss", "grad_norm", "eval_loss")) for line in lines]

    assert [row[1] for row in rows(whole)] == [32, 64, 128, 256, 384]
    assert rows(cut) == rows(whole)[1:]
    one, other = checkpoint.latest(whole), checkpoint.latest(cut)
    for name in one.shapes():
        assert torch.equal(one.tensor(name), other.tensor(name)), name
    measured = json.loads((whole / "measurement.json").read_text())
    assert measured["tokens_per_s"] == pytest.approx(128 / measured["step_time_s"])
    assert measured["batch_tokens"] is None
    words = ("--nproc", 2, "layout.dp=1", "layout.pp=2", "layout.mbs=2", "--out", tmp_path / "pp")
    code, _, err = run("train", "--resume", whole / "checkpoints" / "step-000001", *words)
    assert code == 2
    assert "has a batch of 32 tokens, 1 micro-batch of" in err.replace("\n", " ")
    code, _, err = run("train", "--resume", whole / "checkpoints" / "step-000002", *words)  # after the batches of 32 tokens
    assert code == 0, err
    losses = [row[2] for row in rows(whole)[2:]]
    assert [row[2] for row in rows(tmp_path / "pp")] == pytest.approx(losses, rel=1e-5)


def test_a_run_that_resumes_inside_a_stage_of_sequence_length(run: Run, tmp_path: Path) -> None:
    """Sequences of 4, 4, 8, 8 and 16 tokens, resumed after the first step, in another layout, and up to the fourth."""
    words = ("--seq", 16, "job.batch_tokens=128", "train.seq_stages=4:256,8:512", "train.eval_every=2", *WORDS[2:])
    whole, cut, other = (tmp_path / name for name in ("whole", "cut", "other"))
    code, _, err = run(
        "train", "--model", SMALL, "--steps", 5, "--out", whole, *words, "checkpoint.every=1", "checkpoint.keep=0"
    )
    assert code == 0, err
    assert "sequences: 4 for 2 steps, 8 for 2 steps, then 16 tokens" in " ".join(err.split())
    assert "of the last sequences, of job.seq = 16 tokens" in " ".join(err.split())
    first = whole / "checkpoints" / "step-000001"
    code, _, err = run("train", "--resume", first, "--out", cut)
    assert code == 0, err

    def rows(folder: Path) -> list[tuple[object, ...]]:
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [tuple(line.get(name) for name in ("step", "tokens", "loss", "grad_norm", "eval_loss")) for line in lines]

    assert [row[1] for row in rows(whole)] == [128, 256, 384, 512, 640]
    assert rows(cut) == rows(whole)[1:]
    code, _, err = run("train", "--resume", first, "--out", other, "--nproc", 2, "layout.dp=1", "layout.pp=2", "layout.mbs=2")
    assert code == 0, err
    assert [row[2] for row in rows(other)] == pytest.approx([row[2] for row in rows(cut)], rel=1e-5)
    code, _, err = run("train", "--resume", whole / "checkpoints" / "step-000003", "train.seq_stages=8:512")
    assert code == 2
    assert "train.seq_stages is 8:512 but the run was trained with 4:256,8:512 up to step 3" in err.replace("\n", " ")
    code, _, err = run("train", "--resume", first, "--nproc", 2, "layout.tp=1", "layout.cp=2", "train.seq_stages=2:256,8:512")
    assert code == 2
    assert "train.seq_stages has sequences of 2 tokens, and with these" in err.replace("\n", " ")


def test_a_run_that_ends_in_a_stage_is_compared_with_the_plan_of_its_sequences(run: Run, tmp_path: Path) -> None:
    words = ("--seq", 16, "job.batch_tokens=128", "train.seq_stages=4:256,8:10k", "layout.mbs=2", *WORDS[2:])
    code, printed, err = run("train", "--model", SMALL, "--steps", 5, "--out", tmp_path / "short", *words)
    assert code == 0, err
    assert "one step of 128 tokens" in printed
    measured = json.loads((tmp_path / "short" / "measurement.json").read_text())
    assert (measured["seq"], measured["batch_tokens"]) == (8, 128)
    compared = load(tmp_path / "short")
    assert (compared.plan.job.seq, compared.plan.layout.mbs, compared.plan.layout.gas) == (8, 4, 4)


def test_a_run_that_ends_in_its_ramp_is_compared_with_the_plan_of_that_batch(run: Run, tmp_path: Path) -> None:
    """Batches of 2, 2, 4, 4 and 8 sequences: two steps have the second, and one of them counts memory."""
    words = ("--seq", 16, "job.batch_tokens=128", "train.batch_ramp=32:64,64:192", *WORDS[2:])
    code, printed, err = run("train", "--model", SMALL, "--steps", 5, "--out", tmp_path / "ramp", *words)
    assert code == 0, err
    assert "one step of 64 tokens" in printed
    measured = json.loads((tmp_path / "ramp" / "measurement.json").read_text())
    assert measured["tokens_per_s"] == pytest.approx(64 / measured["step_time_s"])
    compared = load(tmp_path / "ramp")
    assert compared.plan.job.batch_tokens == measured["batch_tokens"] == 64
    assert compared.plan.layout.gas == 2


def test_steps_that_are_done_keep_their_batches(run: Run, copied: Path) -> None:
    """512 tokens in each of 4 steps; from the fifth on, the batch may be another."""
    code, _, err = run("train", "--resume", copied, "--steps", 6, "job.batch_tokens=1024")
    assert code == 2
    advice = "add train.batch_ramp=512:2048 for the new batch from here on"
    assert advice in err.replace("\n", " ")
    code, _, err = run("train", "--resume", copied, "--steps", 6, "train.batch_ramp=256:512", "layout.mbs=8")
    assert code == 2
    assert "train.batch_ramp is 256:512 but the run was trained with null up to step 4" in err.replace("\n", " ")
    code, _, err = run("train", "--resume", copied, "--steps", 6, "job.batch_tokens=1024", "train.batch_ramp=512:2048")
    assert code == 0, err
    tokens = [json.loads(line)["tokens"] for line in (copied / "metrics.jsonl").read_text().splitlines()]
    assert tokens == [512, 1024, 1536, 2048, 3072, 4096]


def test_resuming_with_another_layout_folder_and_step(run: Run, kept: Path, tmp_path: Path) -> None:
    source, out = kept / "checkpoints" / "step-000003", tmp_path / "fork"
    words = ("layout.tp=1", "layout.zero=3")
    code, _, err = run("train", "--resume", source, "--steps", 5, "--nproc", 4, "--out", out, *words)
    assert code == 0, err
    assert list(curve(out)) == [4, 5]
    assert curve(out)[4] == pytest.approx(curve(kept)[4], rel=1e-5)
    assert checkpoint.latest(out).layout.dp == 4
    assert checkpoint.latest(kept).step == 4


def test_resuming_with_a_plan(run: Run, copied: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    cluster = ("--cluster", "2xh100", "--batch-tokens", 512, "--seq", 32, "--precision", "fp32")
    assert run("plan", SMALL, *cluster, "--fix", "pp=2", "-o", plan)[0] == 0
    code, _, err = run("train", plan, "--resume", copied, "--steps", 5)
    assert code == 0, err
    assert checkpoint.latest(copied).layout.pp == 2


def test_weights_start_a_new_run(run: Run, kept: Path, tmp_path: Path) -> None:
    code, _, err = run("train", "--weights", kept, "--steps", 1, *WORDS, "--out", tmp_path / "new")
    assert code == 0, err
    assert list(curve(tmp_path / "new")) == [1]
    assert curve(tmp_path / "new")[1] < curve(kept)[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--resume", "RUN"], "train.steps is 4 but"),
        (["--resume", "RUN", "--steps", "3"], "has done 4: try --steps"),
        (["--resume", "RUN", "--steps", "9", "job.seq=64"], "job.seq is 64 but the run was trained with 32"),
        (
            ["--resume", "RUN", "--steps", "9", "job.batch_tokens=1024"],
            "job.batch_tokens is 1024 but the run was trained with 512",
        ),
        (["--resume", "RUN", "--steps", "9", "job.optimizer=sgd"], "job.optimizer is sgd but the run was trained with adamw"),
        (["--resume", "RUN", "--steps", "9", "--seed", "7"], "train.seed is 7 but the run was trained with 0 up to step 4"),
        (["--resume", "RUN", "--steps", "9", "--data", "stdlib"], "train.data is 'stdlib' but it is not the data"),
        (["--resume", "RUN", "--steps", "9", "--allow-changed", "sed"], "did you mean 'seed'"),
        (["--model", SMALL, "--allow-changed", "seed"], "--allow-changed is about a run that is resumed"),
        (["--resume", "RUN", "--steps", "9", "--model", SMALL], "--resume brings its own model"),
        (["--resume", "RUN", "--steps", "9", "--weights", "RUN"], "--resume brings its own model"),
        (["--resume", "RUN", "--steps", "9", "layout.tp=3"], "layout.tp is 3"),
        (["--resume", "RUN", "--steps", "9", "--nproc", "3"], "there are 3 processes"),
        (["--resume", "RUN", "--steps", "9", "checkpoint.evry=2"], "did you mean 'every'"),
        (
            ["--resume", "RUN", "--steps", "9", "checkpoint.every=often"],
            "checkpoint.every is 'often' but must be a whole number",
        ),
        (["--resume", "RUN", "--steps", "9", "checkpoint.keep=-1"], "checkpoint.keep is -1"),
        (["--resume", "RUN", "--steps", "9", "checkpoint.background=perhaps"], "must be true or false"),
        (["--resume", "RUN", "--steps", "9", "chekpoint.every=1"], "did you mean 'checkpoint'"),
        (["--resume", "RUN/nothing", "--steps", "9"], "nothing is there"),
        (["--resume", "EMPTY", "--steps", "9"], "holds no complete checkpoint"),
        (["--resume", "RUN/plan.yaml", "--steps", "9"], "holds no complete checkpoint"),
        (["--weights", "EMPTY", "--steps", "9"], "holds no complete checkpoint"),
        (["--weights", "RUN", "--model", "mini", "--steps", "9"], "model.layers is 6 but"),
        (["--model", SMALL, "--out", "RUN"], "holds a run already"),
        (["--model", SMALL, "--data", "RUN/nothing"], "RUN/nothing"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_impossible_resumes_are_refused_without_changes(
    run: Run, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    here = {path: path.stat().st_mtime_ns for path in kept.rglob("*")}
    given = [str(word).replace("RUN", str(kept)).replace("EMPTY", str(tmp_path / "empty")) for word in words]
    code, _, err = run("train", *given)
    assert code == 2, err
    assert sentence.replace("RUN", str(kept)) in err.replace("\n", " ")
    assert "Traceback" not in err
    assert {path: path.stat().st_mtime_ns for path in kept.rglob("*")} == here
    assert not (tmp_path / "runs").exists()


def test_a_damaged_checkpoint_is_refused_and_the_one_before_named(run: Run, copied: Path) -> None:
    damaged = copied / "checkpoints" / "step-000004" / "__1_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[1000] ^= 4
    damaged.write_bytes(data)
    code, _, err = run("train", "--resume", copied, "--steps", 6)
    err = err.replace("\n", " ")
    assert code == 2, err
    assert "__1_0.distcp is damaged" in err
    assert f"try --resume {copied}/checkpoints/step-000003" in err
    assert list(curve(copied)) == [1, 2, 3, 4]
    code, _, err = run("train", "--resume", copied / "checkpoints" / "step-000003", "--steps", 5)
    assert code == 0, err
    assert list(curve(copied)) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_nan_gradient_keeps_the_last_state(run: Run, copied: Path) -> None:
    """An absurd rate from here on: the state before the step that broke is kept."""
    words = ("train.lr=100.0", "train.clip=0.0", "train.lr_schedule=constant", "train.weight_decay=10")
    code, _, err = run("train", "--resume", copied, "--steps", 200, *words)
    assert code == 1, err
    err = err.replace("\n", " ")
    assert "is not finite" in err
    kept = checkpoint.latest(copied)
    assert f"kept in {kept.folder}" in err
    assert kept.step == max(curve(copied))


def test_data_is_found_from_any_folder_and_verified(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a little text to train on " * 400)
    assert run("data", "tokenize", "texts", "-o", "tokens")[0] == 0
    begun = run("train", "--model", SMALL, "--seq", 32, "--steps", 2, "--data", "tokens:0.7,stdlib:0.30", "--out", "run")
    assert begun[0] == 0, begun
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = run("train", "--resume", "../run", "--steps", 3)
    assert code == 0, err
    assert checkpoint.latest(tmp_path / "run").training.data == f"{tmp_path}/tokens:0.7,stdlib:0.3"
    shutil.rmtree(tmp_path / "tokens")
    (tmp_path / "texts" / "a.txt").write_text("another text to train on.. " * 400)
    assert run("data", "tokenize", "../texts", "-o", "../tokens")[0] == 0
    code, _, err = run("train", "--resume", "../run", "--steps", 4)
    assert code == 2
    assert "it is not the data that the run was trained on up to step 3" in err.replace("\n", " ")
    assert run("train", "--resume", "../run", "--steps", 4, "--data", "../tokens")[0] == 2
    code, _, err = run("train", "--resume", "../run", "--steps", 4, "--allow-changed", "data")
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "env.json").read_text())["changed"] == ["data"]
    code, _, err = run("train", "--resume", "../run", "--steps", 5)  # now it is this data that the run was trained on
    assert code == 0, err


def test_data_of_which_anything_changed_is_refused_unless_allowed(run: Run, tmp_path: Path) -> None:
    tokens, out = tmp_path / "tokens.bin", tmp_path / "run"
    text = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint16)
    text.tofile(tokens)
    begun = run("train", "--model", SMALL, "--seq", 32, "--steps", 2, "--data", tokens, "--out", out, "checkpoint.every=1")
    assert begun[0] == 0, begun
    text[3_000] ^= 1  # between the windows that a sample of 65 would look at
    text.tofile(tokens)
    code, _, err = run("train", "--resume", out, "--steps", 3)
    assert code == 2
    assert "it is not the data that the run was trained on up to step 2" in err.replace("\n", " ")
    with pytest.raises(SpecError, match="it is not the data"):
        Trainer.resume(out / "checkpoints" / "step-000001")
    assert Trainer.resume(out / "checkpoints" / "step-000001", allow_changed="data").request.changed == ("data",)
    text[3_000] ^= 1
    text.tofile(tmp_path / "moved.bin")
    code, _, err = run("train", "--resume", out, "--steps", 3, "--data", tmp_path / "moved.bin")
    assert code == 0, err
    assert json.loads((out / "env.json").read_text())["changed"] == []


def test_changed_document_ends_are_refused_under_a_document_mask(run: Run, tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(0, 256, 20_000)
    for mask, code in (("true", 2), ("false", 0)):
        tokens, out = tmp_path / f"{mask}.bin", tmp_path / mask
        write_tokens(tokens, text, np.array([5_000, 20_000]), 256)
        words = ("--seq", 32, "--steps", 2, "--data", tokens, "--out", out, f"train.document_mask={mask}")
        assert run("train", "--model", SMALL, *words)[0] == 0
        write_tokens(tokens, text, np.array([6_000, 20_000]), 256)
        assert run("train", "--resume", out, "--steps", 3)[0] == code


def test_another_seed_is_used_where_it_is_allowed(run: Run, copied: Path) -> None:
    code, _, err = run("train", "--resume", copied, "--steps", 6, "--seed", 7, "--allow-changed", "seed,data")
    assert code == 0, err
    assert json.loads((copied / "env.json").read_text())["changed"] == ["seed"]
    assert checkpoint.latest(copied).training.seed == 7


def test_old_data_fingerprints_are_compared_with_the_old_algorithm(run: Run, copied: Path) -> None:
    from ultrascale.data.corpora import sampled_fingerprint

    source = checkpoint.latest(copied)
    for added, code in ((1, 2), (0, 0)):
        manifest = json.loads((source.folder / "checkpoint.json").read_text())
        manifest["data"] = sampled_fingerprint(source.training, source.job.model.vocab) + added
        del manifest["checksum"]
        manifest["checksum"] = checkpoint._checksum(manifest)
        (source.folder / "checkpoint.json").write_text(json.dumps(manifest))
        assert run("train", "--resume", copied, "--steps", 6)[0] == code


def test_a_locked_run_folder_is_refused(run: Run, copied: Path) -> None:
    import subprocess
    import sys

    lock = f"import fcntl, sys; file = open({str(copied / '.lock')!r}, 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    words = f"{lock}; print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        code, _, err = run("train", "--resume", copied, "--steps", 6)
        other.communicate(b"")
    assert code == 2
    assert "is being trained by another process" in err
    assert checkpoint.latest(copied).step == 4


def test_too_little_disk_space_is_reported_before_the_first_step(
    run: Run, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ultrascale.launch import launcher

    monkeypatch.setattr(launcher, "free_bytes", lambda _: 10_000)
    code, _, err = run("train", "--model", SMALL, "--steps", 1, "--out", tmp_path / "new")
    assert code == 2
    assert "a checkpoint of small takes" in err
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(launcher, "free_bytes", lambda _: 2_500_000)
    code, _, err = run("train", "--model", SMALL, "--steps", 1, "--out", tmp_path / "new", "checkpoint.every=1")
    assert code == 0
    assert "warning: 3 checkpoints of" in err
