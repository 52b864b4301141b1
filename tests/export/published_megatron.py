"""Texts of published.py for Megatron-LM: scripts, and YAML of its functional tests."""

from __future__ import annotations

LLAMA3_FP8 = r"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
#export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-19}
OUT=${1:-"out/8b fp8"}      # don't forget
TOK=${2:-"MOCK"}
DATA=${3:-"MOCK"}
mkdir -p "$(dirname "$OUT")"
PER_NODE=8
NODES=1
RANK_OF_NODE=${RANK_OF_NODE:-0}
ALL=$(($PER_NODE*$NODES))
ENTRY="pretrain_gpt.py"
TP=1
CP=1
MBS=1
GBS=128
LAYERS=32
KIND="fp8"
SEQ=8192
CACHE="${PWD}/cache"
LAUNCH=(
    --nproc_per_node $PER_NODE
    --nnodes $NODES
    --node_rank $RANK_OF_NODE
    --master_addr ${MASTER_ADDR:-localhost}
)
SHAPE=(
    --use-mcore-models
    --hidden-size 4096
    --num-layers $LAYERS
    --num-attention-heads 32
    --ffn-hidden-size 14336
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --max-position-embeddings $SEQ
    --seq-length $SEQ
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --swiglu
    --normalization RMSNorm
    --attention-backend fused
    --init-method-std 0.0134
    --apply-layernorm-1p
    --disable-bias-linear
    --untie-embeddings-and-output-weights
)
STEPS=(
    --global-batch-size $GBS
    --micro-batch-size $MBS
    --train-samples 1953125000
    --lr-warmup-samples 3906252
    --lr-decay-samples 1949218748
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4      # of the embedding
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --weight-decay 0.1
    --clip-grad 1.0
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --empty-unused-memory-level 1
    --exit-duration-in-mins 235
)
FORMAT=()
if [[ "$KIND" == "fp8" ]]; then
    FORMAT+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi
SPLIT=(
    --context-parallel-size $CP
    --tensor-model-parallel-size $TP
    # --pipeline-model-parallel-size $PP
    --sequence-parallel  # though there is no tensor parallelism
)
ZERO=(
    --overlap-grad-reduce
    --overlap-param-gather
    --use-distributed-optimizer
)
STEPS+=("${ZERO[@]}")
INPUT=()
if [[ "$TOK" == "MOCK" ]] || [[ "$DATA" == "MOCK" ]] || [[ -z "$TOK" ]]; then
    INPUT+=(
        "--mock-data"
        "--vocab-size 128256"
        "--tokenizer-type NullTokenizer"
        "--data-cache-path ${CACHE}"
        "--tiktoken-pattern v2"
        "--split '99,1,0'"
        "--no-create-attention-mask-in-dataloader"
        "--no-mmap-bin-files"
        "--num-workers 1"
    )
else
    INPUT+=(
        "--data-path $DATA"
        "--vocab-size 1000"
        "--tokenizer-type HuggingFaceTokenizer"
    )
fi
REST=(
    --log-interval 1
    --eval-iters 32
    --log-throughput
    --profile
    --profile-step-start 4
    --ckpt-format torch_dist
    --distributed-timeout-minutes 60
    --save "$OUT"
)
if [ ! -f "$ENTRY" ]; then
    echo "pretrain_gpt.py isn't at $ENTRY"
    exit 1
fi
torchrun ${LAUNCH[@]} \
    "$ENTRY" \
    ${SHAPE[@]} \
    ${STEPS[@]} \
    ${FORMAT[@]} \
    ${SPLIT[@]} \
    ${INPUT[@]} \
    ${REST[@]}
set +x
"""

GPT3_175B = r"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
PER_NODE=8
NODES=1
ALL=$(($PER_NODE*$NODES))
VOCABULARY=$1 #<a path>/vocab.json
MERGES=$2 #<a path>
LAUNCH=(
    --nproc_per_node $PER_NODE
    --nnodes $NODES
)
SHAPE=(
    --hidden-size 12288
    --num-layers 96
    --num-attention-heads 96
    --max-position-embeddings 2048
    --seq-length 2048
    --attention-backend auto # or another
)
STEPS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --init-method-std 0.006
    --fp16
    --lr 6.0e-5
    --lr-warmup-fraction .001
)
SPLIT=(
    --pipeline-model-parallel-size 16
    --tensor-model-parallel-size 8
)
INPUT=(
    --vocab-file $VOCABULARY
    --merge-file $MERGES
    --split 949,50,1
)
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${SHAPE[@]} \
    ${STEPS[@]} \
    ${SPLIT[@]} \
    ${INPUT[@]}
"""

MIXTRAL = r"""#!/bin/bash
PER_NODE=8
NODES=${SLURM_NNODES:-"1"}
ADDRESS=${MASTER_ADDR:-"localhost"}
TOKENIZER=$2
LAUNCH=(
    --nproc_per_node $PER_NODE
    --nnodes $NODES
    --master_addr $ADDRESS
)
SHAPE=(
    --use-mcore-models
    --seq-length 4096
    --max-position-embeddings 32768
    --hidden-size 4096
    --num-layers 32
    --num-attention-heads 32
    --ffn-hidden-size 14336
    --group-query-attention
    --num-query-groups 8
    --disable-bias-linear
    --normalization RMSNorm
    --position-embedding-type rope
    --no-position-embedding
    --rotary-base 1000000
    --swiglu
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.01
    --untie-embeddings-and-output-weights
    --no-masked-softmax-fusion
)
EXPERTS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall
    --moe-grouped-gemm
    --overlap-grad-reduce
    --overlap-param-gather
)
INPUT=(
    --tokenizer-type Llama2Tokenizer
    --tokenizer-model ${TOKENIZER}
    --split 99990,8,2
)
STEPS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 500000
    --lr 1e-4
    --bf16
)
SPLIT=(
    --pipeline-model-parallel-size 4
    --tensor-model-parallel-size 1
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --sequence-parallel
)
LOGS=(
    --eval-iters 10 \
    --tensorboard-dir "${OUT}/tensorboard" \
    --no-load-rng
)
if [ -n "${WANDB_API_KEY}" ]; then
    LOGS+=(
        --wandb-project ${WANDB_PROJECT:-"Mixtral"}
        --bf17
    )
fi
torchrun ${LAUNCH[@]} pretrain_gpt.py \
    ${SHAPE[@]} \
    ${EXPERTS[@]} \
    ${INPUT[@]} \
    ${STEPS[@]} \
    ${SPLIT[@]} \
    ${LOGS[@]}
"""

GPT_345M = r"""#! /bin/bash
PER_NODE=${GPUS_PER_NODE:-8}
NODES=${NNODES:-1}
FROM=${DATA_PATH:-<some prefix>_text_document}
LAUNCH="--nproc_per_node $PER_NODE --nnodes $NODES --node_rank ${NODE_RANK:-0}"
python -m torch.distributed.launch $LAUNCH \
       pretrain_gpt.py \
       --pipeline-model-parallel-size 2 \
       --tensor-model-parallel-size 2 \
       --hidden-size 1024 \
       --num-layers 24 \
       --num-attention-heads 16 \
       --seq-length 1024 \
       --max-position-embeddings 1024 \
       --micro-batch-size 4 \
       --global-batch-size 16 \
       --train-iters 500000 \
       --data-path $FROM \
       --vocab-file gpt2-vocab.json \
       --merge-file gpt2-merges.txt \
       --data-impl mmap \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 0.00015 \
       --checkpoint-activations \
       --fp16
"""

# The branches of examples/deepseek_v2/train_deepseekv2.sh, its options in strings and its eval, with Llama's sizes.
BRANCHES = r"""#!/bin/bash
set -e
HERE="$( cd "$( dirname "$0" )" && pwd )"
WHERE=dsw
SIZE=8B
TP=2
AC=sel #full
PR=bf16
SP=true
DO=true
OUTSIDE=false
LOG=$HERE/log-${PR}-tp${TP}.txt
if [ -z ${LAYERS_OF_AC} ];then
    LAYERS_OF_AC=1
fi
if [ $WHERE = dsw ]; then
PORT=$(shuf -n 1 -i 10000-65535)
NODES=1
PER_NODE=8
elif [ $WHERE = dlc ]; then
NODES=${WORLD_SIZE}
PER_NODE=${KUBERNETES_CONTAINER_RESOURCE_GPU}
fi
if [ -z ${VP} ]; then
    vp_options=""
else
    vp_options=" \
        --num-layers-per-virtual-pipeline-stage ${VP}"
fi
if [ $SIZE = 70B ]; then
HIDDEN=8192
LAYERS=80
elif [ $SIZE = 8B ]; then
HIDDEN=4096
LAYERS=32
fi
OVERLAPS=$(( ($TP > 1) ? 1 : 0 ))
overlap_options="\
    --overlap-grad-reduce"
if [ $OVERLAPS -eq 1 ]; then
    overlap_options="\
        --tp-comm-overlap \
        --overlap-grad-reduce \
        --overlap-param-gather"
fi
if [ $AC = full ]; then
    ac_options=" \
            --recompute-granularity full"
elif [ $AC = sel ]; then
    ac_options=" \
        --recompute-activations"
fi
if [ $PR = fp16 ]; then
    pr_options=" \
            --fp16"
elif [ $PR = bf16 ]; then
    pr_options=" \
        --bf16"
elif [ $PR = fp8 ]; then
    pr_options=" \
        --bf16
        --fp8-hybrid"
fi
if [ $OUTSIDE != false ] && [ $DO = false ]; then
    echo "it isn't valid without \$DO=true"
    DO=true
fi
if [ $DO = true ]; then
    do_options=" \
            --use-distributed-optimizer"
fi
if [ $SP = true ] && [ $TP -gt 1 ]; then
    sp_options=" \
            --sequence-parallel"
fi
options="  \
        --lr-decay-iters $(( 20 - 2)) \
        --micro-batch-size 4 \
        --global-batch-size 256 \
        --num-layers ${LAYERS} \
        --hidden-size ${HIDDEN} \
        --num-attention-heads 32 \
        --group-query-attention \
        --num-query-groups 8 \
        --ffn-hidden-size 14336 \
        --seq-length 2048 \
        --max-position-embeddings 8192 \
        --vocab-size 128256 \
        --make-vocab-size-divisible-by 1 \
        --swiglu \
        --normalization RMSNorm \
        --use-rotary-position-embeddings \
        --rotary-base 500000 \
        --untie-embeddings-and-output-weights \
        --disable-bias-linear \
        --attention-dropout 0.0 --hidden-dropout 0.0 \
        --no-rope-fusion \
        --tensor-model-parallel-size ${TP} \
        --use-flash-attn
        "
LAUNCH="--nproc_per_node $PER_NODE --nnodes $NODES --master_port $PORT"
run="torchrun $LAUNCH pretrain_llama.py
 ${options} ${pr_options} ${ac_options} ${do_options} ${sp_options} ${overlap_options} ${vp_options}"
run="$run | tee $LOG"
echo ${run}
eval ${run}
echo "throughput: $(grep -Eo 'per GPU [^|]*' $LOG)" |& tee -a $LOG
"""

FUNCTIONAL_FP8 = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
TEST_TYPE: regular
MODEL_ARGS:
  --hidden-size: 512
  --num-layers: 12
  --num-attention-heads: 8
  --seq-length: 1024
  --max-position-embeddings: 1024
  --micro-batch-size: 2
  --global-batch-size: 128
  --train-iters: 2000
  --save: ${CHECKPOINT_SAVE_PATH}
  --vocab-file: ${DATA_PATH}/bpe/vocab.json
  --merge-file: ${DATA_PATH}/bpe/merges.txt
  --lr-warmup-fraction: .01
  --transformer-impl: transformer_engine
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --sequence-parallel: true
  --tp-comm-overlap: true
  --tp-comm-overlap-cfg: some/where/tp_comm_overlap_cfg.yaml
  --deterministic-mode: true
  --no-gradient-accumulation-fusion: true
  --fp8-format: hybrid
  --fp8-recipe: tensorwise
  --fp8-param-gather: true
  --use-distributed-optimizer: true
  --attention-softmax-in-fp32: true
  --ckpt-format: torch_dist
  --bf16: true
  --normalization: RMSNorm
METRICS:
  - iteration-time
"""

FUNCTIONAL_15B = """
TEST_TYPE: "release"
MODEL_ARGS:
  --tensor-model-parallel-size: 8
  --pipeline-model-parallel-size: 1
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --overlap-grad-reduce: true
  --overlap-param-gather: true
  --micro-batch-size: 4
  --rampup-batch-size: "[384 384 97656250]"
  --global-batch-size: 1152
  --train-samples: 19531250
  --manual-gc: true
  --transformer-impl: transformer_engine
  --tokenizer-model: ${DATA_PATH}/utils/nemotron_2_256k.model
  --untie-embeddings-and-output-weights: true
  --disable-bias-linear: true
  --apply-layernorm-1p: true
  --position-embedding-type: rope
  --no-rope-fusion: true
  --rotary-percent: 0.5
  --squared-relu: true
  --num-layers: 32
  --hidden-size: 6144
  --num-attention-heads: 48
  --group-query-attention: true
  --num-query-groups: 8
  --seq-length: 4096
  --max-position-embeddings: 4096
  --attention-dropout: 0.0
  --hidden-dropout: 0.0
  --bf16: true
  --async-save: true
"""
