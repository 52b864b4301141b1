"""The picture of the cluster: which GPUs form a group along each axis of a layout, and what that group's links carry."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from typing import Any

from nicegui import ui

from ultrascale.cost.columns import LayoutColumns
from ultrascale.cost.network import strides
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.estimate import Traffic
from ultrascale.specs.layout import Layout
from ultrascale.specs.plan import Plan
from ultrascale.specs.units import byte_size, seconds

MOST_GPUS = 4096  # in the picture; of a larger cluster the first ones
TECHNIQUES = {"tensor": "tensor", "context": "context", "expert": "expert", "pipeline": "pipeline"}


@dataclass(frozen=True)
class AxisGroups:
    """The groups of one axis: a rank's members are `stride` apart."""

    name: str
    label: str
    size: int
    stride: int
    ring: bool = True
    short: str = ""
    """bytes and time of a step"""
    where: str = ""
    """which links the group uses"""
    sends: str = ""
    """each collective"""


def groups_of(layout: Layout) -> dict[str, AxisGroups]:
    """The groups of every axis larger than 1, in the engine's order of ranks."""
    sharded = layout.zero > 0 and layout.shards > 1
    data = f"dp {layout.dp}" + (f" × cp {layout.cp}" if layout.cp > 1 else "")
    whole = sharded and layout.shards == layout.data_ranks
    labels = {
        "tensor": f"tp {layout.tp}",
        "context": f"cp {layout.cp}",
        "expert": f"ep {layout.ep}",
        "data": f"{data}, ZeRO {layout.zero}" if whole else data,
        "shard": f"HSDP {layout.shards}, ZeRO {layout.zero}",
        "replica": f"HSDP replicas {layout.data_ranks // layout.shards}",
        "pipeline": f"pp {layout.pp}",
    }
    if not sharded or whole:
        del labels["shard"], labels["replica"]
    elif layout.ep == 1:
        del labels["data"]
    sizes = strides(LayoutColumns.of([layout]))
    found = {}
    for name, label in labels.items():
        size, stride = (int(column[0]) for column in sizes[name])
        if size > 1:
            found[name] = AxisGroups(name, label, size, stride, ring=name != "pipeline")
    return found


def picture(plan: Plan) -> dict[str, Any]:
    """What cluster.js draws."""
    cluster, layout = plan.job.cluster, plan.layout
    groups = groups_of(layout)
    rows: dict[str, list[Traffic]] = {name: [] for name in groups}
    for one in plan.estimate.traffic:
        name = TECHNIQUES.get(one.technique) or _data_axis(groups, one)
        if name in rows and one.bytes:
            rows[name].append(one)
    axes = [_with_traffic(group, cluster, rows[name]) for name, group in groups.items()]
    per_node = min(cluster.gpus_per_node, cluster.gpus)
    shown = min(MOST_GPUS // per_node * per_node or per_node, layout.gpus)
    columns = next(count for count in range(1, per_node + 1) if count * count * 2 >= per_node) * 2 if per_node > 2 else per_node
    return {
        "axes": [asdict(axis) for axis in axes],
        "gpus": layout.gpus,
        "shown": shown,
        "per_node": per_node,
        "domain": cluster.fast_domain,
        "columns": columns,
        "cell": 18 if shown <= 128 else 13 if shown <= 512 else 9 if shown <= 1024 else 6,
    }


def _data_axis(groups: dict[str, AxisGroups], one: Traffic) -> str:
    """Where gradients are reduced and ZeRO gathers: the axis whose groups have the collective's size."""
    return next((name for name in ("shard", "replica", "data") if name in groups and groups[name].size == one.group), "data")


def _with_traffic(group: AxisGroups, cluster: Cluster, rows: list[Traffic]) -> AxisGroups:
    near = max(1, min(group.size, cluster.fast_domain // group.stride))
    fast, slow = f"{cluster.link_bandwidth_gb_s:,.0f} GB/s", f"{cluster.network_gb_s:,.0f} GB/s"
    where = f"All share one domain of the fast link ({fast})."
    if near == 1:
        where = f"No two share a domain of the fast link: all of it goes over the network ({slow} per GPU)."
    elif near < group.size:
        where = f"{near} share a domain of the fast link ({fast}), the others are reached over the network ({slow} per GPU)."
    total, time_s = sum(one.bytes for one in rows), sum(one.time_s for one in rows)
    sends = [
        f"{one.collective.replace('_', '-')}: {byte_size(one.bytes)} sent by each GPU, {seconds(one.time_s)}, "
        f"of it {seconds(one.exposed_s)} exposed"
        for one in rows
    ]
    return AxisGroups(
        group.name,
        group.label,
        group.size,
        group.stride,
        group.ring,
        short=f"{byte_size(total)} · {seconds(time_s)}" if rows else "sends nothing",
        where=where,
        sends="; ".join(sends) or "It sends nothing in a step.",
    )


class ClusterMap:
    """The picture as a card of the page; empty until there is a plan."""

    def __init__(self) -> None:
        script = resources.files("ultrascale.studio").joinpath("cluster.js").read_text(encoding="utf-8")
        ui.add_body_html(f"<script>{script}</script>")
        self.card = ui.element("section").classes("us-card us-wide").mark("cluster")
        with self.card:
            self.title = ui.html("", sanitize=False)
            ui.element("div").props("id=cluster-map")
        self.card.set_visibility(False)

    def show(self, plan: Plan | None) -> None:
        self.card.set_visibility(plan is not None and plan.layout.gpus > 1)
        if plan is None or plan.layout.gpus == 1:
            return
        data, cluster = picture(plan), plan.job.cluster
        part = "" if data["shown"] == data["gpus"] else f" (the first {data['shown']:,} are drawn)"
        nodes = f"{cluster.nodes:,} node{'s' if cluster.nodes > 1 else ''} × {cluster.gpus_per_node} GPUs"
        hint = "Point at an axis, then at a GPU. Solid lines stay in a domain of the fast link, dashed ones use the network."
        self.title.content = f'<h2>Groups on {nodes}{part} <span class="us-soft">{hint}</span></h2>'
        self.card.client.run_javascript(f"ultrascaleCluster.draw('cluster-map', {json.dumps(data)})")
