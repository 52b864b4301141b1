"""torchtitan: the settings that its 0.2 TOML and its 0.3 Python configurations share."""

from __future__ import annotations

from ultrascale.cost.engines import torchtitan_stages
from ultrascale.export import table as row
from ultrascale.export import torchtitan_text as text
from ultrascale.export.common import EngineFormat
from ultrascale.export.fields import Fields, model_fields
from ultrascale.export.table import PlanFields, Setting, SettingsReader
from ultrascale.schedules import DEFAULT_SCHEDULE, REGISTRY
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model

# Flavors of torchtitan that are presets here; shapes compared with torchtitan 0.2.2 and 0.3.0.
FLAVORS = {
    ("llama3", "1B"): "llama-3.2-1b",
    ("llama3", "3B"): "llama-3.2-3b",
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "1.7B"): "qwen3-1.7b",
    ("qwen3", "4B"): "qwen3-4b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "14B"): "qwen3-14b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "671B"): "deepseek-v3",
}
_NEW = {("llama3", "1B"), ("llama3", "3B")}  # flavors that 0.2 does not have
_ALIKE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied_embeddings", "mla", "moe", "qk_norm")
_STAND_IN = ("llama3", "debugmodel")
_EAGER = "torchtitan-eager"  # the preset of blocks that are not compiled; torchtitan-0.2 has one too
_SCHEDULES = {name: spec.torch_name for name, spec in REGISTRY.items() if spec.torch_name is not None}
_LOOPED = tuple(name for name, spec in REGISTRY.items() if spec.most_stages != 1)
_RECOMPUTE = {"none": "none", "selective": "selective", "full": "full", "memory_budget": "selective"}
_CUT = "parallelism."
_PIPELINE = "parallelism.pipeline_parallel_"
_CONTEXT = "parallelism.context_parallel_"
_ASYNC = "parallelism.enable_async_tensor_parallel"
_AC_OPTION = "activation_checkpoint.selective_ac_option"
_FP8_GATHER = "quantize.linear.float8.enable_fsdp_float8_all_gather"


def _flavor(model: Model, style: str) -> dict[str, str]:
    """The flavor with this model's matrices, positions and epsilons may differ; else a stand-in."""
    name, kind = _STAND_IN
    for flavor, preset in FLAVORS.items():
        known = Model.presets()[preset]
        if all(getattr(known, field) == getattr(model, field) for field in _ALIKE) and known.gated == model.gated:
            name, kind = _STAND_IN if style == "toml" and flavor in _NEW else flavor
            break
    return {"model.name": name, "model.flavor": kind}


def _read_model(s: SettingsReader) -> Model | None:
    name, kind = s.value("model.name", "llama3"), s.value("model.flavor", "debugmodel")
    preset = FLAVORS.get((str(name), str(kind).removesuffix("_flex").removesuffix("_varlen")))
    return Model.presets()[preset] if preset is not None else None


def _debug_model(s: SettingsReader) -> Model | None:
    """torchtitan's llama3 debug model, as 0.3 builds it."""
    if (s.value("model.name", "llama3"), s.value("model.flavor", "debugmodel")) != _STAND_IN:
        return None
    shape = {"layers": 6, "hidden": 256, "heads": 16, "ffn": 768, "vocab": 2048}
    s.notes.append("the debug model of torchtitan: give --model for another")
    return Model(name="torchtitan-debug", rope_theta=500000.0, max_positions=131072, **shape)


def _model_fields(s: SettingsReader) -> Fields:
    model = _read_model(s)
    return {} if model is None else model_fields(model)


def _batch(s: SettingsReader) -> Fields:
    """torchtitan fills its pipeline once for each local batch."""
    local, piped = s.whole("training.local_batch_size", 8), s["layout.pp"] > 1
    total = s.whole("training.global_batch_size", -1, least=-1)
    micro = s.whole(f"{_PIPELINE}microbatch_size", 1) if piped else local
    if local % micro:
        raise s.error(f"training.local_batch_size is {local} but micro-batches of {micro} do not make it: try {micro}")
    gas = 1 if total < 1 else s.accumulation(total, s["layout.dp"], local, "training.global_batch_size")
    if piped and gas > 1:
        s.notes.append(f"the pipeline is filled {gas} times in a step, once for each local batch; it is counted as filled once")
    return {"layout.mbs": micro, "layout.gas": gas * (local // micro)}


def _precision(s: SettingsReader) -> str:
    eight = s.flag("float8.enable") or "float8" in str(s.value("model.converters", []))
    full = s.value("training.mixed_precision_param", "bfloat16") == "float32"
    return "fp8" if eight else "fp32" if full else "bf16"


def _replicas(layout: Layout) -> tuple[int, int]:
    """Copies of the weights, and data ranks that share one: FSDP shards over those and all of cp."""
    if not layout.zero:
        return layout.dp, 1
    if layout.shards % layout.cp or layout.shards < layout.cp:
        return 1, layout.dp
    return layout.data_ranks // layout.shards, layout.shards // layout.cp


def _degrees(s: SettingsReader) -> tuple[int, int]:
    """Copies of the weights, and data ranks that share one; -1 of the latter is all GPUs that are left."""
    replicate = s.whole(f"{_CUT}data_parallel_replicate_degree", 1)
    shard = s.whole(f"{_CUT}data_parallel_shard_degree", -1, least=-1)
    others = s["layout.tp"] * s["layout.pp"] * s["layout.cp"] * replicate
    return replicate, shard if shard > 0 else s.data_parallel(others)


def _data_ranks(s: SettingsReader) -> int:
    replicate, shard = _degrees(s)
    return replicate * shard


def _resharding(p: PlanFields) -> str:
    """`default` frees after forward without a pipeline, as `always` does, but for the head, which backward needs at once."""
    again = p.layout.zero == 3 and not p.layout.keep_gathered
    return "default" if again == (p.layout.pp == 1) else "always" if again else "never"


def _sharding(s: SettingsReader) -> Fields:
    (replicate, shard), cp = _degrees(s), s["layout.cp"]
    policies = {"default": s["layout.pp"] == 1, "always": True, "never": False}
    again = s.word(f"{_CUT}fsdp_reshard_after_forward", policies, "default")
    if shard * cp == 1:
        return {"layout.zero": 0}
    return {"layout.zero": 3, "layout.keep_gathered": not again, "layout.zero_shards": shard * cp if replicate > 1 else None}


def _schedule(layout: Layout) -> str:
    """torchtitan's schedules of several stages a rank have at least two."""
    runs = layout.schedule in _SCHEDULES and (layout.virtual_stages > 1 or layout.schedule not in _LOOPED)
    return layout.schedule if runs else DEFAULT_SCHEDULE


def _layers_per_stage(p: PlanFields) -> int | None:
    """What makes torchtitan cut so many stages, where it would not by itself; None too where nothing does."""
    layout, layers = p.layout, p.model.layers
    usual = 2 if _schedule(layout) in _LOOPED else 1
    if layout.virtual_stages == usual or layout.schedule not in _SCHEDULES:
        return None
    stages = layout.pp * layout.virtual_stages
    each = torchtitan_stages(layers, stages)
    return each if torchtitan_stages(layers, each) == stages else None


def _pipeline(s: SettingsReader) -> Fields:
    names = {theirs.lower(): ours for ours, theirs in _SCHEDULES.items()}
    given = str(s.value(f"{_PIPELINE}schedule", "1F1B"))
    each = s.whole(f"{_PIPELINE}layers_per_stage", 0, least=0)
    if s["layout.pp"] == 1:
        return {}
    if given.lower() not in names:
        known = ", ".join(_SCHEDULES.values())
        raise s.error(f"pipeline_parallel_schedule is '{given:.40}': known: {known}")
    schedule, model = names[given.lower()], _read_model(s)
    virtual = 2 if schedule in _LOOPED else 1
    if each and model is not None:
        virtual = max(1, torchtitan_stages(model.layers, each) // s["layout.pp"])
    return {"layout.schedule": schedule, "layout.virtual_stages": virtual}


def _context(style: str, s: SettingsReader) -> str:
    method = s.value(f"{_CONTEXT}rotate_method", "allgather")
    balancer = s.value(f"{_CONTEXT}load_balancer", "headtail")
    if style == "current" and balancer == text.NOTHING:
        return "allgather"
    if style == "toml" and method == "allgather":
        s.notes.append("context parallelism gathers at once, in balanced slices; it is counted as zigzag")
    return "zigzag"


def _expert_tensor_parallel(p: PlanFields) -> int:
    return p.layout.expert_cut if p.layout.ep > 1 else 1


def _read_expert_tensor_parallel(s: SettingsReader) -> int | None:
    """None where it is the usual one; 0.3 has no such setting, and does not cut experts with ep."""
    tp, ep = s["layout.tp"], s["layout.ep"]
    cut = s.whole(f"{_CUT}expert_tensor_parallel_degree", 1)
    return 1 if cut == 1 and tp > 1 and ep > 1 and s["layout.dp"] * s["layout.cp"] % ep == 0 else None


def _recompute(s: SettingsReader) -> str:
    mode, option = s.word("activation_checkpoint.mode", _RECOMPUTE, "selective"), s.value(_AC_OPTION, "op")
    if mode == "selective" and option != "op":
        s.notes.append(f"{_AC_OPTION} is {option!s:.20}, every so many layers; it is counted as op")
    return str(mode)


def _read_compile(s: SettingsReader) -> str | None:
    components = s.value("compile.components", ["model"])
    return None if s.flag("compile.enable") and "model" in str(components) else _EAGER


def _read_async(s: SettingsReader) -> None:
    if s.flag(_ASYNC) and s["layout.tp"] > 1:
        s.notes.append(f"{_ASYNC}: tensor-parallel communication is counted as exposed all the same")


def _table(style: str) -> tuple[Setting, ...]:
    """0.3 alone says whether the sequence is cut over tp; 0.2 alone how experts are."""
    toml, current = style == "toml", style == "current"
    piped, experts = row.above_one("layout.pp"), row.has("model.moe.experts")
    return (
        Setting(write=lambda p: _flavor(p.model, style), read=_model_fields),
        Setting(
            "training.local_batch_size", write=lambda p: p.layout.mbs * (p.layout.gas if p.layout.pp > 1 else 1), read=_batch
        ),
        Setting("training.global_batch_size", write=lambda p: p.sequences),
        row.whole("training.seq_len", "job.seq", 2048),
        Setting("training.max_norm", write=lambda p: p.training.clip),
        row.whole("training.steps", "job.steps", 10000, write=lambda p: max(2, p.training.steps)),
        row.flag("training.enable_cpu_offload", "layout.offload", "parameters", "none"),
        row.word("training.mixed_precision_param", "job.precision", {"float32": "fp32"}, "bfloat16", read=_precision),
        row.constant("training.mixed_precision_reduce", "float32"),
        # 0.3 captures neither pipelines nor its all-to-all.
        row.constant("training.disable_cuda_graphs", True, written=lambda p: current and (p.layout.pp > 1 or p.layout.ep > 1)),
        Setting(f"{_CUT}data_parallel_replicate_degree", "layout.dp", lambda p: _replicas(p.layout)[0], _data_ranks),
        Setting(f"{_CUT}data_parallel_shard_degree", write=lambda p: _replicas(p.layout)[1]),
        Setting(
            f"{_CUT}fsdp_reshard_after_forward",
            write=_resharding,
            read=_sharding,
        ),
        row.whole(f"{_CUT}tensor_parallel_degree", "layout.tp", 1),
        row.whole(f"{_CUT}context_parallel_degree", "layout.cp", 1),
        row.whole(f"{_CUT}pipeline_parallel_degree", "layout.pp", 1),
        Setting(
            f"{_CUT}enable_sequence_parallel",
            "layout.sequence_parallel",
            read=lambda s: s.flag(f"{_CUT}enable_sequence_parallel", True) if current else True,
            written=lambda p: current and p.layout.tp > 1,
        ),
        Setting(
            f"{_CONTEXT}rotate_method" if toml else f"{_CONTEXT}load_balancer",
            "layout.context_parallel",
            lambda p: "alltoall" if toml else "headtail" if p.layout.context_parallel == "zigzag" else text.NOTHING,
            lambda s: _context(style, s),
            row.above_one("layout.cp"),
        ),
        row.whole(f"{_CUT}expert_parallel_degree", "layout.ep", 1, written=experts),
        Setting(
            f"{_CUT}expert_tensor_parallel_degree",
            "layout.etp",
            _expert_tensor_parallel,
            _read_expert_tensor_parallel,
            written=lambda p: toml and experts(p),
        ),
        row.word(
            f"{_CUT}expert_parallel_comm_backend",
            "layout.dispatcher",
            {"standard": "alltoall", "deepep": "deepep", "hybridep": "hybridep", "minimal_async_ep": "deepep"},
            "standard",
            written=lambda p: p.layout.ep > 1,
        ),
        Setting(f"{_PIPELINE}schedule", write=lambda p: _SCHEDULES[_schedule(p.layout)], read=_pipeline, written=piped),
        Setting(f"{_PIPELINE}microbatch_size", write=lambda p: p.layout.mbs, written=piped),
        Setting(f"{_PIPELINE}layers_per_stage", write=_layers_per_stage, written=piped),
        Setting("activation_checkpoint.mode", "layout.recompute", read=_recompute),
        Setting(path="job.optimizer", read=lambda s: s.word("optimizer.name", {"AdamW": "adamw", "Adam": "adamw"}, "AdamW")),
        Setting(read=_read_async),
        Setting("optimizer.lr", write=lambda p: p.training.lr),
        Setting("optimizer.beta1", write=lambda p: p.training.beta1),
        Setting("optimizer.beta2", write=lambda p: p.training.beta2),
        Setting("optimizer.weight_decay", write=lambda p: p.training.weight_decay),
        Setting("lr_scheduler.warmup_steps", write=lambda p: p.training.warmup),
        row.constant("lr_scheduler.decay_type", "cosine"),
        Setting("lr_scheduler.min_lr_factor", write=lambda p: p.training.min_lr_ratio),
        Setting("compile.enable", "job.framework", lambda p: not p.job.framework.name.endswith("-eager"), _read_compile),
        Setting("float8.enable", write=lambda p: p.job.precision == "fp8"),
        Setting(path="framework.fp8_gather", read=lambda s: True if s.flag(_FP8_GATHER) else None),
    )


_LOST = {
    "layout.zero": "FSDP2 shards parameters, gradients and states together, over cp too",
    "layout.zero_shards": "torchtitan shards over whole groups of data ranks and all of cp",
    "layout.keep_gathered": "without resharding after forward FSDP2 comes nearest to ZeRO-1 and 2",
    "layout.schedule": "torchtitan has torch's schedules, and its zero bubble two stages a rank or more",
    "layout.virtual_stages": "no pipeline_parallel_layers_per_stage gives this cut",
    "layout.context_parallel": "torchtitan has torch's balanced context parallelism",
    "layout.data_parallel": "torchtitan reduces in buckets",
    "layout.offload": "FSDP offloads parameters, gradients and states together",
    "layout.dispatcher": "torchtitan has the all-to-all and DeepEP",
    "job.precision": "torchtitan computes in bf16, float8 and fp32",
    "job.gradients": "torchtitan reduces in fp32",
    "job.optimizer": "torchtitan has AdamW with fp32 states",
    "job.attention": "torchtitan's attention never writes scores out",
    "model": "torchtitan has no flavor of this shape; the debug model stands in",
    "model.*": "the flavor has its own",
}
_IGNORED = (
    "training.mixed_precision_reduce",
    "training.disable_cuda_graphs",
    f"{_CUT}expert_tensor_parallel_degree",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
)
_NEEDS = "torchtitan must be installed there, and its tokenizer be where the configuration says."

TOML = EngineFormat(
    name="torchtitan",
    title="torchtitan 0.2 (TOML)",
    framework="torchtitan",
    config="config.toml",
    table=_table("toml"),
    lost={**_LOST, "layout.sequence_parallel": "torchtitan 0.2 always cuts the sequence over tp"},
    files=text.toml_files,
    parse=text.parse_toml,
    start="{torchrun} -m torchtitan.train --job.config_file {folder}/config.toml",
    needs=_NEEDS,
    ignored=_IGNORED,
    debug_model=_debug_model,
)

CURRENT = EngineFormat(
    name="torchtitan",
    title="torchtitan 0.3 (Python)",
    framework="torchtitan",
    config=text.MODULE,
    table=_table("current"),
    lost={**_LOST, "layout.etp": "torchtitan does not cut experts with ep from 0.3 on"},
    files=text.python_files,
    parse=text.parse_python,
    start=f"PYTHONPATH={{folder}} {{torchrun}} -m torchtitan.train --module {text.MODULE[:-3]} --config {text.FUNCTION}",
    needs=_NEEDS,
    ignored=_IGNORED,
    debug_model=_debug_model,
)
