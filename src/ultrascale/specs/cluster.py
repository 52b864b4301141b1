"""Cluster: which GPUs, how many, how they are joined, and what of the data sheet they deliver."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_mapping, rounded, to_yaml, write_text
from ultrascale.specs.gpu import GPU
from ultrascale.specs.validate import FrozenSpec, build, shown

_SHORT = re.compile(r"\s*(?:([0-9]{1,9})\s*[x×]\s*)?([0-9]{1,9})\s*[x×\s]\s*([a-zA-Z][\w.\-]*)\s*\Z")
EXAMPLES = "such as 64xh100, '8x8 h100' or cluster.yaml"
# Strict, as in GPU: "25" between quotes is a mistake in the file. A megabyte a second is slower than any link there is.
Bandwidth = Annotated[float, Field(strict=True, ge=1e-3, le=1e9, allow_inf_nan=False)]


class CalibrationSource(FrozenSpec):
    """Where a cluster's constants come from: runs of that machine."""

    runs: int = Field(ge=1, strict=True, examples=[6])
    date: str = Field(examples=["2026-11-15"])
    processes: int = Field(ge=1, strict=True, examples=[1], description="the most that one of the runs had")
    constants: tuple[str, ...] = Field(examples=[["matmul"]], description="those that the runs determined")
    step_time_error: float = Field(ge=0, examples=[0.02], description="the middle one of the runs, each left out of the fit")
    step_time_worst: float = Field(ge=0, examples=[0.05], description="the worst one of them")
    memory_error: float | None = Field(None, ge=0, examples=[0.01], description="the same of peak memory")

    def __str__(self) -> str:
        memory = "" if self.memory_error is None else f" and peak memory {self.memory_error:.1%}"
        return (
            f"{', '.join(self.constants)} fitted to {self.runs} runs of this machine on {self.date}: on runs left out the step "
            f"time was {self.step_time_error:.1%} off (the worst {self.step_time_worst:.1%}){memory}"
        )


class Cluster(FrozenSpec):
    """GPUs in nodes. Bandwidths are per GPU and direction, as the data sheets of the GPU and of its NIC say them."""

    name: str = Field("", examples=["my-cluster"])
    gpu: GPU
    nodes: int = Field(ge=1, le=2**20, strict=True, examples=[8])
    gpus_per_node: int = Field(ge=1, le=1024, strict=True, examples=[8])
    link_domain: int = Field(
        ge=1, le=2**20, strict=True, examples=[8], description="GPUs that share the fast link: a node, or an NVL72 rack"
    )
    link_bandwidth_gb_s: Bandwidth = Field(examples=[450])
    network_gb_s: Bandwidth = Field(examples=[50])
    price_per_gpu_hour_usd: float | None = Field(None, ge=0, le=1e6, strict=True, allow_inf_nan=False, examples=[2.5])
    efficiency: Efficiency = Field(Efficiency(), examples=[{"matmul": 0.95}])
    calibrated: CalibrationSource | None = Field(None, description="where the constants come from, if not from here")

    @model_validator(mode="after")
    def _domain_holds_whole_nodes(self) -> Self:
        small, large = sorted((self.link_domain, self.gpus_per_node))
        if large % small:
            raise ValueError(
                f"cluster.link_domain is {self.link_domain} but must divide, or be a multiple of, "
                f"gpus_per_node = {self.gpus_per_node}: try {self.gpus_per_node}"
            )
        return self

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def fast_domain(self) -> int:
        """GPUs that can talk over the fast link: never more than there are."""
        return min(self.link_domain, self.gpus)

    @property
    def label(self) -> str:
        return self.name or f"{self.gpus}x{self.gpu.name}"

    def resized(self, gpus: int) -> Cluster:
        """The same machine room with another number of GPUs; whole nodes, or a part of one."""
        if gpus < 1 or (gpus > self.gpus_per_node and gpus % self.gpus_per_node):
            lower = max(1, gpus // self.gpus_per_node) * self.gpus_per_node
            raise SpecError(
                f"gpus is {gpus} but must fill whole nodes of {self.gpus_per_node}: try {lower} or {lower + self.gpus_per_node}"
            )
        per_node = min(gpus, self.gpus_per_node)
        domain = self.link_domain if self.link_domain >= self.gpus_per_node else min(self.link_domain, per_node)
        if domain % per_node and per_node % domain:
            domain = per_node
        return build(
            Cluster,
            {
                **dict(self),
                "name": f"{gpus}x{self.gpu.name}",
                "nodes": gpus // per_node,
                "gpus_per_node": per_node,
                "link_domain": domain,
            },
            "cluster",
        )

    def to_mapping(self) -> dict[str, Any]:
        """All its numbers, without the sources of those that a preset has; `from_mapping` reads it back."""
        data = self.model_dump(mode="json", exclude_none=True)
        data["gpu"].pop("sources")
        usual = Efficiency.measured(self.gpu.name)
        own = self.efficiency.model_dump(mode="json")
        data["efficiency"] = {name: value for name, value in own.items() if value != getattr(usual, name)}
        return data

    def save(self, path: str | Path) -> Path:
        """Write cluster.yaml, whole or not at all."""
        target = Path(path)
        write_text(target, to_yaml(rounded(self.to_mapping())))
        return target

    @classmethod
    def load(cls, ref: str | Path) -> Cluster:
        """`64xh100` (GPUs × kind), `8x8 h100` (nodes × GPUs per node, kind), or the path of a cluster file."""
        text = str(ref)
        if match := _SHORT.match(text):
            kind = GPU.load(match[3])
            if match[1]:
                return cls.of(kind, nodes=int(match[1]), gpus_per_node=int(match[2]))
            return cls._of_total(kind, int(match[2]))
        path = Path(text)
        # os.path answers False where pathlib would raise: a name too long, a folder that may not be read.
        if path.suffix.lower() in (".yaml", ".yml", ".json") or (text.strip() and os.path.exists(path)):
            return cls.from_mapping(read_mapping(path, "cluster"))
        raise SpecError(f"cluster is {shown(text)} but must name GPUs and their number, {EXAMPLES}")

    @classmethod
    def _of_total(cls, kind: GPU, gpus: int) -> Cluster:
        per_node = kind.gpus_per_node
        if gpus < 1:
            raise SpecError(f"cluster is '{gpus}x{kind.name}' but must have at least one GPU: try {per_node}x{kind.name}")
        if gpus > per_node and gpus % per_node:
            lower = gpus // per_node * per_node
            raise SpecError(
                f"cluster is '{gpus}x{kind.name}' but {kind.name} comes in nodes of {per_node}: try {lower}x{kind.name}, "
                f"{lower + per_node}x{kind.name}, or name the nodes, such as '{gpus}x1 {kind.name}'"
            )
        return cls.of(kind, nodes=max(1, gpus // per_node), gpus_per_node=min(gpus, per_node))

    @classmethod
    def of(cls, kind: GPU, /, *, nodes: int, gpus_per_node: int, **overrides: Any) -> Cluster:
        """A cluster whose unnamed fields are the GPU kind's usual ones."""
        domain = kind.link_domain
        if domain % max(gpus_per_node, 1) and max(gpus_per_node, 1) % domain:
            domain = gpus_per_node  # a node of 6 in boxes made for 8: the link covers the node
        efficiency = overrides.pop("efficiency", {})
        if isinstance(efficiency, Mapping):
            efficiency = {**Efficiency.measured(kind.name).model_dump(exclude_defaults=True), **efficiency}
        fields: dict[str, Any] = {
            "efficiency": efficiency,
            "name": f"{nodes * gpus_per_node}x{kind.name}",
            "gpu": kind,
            "nodes": nodes,
            "gpus_per_node": gpus_per_node,
            "link_domain": domain,
            "link_bandwidth_gb_s": kind.link_bandwidth_gb_s,
            "network_gb_s": kind.network_gb_s,
            "price_per_gpu_hour_usd": kind.price_per_gpu_hour_usd,
        }
        return build(cls, {**fields, **overrides}, "cluster")

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Cluster:
        """A cluster file: `gpu` is a preset's name, or a mapping whose `kind` names one and whose other fields override it."""
        fields = dict(data)
        if "gpu" not in fields:
            raise SpecError("cluster.gpu is missing: name a GPU kind, such as gpu: h100")
        fields["gpu"] = kind = _gpu(fields["gpu"])
        if "gpus" in fields:
            gpus = fields.pop("gpus")
            if "nodes" in fields:
                raise SpecError("cluster.gpus and cluster.nodes were both given: keep nodes and gpus_per_node, or gpus")
            per_node = fields.setdefault("gpus_per_node", kind.gpus_per_node)
            _whole(gpus, "gpus", 64)
            _whole(per_node, "gpus_per_node", 8)
            if gpus < per_node:
                fields["gpus_per_node"] = per_node = gpus
            if gpus % per_node:
                lower = gpus // per_node * per_node
                raise SpecError(
                    f"cluster.gpus is {gpus} but must fill whole nodes of {per_node}: try {lower} or {lower + per_node}"
                )
            fields["nodes"] = gpus // per_node
        nodes, per_node = fields.pop("nodes", 1), fields.pop("gpus_per_node", kind.gpus_per_node)
        _whole(nodes, "nodes", 8)
        _whole(per_node, "gpus_per_node", 8)
        return cls.of(kind, nodes=nodes, gpus_per_node=per_node, **{k: v for k, v in fields.items() if k != "gpu"})


def _whole(value: Any, field: str, example: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**30:
        raise SpecError(f"cluster.{field} is {shown(value)} but must be a whole number from 1 to 2^30: try {example}")


def _gpu(value: Any) -> GPU:
    if isinstance(value, GPU):
        return value
    if isinstance(value, str):
        return GPU.load(value)
    if not isinstance(value, Mapping):
        raise SpecError(f"cluster.gpu is {shown(value)} but must be a GPU kind such as h100, or a mapping with `kind: h100`")
    fields = dict(value)
    if "kind" not in fields and "name" not in fields:
        raise SpecError("cluster.gpu.kind is missing: name the GPU kind whose numbers hold but for those given, such as h100")
    if "kind" not in fields:
        return _or_preset(build(GPU, fields, "cluster.gpu"))
    kind = fields.pop("kind")
    if not isinstance(kind, str):
        raise SpecError(f"cluster.gpu.kind is {shown(kind)} but must be the name of a GPU kind, such as h100")
    base = GPU.load(kind).model_dump()
    if isinstance(fields.get("peak_tflops"), Mapping):
        fields["peak_tflops"] = {**base["peak_tflops"], **fields["peak_tflops"]}
    return build(GPU, {**base, **fields}, "cluster.gpu")


def _or_preset(gpu: GPU) -> GPU:
    """Plan files leave the sources out: a GPU with a preset's name and all its numbers is that preset, sources and all."""
    preset = GPU.presets().get(gpu.name)
    return preset if preset is not None and preset.model_copy(update={"sources": gpu.sources}) == gpu else gpu
