"""`ultrascale presets` in the terminal: models, GPU kinds and how to name a cluster, each number with its source."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.table import Table

from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.gpu import GPU
from ultrascale.specs.model import Model


def show_presets(console: Console, name: str | None) -> None:
    if name is not None:
        show_one(console, name)
        return
    models = Table(title="Models", title_justify="left", header_style="bold")
    for column, justify in (
        ("name", "left"),
        ("parameters", "right"),
        ("active", "right"),
        ("layers", "right"),
        ("hidden", "right"),
        ("heads / kv", "right"),
        ("ffn", "right"),
        ("vocab", "right"),
        ("experts", "right"),
    ):
        models.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for key, model in Model.presets().items():
        experts = f"{model.moe.experts} top {model.moe.top_k}" if model.moe else "–"
        models.add_row(
            key,
            f"{model.parameters:,}",
            f"{model.active_parameters:,}" if model.moe else "–",
            str(model.layers),
            f"{model.hidden:,}",
            f"{model.heads} / {model.kv_heads}",
            f"{model.ffn:,}" if model.dense_layers else f"{model.moe.expert_ffn:,} each" if model.moe else "–",
            f"{model.vocab:,}",
            experts,
        )
    console.print(models)
    gpus = Table(title="GPU kinds (per GPU; bandwidths per direction)", title_justify="left", header_style="bold")
    for column in (
        "name",
        "GiB",
        "bf16 TFLOP/s",
        "fp8 TFLOP/s",
        "HBM GB/s",
        "link GB/s",
        "domain",
        "network GB/s",
        "kernels measured on",
    ):
        gpus.add_column(column, justify="left" if column in ("name", "kernels measured on") else "right", no_wrap=True)
    for key, gpu in GPU.presets().items():
        gpus.add_row(
            key,
            f"{gpu.memory_gib:,.1f}",
            _peak(gpu, "bf16"),
            _peak(gpu, "fp8"),
            f"{gpu.memory_bandwidth_gb_s:,.0f}",
            f"{gpu.link_bandwidth_gb_s:,.0f}",
            str(gpu.link_domain),
            f"{gpu.network_gb_s:,.4g}",
            (gpu.surface + (" (borrowed)" if gpu.surface_note else "")) if gpu.surface else "not measured",
        )
    console.print(gpus)
    console.print("Clusters: 64xh100 (GPUs × kind), '8x8 h100' (nodes × GPUs per node), or a file such as:")
    console.print(CLUSTER_EXAMPLE)
    console.print("Sources of every number: ultrascale presets NAME, such as `ultrascale presets h100`.")


CLUSTER_EXAMPLE = """  gpu: h100                      # or a mapping: {kind: h100, memory_gib: 94}
  nodes: 8
  gpus_per_node: 8
  network_gb_s: 25               # per GPU and direction
  link_domain: 8                 # GPUs on one NVLink domain
  price_per_gpu_hour_usd: 2.5
  efficiency: {matmul: 0.95}     # any constant of the cost model"""


def _peak(gpu: GPU, precision: Any) -> str:
    value = gpu.peak_tflops.get(precision)
    return f"{value:,.0f}" if value else "–"


def _find(name: str) -> GPU | Model:
    """A GPU kind, a model preset or a model file of that name."""
    if name.strip().lower() in GPU.preset_names():
        return GPU.load(name)
    hint = nearest(name.lower(), [*GPU.preset_names(), *Model.preset_names()])
    if name.strip().lower() not in Model.preset_names() and not os.path.exists(name):
        raise SpecError(f"'{name}' is neither a model nor a GPU kind: {hint}")
    return Model.load(name)


def show_one(console: Console, name: str) -> None:
    """One preset with every field, and where each number comes from."""
    found = _find(name)
    if isinstance(found, GPU):
        gpu = found
        table = Table(title=gpu.name, title_justify="left", header_style="bold")
        for column in ("field", "value", "source"):
            table.add_column(column)
        for field, value in gpu.model_dump().items():
            if field not in ("sources", "name"):
                table.add_row(field, str(value), gpu.sources.get(field, ""))
        console.print(table)
        return
    model = found
    table = Table(title=f"{name}: {model.parameters:,} parameters", title_justify="left", header_style="bold")
    for column in ("field", "value"):
        table.add_column(column)
    for field, value in model.model_dump().items():
        table.add_row(field, str(value))
    console.print(table)


def presets_json(name: str | None) -> dict[str, Any]:
    def with_count(model: Model) -> dict[str, Any]:
        return {
            **model.model_dump(mode="json"),
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
        }

    if name is not None:
        found = _find(name)
        if isinstance(found, GPU):
            return {"gpus": {name: found.model_dump(mode="json")}, "models": {}}
        return {"gpus": {}, "models": {name: with_count(found)}}
    return {
        "models": {key: with_count(model) for key, model in Model.presets().items()},
        "gpus": {key: gpu.model_dump(mode="json") for key, gpu in GPU.presets().items()},
    }
