"""The model as a Hugging Face config.json, for engines that take their model from there."""

from __future__ import annotations

import json

from ultrascale.export.common import File
from ultrascale.specs.errors import SpecError
from ultrascale.specs.hf_config import ARCHITECTURES, config_of, family_of
from ultrascale.specs.model import Model

_BLOCKS = {
    "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "qwen2_moe": "Qwen2MoeDecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
    "gpt2": "GPT2Block",
}
assert set(_BLOCKS) == set(ARCHITECTURES)


def config(model: Model) -> tuple[File, ...]:
    """model/config.json, or nothing where no family of transformers computes what the model says."""
    try:
        fields = config_of(model, "bf16")
    except SpecError:
        return ()
    return (File("model/config.json", json.dumps(fields, indent=2, ensure_ascii=True) + "\n"),)


def block_class(model: Model) -> str | None:
    """The class of one of its layers in transformers."""
    try:
        return _BLOCKS[family_of(model)]
    except SpecError:
        return None
