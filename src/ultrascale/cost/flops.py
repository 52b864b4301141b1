"""Floating-point operations: exact counts by operator, and the conventions in which MFU and HFU are printed."""

from __future__ import annotations

from ultrascale.specs.model import Model


def parameters_approximate(hidden: int, layers: int, vocab: int) -> int:
    """Playbook: N ≈ h·v + L·(12h² + 13h) + 2h, the GPT shape with ffn = 4h, biases and a tied head; positions left out."""
    return hidden * vocab + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def compute_approximate(parameters: float, tokens: float) -> float:
    """Playbook: 6·N·tokens (2 forward, 4 backward). Printed as 6·model_bf16·mbs·seq·gas, where bytes stand for parameters."""
    return 6 * parameters * tokens


def attention_projection_flops(model: Model) -> float:
    """Forward, per token and layer: every matrix of attention outside the score product."""
    h = model.hidden
    if model.mla is None:
        return 2.0 * h * (2 * model.q_dim + 2 * model.kv_dim)
    mla = model.mla
    query = model.heads * model.qk_head_dim
    query_path = h * query if mla.q_lora_rank is None else mla.q_lora_rank * (h + query)
    latent = h * (mla.kv_lora_rank + mla.qk_rope_head_dim)
    expand = mla.kv_lora_rank * model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return 2.0 * (query_path + latent + expand + model.heads * mla.v_head_dim * h)


def mlp_flops(model: Model, width: int) -> float:
    """Forward, per token: two matrices, or three when gated."""
    return 2.0 * model.hidden * width * (3 if model.gated else 2)


def layer_matmul_flops(model: Model, moe: bool) -> float:
    """Forward matrix products of one layer per token, attention scores left out."""
    if not moe:
        return attention_projection_flops(model) + mlp_flops(model, model.ffn)
    assert model.moe is not None
    shared = (model.moe.shared_experts and model.moe.shared_expert_ffn) or 0
    experts = model.moe.top_k * mlp_flops(model, model.moe.expert_ffn) + mlp_flops(model, shared)
    return attention_projection_flops(model) + experts + 2.0 * model.hidden * model.moe.experts


def score_flops(model: Model, seq: int, causal: bool) -> float:
    """Forward QKᵀ and PV of one layer per token: 2·s·a·(d_qk + d_v), half of it when the mask is counted.

    A sliding window bounds what a token sees; with the causal mask a token sees (s+1)/2 others in the mean, written s/2 here
    as every published convention does.
    """
    seen = seq / 2 if causal else seq
    if model.sliding_window is not None and model.sliding_window < seq:
        window = model.sliding_window
        seen = window * (1 - window / (2 * seq)) if causal else window
    return 2.0 * seen * model.heads * (model.qk_head_dim + model.v_head_dim)


def head_flops(model: Model) -> float:
    return 2.0 * model.hidden * model.vocab


def head_in_layers(model: Model) -> float:
    """What the head weighs against a layer: the last pipeline stage gets that many layers less."""
    return head_flops(model) / layer_matmul_flops(model, model.moe is not None and model.moe_layers > 0)


def products_flops(model: Model) -> float:
    """Forward FLOPs per token of every layer's matrix products; scores and head left out."""
    dense = model.dense_layers * layer_matmul_flops(model, moe=False) if model.dense_layers else 0.0
    moe = model.moe_layers * layer_matmul_flops(model, moe=True) if model.moe_layers else 0.0
    return dense + moe


def forward_flops(model: Model, seq: int, causal: bool) -> float:
    """Forward FLOPs per token of the whole model; embedding look-ups are none."""
    return products_flops(model) + model.layers * score_flops(model, seq, causal) + head_flops(model)


def model_flops(model: Model, seq: int, causal: bool = False) -> float:
    """Forward and backward FLOPs per token, recomputation not counted: the numerator of MFU."""
    return 3 * forward_flops(model, seq, causal)


def hardware_flops(model: Model, seq: int, recompute: str, attention: str, causal: bool = False) -> float:
    """The numerator of HFU: model FLOPs plus what `recompute` computes again.

    Full: every layer's forward once more. Selective keeps the products of matrices; with plain attention it repeats the
    score products (Korthikanti 2022), with flash attention only memory-bound operators, which count as no FLOPs here.
    Flash attention's own recomputation of scores in backward is the kernel's business and is left out, as FA's authors do.
    """
    base = model_flops(model, seq, causal)
    if recompute == "full":
        return base + forward_flops(model, seq, causal) - head_flops(model)
    if recompute == "selective" and attention == "plain":
        return base + model.layers * score_flops(model, seq, causal)
    return base
