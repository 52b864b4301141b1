"""torchtitan: the settings that its 0.2 TOML and its 0.3 Python configurations share, from a plan."""

from __future__ import annotations

from functools import partial
from typing import Any

from ultrascale.export import torchtitan_read
from ultrascale.export import torchtitan_text as text
from ultrascale.export.common import EngineFormat, steps, torchrun
from ultrascale.export.torchtitan_read import ENDS, FLAVORS, LOOPED, SCHEDULES, stages_of
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Training

Settings = dict[str, dict[str, Any]]

_NEW = {("llama3", "1B"), ("llama3", "3B")}  # flavors that 0.2 does not have
_ALIKE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "tied_embeddings", "mla", "moe", "qk_norm")
_STAND_IN = ("llama3", "debugmodel")


def flavor(model: Model, style: str) -> tuple[str, str] | None:
    """The flavor with this model's matrices; positions and epsilons may differ."""
    for name, preset in FLAVORS.items():
        known = Model.presets()[preset]
        if all(getattr(known, field) == getattr(model, field) for field in _ALIKE) and known.gated == model.gated:
            return None if style == "toml" and name in _NEW else name
    return None


def native(style: str, job: Job, layout: Layout) -> Settings:
    name, kind = flavor(job.model, style) or _STAND_IN
    training = Training().changed(steps=max(2, steps(job)))
    pipelined = layout.pp > 1
    settings: Settings = {
        "model": {"name": name, "flavor": kind},
        "training": {
            "local_batch_size": layout.mbs * (layout.gas if pipelined else 1),
            "global_batch_size": layout.dp * layout.mbs * layout.gas,
            "seq_len": job.seq,
            "max_norm": training.clip,
            "steps": training.steps,
            "enable_cpu_offload": layout.offload == "parameters",
            "mixed_precision_param": "float32" if job.precision == "fp32" else "bfloat16",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": _parallelism(style, job, layout),
        "activation_checkpoint": {"mode": layout.recompute},
        "optimizer": {
            "lr": training.lr,
            "beta1": training.beta1,
            "beta2": training.beta2,
            "weight_decay": training.weight_decay,
        },
        "lr_scheduler": {
            "warmup_steps": training.warmup,
            "decay_type": "cosine",
            "min_lr_factor": training.min_lr_ratio,
        },
        "compile": {"enable": True},
        "float8": {"enable": job.precision == "fp8"},
    }
    if style == "current" and (pipelined or layout.ep > 1):
        settings["training"]["disable_cuda_graphs"] = True  # it captures neither pipelines nor its all-to-all
    return settings


def _parallelism(style: str, job: Job, layout: Layout) -> dict[str, Any]:
    replicate, shard = _replicas(layout)
    found: dict[str, Any] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "always" if layout.zero == 3 and not layout.keep_gathered else "never",
        "tensor_parallel_degree": layout.tp,
        "context_parallel_degree": layout.cp,
        "pipeline_parallel_degree": layout.pp,
    }
    if style == "current" and layout.tp > 1:
        found["enable_sequence_parallel"] = layout.sequence_parallel
    if layout.cp > 1 and style == "toml":
        found["context_parallel_rotate_method"] = "alltoall"
    if layout.cp > 1 and style == "current":
        found["context_parallel_load_balancer"] = "headtail" if layout.context_parallel == "zigzag" else text.NOTHING
    if job.model.moe is not None:
        found["expert_parallel_degree"] = layout.ep
        if style == "toml":
            whole = layout.ep > 1 and layout.data_ranks % layout.ep == 0
            found["expert_tensor_parallel_degree"] = layout.tp if whole else 1
    if layout.pp > 1:
        found["pipeline_parallel_schedule"] = SCHEDULES[_schedule(layout)]
        found["pipeline_parallel_microbatch_size"] = layout.mbs
        each = _layers_per_stage(job.model.layers, layout)
        if each is not None:
            found["pipeline_parallel_layers_per_stage"] = each
    return found


def _replicas(layout: Layout) -> tuple[int, int]:
    """Copies of the weights, and data ranks that share one: FSDP shards over those and all of cp."""
    if not layout.zero:
        return layout.dp, 1
    if layout.shards % layout.cp or layout.shards < layout.cp:
        return 1, layout.dp
    return layout.data_ranks // layout.shards, layout.shards // layout.cp


def _schedule(layout: Layout) -> str:
    """torchtitan's schedules of several stages a rank have at least two."""
    runs = layout.schedule in SCHEDULES and (layout.virtual_stages > 1 or layout.schedule not in LOOPED)
    return layout.schedule if runs else "1f1b"


def _layers_per_stage(layers: int, layout: Layout) -> int | None:
    """What makes torchtitan cut so many stages, where it would not by itself; None too where nothing does."""
    usual = 2 if _schedule(layout) in LOOPED else 1
    if layout.virtual_stages == usual or layout.schedule not in SCHEDULES:
        return None
    stages = layout.pp * layout.virtual_stages
    each = -(-(layers + ENDS) // stages)
    return each if stages_of(layers, each) == stages else None


_WHY = {
    "layout.zero": "FSDP2 shards parameters, gradients and states together, over cp too",
    "layout.zero_shards": "torchtitan shards over whole groups of data ranks and all of cp",
    "layout.keep_gathered": "without resharding after forward FSDP2 comes nearest to ZeRO-1 and 2",
    "layout.schedule": "torchtitan has torch's schedules, and its zero bubble two stages a rank or more",
    "layout.virtual_stages": "no pipeline_parallel_layers_per_stage gives this cut",
    "layout.context_parallel": "torchtitan has torch's balanced context parallelism",
    "layout.data_parallel": "torchtitan reduces in buckets",
    "layout.offload": "FSDP offloads parameters, gradients and states together",
    "job.precision": "torchtitan computes in bf16, float8 and fp32",
    "job.gradients": "torchtitan reduces in fp32",
    "job.optimizer": "torchtitan has AdamW with fp32 states",
    "job.attention": "torchtitan's attention never writes scores out",
    "model": "torchtitan has no flavor of this shape; the debug model stands in",
    "model.*": "the flavor has its own",
}

TOML = EngineFormat(
    name="torchtitan",
    title="torchtitan 0.2 (TOML)",
    framework="torchtitan",
    config="config.toml",
    native=partial(native, "toml"),
    files=text.toml_files,
    parse=text.parse_toml,
    read=partial(torchtitan_read.read, "toml"),
    follows=lambda folder, job: f"{torchrun(job)} -m torchtitan.train --job.config_file {folder}/config.toml",
    why={**_WHY, "layout.sequence_parallel": "torchtitan 0.2 always cuts the sequence over tp"},
)

CURRENT = EngineFormat(
    name="torchtitan",
    title="torchtitan 0.3 (Python)",
    framework="torchtitan",
    config=text.MODULE,
    native=partial(native, "current"),
    files=text.python_files,
    parse=text.parse_python,
    read=partial(torchtitan_read.read, "current"),
    follows=lambda folder, job: (
        f"PYTHONPATH={folder} {torchrun(job)} -m torchtitan.train "
        f"--module {text.MODULE.removesuffix('.py')} --config {text.FUNCTION}"
    ),
    why=_WHY,
)
