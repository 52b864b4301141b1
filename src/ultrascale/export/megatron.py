"""Megatron-LM: a script that starts pretrain_gpt.py (its megatron/training/arguments.py, core 0.15 and 0.16).

Any such script is read; none is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from ultrascale.export import header, shell
from ultrascale.export import table as row
from ultrascale.export.common import EngineFormat, File, quoted
from ultrascale.export.fields import Fields
from ultrascale.export.table import OtherSettings, PlanFields, Setting, SettingsReader, World
from ultrascale.schedules import REGISTRY
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import mapping_of
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import RopeScaling

TITLE = "Megatron-LM"
_SCHEDULES = tuple(spec for spec in REGISTRY.values() if spec.runs_in("megatron"))  # by the stages of a rank
_CONTEXT = {"p2p": "zigzag", "allgather": "allgather", "a2a": "ulysses", "all_gather": "allgather"}  # p2p: balanced ring
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
_STATES = {"fp32": "adamw", "bf16": "adamw-bf16", "fp8": "adamw-8bit", "fp16": "adamw-bf16"}
_ROUTERS = {"softmax": "softmax", "sigmoid": "sigmoid"}
_POSITIONS = {"rope": "rotary", "learned_absolute": "learned", "none": "none"}
_BACKENDS = {"flash": "flash", "fused": "flash", "auto": "flash", "unfused": "plain", "local": "plain"}
_LLAMA_CONTEXT = 8192  # what --use-rope-scaling takes as the original context
_RECOMPUTE: row.Cases = {
    "selective": {"--recompute-granularity": "selective"},
    "full": {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1},
}
_PRECISIONS: row.Cases = {
    "bf16": {"--bf16": True},
    "fp8": {"--bf16": True, "--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"},
    "fp16": {"--fp16": True},
}
_NODES, _GPUS = "nodes", "gpus_per_node"  # of the launcher
ARGUMENTS = "MODEL_ARGS"  # the arguments in a model_config.yaml of its functional tests
_TOKENS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}  # where no argument says it
_TOKENS_IN_NAME = re.compile(r"(?<!\d)(\d{2,3})k(?![a-z\d])")
_INTERPOLATION = "--rotary-seq-len-interpolation-factor"
_DENSE_FIRST = re.compile(r"\(?\[0\]\*(\d{1,5})\+\[1\]\*(\d{1,5})\)?")
_SBATCH = re.compile(r"^#SBATCH\s+--?([\w-]+)[= ]\s*(\S+)", re.MULTILINE)

_experts = row.has("model.moe.experts")
_latent = row.has("model.mla.kv_lora_rank")


def _width(s: SettingsReader) -> int:
    hidden = s["model.hidden"]
    return s.whole("--ffn-hidden-size", int(4 * hidden * 2 / 3 / 64) * 64 if s.flag("--swiglu") else 4 * hidden)


def _ffn(s: SettingsReader) -> int:
    return 0 if _experts(s) and not s["model.moe.dense_layers"] else _width(s)


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
    elif kind in _TOKENS:
        size = _TOKENS[kind]
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
    return groups if grouped and not _latent(s) else s["model.heads"]


def _rotary(p: PlanFields) -> dict[str, Any] | None:
    """Scaled as Llama 3 scales, or by whole factors of linear interpolation; not for others."""
    if p.model.positions != "rotary":
        return None
    base, scaling = {"--rotary-base": int(p.model.rope_theta)}, p.model.rope_scaling
    if scaling is not None and scaling.rope_type == "llama3":
        return {**base, "--use-rope-scaling": True, "--rope-scaling-factor": scaling.factor}
    if scaling is not None and scaling.rope_type == "linear" and scaling.factor.is_integer():
        return {**base, _INTERPOLATION: int(scaling.factor)}
    return base


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
    return {"model.rope_theta": base, **{f"model.rope_scaling.{name}": value for name, value in scaling.items()}}


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
    s.passed("--moe-token-dispatcher-type", "--moe-grouped-gemm")
    shared = s.whole("--moe-shared-expert-intermediate-size", 0, least=0)
    return {"model.moe.shared_experts": 1, "model.moe.shared_expert_ffn": shared} if shared else {}


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


_MODEL = (
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
        when=lambda source: not _latent(source),
    ),
    row.constant("--multi-latent-attention", True, when=_latent),
    row.whole(
        "--kv-lora-rank",
        "model.mla.kv_lora_rank",
        read=lambda s: s.whole("--kv-lora-rank", 32) if s.flag("--multi-latent-attention") else None,
    ),
    row.whole("--qk-head-dim", "model.mla.qk_nope_head_dim", 128, when=_latent),
    row.whole("--qk-pos-emb-head-dim", "model.mla.qk_rope_head_dim", 64, when=_latent),
    row.whole("--v-head-dim", "model.mla.v_head_dim", 128, when=_latent),
    row.constant("--rope-type", "rope", read=lambda s: s.passed("--rope-type", "--kv-channels"), when=_latent),
    row.optional("--q-lora-rank", "model.mla.q_lora_rank", when=_latent),
    Setting(path="model.kv_heads", write=_kv_heads, read=_read_kv_heads),
    Setting(write=_rotary, read=_read_rotary),
    Setting(write=_activation, read=_read_activation),
    # With latent attention it norms the latents, which every such model does.
    row.flag(
        "--qk-layernorm",
        "model.qk_norm",
        write=lambda p: p.model.qk_norm or p.model.mla is not None,
        read=lambda s: s.flag("--qk-layernorm") and not _latent(s),
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
    row.whole("--moe-router-topk", "model.moe.top_k", 2, when=_experts),
    row.whole("--moe-ffn-hidden-size", "model.moe.expert_ffn", _width, when=_experts),
    row.word("--moe-router-score-function", "model.moe.router", _ROUTERS, "softmax", when=_experts),
    row.constant("--moe-token-dispatcher-type", "alltoall", when=_experts),
    row.constant("--moe-grouped-gemm", True, when=_experts),
    Setting(write=_balancing, when=_experts),
    Setting("--moe-layer-freq", "model.moe.dense_layers", _layer_pattern, _dense_layers, _experts),
    Setting(
        "--moe-shared-expert-intermediate-size",
        write=lambda p: p["model.moe.shared_expert_ffn"] or None,
        read=_shared_experts,
        when=_experts,
    ),
    row.flag("--moe-router-pre-softmax", "model.moe.renormalize", on=False, off=True, when=_experts),
    row.whole("--moe-router-num-groups", "model.moe.groups", 1, when=_experts, written=_expert_groups),
    row.whole("--moe-router-group-topk", "model.moe.top_groups", 1, when=_experts, written=_expert_groups),
    row.number(
        "--moe-router-topk-scaling-factor",
        "model.moe.scaling",
        1.0,
        when=_experts,
        written=lambda p: p["model.moe.scaling"] != 1.0,
    ),
    row.flag("--moe-router-enable-expert-bias", "model.moe.router_bias", when=_experts),
)


def _virtual(p: PlanFields) -> int:
    return p.layout.virtual_stages if REGISTRY[p.layout.schedule] in _SCHEDULES else 1


def _uneven(p: PlanFields) -> str | None:
    """Layers that no even cut fits, the longer stages first: `Et*3|t*3|t*2L`."""
    stages = p.layout.pp * _virtual(p)
    short, longer = divmod(p.model.layers, stages)
    if p.layout.pp == 1 or not longer:
        return None
    return "E" + "|".join(f"t*{short + (1 if stage < longer else 0)}" for stage in range(stages)) + "L"


def _read_virtual(s: SettingsReader) -> Any:
    pp = s["layout.pp"]
    if "--pipeline-model-parallel-layout" in s:
        stages = _stages(str(s.value("--pipeline-model-parallel-layout")))
        if stages % pp:
            raise s.error(f"--pipeline-model-parallel-layout has {stages} stages for {pp} ranks: try {pp}")
        return stages // pp
    if "--num-layers-per-virtual-pipeline-stage" in s:
        layers, each = s.whole("--num-layers"), s.whole("--num-layers-per-virtual-pipeline-stage")
        return max(1, layers // pp // each)
    return s.whole("--num-virtual-stages-per-pipeline-rank", 1)


def _read_schedule(s: SettingsReader) -> str:
    named = next(spec.name for spec in _SCHEDULES if spec.takes(s["layout.virtual_stages"]))
    return s.filled_schedule(named) if s["layout.pp"] > 1 else named


def _stages(layout: str) -> int:
    """Stages of `E|(t|)*3,tt|L`: its bars, with those in repeated brackets."""
    bars = 1
    for part, times in re.findall(r"\(([^()]*)\)(?:\*(\d{1,5}))?", layout):
        bars += part.count("|") * int(times or 1)
    rest = re.sub(r"\([^()]*\)(?:\*\d{1,5})?", "", layout)
    for times in re.findall(r"\|\*(\d{1,5})", rest):
        bars += int(times) - 1
    return bars + rest.count("|")


def _recompute(s: SettingsReader) -> str:
    grain = s.word("--recompute-granularity", {"full": "full", "selective": "selective", "none": "none"}, "none")
    if grain == "full" and s.value("--recompute-method") == "block":
        s.notes.append("--recompute-method block recomputes some layers of a stage; it is read as all of them")
    if s.flag("--checkpoint-activations") or "--activations-checkpoint-method" in s:  # until 3.0
        return "full"
    return "selective" if grain == "none" and s.flag("--recompute-activations") else str(grain)


def _needed_gpus(s: SettingsReader) -> int:
    """The least GPUs of this layout: those of one replica, and those over which experts are spread."""
    sizes = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size")
    tp, pp, cp = (s.whole(key, 1) for key in sizes)
    experts = s.whole("--expert-model-parallel-size", 1) * s.whole("--expert-tensor-parallel-size", tp)
    return math.lcm(tp * pp * cp, pp * experts if s.whole("--num-experts", 0, least=0) else 1)


def _data_ranks(s: SettingsReader) -> int:
    started = (s.value(_NODES) or 1) * (s.value(_GPUS) or 0)
    if started and s.world.gpus is not None and started < _needed_gpus(s) <= s.world.gpus:
        s.notes.append(f"the script starts {started} processes, too few for its layout: {s.world.gpus} GPUs are counted")
    return s.data_parallel(s["layout.tp"] * s["layout.pp"] * s["layout.cp"])


def _overlaps(p: PlanFields) -> bool:
    """Unless the plan is for a Megatron-LM without it."""
    return p.job.framework.engine != "megatron" or p.job.framework.overlap > 0


def _sharding(p: PlanFields) -> dict[str, Any]:
    stage = p.layout.zero
    if not stage:
        return {}
    found: dict[str, Any] = {"--use-distributed-optimizer": True, "--overlap-param-gather": _overlaps(p)}
    if stage > 1:
        found |= {"--use-megatron-fsdp": True, "--data-parallel-sharding-strategy": list(_SHARDING)[stage]}
        found |= {"--no-gradient-accumulation-fusion": True, "--ckpt-format": "fsdp_dtensor"}
    return found


def _zero(s: SettingsReader) -> int:
    strategy = s.word("--data-parallel-sharding-strategy", _SHARDING, "no_shard")
    stage = 1 if s.flag("--use-distributed-optimizer") else 0
    if s.flag("--use-megatron-fsdp"):
        return int(strategy)
    return 3 if s.flag("--use-torch-fsdp2") else stage


def _zero_shards(s: SettingsReader) -> int | None:
    ranks, copies = s["layout.dp"] * s["layout.cp"], s.whole("--num-distributed-optimizer-instances", 1)
    if copies > 1 and ranks % copies:
        raise s.error(f"--num-distributed-optimizer-instances is {copies} for {ranks} data ranks: try {ranks}")
    return ranks // copies if s["layout.zero"] and copies > 1 else None


_CUT = (
    row.whole("--tensor-model-parallel-size", "layout.tp", 1),
    row.whole("--pipeline-model-parallel-size", "layout.pp", 1),
    row.whole("--context-parallel-size", "layout.cp", 1),
    Setting(path="layout.dp", read=_data_ranks),
    row.flag("--sequence-parallel", "layout.sequence_parallel", when=row.above_one("layout.tp")),
    row.word("--cp-comm-type", "layout.context_parallel", _CONTEXT, "p2p", when=row.above_one("layout.cp")),
    row.whole("--expert-model-parallel-size", "layout.ep", 1, written=_experts),
    Setting(
        "--expert-tensor-parallel-size",
        write=lambda p: p.layout.tp if p.layout.data_ranks % p.layout.ep == 0 else 1,
        written=_experts,
    ),
    Setting("--pipeline-model-parallel-layout", write=_uneven),
    Setting(
        "--num-virtual-stages-per-pipeline-rank",
        "layout.virtual_stages",
        _virtual,
        _read_virtual,
        written=lambda p: _virtual(p) > 1 and _uneven(p) is None,
    ),
    Setting(path="layout.schedule", read=_read_schedule),
    row.cases("layout.recompute", _RECOMPUTE, read=_recompute),
    Setting(
        "--overlap-grad-reduce",
        "layout.data_parallel",
        lambda p: (p.layout.data_parallel in ("bucketed", "hooks") or p.layout.zero > 0) and _overlaps(p),
        lambda s: "bucketed" if s.flag("--overlap-grad-reduce") or s["layout.zero"] else "naive",
    ),
    Setting(path="layout.zero", write=_sharding, read=_zero),
    Setting(
        "--num-distributed-optimizer-instances",
        "layout.zero_shards",
        lambda p: p.layout.data_ranks // p.layout.shards,
        _zero_shards,
        written=lambda p: p.layout.zero > 0 and p.layout.shards < p.layout.data_ranks,
    ),
)


def _read_overlap(s: SettingsReader) -> float | None:
    """Of gradient reductions and of ZeRO's gathers: all, half or none hides behind computation."""
    reduces = s.flag("--overlap-grad-reduce")
    gathers = s.flag("--overlap-param-gather") or not s["layout.zero"]
    alone = s["layout.dp"] * s["layout.cp"] == 1
    return None if alone or (reduces and gathers) else 0.5 if reduces or (gathers and s["layout.zero"]) else 0.0


def _overlaps_tp(p: PlanFields) -> bool:
    """Transformer Engine's user buffers: they need sequence parallelism and the links of one node."""
    layout, framework = p.layout, p.job.framework
    there = layout.tp > 1 and layout.sequence_parallel and layout.tp <= p.job.cluster.fast_domain
    return there and (framework.engine != "megatron" or framework.tensor_overlap > 0)


def _loss(p: PlanFields) -> dict[str, Any] | None:
    if p.job.framework.engine == "megatron" and p.job.framework.loss != "overwritten":
        return None
    return {"--cross-entropy-loss-fusion": True, "--cross-entropy-fusion-impl": "te"}


def _read_loss(s: SettingsReader) -> str:
    fused = s.flag("--cross-entropy-loss-fusion") and s.value("--cross-entropy-fusion-impl", "native") == "te"
    return "overwritten" if fused else "in-place"


def _framework(field: str, value: Any) -> Callable[[PlanFields], bool]:
    """Whether a plan for Megatron-LM has this value of a field of its framework."""
    return lambda p: p.job.framework.engine == "megatron" and getattr(p.job.framework, field) == value


def _read_fp8_gather(s: SettingsReader) -> bool | None:
    if not s.flag("--fp8-param-gather"):
        return None
    if s["layout.zero"] in (1, 2):
        s.notes.append("--fp8-param-gather is counted with ZeRO-3 alone")
    return True


# What the estimate assumes of Megatron-LM, and the options that switch it on.
_FRAMEWORK = (
    Setting(path="framework.overlap", read=_read_overlap),
    Setting(
        "--tp-comm-overlap",
        "framework.tp_comm_overlap",
        _overlaps_tp,
        lambda s: s.flag("--tp-comm-overlap") if s["layout.tp"] > 1 else None,
    ),
    Setting(path="framework.loss", write=_loss, read=_read_loss),
    Setting("--fp8-param-gather", "framework.fp8_gather", _framework("fp8_gather", True), _read_fp8_gather),
    Setting(
        "--no-gradient-accumulation-fusion",
        "framework.accumulation",
        _framework("accumulation", "separate"),
        # Megatron-FSDP asks for it, and accumulates in its own way.
        lambda s: "separate" if s.flag("--no-gradient-accumulation-fusion") and not s.flag("--use-megatron-fsdp") else None,
    ),
    Setting(
        "--account-for-loss-in-pipeline-split",
        "framework.stage_split",
        _framework("stage_split", "layers-and-head"),
        lambda s: "layers-and-head" if s.flag("--account-for-loss-in-pipeline-split") else None,
    ),
    Setting(
        "--overlap-moe-expert-parallel-comm",
        "framework.expert_overlap",
        _framework("expert_overlap", "microbatches"),
        lambda s: "microbatches" if s.flag("--overlap-moe-expert-parallel-comm") else None,
    ),
    Setting(
        "--moe-enable-deepep",
        "framework.dispatch",
        _framework("dispatch", "node-wise"),
        lambda s: "node-wise" if s.flag("--moe-enable-deepep") else None,
    ),
    Setting(path="framework.routing", read=lambda s: "capacity" if "--moe-expert-capacity-factor" in s else None),
    Setting(
        path="framework.transformer_engine",
        read=lambda s: s.word("--transformer-impl", {"transformer_engine": None, "local": False}, "transformer_engine"),
    ),
)


def _precision(s: SettingsReader) -> str:
    bf16, fp16 = s.flag("--bf16"), s.flag("--fp16")
    if bf16 and fp16:
        raise SpecError(f"{s.where} asks for --bf16 and --fp16 at once: keep one")
    eight = "--fp8-format" in s or s.flag("--fp8-hybrid") or s.flag("--fp8-e4m3")
    return "fp8" if eight else "bf16" if bf16 else "fp16" if fp16 else "fp32"


def _optimizer(p: PlanFields) -> dict[str, Any]:
    name, training = p.job.optimizer, p.training
    if name.startswith("sgd"):
        return {"--optimizer": "sgd", "--sgd-momentum": training.beta1 if name == "sgd-momentum" else 0.0}
    if name == "muon":
        return {"--optimizer": "muon", "--ckpt-format": "torch"}
    found: dict[str, Any] = {"--optimizer": "adam", "--adam-beta1": training.beta1, "--adam-beta2": training.beta2}
    states = next(dtype for dtype, optimizer in _STATES.items() if optimizer == name)
    if p.layout.offload != "none" or states != "fp32":
        found |= {"--use-precision-aware-optimizer": True, "--exp-avg-dtype": states, "--exp-avg-sq-dtype": states}
    return found


def _read_optimizer(s: SettingsReader) -> str:
    adam, momentum = s.word("--exp-avg-dtype", _STATES, "fp32"), s.number("--sgd-momentum", 0.9)
    names = {"adam": adam, "muon": "muon", "dist_muon": "muon", "sgd": "sgd-momentum" if momentum else "sgd"}
    return str(s.word("--optimizer", names, "adam"))


def _dropout(p: PlanFields) -> dict[str, Any]:
    rate = 0.1 if p.job.dropout else 0.0
    return {"--attention-dropout": rate, "--hidden-dropout": rate}


def _read_dropout(s: SettingsReader) -> bool:
    return s.number("--attention-dropout", 0.1) + s.number("--hidden-dropout", 0.1) > 0


_NUMBERS = (
    row.word("--attention-backend", "job.attention", _BACKENDS, "auto"),
    row.cases("job.precision", _PRECISIONS, read=_precision),
    row.flag("--grad-reduce-in-bf16", "job.gradients", "bf16", "fp32"),
    Setting("--accumulate-allreduce-grads-in-fp32", write=lambda p: p.job.gradients != "bf16"),
    Setting(path="job.optimizer", write=_optimizer, read=_read_optimizer),
    row.flag("--optimizer-cpu-offload", "layout.offload", "optimizer", "none", write=lambda p: p.layout.offload != "none"),
    Setting(path="job.dropout", write=_dropout, read=_read_dropout),
)


def _steps(s: SettingsReader) -> int | None:
    if "--train-samples" in s:
        batch = s.whole("--global-batch-size", s["layout.dp"] * s["layout.mbs"])
        return max(1, s.whole("--train-samples") // batch)
    return s.whole("--train-iters") if "--train-iters" in s else None


def _accumulation(s: SettingsReader) -> int:
    dp, mbs = s["layout.dp"], s["layout.mbs"]
    if "--rampup-batch-size" in s:
        s.notes.append("--rampup-batch-size: the batch is counted at its full size")
    return s.accumulation(s.whole("--global-batch-size", dp * mbs), dp, mbs, "--global-batch-size")


def _rates(p: PlanFields) -> dict[str, Any]:
    return {
        "--lr": p.training.lr,
        "--min-lr": p.lowest_rate,
        "--lr-warmup-iters": p.training.warmup,
        "--lr-decay-style": "cosine",
        "--weight-decay": p.training.weight_decay,
        "--clip-grad": p.training.clip,
        "--mock-data": True,
        "--save": "checkpoints",
        "--load": "checkpoints",
        "--save-interval": 1000,
        "--log-interval": 1,
        "--eval-iters": 0,
    }


_RUN = (
    row.whole("--seq-length", "job.seq"),
    row.whole("--micro-batch-size", "layout.mbs"),
    Setting("--global-batch-size", "layout.gas", lambda p: p.sequences, _accumulation),
    Setting("--train-iters", "job.steps", lambda p: p.training.steps, _steps),
    Setting(write=_rates),
)


def files(job: Job, layout: Layout, settings: dict[str, Any], comments: list[str]) -> tuple[File, ...]:
    notes = ["Data is mocked and the tokenizer a stand-in: put --data-path and your --tokenizer-type in their places."]
    if job.model.activation == "relu":
        notes.append("Megatron's ReLU is squared.")
    cut = layout.tp > 1 or layout.cp > 1
    connections = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if cut and "--use-megatron-fsdp" not in settings else ""
    words = [
        name if value is True else f"{name} {quoted(str(value))}" for name, value in settings.items() if value is not False
    ]
    text = f"""#!/usr/bin/env bash
{header.commented(TITLE, comments, *notes)}set -euo pipefail
{connections}torchrun \\
  --nnodes {job.cluster.nodes} --nproc-per-node {job.cluster.gpus_per_node} \\
  --node-rank "${{NODE_RANK:-0}}" --master-addr "${{MASTER_ADDR:-localhost}}" --master-port "${{MASTER_PORT:-29500}}" \\
  "${{MEGATRON_LM:-.}}"/pretrain_gpt.py \\
  """
    return (File("run.sh", text + " \\\n  ".join(words) + "\n"),)


def parse(text: str, where: str) -> dict[str, Any]:
    """The arguments after pretrain_gpt.py, and under names of their own what the launcher says before it."""
    if where.endswith((".yaml", ".yml")):
        return _parse_yaml(text, where)
    renamed = OtherSettings.of("megatron").renamed
    starts = []
    for words in shell.commands(text, where):
        at = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
        if at is not None:
            options = shell.options(words[at:])
            if "--micro-batch-size" in {renamed.get(name, name) for name in options}:
                starts.append((shell.options(words[:at]), options))
    if not starts:
        raise SpecError(
            f"{where} starts no training of Megatron-LM: expected pretrain_gpt.py with --micro-batch-size and so on"
        )
    (before, options), batch = starts[-1], dict(_SBATCH.findall(text))
    nodes = before.get("--nnodes") or batch.get("nodes") or batch.get("N")
    each = before.get("--nproc-per-node") or batch.get("gpus-per-node") or batch.get("gres") or batch.get("ntasks-per-node")
    return {**options, _NODES: _count(nodes), _GPUS: _count(each)}


def _parse_yaml(text: str, where: str) -> dict[str, Any]:
    """A model_config.yaml of Megatron-LM's functional tests."""
    given = mapping_of(text, where, "YAML").get(ARGUMENTS)
    if not isinstance(given, Mapping):
        raise SpecError(f"{where}: {ARGUMENTS} must be a mapping of arguments, such as --num-layers: 32")
    options = {f"--{str(name).removeprefix('--').replace('_', '-')}": value for name, value in given.items()}
    return {**options, _NODES: None, _GPUS: None}


def _count(value: Any) -> int | None:
    digits = re.fullmatch(r"(?:gpu:(?:\w+:)?)?(\d{1,6})", value) if isinstance(value, str) else None
    return int(digits[1]) if digits and int(digits[1]) else None


def _world(script: Any, where: str) -> tuple[int, int] | None:
    """As many nodes as the script starts, or as its layout needs if those are more."""
    nodes, each = script[_NODES] or 1, script[_GPUS]
    if not each:
        return None
    needed = _needed_gpus(SettingsReader((), script, where, World(), OtherSettings.of("megatron")))
    return (needed // each, each) if needed > nodes * each and needed % each == 0 else (nodes, each)


_SCALING = "Megatron-LM has Llama 3's scaling of a context of 8192, and linear interpolation by whole factors"
_BIASES = "Megatron-LM has biases everywhere, in qkv alone, or nowhere"

ENGINE = EngineFormat(
    name="megatron",
    title=TITLE,
    framework="megatron-core",
    config="run.sh",
    table=(*_MODEL, *_CUT, *_FRAMEWORK, *_NUMBERS, *_RUN),
    lost={
        "layout.schedule": "Megatron-LM has 1f1b, and interleaved with virtual stages",
        "layout.virtual_stages": "only Megatron-LM's interleaved schedule has them",
        "layout.context_parallel": "Megatron-LM has the balanced ring, all-gather and all-to-all",
        "layout.data_parallel": "Megatron-LM reduces in buckets, behind backward or after it",
        "layout.keep_gathered": "Megatron-FSDP gathers again for backward",
        "layout.offload": "Megatron-LM offloads optimizer states, not parameters",
        "job.gradients": "a setting of bf16 training",
        "model.vocab": "Megatron-LM pads it to a multiple of tp",
        "model.max_positions": "Megatron-LM's positions reach at least as far as a sequence",
        "model.activation": "Megatron-LM has swiglu, squared relu, and gelu: tanh's with biases, else the exact one",
        **dict.fromkeys((f"model.rope_scaling.{name}" for name in RopeScaling.model_fields), _SCALING),
        **dict.fromkeys(("model.qkv_bias", "model.attention_output_bias", "model.mlp_bias"), _BIASES),
        "model.moe.shared_experts": "Megatron-LM counts their width alone",
    },
    files=files,
    parse=parse,
    start="bash {folder}/run.sh",
    environment="MEGATRON_LM=/path/to/Megatron-LM ",
    needs="Megatron-LM must be there, in the working directory or where MEGATRON_LM says.",
    passed=(
        *(_NODES, _GPUS),
        *("--expert-tensor-parallel-size", "--recompute-method", "--recompute-num-layers", "--ckpt-format", "--eval-iters"),
        *("--fp8-recipe", "--exp-avg-sq-dtype", "--sequence-parallel", "--cp-comm-type"),
        *("--accumulate-allreduce-grads-in-fp32", "--use-precision-aware-optimizer"),
        *("--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-router-bias-update-rate"),
    ),
    world=_world,
)
