"""Hugging Face config.json -> fields of a Model, one short function per family; and the table of known families.

Only what changes the shape, the count of parameters or what a layer computes is read; what a family hard-codes (Qwen2's
biases, GPT-2's tying) stands here. A config that asks for something a Model cannot say is refused: a wrong count would be
a silent guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ultrascale.specs.errors import SpecError
from ultrascale.specs.validate import shown

Fields = dict[str, Any]

# In transformers "gelu" is the exact one; the others are names of the tanh approximation.
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu_exact", **dict.fromkeys(_TANH, "geglu")}
_PLAIN = {"gelu": "gelu_exact", **dict.fromkeys(_TANH, "gelu"), "relu": "relu"}


def fields_from_hf(config: Mapping[str, Any], name: str | None = None) -> Fields:
    """The fields of the Model that `config` describes; `name` defaults to the repository it was saved from, or its family."""
    if not isinstance(config, Mapping):
        raise SpecError(f"config is of type {type(config).__name__} but must be the mapping that config.json holds")
    family = config.get("model_type")
    known = f"known: {', '.join(sorted(FAMILIES))}"
    if family is None:
        raise SpecError(f"config.model_type is missing, so the family of the model is not told; {known}")
    if not isinstance(family, str) or family not in FAMILIES:
        # The nearest name is no advice here: another architecture computes something else.
        raise SpecError(
            f"config.model_type is {shown(family)}, which Ultrascale cannot read ({known}): to plan for its shape, describe it "
            "in a model file, such as {name: mine, layers: 32, hidden: 4096, heads: 32, ffn: 14336, vocab: 128256}"
        )
    origin = config.get("_name_or_path")
    title = name or (origin if isinstance(origin, str) and origin else family)
    return {"name": title, "source": f"HF config.json, model_type {family}", **FAMILIES[family].read(config)}


def _llama(config: Mapping[str, Any]) -> Fields:
    biased = _flag(config, "attention_bias")
    return {
        **_common(config),
        "ffn": _count(config, "intermediate_size"),
        "qkv_bias": biased,
        "attention_output_bias": biased,
        "mlp_bias": _flag(config, "mlp_bias"),
    }


def _smollm3(config: Mapping[str, Any]) -> Fields:
    # A window would bind only the layers without rotary positions, which a Model cannot say.
    _only(config, "use_sliding_window", False)
    # Its class ties by default, so a config.json may leave the key out.
    positions = _positions(config, theta=2_000_000.0)
    return {**_llama(config), **positions, "tied_embeddings": _flag(config, "tie_word_embeddings", True)}


def _mistral(config: Mapping[str, Any]) -> Fields:
    window = _optional_count(config, "sliding_window")
    return {**_common(config), "ffn": _count(config, "intermediate_size"), "sliding_window": window}


def _mixtral(config: Mapping[str, Any]) -> Fields:
    moe = {
        "experts": _experts(config, "num_local_experts"),
        "top_k": _count(config, "num_experts_per_tok"),
        "expert_ffn": _count(config, "intermediate_size"),
    }
    fields = {**_common(config), **_positions(config, theta=1_000_000.0), "norm_eps": _number(config, "rms_norm_eps", 1e-5)}
    return {**fields, "sliding_window": _optional_count(config, "sliding_window"), "moe": moe}


def _qwen2(config: Mapping[str, Any]) -> Fields:
    fields = {**_common(config), "ffn": _count(config, "intermediate_size"), "qkv_bias": True}
    return {**fields, **_window(config)}


def _qwen2_moe(config: Mapping[str, Any]) -> Fields:
    # Older configs lack the key: the class then biases queries, keys and values.
    fields = {**_common(config), **_window(config), "qkv_bias": _flag(config, "qkv_bias", True)}
    shared = {"shared_experts": 1, "shared_expert_ffn": _count(config, "shared_expert_intermediate_size"), "shared_gate": True}
    return {**fields, **_sparse(config, shared)}


def _qwen3(config: Mapping[str, Any]) -> Fields:
    # 128 is the class's default, whatever hidden / heads is.
    fields = {"head_dim": 128, **_qwen3_attention(config), **_window(config)}
    return {**fields, "ffn": _count(config, "intermediate_size")}


def _qwen3_moe(config: Mapping[str, Any]) -> Fields:
    return {**_qwen3_attention(config), **_window(config, first=0), **_sparse(config, {})}


def _qwen3_attention(config: Mapping[str, Any]) -> Fields:
    biased = _flag(config, "attention_bias")
    return {**_common(config), "qkv_bias": biased, "attention_output_bias": biased, "qk_norm": True}


def _gpt2(config: Mapping[str, Any]) -> Fields:
    hidden = _count(config, "n_embd")
    return {
        "layers": _count(config, "n_layer"),
        "hidden": hidden,
        "heads": _count(config, "n_head"),
        "ffn": _optional_count(config, "n_inner") or 4 * hidden,
        "vocab": _count(config, "vocab_size"),
        "activation": _activation(config, "activation_function", _PLAIN, "gelu_new"),
        "norm": "layernorm",
        "norm_eps": _number(config, "layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "max_positions": _count(config, "n_positions"),
        "tied_embeddings": _flag(config, "tie_word_embeddings", True),
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
    }


def _deepseek(config: Mapping[str, Any]) -> Fields:
    if _flag(config, "attention_bias"):
        raise SpecError("config.attention_bias is true but no DeepSeek model with biases is known: try false")
    fields = {key: value for key, value in _common(config).items() if key not in ("kv_heads", "head_dim")}
    fields["ffn"] = _count(config, "intermediate_size")
    fields["mla"] = {
        "q_lora_rank": _optional_count(config, "q_lora_rank"),
        "kv_lora_rank": _count(config, "kv_lora_rank"),
        "qk_nope_head_dim": _count(config, "qk_nope_head_dim"),
        "qk_rope_head_dim": _count(config, "qk_rope_head_dim"),
        "v_head_dim": _count(config, "v_head_dim"),
    }
    if config.get("n_routed_experts", config.get("num_local_experts")) is None:
        return fields
    _only(config, "moe_layer_freq", 1)
    # V3 routes by sigmoid scores with a correction bias and names both only in its own code's configs.
    v3 = config["model_type"] == "deepseek_v3"
    method = config.get("topk_method", "noaux_tc" if v3 else "greedy")
    fields["moe"] = {
        "experts": _experts(config, "n_routed_experts"),
        "top_k": _count(config, "num_experts_per_tok"),
        "expert_ffn": _count(config, "moe_intermediate_size"),
        "shared_experts": _optional_count(config, "n_shared_experts") or 0,
        "dense_layers": _count(config, "first_k_dense_replace", least=0),
        "router": config.get("scoring_func", "sigmoid" if v3 else "softmax"),
        "router_bias": method == "noaux_tc",
        "renormalize": _flag(config, "norm_topk_prob", v3),
        "scaling": _number(config, "routed_scaling_factor", 2.5 if v3 else 1.0),
    }
    if method != "greedy":
        fields["moe"] |= {
            "groups": _count(config, "n_group", default=8 if v3 else None),
            "top_groups": _count(config, "topk_group", default=4 if v3 else None),
        }
    return fields


class HFFamily(NamedTuple):
    """A model_type of transformers."""

    read: Callable[[Mapping[str, Any]], Fields]
    """fields of a Model, of a config"""
    architecture: str = ""
    """its class for training; empty: the family is read but not written (hf_config.py says which models are which family)"""
    layer: str = ""
    """the class of one of its layers"""
    defaults: Mapping[str, Any] = {}
    """of its classes, for keys that config.json leaves out, where a Model has another default"""


FAMILIES = {
    "deepseek_v2": HFFamily(_deepseek),
    "deepseek_v3": HFFamily(_deepseek),
    "gpt2": HFFamily(_gpt2, "GPT2LMHeadModel", "GPT2Block"),
    "llama": HFFamily(_llama, "LlamaForCausalLM", "LlamaDecoderLayer"),
    "mistral": HFFamily(
        _mistral, "MistralForCausalLM", "MistralDecoderLayer", {"sliding_window": 4096, "num_key_value_heads": 8}
    ),
    "mixtral": HFFamily(_mixtral, "MixtralForCausalLM", "MixtralDecoderLayer", {"num_key_value_heads": 8}),
    "qwen2": HFFamily(_qwen2, "Qwen2ForCausalLM", "Qwen2DecoderLayer"),
    "qwen2_moe": HFFamily(_qwen2_moe, "Qwen2MoeForCausalLM", "Qwen2MoeDecoderLayer", {"num_key_value_heads": 16}),
    "qwen3": HFFamily(_qwen3, "Qwen3ForCausalLM", "Qwen3DecoderLayer"),
    "qwen3_moe": HFFamily(_qwen3_moe, "Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer", {"num_key_value_heads": 4}),
    "smollm3": HFFamily(_smollm3),
}
WRITTEN = {name: family for name, family in FAMILIES.items() if family.architecture}


def _common(config: Mapping[str, Any]) -> Fields:
    """What every family but GPT-2 names alike."""
    fields: Fields = {
        "layers": _count(config, "num_hidden_layers"),
        "hidden": _count(config, "hidden_size"),
        "heads": _count(config, "num_attention_heads"),
        "vocab": _count(config, "vocab_size"),
        "activation": _activation(config, "hidden_act", _GATED, "silu"),
        "norm_eps": _number(config, "rms_norm_eps", 1e-6),
        **_positions(config),
        "max_positions": _optional_count(config, "max_position_embeddings"),
        "tied_embeddings": _flag(config, "tie_word_embeddings"),
    }
    # Left out when absent or null: Model then derives them as transformers does.
    for field, key in (("kv_heads", "num_key_value_heads"), ("head_dim", "head_dim")):
        if value := _optional_count(config, key):
            fields[field] = value
    return fields


def _positions(config: Mapping[str, Any], theta: float = 10_000.0) -> Fields:
    """Rotary wavelengths: newer releases of transformers write in rope_parameters what rope_theta and rope_scaling held."""
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # transformers reads the former first
    rope = config.get(where)
    if rope is not None and not isinstance(rope, Mapping):
        raise SpecError(f"config.{where} is {shown(rope)} but must be a mapping: try {{rope_theta: 10000.0}} or leave it out")
    if rope is not None and any(isinstance(value, Mapping) for value in rope.values()):
        raise SpecError(
            f"config.{where} has a mapping for each kind of layer but all layers must have the same: "
            "give a model whose layers are alike"
        )
    rope = {"rope_theta": _number(config, "rope_theta", theta), **(rope or {})}
    fields = {"rope_theta": _number(rope, "rope_theta", theta)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    # Latent attention is planned, not trained, and DeepSeek's yarn changes no cost.
    if kind == "default" or "kv_lora_rank" in config:
        return fields
    if not isinstance(kind, str) or kind not in _SCALINGS:
        known = ", ".join(["'default'", *(f"'{name}'" for name in _SCALINGS)])
        raise SpecError(
            f"config.{where}.rope_type is {shown(kind)} but only {known} can be computed, and each computes something else: "
            "give a model with one of these"
        )
    return {**fields, "rope_scaling": {"rope_type": kind, **_SCALINGS[kind](config, rope)}}


def _factor_alone(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Fields:
    """dynamic reads max_position_embeddings too, which is the model's max_positions."""
    return _present(rope, "factor")


def _llama3(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Fields:
    return {**_present(rope, "factor", "low_freq_factor", "high_freq_factor"), **_original(config, rope)}


def _yarn(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Fields:
    original = _original(config, rope)
    fields = {**_present(rope, "factor", "attention_factor"), **original}
    if "factor" not in fields and original:  # null: the ratio of the two lengths, as transformers takes it
        fields["factor"] = _count(config, "max_position_embeddings") / original["original_max_positions"]
    # transformers reads mscale only where both are given (0 is none) and attention_factor is not, and 0 as the default betas.
    if "attention_factor" not in fields and rope.get("mscale") and rope.get("mscale_all_dim"):
        fields |= _present(rope, "mscale", "mscale_all_dim")
    fields |= {key: rope[key] for key in ("beta_fast", "beta_slow") if rope.get(key)}
    if "truncate" in rope:
        fields["truncate"] = False if rope["truncate"] is None else rope["truncate"]
    return fields


_SCALINGS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Fields]] = {
    "dynamic": _factor_alone,
    "linear": _factor_alone,
    "llama3": _llama3,
    "yarn": _yarn,
}
"""rope_type -> fields of RopeScaling, of the config and its rope mapping"""


def _present(rope: Mapping[str, Any], *keys: str) -> Fields:
    return {key: rope[key] for key in keys if rope.get(key) is not None}


def _original(config: Mapping[str, Any], rope: Mapping[str, Any]) -> Fields:
    """transformers takes the config's own key before the mapping's, and max_position_embeddings where there is neither."""
    key = "original_max_position_embeddings"
    places = [(config, key), (rope, key), (config, "max_position_embeddings")]
    found = next((mapping[name] for mapping, name in places if mapping.get(name) is not None), None)
    return {} if found is None else {"original_max_positions": found}


def _sparse(config: Mapping[str, Any], shared: Fields) -> Fields:
    """Qwen's MoE layers: every layer, or all after a run of dense ones at the start."""
    _only(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        given = f"{dense!r:.60}" if isinstance(dense, list) else shown(dense)
        raise SpecError(f"config.mlp_only_layers is {given} but dense layers must come first: try [0, 1] or []")
    moe = {
        "experts": _experts(config, "num_experts"),
        "top_k": _count(config, "num_experts_per_tok"),
        "expert_ffn": _count(config, "moe_intermediate_size"),
        "dense_layers": len(dense),
        "renormalize": _flag(config, "norm_topk_prob"),
        **shared,
    }
    # intermediate_size is the width of dense layers only; without any, no module reads it.
    return {"moe": moe, "ffn": _count(config, "intermediate_size") if dense else 0}


def _window(config: Mapping[str, Any], first: int = 28) -> Fields:
    """Qwen's sliding window: when switched on it binds the layers from max_window_layers (28 by default) on."""
    if not _flag(config, "use_sliding_window"):
        return {}
    first = _count(config, "max_window_layers", least=0, default=first)
    if first >= _count(config, "num_hidden_layers"):
        return {}
    if first > 0:
        raise SpecError(
            f"config.max_window_layers is {first} but a window must bind every layer or none, which is another model: "
            f"give one with max_window_layers: 0 or use_sliding_window: false"
        )
    return {"sliding_window": _count(config, "sliding_window")}


def _count(config: Mapping[str, Any], key: str, least: int = 1, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise SpecError(f"config.{key} is missing: a config of model_type {config.get('model_type')} must give it")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SpecError(f"config.{key} is {shown(value)} but must be a whole number of at least {least}: try 8")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise SpecError(f"config.{key} is {shown(value)} but must be a number greater than 0: try {default:g}")
    return float(value)


def _experts(config: Mapping[str, Any], key: str) -> int:
    """The family's own key, or the common one that newer releases of transformers write in its place."""
    return _count(config, key if key in config else "num_local_experts" if "num_local_experts" in config else key)


def _optional_count(config: Mapping[str, Any], key: str) -> int | None:
    return None if config.get(key) is None else _count(config, key)


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise SpecError(f"config.{key} is {shown(value)} but must be true or false: try {str(default).lower()}")
    return value


def _only(config: Mapping[str, Any], key: str, allowed: int | bool) -> None:
    if config.get(key, allowed) != allowed:
        raise SpecError(
            f"config.{key} is {shown(config[key])} but only {shown(allowed)} can be planned, which is another model: "
            f"give one with {key}: {shown(allowed)}"
        )


def _activation(config: Mapping[str, Any], key: str, known: Mapping[str, str], default: str) -> str:
    value = config.get(key, default)
    if not isinstance(value, str) or value not in known:
        raise SpecError(
            f"config.{key} is {shown(value)} but only {', '.join(sorted(known))} can be computed, and each computes something "
            "else: give a model with one of these"
        )
    return known[value]
