"""Weights in and out of a run: a folder of transformers, a checkpoint, and a folder of transformers again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file

from builders import SMALL
from conftest import Run
from ultrascale.convert import ConversionResult, convert
from ultrascale.model.hf_folder import HFFolder
from ultrascale.specs import hf
from ultrascale.specs.blocks import RopeType
from ultrascale.specs.errors import SpecError
from ultrascale.specs.hf_families import FAMILIES
from ultrascale.specs.plan import Plan
from ultrascale.train import checkpoint

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
CONFIGS = {
    "qwen2": transformers.Qwen2Config(**SHAPE, intermediate_size=48, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(**SHAPE, intermediate_size=24, num_local_experts=3),
    "yarn-and-exact-gelu": transformers.LlamaConfig(
        **SHAPE,
        intermediate_size=48,
        hidden_act="gelu",
        max_position_embeddings=64,
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0},
    ),
    "gpt2": transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=96),
}


@pytest.fixture(params=CONFIGS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param])
    with torch.no_grad():  # biases begin as zeros, and norms as ones: one in another's place would not show
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    reference.save_pretrained(tmp_path / request.param, max_shard_size="20KB")
    return tmp_path / request.param


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.quick_cases(every=4)
def test_the_round_trip_is_bitwise_equal(theirs: Path, tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    run, out = tmp_path / "runs" / "x", tmp_path / "out"
    converted = convert(["hf", str(theirs), str(run)], progress=lambda *bytes_done: done.append(bytes_done))
    assert converted == ConversionResult(converted.model, run, is_run=True)
    assert done[-1] == (4 * converted.model.parameters,) * 2
    back = convert([str(run), "hf", str(out)], dtype="fp32")
    assert back == ConversionResult(converted.model, out, is_run=False)
    before, after = weights(theirs), weights(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    expected = transformers.AutoModelForCausalLM.from_pretrained(theirs)
    tokens = torch.arange(32).unsqueeze(0)
    with torch.no_grad():
        logits = [model(tokens).logits for model in (expected, transformers.AutoModelForCausalLM.from_pretrained(out))]
    assert (logits[0] - logits[1]).abs().max() <= 1e-5
    hidden = [path for folder in (tmp_path, run.parent) for path in folder.iterdir() if path.name.startswith(".")]
    assert not hidden


def test_the_mean_of_a_runs_weights_is_written(run: Run, tmp_path: Path) -> None:
    words = ("--seq", 32, "--steps", 3, "train.data=synthetic", "train.lr=1e-2", "train.warmup_steps=0", "train.ema_decay=0.5")
    code, _, err = run("train", "--model", SMALL, "--out", tmp_path / "x", *words)
    assert code == 2
    assert "train.ema_decay is 0.5 but job.ema is false" in err
    code, _, err = run("train", "--model", SMALL, "--out", tmp_path / "x", *words, "job.ema=true")
    assert code == 0, err
    for name, flags in (("last", ()), ("mean", ("--ema",))):
        code, _, err = run("convert", tmp_path / "x", "hf", tmp_path / name, "--dtype", "fp32", *flags)
        assert code == 0, err
    source, mean = checkpoint.latest(tmp_path / "x"), weights(tmp_path / "mean")
    name = "model.embed_tokens.weight"
    assert torch.equal(mean[name], source.tensor("embed.tokens.weight", "optimizer.ema"))
    assert not torch.equal(mean[name], weights(tmp_path / "last")[name])
    code, _, err = run("convert", "hf", tmp_path / "mean", tmp_path / "y", "--ema")
    assert code == 2
    assert "--ema is about weights that are written out" in err


def test_the_run_has_a_plan_and_a_checkpoint_of_no_steps(theirs: Path, tmp_path: Path) -> None:
    convert(["hf", str(theirs), str(tmp_path / "x")])
    plan, kept = Plan.load(tmp_path / "x" / "plan.yaml"), checkpoint.latest(tmp_path / "x")
    assert (kept.step, kept.layout.gpus, kept.moments) == (0, 1, ())
    assert plan.job.model == kept.job.model
    assert plan.job.model.name == theirs.name
    assert plan.job.seq == min(128, plan.job.model.max_positions or 0)


@pytest.mark.quick_cases(every=4)
@pytest.mark.parametrize(
    "layout",
    [
        ["layout.tp=2"],
        pytest.param(["layout.pp=2", "layout.gas=4"], marks=pytest.mark.slow),
        pytest.param(["layout.dp=2", "layout.zero=3"], marks=pytest.mark.slow),
    ],
)
def test_weights_survive_training_in_another_layout(theirs: Path, tmp_path: Path, layout: list[str], run: Any) -> None:
    """Read under one process, trained in two with steps too small to change a weight, kept by those two, written out."""
    convert(["hf", str(theirs), str(tmp_path / "x")])
    words = ["--resume", tmp_path / "x", "--nproc", 2, "--steps", 1, "--data", "synthetic", "train.lr=1e-30", *layout]
    code, _, err = run("train", *words)
    assert code == 0, err
    assert checkpoint.latest(tmp_path / "x").step == 1
    convert([str(tmp_path / "x"), "hf", str(tmp_path / "out")], dtype="fp32")
    before, after = weights(theirs), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_tensors_are_saved_without_shared_storage(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view would be saved with all of its storage: GPT-2's keys with the queries and values beside them."""
    given = checkpoint.write_weights
    sizes: dict[str, tuple[int, int]] = {}

    def watched(*arguments: Any) -> Path:
        *others, shapes, tensor = arguments
        for name in shapes:
            one = tensor(name)
            sizes[name] = (one.untyped_storage().nbytes(), 4 * torch.Size(shapes[name]).numel())
            assert one.is_contiguous()
        return given(*others, shapes, tensor)

    monkeypatch.setattr(checkpoint, "write_weights", watched)
    convert(["hf", str(theirs), str(tmp_path / "x")])
    assert sizes.keys() == checkpoint.latest(tmp_path / "x").shapes().keys()
    assert all(stored == needed for stored, needed in sizes.values())


def test_a_named_checkpoint_of_a_run_is_written_out(theirs: Path, tmp_path: Path) -> None:
    convert(["hf", str(theirs), str(tmp_path / "x")])
    convert([str(checkpoint.latest(tmp_path / "x").folder), "hf", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["hf"],
        ["hf", "a"],
        ["a", "b", "c"],
        ["hf", "hf", "a"],
        ["a", "b", "hf"],
        ["a", "hf", "hf"],
        ["hf", "a", "b", "c"],
        ["a", "hf", " "],
        ["HF", "a", "b"],
    ],
)
def test_other_arguments_are_refused_with_both_forms(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"convert was given .*: try `.*convert hf .*` or `.*convert runs/x hf .*`"):
        convert(words)
    assert not list(tmp_path.iterdir())


def test_unconvertible_inputs_leave_no_files(theirs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for words, sentence in (
        (["hf", "empty", "new"], "has no config.json"),
        (["hf", "nowhere", "new"], "does not exist"),
        (["hf", theirs.name, "used"], "with files in it"),
        (["empty", "hf", "new"], "holds no complete checkpoint"),
        (["nowhere", "hf", "new"], "is no folder"),
        (["empty", "hf", "used"], "with files in it"),
    ):
        with pytest.raises(SpecError, match=sentence):
            convert([word if word == "hf" else str(tmp_path / word) for word in words])
    with pytest.raises(SpecError, match="--tokenizer goes with weights that are written out"):
        convert(["hf", str(theirs), str(tmp_path / "new")], tokenizer=theirs)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_full_disk_is_reported_before_writing(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultrascale.convert.free_bytes", lambda place: 1000)
    with pytest.raises(SpecError, match=r"its disk has 0\.00 GiB free"):
        convert(["hf", str(theirs), str(tmp_path / "x")])
    assert not (tmp_path / "x").exists()


def test_a_failed_write_leaves_no_files(theirs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = HFFolder.tensor

    def failing(folder: HFFolder, name: str) -> torch.Tensor:
        if name in ("blocks.1.mlp.down.weight", "blocks.1.mlp.experts.down"):
            raise SpecError("the file is gone")
        return read(folder, name)

    monkeypatch.setattr(HFFolder, "tensor", failing)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpecError, match="the file is gone"):
        convert(["hf", str(theirs), str(tmp_path / "x")])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_flipped_byte_in_the_run_leaves_no_files(theirs: Path, tmp_path: Path) -> None:
    convert(["hf", str(theirs), str(tmp_path / "x")])
    part = next(checkpoint.latest(tmp_path / "x").folder.glob("*.distcp"))
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpecError, match="is damaged"):
        convert([str(tmp_path / "x"), "hf", str(tmp_path / "out")])
    assert sorted(tmp_path.rglob("*")) == before


def families_of(text: str) -> set[str]:
    """What stands between `Families:` and the end of that part of the sentence, as model_types."""
    listed = re.split(r"[.;]", " ".join(text.split()).partition("Families: ")[2])[0]
    return {re.sub(r"[^a-z0-9]", "", name.lower()) for name in re.split(r", | and ", listed)}


def test_help_and_docs_name_the_families_that_are_converted(run: Any) -> None:
    _, help_text, _ = run("convert", "--help")
    page = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    known = {family.replace("_", "") for family in FAMILIES}
    assert families_of(help_text) == known
    assert families_of(page) == known


def test_docs_name_the_scalings_and_activations_that_are_computed() -> None:
    page = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    rows = {row.split("|")[1].strip(): row.split("|")[2] for row in page.splitlines() if row.startswith("| `")}
    scalings = re.findall(r"`([^`]+)`", rows["`rope_scaling` or `rope_parameters`"])
    assert set(scalings) == {"default", *get_args(RopeType)}
    activations = re.findall(r"`([^`]+)`", rows["`hidden_act`, `activation_function`"])
    assert set(activations) | {"swish"} == {*hf.ACTIVATIONS["gated"], *hf.ACTIVATIONS["plain"]}
