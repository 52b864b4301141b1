"""torchtitan's settings, from TOML or from Python, read as a layout; and the words that it and a plan share."""

from __future__ import annotations

from typing import Any

from ultrascale.export import torchtitan_text as text
from ultrascale.export.common import Found, World, accumulation
from ultrascale.export.fields import Fields, of_model
from ultrascale.export.keys import Keys
from ultrascale.schedules import REGISTRY
from ultrascale.specs.errors import SpecError
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
SCHEDULES = {name: spec.torch_name for name, spec in REGISTRY.items() if spec.torch_name is not None}
LOOPED = tuple(name for name, spec in REGISTRY.items() if spec.most_stages != 1)
ENDS = 2  # layers that torchtitan counts for the embedding and the head when it cuts stages


def stages_of(layers: int, each: int) -> int:
    return -(-(layers + ENDS) // each)


def read(style: str, data: Any, where: str, world: World) -> Found:
    keys, found = Keys(data, where), Found()
    names = "parallelism."
    tp, pp = keys.whole(f"{names}tensor_parallel_degree", 1), keys.whole(f"{names}pipeline_parallel_degree", 1)
    cp, replicate = keys.whole(f"{names}context_parallel_degree", 1), keys.whole(f"{names}data_parallel_replicate_degree", 1)
    shard = keys.whole(f"{names}data_parallel_shard_degree", -1, least=-1)
    if shard < 1:
        shard = world.data_parallel(tp * pp * cp * replicate, where)
    dp = replicate * shard
    model = _read_model(keys, where)
    found.fields = {
        "layout.dp": dp,
        "layout.tp": tp,
        "layout.pp": pp,
        "layout.cp": cp,
        "layout.ep": keys.whole(f"{names}expert_parallel_degree", 1),
        "layout.sequence_parallel": keys.flag(f"{names}enable_sequence_parallel", True) if style == "current" else True,
        "layout.recompute": _read_recompute(keys),
        "layout.offload": "parameters" if keys.flag("training.enable_cpu_offload") else "none",
        "job.seq": keys.whole("training.seq_len", 2048),
        "job.steps": keys.whole("training.steps", 10000),
        "job.precision": _read_precision(keys),
        **_read_sharding(keys, replicate, shard, cp, pp),
        **_read_pipeline(keys, pp, model),
        **_read_batch(keys, dp, pp, found.notes),
        **(of_model(model) if model is not None else {}),
    }
    if cp > 1:
        found.fields["layout.context_parallel"] = _read_context(style, keys, found)
    keys.passed(
        "training.mixed_precision_reduce",
        "training.disable_cuda_graphs",
        f"{names}expert_tensor_parallel_degree",
        "compile.enable",
    )
    keys.also_known("optimizer.lr", "optimizer.name", "lr_scheduler.warmup_steps", "training.max_norm", "training.dataset")
    found.notes += keys.unread()
    return found


def _read_model(keys: Keys, where: str) -> Model | None:
    name, kind = keys.value("model.name", "llama3"), keys.value("model.flavor", "debugmodel")
    preset = FLAVORS.get((name, str(kind).removesuffix("_flex").removesuffix("_varlen")))
    return Model.presets()[preset] if preset is not None else None


def _read_recompute(keys: Keys) -> str:
    keys.passed("activation_checkpoint.selective_ac_option")
    ways = {"none": "none", "selective": "selective", "full": "full", "memory_budget": "selective"}
    return str(keys.word("activation_checkpoint.mode", ways, "selective"))


def _read_precision(keys: Keys) -> str:
    converters = keys.value("model.converters", [])
    eight = keys.flag("float8.enable") or "float8" in str(converters)
    full = keys.value("training.mixed_precision_param", "bfloat16") == "float32"
    return "fp8" if eight else "fp32" if full else "bf16"


def _read_sharding(keys: Keys, replicate: int, shard: int, cp: int, pp: int) -> Fields:
    policy = keys.word(
        "parallelism.fsdp_reshard_after_forward", {"default": pp == 1, "always": True, "never": False}, "default"
    )
    if shard * cp == 1:
        return {"layout.zero": 0}
    return {
        "layout.zero": 3,
        "layout.keep_gathered": not policy,
        "layout.zero_shards": shard * cp if replicate > 1 else None,
    }


def _read_pipeline(keys: Keys, pp: int, model: Model | None) -> Fields:
    ours = {theirs.lower(): name for name, theirs in SCHEDULES.items()}
    given = str(keys.value("parallelism.pipeline_parallel_schedule", "1F1B"))
    each = keys.whole("parallelism.pipeline_parallel_layers_per_stage", 0, least=0)
    if pp == 1:
        return {}
    if given.lower() not in ours:
        raise SpecError(f"{keys.where}: pipeline_parallel_schedule is '{given:.40}': known: {', '.join(SCHEDULES.values())}")
    schedule = ours[given.lower()]
    virtual = 2 if schedule in LOOPED else 1
    if each and model is not None:
        virtual = max(1, stages_of(model.layers, each) // pp)
    return {"layout.schedule": schedule, "layout.virtual_stages": virtual}


def _read_batch(keys: Keys, dp: int, pp: int, notes: list[str]) -> Fields:
    local = keys.whole("training.local_batch_size", 8)
    total = keys.whole("training.global_batch_size", -1, least=-1)
    micro = keys.whole("parallelism.pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    if local % micro:
        raise SpecError(
            f"{keys.where}: training.local_batch_size is {local} but micro-batches of {micro} do not make it: try {micro}"
        )
    gas = 1 if total < 1 else accumulation(total, dp, local, "training.global_batch_size", keys.where)
    if pp > 1 and gas > 1:
        notes.append(f"the pipeline is filled {gas} times in a step, once for each local batch; it is counted as filled once")
    return {"layout.mbs": micro, "layout.gas": gas * (local // micro)}


def _read_context(style: str, keys: Keys, found: Found) -> str:
    names = "parallelism.context_parallel_"
    method = keys.value(f"{names}rotate_method", "allgather")
    balancer = keys.value(f"{names}load_balancer", "headtail")
    if style == "current" and balancer == text.NOTHING:
        return "allgather"
    if style == "toml" and method == "allgather":
        found.notes.append("context parallelism gathers at once, in balanced slices; it is counted as zigzag")
    return "zigzag"
