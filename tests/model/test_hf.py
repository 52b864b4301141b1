"""Names of Hugging Face tensors: a round trip keeps every tensor, and what does not fit is an error."""

from __future__ import annotations

import pytest
import torch
import transformers

from model.builders import from_hf, initialize, to_hf
from ultrascale.model.transformer import Transformer
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model

TINY = Model.load("tiny")
GPT = Model.load("gpt2").model_copy(
    update={"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 128, "vocab": 99}
)
SHAPES = {
    "llama": TINY,
    "llama tied": TINY.model_copy(update={"tied_embeddings": True}),
    "qwen2": TINY.model_copy(update={"qkv_bias": True}),
    "qwen3": TINY.model_copy(update={"qk_norm": True}),
    "gpt2": GPT,
}


@pytest.mark.parametrize("family", SHAPES)
def test_round_trip(family: str) -> None:
    model = SHAPES[family]
    module = Transformer(model)
    initialize(module, 0, model)
    state = module.state_dict()
    back = from_hf(to_hf(state, model), model)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_names_and_layouts_are_those_of_transformers() -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, n_inner=128, n_positions=1024, vocab_size=99)
    with torch.device("meta"):
        reference = transformers.GPT2LMHeadModel(config)
        converted = to_hf(Transformer(GPT).state_dict(), GPT)
    wanted = {name: parameter.shape for name, parameter in reference.named_parameters()}
    assert {name: tensor.shape for name, tensor in converted.items()} == wanted


def test_a_model_of_no_known_family_is_refused() -> None:
    with pytest.raises(SpecError, match=r"which no Hugging Face family can say .*: try "):
        to_hf({}, TINY.model_copy(update={"norm": "layernorm", "qk_norm": True}))
