"""Models of the GPU benchmarks, and the same as arguments of torchtitan's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ultrascale import Model
from ultrascale.specs.blocks import MoE

# Shapes of Llama 3.2, the embedding and the head each with a matrix of their own.
MODELS = {
    "1b": Model(
        name="llama-1b-untied", layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64, vocab=128256,
        rope_theta=500000.0,
    ),
    "3b": Model(
        name="llama-3b-untied", layers=28, hidden=3072, ffn=8192, heads=24, kv_heads=8, head_dim=128, vocab=128256,
        rope_theta=500000.0,
    ),
    "moe": Model(  # 1b with eight experts in the place of its MLP, of which a token visits two of half its width
        name="llama-1b-experts", layers=16, hidden=2048, ffn=0, heads=32, kv_heads=8, head_dim=64, vocab=128256,
        rope_theta=500000.0, moe=MoE(experts=8, top_k=2, expert_ffn=4096),
    ),
}  # fmt: skip
_LLAMA_8B = Model.load("llama-3-8b")
FLAVORS = {
    **MODELS,
    "8b": _LLAMA_8B,
    "8b-16": _LLAMA_8B.model_copy(update={"layers": 16}),  # half of its layers
}
"""models that torchtitan is rehearsed with, by the names of flavors"""


def titan_arguments(model: Model, seq: int, kind: Callable[..., Any]) -> Any:
    common = {
        "dim": model.hidden, "n_layers": model.layers, "n_heads": model.heads, "n_kv_heads": model.kv_heads,
        "vocab_size": model.vocab, "rope_theta": model.rope_theta, "max_seq_len": seq,
    }  # fmt: skip
    if model.moe is None:  # it writes a layer's width as a multiple of two thirds of four times the hidden size, rounded up
        return kind(**common, multiple_of=256, ffn_dim_multiplier=model.ffn / int(8 * model.hidden / 3))
    from torchtitan.models.moe import MoEArgs

    moe = MoEArgs(
        num_experts=model.moe.experts, num_shared_experts=0, score_func="softmax", route_norm=model.moe.renormalize,
        score_before_experts=False, top_k=model.moe.top_k,
    )  # fmt: skip
    return kind(
        **common, head_dim=model.head_dim, qk_norm=model.qk_norm, moe_enabled=True, moe_inter_dim=model.moe.expert_ffn,
        moe_args=moe,
    )  # fmt: skip
