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
_QWEN = {
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
_GPT2 = {
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "head.norm": "transformer.ln_f",
    "head.linear": "lm_head",
    "attention_norm": "ln_1",
    **dict.fromkeys(("attention.qkv.q", "attention.qkv.k", "attention.qkv.v"), "attn.c_attn"),
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.inputs.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LAYERS = {False: "model.layers.{}.", True: "transformer.h.{}."}  # by whether it is GPT-2
_STORED_IN_OUT = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


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
    """Every tensor of the model's files, all experts of one stacked parameter in a row; a tied head is not stored."""
    gpt2 = _is_gpt2(model)
    names = _GPT2 if gpt2 else LLAMA_NAMES if model.moe is None else _MIXTRAL if family_of(model) == "mixtral" else _QWEN
    for layer, shapes in _shapes_by_layer(model):
        prefix, our_prefix = ("", "") if layer is None else (_LAYERS[gpt2].format(layer), f"blocks.{layer}.")
        contained: dict[str, list[str]] = {}
        for ours in shapes:
            part = ours.removeprefix(our_prefix)
            module, kind = (part, "weight") if part in names else part.rsplit(".", 1)
            contained.setdefault(f"{prefix}{names[module]}.{kind}", []).append(ours)
        for theirs, parts in sorted(contained.items(), key=lambda item: "{}" in item[0]):  # experts last
            experts = range(shapes[parts[0]][0]) if "{}" in theirs else (None,)
            transposed = theirs.endswith(_STORED_IN_OUT)
            yield from (HFTensor(theirs.format(expert), tuple(parts), transposed, expert) for expert in experts)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """One of our parameters, from its parts in the stored tensors."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts))


def whole_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters and buffers by our name, a tied head once; allocates nothing."""
    return {name: shape for _, shapes in _shapes_by_layer(model) for name, shape in shapes.items()}


def _shapes_by_layer(model: Model) -> Iterator[tuple[int | None, dict[str, tuple[int, ...]]]]:
    """The same for the ends of the model (None) and for each layer, one by one: a config may claim any number of layers."""
    for layer in (None, *range(model.layers)):
        with torch.device("meta"):
            layers = range(0) if layer is None else range(layer, layer + 1)
            module = Transformer(model, layers, embed=layer is None, head=layer is None)
        yield layer, {name: tuple(one.shape) for name, one in (*module.named_parameters(), *module.named_buffers())}


def _is_gpt2(model: Model) -> bool:
    if model.positions == "learned" and model.norm == "layernorm" and not model.gated:
        return True
    if model.positions == "rotary" and model.norm == "rmsnorm" and model.gated:
        return False
    raise SpecError(
        f"model {model.name} has positions: {model.positions}, norm: {model.norm} and activation: {model.activation}, "
        f"which no known Hugging Face family has: try rotary, rmsnorm and swiglu, or learned, layernorm and gelu"
    )
