"""Configurations as people write them for each engine: no header of ours, variables, keys that a plan does not know."""

from __future__ import annotations

MEGATRON = r"""#!/bin/bash
# Trains a small Llama; don't forget to set DATA.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${NNODES:-4}
DATA=$1
TP=4

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr "${MASTER_ADDR:-localhost}"
)
MODEL_ARGS="
    --num-layers 32 \
    --hidden-size 4096 \
    --ffn-hidden-size 14336 \
    --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0 --hidden-dropout 0.0
"
TRAINING_ARGS=(
    --micro-batch-size 1        # sequences
    --global-batch-size=256
    --train-iters 500000
    --lr 6.0e-5
    --bf16
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-activations
)
torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py \
    $MODEL_ARGS \
    "${TRAINING_ARGS[@]}" \
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2 --sequence-parallel \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model /models/llama --vocab-size 128256 \
    --data-path "$DATA/text; rm -rf x" --save $CHECKPOINTS
"""

TORCHTITAN_TOML = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B"

[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 2
seq_len = 4096
steps = 1000

[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
tensor_paralel_degree = 4

[activation_checkpoint]
mode = "full"
"""

TORCHTITAN_PYTHON = """
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer

SEQ = 4096


def mine() -> Trainer.Config:
    open("/tmp/never", "w").write("run")
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=4, seq_len=4096, steps=100),
        parallelism=ParallelismConfig(tensor_parallel_degree=2, pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B"),
        activation_checkpoint=FullAC.Config(),
    )
"""

NANOTRON = """
checkpoints: {checkpoint_interval: 1000, checkpoints_path: ckpt}
general: {project: smol, run: first, seed: 8}
model:
  dtype: bfloat16
  init_method: {std: 0.025}
  model_config:
    is_llama_config: true
    hidden_size: 2048
    intermediate_size: 8192
    num_attention_heads: 32
    num_hidden_layers: 24
    num_key_value_heads: 32
    max_position_embeddings: 2048
    rms_norm_eps: 1.0e-05
    rope_theta: 10000.0
    tie_word_embeddings: true
    vocab_size: 49152
optimizer:
  zero_stage: 1
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  weight_decay: 0.1
parallelism: {dp: 8, pp: 1, tp: 2, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER, tp_linear_async_communication: true}
tokens: {sequence_length: 2048, train_steps: 2000, micro_batch_size: 8, batch_accumulation_per_replica: 2}
"""

DEEPSPEED = """{
  "train_batch_size": 256,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 8,
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "stage3_max_live_parameters": 1e9
  },
  "bf16": {"enabled": true},
  "gradient_cliping": 1.0
}
"""

ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_activation_checkpointing: true
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""
