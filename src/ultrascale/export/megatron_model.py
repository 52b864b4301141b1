"""Megatron-LM's arguments for the shape of a model: attention, positions, experts, vocabulary."""

from __future__ import annotations

import re
from typing import Any

from ultrascale.export import table as row
from ultrascale.export.fields import Fields
from ultrascale.export.table import PlanFields, Setting, SettingsReader
from ultrascale.specs.errors import SpecError

_DISPATCHERS: dict[str, dict[str, str]] = {
    **{name: {"--moe-token-dispatcher-type": name} for name in ("alltoall", "allgather")},
    **{name: {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": name} for name in ("deepep", "hybridep")},
}
_ROUTERS = {"softmax": "softmax", "sigmoid": "sigmoid"}
_POSITIONS = {"rope": "rotary", "learned_absolute": "learned", "none": "none"}
_LLAMA_CONTEXT = 8192  # what --use-rope-scaling takes as the original context
_YARN_CONTEXT = 4096  # the same of YaRN, for which there is no argument
_TOKENS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}  # where no argument says it
_TOKENS_IN_NAME = re.compile(r"(?<!\d)(\d{2,3})k(?![a-z\d])")
_INTERPOLATION = "--rotary-seq-len-interpolation-factor"
_YARN_FACTOR = "--rotary-scaling-factor"
_DENSE_FIRST = re.compile(r"\(?\[0\]\*(\d{1,5})\+\[1\]\*(\d{1,5})\)?")

has_experts = row.has("model.moe.experts")
has_latents = row.has("model.mla.kv_lora_rank")


def _width(s: SettingsReader) -> int:
    hidden = s["model.hidden"]
    return s.whole("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if s.flag("--swiglu") else 4 * hidden)


def _ffn(s: SettingsReader) -> int:
    return 0 if has_experts(s) and not s["model.moe.dense_layers"] else _width(s)


def _positions(s: SettingsReader) -> str:
    named = s.word("--position-embedding-type", _POSITIONS, "learned_absolute")
    return "rotary" if s.flag("--use-rotary-position-embeddings") else str(named)


def _vocabulary(s: SettingsReader) -> Any:
    """Padded as Megatron pads it."""
    kind = s.value("--tokenizer-type", "GPT2BPETokenizer" if "--merge-file" in s else None)
    named = _TOKENS_IN_NAME.search(str(s.value("--tokenizer-model", "")).rpartition("/")[2])
    if "--padded-vocab-size" in s:
        return s.whole("--padded-vocab-size")
    if "--vocab-size" in s:
        size = s.whole("--vocab-size") + (1 if kind == "NullTokenizer" else 0)
    elif s.world.vocab is not None:
        return s.world.vocab
    elif str(kind) in _TOKENS:
        size = _TOKENS[str(kind)]
        s.notes.append(f"{kind}: its {size:,} tokens are assumed")
    elif named is not None:
        size = 1000 * int(named[1])
        s.notes.append(f"the tokenizer's name says {named[0]}: {size:,} tokens are assumed")
    else:
        raise SpecError(f"{s.where} does not say how many tokens there are: add --vocab-size 128256, or import with --model")
    step = s.whole("--make-vocab-size-divisible-by", 128) * s["layout.tp"]
    padded = -(-size // step) * step
    if padded != size:
        s.notes.append(f"the vocabulary of {size:,} is padded to {padded:,}, a multiple of {step}")
    return padded


def _kv_heads(p: PlanFields) -> dict[str, Any] | None:
    if p.model.kv_heads == p.model.heads:
        return None
    return {"--group-query-attention": True, "--num-query-groups": p.model.kv_heads}


def _read_kv_heads(s: SettingsReader) -> Any:
    grouped, groups = s.flag("--group-query-attention"), s.whole("--num-query-groups", 1)
    return groups if grouped and not has_latents(s) else s["model.heads"]


def _rotary(p: PlanFields) -> dict[str, Any] | None:
    """Scaled as Llama 3 scales, by whole factors of linear interpolation, or with latent attention by YaRN; not for others."""
    if p.model.positions != "rotary":
        return None
    settings, scaling = {"--rotary-base": int(p.model.rope_theta)}, p.model.rope_scaling
    if p.model.mla is not None:
        yarn = scaling if scaling is not None and scaling.rope_type == "yarn" and scaling.attention_factor is None else None
        if yarn is None:
            return {**settings, "--rope-type": "rope"}
        return {
            **settings,
            "--rope-type": "yarn",
            _YARN_FACTOR: yarn.factor,
            "--mscale": 1.0 if yarn.mscale is None else yarn.mscale,
            "--mscale-all-dim": 0.0 if yarn.mscale_all_dim is None else yarn.mscale_all_dim,
        }
    if scaling is not None and scaling.rope_type == "llama3":
        return {**settings, "--use-rope-scaling": True, "--rope-scaling-factor": scaling.factor}
    if scaling is not None and scaling.rope_type == "linear" and scaling.factor.is_integer():
        return {**settings, _INTERPOLATION: int(scaling.factor)}
    return settings


def _read_rotary(s: SettingsReader) -> Fields:
    base, scaled = s.number("--rotary-base", 10000.0), s.flag("--use-rope-scaling")
    factor, slower = s.number("--rope-scaling-factor", 8.0), s.whole(_INTERPOLATION, 1)
    if s["model.positions"] != "rotary":
        return {}
    if scaled and slower > 1:
        raise s.error(
            f"{_INTERPOLATION} is {slower} beside --use-rope-scaling but a plan has one of them: try without the other"
        )
    scaling: Fields = {"rope_type": "linear", "factor": float(slower)} if slower > 1 else {}
    if scaled:
        scaling = {"rope_type": "llama3", "factor": factor, "original_max_positions": _LLAMA_CONTEXT}
    elif has_latents(s):
        scaling = _read_yarn(s) or scaling
    return {"model.rope_theta": base, **{f"model.rope_scaling.{name}": value for name, value in scaling.items()}}


def _read_yarn(s: SettingsReader) -> Fields:
    """Of latent attention, whose positions are YaRN's unless something else is said; a factor of 1 scales nothing."""
    factor, others = s.number(_YARN_FACTOR, 1.0), (s.number("--mscale", 1.0), s.number("--mscale-all-dim", 0.0))
    if s.word("--rope-type", {"rope": False, "yarn": True}, "yarn") is False or factor <= 1:
        return {}
    weights = {} if others == (1.0, 0.0) else dict(zip(("mscale", "mscale_all_dim"), others, strict=True))
    return {"rope_type": "yarn", "factor": factor, "original_max_positions": _YARN_CONTEXT, **weights}


def _activation(p: PlanFields) -> dict[str, Any]:
    kind, biases = p.model.activation, p.model.mlp_bias and p.model.attention_output_bias
    return {
        "--swiglu": kind == "swiglu",
        "--squared-relu": kind == "relu",
        "--no-bias-gelu-fusion": kind == "gelu_exact" and biases,  # the fused kernel has the tanh approximation
        "--disable-bias-linear": not biases,
        "--add-qkv-bias": p.model.qkv_bias and not biases,
    }


def _read_activation(s: SettingsReader) -> Fields:
    swiglu, biases = s.flag("--swiglu"), not s.flag("--disable-bias-linear")
    # Plain gelu is torch's exact one but in the kernel that adds its bias, which needs one and has the tanh approximation.
    fused = biases and not s.flag("--no-bias-gelu-fusion")
    relu, quick = s.flag("--squared-relu"), s.flag("--quick-geglu")
    if sum((swiglu, relu, quick)) > 1:
        raise SpecError(f"{s.where} asks for two activations at once: keep one of --swiglu, --squared-relu and --quick-geglu")
    if relu:
        s.notes.append("--squared-relu is counted as relu, whose cost is the same")
    kind = "swiglu" if swiglu else "relu" if relu else "geglu" if quick else "gelu" if fused else "gelu_exact"
    qkv = biases or s.flag("--add-qkv-bias")
    return {"model.activation": kind, "model.qkv_bias": qkv, "model.attention_output_bias": biases, "model.mlp_bias": biases}


def _read_window(s: SettingsReader) -> int | None:
    if "--window-size" not in s:
        return None
    given = str(s.value("--window-size")).strip("() ")
    left, _, right = given.partition(",")
    if not left.strip().isdigit() or right.strip() not in ("0", "-1"):
        raise s.error(f"--window-size is '{given:.40}' but must look back over so many tokens, such as 4095,0")
    return int(left) + 1


def _layer_pattern(p: PlanFields) -> str | None:
    dense = p["model.moe.dense_layers"]
    return f"([0]*{dense}+[1]*{p.model.layers - dense})" if dense else None


def _dense_layers(s: SettingsReader) -> int:
    pattern, layers = str(s.value("--moe-layer-freq", "1")).replace(" ", ""), s["model.layers"]
    if pattern == "1":
        return 0
    match = _DENSE_FIRST.fullmatch(pattern)
    if match and int(match[1]) + int(match[2]) == layers:
        return int(match[1])
    raise s.error(f"--moe-layer-freq is '{pattern:.40}' but a plan's dense layers come first: try ([0]*1+[1]*{layers - 1})")


def _shared_experts(s: SettingsReader) -> Fields:
    s.ignore("--moe-grouped-gemm")
    shared = s.whole("--moe-shared-expert-intermediate-size", 0, least=0)
    return {"model.moe.shared_experts": 1, "model.moe.shared_expert_ffn": shared} if shared else {}


def _dispatcher(s: SettingsReader) -> str:
    words = {"allgather": "allgather", "alltoall": "alltoall", "alltoall_seq": "alltoall"}
    backend = "deepep" if s.flag("--moe-enable-deepep") else str(s.value("--moe-flex-dispatcher-backend", "deepep"))
    return str(s.word("--moe-token-dispatcher-type", {**words, "flex": backend}, "allgather"))


def _expert_groups(p: PlanFields) -> bool:
    return bool(p["model.moe.groups"] > 1)


def _balancing(p: PlanFields) -> dict[str, Any]:
    """Biases of the router balance by themselves, beside a small loss of each sequence; else a loss of the batch does."""
    if p["model.moe.router_bias"]:
        return {
            "--moe-router-load-balancing-type": "seq_aux_loss",
            "--moe-aux-loss-coeff": 1e-4,
            "--moe-router-bias-update-rate": 1e-3,
        }
    return {"--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 1e-3}


TABLE = (
    row.whole("--num-layers", "model.layers"),
    row.whole("--hidden-size", "model.hidden"),
    row.whole("--num-attention-heads", "model.heads"),
    Setting("--ffn-hidden-size", "model.ffn", lambda p: p.model.ffn or p["model.moe.expert_ffn"] or 0, _ffn),
    Setting(
        "--max-position-embeddings",
        "model.max_positions",
        lambda p: max(p.job.seq, p.model.max_positions or 0),
        lambda s: s.whole("--max-position-embeddings", s["job.seq"]),
    ),
    row.word("--position-embedding-type", "model.positions", _POSITIONS, "learned_absolute", read=_positions),
    row.word("--normalization", "model.norm", {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}, "LayerNorm"),
    row.number("--norm-epsilon", "model.norm_eps", 1e-5),
    # A stand-in tokenizer of one token less than the vocabulary: it adds an end of document itself.
    row.constant("--tokenizer-type", "NullTokenizer"),
    Setting("--vocab-size", "model.vocab", lambda p: p.model.vocab - 1, _vocabulary),
    row.constant("--make-vocab-size-divisible-by", 1),
    row.whole(
        "--kv-channels",
        "model.head_dim",
        lambda s: max(1, s["model.hidden"] // s["model.heads"]),
        when=lambda source: not has_latents(source),
    ),
    row.constant("--multi-latent-attention", True, when=has_latents),
    row.whole(
        "--kv-lora-rank",
        "model.mla.kv_lora_rank",
        read=lambda s: s.whole("--kv-lora-rank", 32) if s.flag("--multi-latent-attention") else None,
    ),
    row.whole("--qk-head-dim", "model.mla.qk_nope_head_dim", 128, when=has_latents),
    row.whole("--qk-pos-emb-head-dim", "model.mla.qk_rope_head_dim", 64, when=has_latents),
    row.whole("--v-head-dim", "model.mla.v_head_dim", 128, when=has_latents),
    Setting(read=lambda s: s.ignore("--kv-channels"), when=has_latents),
    row.optional("--q-lora-rank", "model.mla.q_lora_rank", when=has_latents),
    Setting(path="model.kv_heads", write=_kv_heads, read=_read_kv_heads),
    Setting(write=_rotary, read=_read_rotary),
    Setting(write=_activation, read=_read_activation),
    # With latent attention it norms the latents, which every such model does.
    row.flag(
        "--qk-layernorm",
        "model.qk_norm",
        write=lambda p: p.model.qk_norm or p.model.mla is not None,
        read=lambda s: s.flag("--qk-layernorm") and not has_latents(s),
    ),
    row.flag("--untie-embeddings-and-output-weights", "model.tied_embeddings", on=False, off=True),
    Setting(
        "--window-size",
        "model.sliding_window",
        lambda p: f"{p['model.sliding_window'] - 1},0",
        _read_window,
        written=row.has("model.sliding_window"),
    ),
    row.whole("--num-experts", "model.moe.experts", read=lambda s: s.whole("--num-experts", 0, least=0) or None),
    row.whole("--moe-router-topk", "model.moe.top_k", 2, when=has_experts),
    row.whole("--moe-ffn-hidden-size", "model.moe.expert_ffn", _width, when=has_experts),
    row.word("--moe-router-score-function", "model.moe.router", _ROUTERS, "softmax", when=has_experts),
    Setting(path="layout.dispatcher", write=lambda p: _DISPATCHERS[p.layout.dispatcher], read=_dispatcher, when=has_experts),
    row.constant("--moe-grouped-gemm", True, when=has_experts),
    Setting(write=_balancing, when=has_experts),
    Setting("--moe-layer-freq", "model.moe.dense_layers", _layer_pattern, _dense_layers, has_experts),
    Setting(
        "--moe-shared-expert-intermediate-size",
        write=lambda p: p["model.moe.shared_expert_ffn"] or None,
        read=_shared_experts,
        when=has_experts,
    ),
    row.flag("--moe-router-pre-softmax", "model.moe.renormalize", on=False, off=True, when=has_experts),
    row.whole("--moe-router-num-groups", "model.moe.groups", 1, when=has_experts, written=_expert_groups),
    row.whole("--moe-router-group-topk", "model.moe.top_groups", 1, when=has_experts, written=_expert_groups),
    row.number(
        "--moe-router-topk-scaling-factor",
        "model.moe.scaling",
        1.0,
        when=has_experts,
        written=lambda p: p["model.moe.scaling"] != 1.0,
    ),
    row.flag("--moe-router-enable-expert-bias", "model.moe.router_bias", when=has_experts),
)
