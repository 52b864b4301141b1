"""Models -> config.json: reading back what was written gives the model; what no family can say is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.specs.blocks import ROPE_FIELDS
from ultrascale.specs.errors import SpecError
from ultrascale.specs.hf_config import config_of
from ultrascale.specs.hf_families import FAMILIES
from ultrascale.specs.model import Model

NOT_IN_CONFIG = {"name", "family", "source"}
WRITTEN = ["gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"]
TINY, GPT2 = Model.load("tiny"), Model.load("gpt2")


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Any dense shape that some family can say."""
    family = draw(st.sampled_from(WRITTEN))
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads * draw(st.integers(1, 4))
    head_dim = 2 * draw(st.integers(1, 64))
    fields: dict[str, Any] = {
        "name": "drawn",
        "layers": draw(st.integers(1, 4)),
        "hidden": heads * head_dim,
        "heads": heads,
        "ffn": draw(st.integers(1, 4096)),
        "vocab": draw(st.integers(1, 2**17)),
        "norm_eps": draw(st.sampled_from([1e-5, 1e-6, 1e-8, 0.5])),
        "tied_embeddings": draw(st.booleans()),
    }
    if family == "gpt2":
        fields |= dict.fromkeys(("qkv_bias", "attention_output_bias", "mlp_bias"), True)
        fields |= {
            "positions": "learned",
            "norm": "layernorm",
            "activation": draw(st.sampled_from(["gelu", "gelu_exact", "relu"])),
        }
        return Model(**fields, max_positions=draw(st.integers(1, 2048)))
    fields |= {
        "hidden": draw(st.integers(1, 4096)),
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "activation": draw(st.sampled_from(["swiglu", "geglu", "geglu_exact"])),
        "rope_theta": draw(st.sampled_from([10_000.0, 500_000.0, 1e6])),
        "max_positions": draw(st.none() | st.integers(1, 2**20)),
    }
    if draw(st.booleans()):
        fields["rope_scaling"] = draw(scalings())
        if fields["rope_scaling"]["rope_type"] == "dynamic":
            fields |= {"max_positions": draw(st.integers(1, 2**20)), "head_dim": head_dim + 2}
    biased = draw(st.booleans())
    window = st.integers(1, 8192)
    fields |= {
        "llama": {"qkv_bias": biased, "attention_output_bias": biased, "mlp_bias": draw(st.booleans())},
        "mistral": {"sliding_window": draw(window)},
        "qwen2": {"qkv_bias": True, "sliding_window": draw(st.none() | window)},
        "qwen3": {
            "qk_norm": True,
            "qkv_bias": biased,
            "attention_output_bias": biased,
            "sliding_window": draw(st.none() | window),
        },
        "mixtral": {"sliding_window": draw(st.none() | window), "ffn": 0},
        "qwen2_moe": {"qkv_bias": biased},
        "qwen3_moe": {
            "qk_norm": True,
            "qkv_bias": biased,
            "attention_output_bias": biased,
            "sliding_window": draw(st.none() | window),
        },
    }[family]
    if family in ("mixtral", "qwen2_moe", "qwen3_moe"):
        fields |= draw(experts(family, fields))
    return Model(**fields)


@st.composite
def scalings(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(sorted(ROPE_FIELDS)))
    fields: dict[str, Any] = {"rope_type": kind, "factor": draw(st.floats(1.5, 32))}
    if kind in ("llama3", "yarn"):
        fields["original_max_positions"] = draw(st.integers(1, 8192))
    if kind == "llama3":
        low = draw(st.floats(0.5, 2))
        fields |= {"low_freq_factor": low, "high_freq_factor": low + draw(st.floats(0.5, 8))}
    if kind == "yarn":
        fields |= {"beta_fast": draw(st.floats(8, 64)), "beta_slow": draw(st.floats(0.5, 4)), "truncate": draw(st.booleans())}
        scores = [{}, {"attention_factor": 1.5}, {"mscale": 1.0, "mscale_all_dim": 0.5}]
        fields |= draw(st.sampled_from(scores))
    return fields


@st.composite
def experts(draw: st.DrawFn, family: str, fields: dict[str, Any]) -> dict[str, Any]:
    count = draw(st.integers(1, 64))
    moe = {"experts": count, "top_k": draw(st.integers(1, min(8, count))), "expert_ffn": draw(st.integers(1, 4096))}
    if family == "mixtral":
        return {"moe": moe}
    moe |= {"dense_layers": draw(st.integers(0, fields["layers"])), "renormalize": draw(st.booleans())}
    if family == "qwen2_moe":
        moe |= {"shared_experts": 1, "shared_expert_ffn": draw(st.integers(1, 4096)), "shared_gate": True}
    return {"moe": moe, "ffn": fields["ffn"] if moe["dense_layers"] else 0}


@given(models())
def test_what_is_written_reads_back_as_the_model(model: Model) -> None:
    config = config_of(model, "bf16")
    assert config.get("max_position_embeddings", 1) is not None  # transformers refuses null
    back = Model.from_hf(config)
    assert back.model_dump(exclude=NOT_IN_CONFIG) == model.model_dump(exclude=NOT_IN_CONFIG)


# By the beginning of a name, the longer first; all others are Llamas.
FAMILY = {
    "qwen1.5-moe": "qwen2_moe",
    "qwen2-57b": "qwen2_moe",
    "qwen1.5": "qwen2",
    "qwen2": "qwen2",
    "qwen3-next": "qwen3_next",
    **dict.fromkeys(("qwen3.5-0.8b", "qwen3.5-9b", "qwen3.5-27b"), "qwen3_5_text"),
    "qwen3.5": "qwen3_5_moe_text",
    "qwen3-30b": "qwen3_moe",
    "qwen3-235b": "qwen3_moe",
    "qwen3-coder": "qwen3_moe",
    "qwen3": "qwen3",
    "gemma-2-": "gemma2",
    "gemma-3-": "gemma3_text",
    "glm-4-9b-0414": "glm4",
    "glm-4-32b-0414": "glm4",
    "glm-4-": "glm",
    "glm-4.": "glm4_moe",
    "granite-3.0-1b": "granitemoe",
    "granite-3.0-3b": "granitemoe",
    "deepseek-v2": "deepseek_v2",
    "deepseek-v3": "deepseek_v3",
    "moonlight": "deepseek_v3",
    "kimi": "deepseek_v3",
    "gpt-oss": "gpt_oss",
    "llama-4-": "llama4_text",
    "gpt-neox": "gpt_neox",
    "pythia": "gpt_neox",
    "cerebras-gpt": "gpt2",
    "gpt": "gpt2",
    "olmoe": "olmoe",
    "olmo-2": "olmo2",
    "olmo-3": "olmo3",
    "phi": "phi3",
    "command-r": "cohere",
    "aya": "cohere",
    "mistral": "mistral",
    "mixtral": "mixtral",
    **dict.fromkeys(("nemotron-h", "nemotron-nano", "nemotron-3-"), "nemotron_h"),
    "nemotron": "nemotron",
    "minitron": "nemotron",
    "starcoder2": "starcoder2",
    "stablelm": "stablelm",
    "seed-oss": "seed_oss",
    "ernie": "ernie4_5",
    "exaone": "exaone4",
    "minimax": "minimax_m2",
    "smollm3": "smollm3",
    "mt-nlg": "gpt2",
    "tiny-moe": "mixtral",
    "gemma": "gemma",
    "granite": "granite",
}


@pytest.mark.parametrize("name", Model.presets())
def test_a_preset_is_written_as_its_own_family(name: str) -> None:
    model = Model.load(name)
    config = config_of(model, "fp32")
    expected = next((family for start, family in FAMILY.items() if name.startswith(start)), "llama")
    assert (config["model_type"], config["architectures"], config["torch_dtype"]) == (
        expected,
        [FAMILIES[expected].architecture],
        "float32",
    )
    assert Model.from_hf(config).parameters == model.parameters


@pytest.mark.parametrize(
    ("base", "change", "field"),
    [
        (TINY, {"positions": "none"}, "positions"),
        (TINY, {"qk_norm": True, "residual_scale": 0.5}, "residual_scale"),
        (TINY, {"norm_placement": "both", "embedding_scale": 3.0}, "embedding_scale"),
        (TINY, {"sliding_window": 64, "logits_scale": 0.5}, "logits_scale"),
        (TINY, {"logits_softcap": 30.0, "qkv_bias": True}, "logits_softcap"),
        (GPT2, {"norm": "rmsnorm"}, "norm"),
        (GPT2, {"kv_heads": 4}, "kv_heads"),
        (GPT2, {"head_dim": 32}, "head_dim"),
        (GPT2, {"qkv_bias": False}, "qkv_bias"),
        (GPT2, {"mlp_bias": False}, "mlp_bias"),
        (GPT2, {"qk_norm": True}, "qk_norm"),
        (GPT2, {"sliding_window": 64}, "sliding_window"),
    ],
)
def test_inexpressible_models_are_refused_by_field(base: Model, change: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=rf"^model\.{field} is .*, which no Hugging Face family can say .*: try ") as refused:
        config_of(base.model_copy(update=change), "bf16")
    assert "\n" not in str(refused.value)


def test_a_model_is_written_as_the_family_that_it_was_read_from() -> None:
    llama = {**config_of(TINY, "bf16"), "model_type": "ministral"}
    assert config_of(Model.from_hf(llama), "bf16")["model_type"] == "ministral"
    biased = Model.from_hf(llama).model_copy(update={"qkv_bias": True})  # which Ministral cannot say
    assert config_of(biased, "bf16")["model_type"] == "qwen2"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"router": "sigmoid"}, "moe.router"),
        ({"router_bias": True}, "moe.router_bias"),
        ({"renormalize": False}, "moe.renormalize"),
        ({"dense_layers": 1}, "moe.dense_layers"),
        ({"shared_experts": 1, "shared_expert_ffn": 8}, "moe.shared_gate"),
        ({"shared_experts": 2, "shared_expert_ffn": 8, "shared_gate": True}, "moe.shared_experts"),
    ],
)
def test_experts_of_no_family_are_refused(change: dict[str, Any], field: str) -> None:
    mixtral = Model.load("mixtral-8x7b")
    assert mixtral.moe is not None
    with pytest.raises(SpecError, match=rf"^model\.{field} is .*, which no Hugging Face family can say .*: try "):
        config_of(mixtral.model_copy(update={"moe": mixtral.moe.model_copy(update=change)}), "bf16")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(SpecError, match="dtype is 'fp8' but weights are written as bf16 or fp32: try bf16"):
        config_of(TINY, "fp8")
