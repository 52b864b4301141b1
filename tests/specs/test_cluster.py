"""Cluster: short names, files with any field overridden, resizing, and sentences for what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.specs.cluster import Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.errors import SpecError
from ultrascale.specs.gpu import GPU
from ultrascale.specs.validate import build

T = TypeVar("T")
KINDS = sorted(GPU.presets())
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ANYTHING = PLAIN | st.lists(PLAIN, max_size=2) | st.dictionaries(st.sampled_from(["kind", "matmul", "x"]), PLAIN, max_size=2)


def attempt(make: Callable[[], T]) -> tuple[T | None, str | None]:
    """The object, or the SpecError's message; any other exception fails the test."""
    try:
        return make(), None
    except SpecError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("64xh100", 8, 8),
        ("64 x H100", 8, 8),
        ("64 h100", 8, 8),
        ("64×h100", 8, 8),
        ("8x8 h100", 8, 8),
        ("8x8xh100", 8, 8),
        ("8 x 8 x h100", 8, 8),
        ("2x4 a100", 2, 4),
        ("3xh100", 1, 3),
        ("1xh100", 1, 1),
        ("72xgb200", 18, 4),
    ],
)
def test_short_names(text: str, nodes: int, per_node: int) -> None:
    cluster = Cluster.load(text)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpus) == (nodes, per_node, nodes * per_node)
    assert cluster.label == f"{cluster.gpus}x{cluster.gpu.name}"


def test_an_nvl72_rack_is_one_fast_domain_over_nodes_of_four() -> None:
    rack = Cluster.load("144xgb200")
    assert (rack.link_domain, rack.gpus_per_node, rack.nodes, rack.fast_domain) == (72, 4, 36, 72)
    assert Cluster.load("8xgb200").fast_domain == 8  # never more than there are


def test_a_file_overrides_any_field(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    fields = {
        "name": "attic",
        "gpu": {"kind": "h100", "memory_gib": 94, "peak_tflops": {"bf16": 800}},
        "nodes": 4,
        "gpus_per_node": 4,
        "network_gb_s": 25,
        "link_domain": 4,
        "link_bandwidth_gb_s": 300,
        "price_per_gpu_hour_usd": 2.5,
        "efficiency": {"matmul": 0.95},
    }
    file.write_text(yaml.safe_dump(fields))
    cluster, h100 = Cluster.load(file), GPU.load("h100")
    assert (cluster.gpus, cluster.network_gb_s, cluster.link_domain, cluster.link_bandwidth_gb_s) == (16, 25, 4, 300)
    assert (cluster.price_per_gpu_hour_usd, cluster.efficiency.matmul, cluster.label) == (2.5, 0.95, "attic")
    assert (cluster.gpu.memory_gib, cluster.gpu.peak_tflops["bf16"]) == (94, 800)
    assert cluster.gpu.peak_tflops["fp8"] == h100.peak_tflops["fp8"]
    assert cluster.gpu.power_w == h100.power_w
    assert cluster.efficiency.overlap == Cluster.load("8xh100").efficiency.overlap


def test_a_file_needs_only_the_kind_and_may_count_gpus() -> None:
    assert Cluster.from_mapping({"gpu": "h100"}) == Cluster.load("8xh100")
    assert Cluster.from_mapping({"gpu": "h100", "gpus": 64}) == Cluster.load("64xh100")
    assert Cluster.from_mapping({"gpu": "h100", "gpus": 4}) == Cluster.load("4xh100")
    assert Cluster.from_mapping({"gpu": "h100", "gpus": 12, "gpus_per_node": 6}).nodes == 2


def test_a_gpu_written_out_without_sources_is_the_preset_again() -> None:
    h100 = GPU.load("h100")
    written = {key: value for key, value in h100.model_dump().items() if key != "sources"}
    assert Cluster.from_mapping({"gpu": written}).gpu is h100
    assert Cluster.from_mapping({"gpu": {**written, "memory_gib": 94}}).gpu != h100


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0xh100", "cluster is '0xh100' but must have at least one GPU: try 8xh100"),
        ("12xh100", "cluster is '12xh100' but h100 comes in nodes of 8: try 8xh100, 16xh100, or name the nodes"),
        ("8x8", "cluster is '8x8' but must name GPUs and their number, such as 64xh100"),
        ("8x0 h100", "cluster.gpus_per_node is 0 but must be at least 1: try 8"),
        ("8xh101", "gpu 'h101' is not a known kind: did you mean 'h100'"),
        ("", "cluster is '' but must name GPUs"),
        ("9" * 5000 + "xh100", "cluster is '9999"),
        ("a" * 5000, "cluster is 'aaaa"),
        ("cluster.yaml", "cluster file cluster.yaml does not exist"),
    ],
)
def test_an_invalid_cluster_name_gets_a_suggestion(
    text: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as caught:
        Cluster.load(text)
    assert str(caught.value).startswith(says)
    assert len(str(caught.value)) < 300


@given(st.sampled_from(KINDS), st.integers(0, 5000))
def test_a_number_of_gpus_is_parsed_or_refused(kind: str, gpus: int) -> None:
    whole = gpus and (gpus <= GPU.load(kind).gpus_per_node or gpus % GPU.load(kind).gpus_per_node == 0)
    cluster, sentence = attempt(lambda: Cluster.load(f"{gpus}x{kind}"))
    assert (cluster is not None) == bool(whole)
    assert cluster.gpus == gpus if cluster else f"'{gpus}x{kind}'" in str(sentence)


@given(st.sampled_from(KINDS), st.integers(1, 64), st.integers(1, 64))
def test_nodes_by_gpus_are_multiplied(kind: str, nodes: int, per_node: int) -> None:
    cluster = Cluster.load(f"{nodes}x{per_node} {kind}")
    assert (cluster.nodes, cluster.gpus_per_node) == (nodes, per_node)
    assert 1 <= cluster.fast_domain <= cluster.gpus


@given(st.sampled_from(["64xh100", "72xgb200", "2x6 h100", "8xrtx4090", "1xa100"]), st.integers(-2, 600))
def test_resizing_keeps_hardware_and_network(start: str, gpus: int) -> None:
    cluster = Cluster.load(start)
    other, sentence = attempt(lambda: cluster.resized(gpus))
    if other is None:
        assert gpus < 1 or gpus % cluster.gpus_per_node
        assert f"gpus is {gpus} but must fill whole nodes of {cluster.gpus_per_node}: try" in str(sentence)
        return
    assert other.gpus == gpus
    assert other.gpus_per_node == min(gpus, cluster.gpus_per_node)
    assert (other.gpu, other.network_gb_s, other.efficiency) == (cluster.gpu, cluster.network_gb_s, cluster.efficiency)


def test_resizing_to_the_same_size_changes_nothing() -> None:
    for text in ("64xh100", "72xgb200", "3xh100"):
        assert Cluster.load(text).resized(Cluster.load(text).gpus) == Cluster.load(text)


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from([*Cluster.model_fields, "gpus", "kind", "x"]), ANYTHING, max_size=6))
def test_any_mapping_is_a_cluster_or_an_error(data: dict[str, Any]) -> None:
    for fields in (data, {"gpu": "h100", **data}, {"gpu": {"kind": "h100", **data}}):
        cluster, sentence = attempt(lambda fields=fields: Cluster.from_mapping(fields))  # type: ignore[misc]
        assert cluster.gpus >= 1 if cluster else sentence


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from([*Cluster.model_fields, "x"]), ANYTHING, max_size=6))
def test_any_mapping_given_to_build_is_a_cluster_or_an_error(data: dict[str, Any]) -> None:
    cluster, sentence = attempt(lambda: build(Cluster, {**dict(Cluster.load("8xh100")), **data}, "cluster"))
    assert cluster.gpus >= 1 if cluster else sentence


def test_rates_measured_on_a_kind_of_gpu_are_its_clusters_own() -> None:
    """A file overrides any of them, with a default too; kinds that were not measured have the defaults."""
    measured = Cluster.load("8xh200")
    assert measured.efficiency == Efficiency.measured("h200") != Efficiency()
    assert Cluster.load("8xh100").efficiency == Efficiency()
    assert Cluster.from_mapping(measured.to_mapping()) == measured
    other = Cluster.from_mapping({"gpu": "h200", "gpus": 8, "efficiency": {"boost": 1.0, "matmul": None}})
    assert (other.efficiency.boost, other.efficiency.matmul) == (1.0, None)
    assert other.efficiency.attention_forward == measured.efficiency.attention_forward
    assert Cluster.from_mapping(other.to_mapping()) == other
