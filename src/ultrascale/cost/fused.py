"""Which blocks the engine fuses on a GPU (kernels/fused.py): they keep less for backward, so that memory depends on it."""

from __future__ import annotations

from ultrascale.specs.model import Model


def why_not(model: Model, seq: int) -> str | None:
    """What keeps a model's whole layers from being fused, in words; None: nothing does."""
    if model.moe is not None:
        return f"{model.name} has experts"
    if model.norm != "rmsnorm" or model.activation != "swiglu" or model.positions != "rotary":
        return f"{model.name} is not of RMSNorm, SwiGLU and rotary positions"
    if model.qkv_bias or model.attention_output_bias or model.mlp_bias or model.qk_norm:
        return f"{model.name} has biases, or norms of queries and keys"
    if model.sliding_window is not None and model.sliding_window < seq:
        return f"attention sees a window of {model.sliding_window} tokens"
    if model.head_dim & (model.head_dim - 1):
        return f"heads of {model.head_dim} are no power of two"
    return None
