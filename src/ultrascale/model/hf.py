"""Conversion between our parameter names and those of Hugging Face checkpoints, in both directions.

Two families of names: Llama's (also Mistral, Mixtral and Qwen), tensor for tensor, except experts, which are stacked here and
stored one by one there; and GPT-2's, whose weights are stored [in, out] and whose queries, keys and values are one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ultrascale.model.transformer import Transformer
from ultrascale.specs.errors import SpecError
from ultrascale.specs.hf_config import family_of
from ultrascale.specs.model import Model, MoE

_ENDS_LLAMA = {
    "embed.tokens": "model.embed_tokens",
    "head.norm": "model.norm",
    "head.linear": "lm_head",
}
_BLOCK_LLAMA = {
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
_MLP_MIXTRAL = {
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "mlp.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "mlp.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}
_MLP_QWEN = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.up": "mlp.experts.{}.up_proj.weight",
    "mlp.experts.down": "mlp.experts.{}.down_proj.weight",
}
_SHARED_QWEN = {
    "mlp.shared.inputs.gate.weight": "mlp.shared_expert.gate_proj.weight",
    "mlp.shared.inputs.up.weight": "mlp.shared_expert.up_proj.weight",
    "mlp.shared.down.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_gate.weight": "mlp.shared_expert_gate.weight",
}
_ENDS_GPT2 = {
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "head.norm": "transformer.ln_f",
    "head.linear": "lm_head",
}
_BLOCK_GPT2 = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.inputs.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_STORED_IN_OUT = ("attention.qkv", "attention.out", "mlp.inputs.up", "mlp.down")


@dataclass(frozen=True)
class HFTensor:
    """One tensor of a Hugging Face file, and the parameters of ours that it contains."""

    name: str
    ours: tuple[str, ...]
    """one name, or GPT-2's queries, keys and values, concatenated"""
    transposed: bool
    """stored [in, out]; ours are [out, in]"""
    expert: int | None = None
    """its index in our stacked parameter"""

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of the stored tensor, from the shapes of our parameters."""
        outputs, *rest = shapes[self.ours[0]][0 if self.expert is None else 1 :]
        joined = (outputs * len(self.ours), *rest)
        return joined[::-1] if self.transposed else joined

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The stored tensor, from our parameters in the order of `ours`."""
        if self.expert is not None:
            return parts[0][self.expert]
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return whole.t().contiguous() if self.transposed else whole

    def where(self, ours: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices of the stored tensor of shape `shape` that contain one of our parameters."""
        outputs = shape[-1 if self.transposed else 0] // len(self.ours)
        first = self.ours.index(ours) * outputs
        piece = slice(first, first + outputs)
        return (slice(None), piece) if self.transposed else (piece,)

    def as_ours(self, piece: Tensor) -> Tensor:
        return piece.t() if self.transposed else piece


def stored(model: Model) -> Iterator[HFTensor]:
    """Every tensor of the model's files; a tied head is not stored."""
    gpt2 = _is_gpt2(model)
    for ours, theirs in _names(model):
        if ours == "head.linear.weight" and model.tied_embeddings:
            continue
        stem, kind = ours.rsplit(".", 1)
        fused = gpt2 and stem.endswith("attention.qkv")
        contained = tuple(f"{stem}.{name}.{kind}" for name in "qkv") if fused else (ours,)
        yield HFTensor(theirs, contained, gpt2 and kind == "weight" and stem.endswith(_STORED_IN_OUT))
    if model.moe is not None:
        yield from _stored_experts(model, model.moe)


def _stored_experts(model: Model, moe: MoE) -> Iterator[HFTensor]:
    """Router and experts of every MoE layer; all experts of one stacked parameter follow one another, for the writer."""
    names = _MLP_MIXTRAL if family_of(model) == "mixtral" else {**_MLP_QWEN, **(_SHARED_QWEN if moe.shared_experts else {})}
    for layer in range(moe.dense_layers, model.layers):
        for ours, theirs in names.items():
            name, contained = f"model.layers.{layer}.{theirs}", (f"blocks.{layer}.{ours}",)
            if "{}" in theirs:
                yield from (HFTensor(name.format(expert), contained, False, expert) for expert in range(moe.experts))
            else:
                yield HFTensor(name, contained, False)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """One of our parameters, from its parts in the stored tensors."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts))


def from_hf(state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Our state dict; tensors are views of the given ones, except experts."""
    found: dict[str, list[Tensor]] = {}
    for one in stored(model):
        if one.name not in state:
            raise SpecError(f"checkpoint has no tensor '{one.name}' but {model.name} needs it: give the weights of that model")
        tensor = state[one.name]
        for ours in one.ours:
            found.setdefault(ours, []).append(one.as_ours(tensor[one.where(ours, tuple(tensor.shape))]))
    if model.tied_embeddings:
        found["head.linear.weight"] = found["embed.tokens.weight"]
    return {ours: whole(parts) for ours, parts in found.items()}


def to_hf(state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """The Hugging Face state dict of the whole model, without a tied head, as in their files."""
    return {one.name: one.joined([state[ours] for ours in one.ours]) for one in stored(model)}


def whole_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters and buffers by our name, a tied head once; allocates nothing."""
    with torch.device("meta"):
        module = Transformer(model)
    return {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _names(model: Model) -> Iterator[tuple[str, str]]:
    """Pairs of our name and theirs for every parameter except experts; GPT-2's fused matrix is `attention.qkv`."""
    ends, block = (_ENDS_GPT2, _BLOCK_GPT2) if _is_gpt2(model) else (_ENDS_LLAMA, _BLOCK_LLAMA)
    prefixes = [("", ends), *((f"blocks.{layer}.", block) for layer in range(model.layers))]
    for prefix, parts in prefixes:
        sparse = model.moe is not None and prefix != "" and model.is_moe_layer(int(prefix.split(".")[1]))
        for part in parts:
            if sparse and part.startswith("mlp."):
                continue
            for kind in _kinds(part, model):
                yield f"{prefix}{part}.{kind}", _theirs(f"{prefix}{part}.{kind}", model)


def _kinds(part: str, model: Model) -> list[str]:
    """Which of weight and bias a module of this model has; empty if the model does not have the module."""
    if part in ("attention.q_norm", "attention.k_norm"):
        return ["weight"] if model.qk_norm else []
    biased = (
        (model.norm == "layernorm" and part.endswith("norm"))
        or (model.qkv_bias and part.startswith("attention.qkv"))
        or (model.attention_output_bias and part == "attention.out")
        or (model.mlp_bias and part.startswith("mlp."))
    )
    return ["weight", "bias"] if biased else ["weight"]


def _theirs(ours: str, model: Model) -> str:
    gpt2 = _is_gpt2(model)
    name, kind = ours.rsplit(".", 1)
    if not name.startswith("blocks."):
        return f"{(_ENDS_GPT2 if gpt2 else _ENDS_LLAMA)[name]}.{kind}"
    _, layer, part = name.split(".", 2)
    return f"transformer.h.{layer}.{_BLOCK_GPT2[part]}.{kind}" if gpt2 else f"model.layers.{layer}.{_BLOCK_LLAMA[part]}.{kind}"


def _is_gpt2(model: Model) -> bool:
    if model.positions == "learned" and model.norm == "layernorm" and not model.gated:
        return True
    if model.positions == "rotary" and model.norm == "rmsnorm" and model.gated:
        return False
    raise SpecError(
        f"model {model.name} has positions: {model.positions}, norm: {model.norm} and activation: {model.activation}, "
        f"which no known Hugging Face family has: try rotary, rmsnorm and swiglu, or learned, layernorm and gelu"
    )
