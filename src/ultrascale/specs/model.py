"""Model: the shape of a transformer, its presets, and what can be read as one: a YAML file or a Hugging Face config.json."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from ultrascale.specs import weights
from ultrascale.specs.errors import SpecError, divisors, near, nearest
from ultrascale.specs.files import package_data, read_mapping
from ultrascale.specs.hf import fields_from_hf
from ultrascale.specs.hub import HubRepo, is_hub
from ultrascale.specs.validate import FrozenSpec, build, shown

# Strict: a count that arrives as 1.5, true or "32" is a mistake in the file, never something to round or parse.
# The upper bound keeps every product of two counts inside 64 bits.
Count = Annotated[int, Field(strict=True, gt=0, le=2**31)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=2**31)]
Layers = Annotated[int, Field(strict=True, gt=0, le=2**16)]  # Schedules and stages walk the layers one by one.
Factor = Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]


class MLA(FrozenSpec):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values come from one small latent vector."""

    q_lora_rank: Count | None = Field(default=None, description="None: queries come straight from the hidden state.")
    kv_lora_rank: Count = Field(examples=[512])
    qk_nope_head_dim: Count = Field(examples=[128])
    qk_rope_head_dim: Count = Field(examples=[64])
    v_head_dim: Count = Field(examples=[128])


RopeType = Literal["llama3", "linear", "dynamic", "yarn"]


class RopeScaling(FrozenSpec):
    """Rotary positions beyond the context a model was first trained with, by the `rope_type` of Hugging Face configs.

    - `llama3`: waves longer than the original context are slowed by `factor`, short ones kept, a ramp between (Llama 3.1).
    - `linear`: all waves are slowed by `factor` (position interpolation, Chen et al. 2023).
    - `dynamic`: NTK scaling; the base grows with a sequence that is longer than the model's max_positions.
    - `yarn`: a ramp by the number of turns in the original context, and larger scores (YaRN, Peng et al. 2023).
    """

    rope_type: RopeType = "llama3"
    factor: Factor = Field(examples=[8.0])
    low_freq_factor: Factor = Field(
        default=1.0, description="llama3: waves that turn fewer times in the original context slow down."
    )
    high_freq_factor: Factor = Field(default=4.0, description="llama3: waves that turn more often stay as they are.")
    original_max_positions: Count | None = Field(
        default=None, description="llama3 and yarn: the original context, in tokens.", examples=[8192]
    )
    attention_factor: Factor | None = Field(
        default=None, description="yarn: cos and sin are multiplied by it; None: it follows from factor and mscale."
    )
    mscale: Factor | None = Field(default=None, description="yarn: weight of log(factor) in attention_factor's numerator.")
    mscale_all_dim: Factor | None = Field(default=None, description="yarn: the same in its denominator.")
    beta_fast: Factor = Field(default=32.0, description="yarn: waves that turn more often stay as they are.")
    beta_slow: Factor = Field(default=1.0, description="yarn: waves that turn fewer times slow down.")
    truncate: Flag = Field(default=True, description="yarn: the ends of the ramp are rounded to whole dimensions.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        read = {"rope_type", "factor", *ROPE_FIELDS[self.rope_type]}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name not in read and value != field.default:
                raise ValueError(
                    f"model.rope_scaling.{name} is {shown(value)} but rope_type {self.rope_type} does not read it: leave it out"
                )
        if "original_max_positions" in read and self.original_max_positions is None:
            raise ValueError("model.rope_scaling.original_max_positions is missing: give it, e.g. 8192")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"model.rope_scaling.high_freq_factor is {self.high_freq_factor:g} but must be greater than "
                f"low_freq_factor = {self.low_freq_factor:g}: try {4 * self.low_freq_factor:g}"
            )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            given, other = ("mscale", "mscale_all_dim") if self.mscale_all_dim is None else ("mscale_all_dim", "mscale")
            raise ValueError(
                f"model.rope_scaling.{other} is missing but {given} is {getattr(self, given):g}: give both or neither, e.g. 1.0"
            )
        if self.mscale is not None and self.attention_factor is not None:
            raise ValueError(
                f"model.rope_scaling.attention_factor is {self.attention_factor:g} but it follows from mscale: "
                "leave it out, or mscale and mscale_all_dim"
            )
        return self


ROPE_FIELDS: dict[RopeType, tuple[str, ...]] = {
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_positions"),
    "linear": (),
    "dynamic": (),
    "yarn": ("original_max_positions", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"),
}
"""what each type reads beside its factor"""


class MoE(FrozenSpec):
    """Mixture of experts: routed experts chosen per token, and shared experts that every token visits."""

    experts: Count = Field(examples=[8, 64])
    top_k: Count = Field(examples=[2])
    expert_ffn: Count = Field(examples=[1536])
    shared_experts: CountOrZero = 0
    shared_expert_ffn: CountOrZero = Field(
        default_factory=lambda known: known.get("expert_ffn", 0) * known.get("shared_experts", 0),
        description="Width of all shared experts together.",
        examples=[1536],
    )
    dense_layers: CountOrZero = Field(default=0, description="The first layers that keep a dense MLP.")
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: Flag = Field(default=False, description="DeepSeek-V3's e_score_correction_bias, one per expert.")
    shared_gate: Flag = Field(default=False, description="Qwen2-MoE's learned gate on the shared expert.")
    renormalize: Flag = Field(default=True, description="The weights of a token's chosen experts add up to one.")
    groups: Count = Field(default=1, description="Groups of experts, of which a token may visit top_groups (DeepSeek).")
    top_groups: Count = Field(default=1, examples=[4])
    scaling: Factor = Field(default=1.0, description="DeepSeek's routed_scaling_factor on the weights of chosen experts.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.experts % self.groups:
            raise ValueError(
                f"model.moe.groups is {self.groups} but must divide experts = {self.experts}: "
                f"try {near(self.groups, divisors(self.experts))}"
            )
        if self.top_groups > self.groups:
            raise ValueError(
                f"model.moe.top_groups is {self.top_groups} but there are only groups = {self.groups}: try {self.groups}"
            )
        reached = self.top_groups * self.experts // self.groups
        if reached < self.top_k <= self.experts:
            raise ValueError(
                f"model.moe.top_groups is {self.top_groups} but its groups have {reached} experts and top_k is {self.top_k}: "
                f"try {-(-self.top_k * self.groups // self.experts)}"
            )
        if self.top_k > self.experts:
            raise ValueError(
                f"model.moe.top_k is {self.top_k} but there are only experts = {self.experts}: try {min(2, self.experts)}"
            )
        if (self.shared_experts > 0) != (self.shared_expert_ffn > 0):
            raise ValueError(
                f"model.moe.shared_expert_ffn is {self.shared_expert_ffn} but shared_experts is {self.shared_experts}: "
                f"give both or neither, e.g. shared_experts: 1 and shared_expert_ffn: {self.expert_ffn}"
            )
        if self.shared_gate and not self.shared_experts:
            raise ValueError("model.moe.shared_gate is true but shared_experts is 0: try shared_experts: 1")
        return self

    def capacity(self, seq: int, factor: float) -> int:
        """Tokens of one sequence that an expert takes where it is not to take more than `factor` times the mean."""
        return int(factor * seq * self.top_k / self.experts)


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
    activation: Literal["swiglu", "geglu", "geglu_exact", "gelu", "gelu_exact", "relu"] = Field(
        default="swiglu",
        description="gelu and the gate of geglu are the tanh approximation (gelu_new), as in GPT-2; "
        "gelu_exact and geglu_exact compute x·Φ(x) by erf (Hugging Face's gelu).",
    )
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: Factor = Field(default=1e-5, description="Added to the variance inside every norm.", examples=[1e-5])
    positions: Literal["rotary", "learned", "none"] = "rotary"
    rope_theta: Factor = Field(default=10000.0, description="Base of the rotary wavelengths.", examples=[500000.0])
    rope_scaling: RopeScaling | None = Field(default=None, examples=[{"factor": 8.0, "original_max_positions": 8192}])
    max_positions: Count | None = Field(default=None, examples=[8192])
    tied_embeddings: Flag = False
    qkv_bias: Flag = False
    attention_output_bias: Flag = False
    mlp_bias: Flag = False
    qk_norm: Flag = Field(default=False, description="RMSNorm over head_dim for queries and keys, as in Qwen3.")
    sliding_window: Count | None = Field(default=None, examples=[4096])
    moe: MoE | None = Field(default=None, examples=[{"experts": 8, "top_k": 2, "expert_ffn": 14336}])
    source: str = ""

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
            return cls.presets()[preset]
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
            hint = nearest(path.name.lower(), cls.preset_names())
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
        return dict(_presets())

    @classmethod
    def preset_names(cls) -> list[str]:
        """Every name that `load` knows without a file, aliases included."""
        return sorted(_preset_index())

    @property
    def gated(self) -> bool:
        """Gated MLPs have three matrices (gate, up, down), plain ones two."""
        return self.activation in ("swiglu", "geglu", "geglu_exact")

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
        return self.layers - self.moe.dense_layers if self.moe else 0

    @property
    def dense_layers(self) -> int:
        return self.layers - self.moe_layers

    def is_moe_layer(self, index: int) -> bool:
        if not 0 <= index < self.layers:
            raise IndexError(f"layer {index} of a model with {self.layers} layers")
        return self.moe is not None and index >= self.moe.dense_layers

    @property
    def expert_parameters(self) -> int:
        """One routed expert."""
        return weights.elements(weights.mlp(self, self.moe.expert_ffn)) if self.moe else 0

    @property
    def parameters(self) -> int:
        """All parameters, tied embeddings once."""
        ends = [*weights.embedding(self), weights.norm(self), *([] if self.tied_embeddings else [weights.vocabulary(self)])]
        dense, moe = (weights.elements(weights.layer_weights(self, moe)) for moe in (False, True))
        experts = self.moe.experts * self.expert_parameters if self.moe else 0
        moe += experts + weights.router_bias(self)
        return weights.elements(ends) + self.dense_layers * dense + self.moe_layers * moe

    @property
    def active_parameters(self) -> int:
        """What one token passes through: all but the routed experts it is not sent to."""
        idle = self.moe.experts - self.moe.top_k if self.moe else 0
        return self.parameters - self.moe_layers * idle * self.expert_parameters


def _default_head_dim(known: dict[str, Any]) -> int:
    """hidden / heads; for MLA the width of a query and key head, its rotary part included."""
    if mla := known.get("mla"):
        return int(mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    # Fields that failed their own check are absent, and hidden < heads must reach the check that explains it.
    return max(1, int(known.get("hidden", 1)) // int(known.get("heads", 1)))


def _problems(model: Model) -> Iterator[str]:
    """What fields that are each fine alone get wrong together, as sentences."""
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
        for field in ("qkv_bias", "qk_norm"):
            if getattr(model, field):
                yield f"model.{field} is true but mla has no such parameters: try false"
    elif model.hidden % model.heads and "head_dim" not in model.model_fields_set:
        yield (
            f"model.head_dim is missing and hidden = {model.hidden} is not a multiple of heads = {model.heads}: "
            f"give it, e.g. {model.head_dim}"
        )
    if model.positions == "learned" and model.max_positions is None:
        yield "model.max_positions is missing but positions: learned needs a table of that length: try 2048"
    if model.rope_scaling is not None:
        yield from _rope_problems(model, model.rope_scaling.rope_type)
    if model.moe and model.moe.dense_layers > model.layers:
        yield (
            f"model.moe.dense_layers is {model.moe.dense_layers} but there are only layers = {model.layers}: "
            f"try {min(1, model.layers)}"
        )
    if model.dense_layers and not model.ffn:
        yield f"model.ffn is 0 but {model.dense_layers} layers have a dense MLP: try {4 * model.hidden}"


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
def _presets() -> dict[str, Model]:
    folder = files("ultrascale.specs") / "presets" / "models"
    found: dict[str, Model] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".yaml") and file.name != "aliases.yaml":
            for name, fields in package_data("ultrascale.specs", f"presets/models/{file.name}").items():
                found[name] = build(Model, {"name": name, **fields}, f"preset {name}")
    return found


@cache
def _preset_index() -> dict[str, str]:
    """Every accepted lower-case name -> the preset's own name."""
    aliases = package_data("ultrascale.specs", "presets/models/aliases.yaml")
    return {**{name: name for name in _presets()}, **aliases}
