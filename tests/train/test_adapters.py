"""Runs of low-rank adapters: from a model's weights, through checkpoints and other layouts, to folders of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel.harness import CLOSE, engine_of, in_ranks, job_of, relative, training_of
from ultrascale.convert import convert
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.errors import SpecError
from ultrascale.specs.layout import Layout
from ultrascale.train import checkpoint
from ultrascale.train.async_checkpoint import CheckpointManager, restore
from ultrascale.train.engine import Engine
from ultrascale.train.request import from_words

RANK, BEFORE, STEPS = 4, 2, 4
TRAINING = training_of(steps=STEPS)
JOB = job_of("qwen2", adapter_rank=RANK)  # a tied head, which stages of a pipeline hold twice
ONE = Layout(mbs=4)


def save_weights(engine: Engine, run: Path) -> None:
    manager = CheckpointManager(engine, run, Checkpointing(background=False))
    engine.step(0)
    manager.save(1, wait=True)


def begin(engine: Engine, base: Path, run: Path, steps: int) -> list[float]:
    restore(engine, checkpoint.open_checkpoint(base), weights_alone=True)
    manager = CheckpointManager(engine, run, Checkpointing(background=False))
    losses = [engine.step(number).loss for number in range(steps)]
    manager.save(steps, wait=True)
    return losses


def go_on(engine: Engine, folder: Path) -> list[float]:
    source = checkpoint.open_checkpoint(folder)
    restore(engine, source)
    return [engine.step(number).loss for number in range(source.step, STEPS)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base")
    in_ranks(save_weights, job_of("qwen2"), Layout(dp=2, zero=3, mbs=2), TRAINING, run)
    return checkpoint.latest(run).folder


@pytest.fixture(scope="module")
def losses(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return begin(engine_of(JOB, ONE, TRAINING), base, tmp_path_factory.mktemp("one"), STEPS)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(Layout(tp=2, mbs=4), Layout(pp=2, gas=4, schedule="zb-v", virtual_stages=2), id="tp-zbv"),
        pytest.param(Layout(dp=2, zero=3, mbs=2), Layout(tp=2, mbs=4), id="zero3-tp", marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, gas=4), Layout(dp=2, zero=2, mbs=2), id="pp-zero2", marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_under_another_layout(
    first: Layout, second: Layout, base: Path, losses: list[float], tmp_path: Path
) -> None:
    begun = in_ranks(begin, JOB, first, TRAINING, base, tmp_path, BEFORE)[0]
    kept = checkpoint.latest(tmp_path)
    assert kept.base == base.resolve()
    assert all(".adapters." in name for name in kept.shapes())
    assert relative(begun + in_ranks(go_on, JOB, second, TRAINING, kept.folder)[0], losses) < CLOSE


def test_adapters_are_merged_and_written_alone(base: Path, tmp_path: Path) -> None:
    run, merged, alone = tmp_path / "run", tmp_path / "hf", tmp_path / "peft"
    begin(engine_of(JOB, ONE, TRAINING), base, run, BEFORE)
    kept, source = checkpoint.latest(run), checkpoint.open_checkpoint(base)
    convert([str(run), "hf", str(merged)], dtype="fp32")
    convert([str(run), "peft", str(alone)])
    weights, adapters = load_file(merged / "model.safetensors"), load_file(alone / "adapter_model.safetensors")
    config = json.loads((alone / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], len(config["target_modules"])) == (RANK, 32.0, 7)
    assert len(adapters) == 2 * 7 * JOB.model.layers
    ours = {"self_attn.q_proj": "attention.qkv.q", "self_attn.o_proj": "attention.out", "mlp.down_proj": "mlp.down"}
    for theirs, name in ours.items():
        key = f"model.layers.1.{theirs}"
        down, up = (adapters[f"base_model.model.{key}.lora_{part}.weight"] for part in "AB")
        added = config["lora_alpha"] / RANK * up @ down
        assert float(added.abs().max()) > 1e-3
        torch.testing.assert_close(weights[f"{key}.weight"], source.tensor(f"blocks.1.{name}.weight") + added)
    assert torch.equal(weights["model.embed_tokens.weight"], source.tensor("embed.tokens.weight"))
    assert kept.step == BEFORE


def test_those_beside_experts_and_latent_attention_are_written(tmp_path: Path) -> None:
    weights, run = tmp_path / "base", tmp_path / "run"
    save_weights(engine_of(job_of("deepseek-family"), ONE, TRAINING), weights)
    job = job_of("deepseek-family", adapter_rank=RANK)
    begin(engine_of(job, ONE, TRAINING), checkpoint.latest(weights).folder, run, BEFORE)
    for source, name, form in ((weights, "before", "hf"), (run, "merged", "hf"), (run, "alone", "peft")):
        convert([str(source), form, str(tmp_path / name)], dtype="fp32")
    before, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "merged"))
    adapters = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    targets = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())["target_modules"]
    beside = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in adapters}
    layers, attention = job.model.layers, ("q_a", "q_b", "kv_a", "kv_b", "o")
    assert len(beside) == layers * (len(attention) + 3)
    assert {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")} <= beside  # dense
    assert {f"model.layers.1.mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")} <= beside
    modules = {name.removesuffix(".weight") for name in merged}
    assert {name for name in modules if any(name.endswith(f".{target}") for target in targets)} == beside
    for name in modules:  # in the order of the stored rows, of which transformers rotates pairs
        added = torch.zeros(())
        if name in beside:
            down, up = (adapters[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            added = TRAINING.adapter_alpha / RANK * up @ down
            assert float(added.abs().max()) > 1e-3
        key = f"{name}.weight" if f"{name}.weight" in merged else name
        torch.testing.assert_close(merged[key], before[key] + added)


def test_what_does_not_fit_together_is_refused(base: Path, tmp_path: Path) -> None:
    begin(engine_of(JOB, ONE, TRAINING), base, tmp_path, BEFORE)
    folder = checkpoint.latest(tmp_path).folder
    for words, says in (
        (["job.adapter_rank=8"], "job.adapter_rank is 8 but .* trained with 4"),
        (["job.adapter_targets=qkv"], "job.adapter_targets is qkv but .* trained with all"),
        (["train.adapter_alpha=8"], "train.adapter_alpha is 8.0 but .* trained with 32.0"),
    ):
        with pytest.raises(SpecError, match=says):
            from_words([*words, "train.steps=9"], {}, 1, gpu=False, resume=folder)
    with pytest.raises(SpecError, match=r"job.adapter_rank is null but .* merge them first"):
        from_words(["train.data=synthetic"], {}, 1, gpu=False, weights=folder)
    with pytest.raises(SpecError, match="was trained without adapters: begin a new run with --weights"):
        from_words(["job.adapter_rank=4", "train.steps=9"], {}, 1, gpu=False, resume=base)
    with pytest.raises(SpecError, match="has no adapters: try ultrascale convert"):
        convert([str(base), "peft", str(tmp_path / "out")])
    moved = replace_base(folder, tmp_path / "gone")
    with pytest.raises(SpecError, match=r"holds adapters alone, of the weights in .*gone, where nothing is"):
        checkpoint.base_of(moved)


def replace_base(folder: Path, other: Path) -> checkpoint.Checkpoint:
    return checkpoint.open_checkpoint(folder).model_copy(update={"base": other})
