"""Which of a cluster's constants step times can tell, where each starts, and which run would tell it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ultrascale.cost.hardware import UNMEASURED_LATENCY_S, UNMEASURED_LINK, ClusterRates
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.job import Job


@dataclass(frozen=True)
class Constant:
    """One number to fit; `fields` of the Efficiency move together where no step time tells them apart."""

    fields: tuple[str, ...]
    prior: float
    """how far its logarithm may lie from where it starts before that speaks as loud as one run"""
    run: str
    """what would determine it, in words"""
    on_host: float | None = None
    """the prior where operators are synchronous and processes share cores with their transfers, if it is another"""

    @property
    def name(self) -> str:
        return self.fields[0] if len(self.fields) == 1 else self.fields[0].rsplit("_", 1)[0]


# Shares of a data sheet are known to some tenths before any run; times of a host or of a hop only to their order. On a CPU
# rates were measured alone and for a moment: gloo's threads want the cores that compute, and neighbours the caches.
CONSTANTS = (
    Constant(("matmul",), 0.2, "a run with more tokens in a micro-batch", 0.5),
    Constant(("matmul_fp8",), 0.2, "a run with job.precision=fp8"),
    Constant(("matmul_ramp",), 1.0, "two runs alike in tokens, one of a model half as wide"),
    Constant(("attention_forward", "attention_backward"), 0.2, "two runs of one model, one with longer sequences", 0.5),
    Constant(("memory_bandwidth",), 0.1, "a run with few tokens a step: the optimizer is then much of it", 0.3),
    Constant(("kernel_launch_s",), 2.0, "a run of a small model with layout.mbs=1", 0.7),
    Constant(("softmax_gscores_s",), 0.5, "two runs of a model with narrow heads, one with longer sequences"),
    Constant(("step_overhead_s",), 0.5, "a run whose steps take some ten milliseconds"),
    Constant(("link_bandwidth",), 0.3, "a run with layout.tp=2", 1.0),
    Constant(("link_latency_s",), 1.5, "a run with layout.tp=2 and few tokens in a micro-batch"),
    Constant(("network_bandwidth",), 0.3, "a run on two nodes with layout.zero=3"),
    Constant(("network_latency_s",), 1.5, "a run on two nodes with small transfers"),
    Constant(("overlap_slowdown",), 0.5, "a run with layout.dp=2 whose gradients hide"),
    Constant(("host_link",), 0.3, "a run with layout.offload=parameters"),
    Constant(("host_adam_gparams_s",), 1.0, "a run with layout.offload=optimizer"),
    Constant(("action_overhead_s",), 1.5, "a run with layout.pp=2 and many small micro-batches"),
)


def value(job: Job, field: str) -> float:
    """What the laws take for a field: given, or the kind's own."""
    machine = ClusterRates(job)
    given = getattr(machine.efficiency, field)
    if given is not None:
        return float(given)
    if field in ("matmul", "matmul_fp8"):
        return machine.sustained["fp8" if field.endswith("fp8") else "bf16"]
    if field.startswith("attention_"):
        return float(getattr(machine.attention, field.removeprefix("attention_")))
    if machine.fabric is None:
        return UNMEASURED_LINK if field == "link_bandwidth" else UNMEASURED_LATENCY_S
    link = machine.intra("all_reduce")
    return link.bandwidth_gb_s / machine.cluster.link_bandwidth_gb_s if field == "link_bandwidth" else link.latency_s


def bounds(field: str) -> tuple[float, float]:
    """Of the field, as its own file has them; a time that may be nothing still has a logarithm."""
    limits = {type(each).__name__: each for each in Efficiency.model_fields[field].metadata}
    low = float(getattr(limits.get("Ge"), "ge", 0.0))
    return max(low, 1e-7), float(getattr(limits.get("Le"), "le", math.inf))


@dataclass(frozen=True)
class Base:
    """The constants as they were, for one machine."""

    cluster: Cluster
    values: Mapping[str, float]

    @classmethod
    def of(cls, job: Job) -> Base:
        fields = [field for constant in CONSTANTS for field in constant.fields]
        return cls(job.cluster, {field: max(value(job, field), bounds(field)[0]) for field in fields})

    def prior(self, constant: Constant) -> float:
        on_host = constant.on_host if self.cluster.efficiency.synchronous else None
        return constant.prior if on_host is None else on_host

    def moved(self, constant: Constant, by: float) -> dict[str, float]:
        """The constant's fields with their logarithms moved, within bounds."""

        def within(field: str) -> float:
            low, high = bounds(field)
            return min(max(self.values[field] * math.exp(by), low), high)

        return {field: within(field) for field in constant.fields}

    def room(self, constant: Constant) -> tuple[float, float]:
        """How far the logarithm may move until a field meets a bound."""
        low = max(math.log(bounds(field)[0] / self.values[field]) for field in constant.fields)
        return low, min(math.log(bounds(field)[1] / self.values[field]) for field in constant.fields)

    def changed(self, moves: Mapping[Constant, float]) -> Efficiency:
        given = {field: one for constant, by in moves.items() if by for field, one in self.moved(constant, by).items()}
        return self.cluster.efficiency.model_copy(update={name: float(f"{one:.4g}") for name, one in given.items()})

    def job(self, job: Job, efficiency: Efficiency) -> Job:
        """A run's job on this machine: its own nodes, this machine's numbers."""
        ours = self.cluster
        same = {"gpu": ours.gpu, "link_bandwidth_gb_s": ours.link_bandwidth_gb_s, "network_gb_s": ours.network_gb_s}
        return job.model_copy(update={"cluster": job.cluster.model_copy(update={**same, "efficiency": efficiency})})
