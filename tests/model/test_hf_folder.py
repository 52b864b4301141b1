"""Hugging Face folders: transformers and we compute the same from each other's files, and a folder that is wrong is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model.builders import initialize
from ultrascale.model.hf_folder import CONFIG, INDEX, SINGLE, HFFolder, write
from ultrascale.model.transformer import Transformer
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "initializer_range": 0.2,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama 3.2": transformers.LlamaConfig(
        **SHAPE, head_dim=16, tie_word_embeddings=True, rope_parameters={**LLAMA3, "original_max_position_embeddings": 16}
    ),
    "llama with biases": transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, hidden_act="gelu_pytorch_tanh"),
    "llama, linear positions": transformers.LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 2.0}),
    "llama, dynamic positions": transformers.LlamaConfig(
        **SHAPE, max_position_embeddings=8, rope_parameters={"rope_type": "dynamic", "factor": 2.0}
    ),
    "qwen2.5, yarn": transformers.Qwen2Config(
        **SHAPE,
        max_position_embeddings=32,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
            "original_max_position_embeddings": 8,
        },
    ),
    "llama, exact gelu": transformers.LlamaConfig(**SHAPE, hidden_act="gelu"),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=5),
    "qwen2.5": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=24),
    "qwen3 with a window": transformers.Qwen3Config(
        **SHAPE, head_dim=8, use_sliding_window=True, sliding_window=6, max_window_layers=0
    ),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "mixtral, exact gelu": transformers.MixtralConfig(**SHAPE, num_local_experts=3, hidden_act="gelu"),
    "mixtral with a window": transformers.MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=1, sliding_window=5),
    "qwen3-moe": transformers.Qwen3MoeConfig(**SHAPE, **QWEN_EXPERTS, head_dim=16, norm_topk_prob=True),
    "qwen3-moe weighed as scored": transformers.Qwen3MoeConfig(
        **SHAPE, **QWEN_EXPERTS, head_dim=16, mlp_only_layers=[0], tie_word_embeddings=True
    ),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **SHAPE, **QWEN_EXPERTS, shared_expert_intermediate_size=20, mlp_only_layers=[0], norm_topk_prob=True
    ),
    "qwen2-moe without biases": transformers.Qwen2MoeConfig(
        **SHAPE, **QWEN_EXPERTS, shared_expert_intermediate_size=20, qkv_bias=False
    ),
    "gpt2": transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, vocab_size=99, initializer_range=0.2),
    "gpt2 untied": transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        n_inner=48,
        n_positions=64,
        vocab_size=99,
        tie_word_embeddings=False,
        activation_function="relu",
    ),
}
TOKENS = torch.randint(0, 99, (2, 24), generator=torch.Generator().manual_seed(0))
TINY = Model.load("tiny").model_copy(update={"layers": 2, "hidden": 16, "ffn": 24, "vocab": 40, "heads": 4, "head_dim": 4})


def theirs(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases and norms begin as zeros and ones, which would hide a mistake
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return reference


def their_logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def our_logits(folder: HFFolder) -> torch.Tensor:
    module = Transformer(folder.model)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(folder.tensor(name))
        return module(TOKENS, torch.arange(TOKENS.shape[1]))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.std() > 0.01
    return float((one - other).abs().max())


@pytest.mark.quick_cases(every=4)
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("shards", ["5GB", "10KB"])
def test_round_trip(family: str, shards: str, tmp_path: Path) -> None:
    """Theirs -> our folder -> our logits; then ours -> their folder -> their logits."""
    reference = theirs(CONFIGS[family])
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    assert (tmp_path / "theirs" / INDEX).exists() == (shards != "5GB")
    expected = their_logits(reference)
    folder = HFFolder.open(tmp_path / "theirs")
    assert difference(our_logits(folder), expected) <= 1e-5

    done: list[tuple[int, int]] = []
    write(
        tmp_path / "ours",
        folder.model,
        folder.tensor,
        "fp32",
        shard_bytes=5 * 2**30 if shards == "5GB" else 10_000,
        progress=lambda *bytes_done: done.append(bytes_done),
    )
    assert (tmp_path / "ours" / INDEX).exists() == (shards != "5GB")
    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert type(back) is type(reference)
    assert difference(their_logits(back.eval()), expected) <= 1e-5
    assert done[-1] == (4 * folder.model.parameters,) * 2
    assert done == sorted(done)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ours", "theirs"]


def test_bf16_out(tmp_path: Path) -> None:
    reference = theirs(CONFIGS["qwen3"])
    reference.save_pretrained(tmp_path / "theirs")
    folder = HFFolder.open(tmp_path / "theirs")
    write(tmp_path / "ours", folder.model, folder.tensor, "bf16")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert back.dtype == torch.bfloat16
    rounded = reference.bfloat16().state_dict()
    assert all(torch.equal(tensor, rounded[name]) for name, tensor in back.state_dict().items())
    again = HFFolder.open(tmp_path / "ours")
    assert {again.tensor(name).dtype for name in again.shapes} == {torch.bfloat16}


def test_gpt2_as_published_on_the_hub(tmp_path: Path) -> None:
    """Saved from its body, with names that have no first word, and with the masks that old releases kept."""
    reference = theirs(CONFIGS["gpt2"])
    reference.save_pretrained(tmp_path)
    state = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / SINGLE).items()}
    state |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(state, tmp_path / SINGLE)
    assert difference(our_logits(HFFolder.open(tmp_path)), their_logits(reference)) <= 1e-5


def test_a_tied_head_may_be_stored_twice(tmp_path: Path) -> None:
    reference = theirs(CONFIGS["qwen2.5"])
    reference.save_pretrained(tmp_path)
    state = load_file(tmp_path / SINGLE)
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, tmp_path / SINGLE)
    folder = HFFolder.open(tmp_path)
    assert "head.linear.weight" not in folder.shapes
    assert difference(our_logits(folder), their_logits(reference)) <= 1e-5


def test_a_mistral_without_the_key_has_its_classs_window(tmp_path: Path) -> None:
    theirs(CONFIGS["mistral"]).save_pretrained(tmp_path)
    change_config(tmp_path, sliding_window=...)
    assert HFFolder.open(tmp_path).model.sliding_window == transformers.MistralConfig().sliding_window


def test_names_are_those_of_our_transformer(tmp_path: Path) -> None:
    for family in ("llama", "gpt2"):
        theirs(CONFIGS[family]).save_pretrained(tmp_path / family)
        folder = HFFolder.open(tmp_path / family)
        named = Transformer(folder.model).named_parameters()
        assert folder.shapes == {name: tuple(parameter.shape) for name, parameter in named}
        assert all(tuple(folder.tensor(name).shape) == shape for name, shape in folder.shapes.items())


def change_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config = {key: value for key, value in {**config, **fields}.items() if value is not ...}
    (folder / CONFIG).write_text(json.dumps(config))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(folder / SINGLE)
    change(state)
    save_file(state, folder / SINGLE)


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def shard(folder: Path, number: int = 0) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[number]


def cut(file: Path, keep: int) -> None:
    os.truncate(file, keep if keep >= 0 else file.stat().st_size + keep)


def header_length(file: Path, length: int) -> None:
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])


def outside(folder: Path) -> None:
    """A file that exists, but not in the folder."""
    inside = shard(folder)
    os.rename(inside, folder.parent / "secret.safetensors")
    change_index(folder, lambda names: names.update({k: "../secret.safetensors" for k, v in names.items() if v == inside.name}))


def absolute(folder: Path) -> None:
    first = shard(folder)
    change_index(folder, lambda names: names.update({k: str(first.resolve()) for k, v in names.items() if v == first.name}))


def swapped(folder: Path) -> None:
    first, second = shard(folder, 0), shard(folder, 1)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def pickle_only(folder: Path) -> None:
    os.rename(folder / SINGLE, folder / "pytorch_model.bin")


def other_dtype(state: dict[str, torch.Tensor]) -> None:
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.int8)


UP = "model.layers.1.mlp.up_proj.weight"
FIRST = "model.embed_tokens.weight"
# What is done to a good folder (whole: one file, sharded: several), and a part of the error message.
BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "no config": ("llama", lambda f: (f / CONFIG).unlink(), "has no config.json"),
    "config no json": ("llama", lambda f: (f / CONFIG).write_text("{"), "is not JSON"),
    "config a list": ("llama", lambda f: (f / CONFIG).write_text("[]"), "must be a mapping"),
    "config empty": ("llama", lambda f: (f / CONFIG).write_text(""), "is not JSON"),
    "config binary": ("llama", lambda f: (f / CONFIG).write_bytes(b"\xff\xfe\x00\x81"), "is not text"),
    "config a folder": ("llama", lambda f: ((f / CONFIG).unlink(), (f / CONFIG).mkdir()), "has no config.json"),
    "no family": ("llama", lambda f: change_config(f, model_type=...), "model_type is missing"),
    "unknown family": ("llama", lambda f: change_config(f, model_type="bloom"), "'bloom', which Ultrascale cannot read"),
    "family a number": ("llama", lambda f: change_config(f, model_type=3), "model_type is 3"),
    "experts": (
        "llama",
        lambda f: change_config(f, model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
        "has no tensor 'model.layers.0.block_sparse_moe.gate.weight'",
    ),
    "another family": (
        "llama",
        lambda f: change_config(f, model_type="phi3"),
        "has no tensor 'model.layers.0.self_attn.qkv_proj",
    ),
    "hidden missing": ("llama", lambda f: change_config(f, hidden_size=...), "config.hidden_size is missing"),
    "hidden as text": ("llama", lambda f: change_config(f, hidden_size="32"), "config.hidden_size is '32'"),
    "negative layers": ("llama", lambda f: change_config(f, num_hidden_layers=-1), "num_hidden_layers is -1"),
    "too many layers": ("llama", lambda f: change_config(f, num_hidden_layers=3), "has no tensor 'model.layers.2"),
    "absurdly many layers": ("llama", lambda f: change_config(f, num_hidden_layers=60_000), "has no tensor 'model.layers.2"),
    "too few layers": ("llama", lambda f: change_config(f, num_hidden_layers=1), "has the tensor 'model.layers.1"),
    "another width": (
        "llama",
        lambda f: change_config(f, intermediate_size=40),
        r"is \[48, 32\] but config.json asks for \[40",
    ),
    "another vocabulary": ("llama", lambda f: change_config(f, vocab_size=100), r"asks for \[100, 32\]"),
    "other heads": ("llama", lambda f: change_config(f, num_key_value_heads=4), r"k_proj.* asks for \[32, 32\]"),
    "longrope": ("llama", lambda f: change_config(f, rope_parameters={"rope_type": "longrope"}), "rope_type is 'longrope'"),
    "partly turned": (
        "llama",
        lambda f: change_config(f, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor is 0.5 but only 1",
    ),
    "unknown activation": ("llama", lambda f: change_config(f, hidden_act="mish"), "hidden_act is 'mish'"),
    "quantized": ("llama", lambda f: change_config(f, quantization_config={"bits": 4}), "quantization_config is a mapping"),
    "tied, with another head": ("llama", lambda f: change_config(f, tie_word_embeddings=True), "lm_head.weight differs"),
    "untied, without a head": ("qwen2.5", lambda f: change_config(f, tie_word_embeddings=False), "no tensor 'lm_head.weight'"),
    "unscaled attention": ("gpt2", lambda f: change_config(f, scale_attn_weights=False), "scale_attn_weights is false"),
    "scaled by the layer": (
        "gpt2",
        lambda f: change_config(f, scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx is true",
    ),
    "no weights": ("llama", lambda f: (f / SINGLE).unlink(), "has neither model.safetensors nor"),
    "a pickle": ("llama", pickle_only, r"pytorch_model.bin .*safe_serialization=True"),
    "weights empty": ("llama", lambda f: (f / SINGLE).write_bytes(b""), "cannot be read as safetensors"),
    "weights of zeros": ("llama", lambda f: (f / SINGLE).write_bytes(bytes(1000)), "cannot be read as safetensors"),
    "weights a text": (
        "llama",
        lambda f: (f / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "safetensors",
    ),
    "header cut": ("llama", lambda f: cut(f / SINGLE, 100), "cannot be read as safetensors"),
    "end cut": ("llama", lambda f: cut(f / SINGLE, -4), "cannot be read as safetensors"),
    "bytes too many": ("llama", lambda f: (f / SINGLE).open("ab").write(b"1234"), "cannot be read as safetensors"),
    "header without end": ("llama", lambda f: header_length(f / SINGLE, 2**62), "cannot be read as safetensors"),
    "header too short": ("llama", lambda f: header_length(f / SINGLE, 40), "cannot be read as safetensors"),
    "a tensor missing": ("llama", lambda f: change_tensors(f, lambda s: s.pop(UP)), f"has no tensor '{UP}'"),
    "a tensor renamed": ("llama", lambda f: change_tensors(f, lambda s: s.update(more=s.pop(UP))), f"has no tensor '{UP}'"),
    "a tensor too many": (
        "llama",
        lambda f: change_tensors(f, lambda s: s.update(adapter=torch.zeros(2))),
        "has the tensor 'adapter'",
    ),
    "a tensor turned": (
        "llama",
        lambda f: change_tensors(f, lambda s: s.update({UP: s[UP].t().contiguous()})),
        r"is \[32, 48\] but config.json asks for \[48, 32\]",
    ),
    "a tensor flat": ("llama", lambda f: change_tensors(f, lambda s: s.update({UP: s[UP].flatten()})), r"is \[1536\] but"),
    "whole numbers": ("llama", lambda f: change_tensors(f, other_dtype), "is I8 but weights must be"),
    "gpt2 not turned": (
        "gpt2",
        lambda f: change_tensors(
            f, lambda s: s.update({"transformer.h.0.mlp.c_fc.weight": s["transformer.h.0.mlp.c_fc.weight"].t().contiguous()})
        ),
        r"is \[128, 32\] but config.json asks for \[32, 128\]",
    ),
    "index no json": ("sharded", lambda f: (f / INDEX).write_text("{'a'"), "is not JSON"),
    "index without a map": ("sharded", lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    "index of numbers": ("sharded", lambda f: change_index(f, lambda n: n.update({UP: 3})), "has no weight_map"),
    "a shard missing": ("sharded", lambda f: shard(f).unlink(), "but there is no such file"),
    "a shard cut": ("sharded", lambda f: cut(shard(f), -1), "cannot be read as safetensors"),
    "shards swapped": ("sharded", swapped, "but it does not"),
    "out of the folder": ("sharded", outside, r"may only name .safetensors files of its own folder"),
    "an absolute path": ("sharded", absolute, r"may only name .safetensors files of its own folder"),
    "the folder above": ("sharded", lambda f: change_index(f, lambda n: n.update({UP: ".."})), "may only name"),
    "a tensor in another shard": (
        "sharded",
        lambda f: change_index(f, lambda n: n.update({FIRST: n["lm_head.weight"], "lm_head.weight": n[FIRST]})),
        "but it does not",
    ),
    "a tensor not in the index": (
        "sharded",
        lambda f: change_index(f, lambda n: n.pop("model.norm.weight")),
        "does not say so",
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("good")
    for family in ("llama", "qwen2.5", "gpt2"):
        theirs(CONFIGS[family]).save_pretrained(root / family)
    theirs(CONFIGS["llama"]).save_pretrained(root / "sharded", max_shard_size="10KB")
    return {folder.name: folder for folder in root.iterdir()}


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_folder_is_refused(what: str, good: dict[str, Path], tmp_path: Path) -> None:
    base, damage, sentence = BROKEN[what]
    folder = copied(good[base], tmp_path / "broken")
    HFFolder.open(folder)
    damage(folder)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    with pytest.raises(SpecError, match=sentence) as refused:
        HFFolder.open(folder)
    assert "\n" not in str(refused.value)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("path", ["nowhere", "a-file", "x" * 5000, "nul\0"])
def test_paths_that_are_not_folders_are_refused(path: str, tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    with pytest.raises(SpecError, match=r"is a file|does not exist"):
        HFFolder.open(tmp_path / path)


def weights(model: Model) -> Callable[[str], torch.Tensor]:
    module = Transformer(model)
    initialize(module, 0, model)
    state = module.state_dict()
    return state.__getitem__


def test_a_non_empty_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "file").write_text("mine")
    write(tmp_path / "out", TINY, weights(TINY))  # an empty folder is as good as none
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    for taken in ("out", "file"):
        with pytest.raises(SpecError, match=f"{taken} is a f.*: name a new"):
            write(tmp_path / taken, TINY, weights(TINY))
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("error", [SpecError("a flipped byte"), KeyboardInterrupt()])
def test_a_failed_write_leaves_no_files(error: BaseException, tmp_path: Path) -> None:
    given = weights(TINY)

    def failing(name: str) -> torch.Tensor:
        if name == "blocks.1.mlp.down.weight":
            raise error
        return given(name)

    with pytest.raises(type(error)):
        write(tmp_path / "out", TINY, failing)
    assert not list(tmp_path.iterdir())


def test_weights_of_another_shape_leave_no_files(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"weights of 'embed.tokens.weight' are \[3, 3\] but the model asks for \[40, 16\]"):
        write(tmp_path / "out", TINY, lambda name: torch.zeros(3, 3))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_reported_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultrascale.model.hf_folder.free_bytes", lambda place: 1000)
    with pytest.raises(SpecError, match=r"GiB but its disk has 0.00 GiB free"):
        write(tmp_path / "out", TINY, weights(TINY))
    assert not list(tmp_path.iterdir())


def test_a_model_of_no_family_is_refused_before_writing(tmp_path: Path) -> None:
    odd = TINY.model_copy(update={"positions": "none"})
    with pytest.raises(SpecError, match=r"model.positions is 'none'"):
        write(tmp_path / "out", odd, weights(odd))
    assert not list(tmp_path.iterdir())


def tokenizer_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models

    folder.mkdir()
    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "private.txt").write_text("not for others")
    return folder


def test_the_tokenizer_is_copied_with_the_weights(tmp_path: Path) -> None:
    source = tokenizer_folder(tmp_path / "source")
    write(tmp_path / "out", TINY, weights(TINY), tokenizer=source)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {CONFIG, SINGLE, "tokenizer.json", "tokenizer_config.json"}
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("a")["input_ids"] == [0]
    write(tmp_path / "alone", TINY, weights(TINY), tokenizer=source / "tokenizer.json")
    assert (tmp_path / "alone" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("given", ["nowhere.json", "empty-folder", "text.json", "list.json"])
def test_files_that_are_no_tokenizer_are_refused(given: str, tmp_path: Path) -> None:
    (tmp_path / "empty-folder").mkdir()
    (tmp_path / "text.json").write_text("hello")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(SpecError, match=r"^tokenizer .*tokenizer.json"):
        write(tmp_path / "out", TINY, weights(TINY), tokenizer=tmp_path / given)
    assert not (tmp_path / "out").exists()
