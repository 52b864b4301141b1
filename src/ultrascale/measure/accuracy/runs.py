"""Measured runs as rows of a CSV: each becomes a Job and a Layout, with what had to be assumed, or the reason why not."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.cost.estimate import estimate
from ultrascale.cost.legality import problem
from ultrascale.measure.accuracy.fields import (
    UnmodelledRowError,
    adapter_rank_of,
    dispatcher_of,
    flag,
    framework_of,
    gpu_kind,
    model_of,
    number,
    offload_of,
    precision_of,
    prints_gigabytes,
    whole,
)
from ultrascale.measure.accuracy.network_state import NETWORK_STATE, NetworkState
from ultrascale.schedules import unnamed_schedule
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import read_named
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.units import GIB
from ultrascale.specs.validate import build

GIGABYTE = 10**9
MAX_CSV_BYTES = 16 * 2**20  # some ten thousand runs
COLUMNS = (
    "id", "source", "system", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len",
    "gpu", "gpus", "gpus_per_node", "tp", "pp", "vpp", "dp", "cp", "ep", "etp", "zero_stage", "micro_batch", "grad_accum",
    "global_batch_seqs", "recompute", "precision", "attention_impl", "compile", "tokens_per_s_per_gpu", "tflops_per_gpu",
    "mfu", "hfu", "iter_time_s", "peak_mem_gib", "notes", "status", "mem_kind", "flops_def", "trust", "sequence_parallel",
    "zero_shards", "node_network_gbps", "network_gb_s", "allreduce_gb_s", "network_latency_us", "dispatcher",
    "expert_overlap", "balanced_routing", "cuda_graphs", "loss",
    "stage_split", "grad_accum_fusion", "after_pp_fix", "adapter_rank", "optimizer_in_backward",
    "offload", "activation_offload", "cpu_offload_gb", "fused_loss", "schedule", "zero_group", "unmodelled",
)  # fmt: skip
NOTED = re.compile(r"(\w+)=([^;,\s]+)")
TEXTS = {"source": "", "system": "", "gpu": "", "trust": "A", "status": "ok", "mem_kind": ""}  # taken as they stand
REQUIRED = ("id", "model", "seq_len", "gpu", "gpus")


@dataclass(frozen=True)
class MeasuredRun:
    """One measured run. `job` and `layout` are None when it cannot be modelled; `reason` then says why."""

    id: str
    source: str
    system: str
    gpu: str
    trust: str
    status: str
    mem_kind: str
    mem_unit: float
    """bytes that one of its memory figure stands for"""
    tokens_per_s_per_gpu: float | None
    iter_time_s: float | None
    peak_mem_gib: float | None
    job: Job | None
    layout: Layout | None
    half_recompute: bool
    assumptions: tuple[str, ...]
    reason: str | None
    values: Mapping[str, str]


def read(path: Path, state: NetworkState = NETWORK_STATE) -> tuple[list[MeasuredRun], list[str]]:
    """Every row as a run, and a line per problem that the file itself has."""
    rows, problems = read_cells(path)
    runs, ids = [read_row(values, line, state) for line, values in rows.items()], set[str]()
    for line, run in zip(rows, runs, strict=True):
        if run.id in ids:
            problems.append(f"line {line}: id '{run.id}' stands twice")
        ids.add(run.id)
    return runs, problems


def read_cells(path: Path) -> tuple[dict[int, dict[str, str]], list[str]]:
    """The cells of every row by its line, for `read_row`, and a sentence for each column that is not known."""
    text = read_named(path, f"runs file {path}", "name a CSV of measured runs", MAX_CSV_BYTES)
    rows = csv.DictReader(text.splitlines())
    try:
        lines = list(rows)
    except csv.Error as error:
        raise SpecError(f"runs file {path} is no table, line {rows.line_num}: {error}") from None
    header = [name.strip() for name in rows.fieldnames or []]
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise SpecError(f"runs file {path} lacks the columns {', '.join(missing)}: it needs at least {', '.join(REQUIRED)}")
    problems = [f"column '{name}' is unknown and ignored: {nearest(name, COLUMNS)}" for name in header if name not in COLUMNS]
    if not lines:
        raise SpecError(f"runs file {path} has a header and no rows")
    return {
        line: {(k or "").strip(): (v or "").strip() for k, v in values.items() if isinstance(v, str) or v is None}
        for line, values in enumerate(lines, start=2)
    }, problems


def read_row(values: Mapping[str, str], line: int, state: NetworkState = NETWORK_STATE) -> MeasuredRun:
    values = _with_notes(values)
    assumptions: list[str] = []
    job, layout, half, reason = None, None, False, None
    measured: dict[str, Any] = dict.fromkeys(("tokens_per_s_per_gpu", "iter_time_s", "peak_mem_gib"))
    texts: dict[str, Any] = {name: values.get(name) or usual for name, usual in TEXTS.items()}
    try:
        for name in measured:
            measured[name] = number(values, name)
        job, layout, half = _model(values, assumptions, state)
    except (UnmodelledRowError, SpecError) as error:
        reason = str(error)
    unit = GIB
    if measured["peak_mem_gib"] and prints_gigabytes(values):
        unit = GIGABYTE
        assumptions.append("its memory is in 10^9 bytes, whatever it says: Megatron-Bridge divides by 1e9 (report_memory)")
    return MeasuredRun(
        id=values.get("id") or f"line-{line}",
        mem_unit=unit,
        job=job,
        layout=layout,
        half_recompute=half,
        assumptions=tuple(assumptions),
        reason=reason,
        values=values,
        **measured,
        **texts,
    )


def _with_notes(values: Mapping[str, str]) -> dict[str, str]:
    """The cells, and for blank ones of known columns what notes say as `column=value`."""
    noted = {name: value for name, value in NOTED.findall(values.get("notes", "")) if name in COLUMNS}
    return {**noted, **{name: value for name, value in values.items() if value or name not in noted}}


def _model(values: Mapping[str, str], assumptions: list[str], state: NetworkState) -> tuple[Job, Layout, bool]:
    if values.get("unmodelled"):
        raise UnmodelledRowError(f"{values['unmodelled']} is not modelled")
    gpus = whole(values, "gpus")
    seq = whole(values, "seq_len")
    if gpus is None or seq is None:
        raise UnmodelledRowError("gpus or seq_len is not given")
    kind = gpu_kind(values.get("gpu", ""), assumptions)
    per_node = min(gpus, whole(values, "gpus_per_node") or kind.gpus_per_node)
    if not values.get("gpus_per_node"):
        assumptions.append(f"{per_node} GPUs per node")
    if gpus % per_node:
        raise UnmodelledRowError(f"gpus = {gpus} do not fill nodes of {per_node}")
    framework = framework_of(values, assumptions)
    model = model_of(values, assumptions)
    precision = precision_of(values, kind, assumptions)
    degrees = _degrees(values, gpus)
    batch = _batch(values, degrees["dp"], assumptions)
    balanced = model.moe is not None and flag(values, "balanced_routing")
    cluster = Cluster.of(kind, nodes=gpus // per_node, gpus_per_node=per_node)
    constants = state.constants(values, cluster, degrees["pp"]) | ({"expert_imbalance": 1.0} if balanced else {})
    efficiency = cluster.efficiency.model_copy(update=constants)
    changes = {"network_gb_s": state.network_gb_s(values, cluster), "efficiency": efficiency}
    cluster = Cluster.of(kind, nodes=cluster.nodes, gpus_per_node=per_node, **changes)
    attention = "plain" if framework.attention.startswith("plain") else "flash"
    job = build(
        Job,
        {
            "model": model,
            "cluster": cluster,
            "seq": seq,
            "batch_tokens": batch["mbs"] * batch["gas"] * degrees["dp"] * seq,
            "precision": precision,
            "attention": attention,
            "framework": framework,
            "dropout": framework.name.startswith("megatron") and not model.gated and model.moe is None,
            "gradients": _gradients(values, framework),
            "adapter_rank": adapter_rank_of(values, assumptions),
            "adapter_targets": "qkv",
            "optimizer": "adamw-bf16" if framework.states == "pure" else "adamw",
        },
        "job",
    )
    recompute, half = _recompute(values)
    settings = {
        **degrees,
        **batch,
        "zero": _zero(values, degrees, framework, assumptions),
        "zero_shards": whole(values, "zero_shards") or whole(values, "zero_group"),
        "etp": whole(values, "etp") if degrees["tp"] > 1 else None,
        "recompute": recompute or "none",
        "dispatcher": dispatcher_of(values, assumptions),
        "offload": offload_of(values, assumptions),
        "sequence_parallel": _sequence_parallel(values, assumptions, degrees),
        **_schedule(values, degrees, batch),
    }
    layout = build(Layout, settings, "layout")
    if recompute is None:
        layout = _least_recompute(job, layout, assumptions)
    return job, layout, half


def _degrees(values: Mapping[str, str], gpus: int) -> dict[str, int]:
    tp, pp, cp, ep = (whole(values, name) or 1 for name in ("tp", "pp", "cp", "ep"))
    dp = whole(values, "dp") or max(1, gpus // (tp * pp * cp))
    if dp * tp * pp * cp != gpus:
        raise UnmodelledRowError(f"tp·pp·cp·dp = {tp}·{pp}·{cp}·{dp} = {tp * pp * cp * dp} but gpus = {gpus}")
    return {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp}


def _batch(values: Mapping[str, str], dp: int, assumptions: list[str]) -> dict[str, int]:
    mbs, gas, total = whole(values, "micro_batch"), whole(values, "grad_accum"), whole(values, "global_batch_seqs")
    if mbs is None and gas is None and total is None:
        raise UnmodelledRowError("no batch is given: micro_batch, grad_accum or global_batch_seqs")
    if mbs is None:
        mbs = max(1, (total or dp) // (dp * gas)) if gas else 1
        assumptions.append(f"micro-batch {mbs}")
    if gas is None:
        gas = max(1, round(total / (dp * mbs))) if total else 1
    if total is not None and abs(total - dp * mbs * gas) > 0.5 * dp * mbs:
        gas = max(1, round(total / (dp * mbs)))
    return {"mbs": mbs, "gas": gas}


def _zero(values: Mapping[str, str], degrees: dict[str, int], framework: Framework, assumptions: list[str]) -> int:
    if degrees["dp"] * degrees["cp"] == 1:
        return 0
    given = number(values, "zero_stage")
    if given is None:
        stage = 1 if framework.name.startswith("megatron-core") else 3 if framework.states == "fp32" else 0
        assumptions.append(f"ZeRO stage {stage}")
        return stage
    if given not in (0, 1, 2, 3):
        raise UnmodelledRowError(f"zero_stage is {values['zero_stage']}: it must be 0, 1, 2 or 3")
    return int(given)


def _gradients(values: Mapping[str, str], framework: Framework) -> str:
    """NeMo's launcher (grad_sync_dtype=bf16) and Megatron-Bridge (grad_reduce_in_fp32=False) keep and reduce them in bf16."""
    system = values.get("system", "").lower()
    return "bf16" if framework.states == "pure" or "nemo" in system or "megatron-bridge" in system else "fp32"


def _recompute(values: Mapping[str, str]) -> tuple[str | None, bool]:
    text = values.get("recompute", "").lower()
    if not text or text == "unknown":
        return None, False
    if "2nd layer" in text or (text == "selective" and "fms" in values.get("system", "").lower()):
        return "full", True
    for word in ("none", "selective", "full"):
        if text.startswith(word):
            return word, False
    return ("selective", False) if "norm" in text or "act" in text else (None, False)


def _least_recompute(job: Job, layout: Layout, assumptions: list[str]) -> Layout:
    """Where a row is silent: the least recomputation that fits; full in engines that had no other."""
    for policy in ("full",) if job.framework.name == "megatron-2021" else ("none", "selective", "full"):
        tried = layout.changed(recompute=policy)
        if problem(job, tried) is not None or estimate(job, tried).fits:
            break
    assumptions.append(f"recompute {tried.recompute}")
    return tried


def _sequence_parallel(values: Mapping[str, str], assumptions: list[str], degrees: dict[str, int]) -> bool:
    stated = flag(values, "sequence_parallel")
    if degrees["tp"] == 1:
        return True
    if stated is not None:
        return stated
    system = values.get("system", "").lower()
    if re.search(r"20(19|20|21)", system) or "ptd-p" in system:
        return False
    assumptions.append("sequence parallelism with tp")
    return True


def _schedule(values: Mapping[str, str], degrees: dict[str, int], batch: dict[str, int]) -> dict[str, Any]:
    stages = (whole(values, "vpp") or 1) if degrees["pp"] > 1 else 1
    named = values.get("schedule", "").lower() if degrees["pp"] > 1 else ""
    return {"schedule": named or unnamed_schedule(degrees["pp"], batch["gas"], stages), "virtual_stages": stages}
