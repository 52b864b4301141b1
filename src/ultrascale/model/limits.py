"""Architectures that the transformer of this room does not have. No torch."""

from __future__ import annotations

from ultrascale.specs.model import Model


def problem(model: Model) -> str | None:
    """Why the model cannot be trained here, with what to try; None if it can."""
    if model.mla is not None:
        return f"model.mla is set ({model.name}) but the engine has no latent attention: try qwen3-30b-a3b or tiny-moe"
    if model.moe is not None and model.mlp_bias:
        return f"model.mlp_bias is true ({model.name}) but the engine's experts have no biases: try false"
    if model.positions == "rotary" and model.head_dim % 2:
        return f"model.head_dim is {model.head_dim} but rotary positions turn pairs of numbers: try {model.head_dim + 1}"
    return None
