"""DeepSpeed: ds_config.json. Model, pipeline and experts are Python there; only tensor and sequence parallelism are settings.

JSON has no comments. DeepSpeed passes over top-level keys it does not know, so what it cannot say stands under `ultrascale`.
"""

from __future__ import annotations

import json
from typing import Any

from ultrascale.export import table as row
from ultrascale.export.common import OWN_KEY, EngineFormat, File, hugging_face_config
from ultrascale.export.fields import Fields
from ultrascale.export.table import PlanFields, Setting, SettingsReader
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import mapping_of
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

_OPTIMIZERS = {
    "AdamW": "adamw",
    "Adam": "adamw",
    "FusedAdam": "adamw",
    "DeepSpeedCPUAdam": "adamw",
    "Muon": "muon",
    "SGD": "sgd-momentum",
}
_GRADIENTS = {"fp32": "fp32", "bf16": "bf16", "fp16": "bf16"}
_HOST = {"device": "cpu", "pin_memory": True}


def _batch(s: SettingsReader) -> Fields:
    """Data ranks, micro-batch and accumulation: DeepSpeed takes any two of its three settings, and the GPUs give the last."""
    where = s.where
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if s.value(key) == "auto":
            raise SpecError(f"{where}: {key} is 'auto', which only the caller's trainer knows: write the number, such as 8")
    others = s["layout.tp"] * s["layout.cp"]
    total, mbs = s.value("train_batch_size"), s.value("train_micro_batch_size_per_gpu")
    gas = s.whole("gradient_accumulation_steps", 1)
    if mbs is None and total is None:
        raise SpecError(
            f"{where} gives neither train_batch_size nor train_micro_batch_size_per_gpu: give the latter, such as 1"
        )
    if mbs is None:
        dp = s.data_parallel(others)
        size, rest = divmod(s.whole("train_batch_size"), dp * gas)
        if rest or not size:
            raise SpecError(
                f"{where}: train_batch_size is {total} but must be a multiple of {dp} data ranks times {gas}: try {dp * gas}"
            )
        return {"layout.dp": dp, "layout.mbs": size, "layout.gas": gas}
    size = s.whole("train_micro_batch_size_per_gpu")
    if total is None:
        return {"layout.dp": s.data_parallel(others), "layout.mbs": size, "layout.gas": gas}
    total = s.whole("train_batch_size")
    if "gradient_accumulation_steps" not in s:
        gas = max(1, total // (s.data_parallel(others) * size))
        s.notes.append(f"gradient_accumulation_steps = {gas} follows from the batch and the GPUs")
    dp, rest = divmod(total, size * gas)
    if rest or not dp:
        raise SpecError(
            f"{where}: train_batch_size is {total} but micro-batch {size} times {gas} steps do not divide it: try {size * gas}"
        )
    return {"layout.dp": dp, "layout.mbs": size, "layout.gas": gas}


def _zero_shards(s: SettingsReader) -> int | None:
    shards = s.whole("zero_optimization.mics_shard_size", -1, least=-1)
    return shards if shards > 0 else None


def _offload(s: SettingsReader) -> str:
    devices = {"cpu": True, "nvme": True, "none": False}
    if "nvme" in (s.value(f"zero_optimization.offload_{what}.device") for what in ("param", "optimizer")):
        s.notes.append("offload to nvme is counted as offload to the host's memory")
    parameters = s.word("zero_optimization.offload_param.device", devices, "none")
    s.ignore(*(f"zero_optimization.offload_{what}.pin_memory" for what in ("param", "optimizer")))
    optimizer = s.word("zero_optimization.offload_optimizer.device", devices, "none")
    old = "zero_optimization.cpu_offload"  # until 0.4
    parameters = parameters or s.flag(f"{old}_params") or s.flag(f"{old}_param")
    s.ignore(old, f"{old}_use_pin_memory")
    return "parameters" if parameters else "optimizer" if optimizer or s.flag(old) else "none"


def _overlaps(p: PlanFields) -> bool:
    return p.layout.zero > 0 and (p.job.framework.engine != "deepspeed" or p.job.framework.overlap > 0)


def _read_overlap(s: SettingsReader) -> float | None:
    """Without overlap_comm, which stage 3 alone has by default, ZeRO's communication is exposed."""
    stage = s["layout.zero"]
    hides = s.flag("zero_optimization.overlap_comm", stage == 3)
    return None if hides or not stage else 0.0


def _precision(s: SettingsReader) -> str:
    return "bf16" if s.flag("bf16.enabled") else "fp16" if s.flag("fp16.enabled") else "fp32"


def _gradients(p: PlanFields) -> str:
    """Without ZeRO, DeepSpeed accumulates in the format of the parameters and refuses any other."""
    if p.layout.zero:
        return p.job.gradients
    return "bf16" if p.job.precision == "fp8" else p.job.precision


def _sgd(p: PlanFields) -> bool:
    return p.job.optimizer.startswith("sgd")


def _optimizer(p: PlanFields) -> dict[str, Any]:
    training = p.training
    shared = {"lr": training.lr, "weight_decay": training.weight_decay}
    if _sgd(p):
        momentum = training.beta1 if p.job.optimizer == "sgd-momentum" else 0.0
        return {"type": "SGD", "params": {**shared, "momentum": momentum}}
    if p.job.optimizer == "muon":
        return {"type": "Muon", "params": {**shared, "momentum": training.muon_momentum}}
    return {"type": "AdamW", "params": {**shared, "betas": [training.beta1, training.beta2], "eps": training.eps}}


def _read_optimizer(s: SettingsReader) -> str:
    name = str(s.word("optimizer.type", _OPTIMIZERS, "AdamW"))
    return "sgd" if name == "sgd-momentum" and not s.number("optimizer.params.momentum", 0.0) else name


def _recompute(s: SettingsReader) -> str | None:
    group = "activation_checkpointing"
    s.ignore(f"{group}.partition_activations", f"{group}.contiguous_memory_optimization")
    if group not in s.data:
        return None
    s.notes.append(f"{group} is read as recomputation of whole layers")
    return "full"


TABLE = (
    # With AutoTP alone the batch would be compared with every rank, the tensor ranks too.
    Setting(
        "train_batch_size", write=lambda p: p.sequences, read=_batch, written=lambda p: p.layout.tp == 1 or p.layout.pp > 1
    ),
    Setting("train_micro_batch_size_per_gpu", write=lambda p: p.layout.mbs),
    Setting("gradient_accumulation_steps", write=lambda p: p.layout.gas),
    Setting("gradient_clipping", write=lambda p: p.training.clip),
    row.whole("zero_optimization.stage", "layout.zero", 0, least=0),
    Setting(path="layout.zero_shards", read=_zero_shards),
    Setting("zero_optimization.overlap_comm", "framework.overlap", _overlaps, _read_overlap),
    row.constant(
        "zero_optimization.contiguous_gradients", True, read=lambda s: s.ignore("zero_optimization.contiguous_gradients")
    ),
    # Muon needs whole matrices.
    row.constant("zero_optimization.reduce_scatter", False, written=lambda p: p.layout.zero == 3 and p.job.optimizer == "muon"),
    row.constant("zero_optimization.offload_optimizer", _HOST, written=lambda p: p.layout.offload != "none"),
    row.constant("zero_optimization.offload_param", _HOST, written=lambda p: p.layout.offload == "parameters"),
    Setting(path="layout.offload", read=_offload),
    Setting("bf16.enabled", "job.precision", lambda p: p.job.precision in ("bf16", "fp8"), _precision),
    Setting("fp16.enabled", write=lambda p: p.job.precision == "fp16"),
    row.word("data_types.grad_accum_dtype", "job.gradients", _GRADIENTS, "fp32", write=_gradients),
    Setting("optimizer", "job.optimizer", _optimizer, _read_optimizer),
    row.constant("steps_per_print", 10),
    row.constant("wall_clock_breakdown", False),
    # Else ZeRO asserts.
    row.constant("zero_allow_untested_optimizer", True, written=lambda p: p.layout.zero > 0 and _sgd(p)),
    Setting(
        "tensor_parallel.autotp_size",
        "layout.tp",
        read=lambda s: s.whole("tensor_parallel.autotp_size", 1, least=0) or 1,
        written=row.above_one("layout.tp"),
    ),
    row.implied("layout.sequence_parallel", False, when=row.above_one("layout.tp")),  # AutoTP all-reduces
    row.whole("sequence_parallel_size", "layout.cp", 1, written=row.above_one("layout.cp")),
    row.implied("layout.context_parallel", "ulysses", when=row.above_one("layout.cp")),
    row.constant(
        "activation_checkpointing",
        {"partition_activations": False, "contiguous_memory_optimization": False},
        path="layout.recompute",
        read=_recompute,
        written=lambda p: p.layout.recompute == "full",
    ),
)


def files(job: Job, layout: Layout, settings: dict[str, Any], comments: list[str]) -> tuple[File, ...]:
    text = json.dumps({**settings, OWN_KEY: comments}, indent=2, ensure_ascii=True) + "\n"
    return (File("ds_config.json", text), *hugging_face_config(job.model))


ENGINE = EngineFormat(
    name="deepspeed",
    title="DeepSpeed",
    framework="deepspeed",
    config="ds_config.json",
    table=TABLE,
    lost={
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
    files=files,
    parse=lambda text, where: mapping_of(text, where, "JSON"),
    program=("model", "job.seq"),
    start="{torchrun} train.py --deepspeed_config {folder}/ds_config.json",
    needs="DeepSpeed must be installed there, and your train.py be in the working directory.",
)
