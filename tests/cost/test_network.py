"""Collectives: volumes and laws against hand-computed numbers, and the fitted NVLink domains against measurements."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.cost.network import (
    TREE_BANDWIDTH,
    Link,
    Op,
    collective_time_s,
    load_fabric,
    ring_time_s,
    tree_all_reduce_time_s,
    wire_bytes,
)
from ultrascale.specs.errors import SpecError

OPS: tuple[Op, ...] = get_args(Op)
FABRICS = ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300")
NVLINK = Link(bandwidth_gb_s=400, latency_s=1e-6)
NIC = Link(bandwidth_gb_s=50, latency_s=5e-6)
GB = 1e9


@pytest.mark.parametrize(
    ("op", "gigabytes"),
    [
        # nccl-tests, doc/PERFORMANCE.md, Summary: 2(n−1)/n, (n−1)/n three times, 1 and 1; here 8 GB on 8 ranks
        ("all_reduce", 14.0),
        ("all_gather", 7.0),
        ("reduce_scatter", 7.0),
        ("all_to_all", 7.0),
        ("broadcast", 8.0),
        ("reduce", 8.0),
        ("send_recv", 8.0),
    ],
)
def test_volumes(op: Op, gigabytes: float) -> None:
    assert wire_bytes(op, 8 * GB, 8) == pytest.approx(gigabytes * GB)
    assert wire_bytes(op, 8 * GB, 1) == 0


def test_an_unknown_collective_is_refused_with_a_hint() -> None:
    with pytest.raises(SpecError, match="did you mean 'all_reduce'"):
        wire_bytes("allreduce", 1.0, 2)  # type: ignore[arg-type]


def test_ring_inside_a_domain() -> None:
    """8 ranks, 8 GB at 400 GB/s and 1 µs: 14 GB take 35 ms and 14 hops 14 µs (twice Thakur 2005, §4.1)."""
    time = ring_time_s("all_reduce", 8 * GB, 8, per_node=8, intra=NVLINK, inter=NIC)
    assert time == pytest.approx(35e-3 + 14e-6)


def test_ring_across_domains_uses_every_nic() -> None:
    """16 ranks in 2 domains of 8: 8 NICs of 50 GB/s match NVLink; 4 of 8 members would have half of it.

    all_gather of 16 GB: 15 GB at 400 GB/s, 15 steps that each wait for the hop between domains. In 4 domains of 4: 15 GB at
    200 GB/s.
    """
    full = ring_time_s("all_gather", 16 * GB, 16, per_node=8, intra=NVLINK, inter=NIC)
    assert full == pytest.approx(15 / 400 + 15 * 5e-6)
    half = ring_time_s("all_gather", 16 * GB, 16, per_node=4, intra=NVLINK, inter=NIC)
    assert half == pytest.approx(15 / 200 + 15 * 5e-6)


def test_tree_is_faster_for_small_messages_and_ring_for_large_ones() -> None:
    """512 ranks in 64 domains: the tree's latency is 2·(7 + 6·5) = 74 µs, the ring's 2·511·5 = 5110 µs."""
    place = {"per_node": 8, "intra": NVLINK, "inter": NIC}
    assert tree_all_reduce_time_s(0.0, 512, **place) == pytest.approx(74e-6)
    assert ring_time_s("all_reduce", 0.0, 512, **place) == pytest.approx(5110e-6)
    assert collective_time_s("all_reduce", 1e6, 512, **place) == tree_all_reduce_time_s(1e6, 512, **place)
    assert collective_time_s("all_reduce", 1e12, 512, **place) == ring_time_s("all_reduce", 1e12, 512, **place)
    assert tree_all_reduce_time_s(400 * GB, 512, **place) == pytest.approx(2 / TREE_BANDWIDTH + 74e-6)


def test_all_to_all_is_bound_by_its_nic() -> None:
    """32 ranks in domains of 8, 32 GB each: 24 GB leave at 50 GB/s while 31 GB pass NVLink at 400 GB/s."""
    time = collective_time_s("all_to_all", 32 * GB, 32, per_node=8, intra=NVLINK, inter=NIC)
    assert time == pytest.approx(24 / 50 + 31e-6 + 5e-6)
    inside = collective_time_s("all_to_all", 8 * GB, 8, per_node=8, intra=NVLINK, inter=NIC)
    assert inside == pytest.approx(7 / 400 + 7e-6)


def test_send_recv_takes_the_link_between_the_two() -> None:
    assert collective_time_s("send_recv", GB, 2, per_node=2, intra=NVLINK, inter=NIC) == pytest.approx(1 / 400 + 1e-6)
    assert collective_time_s("send_recv", GB, 2, per_node=1, intra=NVLINK, inter=NIC) == pytest.approx(1 / 50 + 5e-6)


@given(size=st.floats(1, 1e12), n=st.integers(1, 4096), per_node=st.sampled_from([1, 2, 4, 8, 72]))
def test_all_reduce_is_reduce_scatter_and_all_gather_on_the_ring(size: float, n: int, per_node: int) -> None:
    place = {"per_node": per_node, "intra": NVLINK, "inter": NIC}
    halves = [ring_time_s(op, size, n, **place) for op in ("reduce_scatter", "all_gather")]
    assert ring_time_s("all_reduce", size, n, **place) == pytest.approx(sum(halves), rel=1e-9)


@given(
    op=st.sampled_from(OPS),
    gpu=st.sampled_from(FABRICS),
    size=st.floats(0, 1e13),
    n=st.integers(1, 65536),
    per_node=st.integers(1, 72),
    nic=st.floats(1, 400),
)
def test_time_is_never_negative_and_grows_with_bytes(op: Op, gpu: str, size: float, n: int, per_node: int, nic: float) -> None:
    times = collective_time_s(
        op,
        np.array([size, size * 1.5 + 1.0]),
        n,
        per_node=per_node,
        intra=load_fabric(gpu).link(op),
        inter=Link(nic, 5e-6),
    )
    assert np.all(np.isfinite(times))
    assert np.all(times >= 0)
    assert times[1] >= times[0]
    assert (times[0] == 0) == (n == 1)


@pytest.mark.parametrize("op", OPS)
def test_crossing_domains_is_never_faster(op: Op) -> None:
    intra = load_fabric("h100").link(op)
    sizes = 2.0 ** np.arange(10, 34)
    inside = collective_time_s(op, sizes, 8, per_node=8, intra=intra, inter=NIC)
    across = collective_time_s(op, sizes, 8, per_node=4, intra=intra, inter=NIC)
    assert np.all(across >= inside)


# Measured with NCCL 2.29.2 on H100 (aiconfigurator's tables), ms for a buffer of 16 and 256 MiB on n GPUs.
MEASURED: list[tuple[Op, int, float, float]] = [
    ("all_gather", 2, 0.05600, 0.54855),
    ("all_gather", 8, 0.06886, 0.72879),
    ("reduce_scatter", 8, 0.06967, 0.72172),
    ("all_reduce", 4, 0.09901, 1.18102),
    ("all_reduce", 8, 0.12191, 1.09210),
    ("all_to_all", 8, 0.07566, 0.76391),
]


@pytest.mark.parametrize(("op", "n", "small_ms", "large_ms"), MEASURED)
def test_measured_points_lie_within_the_stated_p90(op: Op, n: int, small_ms: float, large_ms: float) -> None:
    fabric = load_fabric("h100")
    link = fabric.link(op)
    times = collective_time_s(op, np.array([2.0**24, 2.0**28]), n, per_node=8, intra=link, inter=NIC)
    assert times * 1e3 == pytest.approx([small_ms, large_ms], rel=fabric.ops[op].large_residual_p90)


@pytest.mark.parametrize("gpu", FABRICS)
def test_the_shipped_fit_states_its_error_and_origin(gpu: str) -> None:
    fabric = load_fabric(gpu)
    assert set(fabric.ops) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    assert "aiconfigurator" in fabric.source
    for fit in fabric.ops.values():
        assert 0.5 < fit.bandwidth_fraction < 1
        assert 0 < fit.large_residual_median < 0.09
        assert fit.large_residual_median < fit.large_residual_p90 < 0.30
        assert fit.rows >= 40


def test_only_the_switch_lets_an_all_reduce_pass_the_ring() -> None:
    """8 H100s measured 445 GB/s of bus bandwidth, 4 of them 350; A100 has no reduction in its switch."""
    assert load_fabric("h100").ops["all_reduce"].switch_gain > 1.1
    assert load_fabric("a100").ops["all_reduce"].switch_gain == 1.0


def test_a_related_gpu_keeps_the_fraction_of_its_own_nvlink() -> None:
    """H800: H100 with 200 GB/s of NVLink per direction."""
    h100, h800 = load_fabric("h100").link("all_gather"), load_fabric("h100").link("all_gather", nvlink_gb_s=200)
    assert h800.bandwidth_gb_s == pytest.approx(h100.bandwidth_gb_s * 200 / 450)
    assert h800.latency_s == h100.latency_s


def test_an_unknown_gpu_is_refused_with_a_hint() -> None:
    with pytest.raises(SpecError, match="did you mean 'a100'"):
        load_fabric("a10")
