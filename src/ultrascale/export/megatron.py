"""Megatron-LM: a run.sh that starts pretrain_gpt.py, from a plan."""

from __future__ import annotations

from ultrascale.export import header, megatron_model, megatron_read
from ultrascale.export.common import EngineFormat, File, lowest_rate, quoted, steps
from ultrascale.export.megatron_model import CONTEXT, SHARDING, STATES, Arguments, Script
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import RopeScaling
from ultrascale.specs.training import Training

TITLE = "Megatron-LM"


def native(job: Job, layout: Layout) -> Script:
    found = megatron_model.arguments(job.model, job.seq, layout.tp)
    found |= _cut(job, layout) | _data_parallel(layout) | _numbers(job, layout) | _run(job, layout)
    return Script(found, job.cluster.nodes, job.cluster.gpus_per_node)


def _cut(job: Job, layout: Layout) -> Arguments:
    found: Arguments = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--context-parallel-size": layout.cp,
    }
    if layout.tp > 1 and layout.sequence_parallel:
        found["--sequence-parallel"] = True
    if layout.cp > 1:
        found["--cp-comm-type"] = CONTEXT.get(layout.context_parallel, "p2p")
    if job.model.moe is not None:
        found["--expert-model-parallel-size"] = layout.ep
        found["--expert-tensor-parallel-size"] = layout.tp if layout.data_ranks % layout.ep == 0 else 1
    virtual = layout.virtual_stages if layout.schedule == "interleaved" else 1
    if layout.pp > 1 and job.model.layers % (layout.pp * virtual):
        found["--pipeline-model-parallel-layout"] = _uneven(job.model.layers, layout.pp * virtual)
    elif virtual > 1:
        found["--num-virtual-stages-per-pipeline-rank"] = virtual
    if layout.recompute == "full":
        found |= {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}
    elif layout.recompute == "selective":
        found["--recompute-granularity"] = "selective"
    return found


def _uneven(layers: int, stages: int) -> str:
    """Layers that no even cut fits, the longer stages first: `Et*3|t*3|t*2L`."""
    short, longer = divmod(layers, stages)
    parts = [f"t*{short + (1 if stage < longer else 0)}" for stage in range(stages)]
    return "E" + "|".join(parts) + "L"


def _data_parallel(layout: Layout) -> Arguments:
    found: Arguments = {}
    if layout.data_parallel in ("bucketed", "hooks") or layout.zero:
        found["--overlap-grad-reduce"] = True
    if layout.zero:
        found["--use-distributed-optimizer"] = True
        found["--overlap-param-gather"] = True
    if layout.zero > 1:
        names = {stage: name for name, stage in SHARDING.items()}
        found |= {
            "--use-megatron-fsdp": True,
            "--data-parallel-sharding-strategy": names[layout.zero],
            "--no-gradient-accumulation-fusion": True,
            "--ckpt-format": "fsdp_dtensor",
        }
    if layout.zero and layout.shards < layout.data_ranks:
        found["--num-distributed-optimizer-instances"] = layout.data_ranks // layout.shards
    return found


def _numbers(job: Job, layout: Layout) -> Arguments:
    found: Arguments = {"--attention-backend": "unfused" if job.attention == "plain" else "flash"}
    if job.precision in ("bf16", "fp8"):
        found["--bf16"] = True
    if job.precision == "fp8":
        found |= {"--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"}
    if job.precision == "fp16":
        found["--fp16"] = True
    found["--grad-reduce-in-bf16" if job.gradients == "bf16" else "--accumulate-allreduce-grads-in-fp32"] = True
    found |= _optimizer(job, layout)
    rate = 0.1 if job.dropout else 0.0
    return found | {"--attention-dropout": rate, "--hidden-dropout": rate}


def _optimizer(job: Job, layout: Layout) -> Arguments:
    training = Training()
    offloads: Arguments = {"--optimizer-cpu-offload": True} if layout.offload != "none" else {}
    if job.optimizer.startswith("sgd"):
        return {"--optimizer": "sgd", "--sgd-momentum": training.beta1 if job.optimizer == "sgd-momentum" else 0.0} | offloads
    if job.optimizer == "muon":
        return {"--optimizer": "muon", "--ckpt-format": "torch"} | offloads
    states = STATES[job.optimizer]
    found: Arguments = {"--optimizer": "adam", "--adam-beta1": training.beta1, "--adam-beta2": training.beta2}
    if offloads or states != "fp32":
        found |= {"--use-precision-aware-optimizer": True, "--exp-avg-dtype": states, "--exp-avg-sq-dtype": states}
    return found | offloads


def _run(job: Job, layout: Layout) -> Arguments:
    count = steps(job)
    training = Training().changed(steps=count)
    return {
        "--seq-length": job.seq,
        "--micro-batch-size": layout.mbs,
        "--global-batch-size": layout.dp * layout.mbs * layout.gas,
        "--train-iters": count,
        "--lr": training.lr,
        "--min-lr": lowest_rate(training),
        "--lr-warmup-iters": training.warmup,
        "--lr-decay-style": "cosine",
        "--weight-decay": training.weight_decay,
        "--clip-grad": training.clip,
        "--mock-data": True,
        "--log-interval": 1,
        "--eval-iters": 0,
    }


def files(job: Job, layout: Layout, script: Script, said: list[str]) -> tuple[File, ...]:
    notes = ["Data is mocked and the tokenizer a stand-in: put --data-path and your --tokenizer-type in their places."]
    if job.model.activation == "relu":
        notes.append("Megatron's ReLU is squared.")
    cut = layout.tp > 1 or layout.cp > 1
    connections = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if cut and "--use-megatron-fsdp" not in script.arguments else ""
    words = [name if value is True else f"{name} {quoted(str(value))}" for name, value in script.arguments.items()]
    text = f"""#!/usr/bin/env bash
{header.commented(TITLE, said, *notes)}set -euo pipefail
{connections}torchrun \\
  --nnodes {script.nodes} --nproc-per-node {script.gpus_per_node} \\
  --node-rank "${{NODE_RANK:-0}}" --master-addr "${{MASTER_ADDR:-localhost}}" --master-port "${{MASTER_PORT:-29500}}" \\
  "${{MEGATRON_LM:-.}}"/pretrain_gpt.py \\
  """
    return (File("run.sh", text + " \\\n  ".join(words) + "\n"),)


ENGINE = EngineFormat(
    name="megatron",
    title=TITLE,
    framework="megatron-core",
    config="run.sh",
    native=native,
    files=files,
    parse=megatron_read.parse,
    read=megatron_read.read,
    follows=lambda folder, job: f"MEGATRON_LM=/path/to/Megatron-LM bash {folder}/run.sh",
    why={
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
        **dict.fromkeys(
            (f"model.rope_scaling.{name}" for name in RopeScaling.model_fields),
            "Megatron-LM has Llama 3's scaling of a context of 8192, and linear interpolation by whole factors",
        ),
        "model.qkv_bias": "Megatron-LM has biases everywhere, in qkv alone, or nowhere",
        "model.attention_output_bias": "Megatron-LM has biases everywhere, in qkv alone, or nowhere",
        "model.mlp_bias": "Megatron-LM has biases everywhere, in qkv alone, or nowhere",
        "model.moe.shared_experts": "Megatron-LM counts their width alone",
    },
    world=megatron_read.world,
)
