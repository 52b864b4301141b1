"""Rotary scaling and activations of Hugging Face configs: logits and every gradient equal those of `transformers`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from model.builders import from_hf, to_hf
from ultrascale.model.rotary import attention_factor, tables
from ultrascale.model.transformer import Transformer
from ultrascale.specs.blocks import RopeScaling
from ultrascale.specs.hf_config import config_of
from ultrascale.specs.model import Model

MAX_POSITIONS = 32
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": MAX_POSITIONS,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear of old files": {"type": "linear", "factor": 2},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": YARN,
    "yarn of old files": {"type": "yarn", "factor": 4.0},
    "yarn, attention_factor": {**YARN, "attention_factor": 1.7},
    "yarn, mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.4},
    "yarn, mscale alone": {**YARN, "mscale": 0.707},
    "yarn, betas": {**YARN, "beta_fast": 4, "beta_slow": 0.25},
    "yarn, not truncated": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    "yarn, factor of the lengths": {**YARN, "factor": None},
}
LENGTHS = {"within": 20, "beyond": 75}


def theirs(family: str, rope_theta: float = 1e4, **fields: Any) -> tuple[transformers.PreTrainedModel, Model]:
    """A small model of transformers with every parameter random, and the Model of its config."""
    config = transformers.AutoConfig.for_model(family, **{**SHAPE, "rope_theta": rope_theta, **fields}, bos_token_id=0)
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return reference, Model.from_hf(config.to_dict())


def compare(reference: transformers.PreTrainedModel, model: Model, length: int) -> None:
    """In fp32, to the size of each tensor's largest entry."""
    ours = Transformer(model)
    ours.load_state_dict(from_hf(reference.state_dict(), model))
    tokens = torch.randint(0, model.vocab, (2, length + 1), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    logits = ours(inputs, torch.arange(length))
    wanted = reference(inputs).logits
    close(logits, wanted, "logits")
    for one in (logits, wanted):
        nn.functional.cross_entropy(one.flatten(0, 1), targets.flatten()).backward()
    given = to_hf({name: parameter.grad for name, parameter in ours.named_parameters()}, model)
    grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert given.keys() == grads.keys()
    for name, grad in given.items():
        close(grad, grads[name], name)


def close(given: Tensor, wanted: Tensor | None, name: str) -> None:
    assert wanted is not None
    assert wanted.abs().max() > 0
    worst = float(((given - wanted).abs().max() / wanted.abs().max()).detach())
    assert worst <= 2e-5, f"{name}: {worst}"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("case", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_each_scaling_computes_what_transformers_does(family: str, case: str, length: str) -> None:
    reference, model = theirs(family, rope_scaling=dict(SCALINGS[case]))
    assert model.rope_scaling is not None
    assert model.rope_scaling.rope_type in case
    compare(reference, model, LENGTHS[length])


@pytest.mark.parametrize("case", SCALINGS)
def test_every_scaling_changes_the_angles(case: str) -> None:
    """Otherwise the comparison above would hold for a scaling that is ignored."""
    _, model = theirs("llama", rope_scaling=dict(SCALINGS[case]))
    plain = model.model_copy(update={"rope_scaling": None})
    positions = torch.arange(LENGTHS["beyond"])
    assert (tables(model, positions)[0] - tables(plain, positions)[0]).abs().max() > 0.1


@pytest.mark.parametrize("case", SCALINGS)
def test_written_scalings_are_read_by_both(case: str) -> None:
    """Model -> config.json -> transformers' tables; and -> Model again."""
    _, model = theirs("qwen2", rope_scaling=dict(SCALINGS[case]))
    written = config_of(model, "fp32")
    again = Model.from_hf(written)
    assert again.model_dump(exclude={"name", "source"}) == model.model_dump(exclude={"name", "source"})
    config = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    positions = torch.arange(LENGTHS["beyond"])
    wanted = reference.model.rotary_emb(torch.zeros(1), positions.unsqueeze(0))
    for given, other in zip(tables(model, positions), wanted, strict=True):
        torch.testing.assert_close(given, other[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("family", "fields", "activation"),
    [
        ("llama", {"hidden_act": "gelu"}, "geglu_exact"),
        ("qwen2", {"hidden_act": "gelu"}, "geglu_exact"),
        ("llama", {"hidden_act": "gelu_new"}, "geglu"),
    ],
)
def test_the_exact_gelu_computes_what_transformers_does(family: str, fields: dict[str, Any], activation: str) -> None:
    reference, model = theirs(family, **fields)
    assert model.activation == activation
    compare(reference, model, 20)
    assert Model.from_hf(config_of(model, "fp32")).activation == activation


@pytest.mark.parametrize(("word", "activation"), [("gelu", "gelu_exact"), ("gelu_new", "gelu")])
def test_gpt2_with_either_gelu(word: str, activation: str) -> None:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=48, n_head=6, n_positions=32, vocab_size=101, activation_function=word, attn_implementation="eager"
    )
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in reference.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    model = Model.from_hf(config.to_dict())
    assert model.activation == activation
    compare(reference, model, 20)
    assert config_of(model, "fp32")["activation_function"] == word


def test_the_base_of_dynamic_scaling_by_hand() -> None:
    """Twice the context and a factor of 2: the base grows by (2 · 2 - 1) ** (d / (d - 2)), and the slowest wave slows."""
    _, model = theirs("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    dim, length = model.head_dim, 2 * MAX_POSITIONS
    base = 1e4 * 3 ** (dim / (dim - 2))
    cos, _ = tables(model, torch.arange(length))
    assert float(cos[5, dim // 2 - 1]) == pytest.approx(math.cos(5 * base ** -((dim - 2) / dim)), abs=1e-6)
    short = tables(model, torch.arange(MAX_POSITIONS))
    plain = tables(model.model_copy(update={"rope_scaling": None}), torch.arange(MAX_POSITIONS))
    assert torch.equal(short[0], plain[0])


def test_a_part_of_a_sequence_has_the_rows_of_the_whole() -> None:
    _, model = theirs("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    whole = tables(model, torch.arange(80))
    part = torch.cat((torch.arange(0, 20), torch.arange(60, 80)))
    for given, wanted in zip(tables(model, part, 80), whole, strict=True):
        torch.testing.assert_close(given, wanted[part])
    assert not torch.allclose(tables(model, part)[0], whole[0][part], atol=1e-3)


def test_the_attention_factor_by_hand() -> None:
    yarn = RopeScaling(rope_type="yarn", factor=4.0, original_max_positions=8)
    assert attention_factor(yarn) == pytest.approx(0.1 * math.log(4) + 1)  # YaRN, equation 22
    assert attention_factor(yarn.model_copy(update={"factor": 0.5})) == 1.0
    assert attention_factor(RopeScaling(rope_type="linear", factor=4.0)) == 1.0
