"""DeepSpeed: ds_config.json. Model, pipeline and experts are Python there; tensor and sequence cuts alone are settings.

JSON has no comments. DeepSpeed passes over top-level keys it does not know, so what it cannot say stands under `ultrascale`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ultrascale.export import hugging_face
from ultrascale.export.common import EngineFormat, File, Found, World
from ultrascale.export.keys import Keys
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import mapping_of
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training

TITLE = "DeepSpeed"
OWN = "ultrascale"
_OPTIMIZERS = {
    "AdamW": "adamw",
    "Adam": "adamw",
    "FusedAdam": "adamw",
    "DeepSpeedCPUAdam": "adamw",
    "Muon": "muon",
    "SGD": "sgd-momentum",
}


def native(job: Job, layout: Layout) -> dict[str, Any]:
    training = Training()
    settings: dict[str, Any] = {
        "train_batch_size": layout.dp * layout.mbs * layout.gas,
        "train_micro_batch_size_per_gpu": layout.mbs,
        "gradient_accumulation_steps": layout.gas,
        "gradient_clipping": training.clip,
        "zero_optimization": _zero(job, layout),
        "bf16": {"enabled": job.precision in ("bf16", "fp8")},
        "fp16": {"enabled": job.precision == "fp16"},
        "data_types": {"grad_accum_dtype": _gradients(job, layout)},
        "optimizer": _optimizer(job, training),
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    }
    if layout.zero and job.optimizer.startswith("sgd"):
        settings["zero_allow_untested_optimizer"] = True  # else it asserts
    if layout.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.tp}
        if layout.pp == 1:
            del settings["train_batch_size"]  # AutoTP alone: it would be compared with every rank, the tensor ranks too
    if layout.cp > 1:
        settings["sequence_parallel_size"] = layout.cp
    if layout.recompute == "full":
        settings["activation_checkpointing"] = {"partition_activations": False, "contiguous_memory_optimization": False}
    return settings


def _gradients(job: Job, layout: Layout) -> str:
    """Without ZeRO, DeepSpeed accumulates in the format of the parameters and refuses any other."""
    if layout.zero:
        return job.gradients
    return "bf16" if job.precision == "fp8" else job.precision


def _zero(job: Job, layout: Layout) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": layout.zero, "overlap_comm": layout.zero > 0, "contiguous_gradients": True}
    if layout.zero == 3 and job.optimizer == "muon":
        zero["reduce_scatter"] = False  # Muon needs whole matrices
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if layout.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def _optimizer(job: Job, training: Training) -> dict[str, Any]:
    shared: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
    if job.optimizer.startswith("sgd"):
        return {"type": "SGD", "params": {**shared, "momentum": training.beta1 if job.optimizer == "sgd-momentum" else 0.0}}
    if job.optimizer == "muon":
        return {"type": "Muon", "params": {**shared, "momentum": training.beta1}}
    return {"type": "AdamW", "params": {**shared, "betas": [training.beta1, training.beta2], "eps": training.eps}}


def read(data: Any, where: str, world: World) -> Found:
    keys = Keys({name: value for name, value in data.items() if name != OWN}, where)
    found = Found()
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if keys.value(key) == "auto":
            raise SpecError(f"{where}: {key} is 'auto', which only the caller's trainer knows: write the number, such as 8")
    tp, cp = keys.whole("tensor_parallel.autotp_size", 1, least=0) or 1, keys.whole("sequence_parallel_size", 1)
    dp, mbs, gas = _batch(keys, where, world, tp * cp, found)
    zero = keys.whole("zero_optimization.stage", 0, least=0)
    precision = "bf16" if keys.flag("bf16.enabled") else "fp16" if keys.flag("fp16.enabled") else "fp32"
    optimizer = keys.word("optimizer.type", _OPTIMIZERS, "AdamW")
    if optimizer == "sgd-momentum" and not keys.number("optimizer.params.momentum", 0.0):
        optimizer = "sgd"
    found.fields = {
        "layout.dp": dp,
        "layout.tp": tp,
        "layout.cp": cp,
        "layout.zero": zero,
        "layout.mbs": mbs,
        "layout.gas": gas,
        "layout.offload": _offload(keys),
        "layout.recompute": "full" if "activation_checkpointing" in data else "none",
        "job.precision": precision,
        "job.gradients": keys.word("data_types.grad_accum_dtype", {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}, "fp32"),
        "job.optimizer": optimizer,
    }
    if tp > 1:
        found.fields["layout.sequence_parallel"] = False  # AutoTP all-reduces
    if cp > 1:
        found.fields["layout.context_parallel"] = "ulysses"
    shards = keys.whole("zero_optimization.mics_shard_size", -1, least=-1)
    if shards > 0:
        found.fields["layout.zero_shards"] = shards
    if "activation_checkpointing" in data:
        found.notes.append("activation_checkpointing is read as recomputation of whole layers")
    keys.passed("activation_checkpointing.partition_activations", "activation_checkpointing.contiguous_memory_optimization")
    keys.also_known("gradient_clipping", "steps_per_print", "wall_clock_breakdown", "scheduler.type", "prescale_gradients")
    keys.also_known("zero_allow_untested_optimizer", "zero_optimization.reduce_scatter")
    zero_settings = ("overlap_comm", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size", "sub_group_size")
    keys.also_known(*(f"zero_optimization.{name}" for name in zero_settings))
    found.notes += keys.unread()
    return found


def _batch(keys: Keys, where: str, world: World, others: int, found: Found) -> tuple[int, int, int]:
    """Data ranks, micro-batch and accumulation: DeepSpeed takes any two of its three settings, and the GPUs give the last."""
    total, mbs = keys.value("train_batch_size"), keys.value("train_micro_batch_size_per_gpu")
    gas = keys.whole("gradient_accumulation_steps", 1)
    if mbs is None and total is None:
        raise SpecError(
            f"{where} gives neither train_batch_size nor train_micro_batch_size_per_gpu: give the latter, such as 1"
        )
    if mbs is None:
        dp = world.data_parallel(others, where)
        size, rest = divmod(keys.whole("train_batch_size"), dp * gas)
        if rest or not size:
            raise SpecError(
                f"{where}: train_batch_size is {total} but must be a multiple of {dp} data ranks times {gas}: try {dp * gas}"
            )
        return dp, size, gas
    size = keys.whole("train_micro_batch_size_per_gpu")
    if total is None:
        return world.data_parallel(others, where), size, gas
    whole = keys.whole("train_batch_size")
    if "gradient_accumulation_steps" not in keys:
        dp = world.data_parallel(others, where)
        gas = max(1, whole // (dp * size))
        found.notes.append(f"gradient_accumulation_steps = {gas} follows from the batch and the GPUs")
    dp, rest = divmod(whole, size * gas)
    if rest or not dp:
        raise SpecError(
            f"{where}: train_batch_size is {whole} but micro-batch {size} times {gas} steps do not divide it: try {size * gas}"
        )
    return dp, size, gas


def _offload(keys: Keys) -> str:
    devices = {"cpu": True, "nvme": True, "none": False}
    parameters = keys.word("zero_optimization.offload_param.device", devices, "none")
    optimizer = keys.word("zero_optimization.offload_optimizer.device", devices, "none")
    return "parameters" if parameters else "optimizer" if optimizer else "none"


def files(job: Job, layout: Layout, settings: Mapping[str, Any], said: list[str]) -> tuple[File, ...]:
    text = json.dumps({**settings, OWN: said}, indent=2, ensure_ascii=True) + "\n"
    return (File("ds_config.json", text), *hugging_face.config(job.model))


ENGINE = EngineFormat(
    name="deepspeed",
    title=TITLE,
    framework="eager",
    config="ds_config.json",
    native=native,
    files=files,
    parse=lambda text, where: mapping_of(text, where, "JSON"),
    read=read,
    follows=lambda folder, job: f"deepspeed train.py --deepspeed_config {folder}/ds_config.json",
    why={
        "layout.pp": "DeepSpeed's pipeline is a PipelineModule in your program",
        "layout.schedule": "DeepSpeed's pipeline is a PipelineModule with 1f1b",
        "layout.virtual_stages": "DeepSpeed has one stage a rank",
        "layout.ep": "DeepSpeed's experts are MoE layers in your program",
        "layout.zero_shards": "MiCS needs its own initialisation in your program",
        "layout.keep_gathered": "ZeRO-3 gathers again for backward",
        "layout.sequence_parallel": "AutoTP all-reduces whole activations",
        "layout.context_parallel": "sequence_parallel_size is Ulysses",
        "layout.data_parallel": "DeepSpeed reduces in buckets",
        "layout.recompute": "your program checkpoints; partition_activations alone is a setting",
        "job.gradients": "without ZeRO, DeepSpeed accumulates them in the format of the parameters",
        "job.precision": "DeepSpeed computes in bf16, fp16 and fp32",
        "job.optimizer": "DeepSpeed has AdamW, Muon and SGD with fp32 states",
        "job.seq": "the sequence length is your program's",
        "model": "the model is your program's; model/config.json beside this file has its shape where Hugging Face can say it",
    },
)
