"""The mesh of every small layout, without processes: who is on which axis, and that all ranks make their groups in step."""

from __future__ import annotations

from itertools import product

import pytest

from ultrascale.parallel import mesh as meshes
from ultrascale.parallel.mesh import Mesh, RankCoordinates
from ultrascale.specs.layout import Layout

SIZES = (1, 2, 3, 4)
LAYOUTS = [
    Layout(dp=dp, tp=tp, pp=pp, cp=cp)
    for dp, tp, pp, cp in product(SIZES, (1, 2, 4), (1, 2, 3, 4, 5), (1, 2))
    if dp * tp * pp * cp <= 16
]
SHARDED = [
    layout.changed(zero=3, zero_shards=shards)
    for layout in LAYOUTS
    for shards in (1, 2, 3, None)
    if layout.data_ranks > 1 and layout.data_ranks % (shards or 1) == 0
]
SPREAD = [
    layout.changed(ep=ep)
    for layout in LAYOUTS + SHARDED
    for ep in (2, 3, 4)
    if layout.data_ranks % ep == 0 and (not layout.zero or layout.shards % ep == 0)
]


def meshes_of(layout: Layout, kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Mesh], list[list[tuple[int, ...]]]]:
    """Every rank's mesh, and the groups each rank joined, links included, in order."""
    joined: list[list[tuple[int, ...]]] = []
    monkeypatch.setattr(meshes, "join", lambda members, timeout_s=None: joined[-1].append(members) or object())
    found = []
    for rank in range(layout.gpus):
        joined.append([])
        found.append(Mesh.build(layout, kv_heads, rank))
        if layout.pp > 1:
            found[-1].links()
    return found, joined


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_ranks_create_process_groups_in_the_same_order(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch names a group by its members and by how many the rank created before: counts that differ are a deadlock."""
    for layout in LAYOUTS + SHARDED + SPREAD:
        _, joined = meshes_of(layout, kv_heads, monkeypatch)
        for rank, groups in enumerate(joined):
            assert len(groups) == len(joined[0]), (layout, rank)
            for turn, members in enumerate(groups):
                assert rank in members
                assert {joined[member][turn] for member in members} == {members}, (layout, rank, turn)


def test_rank_order_has_tp_innermost_and_pp_outermost() -> None:
    layout = Layout(dp=3, tp=2, pp=4, cp=5)
    places = [RankCoordinates.of(layout, rank) for rank in range(layout.gpus)]
    assert places == [RankCoordinates(*one) for one in product(range(4), range(3), range(5), range(2))]
    assert [place.rank(layout) for place in places] == list(range(layout.gpus))


def test_axes_share_all_other_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(dp=2, tp=2, pp=2, cp=3)
    everyone, _ = meshes_of(layout, 8, monkeypatch)
    for mesh in everyone:
        place = mesh.place
        assert [RankCoordinates.of(layout, rank) for rank in mesh.tp.ranks] == [
            RankCoordinates(place.pp, place.dp, place.cp, i) for i in (0, 1)
        ]
        assert [RankCoordinates.of(layout, rank) for rank in mesh.cp.ranks] == [
            RankCoordinates(place.pp, place.dp, i, place.tp) for i in (0, 1, 2)
        ]
        assert [RankCoordinates.of(layout, rank) for rank in mesh.pp.ranks] == [
            RankCoordinates(i, place.dp, place.cp, place.tp) for i in (0, 1)
        ]
        assert [RankCoordinates.of(layout, rank) for rank in mesh.data.ranks] == [
            RankCoordinates(place.pp, i, j, place.tp) for i in (0, 1) for j in (0, 1, 2)
        ]
        assert all(axis.ranks[axis.rank] == mesh.rank for axis in (mesh.tp, mesh.cp, mesh.pp, mesh.data, mesh.world))
        assert mesh.shard.size == mesh.kv.size == 1


def test_kv_ranks_are_those_that_hold_the_same_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone, _ = meshes_of(Layout(tp=4, dp=2), 2, monkeypatch)
    assert [mesh.kv.ranks for mesh in everyone] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    everyone, _ = meshes_of(Layout(tp=4), 1, monkeypatch)
    assert {mesh.kv.ranks for mesh in everyone} == {(0, 1, 2, 3)}
    everyone, _ = meshes_of(Layout(tp=4), 8, monkeypatch)
    assert [mesh.kv.ranks for mesh in everyone] == [(0,), (1,), (2,), (3,)]


def test_hsdp_shards_within_and_repeats_across(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone, _ = meshes_of(Layout(dp=4, tp=2, zero=3, zero_shards=2), 8, monkeypatch)
    assert [(mesh.shard.ranks, mesh.replica.ranks) for mesh in everyone[::2]] == [
        ((0, 2), (0, 4)),
        ((0, 2), (2, 6)),
        ((4, 6), (0, 4)),
        ((4, 6), (2, 6)),
    ]


def test_gradient_norm_counts_every_shard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over `parts`, each stage, each tp rank and each shard occurs once, and no copy of any."""
    for layout in LAYOUTS + SHARDED:
        everyone, _ = meshes_of(layout, 8, monkeypatch)
        for mesh in everyone:
            parts = [(everyone[r].place.pp, everyone[r].place.tp, everyone[r].shard.rank) for r in mesh.parts.ranks]
            assert sorted(parts) == sorted(product(range(layout.pp), range(layout.tp), range(mesh.shard.size))), layout


def test_ends_are_the_first_and_last_rank_of_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    everyone, _ = meshes_of(Layout(pp=4, dp=2), 8, monkeypatch)
    assert [mesh.ends.ranks for mesh in everyone] == [(0, 6), (1, 7), (2,), (3,), (4,), (5,), (0, 6), (1, 7)]


@pytest.mark.parametrize("pp", [2, 3, 4, 5, 6])
def test_every_neighbour_has_a_link_in_each_direction(pp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone, _ = meshes_of(Layout(pp=pp), 8, monkeypatch)
    for rank, mesh in enumerate(everyone):
        after, before = (rank + 1) % pp, (rank - 1) % pp
        assert set(mesh.links()) == {(rank, after), (after, rank), (rank, before), (before, rank)}


def test_experts_are_spread_over_neighbouring_data_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = meshes_of(Layout(dp=4, cp=2, tp=2, ep=4, zero=2), 8, monkeypatch)
    assert found[2].data.ranks == (0, 2, 4, 6, 8, 10, 12, 14)
    assert found[2].ep.ranks == (0, 2, 4, 6)
    assert found[2].expert_data.ranks == (2, 10)
    assert found[2].expert_shard.ranks == (2, 10)
    in_two, _ = meshes_of(Layout(dp=8, ep=2, zero=3, zero_shards=4), 8, monkeypatch)
    assert (in_two[5].shard.ranks, in_two[5].replica.ranks) == ((4, 5, 6, 7), (1, 5))
    assert (in_two[5].expert_shard.ranks, in_two[5].expert_data.ranks) == ((5, 7), (1, 3, 5, 7))


def test_gradient_norm_counts_every_expert_shard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks over which norms add up hold each part of the experts, and of what ZeRO cuts, exactly once."""
    for layout in SPREAD:
        found, _ = meshes_of(layout, 8, monkeypatch)
        for mesh in found:
            members = [found[rank] for rank in mesh.parts.ranks]
            parts = [(one.place.pp, one.place.tp, one.ep.rank, one.expert_shard.rank) for one in members]
            assert len(set(parts)) == len(parts) == layout.pp * layout.tp * layout.ep * mesh.expert_shard.size, layout
