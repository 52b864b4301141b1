"""The harness's interface: log-likelihoods are those of the logits, texts stop where asked, and lm_eval's own model agrees."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from test_generate import hf_folder
from ultrascale.measure.lm_eval_harness import UltrascaleLM
from ultrascale.specs.errors import SpecError

TEXTS = [("w1 w2 w3", " w4 w5"), ("w7", " w8"), ("", "w9 w10 w11"), ("w1 " * 30, "w2 w3 w4")]


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("hf"), "llama")


@pytest.fixture
def model(folder: Path) -> UltrascaleLM:
    return UltrascaleLM(path=str(folder), device="cpu", batch_size=3)


def test_log_likelihoods_are_those_of_the_logits(model: UltrascaleLM) -> None:
    found = model.loglikelihood(requests(*TEXTS), disable_tqdm=True)
    for (context, continuation), (total, _) in zip(TEXTS, found, strict=True):
        before = model.tok_encode(context) or [model.eot_token_id]
        after = model.tok_encode(continuation)
        logits = model.model.logits([before + after])[0].log_softmax(-1)
        wanted = sum(float(logits[len(before) - 1 + place, token]) for place, token in enumerate(after))
        assert total == pytest.approx(wanted, abs=1e-4)


def test_greedy_continuations_are_marked(model: UltrascaleLM) -> None:
    context = "w1 w2 w3"
    likely = model.generate_until(requests((context, {"until": [], "max_gen_toks": 3})))[0]
    (_, greedy), (_, other) = model.loglikelihood(requests((context, " " + likely), (context, " w4 w5 w6")), disable_tqdm=True)
    assert greedy
    assert not other


def test_a_rolling_text_is_cut_into_windows(model: UltrascaleLM) -> None:
    text = " ".join(f"w{number % 90 + 1}" for number in range(50))
    tokens = [model.eot_token_id, *model.tok_encode(text)]
    logits = model.model.logits([tokens])[0].log_softmax(-1)
    whole = sum(float(logits[place, token]) for place, token in enumerate(tokens[1:]))
    assert model.loglikelihood_rolling(requests((text,)))[0] == pytest.approx(whole, abs=1e-3)
    model.max_length = 16
    short = model.loglikelihood_rolling(requests((text,)))[0]
    assert short != pytest.approx(whole, abs=1e-3)
    assert abs(short) < 2 * abs(whole)


def test_texts_end_at_a_stop_string(model: UltrascaleLM) -> None:
    whole = model.generate_until(requests(("w5 w6", {"until": [], "max_gen_toks": 8})))[0]
    stop = whole.split()[3]
    cut = model.generate_until(requests(("w5 w6", {"until": [stop], "max_gen_toks": 8})))[0]
    assert cut == whole[: whole.index(stop)]


def test_the_harness_s_own_model_agrees(folder: Path, model: UltrascaleLM) -> None:
    transformers = pytest.importorskip("transformers")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="w0", pad_token="w0")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = huggingface.HFLM(pretrained=reference, tokenizer=words, device="cpu", batch_size=2)
    ours = model.loglikelihood(requests(*TEXTS[:2]), disable_tqdm=True)
    for (mine, greedy), (their, same) in zip(ours, theirs.loglikelihood(requests(*TEXTS[:2]), disable_tqdm=True), strict=True):
        assert mine == pytest.approx(their, abs=1e-3)
        assert greedy == same


def test_the_name_is_registered_and_a_wrong_argument_is_named(folder: Path) -> None:
    from lm_eval.api.registry import get_model

    assert get_model("ultrascale") is UltrascaleLM
    with pytest.raises(SpecError, match="--model_args has dtype, which ultrascale does not take"):
        UltrascaleLM(path=str(folder), dtype="float16")
