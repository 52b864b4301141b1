"""Model -> Hugging Face config.json: the inverse of hf.py, for the families whose weights can be written.

The family is the one that says exactly what the Model is. What none of them can say is refused by its field: a config that
left it out would load, and compute something else.
"""

from __future__ import annotations

from typing import Any

from ultrascale.specs.errors import SpecError
from ultrascale.specs.hf import WRITTEN
from ultrascale.specs.model import ROPE_FIELDS, Model, MoE
from ultrascale.specs.validate import shown

Config = dict[str, Any]

DTYPES: dict[str, str] = {"bf16": "bfloat16", "fp32": "float32"}
_ACTIVATIONS = {
    "swiglu": "silu",
    "geglu": "gelu_pytorch_tanh",
    "geglu_exact": "gelu",
    "gelu": "gelu_new",
    "gelu_exact": "gelu",
    "relu": "relu",
}


def config_of(model: Model, dtype: str) -> Config:
    """What config.json says of `model`, its weights stored as `dtype`: bf16 or fp32."""
    if dtype not in DTYPES:
        raise SpecError(f"dtype is {shown(dtype)} but weights are written as {' or '.join(DTYPES)}: try bf16")
    family = family_of(model)
    fields = _gpt2(model) if family == "gpt2" else _rotary(model, family)
    return {
        "architectures": [WRITTEN[family].architecture],
        "model_type": family,
        # The names that every release of transformers reads; newer ones turn them into their own.
        "torch_dtype": DTYPES[dtype],
        **fields,
        "tie_word_embeddings": model.tied_embeddings,
        "vocab_size": model.vocab,
    }


def family_of(model: Model) -> str:
    """The model_type whose classes compute what `model` says; SpecError with the field that none has."""
    if model.mla is not None:
        raise _inexpressible(model, "mla", "is set", "none of the families that can be written has it", "leave it out")
    if model.positions == "learned":
        _only_as_gpt2(model)
        return "gpt2"
    if model.moe is not None:
        return _family_of_experts(model, model.moe)
    _only_as_llama(model)
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias and not model.attention_output_bias:
        return "qwen2"
    return "llama" if model.sliding_window is None else "mistral"


def _family_of_experts(model: Model, moe: MoE) -> str:
    """Shared experts with a gate are Qwen2-MoE's, normed queries and keys Qwen3-MoE's, else it is a Mixtral."""
    gated = model.activation if model.gated else "swiglu"
    wanted: Config = {"positions": "rotary", "norm": "rmsnorm", "activation": gated, "mlp_bias": False}
    wanted_moe: Config = {"router": "softmax", "router_bias": False, "groups": 1, "scaling": 1.0}
    if moe.shared_experts:
        family, words = "qwen2_moe", "shared experts (Qwen2-MoE's)"
        wanted |= {"qk_norm": False, "attention_output_bias": False, "sliding_window": None}
        wanted_moe |= {"shared_experts": 1, "shared_gate": True}
    elif model.qk_norm:
        family, words = "qwen3_moe", f"experts, qk_norm and {_biases(model)} (Qwen3-MoE's)"
        wanted |= {"attention_output_bias": model.qkv_bias}
    else:
        family, words = "mixtral", "experts (Mixtral's)"
        wanted |= {"qkv_bias": False, "attention_output_bias": False}
        wanted_moe |= {"dense_layers": 0, "renormalize": True}
    _only(model, wanted, words)
    _only(model, wanted_moe, words, moe)
    return family


def _only_as_gpt2(model: Model) -> None:
    wanted: Config = {
        "norm": "layernorm",
        "activation": model.activation if not model.gated else "gelu",
        "kv_heads": model.heads,
        "head_dim": model.hidden // model.heads,
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "qk_norm": False,
        "sliding_window": None,
    }
    _only(model, wanted, "learned positions (GPT-2's)")
    if model.hidden % model.heads:
        raise _inexpressible(model, "heads", f"is {model.heads}", f"GPT-2's heads divide hidden = {model.hidden}", "heads: 1")


def _only_as_llama(model: Model) -> None:
    gated = model.activation if model.gated else "swiglu"
    _only(model, {"positions": "rotary", "norm": "rmsnorm", "activation": gated}, "rotary positions (Llama's and its kin's)")
    if model.qk_norm:
        _only(model, {"attention_output_bias": model.qkv_bias, "mlp_bias": False}, f"qk_norm and {_biases(model)} (Qwen3's)")
    elif model.qkv_bias and not model.attention_output_bias:
        _only(model, {"mlp_bias": False}, "qkv_bias alone (Qwen2's)")
    elif model.sliding_window is not None:
        wanted = {"qkv_bias": False, "attention_output_bias": False, "mlp_bias": False}
        _only(model, wanted, "a sliding window (Mistral's)")
    else:
        _only(model, {"attention_output_bias": model.qkv_bias}, f"{_biases(model)} (Llama's)")


def _biases(model: Model) -> str:
    return f"qkv_bias: {shown(model.qkv_bias)}"


def _only(model: Model, wanted: Config, beside: str, moe: MoE | None = None) -> None:
    """SpecError unless the fields, of the model or of its experts, have the values that are wanted."""
    for field, value in wanted.items():
        found = getattr(moe or model, field)
        if found != value:
            name, must = f"moe.{field}" if moe else field, f"with {beside} it must be {shown(value)}"
            raise _inexpressible(model, name, f"is {shown(found)}", must, f"{field}: {shown(value)}")


def _inexpressible(model: Model, field: str, given: str, because: str, advice: str) -> SpecError:
    return SpecError(f"model.{field} {given} ({model.name}), which no Hugging Face family can say: {because}; try {advice}")


def _gpt2(model: Model) -> Config:
    return {
        "n_layer": model.layers,
        "n_embd": model.hidden,
        "n_head": model.heads,
        "n_inner": model.ffn,
        "n_positions": model.max_positions,
        "activation_function": _ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.norm_eps,
    }


def _rotary(model: Model, family: str) -> Config:
    config: Config = {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn,
        "hidden_act": _ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": _scaling(model),
    }
    if model.max_positions is not None:
        config["max_position_embeddings"] = model.max_positions
    if model.moe is not None:
        config |= _experts(model, model.moe, family)
    if family in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = model.qkv_bias
    if family == "llama":
        config["mlp_bias"] = model.mlp_bias
    elif family in ("mistral", "mixtral"):
        config["sliding_window"] = model.sliding_window
    elif model.sliding_window is not None:  # Qwen's: from the first layer on
        config |= {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0}
    return config


def _experts(model: Model, moe: MoE, family: str) -> Config:
    if family == "mixtral":
        return {"num_local_experts": moe.experts, "num_experts_per_tok": moe.top_k, "intermediate_size": moe.expert_ffn}
    config: Config = {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_ffn,
        "norm_topk_prob": moe.renormalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(moe.dense_layers)),
    }
    if family == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": moe.shared_expert_ffn, "qkv_bias": model.qkv_bias}
    return config


def _scaling(model: Model) -> Config | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    config: Config = {"rope_type": scaling.rope_type, "factor": scaling.factor}
    for field in ROPE_FIELDS[scaling.rope_type]:
        value = getattr(scaling, field)
        if value is not None:
            config["original_max_position_embeddings" if field == "original_max_positions" else field] = value
    return config
