"""Conversion between our parameters and the tensors of Hugging Face checkpoints, in both directions.

Most are the same tensor under another name. Experts are stacked here and stored one by one there; some families join matrices,
store them [in, out], order rotated rows in pairs, or store norms' weights less one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ultrascale.model.transformer import EMBEDDING, HEAD, Transformer
from ultrascale.specs.hf_config import family_of
from ultrascale.specs.model import Model

# Our modules, without the layer, to theirs; experts are numbered.
LLAMA_NAMES = {
    "embed.tokens": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.linear": "lm_head",
    "attention_norm": "input_layernorm",
    "attention.qkv.q": "self_attn.q_proj",
    "attention.qkv.k": "self_attn.k_proj",
    "attention.qkv.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.inputs.gate": "mlp.gate_proj",
    "mlp.inputs.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_EXPERTS = {
    **LLAMA_NAMES,
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
    "mlp.shared.inputs.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.inputs.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
_MIXTRAL = {
    **LLAMA_NAMES,
    "mlp.router": "block_sparse_moe.gate",
    "mlp.experts.gate": "block_sparse_moe.experts.{}.w1",
    "mlp.experts.up": "block_sparse_moe.experts.{}.w3",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2",
}
_DEEPSEEK = {
    **_EXPERTS,
    "mlp.shared.inputs.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.inputs.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
    "attention.down.q": "self_attn.q_a_proj",
    "attention.q_latent_norm": "self_attn.q_a_layernorm",
    "attention.q_up.q": "self_attn.q_b_proj",
    "attention.down.kv": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_latent_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up.kv": "self_attn.kv_b_proj",
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "final_norm": "shared_head.norm",
}
# What a layer of multi-token prediction has again.
_COPIES = {"embed_tokens": EMBEDDING, "shared_head.head": HEAD}
_CORRECTION_BIAS = {"mlp.router.bias": "mlp.gate.e_score_correction_bias"}
_JOINED_GATE_UP = dict.fromkeys(("mlp.inputs.gate", "mlp.inputs.up"), "mlp.gate_up_proj")
_POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_QKV = ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v")


_GPT_OSS = {
    "attention.sinks": "self_attn.sinks",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.logits_bias": "mlp.router.bias",
    **dict.fromkeys(("mlp.experts.gate", "mlp.experts.up"), "mlp.experts.gate_up_proj"),
    **dict.fromkeys(("mlp.experts.gate_bias", "mlp.experts.up_bias"), "mlp.experts.gate_up_proj_bias"),
    "mlp.experts.down": "mlp.experts.down_proj",
    "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
}


_LLAMA4 = {
    **{ours: theirs.replace("mlp.", "feed_forward.") for ours, theirs in _EXPERTS.items()},
    "mlp.router": "feed_forward.router",
}
_LLAMA4_EXPERTS = {
    **dict.fromkeys(("mlp.experts.gate", "mlp.experts.up"), "feed_forward.experts.gate_up_proj"),
    "mlp.experts.down": "feed_forward.experts.down_proj",
}


_GATED_DELTA = {
    **dict.fromkeys((f"attention.conv.{name}" for name in "qkv"), "linear_attn.conv1d.weight"),
    "attention.log_decay": "linear_attn.A_log",
    "attention.decay_bias": "linear_attn.dt_bias",
}
_QWEN3_NEXT = {
    **_EXPERTS,
    "attention.qkv.gate": "self_attn.q_proj",
    **dict.fromkeys((f"attention.inputs.{name}" for name in ("q", "k", "v", "gate")), "linear_attn.in_proj_qkvz"),
    **dict.fromkeys((f"attention.inputs.{name}" for name in ("step", "decay")), "linear_attn.in_proj_ba"),
    "attention.output_norm": "linear_attn.norm",
}
_QWEN3_5 = {
    **_QWEN3_NEXT,
    **dict.fromkeys((f"attention.inputs.{name}" for name in "qkv"), "linear_attn.in_proj_qkv"),
    "attention.inputs.gate": "linear_attn.in_proj_z",
    "attention.inputs.step": "linear_attn.in_proj_b",
    "attention.inputs.decay": "linear_attn.in_proj_a",
}
_NEMOTRON_H = {
    "embed.tokens": "backbone.embeddings",
    "head.norm": "backbone.norm_f",
    "head.linear": "lm_head",
    **dict.fromkeys(("attention_norm", "mlp_norm"), "norm"),
    **{name: theirs.replace("self_attn.", "mixer.") for name, theirs in LLAMA_NAMES.items() if "self_attn" in theirs},
    **{name: theirs.replace("mlp.", "mixer.") for name, theirs in _DEEPSEEK.items() if theirs.startswith("mlp.")},
    **dict.fromkeys((f"attention.inputs.{name}" for name in ("gate", "x", "b", "c", "step")), "mixer.in_proj"),
    "attention.gated_norm": "mixer.norm",
}
_MAMBA = {
    **dict.fromkeys((f"attention.conv.{name}" for name in "xbc"), "mixer.conv1d.weight"),
    **dict.fromkeys((f"attention.conv.{name}_bias" for name in "xbc"), "mixer.conv1d.bias"),
    "attention.step_bias": "mixer.dt_bias",
    "attention.log_rate": "mixer.A_log",
    "attention.skip": "mixer.D",
}


@dataclass(frozen=True)
class HFNames:
    """The tensors of a family: their names, and how they differ from ours."""

    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    """our modules, without the layer, to theirs; `{}`: experts are numbered"""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """our parameters and buffers to whole names of theirs, where the ends of the names differ"""
    recurrent_out: str = ""
    """the output projection of linear attention or Mamba-2"""
    layers: str = "model.layers.{}."
    stored_in_out: bool = False
    """weights of layers are [in, out]"""
    norm_offset: float = 0.0
    """norms multiply by their weight plus this, except that of linear attention's output; ours by their weight"""
    interleaved_rope: bool = False
    """rotated pairs are neighbours; ours are half a head apart"""
    alternating_heads: bool = False
    """the rows of joined queries, keys and values alternate head by head"""
    experts_in_out: bool = False
    """stacked experts are [experts, in, out]"""
    alternating_gate_up: bool = False
    """the outputs of experts' joined gate and up alternate one by one"""


_GEMMA2 = HFNames({**LLAMA_NAMES, **_POST_NORMS}, norm_offset=1.0)
_OLMO2 = HFNames({**LLAMA_NAMES, **_POST_NORMS})
TENSORS: dict[str, HFNames] = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), HFNames(_EXPERTS)),
    **dict.fromkeys(
        ("mixtral", "minimax_m2"), HFNames(_MIXTRAL, {"mlp.router.bias": "block_sparse_moe.e_score_correction_bias"})
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), HFNames(_DEEPSEEK, _CORRECTION_BIAS, interleaved_rope=True)),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _OLMO2),
    **dict.fromkeys(("gemma2", "gemma3_text"), _GEMMA2),
    **dict.fromkeys(("cohere", "cohere2", "ernie4_5"), HFNames(interleaved_rope=True)),
    "gemma": HFNames(norm_offset=1.0),
    "nemotron": HFNames(norm_offset=1.0),
    "phi3": HFNames({**LLAMA_NAMES, **_JOINED_GATE_UP, **dict.fromkeys(_QKV, "self_attn.qkv_proj")}),
    "glm": HFNames({**LLAMA_NAMES, **_JOINED_GATE_UP}, interleaved_rope=True),
    "glm4": HFNames(
        {
            **LLAMA_NAMES,
            **_JOINED_GATE_UP,
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
        interleaved_rope=True,
    ),
    "qwen3_next": HFNames(_QWEN3_NEXT, _GATED_DELTA, recurrent_out="linear_attn.out_proj", norm_offset=1.0),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text"),
        HFNames(_QWEN3_5, _GATED_DELTA, recurrent_out="linear_attn.out_proj", norm_offset=1.0),
    ),
    "nemotron_h": HFNames(
        _NEMOTRON_H,
        {**_MAMBA, "mlp.router.bias": "mixer.gate.e_score_correction_bias"},
        recurrent_out="mixer.out_proj",
        layers="backbone.layers.{}.",
    ),
    "gpt_oss": HFNames(tensors=_GPT_OSS, experts_in_out=True, alternating_gate_up=True),
    "llama4_text": HFNames(_LLAMA4, _LLAMA4_EXPERTS, interleaved_rope=True, experts_in_out=True),
    "glm4_moe": HFNames(
        {**_DEEPSEEK, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}, _CORRECTION_BIAS
    ),
    "granitemoe": HFNames(
        {
            **LLAMA_NAMES,
            "mlp.router": "block_sparse_moe.router.layer",
            **dict.fromkeys(("mlp.experts.gate", "mlp.experts.up"), "block_sparse_moe.input_linear"),
            "mlp.experts.down": "block_sparse_moe.output_linear",
        }
    ),
    "starcoder2": HFNames({**LLAMA_NAMES, "mlp.inputs.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}),
    "gpt_neox": HFNames(
        {
            "embed.tokens": "gpt_neox.embed_in",
            "head.norm": "gpt_neox.final_layer_norm",
            "head.linear": "embed_out",
            "attention_norm": "input_layernorm",
            **dict.fromkeys(_QKV, "attention.query_key_value"),
            "attention.out": "attention.dense",
            "mlp_norm": "post_attention_layernorm",
            "mlp.inputs.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
        layers="gpt_neox.layers.{}.",
        alternating_heads=True,
    ),
    "gpt2": HFNames(
        {
            "embed.tokens": "transformer.wte",
            "embed.positions": "transformer.wpe",
            "head.norm": "transformer.ln_f",
            "head.linear": "lm_head",
            "attention_norm": "ln_1",
            **dict.fromkeys(_QKV, "attn.c_attn"),
            "attention.out": "attn.c_proj",
            "mlp_norm": "ln_2",
            "mlp.inputs.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
        layers="transformer.h.{}.",
        stored_in_out=True,
    ),
}
"""by model_type; all others have Llama's names"""


@dataclass(frozen=True)
class RotaryRows:
    """Rows of a weight whose rotated pairs are stored as neighbours: in every `period` of them `width`, from `first` on."""

    period: int
    first: int
    width: int

    def order(self, rows: int) -> Tensor:
        """For each of our rows, the index of the stored one."""
        one = torch.arange(self.period)
        rotated = one[self.first : self.first + self.width]
        one[self.first : self.first + self.width] = torch.cat((rotated[::2], rotated[1::2]))
        return (torch.arange(0, rows, self.period).unsqueeze(1) + one).flatten()


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face file, and the parameters of ours that it contains."""

    name: str
    ours: tuple[str, ...]
    """one name, or several, whose rows are concatenated"""
    dim: int = 0
    """the dimension of rows: 1 of stacked experts"""
    transposed: bool = False
    """stored [in, out]; ours are [out, in]"""
    expert: int | None = None
    """its index in our stacked parameter"""
    offset: float = 0.0
    """what ours are greater by"""
    rotary: RotaryRows | None = None
    heads: tuple[int, ...] = ()
    """rows of each part in one head, where heads alternate"""
    copy: bool = False
    """of what another tensor has; some files leave it out"""

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of the stored tensor, from the shapes of our parameters."""
        first = shapes[self.ours[0]]
        if self.expert is not None:
            return first[1:]
        joined = list(first)
        joined[self.dim] = sum(shapes[ours][self.dim] for ours in self.ours)
        if self.transposed:
            joined[-2:] = joined[:-3:-1]
        return tuple(joined)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The stored tensor, from our parameters in the order of `ours`."""
        if self.expert is not None:
            return parts[0][self.expert]
        dim = self.dim
        if self.heads:
            split = [torch.unflatten(part, dim, (-1, rows)) for part, rows in zip(parts, self.heads, strict=True)]
            whole = torch.cat(split, dim + 1).flatten(dim, dim + 1)
        else:
            whole = parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
        if self.rotary is not None:
            whole = whole[self.rotary.order(len(whole)).argsort()]
        if self.offset:
            whole = whole - self.offset
        return whole.mT.contiguous() if self.transposed else whole

    def part(self, ours: str, stored: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
        """One of our parameters, of an expert its part of one, from the stored tensor."""
        whole = stored.mT if self.transposed else stored
        if self.offset:
            whole = whole + self.offset
        if self.rotary is not None:
            whole = whole[self.rotary.order(len(whole))]
        if len(self.ours) == 1:
            return whole
        index, dim = self.ours.index(ours), self.dim
        if self.heads:
            by_head = torch.unflatten(whole, dim, (-1, sum(self.heads)))
            return torch.split(by_head, list(self.heads), dim + 1)[index].flatten(dim, dim + 1)
        return torch.split(whole, [shapes[name][dim] for name in self.ours], dim)[index]


def stored(model: Model) -> Iterator[HFTensor]:
    """Every tensor of the model's files, all experts of one stacked parameter in a row; a tied head is not stored."""
    family = TENSORS.get(family_of(model), HFNames())
    names = dict(family.names)
    if model.mla is not None and model.mla.q_lora_rank is None:
        names["attention.q_up.q"] = "self_attn.q_proj"
    for layer, shapes in _shapes_by_layer(model):
        prefix, our_prefix = ("", "") if layer is None else (family.layers.format(layer), f"blocks.{layer}.")
        recurrent = layer is not None and model.kind(layer).mixer in ("linear", "mamba")
        names["attention.out"] = family.recurrent_out if recurrent else family.names["attention.out"]
        contained: dict[str, list[str]] = {}
        for ours in shapes:
            part = ours.removeprefix(our_prefix)
            module, kind = part.rsplit(".", 1)
            if part in family.tensors:
                whole_name = family.tensors[part]
            elif part in names:  # experts' matrices, which are no modules
                whole_name = f"{names[part]}.weight"
            else:
                whole_name = f"{names[module]}.{kind}"
            contained.setdefault(prefix + whole_name, []).append(ours)
        for theirs, parts in sorted(contained.items(), key=lambda item: "{}" in item[0]):  # experts last
            experts = range(shapes[parts[0]][0]) if "{}" in theirs else (None,)
            part = parts[0].removeprefix(our_prefix)
            stacked, dims = part.startswith("mlp.experts."), len(shapes[parts[0]])
            in_out = family.experts_in_out and dims == 3 if stacked else family.stored_in_out and dims == 2
            heads = (
                (1, 1) if stacked and family.alternating_gate_up and len(parts) == 2 else _joined_heads(model, part, len(parts))
            )
            offset = family.norm_offset if part.endswith("norm.weight") and "output_norm" not in part else 0.0
            form: dict[str, Any] = {
                "dim": 1 if stacked else 0,
                "transposed": in_out and layer is not None,
                "offset": offset,
                "rotary": _rotary_rows(model, part) if family.interleaved_rope else None,
                "heads": (model.head_dim,) * 3 if family.alternating_heads and len(parts) == 3 else heads,
            }
            yield from (HFTensor(theirs.format(expert), tuple(parts), expert=expert, **form) for expert in experts)
        if layer is not None and model.kind(layer).predicts:
            for theirs, ours in _COPIES.items():
                ours = EMBEDDING if model.tied_embeddings else ours
                yield HFTensor(f"{prefix}{theirs}.weight", (ours,), copy=True)


def _joined_heads(model: Model, part: str, parts: int) -> tuple[int, ...]:
    """Rows of each part in a head of queries and their gate, or in a key head of linear attention; empty: not by head."""
    linear = model.linear_attention
    if part.startswith("attention.inputs.") and linear is not None:
        values = linear.value_heads // linear.key_heads
        by_parts = {2: (values, values), 4: (linear.key_head_dim,) * 2 + (values * linear.value_head_dim,) * 2}
        return by_parts.get(parts, ())
    return (model.head_dim,) * 2 if part.startswith("attention.qkv.q") and parts == 2 else ()


def _rotary_rows(model: Model, part: str) -> RotaryRows | None:
    """Of a parameter of a layer by our name; None: it has no rotated rows."""
    module = part.rpartition(".")[0]
    if module in ("attention.qkv.q", "attention.qkv.k"):
        return RotaryRows(model.head_dim, 0, model.rotated_dim)
    if model.mla is not None and module == "attention.q_up.q":
        return RotaryRows(model.qk_head_dim, model.mla.qk_nope_head_dim, model.rotated_dim)
    if model.mla is not None and module == "attention.down.kv":
        return RotaryRows(model.mla.kv_lora_rank + model.rotated_dim, model.mla.kv_lora_rank, model.rotated_dim)
    return None


def first_of_prediction(model: Model) -> str:
    """How the names of the first layer of multi-token prediction begin."""
    return TENSORS.get(family_of(model), HFNames()).layers.format(model.layers)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """One of our parameters, from its parts in the stored tensors."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts))


def whole_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters and buffers by our name, a tied head once; allocates nothing."""
    return {name: shape for _, shapes in _shapes_by_layer(model) for name, shape in shapes.items()}


def _shapes_by_layer(model: Model) -> Iterator[tuple[int | None, dict[str, tuple[int, ...]]]]:
    """The same for the ends of the model (None) and for each layer, one by one: a config may claim any number of layers."""
    for layer in (None, *range(model.all_layers)):
        with torch.device("meta"):
            layers = range(0) if layer is None else range(layer, layer + 1)
            module = Transformer(model, layers, embed=layer is None, head=layer is None)
        yield layer, {name: tuple(one.shape) for name, one in (*module.named_parameters(), *module.named_buffers())}
