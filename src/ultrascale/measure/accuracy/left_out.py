"""Constants as they would be without one source: for errors on runs that the fit has not seen, and for ranges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from ultrascale.cost.hardware import SUSTAINED, sustained
from ultrascale.cost.kernels import attention_line, attention_rate, attention_rates
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.framework import Framework
from ultrascale.specs.job import Job

# What is fitted: its figure before any fit, from data sheets, papers and the engines' code (docs/time.md), and how far (as a
# share) it may move before that figure speaks as loud as one row.
FITTED: dict[str, tuple[float, float]] = {
    "sustained.ampere.bf16": (1.00, 0.06),
    "sustained.hopper.bf16": (0.95, 0.06),
    "sustained.blackwell.bf16": (0.95, 0.10),
    "sustained.hopper.fp8": (1.00, 0.08),
    "sustained.blackwell.fp8": (1.00, 0.08),
    "elementwise.fsdp1-eager": (2.2, 0.20),
    "elementwise.eager": (2.2, 0.20),
    "elementwise.megatron-core": (1.3, 0.20),
    "elementwise.megatron-2021": (1.8, 0.20),
    "elementwise.nanotron": (2.2, 0.20),
    "attention.flash.ampere": (0.63, 0.08),
    "attention.flash.hopper": (0.66, 0.08),
    "attention.flash-1.ampere": (0.38, 0.08),
    "attention.flash-1.hopper": (0.20, 0.08),
    "attention.flash-2.hopper": (0.38, 0.08),
    "memory_bandwidth": (0.80, 0.05),
    "link_bandwidth": (1.00, 0.08),
    "network_bandwidth": (0.82, 0.08),
    "overlap_slowdown": (0.10, 0.25),
}
FAMILY = {
    "torchtitan-eager": "eager",
    "deepspeed": "eager",
    "megatron-no-overlap": "megatron-core",
    "flash-training": "megatron-core",
}


def current(name: str) -> float:
    """The figure in use."""
    kind, *rest = name.split(".")
    if kind == "sustained":
        return SUSTAINED[rest[0]][rest[1]]
    if kind == "elementwise":
        return Framework.load(rest[0]).elementwise
    if kind == "attention":
        return attention_rates()[rest[0]][rest[1]].forward
    return 1.0 if kind == "link_bandwidth" else float(getattr(Efficiency(), kind))


def adjusted(job: Job, multipliers: Mapping[str, float]) -> Job:
    """The job with its cluster's and framework's constants multiplied; a constant that it does not use changes nothing."""

    def times(name: str) -> float:
        return multipliers.get(name, 1.0)

    cluster, framework, gpu = job.cluster, job.framework, job.cluster.gpu
    constants, shares = cluster.efficiency, sustained(gpu)
    rate = attention_rate(framework.attention, gpu.architecture)
    attention = times(f"attention.{attention_line(framework.attention, gpu.architecture)}.{gpu.architecture}")
    changed = constants.model_copy(
        update={
            "matmul": (constants.matmul or shares["bf16"]) * times(f"sustained.{gpu.architecture}.bf16"),
            "matmul_fp8": (constants.matmul_fp8 or shares["fp8"]) * times(f"sustained.{gpu.architecture}.fp8"),
            "memory_bandwidth": min(1.0, constants.memory_bandwidth * times("memory_bandwidth")),
            "network_bandwidth": min(1.0, constants.network_bandwidth * times("network_bandwidth")),
            "overlap_slowdown": min(1.0, constants.overlap_slowdown * times("overlap_slowdown")),
            **(
                {
                    "attention_forward": min(1.0, rate.forward * attention),
                    "attention_backward": min(1.0, rate.backward * attention),
                }
                if rate is not None
                else {}
            ),
        }
    )
    family = FAMILY.get(framework.name, framework.name)
    return job.model_copy(
        update={
            "cluster": cluster.model_copy(
                update={
                    "efficiency": changed,
                    "link_bandwidth_gb_s": cluster.link_bandwidth_gb_s * times("link_bandwidth"),
                }
            ),
            "framework": framework.model_copy(update={"elementwise": framework.elementwise * times(f"elementwise.{family}")}),
        }
    )


@cache
def table() -> dict[str, Any]:
    """What tools/fit_constants.py wrote: multipliers per source left out, and the residuals of its rows under them."""
    text = resources.files("ultrascale.measure.accuracy").joinpath("left_out.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
