"""Generated text: greedy decoding is the argmax of the whole forward pass, and that of `transformers`; errors name the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from builders import SMALL
from model.test_hf_folder import CONFIGS, theirs
from ultrascale.generate import Sampling, TextModel, draw, load, text
from ultrascale.specs.errors import SpecError

GREEDY = Sampling(temperature=0)
PROMPT = "w3 w1 w4 w1 w5 w9 w2 w6"


def write_tokenizer(folder: Path, size: int = 99) -> Path:
    """Words w0, w1 … of one token each."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def hf_folder(folder: Path, name: str) -> Path:
    theirs(CONFIGS[name]).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
    write_tokenizer(folder)
    return folder


def without_cache(model: TextModel, prompt: list[int], count: int) -> list[int]:
    """The argmax of the logits of the whole text, for every token anew."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.logits([tokens])[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.quick_cases("llama", "mistral", "qwen3-moe", "gpt2")
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_the_argmax_and_what_transformers_generates(name: str, tmp_path: Path) -> None:
    model = load(hf_folder(tmp_path, name), device="cpu")
    prompt = model.encode(PROMPT)
    assert prompt == [3, 1, 4, 1, 5, 9, 2, 6]
    ours = list(model.generate(prompt, 12, GREEDY))
    assert ours == without_cache(model, prompt, 12)
    given = torch.tensor([prompt])
    reference = theirs(CONFIGS[name])
    out = reference.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    if name != "llama, dynamic positions":  # transformers keeps keys that it rotated for a shorter text
        assert out[0, len(prompt) :].tolist() == ours


def test_a_run_of_any_layout_continues_a_text(tmp_path: Path, run) -> None:
    folder = tmp_path / "run"
    code, _, err = run("train", "--model", SMALL, "--steps", 2, "--nproc", 2, "--out", folder, "layout.tp=2", "job.seq=32")
    assert code == 0, err
    code, out, err = run("generate", folder, "--prompt", "def main", "--tokens", 8, "--temperature", 0, "--json")
    assert code == 0, err
    model = load(folder / "checkpoints" / "step-000002", device="cpu")
    tokens = without_cache(model, list(b"def main"), 8)
    assert json.loads(out)["text"] == bytes(token for token in tokens if token).decode(errors="replace").split("\0")[0]
    code, out, _ = run("generate", folder, "--prompt", "def main", "--tokens", 3)
    assert code == 0
    assert out.startswith("def main")
    code, _, err = run("generate", tmp_path)
    assert code == 2
    assert "holds no complete checkpoint" in err


def test_draws_follow_the_temperature_the_top_k_and_the_seed() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])

    def drawn(count: int = 2000, **fields: float) -> torch.Tensor:
        sampling = Sampling(**fields)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(sampling.seed)
        return torch.tensor([draw(logits, sampling, generator) for _ in range(count)])

    assert set(drawn(temperature=0, count=5).tolist()) == {3}
    shares = drawn(temperature=2.0).bincount(minlength=4) / 2000
    assert torch.allclose(shares, (logits / 2).softmax(0), atol=0.04)
    assert set(drawn(temperature=2.0, top_k=2).tolist()) == {2, 3}
    assert torch.equal(drawn(temperature=1.0, seed=3), drawn(temperature=1.0, seed=3))
    assert not torch.equal(drawn(temperature=1.0, seed=3), drawn(temperature=1.0, seed=4))


def test_text_ends_at_an_end_token(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, "llama")
    model = load(folder, device="cpu")
    tokens = list(model.generate(model.encode(PROMPT), 6, GREEDY))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens[3], 98]}))
    again = load(folder, device="cpu")
    wanted = tokens[: tokens.index(tokens[3])]
    assert "".join(text(again, PROMPT, 6, GREEDY)).split() == [f"w{token}" for token in wanted]


def test_errors_name_a_value_that_works(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    model = load(hf_folder(folder, "gpt2"), device="cpu")
    with pytest.raises(SpecError, match="--tokens is 60 and the prompt has 8 but the model has 64 positions: try --tokens 56"):
        next(text(model, PROMPT, 60, GREEDY))
    with pytest.raises(SpecError, match="--tokens is 0 but must be at least 1: try 64"):
        next(text(model, PROMPT, 0, GREEDY))
    with pytest.raises(SpecError, match="--prompt is empty and the model has no token to begin with"):
        next(text(model, "", 4, GREEDY))
    with pytest.raises(SpecError, match=r"--device is 'tpu' but this machine has cpu.*: try --device cpu"):
        load(folder, device="tpu")
    with pytest.raises(SpecError, match="--temperature is -1 but must be from 0"):
        Sampling(temperature=-1)
    with pytest.raises(SpecError, match="--top-k is -1 but must be 0"):
        Sampling(top_k=-1)
    write_tokenizer(folder, 120)
    with pytest.raises(SpecError, match=r"has 120 tokens but the model of .* has 99: name the tokenizer"):
        load(folder, device="cpu")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SpecError, match=r"has no tokenizer.json: name one with --tokenizer"):
        load(folder, device="cpu")
    with pytest.raises(SpecError, match="is no folder: name a run, such as runs/first"):
        load(tmp_path / "nothing", device="cpu")
