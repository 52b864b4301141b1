"""GPU: every number has a source, the peaks are dense and ordered, and unknown names get a suggestion."""

from __future__ import annotations

from typing import Any

import pytest

from ultrascale.specs.errors import SpecError
from ultrascale.specs.gpu import GPU, _index
from ultrascale.specs.validate import build

NAMES = [
    "v100",
    "t4",
    "a10g",
    "a6000",
    "rtx3090",
    "a100-40",
    "a100-80",
    "a800",
    "h100",
    "h100-pcie",
    "h100-96",
    "h100-94",
    "h800",
    "gh200",
    "h20",
    "h200",
    "b200",
    "b300",
    "gb200",
    "gb300",
    "mi250x",
    "mi300x",
    "mi325x",
    "mi355x",
    "l4",
    "l40s",
    "rtx4090",
    "rtx5090",
    "cpu",
]
OWN_SURFACE = {"a100-80", "h100", "h200", "b200", "b300", "gb200"}


def numeric_fields(gpu: GPU) -> set[str]:
    return {name for name, value in gpu if isinstance(value, (int, float)) or name == "peak_tflops"}


def test_the_presets_are_the_promised_ones() -> None:
    assert sorted(GPU.presets()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name: str) -> None:
    gpu = GPU.load(name)
    assert set(gpu.sources) == numeric_fields(gpu)
    assert all(gpu.sources.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_borrowed_surface_has_a_reason(name: str) -> None:
    gpu = GPU.load(name)
    assert bool(gpu.surface_note) == (name not in OWN_SURFACE)
    assert (gpu.surface is None) == (name == "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_narrower_numbers_are_never_slower(name: str) -> None:
    peaks = GPU.load(name).peak_tflops
    found = [peaks[p] for p in ("fp32", "tf32", "fp16", "fp8") if p in peaks]
    assert found == sorted(found)
    if "bf16" in peaks and "fp16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]


@pytest.mark.parametrize(
    ("name", "bf16"),  # Dense, as MFU is reported against.
    [("a100", 312), ("h100", 989.4), ("h200", 989.4), ("b200", 2250), ("gb200", 2500), ("mi300x", 1307.4)],
)
def test_peaks_are_dense(name: str, bf16: float) -> None:
    assert GPU.load(name).peak_tflops["bf16"] == bf16


def test_volta_has_no_bf16() -> None:
    assert set(GPU.load("v100").peak_tflops) == {"fp32", "fp16"}


def test_links_are_per_direction() -> None:
    assert GPU.load("h100").link_bandwidth_gb_s == 900 / 2
    assert GPU.load("h800").link_bandwidth_gb_s == 400 / 2
    assert (GPU.load("gb200").link_domain, GPU.load("rtx4090").link_domain) == (72, 1)
    assert GPU.load("rtx4090").link_bandwidth_gb_s == GPU.load("rtx4090").pcie_bandwidth_gb_s


def test_a_domain_and_a_node_divide_each_other() -> None:
    for gpu in GPU.presets().values():
        small, large = sorted((gpu.link_domain, gpu.gpus_per_node))
        assert large % small == 0


def test_memory_is_what_a_process_can_use_not_the_nominal_size() -> None:
    printed_gb = {"v100": 32, "a100-40": 40, "a100-80": 80, "h100": 80, "h200": 141, "b200": 180, "gb200": 186}
    for name, size in printed_gb.items():
        assert 0.97 * size < GPU.load(name).memory_gib < size


def test_no_price_is_guessed() -> None:
    assert all(gpu.price_per_gpu_hour_usd is None for gpu in GPU.presets().values())


@pytest.mark.parametrize(("alias", "name"), [("A100", "a100-80"), ("h100-80", "h100"), ("4090", "rtx4090"), (" H200 ", "h200")])
def test_aliases_and_case(alias: str, name: str) -> None:
    assert GPU.load(alias) is GPU.load(name)
    assert set(_index().values()) == set(GPU.presets())


def test_an_unknown_gpu_suggests_the_nearest() -> None:
    with pytest.raises(SpecError, match="gpu 'h10' is not a known kind: did you mean 'h100'"):
        GPU.load("h10")


def test_a_gpu_survives_a_round_trip_and_can_be_a_key() -> None:
    for gpu in GPU.presets().values():
        again = build(GPU, gpu.model_dump(), "gpu")
        assert {gpu: 1}[again] == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory_gib": 0}, "gpu.memory_gib is 0 but must be at least 0.001: try 79.1"),
        ({"memory_gib": float("inf")}, "gpu.memory_gib is inf but must be a finite number: try 79.1"),
        ({"memory_gib": "80"}, "gpu.memory_gib is '80' but must be a number of at least 0.001: try 79.1"),
        ({"peak_tflops": {"bf17": 1}}, "gpu.peak_tflops.bf17 is 'bf17' but must be"),
        ({"peak_tflops": {}}, "gpu.peak_tflops is a mapping but must be at least 1 long: try {bf16: 989.4}"),
        ({"surface": "h100"}, "gpu.surface is 'h100' but must be"),
        ({"memory": 80}, "gpu.memory is not a field of gpu: did you mean 'memory_gib'"),
        ({"price_per_gpu_hour_usd": -1}, "gpu.price_per_gpu_hour_usd is -1 but must be at least 0: try 2.5"),
    ],
)
def test_each_mistake_has_an_error(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        build(GPU, {**GPU.load("h100").model_dump(), **change}, "gpu")
    assert str(caught.value).startswith(sentence)
