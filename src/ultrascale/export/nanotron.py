"""nanotron: its YAML, as of its configuration classes on the main branch (0.5)."""

from __future__ import annotations

from typing import Any

from ultrascale.export import header
from ultrascale.export import table as row
from ultrascale.export.common import EngineFormat, File
from ultrascale.export.table import PlanFields, Setting, SettingsReader
from ultrascale.schedules import DEFAULT_SCHEDULE, REGISTRY
from ultrascale.specs.files import mapping_of, to_yaml
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

TITLE = "nanotron"
_MODEL = "model.model_config."
_MODES = {"REDUCE_SCATTER": True, "ALL_REDUCE": False, "reduce_scatter": True, "all_reduce": False}
SCHEDULES = {name: name for name, spec in REGISTRY.items() if spec.runs_in("nanotron")}
_UNNAMED = next(name for name in SCHEDULES if REGISTRY[name].holds_all)
_EXPERTS = f"{_MODEL}moe_config."
# Llama 3's way gathers all keys and values (Grattafiori 2024, section 3.3.2), whatever nanotron's name for it.
_GATHERS = "llama3_ring_attention"
_ASYNC = "parallelism.tp_linear_async_communication"


def _steps(p: PlanFields) -> int:
    return max(2, p.training.steps)


def _qwen(p: PlanFields) -> bool:
    """Whether it takes Qwen2's class, which alone has experts, windows and context parallelism, or Llama's."""
    return p.model.moe is not None or p.model.sliding_window is not None or p.layout.cp > 1


def _data(p: PlanFields) -> list[dict[str, Any]]:
    data = {"dataset": None, "seed": p.training.seed, "num_loading_workers": 1}
    return [{"name": "made up", "start_training_step": 1, "data": data}]


def _optimizer(p: PlanFields) -> dict[str, Any]:
    if p.job.optimizer.startswith("sgd"):
        return {"name": "sgd"}
    training = p.training
    betas = {"adam_beta1": training.beta1, "adam_beta2": training.beta2, "adam_eps": training.eps}
    return {"name": "adamW", **betas, "torch_adam_is_fused": True}


def _read_optimizer(s: SettingsReader) -> str:
    names = {"adamW": "adamw", "adamw": "adamw", "sgd": "sgd"}
    return str(s.word("optimizer.optimizer_factory.name", names, "adamW"))


def _rates(p: PlanFields) -> dict[str, Any]:
    return {
        "learning_rate": p.training.lr,
        "lr_warmup_steps": p.training.warmup,
        "lr_warmup_style": "linear",
        "lr_decay_style": "cosine",
        "min_decay_lr": p.lowest_rate,
    }


def _width(s: SettingsReader) -> int:
    return s.whole(f"{_MODEL}intermediate_size", 11008, least=0)


def _ffn(s: SettingsReader) -> int:
    sparse = s["model.moe.experts"] is not None and not s["model.moe.dense_layers"]
    return 0 if sparse else _width(s)


def _dense_layers(s: SettingsReader) -> int:
    layers = s.value(f"{_EXPERTS}layers", [-1])
    return layers[0] if isinstance(layers, list) and layers and isinstance(layers[0], int) and layers[0] > 0 else 0


def _expert_layers(p: PlanFields) -> list[int]:
    dense = p["model.moe.dense_layers"]
    return list(range(dense, p.model.layers)) if dense else [-1]


def _schedule(s: SettingsReader) -> str:
    named = s.word("parallelism.pp_engine", SCHEDULES, _UNNAMED)
    if s["layout.pp"] == 1:
        return DEFAULT_SCHEDULE  # which engine is named says nothing without a pipeline
    return s.filled_schedule(str(named))


def _read_async(s: SettingsReader) -> None:
    """nanotron was measured with it."""
    if s["layout.sequence_parallel"] and s["layout.tp"] > 1 and not s.flag(_ASYNC):
        s.notes.append(f"{_ASYNC} is off; tensor-parallel communication is counted as if it were on")
    s.ignore(_ASYNC)


_experts = row.has("model.moe.experts")

TABLE = (
    row.constant("general.project", "ultrascale"),
    Setting("general.run", write=lambda p: p.model.name),
    Setting("general.seed", write=lambda p: p.training.seed),
    row.constant("general.ignore_sanity_checks", True),
    row.constant("checkpoints.checkpoints_path", "checkpoints"),
    Setting("checkpoints.checkpoint_interval", write=_steps),
    Setting("data_stages", write=_data),
    Setting("model.ddp_bucket_cap_mb", write=lambda p: round(p.training.bucket_mb)),
    row.word("model.dtype", "job.precision", {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}, "bfloat16"),
    row.constant("model.init_method.std", 0.02),
    row.constant("model.make_vocab_size_divisible_by", 1),
    Setting(f"{_MODEL}is_qwen2_config", write=lambda p: True if _qwen(p) else None),
    Setting(f"{_MODEL}is_llama_config", write=lambda p: None if _qwen(p) else True),
    row.constant(f"{_MODEL}hidden_act", "silu"),
    row.whole(f"{_MODEL}hidden_size", "model.hidden", 4096),
    Setting(f"{_MODEL}intermediate_size", "model.ffn", lambda p: p["model.moe.expert_ffn"] or p["model.ffn"], _ffn),
    Setting(path="model.moe.expert_ffn", read=_width, when=_experts),
    row.whole(
        f"{_MODEL}max_position_embeddings", "model.max_positions", 2048, write=lambda p: p["model.max_positions"] or 2048
    ),
    row.whole(f"{_MODEL}num_attention_heads", "model.heads", 32),
    row.whole(f"{_MODEL}num_hidden_layers", "model.layers", 32),
    row.whole(f"{_MODEL}num_key_value_heads", "model.kv_heads", lambda s: s["model.heads"]),
    row.flag(f"{_MODEL}attention_bias", "model.qkv_bias"),
    row.number(f"{_MODEL}rms_norm_eps", "model.norm_eps", 1e-6),
    row.number(f"{_MODEL}rope_theta", "model.rope_theta", 10000.0),
    row.constant(f"{_MODEL}rope_interleaved", False),
    row.flag(f"{_MODEL}tie_word_embeddings", "model.tied_embeddings"),
    row.whole(f"{_MODEL}vocab_size", "model.vocab", 32000),
    Setting(
        f"{_MODEL}_attn_implementation",
        "layout.context_parallel",
        lambda p: _GATHERS if p.layout.context_parallel == "allgather" else "ring",
        lambda s: "allgather" if s.value(f"{_MODEL}_attn_implementation") == _GATHERS else "ring",
        row.above_one("layout.cp"),
    ),
    row.optional(f"{_MODEL}sliding_window_size", "model.sliding_window"),
    row.optional(f"{_EXPERTS}num_experts", "model.moe.experts"),
    row.whole(f"{_EXPERTS}top_k", "model.moe.top_k", 2, when=_experts),
    Setting(f"{_EXPERTS}layers", "model.moe.dense_layers", _expert_layers, _dense_layers, _experts),
    Setting(
        f"{_EXPERTS}enable_shared_expert",
        "model.moe.shared_experts",
        lambda p: p["model.moe.shared_experts"] > 0,
        lambda s: 1 if s.flag(f"{_EXPERTS}enable_shared_expert") else None,
        _experts,
    ),
    row.constant(f"{_EXPERTS}token_dispatcher_type", "alltoall", when=_experts),
    row.whole("optimizer.zero_stage", "layout.zero", 0, least=0, write=lambda p: min(p.layout.zero, 1)),
    Setting("optimizer.weight_decay", write=lambda p: p.training.weight_decay),
    Setting("optimizer.clip_grad", write=lambda p: p.training.clip),
    row.flag("optimizer.accumulate_grad_in_fp32", "job.gradients", "fp32", "bf16", default=True),
    Setting("optimizer.optimizer_factory", "job.optimizer", _optimizer, _read_optimizer),
    Setting("optimizer.learning_rate_scheduler", write=_rates),
    row.whole("parallelism.dp", "layout.dp"),
    row.whole("parallelism.pp", "layout.pp", 1),
    row.whole("parallelism.tp", "layout.tp", 1),
    row.whole("parallelism.context_parallel_size", "layout.cp", 1),
    row.whole("parallelism.expert_parallel_size", "layout.ep", 1),
    row.word("parallelism.pp_engine", "layout.schedule", SCHEDULES, _UNNAMED, DEFAULT_SCHEDULE, read=_schedule),
    row.flag("parallelism.recompute_layer", "layout.recompute", "full", "none"),
    Setting(_ASYNC, write=lambda p: p.layout.sequence_parallel, read=_read_async),
    row.word("parallelism.tp_mode", "layout.sequence_parallel", _MODES, "ALL_REDUCE"),
    row.whole("tokens.sequence_length", "job.seq"),
    row.whole("tokens.train_steps", "job.steps", 100, write=_steps),
    row.whole("tokens.micro_batch_size", "layout.mbs", 1),
    row.whole("tokens.batch_accumulation_per_replica", "layout.gas", 1),
    row.constant("tokens.limit_val_batches", 0),
    row.constant("tokens.val_check_interval", -1),
    row.constant("tokenizer.tokenizer_name_or_path", "gpt2"),
    row.constant("logging", {"iteration_step_info_interval": 1, "log_level": "info", "log_level_replica": "info"}),
)


def files(job: Job, layout: Layout, settings: dict[str, Any], comments: list[str]) -> tuple[File, ...]:
    head = header.commented(
        TITLE, comments, "Data is made up and the tokenizer a stand-in: name yours under data_stages and tokenizer."
    )
    return (File("config.yaml", head + to_yaml(settings)),)


ENGINE = EngineFormat(
    name="nanotron",
    title=TITLE,
    framework="nanotron",
    config="config.yaml",
    table=TABLE,
    lost={
        "layout.zero": "nanotron has ZeRO-0 and ZeRO-1",
        "layout.zero_shards": "nanotron shards over all data ranks",
        "layout.keep_gathered": "nanotron has no ZeRO-3",
        "layout.schedule": "nanotron has afab and 1f1b",
        "layout.virtual_stages": "nanotron has one stage a rank",
        "layout.recompute": "nanotron recomputes whole layers or none",
        "layout.context_parallel": "nanotron has the ring and the all-gather",
        "layout.data_parallel": "nanotron reduces in buckets",
        "layout.offload": "nanotron keeps everything on the GPU",
        "layout.dispatcher": "nanotron has the all-to-all",
        "job.precision": "nanotron computes in bf16, fp16 and fp32",
        "job.optimizer": "nanotron has AdamW and SGD",
        "job.attention": "nanotron has flash attention",
        "job.dropout": "nanotron's models have no dropout",
        "model.*": "nanotron trains Llama's and Qwen2's classes",
    },
    files=files,
    parse=lambda text, where: mapping_of(text, where, "YAML"),
    ignored=("model.ddp_bucket_cap_mb", "optimizer.optimizer_factory.torch_adam_is_fused", f"{_EXPERTS}token_dispatcher_type"),
    start="{torchrun} run_train.py --config-file {folder}/config.yaml",
    needs="nanotron must be installed there, and its run_train.py be in the working directory.",
)
