"""The groups in the picture of the cluster are those that the engine builds."""

from __future__ import annotations

import pytest

from builders import make_job
from ultrascale import Layout, Plan, estimate

pytest.importorskip("nicegui")
from ultrascale.studio.cluster_map import AxisGroups, groups_of, picture

LAYOUTS = [
    Layout(dp=4, tp=2),
    Layout(dp=2, tp=2, pp=2, cp=2, zero=1),
    Layout(dp=8, cp=2, zero=3, zero_shards=4),
    Layout(dp=4, tp=2, pp=2, ep=2),
    Layout(dp=2, cp=4, tp=2, ep=2, zero=3, zero_shards=4),
]


def members(groups: AxisGroups, rank: int) -> list[int]:
    """As cluster.js finds them."""
    first = rank - rank // groups.stride % groups.size * groups.stride
    return [first + place * groups.stride for place in range(groups.size)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_groups_are_those_of_the_engine(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = pytest.importorskip("ultrascale.parallel.mesh")
    monkeypatch.setattr(mesh, "join", lambda members, timeout_s=None: None)
    names = {
        "tensor": "tp",
        "context": "cp",
        "expert": "ep",
        "data": "data",
        "shard": "shard",
        "replica": "replica",
        "pipeline": "pp",
    }
    groups = groups_of(layout)
    for rank in range(layout.gpus):
        built = mesh.Mesh.build(layout, kv_heads=8, rank=rank)
        for name, groups_of_axis in groups.items():
            assert members(groups_of_axis, rank) == list(getattr(built, names[name]).ranks), (name, rank)


def test_axes_of_size_one_are_left_out() -> None:
    assert groups_of(Layout()) == {}
    assert groups_of(Layout(tp=8)) == {"tensor": AxisGroups("tensor", "tp 8", 8, 1)}


def test_the_picture_says_which_links_carry_what() -> None:
    job = make_job("llama-3-8b", "16xh100", 4096, 16)
    layout = Layout(dp=2, tp=8, gas=8, zero=1)
    found = picture(Plan(job=job, layout=layout, estimate=estimate(job, layout)))
    tensor, data = found["axes"]
    assert (tensor["label"], data["label"]) == ("tp 8", "dp 2, ZeRO 1")
    assert "All share one domain" in tensor["where"]
    assert "over the network" in data["where"]
    assert "all-gather" in tensor["sends"]
    assert (found["shown"], found["per_node"], found["domain"]) == (16, 8, 8)


def test_of_a_large_cluster_whole_nodes_are_drawn() -> None:
    job = make_job("llama-3-8b", "8192xh100", 4096, 1024)
    layout = Layout(dp=1024, tp=8, zero=1)
    found = picture(Plan(job=job, layout=layout, estimate=estimate(job, layout)))
    assert found["shown"] == 4096
