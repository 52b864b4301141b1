"""Example configurations that engines publish: their settings and the constructs they are written with, in our own words.

Each entry names the file whose settings it has. The texts are not copies: order, names and comments are ours, values and the
kind of quoting, defaulting, arithmetic and branching are theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from published_megatron import BRANCHES, FUNCTIONAL_15B, FUNCTIONAL_FP8, GPT3_175B, GPT_345M, LLAMA3_FP8, MIXTRAL

from ultrascale.export.read import ImportOptions
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model


@dataclass(frozen=True)
class Example:
    source: str
    file: str
    text: str
    layout: Layout
    parameters: float
    """in billions"""
    given: ImportOptions = field(default_factory=ImportOptions)
    precision: str = "bf16"
    may_change: tuple[str, ...] = ()
    """settings that are named as not modelled"""
    notes: tuple[str, ...] = ()


def cluster(words: str) -> ImportOptions:
    return ImportOptions(cluster=Cluster.load(words))


def toml(groups: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, group in groups.items():
        lines += [f"\n[{name}]", *(f"{key} = {json.dumps(value)}  # as published" for key, value in group.items())]
    return "\n".join(lines)


MEGATRON = (
    Example(
        "NVIDIA/Megatron-LM examples/llama/train_llama3_8b_h100_fp8.sh",
        "run.sh",
        LLAMA3_FP8,
        Layout(dp=8, zero=1, mbs=1, gas=16),
        8.03,
        precision="fp8",
        may_change=("--manual-gc", "--empty-unused-memory-level"),
        notes=("128,257 is padded to 128,384", "--fp8-param-gather is counted with ZeRO-3 alone"),
    ),
    Example(
        "NVIDIA/Megatron-LM examples/gpt3/train_gpt3_175b_distributed.sh",
        "run.sh",
        GPT3_175B,
        Layout(tp=8, pp=16, gas=1536, sequence_parallel=False, data_parallel="naive"),
        174.6,
        precision="fp16",
        notes=("starts 8 processes, too few for its layout: 128 GPUs", "--rampup-batch-size: the batch is counted", "50,257"),
    ),
    Example(
        "NVIDIA/Megatron-LM examples/mixtral/train_mixtral_8x7b_distributed.sh",
        "run.sh",
        MIXTRAL,
        Layout(dp=8, pp=4, ep=8, zero=1, gas=32),
        46.7,
        may_change=("--no-masked-softmax-fusion",),
        notes=("starts 8 processes, too few for its layout: 32 GPUs", "Llama2Tokenizer: its 32,000 tokens"),
    ),
    Example(
        "NVIDIA/Megatron-LM examples/pretrain_gpt_distributed_with_mp.sh",
        "run.sh",
        GPT_345M,
        Layout(dp=2, tp=2, pp=2, mbs=4, gas=2, recompute="full", sequence_parallel=False, data_parallel="naive"),
        0.356,
        precision="fp16",
    ),
    Example(
        "NVIDIA/Megatron-LM examples/deepseek_v2/train_deepseekv2.sh (its constructs)",
        "run.sh",
        BRANCHES,
        Layout(dp=4, tp=2, zero=1, mbs=4, gas=16, recompute="selective"),
        8.03,
        may_change=("--no-rope-fusion",),
    ),
    Example(
        "NVIDIA/Megatron-LM tests/functional_tests/test_cases/gpt/gpt3_345m_weekly_…_native_fp8_…/model_config.yaml",
        "model_config.yaml",
        FUNCTIONAL_FP8,
        Layout(dp=2, tp=2, pp=2, zero=1, mbs=2, gas=32),
        0.064,
        cluster("8xh100"),
        "fp8",
        may_change=("--tp-comm-overlap-cfg", "--deterministic-mode"),
    ),
    Example(
        "NVIDIA/Megatron-LM tests/functional_tests/test_cases/gpt/gpt3_15b_8t_release/model_config.yaml",
        "model_config.yaml",
        FUNCTIONAL_15B,
        Layout(dp=8, tp=8, zero=1, mbs=4, gas=36),
        15.6,
        cluster("64xh100"),
        may_change=("--manual-gc", "--no-rope-fusion"),
        notes=("the tokenizer's name says 256k",),
    ),
)


def titan(name: str, flavor: str, training: dict[str, Any], cut: dict[str, Any], mode: str, **groups: dict[str, Any]) -> str:
    """The groups that torchtitan's own train_configs have in common, and more."""
    common: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": "./outputs", "description": "as published"},
        "profiling": {"enable_profiling": True, "profile_freq": 100},
        "metrics": {"log_freq": 10, "enable_tensorboard": True},
        "model": {"name": name, "flavor": flavor, **groups.pop("model", {})},
        "optimizer": {"name": "AdamW", "lr": 3e-4, "eps": 1e-8},
        "lr_scheduler": {"warmup_steps": 200},
        "training": {"max_norm": 1.0, "dataset": "c4", **training},
        "parallelism": {"data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, **cut},
        "checkpoint": {"enable_checkpoint": False, "interval": 500, "async_mode": "disabled"},
        "activation_checkpoint": {"mode": mode, **groups.pop("recompute", {})},
    }
    return toml(common | {key.replace("__", "."): group for key, group in groups.items()})


FP8_OFF = {"enable_fsdp_float8_all_gather": False, "precompute_float8_dynamic_scale_for_fsdp": False, "filter_fqns": ["output"]}
FP8_ON = {**FP8_OFF, "enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
EAGER = {"enable": False, "components": ["model", "loss"]}
REGISTRY = """
from torchtitan.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig, TrainingConfig
from . import model_registry

def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192, steps=1000),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective"),
    )

def llama3_405b() -> Trainer.Config:
    return Trainer.Config(
        compile=CompileConfig(enable=True),
        model_spec=model_registry("405B"),
        model_converters=ModelConvertersContainer.Config(
            converters=[Float8LinearConverter.Config(enable_fsdp_float8_all_gather=True, filter_fqns=["output"])],
        ),
        training=TrainingConfig(local_batch_size=2, seq_len=8192, steps=3000),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, enable_async_tensor_parallel=True),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
    )

def llama3_8b_flex() -> Trainer.Config:
    config = llama3_8b()
    config.model_spec = model_registry("8B_flex")
    return config
"""
_TITAN = "pytorch/torchtitan torchtitan/models"
_DEEPSEEK_CUT = {
    "fsdp_reshard_after_forward": "default",
    "tensor_parallel_degree": 1,
    "enable_async_tensor_parallel": False,
    "pipeline_parallel_degree": 1,
    "pipeline_parallel_schedule": "Interleaved1F1B",
    "expert_parallel_degree": 1,
    "expert_tensor_parallel_degree": 1,
}

TORCHTITAN = (
    Example(
        f"{_TITAN}/llama3/train_configs/llama3_8b.toml (batch_size and compile in [training])",
        "train.toml",
        titan(
            "llama3",
            "8B",
            {"batch_size": 1, "seq_len": 8192, "compile": False},
            {"tensor_parallel_degree": 1},
            "selective",
            float8=FP8_OFF,
            recompute={"selective_ac_option": "op"},
        ),
        Layout(dp=64, zero=3, recompute="selective"),
        8.03,
        cluster("64xa100"),
    ),
    Example(
        f"{_TITAN}/llama3/train_configs/llama3_70b.toml",
        "train.toml",
        titan(
            "llama3",
            "70B",
            {"local_batch_size": 8, "seq_len": 8192},
            {"tensor_parallel_degree": 8},
            "full",
            compile=EAGER,
            float8=FP8_OFF,
            validation={"enabled": False, "freq": 500},
        ),
        Layout(dp=8, tp=8, zero=3, mbs=8, recompute="full"),
        70.6,
        cluster("64xa100"),
    ),
    Example(
        f"{_TITAN}/llama3/train_configs/llama3_405b.toml",
        "train.toml",
        titan(
            "llama3",
            "405B",
            {"batch_size": 2, "seq_len": 8192, "compile": True},
            {"tensor_parallel_degree": 8, "enable_async_tensor_parallel": True},
            "full",
            float8=FP8_ON,
            model={"converters": "float8"},
        ),
        Layout(dp=16, tp=8, zero=3, mbs=2, recompute="full"),
        405.9,
        cluster("128xh100"),
        "fp8",
        notes=("enable_async_tensor_parallel: tensor-parallel communication is counted as exposed",),
    ),
    Example(
        f"{_TITAN}/llama3/train_configs/debug_model.toml",
        "train.toml",
        titan(
            "llama3",
            "debugmodel",
            {"local_batch_size": 8, "seq_len": 2048},
            {"fsdp_reshard_after_forward": "default"},
            "selective",
            compile=EAGER,
            recompute={"selective_ac_option": "2"},
        ),
        Layout(dp=8, zero=3, mbs=8, recompute="selective"),
        0.00616,
        cluster("8xh100"),
        notes=("selective_ac_option is 2", "the debug model of torchtitan"),
    ),
    Example(
        f"{_TITAN}/deepseek_v3/train_configs/deepseek_v3_671b.toml",
        "train.toml",
        titan(
            "deepseek_v3",
            "671B",
            {"local_batch_size": 4, "seq_len": 4096},
            _DEEPSEEK_CUT,
            "selective",
            compile={"enable": True, "components": ["loss"]},
            quantize__dense__float8=FP8_OFF,
            quantize__moe__float8={"fqns": ["experts"]},
        ),
        Layout(dp=512, zero=3, mbs=4, recompute="selective"),
        671.0,
        cluster("512xh100"),
        may_change=("quantize.moe.float8.fqns",),
    ),
    Example(
        f"{_TITAN}/deepseek_v3/train_configs/deepseek_v3_16b.toml",
        "train.toml",
        titan(
            "deepseek_v3",
            "16B",
            {"local_batch_size": 8, "seq_len": 4096, "compile": False},
            _DEEPSEEK_CUT,
            "full",
            float8={**FP8_OFF, "moe_fqns": ["experts"]},
        ),
        Layout(dp=64, zero=3, mbs=8, recompute="full"),
        15.7,
        cluster("64xh100"),
        may_change=("float8.moe_fqns",),
    ),
    Example(
        f"{_TITAN}/qwen3/train_configs/qwen3_32b.toml",
        "train.toml",
        titan(
            "qwen3",
            "32B",
            {"local_batch_size": 2, "seq_len": 4096},
            {"context_parallel_degree": 1},
            "full",
            compile=EAGER,
            quantize__linear__float8=FP8_OFF,
            training__data={"name": "c4"},
        ),
        Layout(dp=8, zero=3, mbs=2, recompute="full"),
        32.8,
        cluster("8xh100"),
    ),
    Example(
        f"{_TITAN}/llama3/config_registry.py (llama3_405b)",
        "config_registry.py:llama3_405b",
        REGISTRY,
        Layout(dp=16, tp=8, zero=3, mbs=2, recompute="full"),
        405.9,
        cluster("128xh100"),
        "fp8",
    ),
)


def nanotron(model: str, cut: str, tokens: str) -> str:
    return f"""
checkpoints: {{checkpoint_interval: 10, checkpoints_path: checkpoints, resume_checkpoint_path: null}}
data_stages:
- data: {{dataset: {{hf_dataset_or_datasets: stas/openwebtext-10k}}, num_loading_workers: 1, seed: 42}}
  name: Stable Training Stage
  start_training_step: 1
general: {{benchmark_csv_path: null, ignore_sanity_checks: true, project: debug, run: tiny_%date_%jobid, seed: 42, step: null}}
lighteval: null
logging: {{iteration_step_info_interval: 1, log_level: info}}
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method: {{std: 0.025}}
  make_vocab_size_divisible_by: 1
  model_config: {{bos_token_id: 1, hidden_act: silu, pad_token_id: null, pretraining_tp: 1, rms_norm_eps: 1.0e-05,
    rope_scaling: null, tie_word_embeddings: true, use_cache: true, {model}}}
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  learning_rate_scheduler: {{learning_rate: 0.0003, lr_decay_starting_step: null, lr_decay_style: cosine}}
  optimizer_factory: {{adam_beta1: 0.9, adam_eps: 1.0e-08, name: adamW, torch_adam_is_fused: true}}
  weight_decay: 0.01
  zero_stage: 0
parallelism: {{expert_parallel_size: 1, pp_engine: 1f1b, tp_linear_async_communication: true, tp_mode: REDUCE_SCATTER, {cut}}}
profiler: null
tokenizer: {{tokenizer_max_length: null, tokenizer_name_or_path: gpt2}}
tokens: {{batch_accumulation_per_replica: 1, limit_val_batches: 0, val_check_interval: -1, {tokens}}}
"""


_TINY = "is_llama_config: true, hidden_size: 16, intermediate_size: 64, num_attention_heads: 4, num_key_value_heads: 4"
_QWEN = "is_qwen2_config: true, hidden_size: 256, intermediate_size: 768, num_attention_heads: 4, num_key_value_heads: 4"
_SMOL = "is_llama_config: true, hidden_size: 576, intermediate_size: 1536, num_attention_heads: 9, num_key_value_heads: 3"

NANOTRON = (
    Example(
        "huggingface/nanotron examples/config_tiny_llama.yaml",
        "config.yaml",
        nanotron(
            f"{_TINY}, num_hidden_layers: 2, max_position_embeddings: 256, vocab_size: 256",
            "dp: 2, pp: 2, tp: 2",
            "micro_batch_size: 2, sequence_length: 256, train_steps: 15",
        ),
        Layout(dp=2, pp=2, tp=2, mbs=2, schedule="afab"),
        1.24e-5,
        notes=("1f1b with 1 micro-batches on 2 stages",),
    ),
    Example(
        "huggingface/nanotron examples/config_qwen.yaml",
        "config.yaml",
        nanotron(
            f"{_QWEN}, num_hidden_layers: 12, max_position_embeddings: 256, vocab_size: 49152, sliding_window_size: 20, "
            "_attn_implementation: flex_attention, rope_theta: 10000.0, moe_config: null, z_loss_enabled: false",
            "dp: 1, pp: 1, tp: 2, context_parallel_size: 1, recompute_layer: false, tp_recompute_allgather: true",
            "micro_batch_size: 3, sequence_length: 8192, train_steps: 15",
        ),
        Layout(tp=2, mbs=3),
        0.0228,
        may_change=(
            "model.model_config._attn_implementation",
            "parallelism.tp_recompute_allgather",
        ),
    ),
    Example(
        "huggingface/nanotron examples/config_qwen_with_moe.yaml",
        "config.yaml",
        nanotron(
            f"{_QWEN}, num_hidden_layers: 12, max_position_embeddings: 4096, vocab_size: 128256, "
            "moe_config: {num_experts: 8, top_k: 1, enable_shared_expert: true, token_dispatcher_type: alltoall}",
            "dp: 2, pp: 1, tp: 1, context_parallel_size: 1, recompute_layer: false",
            "micro_batch_size: 3, sequence_length: 4096, train_steps: 32000",
        ),
        Layout(dp=2, mbs=3),
        0.0997,
    ),
    Example(
        "huggingface/smollm pre-training/smollm1/config_smollm1_135M.yaml",
        "config.yaml",
        nanotron(
            f"{_SMOL}, num_hidden_layers: 30, max_position_embeddings: 2048, vocab_size: 49152, rope_theta: 10000.0",
            "dp: 64, pp: 1, tp: 1, recompute_layer: false",
            "micro_batch_size: 8, sequence_length: 2048, train_steps: 2000000",
        ),
        Layout(dp=64, mbs=8),
        0.1345,
    ),
)

_PROGRAM = ImportOptions(cluster=Cluster.load("16xh100"), model=Model.load("gpt2"), seq=1024)
_FP16 = {"enabled": True, "loss_scale": 1024, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}
_STAGE_3 = {
    "stage": 3,
    "stage3_max_live_parameters": 1e9,
    "contiguous_gradients": True,
    "overlap_comm": True,
    "sub_group_size": 4e8,
}
_NOT_MODELLED = ("zero_optimization.stage3_max_live_parameters", "zero_optimization.sub_group_size")

DEEPSPEED = (
    Example(
        "bigscience-workshop/Megatron-DeepSpeed tests/ds_config_bf16.json",
        "ds.json",
        json.dumps(
            {
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": 1,
                "bf16": {"enabled": True},
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": 1},
                "steps_per_print": 2000,
                "wall_clock_breakdown": False,
            }
        ),
        Layout(dp=16, zero=1),
        0.124,
        _PROGRAM,
    ),
    Example(
        "microsoft/DeepSpeedExamples Megatron-LM/scripts/ds_zero2_config.json",
        "ds.json",
        json.dumps(
            {
                "train_batch_size": 16,
                "gradient_accumulation_steps": 1,
                "zero_optimization": {"stage": 2},
                "fp16": _FP16,
                "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
                "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": False},
            }
        ),
        Layout(dp=16, zero=2, recompute="full"),
        0.124,
        _PROGRAM,
        "fp16",
    ),
    Example(
        "microsoft/DeepSpeedExamples Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_3_config_release.json",
        "ds.json",
        json.dumps(
            {
                "train_batch_size": 64,
                "gradient_accumulation_steps": 1,
                "fp16": _FP16,
                "wall_clock_breakdown": True,
                "zero_optimization": {
                    **_STAGE_3,
                    "cpu_offload": True,
                    "cpu_offload_params": True,
                    "cpu_offload_use_pin_memory": True,
                },
            }
        ),
        Layout(dp=16, zero=3, mbs=4, offload="parameters"),
        0.124,
        _PROGRAM,
        "fp16",
        may_change=_NOT_MODELLED,
    ),
    Example(
        "microsoft/DeepSpeedExamples Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_infinity_config.json",
        "ds.json",
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 1,
                "fp16": _FP16,
                "zero_optimization": {
                    **_STAGE_3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme_data", "pin_memory": True},
                    "offload_param": {"device": "nvme", "nvme_path": "/nvme_data", "pin_memory": True},
                },
                "aio": {"queue_depth": 16},
            }
        ),
        Layout(dp=16, zero=3, mbs=4, offload="parameters"),
        0.124,
        _PROGRAM,
        "fp16",
        may_change=(
            *_NOT_MODELLED,
            "zero_optimization.offload_optimizer.nvme_path",
            "zero_optimization.offload_param.nvme_path",
            "aio.queue_depth",
        ),
        notes=("offload to nvme is counted as offload to the host's memory",),
    ),
)

EXAMPLES = (*MEGATRON, *TORCHTITAN, *NANOTRON, *DEEPSPEED)
