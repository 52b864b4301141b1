"""A model in Megatron-LM's arguments, and back (its megatron/training/arguments.py, core 0.15 and 0.16)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ultrascale.export.fields import Fields
from ultrascale.export.keys import Keys
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import MLA, Model, MoE, RopeScaling

Arguments = dict[str, Any]
CONTEXT = {"zigzag": "p2p", "allgather": "allgather", "ulysses": "a2a"}  # p2p is the balanced ring
SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
STATES = {"adamw": "fp32", "adamw-bf16": "bf16", "adamw-8bit": "fp8"}
_POSITIONS = {"rope": "rotary", "learned_absolute": "learned", "none": "none"}
_LLAMA_CONTEXT = 8192  # what --use-rope-scaling takes as the original context
_INTERPOLATION = "--rotary-seq-len-interpolation-factor"
_PATTERN = re.compile(r"\(?\[0\]\*(\d{1,5})\+\[1\]\*(\d{1,5})\)?")


@dataclass(frozen=True)
class Script:
    """The arguments after pretrain_gpt.py, and what the launcher says before it."""

    arguments: Arguments
    nodes: int | None
    gpus_per_node: int | None


def arguments(model: Model, seq: int, tp: int) -> Arguments:
    found: Arguments = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--num-attention-heads": model.heads,
        "--ffn-hidden-size": model.ffn or (model.moe.expert_ffn if model.moe else 0),
        "--max-position-embeddings": max(seq, model.max_positions or 0),
        "--position-embedding-type": {ours: theirs for theirs, ours in _POSITIONS.items()}[model.positions],
        "--normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "--norm-epsilon": model.norm_eps,
        # A stand-in tokenizer of one token less than the vocabulary: it adds an end of document itself.
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": model.vocab - 1,
        "--make-vocab-size-divisible-by": 1,
    }
    if model.mla is None:
        found |= {"--kv-channels": model.head_dim}
    else:
        found |= _latent(model.mla)
    if model.kv_heads != model.heads:
        found |= {"--group-query-attention": True, "--num-query-groups": model.kv_heads}
    if model.positions == "rotary":
        found["--rotary-base"] = int(model.rope_theta)
        if model.rope_scaling is not None:
            found |= _scaled_rotary(model.rope_scaling)
    if model.activation in ("swiglu", "relu"):
        found["--swiglu" if model.activation == "swiglu" else "--squared-relu"] = True
    elif model.activation == "gelu_exact" and model.mlp_bias and model.attention_output_bias:
        found["--no-bias-gelu-fusion"] = True  # the fused kernel has the tanh approximation
    if not (model.mlp_bias and model.attention_output_bias):
        found["--disable-bias-linear"] = True
        if model.qkv_bias:
            found["--add-qkv-bias"] = True
    if model.qk_norm:
        found["--qk-layernorm"] = True
    if not model.tied_embeddings:
        found["--untie-embeddings-and-output-weights"] = True
    if model.sliding_window is not None:
        found["--window-size"] = f"{model.sliding_window - 1},0"
    return found | (_experts(model, model.moe) if model.moe else {})


def _scaled_rotary(scaling: RopeScaling) -> Arguments:
    """Llama 3's scaling, and whole factors of linear interpolation; nothing for others."""
    if scaling.rope_type == "llama3":
        return {"--use-rope-scaling": True, "--rope-scaling-factor": scaling.factor}
    if scaling.rope_type == "linear" and scaling.factor.is_integer():
        return {_INTERPOLATION: int(scaling.factor)}
    return {}


def _latent(mla: MLA) -> Arguments:
    found: Arguments = {
        "--multi-latent-attention": True,
        "--kv-lora-rank": mla.kv_lora_rank,
        "--qk-head-dim": mla.qk_nope_head_dim,
        "--qk-pos-emb-head-dim": mla.qk_rope_head_dim,
        "--v-head-dim": mla.v_head_dim,
        "--rope-type": "rope",
    }
    return found | ({"--q-lora-rank": mla.q_lora_rank} if mla.q_lora_rank else {})


def _experts(model: Model, moe: MoE) -> Arguments:
    found: Arguments = {
        "--num-experts": moe.experts,
        "--moe-router-topk": moe.top_k,
        "--moe-ffn-hidden-size": moe.expert_ffn,
        "--moe-router-score-function": moe.router,
        "--moe-token-dispatcher-type": "alltoall",
        "--moe-grouped-gemm": True,
    }
    if moe.dense_layers:
        found["--moe-layer-freq"] = f"([0]*{moe.dense_layers}+[1]*{model.layers - moe.dense_layers})"
    if moe.shared_experts:
        found["--moe-shared-expert-intermediate-size"] = moe.shared_expert_ffn
    if not moe.renormalize:
        found["--moe-router-pre-softmax"] = True
    if moe.groups > 1:
        found |= {"--moe-router-num-groups": moe.groups, "--moe-router-group-topk": moe.top_groups}
    if moe.scaling != 1.0:
        found["--moe-router-topk-scaling-factor"] = moe.scaling
    if moe.router_bias:
        found["--moe-router-enable-expert-bias"] = True
    return found


def read(keys: Keys, seq: int, tp: int, vocab: int | None, notes: list[str]) -> Fields:
    layers, heads = keys.whole("--num-layers"), keys.whole("--num-attention-heads")
    hidden, swiglu = keys.whole("--hidden-size"), keys.flag("--swiglu")
    grouped = keys.flag("--group-query-attention")
    groups = keys.whole("--num-query-groups", 1)
    width = keys.whole("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden)
    biases = not keys.flag("--disable-bias-linear")
    positions = keys.word("--position-embedding-type", _POSITIONS, "learned_absolute")
    if keys.flag("--use-rotary-position-embeddings"):
        positions = "rotary"
    fields: Fields = {
        "model.layers": layers,
        "model.hidden": hidden,
        "model.heads": heads,
        "model.kv_heads": groups if grouped else heads,
        "model.ffn": width,
        "model.vocab": _vocabulary(keys, tp, vocab, notes),
        "model.activation": _activation(keys, swiglu, biases, notes),
        "model.norm": keys.word("--normalization", {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}, "LayerNorm"),
        "model.norm_eps": keys.number("--norm-epsilon", 1e-5),
        "model.positions": positions,
        "model.max_positions": keys.whole("--max-position-embeddings", seq),
        "model.tied_embeddings": not keys.flag("--untie-embeddings-and-output-weights"),
        "model.qkv_bias": biases or keys.flag("--add-qkv-bias"),
        "model.attention_output_bias": biases,
        "model.mlp_bias": biases,
        "model.qk_norm": keys.flag("--qk-layernorm"),
    }
    fields |= _read_rotary(keys, positions) | _read_attention(keys, hidden, heads)
    if "--window-size" in keys:
        fields["model.sliding_window"] = _window(keys)
    if keys.whole("--num-experts", 0, least=0):
        fields |= _read_experts(keys, layers, width)
    return fields


def _read_rotary(keys: Keys, positions: str) -> Fields:
    base, scaled = keys.number("--rotary-base", 10000.0), keys.flag("--use-rope-scaling")
    factor, slower = keys.number("--rope-scaling-factor", 8.0), keys.whole(_INTERPOLATION, 1)
    if positions != "rotary":
        return {}
    if scaled and slower > 1:
        raise SpecError(
            f"{keys.where}: {_INTERPOLATION} is {slower} beside --use-rope-scaling but a plan has one of them: "
            "try without the other"
        )
    if not scaled and slower == 1:
        return {"model.rope_theta": base}
    scaling: Fields = {"rope_type": "linear", "factor": float(slower)}
    if scaled:
        scaling = {"rope_type": "llama3", "factor": factor, "original_max_positions": _LLAMA_CONTEXT}
    return {"model.rope_theta": base, **{f"model.rope_scaling.{name}": value for name, value in scaling.items()}}


def _read_attention(keys: Keys, hidden: int, heads: int) -> Fields:
    if not keys.flag("--multi-latent-attention"):
        return {"model.head_dim": keys.whole("--kv-channels", max(1, hidden // heads))}
    fields: Fields = {
        "model.kv_heads": heads,
        "model.mla.kv_lora_rank": keys.whole("--kv-lora-rank", 32),
        "model.mla.qk_nope_head_dim": keys.whole("--qk-head-dim", 128),
        "model.mla.qk_rope_head_dim": keys.whole("--qk-pos-emb-head-dim", 64),
        "model.mla.v_head_dim": keys.whole("--v-head-dim", 128),
    }
    keys.passed("--rope-type", "--kv-channels")
    if "--q-lora-rank" in keys:
        fields["model.mla.q_lora_rank"] = keys.whole("--q-lora-rank")
    return fields


def _read_experts(keys: Keys, layers: int, width: int) -> Fields:
    dense = _dense_layers(keys, layers)
    fields: Fields = {
        "model.ffn": width if dense else 0,
        "model.moe.experts": keys.whole("--num-experts"),
        "model.moe.top_k": keys.whole("--moe-router-topk", 2),
        "model.moe.expert_ffn": keys.whole("--moe-ffn-hidden-size", width),
        "model.moe.dense_layers": dense,
        "model.moe.router": keys.word("--moe-router-score-function", {"softmax": "softmax", "sigmoid": "sigmoid"}, "softmax"),
        "model.moe.renormalize": not keys.flag("--moe-router-pre-softmax"),
        "model.moe.router_bias": keys.flag("--moe-router-enable-expert-bias"),
        "model.moe.scaling": keys.number("--moe-router-topk-scaling-factor", 1.0),
        "model.moe.groups": keys.whole("--moe-router-num-groups", 1),
        "model.moe.top_groups": keys.whole("--moe-router-group-topk", 1),
    }
    shared = keys.whole("--moe-shared-expert-intermediate-size", 0, least=0)
    keys.passed("--moe-token-dispatcher-type", "--moe-grouped-gemm")
    return fields | ({"model.moe.shared_experts": 1, "model.moe.shared_expert_ffn": shared} if shared else {})


def _dense_layers(keys: Keys, layers: int) -> int:
    pattern = str(keys.value("--moe-layer-freq", "1")).replace(" ", "")
    if pattern == "1":
        return 0
    match = _PATTERN.fullmatch(pattern)
    if match and int(match[1]) + int(match[2]) == layers:
        return int(match[1])
    raise SpecError(
        f"{keys.where}: --moe-layer-freq is '{pattern:.40}' but a plan's dense layers come first: try ([0]*1+[1]*{layers - 1})"
    )


def _window(keys: Keys) -> int:
    given = str(keys.value("--window-size")).strip("() ")
    left, _, right = given.partition(",")
    if not left.strip().isdigit() or right.strip() not in ("0", "-1"):
        raise SpecError(f"{keys.where}: --window-size is '{given:.40}' but must look back over so many tokens, such as 4095,0")
    return int(left) + 1


def _activation(keys: Keys, swiglu: bool, biases: bool, notes: list[str]) -> str:
    # Plain gelu is torch's exact one but in the kernel that adds its bias, which needs one and has the tanh approximation.
    fused = biases and not keys.flag("--no-bias-gelu-fusion")
    relu, quick = keys.flag("--squared-relu"), keys.flag("--quick-geglu")
    if sum((swiglu, relu, quick)) > 1:
        raise SpecError(
            f"{keys.where} asks for two activations at once: keep one of --swiglu, --squared-relu and --quick-geglu"
        )
    if relu:
        notes.append("--squared-relu is counted as relu, whose cost is the same")
    return "swiglu" if swiglu else "relu" if relu else "geglu" if quick else "gelu" if fused else "gelu_exact"


def _vocabulary(keys: Keys, tp: int, known: int | None, notes: list[str]) -> int:
    """Padded as Megatron pads it."""
    kind = keys.value("--tokenizer-type")
    if "--padded-vocab-size" in keys:
        return keys.whole("--padded-vocab-size")
    if "--vocab-size" in keys:
        size = keys.whole("--vocab-size") + (1 if kind == "NullTokenizer" else 0)
    elif kind == "GPT2BPETokenizer":
        size = 50257
        notes.append("GPT2BPETokenizer: its 50,257 tokens are assumed")
    elif known is not None:
        return known
    else:
        raise SpecError(f"{keys.where} does not say how many tokens there are: add --vocab-size 128256, or import with --model")
    step = keys.whole("--make-vocab-size-divisible-by", 128) * tp
    padded = -(-size // step) * step
    if padded != size:
        notes.append(f"the vocabulary of {size:,} is padded to {padded:,}, a multiple of {step}")
    return padded
