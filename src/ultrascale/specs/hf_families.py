"""The families of Hugging Face: for each model_type the keys of its config.json and what its classes hard-code.

Reading and writing follow from one row. Names of tensors are in model/hf.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ultrascale.specs.errors import SpecError
from ultrascale.specs.hf import (
    OMITTED,
    ClampedSwiGLU,
    Config,
    ConfigPart,
    ConfigReading,
    DeepSeekRouting,
    DenseWidth,
    EmbeddingScale,
    ExpertLayers,
    Fields,
    HFFamily,
    Key,
    Kind,
    LayerTypes,
    LinearLayers,
    Only,
    ParallelResidual,
    Rope,
    RopeLayers,
    ScoreScale,
    SparseLayers,
    Temperature,
    Window,
    checked,
    mark_known,
    shortest_cycle,
)
from ultrascale.specs.validate import shown

if TYPE_CHECKING:
    from ultrascale.specs.model import Model

FFN = Key("intermediate_size", "ffn")
ATTENTION_BIAS = ("qkv_bias", "attention_output_bias")


def fields_from_hf(config: Config, name: str | None = None) -> Fields:
    """The fields of the Model that `config` describes; `name` defaults to the repository it was saved from, or its family.

    Of a model that also sees or hears it is the language model, its `text_config`.
    """
    if not isinstance(config, Mapping):
        raise SpecError(f"config is of type {type(config).__name__} but must be the mapping that config.json holds")
    family = config.get("model_type")
    if isinstance(text := config.get("text_config"), Mapping) and family not in FAMILIES:
        shared = {key: config[key] for key in ("_name_or_path", "tie_word_embeddings") if key in config}
        fields = fields_from_hf({**text, **shared}, name)
        others = [key for key in config if key.endswith("_config") and key != "text_config"]
        source = f"text_config of an {fields['source']} (of {family} the language model alone)"
        return {**fields, "source": source, "ignored_keys": tuple(sorted({*fields["ignored_keys"], *others}))}
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
    known_as = next(name for name, one in FAMILIES.items() if one is FAMILIES[family])
    source = f"HF config.json, model_type {family}"
    reading = ConfigReading(config)
    fields = FAMILIES[family].read(reading)
    return {"name": title, "family": known_as, "source": source, "ignored_keys": reading.ignored, **fields}


def _common(
    rope: Rope | None = None,
    *,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    activation: tuple[str, Kind, str] | None = ("hidden_act", "gated", "silu"),
    kv_heads: Any = OMITTED,
    head_dim: Any = OMITTED,
    tied: bool = False,
) -> tuple[ConfigPart, ...]:
    """Keys that all families but GPT-2 name alike, with the defaults of a family's class."""
    return (
        Key("num_hidden_layers", "layers"),
        Key("hidden_size", "hidden"),
        Key("num_attention_heads", "heads"),
        Key("vocab_size", "vocab"),
        *(() if activation is None else (_activation(*activation),)),
        Key(eps[0], "norm_eps", "number", default=eps[1]),
        rope or Rope(),
        Key("max_position_embeddings", "max_positions", default=OMITTED, nullable=False),
        Key("tie_word_embeddings", "tied_embeddings", "flag", default=tied),
        *(() if kv_heads is None else (Key("num_key_value_heads", "kv_heads", default=kv_heads),)),
        *(() if head_dim is None else (Key("head_dim", "head_dim", default=head_dim),)),
    )


def _activation(key: str, kind: Kind, word: str) -> Key:
    return Key(key, "activation", kind, default=checked({"word": word}, "word", kind))


def _attention_bias(default: bool = False, key: str = "attention_bias") -> Key:
    return Key(key, ATTENTION_BIAS, "flag", default=default)


def _moe(
    experts: str, ffn: str, *, top_k: str = "num_experts_per_tok", renormalize: bool | None = None
) -> tuple[ConfigPart, ...]:
    aliases = ("num_local_experts",) if experts != "num_local_experts" else ("num_experts",)
    weights = () if renormalize is None else (Key("norm_topk_prob", "moe.renormalize", "flag", default=renormalize),)
    return Key(experts, "moe.experts", aliases=aliases), Key(top_k, "moe.top_k"), Key(ffn, "moe.expert_ffn"), *weights


_LATENT = (
    Key("q_lora_rank", "mla.q_lora_rank", default=OMITTED),
    Key("kv_lora_rank", "mla.kv_lora_rank"),
    Key("qk_nope_head_dim", "mla.qk_nope_head_dim"),
    Key("qk_rope_head_dim", "mla.qk_rope_head_dim"),
    Key("v_head_dim", "mla.v_head_dim"),
    _attention_bias(),
)
_GATED_DELTA = (
    _attention_bias(),
    Only("attn_output_gate", True),
    LinearLayers(),
    Key("linear_num_key_heads", "linear_attention.key_heads", default=16),
    Key("linear_num_value_heads", "linear_attention.value_heads", default=32),
    Key("linear_key_head_dim", "linear_attention.key_head_dim", default=128),
    Key("linear_value_head_dim", "linear_attention.value_head_dim", default=128),
    Key("linear_conv_kernel_dim", "linear_attention.conv_kernel", default=4),
)
# Layers of multi-token prediction, which transformers' models leave out.
_MTP_DEPTH = Key("num_nextn_predict_layers", "mtp_depth", "count or zero", default=0, aliases=("num_mtp_layers",))
_DEEPSEEK_EXPERTS = (
    *_moe("n_routed_experts", "moe_intermediate_size"),
    Key("n_shared_experts", "moe.shared_experts", "count or zero", default=0),
)


@dataclass(frozen=True)
class DeepSeekMLP:
    """DeepSeek's: a config without experts is a dense model."""

    v3: bool

    def _parts(self, sparse: bool) -> tuple[ConfigPart, ...]:
        return (*_DEEPSEEK_EXPERTS, DeepSeekRouting(self.v3), DenseWidth(3 if self.v3 else 0)) if sparse else (FFN,)

    def read(self, config: Config) -> Fields:
        sparse = config.get("n_routed_experts", config.get("num_local_experts")) is not None
        mark_known(config, _DEEPSEEK_EXPERTS)
        return {name: value for part in self._parts(sparse) for name, value in part.read(config).items()}

    def write(self, model: Model) -> dict[str, Any]:
        parts = self._parts(model.moe is not None)
        return {"n_routed_experts": None} | {key: value for part in parts for key, value in part.write(model).items()}


_MAMBA = (
    Key("mamba_num_heads", "mamba.heads", default=128),
    Key("mamba_head_dim", "mamba.head_dim", default=64),
    Key("n_groups", "mamba.groups", default=8, aliases=("mamba_n_groups",)),
    Key("ssm_state_size", "mamba.state_dim", default=128),
    Key("conv_kernel", "mamba.conv_kernel", default=4, aliases=("mamba_d_conv",)),
    Key("use_conv_bias", "mamba.conv_bias", "flag", default=True, aliases=("mamba_conv_bias",)),
    Key("time_step_min", "mamba.min_step", "number or zero", default=0.001, aliases=("mamba_dt_min",)),
    Only("mamba_hidden_act", "silu"),
    Only("use_bias", False),
)
_NEMOTRON_EXPERTS = (
    *_moe("n_routed_experts", "moe_intermediate_size", renormalize=True),
    Key("moe_shared_expert_intermediate_size", "moe.shared_expert_ffn", default=7688),
    Key("routed_scaling_factor", "moe.scaling", "number", default=1.0),
    Key("n_group", "moe.groups", default=1),
    Key("topk_group", "moe.top_groups", default=1),
    Only("moe_latent_size", None),
)


class HybridLayers:
    """Nemotron-H: the one sublayer of each layer, by `layers_block_type` or by a letter in `hybrid_override_pattern`."""

    letters: ClassVar = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    older: ClassVar = {"mamba": "linear_attention", "attention": "full_attention"}
    """words of earlier releases"""

    def _parts(self, mamba: bool, experts: bool, mlp: bool) -> tuple[ConfigPart, ...]:
        return (*(_MAMBA if mamba else ()), *(_NEMOTRON_EXPERTS if experts else ()), *((FFN,) if mlp else ()))

    def read(self, config: Config) -> Fields:
        words = self._words(config)
        kinds = {"linear_attention": "mamba", "full_attention": "full"}
        fields: Fields = {
            "layers": len(words),
            "attention_pattern": shortest_cycle([kinds.get(word, "none") for word in words]),
        }
        if "moe" in words:
            fields |= {"moe.shared_experts": 1, "moe.router": "sigmoid", "moe.router_bias": True}
        mark_known(config, self._parts(True, True, True))
        for part in self._parts("linear_attention" in words, "moe" in words, "mlp" in words):
            fields |= part.read(config)
        return fields

    def _words(self, config: Config) -> list[str]:
        lists = [name for name in ("layers_block_type", "layer_types") if config.get(name) is not None]
        key = lists[0] if lists else "hybrid_override_pattern"
        given = checked(config, key, "text")
        known = self.older if lists else self.letters
        words = [known.get(word, word) for word in given] if isinstance(given, list if lists else str) else []
        if not words or not set(words) <= set(self.letters.values()):
            raise SpecError(
                f"config.{key} is {given!r:.80} but must have M, *, - or E for each layer, such as M-M*-, or in a list "
                "linear_attention, full_attention, mlp or moe"
            )
        if {"mlp", "moe"} <= set(words):
            raise SpecError(
                f"config.{key} is {given!r:.80} but only MLPs of one kind can be planned, dense ones or experts, which are "
                "other models: give one with - or with E"
            )
        return words

    def write(self, model: Model) -> dict[str, Any]:
        words = {"mamba": "linear_attention", "attention": "full_attention", "linear": "linear", "none": "mlp"}
        found: dict[str, Any] = {
            "layers_block_type": ["moe" if kind.mlp == "moe" else words[kind.mixer] for kind in model.each_kind],
        }
        mlps = {kind.mlp for kind in model.each_kind}
        for part in self._parts(model.mamba is not None, "moe" in mlps, "dense" in mlps):
            found |= part.write(model)
        return found


class GPT2Width:
    """n_inner, which is null where it is four times the hidden size."""

    def read(self, config: Config) -> Fields:
        return {"ffn": checked(config, "n_inner", "count", 4 * checked(config, "n_embd", "count"))}

    def write(self, model: Model) -> dict[str, Any]:
        return {"n_inner": model.ffn}


def _qwen_window(first: int = 28) -> LayerTypes:
    """Qwen's: when switched on it binds the layers from max_window_layers on."""

    def local(config: Config, layers: int) -> list[bool]:
        if not checked(config, "use_sliding_window", "flag", False):
            return [False] * layers
        start = checked(config, "max_window_layers", "count or zero", first)
        return [layer >= start for layer in range(layers)]

    return LayerTypes(local, switch="use_sliding_window")


def _alternating(interval: int, window: int | None = 4096, key: str = "sliding_window_pattern", **more: Any) -> LayerTypes:
    """Every `interval`-th layer has full attention."""

    def local(config: Config, layers: int) -> list[bool]:
        every = checked(config, key, "count", interval)
        return [(layer + 1) % every != 0 for layer in range(layers)]

    return LayerTypes(local, window, **more)


def _all_local(config: Config, layers: int) -> list[bool]:
    return [True] * layers


def _smollm_window(config: Config, layers: int) -> list[bool]:
    """A window only in layers without positions."""
    rotates = RopeLayers().read(config).get("rope_pattern", (True,))
    used = checked(config, "use_sliding_window", "flag", False)
    return [used and not rotates[layer % len(rotates)] for layer in range(layers)]


def _rotating(config: Config, layers: int) -> list[bool]:
    """Llama 4's chunks: in layers with positions."""
    rotates = RopeLayers().read(config).get("rope_pattern", (True,))
    return [rotates[layer % len(rotates)] for layer in range(layers)]


_GEMMA_ACT: tuple[str, Kind, str] = ("hidden_activation", "gated", "gelu_pytorch_tanh")
_GEMMA2_SCORES = (
    ScoreScale(),
    Key("attn_logit_softcapping", "attention_softcap", "number", default=OMITTED),
    Key("final_logit_softcapping", "logits_softcap", "number", default=OMITTED),
    EmbeddingScale(),
    _attention_bias(),
)
_LAYERNORM = ("layer_norm_eps", 1e-5)
_GRANITE = (
    Key("embedding_multiplier", "embedding_scale", "number", default=1.0),
    Key("residual_multiplier", "residual_scale", "number", default=1.0),
    Key("attention_multiplier", "attention_scale", "number", default=1.0),
    Key("logits_scaling", "logits_scale", "number", default=1.0, inverse=True),
    _attention_bias(),
)

FAMILIES: dict[str, HFFamily] = {
    "llama": HFFamily(
        "LlamaForCausalLM",
        "LlamaDecoderLayer",
        (*_common(), FFN, _attention_bias(), Key("mlp_bias", "mlp_bias", "flag", default=False)),
    ),
    "mistral": HFFamily("MistralForCausalLM", "MistralDecoderLayer", (*_common(kv_heads=8), FFN, Window(4096))),
    "qwen2": HFFamily("Qwen2ForCausalLM", "Qwen2DecoderLayer", (*_common(), FFN, _qwen_window()), {"qkv_bias": True}),
    "qwen3": HFFamily(
        "Qwen3ForCausalLM",
        "Qwen3DecoderLayer",
        (*_common(head_dim=128), FFN, _qwen_window(), _attention_bias()),
        {"qk_norm": True},
    ),
    "gpt2": HFFamily(
        "GPT2LMHeadModel",
        "GPT2Block",
        (
            Key("n_layer", "layers"),
            Key("n_embd", "hidden"),
            Key("n_head", "heads"),
            GPT2Width(),
            Key("vocab_size", "vocab"),
            Key("n_positions", "max_positions"),
            Key("activation_function", "activation", "plain", default="gelu"),
            Key("layer_norm_epsilon", "norm_eps", "number", default=1e-5),
            Key("tie_word_embeddings", "tied_embeddings", "flag", default=True),
            Only("scale_attn_weights", True),
            Only("scale_attn_by_inverse_layer_idx", False),
            Only("add_cross_attention", False),
        ),
        {
            "norm": "layernorm",
            "positions": "learned",
            **dict.fromkeys((*ATTENTION_BIAS, "mlp_bias"), True),
        },
    ),
    "mixtral": HFFamily(
        "MixtralForCausalLM",
        "MixtralDecoderLayer",
        (
            *_common(Rope(1_000_000.0), eps=("rms_norm_eps", 1e-5), kv_heads=8),
            *_moe("num_local_experts", "intermediate_size"),
            Only("router_jitter_noise", 0.0),
            Window(),
        ),
    ),
    "qwen2_moe": HFFamily(
        "Qwen2MoeForCausalLM",
        "Qwen2MoeDecoderLayer",
        (
            *_common(kv_heads=16),
            *_moe("num_experts", "moe_intermediate_size", renormalize=False),
            SparseLayers(),
            Key("shared_expert_intermediate_size", "moe.shared_expert_ffn"),
            Key("qkv_bias", "qkv_bias", "flag", default=True),
            _qwen_window(),
        ),
        {"moe.shared_experts": 1, "moe.shared_gate": True},
    ),
    "qwen3_moe": HFFamily(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeDecoderLayer",
        (
            *_common(kv_heads=4),
            *_moe("num_experts", "moe_intermediate_size", renormalize=False),
            SparseLayers(),
            _attention_bias(),
            _qwen_window(first=0),
        ),
        {"qk_norm": True},
    ),
    "smollm3": HFFamily(
        "SmolLM3ForCausalLM",
        "SmolLM3DecoderLayer",
        (
            *_common(Rope(2_000_000.0), kv_heads=4, head_dim=None, tied=True),
            FFN,
            _attention_bias(),
            Key("mlp_bias", "mlp_bias", "flag", default=False),
            RopeLayers(),
            LayerTypes(_smollm_window, switch="use_sliding_window"),
        ),
    ),
    "ministral": HFFamily(
        "MinistralForCausalLM", "MinistralDecoderLayer", (*_common(kv_heads=8), FFN, LayerTypes(_all_local, 4096))
    ),
    "gemma": HFFamily(
        "GemmaForCausalLM",
        "GemmaDecoderLayer",
        (
            *_common(
                Rope(head_dim=256),
                activation=("hidden_act", "gated", "gelu_pytorch_tanh"),
                kv_heads=16,
                head_dim=256,
                tied=True,
            ),
            FFN,
            EmbeddingScale(),
            _attention_bias(),
        ),
    ),
    "gemma2": HFFamily(
        "Gemma2ForCausalLM",
        "Gemma2DecoderLayer",
        (
            *_common(Rope(head_dim=256), activation=_GEMMA_ACT, kv_heads=4, head_dim=256, tied=True),
            FFN,
            *_GEMMA2_SCORES,
            _alternating(2),
        ),
        {"norm_placement": "both"},
    ),
    "gemma3_text": HFFamily(
        "Gemma3ForCausalLM",
        "Gemma3DecoderLayer",
        (
            *_common(
                Rope(1_000_000.0, head_dim=256, local_theta=10_000.0),
                activation=_GEMMA_ACT,
                kv_heads=4,
                head_dim=256,
                tied=True,
            ),
            FFN,
            *_GEMMA2_SCORES,
            _alternating(6),
        ),
        {"norm_placement": "both", "qk_norm": True},
    ),
    "phi3": HFFamily(
        "Phi3ForCausalLM",
        "Phi3DecoderLayer",
        (*_common(Rope(partial=1.0), eps=("rms_norm_eps", 1e-5), head_dim=None), FFN, Window()),
    ),
    "olmo2": HFFamily(
        "Olmo2ForCausalLM",
        "Olmo2DecoderLayer",
        (*_common(eps=("rms_norm_eps", 1e-5), head_dim=None), FFN, _attention_bias()),
        {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"},
    ),
    "olmo3": HFFamily(
        "Olmo3ForCausalLM",
        "Olmo3DecoderLayer",
        (
            *_common(Rope(500_000.0, local_theta=500_000.0), eps=("rms_norm_eps", 1e-5), head_dim=None),
            FFN,
            _attention_bias(),
            _alternating(4),
        ),
        {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "all"},
    ),
    "olmoe": HFFamily(
        "OlmoeForCausalLM",
        "OlmoeDecoderLayer",
        (
            *_common(eps=("rms_norm_eps", 1e-5), head_dim=None),
            *_moe("num_experts", "intermediate_size", renormalize=False),
            _attention_bias(),
            Only("clip_qkv", None),
        ),
        {"qk_norm": True, "qk_norm_over": "all"},
    ),
    "granite": HFFamily(
        "GraniteForCausalLM",
        "GraniteDecoderLayer",
        (*_common(head_dim=None), FFN, *_GRANITE, Key("mlp_bias", "mlp_bias", "flag", default=False)),
    ),
    "granitemoe": HFFamily(
        "GraniteMoeForCausalLM",
        "GraniteMoeDecoderLayer",
        (*_common(head_dim=None), *_moe("num_local_experts", "intermediate_size"), *_GRANITE),
    ),
    "glm": HFFamily(
        "GlmForCausalLM",
        "GlmDecoderLayer",
        (
            *_common(Rope(partial=0.5, head_dim=128), eps=("rms_norm_eps", 1.5625e-07), kv_heads=2, head_dim=128),
            FFN,
            Key("attention_bias", "qkv_bias", "flag", default=True),
        ),
    ),
    "glm4": HFFamily(
        "Glm4ForCausalLM",
        "Glm4DecoderLayer",
        (
            *_common(Rope(partial=0.5, head_dim=128), eps=("rms_norm_eps", 1.5625e-07), kv_heads=2, head_dim=128),
            FFN,
            Key("attention_bias", "qkv_bias", "flag", default=True),
        ),
        {"norm_placement": "both"},
    ),
    "glm4_moe": HFFamily(
        "Glm4MoeForCausalLM",
        "Glm4MoeDecoderLayer",
        (
            *_common(Rope(partial=0.5), eps=("rms_norm_eps", 1e-5), kv_heads=8),
            *_moe("n_routed_experts", "moe_intermediate_size", renormalize=True),
            Key("n_shared_experts", "moe.shared_experts", "count or zero", default=1),
            Key("routed_scaling_factor", "moe.scaling", "number", default=1.0),
            Key("n_group", "moe.groups", default=1),
            Key("topk_group", "moe.top_groups", default=1),
            DenseWidth(dense_default=1),
            Key("attention_bias", "qkv_bias", "flag", default=False),
            Key("use_qk_norm", "qk_norm", "flag", default=False),
            _MTP_DEPTH,
        ),
        {"moe.router": "sigmoid", "moe.router_bias": True},
    ),
    "deepseek_v2": HFFamily(
        "DeepseekV2ForCausalLM",
        "DeepseekV2DecoderLayer",
        (*_common(head_dim=None), DeepSeekMLP(v3=False), *_LATENT),
    ),
    "deepseek_v3": HFFamily(
        "DeepseekV3ForCausalLM",
        "DeepseekV3DecoderLayer",
        (*_common(head_dim=None), DeepSeekMLP(v3=True), *_LATENT, Only("rope_interleave", True), _MTP_DEPTH),
    ),
    "starcoder2": HFFamily(
        "Starcoder2ForCausalLM",
        "Starcoder2DecoderLayer",
        (
            *_common(
                eps=("norm_epsilon", 1e-5),
                activation=("hidden_act", "plain", "gelu_pytorch_tanh"),
                kv_heads=2,
                head_dim=None,
                tied=True,
            ),
            FFN,
            Window(),
            Key("use_bias", (*ATTENTION_BIAS, "mlp_bias"), "flag", default=True),
        ),
        {"norm": "layernorm"},
    ),
    "gpt_neox": HFFamily(
        "GPTNeoXForCausalLM",
        "GPTNeoXLayer",
        (
            *_common(
                Rope(partial=0.25, theta_key="rotary_emb_base", partial_key="rotary_pct"),
                eps=_LAYERNORM,
                activation=("hidden_act", "plain", "gelu"),
                kv_heads=None,
                head_dim=None,
            ),
            FFN,
            _attention_bias(True),
            ParallelResidual("use_parallel_residual", "two_norms", True),
        ),
        {"norm": "layernorm", "mlp_bias": True},
    ),
    "stablelm": HFFamily(
        "StableLmForCausalLM",
        "StableLmDecoderLayer",
        (
            *_common(Rope(partial=0.25), eps=_LAYERNORM, kv_heads=32, head_dim=None),
            FFN,
            Key("use_qkv_bias", "qkv_bias", "flag", default=False),
            Only("qk_layernorm", False),
            ParallelResidual("use_parallel_residual", "one_norm", False),
        ),
        {"norm": "layernorm"},
    ),
    "cohere": HFFamily(
        "CohereForCausalLM",
        "CohereDecoderLayer",
        (
            *_common(Rope(500_000.0), eps=_LAYERNORM, head_dim=None, tied=True),
            FFN,
            _attention_bias(),
            Key("logit_scale", "logits_scale", "number", default=0.0625),
            Only("use_qk_norm", False),
        ),
        {"norm": "layernorm", "norm_bias": False, "parallel_residual": "one_norm"},
    ),
    "cohere2": HFFamily(
        "Cohere2ForCausalLM",
        "Cohere2DecoderLayer",
        (
            *_common(eps=_LAYERNORM, head_dim=None, tied=True),
            FFN,
            _attention_bias(),
            Key("logit_scale", "logits_scale", "number", default=0.0625),
            _alternating(4, rotates_local_only=True),
        ),
        {"norm": "layernorm", "norm_bias": False, "parallel_residual": "one_norm"},
    ),
    "nemotron": HFFamily(
        "NemotronForCausalLM",
        "NemotronDecoderLayer",
        (
            *_common(Rope(partial=0.5), eps=("norm_eps", 1e-5), activation=("hidden_act", "plain", "relu2")),
            FFN,
            _attention_bias(),
            Key("mlp_bias", "mlp_bias", "flag", default=False),
        ),
        {"norm": "layernorm"},
    ),
    "arcee": HFFamily(
        "ArceeForCausalLM",
        "ArceeDecoderLayer",
        (
            *_common(eps=("rms_norm_eps", 1e-5), activation=("hidden_act", "plain", "relu2")),
            FFN,
            _attention_bias(),
            Key("mlp_bias", "mlp_bias", "flag", default=False),
        ),
    ),
    "seed_oss": HFFamily(
        "SeedOssForCausalLM",
        "SeedOssDecoderLayer",
        (
            *_common(Rope(head_dim=128), kv_heads=8, head_dim=128),
            FFN,
            Key("attention_bias", "qkv_bias", "flag", default=True),
            Key("attention_out_bias", "attention_output_bias", "flag", default=False),
            Key("mlp_bias", "mlp_bias", "flag", default=False),
        ),
    ),
    "ernie4_5": HFFamily(
        "Ernie4_5ForCausalLM",
        "Ernie4_5DecoderLayer",
        (
            *_common(Rope(500_000.0, head_dim=128), eps=("rms_norm_eps", 1e-5), kv_heads=2, head_dim=128, tied=True),
            FFN,
            Key("use_bias", (*ATTENTION_BIAS, "mlp_bias"), "flag", default=False),
        ),
    ),
    "exaone4": HFFamily(
        "Exaone4ForCausalLM",
        "Exaone4DecoderLayer",
        (
            *_common(eps=("rms_norm_eps", 1e-5), kv_heads=32),
            FFN,
            _alternating(4, rotates_local_only=True, rotates_without_window=True),
        ),
        {"norm_placement": "post", "qk_norm": True},
    ),
    "minimax_m2": HFFamily(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2DecoderLayer",
        (
            *_common(Rope(5_000_000.0, partial=1.0, head_dim=128), kv_heads=8, head_dim=128),
            *_moe("num_local_experts", "intermediate_size"),
            Only("router_jitter_noise", 0.0),
        ),
        {"qk_norm": True, "qk_norm_over": "all", "moe.router": "sigmoid", "moe.router_bias": True},
    ),
}
FAMILIES["gpt_oss"] = HFFamily(
    "GptOssForCausalLM",
    "GptOssDecoderLayer",
    (
        *_common(
            Rope(
                150_000.0,
                default={"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
            ),
            eps=("rms_norm_eps", 1e-5),
            activation=None,
            kv_heads=8,
            head_dim=64,
        ),
        ClampedSwiGLU(),
        Only("hidden_act", "silu"),
        *_moe("num_local_experts", "intermediate_size"),
        _attention_bias(True),
        _alternating(2, 128),
    ),
    {"attention_sinks": True, "mlp_bias": True, "moe.logits_bias": True},
)
FAMILIES["qwen3_next"] = HFFamily(
    "Qwen3NextForCausalLM",
    "Qwen3NextDecoderLayer",
    (
        *_common(Rope(partial=0.25, head_dim=256), kv_heads=2, head_dim=256),
        *_moe("num_experts", "moe_intermediate_size", renormalize=True),
        SparseLayers(),
        Key("shared_expert_intermediate_size", "moe.shared_expert_ffn"),
        *_GATED_DELTA,
    ),
    {"qk_norm": True, "attention_gate": True, "moe.shared_experts": 1, "moe.shared_gate": True},
)
FAMILIES["qwen3_5_text"] = HFFamily(
    "Qwen3_5ForCausalLM",
    "Qwen3_5DecoderLayer",
    (*_common(Rope(partial=0.25, head_dim=256), kv_heads=4, head_dim=256), FFN, *_GATED_DELTA),
    {"qk_norm": True, "attention_gate": True},
)
FAMILIES["qwen3_5_moe_text"] = HFFamily(
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeDecoderLayer",
    (
        *_common(Rope(partial=0.25, head_dim=256), kv_heads=2, head_dim=256),
        *_moe("num_experts", "moe_intermediate_size"),
        Key("shared_expert_intermediate_size", "moe.shared_expert_ffn"),
        *_GATED_DELTA,
    ),
    {"qk_norm": True, "attention_gate": True, "moe.shared_experts": 1, "moe.shared_gate": True},
)
FAMILIES["nemotron_h"] = HFFamily(
    "NemotronHForCausalLM",
    "NemotronHBlock",
    (
        Key("hidden_size", "hidden"),
        Key("num_attention_heads", "heads"),
        Key("num_key_value_heads", "kv_heads", default=8),
        Key("head_dim", "head_dim", default=128, aliases=("attention_head_dim",)),
        Key("vocab_size", "vocab"),
        Key("mlp_hidden_act", "activation", "plain", default="relu2"),
        Key("mlp_bias", "mlp_bias", "flag", default=False),
        Key("layer_norm_epsilon", "norm_eps", "number", default=1e-5),
        Key("max_position_embeddings", "max_positions", default=OMITTED, nullable=False),
        Only("tie_word_embeddings", False),
        HybridLayers(),
    ),
    {"positions": "none", "one_sublayer": True},
)
FAMILIES["llama4_text"] = HFFamily(
    "Llama4ForCausalLM",
    "Llama4TextDecoderLayer",
    (
        *_common(Rope(500_000.0), eps=("rms_norm_eps", 1e-5), kv_heads=8, head_dim=128),
        *_moe("num_local_experts", "intermediate_size"),
        ExpertLayers(),
        Only("router_jitter_noise", 0.0),
        _attention_bias(),
        Key("use_qk_norm", "qk_l2_norm", "flag", default=True),
        RopeLayers(),
        LayerTypes(_rotating, 8192, word="chunked_attention", key="attention_chunk_size", chunked=True),
        Temperature(),
    ),
    {"moe.shared_experts": 1, "moe.router": "sigmoid", "moe.renormalize": False, "moe.scale_inputs": True},
)
# DeepSeek-V3's classes and tensors under another name.
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]
