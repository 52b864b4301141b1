"""Parts of a Model: latent and linear attention, Mamba-2, rotary scaling, experts; the types of their fields."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from ultrascale.specs.errors import divisors, near
from ultrascale.specs.validate import FrozenSpec, shown

# Strict: a count that arrives as 1.5, true or "32" is a mistake in the file, never something to round or parse.
# The upper bound keeps every product of two counts inside 64 bits.
Count = Annotated[int, Field(strict=True, gt=0, le=2**31)]
CountOrZero = Annotated[int, Field(strict=True, ge=0, le=2**31)]
Layers = Annotated[int, Field(strict=True, gt=0, le=2**16)]  # Schedules and stages walk the layers one by one.
Depth = Annotated[int, Field(strict=True, ge=0, le=64)]
Factor = Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)]
FactorOrZero = Annotated[float, Field(strict=True, ge=0, le=1e9, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]


class MLA(FrozenSpec):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values come from one small latent vector."""

    q_lora_rank: Count | None = Field(default=None, description="None: queries come straight from the hidden state.")
    kv_lora_rank: Count = Field(examples=[512])
    qk_nope_head_dim: Count = Field(examples=[128])
    qk_rope_head_dim: Count = Field(examples=[64])
    v_head_dim: Count = Field(examples=[128])


class LinearAttention(FrozenSpec):
    """A gated delta rule in place of attention (Gated DeltaNet, Yang et al. 2024), with the state of each value head in
    key_head_dim × value_head_dim numbers.
    """

    key_heads: Count = Field(examples=[16])
    value_heads: Count = Field(examples=[32])
    key_head_dim: Count = Field(examples=[128])
    value_head_dim: Count = Field(examples=[128])
    conv_kernel: Count = Field(default=4, description="Tokens that the convolution of queries, keys and values sees.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"model.linear_attention.key_heads is {self.key_heads} but must divide value_heads = {self.value_heads}: "
                f"try {near(self.key_heads, divisors(self.value_heads))}"
            )
        return self

    @property
    def key_dim(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        return self.value_heads * self.value_head_dim


class Mamba2(FrozenSpec):
    """A selective state space in place of attention (Mamba-2, Dao & Gu 2024): each head has a state of state_dim × head_dim
    numbers; heads of a group share the projections that write to it (B) and read from it (C).
    """

    heads: Count = Field(examples=[128])
    head_dim: Count = Field(examples=[64])
    groups: Count = Field(default=1, examples=[8])
    state_dim: Count = Field(default=128, examples=[128])
    conv_kernel: Count = Field(default=4, description="Tokens that the convolution of x, B and C sees.")
    conv_bias: Flag = True
    min_step: FactorOrZero = Field(default=0.0, description="Step sizes are at least this.", examples=[0.001])

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(
                f"model.mamba.groups is {self.groups} but must divide heads = {self.heads}: "
                f"try {near(self.groups, divisors(self.heads))}"
            )
        return self

    @property
    def inner_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def group_dim(self) -> int:
        """Width of B, and of C."""
        return self.groups * self.state_dim


class AttentionTemperature(FrozenSpec):
    """Sharper attention at later positions, where there are no rotary ones (Nakanishi 2025; Llama 4): queries are multiplied by
    1 + scale · log(1 + floor((position + 1) / tokens)), with positions from 0.
    """

    scale: Factor = Field(examples=[0.1])
    tokens: Count = Field(examples=[8192])


class LayerKind(NamedTuple):
    """What a layer consists of."""

    mixer: Literal["attention", "linear", "mamba", "none"] = "attention"
    mlp: Literal["dense", "moe", "none"] = "dense"
    predicts: bool = False
    """a layer of multi-token prediction, with norms and a projection of two hidden states before it"""
    norms_heads: bool = False
    """queries and keys are normed"""
    local: bool = False
    """attention sees the model's window"""

    @property
    def sublayers(self) -> int:
        return (self.mixer != "none") + (self.mlp != "none")

    @property
    def has_experts(self) -> bool:
        return self.mlp == "moe"

    @property
    def is_dense(self) -> bool:
        """A layer of attention and a dense MLP."""
        return self.mixer == "attention" and self.mlp == "dense" and not self.predicts


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
        if self.high_freq_factor < self.low_freq_factor:
            raise ValueError(
                f"model.rope_scaling.high_freq_factor is {self.high_freq_factor:g} but must be at least "
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
    interval: Count = Field(
        default=1, description="Of the others, those whose number, from 1, is a multiple of it have experts (Llama 4)."
    )
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_bias: Flag = Field(default=False, description="DeepSeek-V3's e_score_correction_bias, one per expert.")
    logits_bias: Flag = Field(default=False, description="A learned bias of the router's logits (gpt-oss).")
    shared_gate: Flag = Field(default=False, description="Qwen2-MoE's learned gate on the shared expert.")
    renormalize: Flag = Field(default=True, description="The weights of a token's chosen experts add up to one.")
    scale_inputs: Flag = Field(
        default=False, description="The weights multiply the inputs of the chosen experts, not their outputs (Llama 4)."
    )
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
