"""Accelerate: the YAML of `accelerate launch --config_file`, with FSDP2 and a parallelism configuration."""

from __future__ import annotations

from typing import Any

from ultrascale.export import header, hugging_face
from ultrascale.export.common import EngineFormat, File, Found, World
from ultrascale.export.keys import Keys
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import mapping_of, to_yaml
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

TITLE = "Accelerate"
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}
_MESH = "parallelism_config."


def native(job: Job, layout: Layout) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP" if _shards(layout) else "MULTI_GPU" if layout.gpus > 1 else "NO",
        "downcast_bf16": "no",
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": {"fp32": "no"}.get(job.precision, job.precision),
        "num_machines": job.cluster.nodes,
        "num_processes": layout.gpus,
        "rdzv_backend": "c10d" if job.cluster.nodes > 1 else "static",
        "same_network": True,
        "use_cpu": False,
    }
    if _shards(layout):
        settings["fsdp_config"] = _fsdp(job, layout)
        settings["parallelism_config"] = _mesh(layout)
    return settings


def _replicas(layout: Layout) -> int:
    """Data ranks: without a pipeline its ranks see other tokens too."""
    return layout.dp * layout.pp


def _shards(layout: Layout) -> bool:
    """Whether FSDP is on: Accelerate cuts tensors and sequences only beside it, and it needs ranks to shard over."""
    return (layout.zero > 0 or layout.tp > 1 or layout.cp > 1) and (_replicas(layout) > 1 or layout.cp > 1)


def _fsdp(job: Job, layout: Layout) -> dict[str, Any]:
    block = hugging_face.block_class(job.model)
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": layout.zero == 3 and not layout.keep_gathered,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **({"fsdp_transformer_layer_cls_to_wrap": block} if block else {}),
        "fsdp_activation_checkpointing": layout.recompute == "full",
        "fsdp_offload_params": layout.offload == "parameters",
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


def _mesh(layout: Layout) -> dict[str, Any]:
    shard = _shard_size(layout)
    mesh: dict[str, Any] = {
        "parallelism_config_dp_replicate_size": _replicas(layout) // shard,
        "parallelism_config_dp_shard_size": shard,
        "parallelism_config_tp_size": layout.tp,
        "parallelism_config_cp_size": layout.cp,
    }
    if layout.cp > 1:
        gathers = layout.context_parallel == "allgather"
        mesh["parallelism_config_cp_comm_strategy"] = "allgather" if gathers else "alltoall"
    return mesh


def _shard_size(layout: Layout) -> int:
    """Ranks of dp that share one copy: FSDP shards over them and all of cp."""
    if layout.zero and layout.zero_shards and layout.shards > layout.cp and layout.shards % layout.cp == 0:
        return layout.shards // layout.cp
    return _replicas(layout)


def read(data: Any, where: str, world: World) -> Found:
    keys = Keys(data, where)
    found = Found()
    kind = keys.value("distributed_type", "NO")
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise SpecError(
            f"{where}: distributed_type is '{kind!s:.40}', which cannot be read: try FSDP (with DeepSpeed, import its JSON)"
        )
    if kind == "FSDP" and keys.whole("fsdp_config.fsdp_version", 1) != 2:
        found.notes.append("fsdp_version 1 is read as FSDP2 with the same sharding")
    total = keys.whole("num_processes", 1)
    tp, cp = keys.whole(f"{_MESH}parallelism_config_tp_size", 1), keys.whole(f"{_MESH}parallelism_config_cp_size", 1)
    if total % (tp * cp):
        given = f"num_processes is {total}{keys.slip('num_processes')}"
        raise SpecError(f"{where}: {given} but tp {tp} times cp {cp} does not divide it: try {tp * cp}")
    dp = total // (tp * cp)
    found.fields = {
        "layout.dp": dp,
        "layout.tp": tp,
        "layout.cp": cp,
        "job.precision": keys.word("mixed_precision", _PRECISIONS, "no"),
    }
    if tp > 1:
        found.fields["layout.sequence_parallel"] = False  # transformers' plans all-reduce unless a model says otherwise
    if cp > 1:
        ways = {"allgather": "allgather", "alltoall": "zigzag"}
        found.fields["layout.context_parallel"] = keys.word(f"{_MESH}parallelism_config_cp_comm_strategy", ways, "allgather")
    if kind == "FSDP":
        found.fields |= _read_fsdp(keys, dp, cp, where)
    keys.passed("num_machines", "compute_environment", "machine_rank", "main_training_function", "same_network", "debug")
    found.notes.append("an Accelerate file has no batch: micro-batch 1 without accumulation is assumed")
    found.notes += keys.unread()
    return found


def _read_fsdp(keys: Keys, dp: int, cp: int, where: str) -> dict[str, Any]:
    replicate = keys.whole(f"{_MESH}parallelism_config_dp_replicate_size", 1)
    shard = keys.whole(f"{_MESH}parallelism_config_dp_shard_size", max(1, dp // replicate))
    if replicate * shard != dp:
        raise SpecError(
            f"{where}: dp_replicate_size {replicate} times dp_shard_size {shard} is {replicate * shard} but there are "
            f"{dp} data ranks{keys.slip('num_processes')}: try dp_shard_size {max(1, dp // replicate)}"
        )
    strategies = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "true": True, "false": False}
    again = keys.value("fsdp_config.fsdp_reshard_after_forward", keys.value("fsdp_config.fsdp_sharding_strategy", True))
    reshards = again if isinstance(again, bool) else strategies.get(str(again), strategies.get(str(again).lower(), True))
    return {
        "layout.zero": 3,
        "layout.keep_gathered": not reshards,
        "layout.zero_shards": shard * cp if replicate > 1 else None,
        "layout.offload": "parameters" if keys.flag("fsdp_config.fsdp_offload_params") else "none",
        "layout.recompute": "full" if keys.flag("fsdp_config.fsdp_activation_checkpointing") else "none",
    }


def _world(data: Any, where: str) -> tuple[int, int] | None:
    keys = Keys(data, where)
    machines, processes = keys.whole("num_machines", 1), keys.whole("num_processes", 1)
    return (machines, processes // machines) if processes % machines == 0 else None


def files(job: Job, layout: Layout, settings: Any, said: list[str]) -> tuple[File, ...]:
    head = header.commented(
        TITLE, said, f"Micro-batch {layout.mbs} and {layout.gas} accumulation steps are your program's to set."
    )
    return (File("config.yaml", head + to_yaml(settings)), *hugging_face.config(job.model))


ENGINE = EngineFormat(
    name="accelerate",
    title=TITLE,
    framework="torchtitan-eager",
    config="config.yaml",
    native=native,
    files=files,
    parse=lambda text, where: mapping_of(text, where, "YAML"),
    read=read,
    follows=lambda folder, job: f"accelerate launch --config_file {folder}/config.yaml train.py",
    why={
        "layout.dp": "without a pipeline its ranks are data ranks",
        "layout.pp": "Accelerate trains without a pipeline",
        "layout.schedule": "Accelerate trains without a pipeline",
        "layout.virtual_stages": "Accelerate trains without a pipeline",
        "layout.ep": "Accelerate leaves experts to the model",
        "layout.zero": "FSDP2 shards parameters, gradients and states together",
        "layout.zero_shards": "FSDP2 shards over whole groups of data ranks and all of cp",
        "layout.keep_gathered": "without resharding after forward FSDP2 comes nearest to ZeRO-1 and 2",
        "layout.sequence_parallel": "the model's tensor-parallel plan decides",
        "layout.context_parallel": "torch's context parallelism is balanced, by all-gather or all-to-all",
        "layout.data_parallel": "DDP reduces in buckets",
        "layout.recompute": "FSDP recomputes whole layers or none",
        "layout.offload": "FSDP offloads parameters, gradients and states together",
        "layout.mbs": "the batch is your program's",
        "layout.gas": "the batch is your program's",
        "job.seq": "the sequence length is your program's",
        "job.gradients": "the reduce type follows mixed_precision",
        "job.optimizer": "the optimizer is your program's",
        "model": "the model is your program's; model/config.json beside this file has its shape where Hugging Face can say it",
    },
    world=_world,
)
