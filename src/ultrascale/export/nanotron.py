"""nanotron: its YAML, as of its configuration classes on the main branch (0.5)."""

from __future__ import annotations

from typing import Any

from ultrascale.export import header
from ultrascale.export.common import EngineFormat, File, Found, World, lowest_rate, steps, torchrun
from ultrascale.export.keys import Keys
from ultrascale.specs.files import mapping_of, to_yaml
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Training

TITLE = "nanotron"
_MODES = {"REDUCE_SCATTER": True, "ALL_REDUCE": False, "reduce_scatter": True, "all_reduce": False}
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
_OPTIMIZERS = {"adamW": "adamw", "adamw": "adamw", "sgd": "sgd"}


def native(job: Job, layout: Layout) -> dict[str, Any]:
    training = Training().changed(steps=max(steps(job), 2))
    return {
        "general": {"project": "ultrascale", "run": job.model.name, "seed": training.seed, "ignore_sanity_checks": True},
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": training.steps},
        "data_stages": [
            {
                "name": "made up",
                "start_training_step": 1,
                "data": {"dataset": None, "seed": training.seed, "num_loading_workers": 1},
            }
        ],
        "model": {
            "ddp_bucket_cap_mb": round(training.bucket_mb),
            "dtype": {"fp32": "float32", "fp16": "float16"}.get(job.precision, "bfloat16"),
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "model_config": _model(job.model, layout),
        },
        "optimizer": _optimizer(job, layout, training),
        "parallelism": {
            "dp": layout.dp,
            "pp": layout.pp,
            "tp": layout.tp,
            "context_parallel_size": layout.cp,
            "expert_parallel_size": layout.ep,
            "pp_engine": "afab" if layout.schedule == "afab" else "1f1b",
            "recompute_layer": layout.recompute == "full",
            "tp_linear_async_communication": layout.sequence_parallel,
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        },
        "tokens": {
            "sequence_length": job.seq,
            "train_steps": training.steps,
            "micro_batch_size": layout.mbs,
            "batch_accumulation_per_replica": layout.gas,
            "limit_val_batches": 0,
            "val_check_interval": -1,
        },
        "tokenizer": {"tokenizer_name_or_path": "gpt2"},
        "logging": {"iteration_step_info_interval": 1, "log_level": "info", "log_level_replica": "info"},
    }


def _optimizer(job: Job, layout: Layout, training: Training) -> dict[str, Any]:
    adam = {
        "name": "adamW",
        "adam_beta1": training.beta1,
        "adam_beta2": training.beta2,
        "adam_eps": training.eps,
        "torch_adam_is_fused": True,
    }
    return {
        "zero_stage": min(layout.zero, 1),
        "weight_decay": training.weight_decay,
        "clip_grad": training.clip,
        "accumulate_grad_in_fp32": job.gradients == "fp32",
        "optimizer_factory": {"name": "sgd"} if job.optimizer.startswith("sgd") else adam,
        "learning_rate_scheduler": {
            "learning_rate": training.lr,
            "lr_warmup_steps": training.warmup,
            "lr_warmup_style": "linear",
            "lr_decay_style": "cosine",
            "min_decay_lr": lowest_rate(training),
        },
    }


def _model(model: Model, layout: Layout) -> dict[str, Any]:
    """Llama's class, or Qwen2's, which alone has experts, windows and context parallelism."""
    qwen = model.moe is not None or model.sliding_window is not None or layout.cp > 1
    config: dict[str, Any] = {
        "is_qwen2_config" if qwen else "is_llama_config": True,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.moe.expert_ffn if model.moe else model.ffn,
        "max_position_embeddings": model.max_positions or 2048,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "attention_bias": model.qkv_bias,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_interleaved": False,
        "tie_word_embeddings": model.tied_embeddings,
        "vocab_size": model.vocab,
    }
    if layout.cp > 1:
        config["_attn_implementation"] = "llama3_ring_attention" if layout.context_parallel == "allgather" else "ring"
    if model.sliding_window is not None:
        config["sliding_window_size"] = model.sliding_window
    if model.moe is not None:
        config["moe_config"] = {
            "num_experts": model.moe.experts,
            "top_k": model.moe.top_k,
            "layers": list(range(model.moe.dense_layers, model.layers)) if model.moe.dense_layers else [-1],
            "enable_shared_expert": model.moe.shared_experts > 0,
            "token_dispatcher_type": "alltoall",
        }
    return config


def read(data: Any, where: str, world: World) -> Found:
    keys = Keys(data, where)
    found = Found()
    found.fields = {
        "layout.dp": keys.whole("parallelism.dp"),
        "layout.pp": keys.whole("parallelism.pp", 1),
        "layout.tp": keys.whole("parallelism.tp", 1),
        "layout.cp": keys.whole("parallelism.context_parallel_size", 1),
        "layout.ep": keys.whole("parallelism.expert_parallel_size", 1),
        "layout.schedule": keys.word("parallelism.pp_engine", {"afab": "afab", "1f1b": "1f1b"}, "afab"),
        "layout.sequence_parallel": keys.word("parallelism.tp_mode", _MODES, "ALL_REDUCE"),
        "layout.recompute": "full" if keys.flag("parallelism.recompute_layer") else "none",
        "layout.zero": keys.whole("optimizer.zero_stage", 0, least=0),
        "layout.mbs": keys.whole("tokens.micro_batch_size", 1),
        "layout.gas": keys.whole("tokens.batch_accumulation_per_replica", 1),
        "job.seq": keys.whole("tokens.sequence_length"),
        "job.precision": keys.word("model.dtype", _DTYPES, "bfloat16"),
        "job.gradients": "fp32" if keys.flag("optimizer.accumulate_grad_in_fp32", True) else "bf16",
        "job.optimizer": keys.word("optimizer.optimizer_factory.name", _OPTIMIZERS, "adamW"),
        "job.steps": keys.whole("tokens.train_steps", 100),
        **_read_model(keys),
    }
    if found.fields["layout.pp"] == 1:
        found.fields["layout.schedule"] = "1f1b"  # which engine is named says nothing without a pipeline
    if found.fields["layout.cp"] > 1:
        # Llama 3's way gathers all keys and values (Grattafiori 2024, section 3.3.2), whatever nanotron's name for it.
        implementation = keys.value("model.model_config._attn_implementation")
        gathers = implementation == "llama3_ring_attention"
        found.fields["layout.context_parallel"] = "allgather" if gathers else "ring"
    keys.also_known("optimizer.weight_decay", "optimizer.clip_grad", "general.project", "general.run", "general.seed")
    found.notes += keys.unread()
    return found


def _read_model(keys: Keys) -> dict[str, Any]:
    name = "model.model_config."
    heads = keys.whole(f"{name}num_attention_heads", 32)
    fields: dict[str, Any] = {
        "model.layers": keys.whole(f"{name}num_hidden_layers", 32),
        "model.hidden": keys.whole(f"{name}hidden_size", 4096),
        "model.heads": heads,
        "model.kv_heads": keys.whole(f"{name}num_key_value_heads", heads),
        "model.vocab": keys.whole(f"{name}vocab_size", 32000),
        "model.max_positions": keys.whole(f"{name}max_position_embeddings", 2048),
        "model.norm_eps": keys.number(f"{name}rms_norm_eps", 1e-6),
        "model.rope_theta": keys.number(f"{name}rope_theta", 10000.0),
        "model.tied_embeddings": keys.flag(f"{name}tie_word_embeddings"),
        "model.qkv_bias": keys.flag(f"{name}attention_bias"),
    }
    width = keys.whole(f"{name}intermediate_size", 11008, least=0)
    if f"{name}sliding_window_size" in keys:
        fields["model.sliding_window"] = keys.whole(f"{name}sliding_window_size")
    if f"{name}moe_config.num_experts" not in keys:
        return {**fields, "model.ffn": width}
    layers = keys.value(f"{name}moe_config.layers", [-1])
    dense = layers[0] if isinstance(layers, list) and layers and isinstance(layers[0], int) and layers[0] > 0 else 0
    shared = keys.flag(f"{name}moe_config.enable_shared_expert")
    return {
        **fields,
        "model.ffn": width if dense else 0,
        "model.moe.experts": keys.whole(f"{name}moe_config.num_experts"),
        "model.moe.top_k": keys.whole(f"{name}moe_config.top_k", 2),
        "model.moe.expert_ffn": width,
        "model.moe.dense_layers": dense,
        **({"model.moe.shared_experts": 1} if shared else {}),
    }


def files(job: Job, layout: Layout, settings: Any, said: list[str]) -> tuple[File, ...]:
    head = header.commented(
        TITLE, said, "Data is made up and the tokenizer a stand-in: name yours under data_stages and tokenizer."
    )
    return (File("config.yaml", head + to_yaml(settings)),)


ENGINE = EngineFormat(
    name="nanotron",
    title=TITLE,
    framework="nanotron",
    config="config.yaml",
    native=native,
    files=files,
    parse=lambda text, where: mapping_of(text, where, "YAML"),
    read=read,
    follows=lambda folder, job: f"{torchrun(job)} run_train.py --config-file {folder}/config.yaml",
    why={
        "layout.zero": "nanotron has ZeRO-0 and ZeRO-1",
        "layout.zero_shards": "nanotron shards over all data ranks",
        "layout.keep_gathered": "nanotron has no ZeRO-3",
        "layout.schedule": "nanotron has afab and 1f1b",
        "layout.virtual_stages": "nanotron has one stage a rank",
        "layout.recompute": "nanotron recomputes whole layers or none",
        "layout.context_parallel": "nanotron has the ring and the all-gather",
        "layout.data_parallel": "nanotron reduces in buckets",
        "layout.offload": "nanotron keeps everything on the GPU",
        "job.precision": "nanotron computes in bf16, fp16 and fp32",
        "job.optimizer": "nanotron has AdamW and SGD",
        "job.attention": "nanotron has flash attention",
        "job.dropout": "nanotron's models have no dropout",
        "model.*": "nanotron trains Llama's and Qwen2's classes",
    },
)
