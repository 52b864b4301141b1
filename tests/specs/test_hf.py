"""HF configs: each family's published config.json gives the preset's exact count; what cannot be expressed is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ultrascale.specs.blocks import RopeScaling
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model

Config = dict[str, Any]


def config(family: str, layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: Any) -> Config:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "hidden_act": "silu",
        **more,
    }


QWEN3_MOE = {"head_dim": 128, "num_experts_per_tok": 8, "mlp_only_layers": [], "decoder_sparse_step": 1, "norm_topk_prob": True}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1}

DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_2 = {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}}
QWEN = {"rope_theta": 1000000, "rms_norm_eps": 1e-06}

# The values of the published files that give shapes, wavelengths and norms.
CONFIGS: dict[str, Config] = {
    "llama-2-7b": config("llama", 32, 4096, 32, 32, 11008, 32000, tie_word_embeddings=False, rms_norm_eps=1e-05),
    "llama-3-8b": config("llama", 32, 4096, 32, 8, 14336, 128256, rope_theta=500000.0, rms_norm_eps=1e-05),
    "llama-3.2-1b": config(
        "llama", 16, 2048, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True, rms_norm_eps=1e-05, **LLAMA3_2
    ),
    "mistral-7b": config(
        "mistral", 32, 4096, 32, 8, 14336, 32000, sliding_window=4096, head_dim=None, rms_norm_eps=1e-05, rope_theta=10000.0
    ),
    "mixtral-8x7b": config("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
    "qwen2.5-0.5b": config(
        "qwen2", 24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True, use_sliding_window=False, sliding_window=32768, **QWEN
    ),
    "qwen2.5-7b": config("qwen2", 28, 3584, 28, 4, 18944, 152064, max_window_layers=28, use_sliding_window=False, **QWEN),
    "qwen3-0.6b": config("qwen3", 28, 1024, 16, 8, 3072, 151936, head_dim=128, tie_word_embeddings=True, **QWEN),
    "qwen3-8b": config("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128, attention_bias=False, **QWEN),
    "qwen3-30b-a3b": config(
        "qwen3_moe", 48, 2048, 32, 4, 6144, 151936, **QWEN, **QWEN3_MOE, num_experts=128, moe_intermediate_size=768
    ),
    "gpt2": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "deepseek-v2-lite": config(
        "deepseek_v2",
        27,
        2048,
        16,
        16,
        10944,
        102400,
        **MLA,
        q_lora_rank=None,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        scoring_func="softmax",
        topk_method="greedy",
        rope_scaling={**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek-v3": config(
        "deepseek_v3",
        61,
        7168,
        128,
        128,
        18432,
        129280,
        **MLA,
        q_lora_rank=1536,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        num_nextn_predict_layers=1,
        rope_scaling={**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "smollm3-3b": config("smollm3", 36, 2048, 16, 4, 11008, 128256, use_sliding_window=False, rope_theta=5000000.0),
    "llama-4-maverick-17b-128e": config(
        "llama4_text",
        48,
        5120,
        40,
        8,
        8192,
        202048,
        head_dim=128,
        intermediate_size_mlp=16384,
        num_local_experts=128,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[],
        attention_chunk_size=8192,
        use_qk_norm=False,
        rms_norm_eps=1e-05,
        rope_theta=500000.0,
        rope_scaling=None,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_gives_the_preset(name: str) -> None:
    preset, imported = Model.load(name), Model.from_hf(CONFIGS[name], name)
    if name == "deepseek-v3":  # its preset leaves out the layer of multi-token prediction, which the config has
        assert imported.mtp_depth == 1
        imported = imported.model_copy(update={"mtp_depth": 0})
    assert imported.parameters == preset.parameters
    not_in_config = {"source", "family", "max_positions", "ignored_keys"}
    assert not imported.ignored_keys
    assert imported.model_dump(exclude=not_in_config) == preset.model_dump(exclude=not_in_config)


def test_qwen2_moe_by_hand() -> None:
    # Qwen1.5-MoE-A2.7B, per layer: attention, biases on q, k and v; 60 experts; a shared one with its gate; a router.
    published = config(
        "qwen2_moe",
        24,
        2048,
        16,
        16,
        5632,
        151936,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        decoder_sparse_step=1,
    )
    h = 2048
    attention = 4 * h * h + 3 * h
    moe = 60 * 3 * h * 1408 + 3 * h * 5632 + h + 60 * h
    model = Model.from_hf(published)
    assert model.moe is not None
    assert not model.moe.renormalize  # The class's default.
    assert model.parameters == 24 * (attention + moe + 2 * h) + 2 * 151936 * h + h
    assert round(model.parameters / 1e9, 1) == 14.3  # The model card's total.
    assert round(model.active_parameters / 1e9, 1) == 2.7  # And its activated parameters.


def test_keys_that_nothing_reads_are_named() -> None:
    unread = {"attention_chunk_size": 64, "attention_dropout": 0.1, "resid_dropout": 0.0, "mtp_num_hidden_layers": 1}
    model = Model.from_hf(config("llama", 2, 64, 4, 4, 128, 100, **unread))
    assert model.ignored_keys == ("attention_chunk_size", "attention_dropout", "mtp_num_hidden_layers")
    assert "attention_dropout, mtp_num_hidden_layers, which llama is planned and trained without" in model.notes[0]


def test_the_name_is_from_caller_config_or_family() -> None:
    gpt2 = CONFIGS["gpt2"]
    assert Model.from_hf(gpt2, "mine").name == "mine"
    assert Model.from_hf({**gpt2, "_name_or_path": "me/small"}).name == "me/small"
    assert Model.from_hf(gpt2).name == "gpt2"


def test_keys_that_newer_releases_write() -> None:
    moe = dict(CONFIGS["qwen3-30b-a3b"])
    moe["num_local_experts"] = moe.pop("num_experts")
    assert Model.from_hf(moe).parameters == Model.load("qwen3-30b-a3b").parameters
    v3 = {**CONFIGS["deepseek-v3"], "head_dim": 64}  # transformers saves the rotary part as head_dim.
    del v3["scoring_func"], v3["topk_method"]
    assert Model.from_hf({**v3, "num_nextn_predict_layers": 0}).parameters == Model.load("deepseek-v3").parameters
    v3["num_mtp_layers"] = v3.pop("num_nextn_predict_layers")
    assert Model.from_hf(v3).mtp_depth == 1


def test_missing_config_keys_have_the_classs_defaults() -> None:
    bare = {key: value for key, value in CONFIGS["llama-2-7b"].items() if key != "num_key_value_heads"}
    assert Model.from_hf(bare).kv_heads == 32
    qwen3 = {key: value for key, value in CONFIGS["qwen3-0.6b"].items() if key != "head_dim"}
    assert Model.from_hf(qwen3).head_dim == 128
    assert Model.from_hf({**CONFIGS["gpt2"], "n_inner": 100}).ffn == 100
    assert Model.from_hf({**CONFIGS["deepseek-v2-lite"], "n_routed_experts": None}).moe is None


def test_biases_follow_the_config() -> None:
    model = Model.from_hf({**CONFIGS["llama-2-7b"], "attention_bias": True, "mlp_bias": True})
    assert (model.qkv_bias, model.attention_output_bias, model.mlp_bias) == (True, True, True)


def test_rotary_wavelengths_and_norms() -> None:
    newer = {**CONFIGS["llama-3.2-1b"], "rope_scaling": None, "rope_theta": None}
    newer["rope_parameters"] = {**LLAMA3_2["rope_scaling"], "rope_theta": 500000.0}  # type: ignore[dict-item]
    assert Model.from_hf(newer, "x").rope_scaling == Model.load("llama-3.2-1b").rope_scaling
    assert Model.from_hf(newer, "x").rope_theta == 500000.0
    bare = Model.from_hf({key: value for key, value in CONFIGS["llama-2-7b"].items() if key != "rms_norm_eps"})
    assert (bare.rope_theta, bare.rope_scaling, bare.norm_eps) == (10000.0, None, 1e-6)  # the class's defaults
    assert Model.from_hf({**CONFIGS["gpt2"], "layer_norm_epsilon": 1e-6}).norm_eps == 1e-6
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    scaled = Model.from_hf({**CONFIGS["deepseek-v3"], "rope_scaling": yarn}).rope_scaling
    assert scaled == RopeScaling(rope_type="yarn", factor=40.0, original_max_positions=4096)


def test_first_layers_can_be_dense() -> None:
    model = Model.from_hf({**CONFIGS["qwen3-30b-a3b"], "mlp_only_layers": [0, 1]})
    assert (model.dense_layers, model.ffn) == (2, 6144)


def test_sliding_windows() -> None:
    qwen = CONFIGS["qwen2.5-7b"] | {"use_sliding_window": True, "sliding_window": 4096}
    assert Model.from_hf(qwen).sliding_window is None  # max_window_layers = 28 leaves no layer to bind.
    assert Model.from_hf({**qwen, "max_window_layers": 0}).sliding_window == 4096
    half = Model.from_hf({**qwen, "max_window_layers": 14})
    assert [half.window(layer) for layer in (0, 13, 14, 27)] == [None, None, 4096, 4096]
    assert sum(kind.local for kind in half.each_kind) == 14


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("gpt2", {"model_type": "bert"}, "config.model_type is 'bert', which Ultrascale cannot read"),
        ("gpt2", {"model_type": "lama"}, "describe it in a model file"),
        ("gpt2", {"model_type": "lama"}, "known: arcee, cohere, cohere2, deepseek_v2, deepseek_v3,"),
        ("gpt2", {"model_type": 3}, "config.model_type is 3"),
        ("gpt2", {"n_layer": None}, "config.n_layer is missing"),
        ("gpt2", {"n_layer": "12"}, "config.n_layer is '12' but must be a whole number of at least 1"),
        ("gpt2", {"n_head": True}, "config.n_head is true"),
        ("gpt2", {"activation_function": ["gelu"]}, "config.activation_function is a list"),
        ("llama-2-7b", {"hidden_act": "tanh"}, "config.hidden_act is 'tanh'"),
        ("llama-2-7b", {"rms_norm_eps": 0}, "config.rms_norm_eps is 0 but must be a number greater than 0: try 1e-06"),
        ("llama-2-7b", {"rope_theta": "big"}, "config.rope_theta is 'big' but must be a number greater than 0: try 10000"),
        ("llama-2-7b", {"rope_scaling": 2}, "config.rope_scaling is 2 but must be a mapping"),
        (
            "llama-2-7b",
            {"rope_scaling": {"type": "longrope"}},
            "rope_type is 'longrope' but only 'default', 'dynamic', 'linear', 'llama3', 'yarn' can be computed",
        ),
        ("llama-2-7b", {"rope_parameters": {"rope_type": ["yarn"]}}, "config.rope_parameters.rope_type is a list but only"),
        ("llama-2-7b", {"rope_scaling": {"type": "linear"}}, "model.rope_scaling.factor is missing"),
        ("llama-2-7b", {"rope_scaling": {"type": "linear", "factor": "2"}}, "model.rope_scaling.factor is '2' but must be"),
        ("llama-2-7b", {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling.original_max_positions is missing"),
        ("llama-2-7b", {"rope_scaling": {"type": "dynamic", "factor": 4}}, "model.max_positions is missing but rope_scaling."),
        (
            "llama-2-7b",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "config.rope_parameters has a mapping for each kind of layer",
        ),
        ("llama-2-7b", {"rope_scaling": LLAMA3}, "model.rope_scaling.original_max_positions is missing"),
        ("llama-2-7b", {"mlp_bias": "no"}, "config.mlp_bias is 'no' but must be true or false"),
        ("llama-2-7b", {"num_key_value_heads": 5}, "model.kv_heads is 5 but must divide heads = 32: try 4 or 8"),
        ("qwen3-30b-a3b", {"decoder_sparse_step": 0}, "config.decoder_sparse_step is 0 but must be a whole number"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [3]}, "config.mlp_only_layers is [3] but dense layers must come first"),
        (
            "llama-4-maverick-17b-128e",
            {"moe_layers": [1, 2]},
            "config.moe_layers is [1, 2] but experts must be in every layer or every n-th",
        ),
        (
            "llama-4-maverick-17b-128e",
            {"layer_types": ["sliding_attention"] * 48},
            "must name full_attention or chunked_attention for each of 48",
        ),
        ("deepseek-v3", {"moe_layer_freq": 2}, "config.moe_layer_freq is 2 but only 1"),
        ("deepseek-v3", {"scoring_func": "tanh"}, "config.scoring_func is 'tanh' but only 'sigmoid' can be planned"),
        ("deepseek-v3", {"topk_method": "best"}, "config.topk_method is 'best' but only noaux_tc can be planned"),
        ("smollm3-3b", {"no_rope_layers": 4}, "config.no_rope_layers is 4 but must be a list"),
        ("qwen3-8b", {"layer_types": ["linear_attention"] * 36}, "config.layer_types is ['linear_attention', "),
    ],
)
def test_unreadable_configs_have_clear_errors(name: str, change: Config, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        Model.from_hf({**CONFIGS[name], **change})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        {"rope_scaling": {"rope_type": "proportional"}},
        {"hidden_act": "quick_gelu"},
        {"hidden_act": "relu"},
    ],
)
def test_nothing_is_suggested_that_computes_something_else(change: Config) -> None:
    with pytest.raises(SpecError) as caught:
        Model.from_hf({**CONFIGS["llama-2-7b"], **change})
    assert "try " not in str(caught.value)
    assert "did you mean" not in str(caught.value)
    assert "computes something else" in str(caught.value)


def test_rotary_scaling_is_read_where_transformers_reads_it() -> None:
    base = {**CONFIGS["llama-2-7b"], "max_position_embeddings": 4096}

    def scaling(**fields: Any) -> RopeScaling:
        found = Model.from_hf({**base, **fields}).rope_scaling
        assert found is not None
        return found

    yarn = {"type": "yarn", "factor": 8}
    assert scaling(rope_scaling=yarn) == RopeScaling(rope_type="yarn", factor=8.0, original_max_positions=4096)
    own = {**yarn, "original_max_position_embeddings": 1024}
    assert scaling(rope_scaling=own).original_max_positions == 1024
    assert scaling(rope_scaling=own, original_max_position_embeddings=512).original_max_positions == 512
    assert scaling(rope_scaling={**own, "factor": None}).factor == 4.0
    assert scaling(rope_scaling={**yarn, "beta_fast": 0, "beta_slow": None}).beta_fast == 32.0
    assert scaling(rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 0}).mscale is None
    assert scaling(rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 0.5}).mscale_all_dim == 0.5
    assert not scaling(rope_scaling={**yarn, "truncate": None}).truncate
    newer = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert scaling(rope_parameters=newer) == RopeScaling(rope_type="linear", factor=2.0)
    assert scaling(rope_parameters=newer, rope_scaling=yarn).rope_type == "yarn"


def test_a_config_must_be_a_mapping() -> None:
    with pytest.raises(SpecError, match="must be the mapping"):
        Model.from_hf(["llama"])  # type: ignore[arg-type]
