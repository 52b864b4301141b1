"""Our parameter names and those of Hugging Face checkpoints, both ways.

Two families of names: Llama's (Mistral, Qwen2 and Qwen3 too), tensor for tensor; and GPT-2's, whose products are stored
[in, out] and whose queries, keys and values are one matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model

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


def from_hf(state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Our state dict; tensors are views of the given ones where nothing but the name changes."""
    gpt2 = _is_gpt2(model)
    found: dict[str, Tensor] = {}
    for ours, theirs in _names(model):
        # Tied checkpoints store the matrix once, under the embedding's name.
        key = theirs if theirs in state or ours != "head.linear.weight" else _theirs("embed.tokens.weight", model)
        if key not in state:
            raise SpecError(f"checkpoint has no tensor '{key}' but {model.name} needs it: give the weights of that model")
        tensor = _turned(ours, state[key]) if gpt2 else state[key]
        if gpt2 and ".attention.qkv." in ours:
            found.update(_split(ours, tensor))
        else:
            found[ours] = tensor
    return found


def to_hf(state: Mapping[str, Tensor], model: Model) -> dict[str, Tensor]:
    """The Hugging Face state dict of the whole model; a tied head is left out, as their files do."""
    gpt2 = _is_gpt2(model)
    made: dict[str, Tensor] = {}
    for ours, theirs in _names(model):
        if ours == "head.linear.weight" and model.tied_embeddings:
            continue
        tensor = torch.cat(_parts(ours, state)) if gpt2 and ".attention.qkv." in ours else state[ours]
        made[theirs] = _turned(ours, tensor).contiguous() if gpt2 else tensor
    return made


def _names(model: Model) -> Iterator[tuple[str, str]]:
    """Every parameter of the whole model, ours and theirs; GPT-2's fused matrix as `attention.qkv`."""
    ends, block = (_ENDS_GPT2, _BLOCK_GPT2) if _is_gpt2(model) else (_ENDS_LLAMA, _BLOCK_LLAMA)
    places = [("", ends), *((f"blocks.{layer}.", block) for layer in range(model.layers))]
    for prefix, parts in places:
        for part in parts:
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
    if model.positions == "learned" and model.norm == "layernorm" and model.activation == "gelu":
        return True
    if model.positions == "rotary" and model.norm == "rmsnorm" and model.gated:
        return False
    raise SpecError(
        f"model {model.name} has positions: {model.positions}, norm: {model.norm} and activation: {model.activation}, "
        f"which no known Hugging Face family has: try rotary, rmsnorm and swiglu, or learned, layernorm and gelu"
    )


def _turned(ours: str, tensor: Tensor) -> Tensor:
    stored_in_out = ours.endswith(tuple(f"{part}.weight" for part in _STORED_IN_OUT))
    return tensor.t() if stored_in_out else tensor


def _split(ours: str, tensor: Tensor) -> dict[str, Tensor]:
    stem, kind = ours.rsplit(".", 1)
    return {f"{stem}.{name}.{kind}": part for name, part in zip("qkv", tensor.chunk(3), strict=True)}


def _parts(ours: str, state: Mapping[str, Tensor]) -> list[Tensor]:
    stem, kind = ours.rsplit(".", 1)
    return [state[f"{stem}.{name}.{kind}"] for name in "qkv"]
