"""Output of `ultrascale presets`: models, GPU kinds and how to name a cluster, each number with its source."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.text import Text

from ultrascale.show.lines import NARROW, attributes, table
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.gpu import GPU
from ultrascale.specs.model import LIST_PRESETS, Model
from ultrascale.specs.units import count

MEASURED_ON = "kernels measured on"


def show_presets(console: Console, name: str | None) -> None:
    if name is not None:
        show_one(console, name)
        return
    show_models(console)
    columns = ("name", "GiB", "bf16 TFLOP/s", "fp8 TFLOP/s", "HBM GB/s", "link GB/s", "domain", "network GB/s", MEASURED_ON)
    title = "GPU kinds (per GPU; bandwidths per direction)"
    gpus = table(title, *columns, left=("name", MEASURED_ON), no_wrap=console.width >= NARROW)
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


def show_models(console: Console) -> None:
    """One table, the models of a family under a row with its name; on a narrow terminal rounded, and without widths of MLPs."""
    wide = console.width >= NARROW
    size = "{:,}".format if wide else count
    columns = ["name", "parameters", "active", "layers", "hidden", "heads/kv", *(["ffn", "vocab"] if wide else []), "experts"]
    models = table("Models", *columns, no_wrap=True)
    for family, members in Model.preset_families().items():
        models.add_section()
        models.add_row(Text(family, style="bold"))
        for name, model in members.items():
            ffn = f"{model.ffn:,}" if model.dense_layers else f"{model.moe.expert_ffn:,} each" if model.moe else "–"
            models.add_row(
                name,
                size(model.parameters),
                size(model.active_parameters) if model.moe else "–",
                str(model.layers),
                f"{model.hidden:,}",
                f"{model.heads}/{model.kv_heads}",
                *([ffn, f"{model.vocab:,}"] if wide else []),
                f"{model.moe.experts} top {model.moe.top_k}" if model.moe else "–",
            )
    console.print(models)


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
    hint = nearest(name.lower(), [*GPU.preset_names(), *Model.preset_names()], LIST_PRESETS)
    if name.strip().lower() not in Model.preset_names() and not os.path.exists(name):
        raise SpecError(f"'{name}' is neither a model nor a GPU kind: {hint}")
    return Model.load(name)


def show_one(console: Console, name: str) -> None:
    """One preset with every field, and where each number comes from."""
    found = _find(name)
    if isinstance(found, GPU):
        gpu = found
        grid = table(gpu.name, "field", "value", "source", left=("field", "value", "source"))
        for field, value in gpu.model_dump().items():
            if field not in ("sources", "name"):
                grid.add_row(field, str(value), gpu.sources.get(field, ""))
        console.print(grid)
        return
    model = found
    grid = table(f"{name}: {model.parameters:,} parameters", "field", "value", left=("field", "value"))
    for field, value in model.model_dump().items():
        grid.add_row(field, str(value))
    console.print(grid)


def presets_json(name: str | None) -> dict[str, Any]:
    def with_count(model: Model) -> dict[str, Any]:
        return {**model.model_dump(mode="json"), **attributes(model, "parameters", "active_parameters")}

    if name is not None:
        found = _find(name)
        if isinstance(found, GPU):
            return {"gpus": {name: found}, "models": {}}
        return {"gpus": {}, "models": {name: with_count(found)}}
    return {
        "models": {key: with_count(model) for key, model in Model.presets().items()},
        "gpus": GPU.presets(),
    }
