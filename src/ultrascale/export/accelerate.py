"""Accelerate: the YAML of `accelerate launch --config_file`, with FSDP2 and a parallelism configuration."""

from __future__ import annotations

from typing import Any

from ultrascale.export import header
from ultrascale.export import table as row
from ultrascale.export.common import EngineFormat, File, hugging_face_block, hugging_face_config
from ultrascale.export.table import PlanFields, Setting, SettingsReader
from ultrascale.specs.files import mapping_of, to_yaml
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

TITLE = "Accelerate"
_FSDP = "fsdp_config.fsdp_"
_MESH = "parallelism_config.parallelism_config_"
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}
_STRATEGIES = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "true": True, "false": False}


def _replicas(p: PlanFields) -> int:
    """Data ranks: without a pipeline its ranks see other tokens too."""
    return p.layout.dp * p.layout.pp


def _shard_size(p: PlanFields) -> int:
    """Ranks of dp that share one copy: FSDP shards over them and all of cp."""
    layout = p.layout
    if layout.zero and layout.zero_shards and layout.shards > layout.cp and layout.shards % layout.cp == 0:
        return layout.shards // layout.cp
    return _replicas(p)


def _distributed(p: PlanFields) -> str:
    """FSDP: Accelerate cuts tensors and sequences only beside it, and it needs ranks to shard over."""
    layout = p.layout
    if (layout.zero > 0 or layout.tp > 1 or layout.cp > 1) and (_replicas(p) > 1 or layout.cp > 1):
        return "FSDP"
    return "MULTI_GPU" if layout.gpus > 1 else "NO"


def _fsdp(source: PlanFields | SettingsReader) -> bool:
    """Whether FSDP is on."""
    if isinstance(source, PlanFields):
        return _distributed(source) == "FSDP"
    return bool(source.value("distributed_type", "NO") == "FSDP")


def _check_distributed(s: SettingsReader) -> None:
    kind = s.value("distributed_type", "NO")
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise s.error(f"distributed_type is '{kind!s:.40}', which cannot be read: try FSDP (with DeepSpeed, import its JSON)")
    if kind == "FSDP" and s.whole(f"{_FSDP}version", 1) != 2:
        s.notes.append("fsdp_version 1 is read as FSDP2 with the same sharding")


def _data_ranks(s: SettingsReader) -> int:
    total, tp, cp = s.whole("num_processes", 1), s["layout.tp"], s["layout.cp"]
    if total % (tp * cp):
        given = f"num_processes is {total}{s.misspelling_hint('num_processes')}"
        raise s.error(f"{given} but tp {tp} times cp {cp} does not divide it: try {tp * cp}")
    return int(total // (tp * cp))


def _zero_shards(s: SettingsReader) -> int | None:
    dp, replicate = s["layout.dp"], s.whole(f"{_MESH}dp_replicate_size", 1)
    shard = s.whole(f"{_MESH}dp_shard_size", max(1, dp // replicate))
    if replicate * shard != dp:
        raise s.error(
            f"dp_replicate_size {replicate} times dp_shard_size {shard} is {replicate * shard} but there are "
            f"{dp} data ranks{s.misspelling_hint('num_processes')}: try dp_shard_size {max(1, dp // replicate)}"
        )
    return shard * s["layout.cp"] if replicate > 1 else None


def _keep_gathered(s: SettingsReader) -> bool:
    again = s.value(f"{_FSDP}reshard_after_forward", s.value(f"{_FSDP}sharding_strategy", True))
    if isinstance(again, bool):
        return not again
    return not _STRATEGIES.get(str(again), _STRATEGIES.get(str(again).lower(), True))


TABLE = (
    row.constant("compute_environment", "LOCAL_MACHINE"),
    row.constant("debug", False),
    Setting("distributed_type", write=_distributed, read=_check_distributed),
    row.constant("downcast_bf16", "no"),
    row.constant("machine_rank", 0),
    row.constant("main_training_function", "main"),
    row.word("mixed_precision", "job.precision", _PRECISIONS, "no"),
    Setting("num_machines", write=lambda p: p.job.cluster.nodes),
    Setting("num_processes", "layout.dp", lambda p: p.layout.gpus, _data_ranks),
    Setting("rdzv_backend", write=lambda p: "c10d" if p.job.cluster.nodes > 1 else "static"),
    row.constant("same_network", True),
    row.constant("use_cpu", False),
    row.constant(f"{_FSDP}version", 2, written=_fsdp),
    Setting(
        f"{_FSDP}reshard_after_forward",
        "layout.keep_gathered",
        lambda p: p.layout.zero == 3 and not p.layout.keep_gathered,
        _keep_gathered,
        _fsdp,
    ),
    row.constant(f"{_FSDP}auto_wrap_policy", "TRANSFORMER_BASED_WRAP", written=_fsdp),
    Setting(f"{_FSDP}transformer_layer_cls_to_wrap", write=lambda p: hugging_face_block(p.model), written=_fsdp),
    row.flag(f"{_FSDP}activation_checkpointing", "layout.recompute", "full", "none", when=_fsdp),
    row.flag(f"{_FSDP}offload_params", "layout.offload", "parameters", "none", when=_fsdp),
    row.constant(f"{_FSDP}cpu_ram_efficient_loading", False, written=_fsdp),
    row.constant(f"{_FSDP}state_dict_type", "SHARDED_STATE_DICT", written=_fsdp),
    row.implied("layout.zero", 3, when=_fsdp),
    Setting(f"{_MESH}dp_replicate_size", write=lambda p: _replicas(p) // _shard_size(p), written=_fsdp),
    Setting(f"{_MESH}dp_shard_size", "layout.zero_shards", _shard_size, _zero_shards, _fsdp),
    row.whole(f"{_MESH}tp_size", "layout.tp", 1, written=_fsdp),
    # transformers' plans all-reduce unless a model says otherwise.
    row.implied("layout.sequence_parallel", False, when=row.above_one("layout.tp")),
    row.whole(f"{_MESH}cp_size", "layout.cp", 1, written=_fsdp),
    row.word(
        f"{_MESH}cp_comm_strategy",
        "layout.context_parallel",
        {"allgather": "allgather", "alltoall": "zigzag"},
        "allgather",
        "alltoall",
        when=row.above_one("layout.cp"),
    ),
)


def _world(s: Any, where: str) -> tuple[int, int] | None:
    reader = SettingsReader((), s, where, row.World(), row.UnmodelledSettings())
    machines, processes = reader.whole("num_machines", 1), reader.whole("num_processes", 1)
    return (machines, processes // machines) if processes % machines == 0 else None


def files(job: Job, layout: Layout, settings: dict[str, Any], comments: list[str]) -> tuple[File, ...]:
    head = header.commented(
        TITLE, comments, f"Micro-batch {layout.mbs} and {layout.gas} accumulation steps are your program's to set."
    )
    return (File("config.yaml", head + to_yaml(settings)), *hugging_face_config(job.model))


ENGINE = EngineFormat(
    name="accelerate",
    title=TITLE,
    framework="accelerate",
    config="config.yaml",
    table=TABLE,
    lost={
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
    files=files,
    parse=lambda text, where: mapping_of(text, where, "YAML"),
    program=("model", "job.seq", "layout.mbs", "layout.gas", "job.optimizer", "job.gradients", "job.attention", "job.dropout"),
    start="accelerate launch --config_file {folder}/config.yaml {machine}train.py",
    needs="Accelerate must be installed there, and your train.py be in the working directory.",
    assumed=("an Accelerate file has no batch: micro-batch 1 without accumulation is assumed",),
    world=_world,
)
