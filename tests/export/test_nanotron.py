"""nanotron's YAML against a reader written from its configuration classes (the main branch): sections, keys, types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_builders import PLANS, exported, plan_of

# key -> types that nanotron's dataclasses take; every key here is one of theirs, `*` those that have no default
KEYS: dict[str, dict[str, tuple[type, ...]]] = {
    "general": {"project*": (str,), "run": (str,), "seed": (int,), "ignore_sanity_checks": (bool,)},
    "checkpoints": {"checkpoints_path*": (str,), "checkpoint_interval*": (int,)},
    "parallelism": {
        "dp*": (int,),
        "pp*": (int,),
        "tp*": (int,),
        "pp_engine": (str,),
        "tp_mode": (str,),
        "tp_linear_async_communication": (bool,),
        "recompute_layer": (bool,),
        "expert_parallel_size": (int,),
        "context_parallel_size": (int,),
    },
    "tokens": {
        "sequence_length*": (int,),
        "train_steps*": (int,),
        "micro_batch_size*": (int,),
        "batch_accumulation_per_replica*": (int,),
        "val_check_interval": (int,),
        "limit_val_batches": (int,),
    },
    "optimizer": {
        "optimizer_factory*": (dict,),
        "zero_stage*": (int,),
        "weight_decay*": (float,),
        "clip_grad*": (float,),
        "accumulate_grad_in_fp32*": (bool,),
        "learning_rate_scheduler*": (dict,),
    },
    "model": {
        "model_config*": (dict,),
        "init_method*": (dict,),
        "dtype": (str,),
        "make_vocab_size_divisible_by": (int,),
        "ddp_bucket_cap_mb": (int,),
    },
    "tokenizer": {"tokenizer_name_or_path": (str,)},
    "logging": {"iteration_step_info_interval": (int,), "log_level": (str,), "log_level_replica": (str,)},
}
MODEL = {
    "is_llama_config", "is_qwen2_config", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "attention_bias", "rms_norm_eps", "rope_theta",
    "rope_interleaved", "tie_word_embeddings", "vocab_size", "sliding_window_size", "_attn_implementation", "moe_config",
}  # fmt: skip
EXPERTS = {"num_experts", "top_k", "layers", "enable_shared_expert", "token_dispatcher_type"}


@pytest.mark.parametrize("name", PLANS)
def test_sections_keys_and_types(name: str, tmp_path: Path) -> None:
    data: dict[str, Any] = yaml.safe_load((exported(plan_of(name), "nanotron", tmp_path) / "config.yaml").read_text())
    assert set(data) == {*KEYS, "data_stages"}
    for section, keys in KEYS.items():
        known = {key.rstrip("*"): types for key, types in keys.items()}
        assert set(data[section]) <= set(known), section
        assert {key.rstrip("*") for key in keys if key.endswith("*")} <= set(data[section]), section
        for key, value in data[section].items():
            assert type(value) in known[key], f"{section}.{key}"
    config = data["model"]["model_config"]
    assert set(config) <= MODEL
    assert ("is_llama_config" in config) != ("is_qwen2_config" in config)
    assert set(config.get("moe_config", {})) <= EXPERTS
    assert data["parallelism"]["tp_mode"] in ("ALL_REDUCE", "REDUCE_SCATTER")
    assert data["data_stages"][0]["start_training_step"] == 1
