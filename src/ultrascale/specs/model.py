"""Model: the shape of a transformer, its presets, and what can be read as one: a YAML file or a Hugging Face config.json."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from ultrascale.specs import weights
from ultrascale.specs.blocks import (
    MLA,
    AttentionTemperature,
    Count,
    CountOrZero,
    Depth,
    Factor,
    Flag,
    LayerKind,
    Layers,
    LinearAttention,
    Mamba2,
    MoE,
    RopeScaling,
    RopeType,
    Text,
)
from ultrascale.specs.errors import SpecError, divisors, near, nearest
from ultrascale.specs.files import package_data, read_mapping
from ultrascale.specs.hf_families import FAMILIES, fields_from_hf
from ultrascale.specs.hub import HubRepo, is_hub
from ultrascale.specs.validate import FrozenSpec, build, shown

LIST_PRESETS = "list presets with `ultrascale presets`"
AttentionKind = Literal["full", "local", "linear", "mamba", "none"]
LAYER_LETTERS: dict[str, AttentionKind] = {"M": "mamba", "*": "full", "-": "none", "E": "none"}
"""of Nemotron-H's hybrid_override_pattern"""
Activation = Literal["swiglu", "geglu", "geglu_exact", "clamped_swiglu", "gelu", "gelu_exact", "relu", "relu2"]


class Model(FrozenSpec):
    """The shape of a decoder-only transformer."""

    name: Text = Field(examples=["my-model"])
    layers: Layers = Field(examples=[32])
    hidden: Count = Field(examples=[4096])
    heads: Count = Field(examples=[32])
    mla: MLA | None = Field(
        default=None, examples=[{"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}]
    )
    kv_heads: Count = Field(default_factory=lambda known: known.get("heads", 1), examples=[1])
    head_dim: Count = Field(default_factory=lambda known: _default_head_dim(known), examples=[128])
    ffn: CountOrZero = Field(default=0, description="Dense MLP width; 0 when every layer is MoE.", examples=[14336])
    vocab: Count = Field(examples=[128256])
    activation: Activation = Field(
        default="swiglu",
        description="gelu and the gate of geglu are the tanh approximation (gelu_new), as in GPT-2; "
        "gelu_exact and geglu_exact compute x·Φ(x) by erf (Hugging Face's gelu); relu2 is relu(x)²; "
        "clamped_swiglu is gpt-oss's gate · sigmoid(1.702 · gate) · (up + 1), of clamped gate and up.",
    )
    swiglu_limit: Factor | None = Field(
        default=None, description="clamped_swiglu: gate is at most this, up at most this in magnitude.", examples=[7.0]
    )
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_bias: Flag = Field(default=True, description="Biases of layernorm; Cohere's have none.")
    norm_placement: Literal["pre", "post", "both"] = Field(
        default="pre", description="Norms of the inputs of attention and MLP, of their outputs (OLMo 2), or of both (Gemma 2)."
    )
    parallel_residual: Literal["none", "one_norm", "two_norms"] = Field(
        default="none",
        description="Attention and MLP read the same input and are added together, after one norm (Phi, Cohere) or one each "
        "(GPT-NeoX).",
    )
    norm_eps: Factor = Field(default=1e-5, description="Added to the variance inside every norm.", examples=[1e-5])
    positions: Literal["rotary", "learned", "none"] = "rotary"
    rope_theta: Factor = Field(default=10000.0, description="Base of the rotary wavelengths.", examples=[500000.0])
    rope_scaling: RopeScaling | None = Field(default=None, examples=[{"factor": 8.0, "original_max_positions": 8192}])
    rotary_dim: Count | None = Field(
        default=None, description="The first dimensions of a head, which are rotated; None: all of them.", examples=[64]
    )
    rope_pattern: tuple[Flag, ...] = Field(
        default=(),
        description="Whether a layer rotates queries and keys, repeated over the layers; empty: all do.",
        max_length=2**16,
    )
    local_rope_theta: Factor | None = Field(
        default=None,
        description="Base of the wavelengths in layers with the sliding window, which are not scaled; None: as in all layers.",
        examples=[10000.0],
    )
    max_positions: Count | None = Field(default=None, examples=[8192])
    tied_embeddings: Flag = False
    qkv_bias: Flag = False
    attention_output_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: Flag = Field(default=False, description="RMSNorm of queries and keys.")
    qk_norm_over: Literal["head", "all"] = Field(
        default="head", description="qk_norm: over head_dim, as in Qwen3, or over all heads together, as in OLMo 2."
    )
    attention_scale: Factor | None = Field(
        default=None, description="Of scores; None: 1 / sqrt(width of a query head).", examples=[0.0625]
    )
    qk_l2_norm: Flag = Field(
        default=False, description="Rotated queries and keys are divided by their root mean square in a head (Llama 4)."
    )
    attention_temperature: AttentionTemperature | None = Field(
        default=None,
        description="Factors of queries by position, in layers that do not rotate.",
        examples=[{"scale": 0.1, "tokens": 8192}],
    )
    attention_softcap: Factor | None = Field(
        default=None, description="Scores become cap · tanh(score / cap).", examples=[50.0]
    )
    logits_softcap: Factor | None = Field(default=None, description="The same of logits.", examples=[30.0])
    attention_sinks: Flag = Field(
        default=False, description="A learned logit for each head, which joins the denominator of its softmax (gpt-oss)."
    )
    sliding_window: Count | None = Field(default=None, examples=[4096])
    chunked_window: Flag = Field(
        default=False,
        description="The window does not slide: sequences are cut into chunks of that length, and a token sees those of its "
        "chunk (Llama 4).",
    )
    linear_attention: LinearAttention | None = Field(
        default=None,
        description="Of the layers that attention_pattern calls linear.",
        examples=[{"key_heads": 16, "value_heads": 32, "key_head_dim": 128, "value_head_dim": 128}],
    )
    attention_gate: Flag = Field(
        default=False, description="Attention's output is multiplied by the sigmoid of a projection of its input (Qwen3-Next)."
    )
    mamba: Mamba2 | None = Field(
        default=None,
        description="Of the layers that attention_pattern calls mamba.",
        examples=[{"heads": 128, "head_dim": 64, "groups": 8}],
    )
    attention_pattern: tuple[AttentionKind, ...] = Field(
        default=(),
        description="Layers whose attention is full, those that see the sliding window, those with linear attention or "
        "Mamba-2, and those with none of these, repeated over the layers; empty: all see the window, if there is one. Also "
        "Nemotron-H's letters: M (mamba), * (full), - and E (none).",
        examples=[["local", "full"]],
        max_length=2**16,
    )
    one_sublayer: Flag = Field(
        default=False,
        description="Layers have attention or Mamba-2 alone, or an MLP alone where attention_pattern says none (Nemotron-H).",
    )
    embedding_scale: Factor = Field(default=1.0, description="The embedding's output is multiplied by it.")
    residual_scale: Factor = Field(default=1.0, description="What attention and MLP add is multiplied by it.")
    logits_scale: Factor = Field(default=1.0, description="Logits are multiplied by it.")
    moe: MoE | None = Field(default=None, examples=[{"experts": 8, "top_k": 2, "expert_ffn": 14336}])
    mtp_depth: Depth = Field(
        default=0,
        description="Multi-token prediction (DeepSeek-V3): how many tokens after the next are predicted, each by one more "
        "layer of the last kind, with the model's embedding and head.",
        examples=[1],
    )
    family: Text | None = Field(
        default=None,
        description="model_type of Hugging Face as whose config and tensors it is written; None: the first that can say it.",
        examples=["llama"],
    )
    source: str = ""
    ignored_keys: tuple[Text, ...] = Field(
        default=(), description="Keys of the Hugging Face config that it was read from, which say nothing here."
    )

    @field_validator("attention_pattern", mode="before")
    @classmethod
    def _of_letters(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if unknown := set(value) - set(LAYER_LETTERS):
            raise ValueError(
                f"model.attention_pattern is {value!r:.40} with {shown(min(unknown))} but its letters are "
                f"{', '.join(LAYER_LETTERS)}: try M-M*-, or a list such as [mamba, full]"
            )
        return [LAYER_LETTERS[letter] for letter in value]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problem = next(_problems(self), None)
        if problem:
            raise ValueError(problem)
        return self

    @classmethod
    def load(cls, ref: str | Path) -> Model:
        """A preset's name, a .yaml model file, an HF config.json, a folder that holds one, or `hf://ORG/NAME`."""
        if isinstance(ref, str) and is_hub(ref.strip()):
            repo = HubRepo.parse(ref)
            return cls.from_hf(
                read_mapping(repo.download("config.json", needed=["config.json"]) / "config.json", "model"), repo.name
            )
        if isinstance(ref, str) and (preset := _preset_index().get(ref.strip().lower())):
            return _preset(preset)
        path = Path(ref)
        # os.path answers False where pathlib would raise: a name too long, a folder that may not be read.
        if str(ref).strip() and os.path.isdir(path):
            path = path / "config.json"
            if not os.path.isfile(path):
                raise SpecError(f"model folder {ref} has no config.json: give a folder of an HF model, or a .yaml file")
        elif not os.path.isfile(path) and path.suffix.lower() in (".yaml", ".yml", ".json"):
            raise SpecError(f"model file {ref} does not exist: give one that does, or a preset such as llama-3-8b")
        elif not os.path.isfile(path):
            # 'meta-llama/Llama-3.1-8B' is close to a preset only in its last part.
            hint = nearest(path.name.lower(), cls.preset_names(), LIST_PRESETS)
            raise SpecError(f"model '{ref}' is neither a preset nor a file (.yaml, config.json): {hint}")
        data = read_mapping(path, "model")
        if path.suffix.lower() == ".json":
            return cls.from_hf(data, name=path.parent.resolve().name if path.name == "config.json" else path.stem)
        return build(cls, {"name": path.stem, **data}, "model")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str | None = None) -> Model:
        """The model that a Hugging Face config (the content of config.json) describes."""
        return build(cls, fields_from_hf(config, name), "model")

    @classmethod
    def presets(cls) -> dict[str, Model]:
        """Every shipped model by its own name, aliases left out. A fresh dict: callers may change theirs."""
        return {name: _preset(name) for family in _preset_families().values() for name in family}

    @classmethod
    def preset_families(cls) -> dict[str, dict[str, Model]]:
        """The same by the family that names their file."""
        return {family: {name: _preset(name) for name in members} for family, members in _preset_families().items()}

    @classmethod
    def preset_names(cls) -> list[str]:
        """Every name that `load` knows without a file, aliases included."""
        return sorted(_preset_index())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how it was read."""
        if not self.ignored_keys:
            return ()
        return (f"config.json has {', '.join(self.ignored_keys)}, which {self.name} is planned and trained without",)

    @property
    def gated(self) -> bool:
        """Gated MLPs have three matrices (gate, up, down), plain ones two."""
        return self.activation in ("swiglu", "geglu", "geglu_exact", "clamped_swiglu")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer's attention; None: full."""
        return self.sliding_window if self._attention(self._main(layer)) == "local" else None

    def masked_window(self, seq: int, documents: bool = False) -> int | None:
        """The window that a mask keeps, of sequences of that length or with `documents` in them; None: there is none, or its
        chunks are computed one beside the other.
        """
        window = self.sliding_window
        if window is None or window >= seq or (self.chunked_window and seq % window == 0 and not documents):
            return None
        return window

    @property
    def all_layers(self) -> int:
        """Layers, and those of multi-token prediction, which follow them."""
        return self.layers + self.mtp_depth

    def _main(self, layer: int) -> int:
        """The layer of the model that this one is like: one of multi-token prediction is like the last."""
        return min(layer, self.layers - 1)

    @property
    def attention_layers(self) -> int:
        return sum(count for kind, count in self.layer_kinds.items() if kind.mixer == "attention")

    @property
    def recurrence(self) -> str | None:
        """What hands a state from token to token in some layers, in words."""
        mixers = {kind.mixer for kind in self.layer_kinds}
        return "Mamba-2" if "mamba" in mixers else "linear attention" if "linear" in mixers else None

    def _attention(self, layer: int) -> AttentionKind:
        return self.attention_pattern[layer % len(self.attention_pattern)] if self.attention_pattern else "local"

    @property
    def each_kind(self) -> tuple[LayerKind, ...]:
        """What each layer consists of, those of multi-token prediction last."""
        dense, interval = (self.layers, 1) if self.moe is None else (self.moe.dense_layers, self.moe.interval)
        norms = self.rope_pattern or (True,) if self.qk_l2_norm else (self.qk_norm,)
        pattern = self.attention_pattern or (("full",) if self.sliding_window is None else ("local",))
        return _each_kind(self.layers, pattern, self.one_sublayer, dense, interval, norms, self.mtp_depth)

    def kind(self, layer: int) -> LayerKind:
        return self.each_kind[layer]

    def rotates(self, layer: int) -> bool:
        """Whether a layer's queries and keys are rotated by their positions."""
        pattern = self.rope_pattern
        return self.positions == "rotary" and (not pattern or pattern[self._main(layer) % len(pattern)])

    @property
    def rotated_dim(self) -> int:
        """Dimensions of a query or key head that are rotated."""
        if self.mla:
            return self.mla.qk_rope_head_dim
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def score_scale(self) -> float:
        """The factor of attention scores, with DeepSeek's share of YaRN's mscale in it."""
        scale = float(self.qk_head_dim**-0.5) if self.attention_scale is None else self.attention_scale
        scaling = self.rope_scaling
        if self.mla is None or scaling is None or scaling.mscale_all_dim is None or scaling.factor <= 1:
            return scale
        return scale * (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2

    @property
    def qk_head_dim(self) -> int:
        return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def v_head_dim(self) -> int:
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def q_dim(self) -> int:
        return self.heads * self.qk_head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all keys (and, without MLA, of all values); for MLA the width after expansion from the latent."""
        return self.kv_heads * self.qk_head_dim

    @property
    def moe_layers(self) -> int:
        return sum(count for kind, count in self.layer_kinds.items() if kind.has_experts)

    @property
    def dense_layers(self) -> int:
        """Layers with a dense MLP."""
        return sum(count for kind, count in self.layer_kinds.items() if kind.mlp == "dense")

    @property
    def layer_kinds(self) -> dict[LayerKind, int]:
        """How many layers there are of each kind, in the order in which these first appear."""
        return dict(_counted(self.each_kind))

    @property
    def sublayers(self) -> int:
        """Attention, its like, and MLPs of all layers but those of multi-token prediction: what adds to the residual stream."""
        return self.layers if self.one_sublayer else 2 * self.layers

    def is_moe_layer(self, index: int) -> bool:
        if not 0 <= index < self.all_layers:
            raise IndexError(f"layer {index} of a model with {self.all_layers} layers")
        return self.each_kind[index].has_experts

    @property
    def expert_parameters(self) -> int:
        """One routed expert."""
        return weights.elements(weights.mlp(self, self.moe.expert_ffn)) if self.moe else 0

    @property
    def parameters(self) -> int:
        """All parameters, tied embeddings once."""
        ends = [*weights.embedding(self), weights.norm(self), *([] if self.tied_embeddings else [weights.vocabulary(self)])]
        layers = sum(count * weights.elements(weights.layer_weights(self, kind)) for kind, count in self.layer_kinds.items())
        experts = self.moe.experts * self.expert_parameters if self.moe else 0
        return weights.elements(ends) + layers + self.moe_layers * (experts + weights.router_bias(self))

    @property
    def hidden_matrix_elements(self) -> int:
        """Elements of the layers' matrices, routed experts included: neither embedding and head nor vectors."""
        found = 0
        for kind, count in self.layer_kinds.items():
            found += count * weights.elements(one for one in weights.layer_weights(self, kind) if one.is_hidden_matrix)
        if self.moe is not None:
            expert = weights.mlp(self, self.moe.expert_ffn)
            each = weights.elements(one for one in expert if one.is_hidden_matrix)
            found += self.moe_layers * self.moe.experts * each
        return found

    @property
    def active_parameters(self) -> int:
        """What one token passes through: all but the routed experts it is not sent to."""
        idle = self.moe.experts - self.moe.top_k if self.moe else 0
        return self.parameters - self.moe_layers * idle * self.expert_parameters


@lru_cache(maxsize=1024)
def _each_kind(
    layers: int,
    pattern: tuple[AttentionKind, ...],
    one_sublayer: bool,
    dense_layers: int,
    interval: int,
    norms: tuple[bool, ...],
    mtp_depth: int,
) -> tuple[LayerKind, ...]:
    found = []
    for layer in range(layers):
        attention = pattern[layer % len(pattern)]
        mixer: Literal["attention", "linear", "mamba", "none"]
        mixer = "attention" if attention == "full" or attention == "local" else attention
        mlp: Literal["dense", "moe"] = "moe" if layer >= dense_layers and (layer + 1) % interval == 0 else "dense"
        mlp_kind = mlp if not one_sublayer or mixer == "none" else "none"
        normed = mixer == "attention" and norms[layer % len(norms)]
        found.append(LayerKind(mixer, mlp_kind, norms_heads=normed, local=attention == "local"))
    return (*found, *[found[-1]._replace(predicts=True)] * mtp_depth)


@lru_cache(maxsize=1024)
def _counted(each_kind: tuple[LayerKind, ...]) -> Counter[LayerKind]:
    return Counter(each_kind)


def _default_head_dim(known: dict[str, Any]) -> int:
    """hidden / heads; for MLA the width of a query and key head, its rotary part included."""
    if mla := known.get("mla"):
        return int(mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    # Fields that failed their own check are absent, and hidden < heads must reach the check that explains it.
    return max(1, int(known.get("hidden", 1)) // int(known.get("heads", 1)))


def _problems(model: Model) -> Iterator[str]:
    """What fields that are each fine alone get wrong together, as sentences."""
    if model.family is not None and model.family not in FAMILIES:
        yield f"model.family is {shown(model.family)} but must be one of {', '.join(sorted(FAMILIES))}, or left out"
    if model.heads % model.kv_heads:
        yield (
            f"model.kv_heads is {model.kv_heads} but must divide heads = {model.heads}: "
            f"try {near(model.kv_heads, divisors(model.heads))}"
        )
    if model.mla:
        if model.kv_heads != model.heads:
            yield f"model.kv_heads is {model.kv_heads} but with mla every head has its own keys: try {model.heads}"
        if model.head_dim != model.qk_head_dim:
            yield (
                f"model.head_dim is {model.head_dim} but with mla it is qk_nope_head_dim + qk_rope_head_dim: "
                f"try {model.qk_head_dim}, or leave it out"
            )
        for name in ("qk_norm", "qk_l2_norm", "attention_sinks"):
            if getattr(model, name):
                yield f"model.{name} is true but mla has no such parameters: try false"
        if model.attention_temperature is not None:
            yield "model.attention_temperature is set but mla rotates queries in every layer: leave it out"
        if model.rotary_dim is not None:
            yield f"model.rotary_dim is {model.rotary_dim} but with mla qk_rope_head_dim is rotated: leave it out"
    elif model.hidden % model.heads and "head_dim" not in model.model_fields_set:
        yield (
            f"model.head_dim is missing and hidden = {model.hidden} is not a multiple of heads = {model.heads}: "
            f"give it, e.g. {model.head_dim}"
        )
    if model.rotary_dim is not None and model.rotary_dim > model.head_dim:
        yield f"model.rotary_dim is {model.rotary_dim} but a head has only head_dim = {model.head_dim}: try {model.head_dim}"
    if ("linear" in model.attention_pattern) != (model.linear_attention is not None):
        other = "is missing" if model.linear_attention is None else "is given"
        yield (
            f"model.attention_pattern is {list(model.attention_pattern)} but linear_attention {other}: give linear layers and "
            "their heads, or neither"
        )
    yield from _mamba_problems(model)
    if model.attention_gate and model.mla:
        yield "model.attention_gate is true but mla has no such projection: try false"
    if model.attention_pattern and ("local" in model.attention_pattern) != (model.sliding_window is not None):
        other = "is missing" if model.sliding_window is None else f"is {model.sliding_window}"
        yield (
            f"model.attention_pattern is {list(model.attention_pattern)} but sliding_window {other}: give local layers and "
            "their window, or neither"
        )
    if model.chunked_window and model.sliding_window is None:
        yield "model.chunked_window is true but no layer has a sliding window: give sliding_window: 8192, or try false"
    if model.qk_l2_norm and (model.qk_norm or model.positions != "rotary"):
        has = "qk_norm is true" if model.qk_norm else f"positions are {model.positions}"
        yield f"model.qk_l2_norm is true but {has}, and it norms rotated queries and keys that have no other norm: try false"
    if model.attention_temperature is not None and model.positions == "rotary" and all(model.rope_pattern):
        yield (
            "model.attention_temperature is set but every layer rotates, and none has it: leave it out, or give rope_pattern: "
            "[true, true, true, false]"
        )
    if model.local_rope_theta is not None and model.sliding_window is None:
        yield f"model.local_rope_theta is {model.local_rope_theta:g} but no layer has a sliding window: leave it out"
    if model.attention_sinks and model.attention_softcap is not None:
        yield f"model.attention_softcap is {model.attention_softcap:g} but attention_sinks is true: leave one of them out"
    if (model.swiglu_limit is not None) != (model.activation == "clamped_swiglu"):
        given = "is missing" if model.swiglu_limit is None else f"is {model.swiglu_limit:g}"
        yield f"model.swiglu_limit {given} but activation is {model.activation}: try clamped_swiglu and 7.0, or neither"
    if not model.norm_bias and model.norm == "rmsnorm":
        yield "model.norm_bias is false but rmsnorm never has biases: leave it out"
    if not model.qk_norm and model.qk_norm_over != "head":
        yield f"model.qk_norm_over is {model.qk_norm_over} but qk_norm is false: leave it out, or try qk_norm: true"
    if model.parallel_residual != "none" and model.norm_placement != "pre":
        yield f"model.norm_placement is {model.norm_placement} but with parallel_residual it must be pre: try pre"
    if model.positions == "learned" and model.max_positions is None:
        yield "model.max_positions is missing but positions: learned needs a table of that length: try 2048"
    if model.rope_scaling is not None:
        yield from _rope_problems(model, model.rope_scaling.rope_type)
    if model.moe and model.moe.dense_layers > model.layers:
        yield (
            f"model.moe.dense_layers is {model.moe.dense_layers} but there are only layers = {model.layers}: "
            f"try {min(1, model.layers)}"
        )
    if model.mtp_depth and (model.positions == "learned" or model.one_sublayer):
        has = "one_sublayer is true" if model.one_sublayer else "positions are learned"
        yield f"model.mtp_depth is {model.mtp_depth} but {has}, and no published model predicts several tokens so: try 0"
    if model.dense_layers and not model.ffn:
        yield f"model.ffn is 0 but {model.dense_layers} layers have a dense MLP: try {4 * model.hidden}"


def _mamba_problems(model: Model) -> Iterator[str]:
    pattern = f"model.attention_pattern is {list(model.attention_pattern)!s:.80}"
    if ("mamba" in model.attention_pattern) != (model.mamba is not None):
        other = "is missing" if model.mamba is None else "is given"
        yield f"{pattern} but mamba {other}: give mamba layers and their heads, or neither"
    if "none" in model.attention_pattern and not model.one_sublayer:
        yield f"{pattern} but one_sublayer is false: try full in the place of none, or one_sublayer: true"
    if model.one_sublayer and (model.norm_placement != "pre" or model.parallel_residual != "none"):
        field, value = ("norm_placement", "pre") if model.norm_placement != "pre" else ("parallel_residual", "none")
        yield f"model.{field} is {getattr(model, field)} but with one_sublayer it must be {value}: try {value}"


def _rope_problems(model: Model, rope_type: RopeType) -> Iterator[str]:
    if rope_type == "dynamic" and model.max_positions is None:
        yield (
            "model.max_positions is missing but rope_scaling.rope_type: dynamic changes the base of longer sequences: "
            "give it, e.g. 2048"
        )
    if rope_type == "dynamic" and model.head_dim <= 2:
        yield f"model.head_dim is {model.head_dim} but rope_scaling.rope_type: dynamic needs more than 2: try 64"
    if rope_type == "yarn" and model.rope_theta <= 1:
        yield (
            f"model.rope_theta is {model.rope_theta:g} but rope_scaling.rope_type: yarn needs a base greater than 1: try 10000"
        )


@cache
def _preset_families() -> dict[str, dict[str, dict[str, Any]]]:
    """Family -> name -> fields."""
    folder = files("ultrascale.specs") / "presets" / "models"
    names = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))
    return {name: package_data("ultrascale.specs", f"presets/models/{name}.yaml") for name in names if name != "aliases"}


@cache
def _preset(name: str) -> Model:
    fields = next(members[name] for members in _preset_families().values() if name in members)
    return build(Model, {"name": name, **fields}, f"preset {name}")


@cache
def _preset_index() -> dict[str, str]:
    """Every accepted lower-case name -> the preset's own name."""
    aliases = package_data("ultrascale.specs", "presets/models/aliases.yaml")
    return {**{name: name for members in _preset_families().values() for name in members}, **aliases}
