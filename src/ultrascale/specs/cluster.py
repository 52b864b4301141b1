"""Cluster: which GPUs, how many, how they are joined, and what of the data sheet they deliver."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import read_mapping
from ultrascale.specs.gpu import GPU
from ultrascale.specs.validate import build

_SHORT = re.compile(r"\s*(?:(\d+)\s*[x×]\s*)?(\d+)\s*[x×\s]\s*([a-zA-Z][\w.\-]*)\s*\Z")
EXAMPLES = "such as 64xh100, '8x8 h100' or cluster.yaml"


class Cluster(BaseModel):
    """GPUs in nodes. Bandwidths are per GPU and direction, as the data sheets of the GPU and of its NIC say them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    gpu: GPU
    nodes: int = Field(ge=1, le=1_000_000, strict=True)
    gpus_per_node: int = Field(ge=1, le=1024, strict=True)
    link_domain: int = Field(ge=1, strict=True, description="GPUs that share the fast link: a node, or an NVL72 rack")
    link_bandwidth_gb_s: float = Field(gt=0, allow_inf_nan=False)
    network_gb_s: float = Field(gt=0, allow_inf_nan=False)
    price_per_gpu_hour_usd: float | None = Field(None, ge=0, allow_inf_nan=False)
    efficiency: Efficiency = Efficiency()

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
        if path.suffix.lower() in (".yaml", ".yml", ".json") or path.exists():
            return cls.from_mapping(read_mapping(path, "cluster"))
        raise SpecError(f"cluster is {text!r} but must name GPUs and their number, {EXAMPLES}")

    @classmethod
    def _of_total(cls, kind: GPU, gpus: int) -> Cluster:
        per_node = kind.gpus_per_node
        if gpus < 1 or (gpus > per_node and gpus % per_node):
            lower = max(1, gpus // per_node) * per_node
            raise SpecError(
                f"cluster is '{gpus}x{kind.name}' but {kind.name} comes in nodes of {per_node}: try {lower}x{kind.name}, "
                f"{lower + per_node}x{kind.name}, or name the nodes, such as '{max(gpus, 1)}x1 {kind.name}'"
            )
        return cls.of(kind, nodes=-(-gpus // per_node), gpus_per_node=min(gpus, per_node))

    @classmethod
    def of(cls, kind: GPU, *, nodes: int, gpus_per_node: int, **overrides: Any) -> Cluster:
        """A cluster whose unnamed fields are the GPU kind's usual ones."""
        domain = kind.link_domain
        if domain % max(gpus_per_node, 1) and max(gpus_per_node, 1) % domain:
            domain = gpus_per_node  # a node of 6 in boxes made for 8: the link covers the node
        fields: dict[str, Any] = {
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
            if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in (gpus, per_node)):
                raise SpecError(f"cluster.gpus is {gpus!r} but must be a whole number of GPUs, such as 64")
            if gpus < per_node:
                fields["gpus_per_node"] = per_node = gpus
            if gpus % per_node:
                raise SpecError(
                    f"cluster.gpus is {gpus} but must fill whole nodes of {per_node}: try {gpus // per_node * per_node}"
                )
            fields["nodes"] = gpus // per_node
        nodes, per_node = fields.pop("nodes", 1), fields.pop("gpus_per_node", kind.gpus_per_node)
        if not isinstance(per_node, int) or isinstance(per_node, bool) or per_node < 1:
            raise SpecError(f"cluster.gpus_per_node is {per_node!r} but must be a whole number of GPUs, such as 8")
        if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
            raise SpecError(f"cluster.nodes is {nodes!r} but must be a whole number of nodes, such as 8")
        return cls.of(kind, nodes=nodes, gpus_per_node=per_node, **{k: v for k, v in fields.items() if k != "gpu"})


def _gpu(value: Any) -> GPU:
    if isinstance(value, GPU):
        return value
    if isinstance(value, str):
        return GPU.load(value)
    if not isinstance(value, Mapping):
        raise SpecError(f"cluster.gpu is {value!r} but must be a GPU kind such as h100, or a mapping with `kind: h100`")
    fields = dict(value)
    if "kind" not in fields:
        return build(GPU, fields, "cluster.gpu")
    base = GPU.load(str(fields.pop("kind"))).model_dump()
    if isinstance(fields.get("peak_tflops"), Mapping):
        fields["peak_tflops"] = {**base["peak_tflops"], **fields["peak_tflops"]}
    return build(GPU, {**base, **fields}, "cluster.gpu")
