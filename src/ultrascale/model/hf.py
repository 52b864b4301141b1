"""Our parameter names and those of Hugging Face checkpoints, both ways.

Two families of names: Llama's (Mistral, Mixtral and Qwen too), tensor for tensor, but for experts: ours are stacked, theirs
stored one by one; and GPT-2's, whose products are stored [in, out] and whose queries, keys and values are one matrix.
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
    """One tensor of a Hugging Face file, and which of our parameters it holds."""

    name: str
    ours: tuple[str, ...]
    """one, or GPT-2's queries, keys and values side by side"""
    turned: bool
    """stored [in, out]; ours are [out, in]"""
    expert: int | None = None
    """which of ours it is, where ours are stacked"""

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Of the stored tensor, from the shapes of ours."""
        outputs, *rest = shapes[self.ours[0]][0 if self.expert is None else 1 :]
        joined = (outputs * len(self.ours), *rest)
        return joined[::-1] if self.turned else joined

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The stored tensor, from ours in their order."""
        if self.expert is not None:
            return parts[0][self.expert]
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return whole.t().contiguous() if self.turned else whole

    def where(self, ours: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """The piece of the stored tensor, which has that shape, that holds one of ours."""
        outputs = shape[-1 if self.turned else 0] // len(self.ours)
        first = self.ours.index(ours) * outputs
        piece = slice(first, first + outputs)
        return (slice(None), piece) if self.turned else (piece,)

    def as_ours(self, piece: Tensor) -> Tensor:
        return piece.t() if self.turned else piece


def stored(model: Model) -> Iterator[HFTensor]:
    """Every tensor of the model's files; a tied head is not among them."""
    gpt2 = _is_gpt2(model)
    for ours, theirs in _names(model):
        if ours == "head.linear.weight" and model.tied_embeddings:
            continue
        stem, kind = ours.rsplit(".", 1)
        fused = gpt2 and stem.endswith("attention.qkv")
        held = tuple(f"{stem}.{name}.{kind}" for name in "qkv") if fused else (ours,)
        yield HFTensor(theirs, held, gpt2 and kind == "weight" and stem.endswith(_STORED_IN_OUT))
    if model.moe is not None:
        yield from _stored_experts(model, model.moe)


def _stored_experts(model: Model, moe: MoE) -> Iterator[HFTensor]:
    """Router and experts of every layer that has them; all experts of one of ours in a row, as a writer wants them."""
    names = _MLP_MIXTRAL if family_of(model) == "mixtral" else {**_MLP_QWEN, **(_SHARED_QWEN if moe.shared_experts else {})}
    for layer in range(moe.dense_layers, model.layers):
        for ours, theirs in names.items():
            name, held = f"model.layers.{layer}.{theirs}", (f"blocks.{layer}.{ours}",)
            if "{}" in theirs:
                yield from (HFTensor(name.format(expert), held, False, expert) for expert in range(moe.experts))
            else:
                yield HFTensor(name, held, False)


def whole(parts: Sequence[Tensor]) -> Tensor:
    """One of our parameters, from what each tensor that holds some of it holds."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts))


def from_hf(state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Our state dict; tensors are views of the given ones, but for experts."""
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
    """The Hugging Face state dict of the whole model; a tied head is left out, as their files do."""
    return {one.name: one.joined([state[ours] for ours in one.ours]) for one in stored(model)}


def whole_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Everything that is kept, by our name, a tied head once, without memory for any."""
    with torch.device("meta"):
        module = Transformer(model)
    return {name: tuple(tensor.shape) for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _names(model: Model) -> Iterator[tuple[str, str]]:
    """Every parameter of the whole model but experts, ours and theirs; GPT-2's fused matrix as `attention.qkv`."""
    ends, block = (_ENDS_GPT2, _BLOCK_GPT2) if _is_gpt2(model) else (_ENDS_LLAMA, _BLOCK_LLAMA)
    places = [("", ends), *((f"blocks.{layer}.", block) for layer in range(model.layers))]
    for prefix, parts in places:
        sparse = model.moe is not None and prefix != "" and model.is_moe_layer(int(prefix.split(".")[1]))
        for part in parts:
            if sparse and part.startswith("mlp."):
                continue
            for kind in _kinds(part, model):
                yield f"{prefix}{part}.{kind}", _theirs(f"{prefix}{part}.{kind}", model)


def _kinds(part: str, model: Model) -> list[str]:
    """Which of weight and bias a part of this model has; none where the part itself is missing."""
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
