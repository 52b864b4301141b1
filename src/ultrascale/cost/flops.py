"""Floating-point operations: exact counts by operator, and the conventions in which MFU and HFU are printed."""

from __future__ import annotations

from ultrascale.specs.blocks import LayerKind
from ultrascale.specs.model import Model
from ultrascale.specs.weights import multiplied_elements


def parameters_approximate(hidden: int, layers: int, vocab: int) -> int:
    """Playbook: N ≈ h·v + L·(12h² + 13h) + 2h, the GPT shape with ffn = 4h, biases and a tied head; positions left out."""
    return hidden * vocab + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def compute_approximate(parameters: float, tokens: float) -> float:
    """Playbook: 6·N·tokens (2 forward, 4 backward). Printed as 6·model_bf16·mbs·seq·gas, where bytes stand for parameters."""
    return 6 * parameters * tokens


def layer_matmul_flops(model: Model, kind: LayerKind) -> float:
    """Forward GEMMs of one layer per token, attention scores left out."""
    return 2.0 * multiplied_elements(model, kind)


def score_flops(model: Model, seq: int, causal: bool, local: bool) -> float:
    """Forward QKᵀ and PV of one layer per token: 2·s·a·(d_qk + d_v), half of it when the mask is counted.

    A sliding window bounds what a token of a `local` layer sees; with the causal mask a token sees (s+1)/2 others in the mean,
    written s/2 here as every published convention does. Chunks of the sequence are sequences of their own.
    """
    window = reach(model, seq, local)
    if model.chunked_window:
        chunks, rest = divmod(seq, window)
        attended = (chunks * window**2 + rest**2) / seq / (2 if causal else 1)
    else:
        attended = window * (1 - window / (2 * seq)) if causal else window
    return 2.0 * attended * model.heads * (model.qk_head_dim + model.v_head_dim)


def reach(model: Model, seq: int, local: bool) -> int:
    """How many tokens one of a layer's tokens sees at most: all of the sequence, or the sliding window."""
    return min(seq, model.sliding_window) if local and model.sliding_window is not None else seq


MAMBA_SEGMENT = 1024  # tokens of a sequence that Mamba-2 computes together (model/mamba.py)
DELTA_CHUNK = 64  # tokens that linear attention and Mamba-2 compute at a time (model/linear_attention.py)


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


def mamba_flops(model: Model) -> float:
    """Forward FLOPs per token of one Mamba-2 layer, projections and convolutions left out.

    Per group the scores of a chunk's tokens, 2·C·n; per head their values, 2·C·p, and two matmuls with the state, 4·n·p.
    """
    mamba = model.mamba
    if mamba is None:
        return 0.0
    states, width = mamba.state_dim, mamba.head_dim
    return float(mamba.groups * 2 * DELTA_CHUNK * states + mamba.heads * (2 * DELTA_CHUNK * width + 4 * states * width))


def mixer_flops(model: Model, kind: LayerKind, seq: int, causal: bool) -> float:
    """Forward FLOPs per token of one layer's attention, or of what is in its place, projections left out."""
    if kind.mixer == "attention":
        return score_flops(model, seq, causal, kind.local)
    return {"linear": linear_attention_flops(model), "mamba": mamba_flops(model), "none": 0.0}[kind.mixer]


def mixers_flops(model: Model, seq: int, causal: bool) -> float:
    """The same of all layers."""
    return sum(count * mixer_flops(model, kind, seq, causal) for kind, count in model.layer_kinds.items())


def head_flops(model: Model) -> float:
    """Of the next token, and of each further one that is predicted."""
    return (1 + model.mtp_depth) * 2.0 * model.hidden * model.vocab


def matmul_flops(model: Model) -> float:
    """Forward FLOPs per token of every layer's matmuls; scores and head left out."""
    return sum(count * layer_matmul_flops(model, kind) for kind, count in model.layer_kinds.items())


def forward_flops(model: Model, seq: int, causal: bool) -> float:
    """Forward FLOPs per token of the whole model; embedding look-ups are none."""
    return matmul_flops(model) + mixers_flops(model, seq, causal) + head_flops(model)


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
        scores = {kind: score_flops(model, seq, causal, kind.local) for kind in model.layer_kinds if kind.mixer == "attention"}
        return base + recomputed * sum(each * model.layer_kinds[kind] for kind, each in scores.items())
    return base
