"""Floating-point operations: exact counts by operator, and the conventions in which MFU and HFU are printed."""

from __future__ import annotations

from ultrascale.specs.model import Model
from ultrascale.specs.weights import multiplied_elements


def parameters_approximate(hidden: int, layers: int, vocab: int) -> int:
    """Playbook: N ≈ h·v + L·(12h² + 13h) + 2h, the GPT shape with ffn = 4h, biases and a tied head; positions left out."""
    return hidden * vocab + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def compute_approximate(parameters: float, tokens: float) -> float:
    """Playbook: 6·N·tokens (2 forward, 4 backward). Printed as 6·model_bf16·mbs·seq·gas, where bytes stand for parameters."""
    return 6 * parameters * tokens


def layer_matmul_flops(model: Model, moe: bool) -> float:
    """Forward GEMMs of one layer per token, attention scores left out."""
    return 2.0 * multiplied_elements(model, moe)


def windows(model: Model, seq: int) -> list[tuple[float, int]]:
    """Shares of the layers, and how many tokens their attention sees at most: all of the sequence, or the sliding window.

    Linear attention is none of them.
    """
    window, local = model.sliding_window, model.local_layers / model.layers
    full = 1 - model.linear_layers / model.layers
    if window is None or window >= seq or not local:
        return [(full, seq)]
    return [(local, window)] if local == full else [(full - local, seq), (local, window)]


def score_flops_within(model: Model, seq: int, window: int, causal: bool) -> float:
    """Forward QKᵀ and PV of one layer per token: 2·s·a·(d_qk + d_v), half of it when the mask is counted.

    A sliding window bounds what a token sees; with the causal mask a token sees (s+1)/2 others in the mean, written s/2 here
    as every published convention does.
    """
    attended = window * (1 - window / (2 * seq)) if causal else window
    return 2.0 * attended * model.heads * (model.qk_head_dim + model.v_head_dim)


def score_flops(model: Model, seq: int, causal: bool) -> float:
    """The same in the mean over the layers, of which some may have a sliding window."""
    return sum(share * score_flops_within(model, seq, window, causal) for share, window in windows(model, seq))


DELTA_CHUNK = 64  # tokens that linear attention computes at a time (model/linear_attention.py)


def linear_attention_flops(model: Model) -> float:
    """Forward FLOPs per token of one gated delta rule, projections and convolutions left out.

    Per value head: three matmuls of a chunk's tokens with each other, 2·C·(2·dk + dv); the triangular system for keys and
    values, C·(dk + dv); three matmuls with the state, 6·dk·dv.
    """
    linear = model.linear_attention
    if linear is None:
        return 0.0
    keys, values = linear.key_head_dim, linear.value_head_dim
    each = 2 * DELTA_CHUNK * (2 * keys + values) + DELTA_CHUNK * (keys + values) + 6 * keys * values
    return float(linear.value_heads * each)


def mixer_flops(model: Model, seq: int, causal: bool) -> float:
    """Forward FLOPs per token of attention and linear attention in the mean over the layers, projections left out."""
    return score_flops(model, seq, causal) + model.linear_layers / model.layers * linear_attention_flops(model)


def head_flops(model: Model) -> float:
    return 2.0 * model.hidden * model.vocab


def matmul_flops(model: Model) -> float:
    """Forward FLOPs per token of every layer's matmuls; scores and head left out."""
    return sum(count * layer_matmul_flops(model, moe) for count, moe in ((model.dense_layers, False), (model.moe_layers, True)))


def selective_matmul_flops(model: Model, policy: str) -> float:
    """Forward FLOPs per token of matmuls that selective recomputation repeats: `half` of them, or of dense layers every second
    of qkv, attention's output, gate, up and down (`alternate`).
    """
    if policy == "half" or (policy == "alternate" and (model.moe is not None or model.mla is not None or not model.gated)):
        return matmul_flops(model) / 2
    return model.layers * 2.0 * model.hidden * (model.q_dim + model.ffn) if policy == "alternate" else 0.0


def forward_flops(model: Model, seq: int, causal: bool) -> float:
    """Forward FLOPs per token of the whole model; embedding look-ups are none."""
    return matmul_flops(model) + model.layers * mixer_flops(model, seq, causal) + head_flops(model)


def model_flops(model: Model, seq: int, causal: bool = False) -> float:
    """Forward and backward FLOPs per token, recomputation not counted: the numerator of MFU."""
    return 3 * forward_flops(model, seq, causal)


def hardware_flops(
    model: Model, seq: int, recompute: str, attention: str, causal: bool = False, recomputed: float = 1.0, fused: bool = False
) -> float:
    """The numerator of HFU: model FLOPs plus what `recompute` computes again, in that fraction of the layers.

    In `fused` blocks selective recomputation repeats gate and up.

    Full: a layer's forward once more. Selective keeps matmuls; with plain attention it repeats the
    matmuls of the scores (Korthikanti 2022), with flash attention only memory-bound operators, which count as no FLOPs here.
    Flash attention's own recomputation of scores in backward is the kernel's business and is left out, as FA's authors do.
    """
    base = model_flops(model, seq, causal)
    if recompute == "full":
        return base + recomputed * (forward_flops(model, seq, causal) - head_flops(model))
    if recompute == "selective" and fused:
        return base + recomputed * model.layers * 2.0 * 2 * model.hidden * model.ffn
    if recompute == "selective" and attention == "plain":
        return base + recomputed * model.layers * score_flops(model, seq, causal)
    return base
