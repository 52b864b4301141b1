"""This machine as a cluster: GPUs by name, visible ones only; a CPU by its rates, which the laws then give back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from builders import make_job
from ultrascale.cost.estimate import estimate
from ultrascale.launch import cpu_rates, machine
from ultrascale.launch.cpu_rates import CPURates, LinkRate, seconds_each
from ultrascale.launch.machine import cpu_cluster, detect, kind_of_gpu, memory_bytes
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.gpu import GPU
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

RATES = CPURates(
    matmul_flops=50e9,
    stream_bytes_s=5e9,
    operator_s=4e-6,
    attention_forward_flops=20e9,
    attention_backward_flops=15e9,
    softmax_scores_s=0.25e9,
)
LINK = LinkRate(bytes_s=0.5e9, latency_s=2e-4)


def gpus(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    """An nvidia-smi that prints these names."""
    script = folder / "nvidia-smi"
    script.write_text("#!/bin/sh\n" + "".join(f"echo '{name}'\n" for name in names))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", "h100-94"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("A100-SXM4-40GB", "a100-40"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("Tesla T4", "t4"),
        ("NVIDIA RTX A6000", "a6000"),
    ],
)
def test_names_of_known_parts(name: str, kind: str) -> None:
    assert kind_of_gpu(name) == kind
    assert kind in GPU.presets()


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA L40", "NVIDIA GeForce RTX 4090 D"])
def test_a_part_with_other_numbers_has_no_assumed_peak(name: str) -> None:
    with pytest.raises(SpecError, match=f"this machine's GPU is '{name}', of which no peak is known: give --cluster"):
        kind_of_gpu(name)


def test_every_kind_is_a_preset() -> None:
    assert set(machine.KINDS.values()) <= set(GPU.presets())


def test_gpus_are_detected_and_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, tmp_path, *["NVIDIA H200"] * 8)
    assert detect(4) == Cluster.of(GPU.load("h200"), nodes=1, gpus_per_node=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert detect(2).gpus == 2
    with pytest.raises(SpecError, match="nproc is 3 but this machine shows 2 GPUs: try 2"):
        detect(3)


def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, tmp_path, "NVIDIA H200", "NVIDIA H200", "NVIDIA L40")
    assert detect(2).gpu.name == "h200"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    with pytest.raises(SpecError, match="NVIDIA L40"):
        detect(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.gpu_names() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,GPU-1f2e3d4c")
    assert machine.gpu_names() == ["NVIDIA H200", "NVIDIA H200"]


def test_kinds_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, tmp_path, "NVIDIA H200", "NVIDIA B200")
    with pytest.raises(SpecError, match="mixes NVIDIA B200 and NVIDIA H200: try CUDA_VISIBLE_DEVICES"):
        detect(2)


def test_a_driver_that_does_not_answer_shows_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, tmp_path)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200'\nexit 9\n")
    assert machine.gpu_names() == []


def test_gpus_are_detected_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, tmp_path, "NVIDIA H200")
    code = "import sys; from ultrascale.launch.machine import detect; detect(1); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def tiny_job(cluster: Cluster, sequences: int) -> Job:
    return make_job("tiny", cluster, 128, sequences, precision="fp32")


def matmuls_s(tokens: int) -> float:
    """Three passes over each matmul of `tiny`, its FLOPs and its three matrices: qkv, output, gate and up, down; head."""
    shapes = [*[(128, 64), (64, 64), (384, 64), (64, 192)] * 8, (256, 64)]
    flops = sum(2 * tokens * n * k for n, k in shapes)
    bytes_ = sum(4 * (tokens * k + k * n + tokens * n) for n, k in shapes)
    return 3 * (flops / RATES.matmul_flops + bytes_ / RATES.stream_bytes_s)


def test_the_cost_model_reproduces_measured_rates() -> None:
    cluster = cpu_cluster(2, RATES, LINK, memory=8 * 2**30)
    assert (cluster.gpus, cluster.gpu.memory_gib, cluster.gpu.name) == (2, 4.0, "cpu")
    alone = estimate(tiny_job(cpu_cluster(1, RATES, LINK, memory=8 * 2**30), 2), Layout(mbs=2))
    both = estimate(tiny_job(cluster, 2), Layout(dp=2, data_parallel="naive"))
    assert alone.time.matmul_s == pytest.approx(matmuls_s(256))
    assert both.time.matmul_s == pytest.approx(matmuls_s(128))
    parameters = alone.memory[0].memory.parameters
    # One all_reduce of all gradients between two ranks: two hops, every byte sent once.
    assert both.time.data_s == pytest.approx(2 * 2e-4 + parameters / 0.5e9)
    assert alone.memory[0].memory.runtime == 0
    assert alone.time.overhead_s == 0


def test_a_transfer_overlaps_only_with_a_free_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert cpu_cluster(2, RATES, LINK, 2**33).efficiency.overlap == 0
    assert cpu_cluster(1, RATES, LINK, 2**33).efficiency.overlap == 0.9


def test_every_number_has_a_source() -> None:
    gpu = cpu_cluster(1, RATES, LINK, 2**33).gpu
    without_source = {
        "name",
        "vendor",
        "architecture",
        "multiprocessors",
        "price_per_gpu_hour_usd",
        "surface",
        "surface_note",
        "sources",
    }
    assert set(gpu.sources) == set(GPU.model_fields) - without_source


def test_this_machine_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpus(monkeypatch, tmp_path)
    cluster = detect(2)
    assert detect(2) is cluster  # measured once
    assert cluster.gpus == 2
    assert 1e-4 < cluster.gpu.peak_tflops["fp32"] < 50
    assert 0.01 < cluster.gpu.memory_bandwidth_gb_s < 2000
    assert 1e-8 < cluster.efficiency.kernel_launch_s < 1e-2
    predicted = estimate(tiny_job(cluster, 4), Layout(dp=2, mbs=1, gas=2))
    assert predicted.step_time_s > 0
    assert predicted.fits


@pytest.mark.slow
def test_a_parent_that_has_computed_with_threads_measures_too() -> None:
    """Forked from it, a process that starts threads where the parent had some would wait for them for ever."""
    code = """
import torch
from ultrascale.launch import machine, cpu_rates

torch.set_num_threads(2)
x = torch.randn(512, 512, requires_grad=True)
(x @ x).mul(x).sum().backward()
machine.gpu_names = lambda: []
machine.cores, cpu_rates._TURNS, cpu_rates._EACH_S = (lambda: 2), 1, 1e-3
print(machine.detect(1).gpu.name, machine.detect(2).gpus)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "cpu 2\n"


def test_a_control_group_may_allow_less_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(machine, "_LIMITS", (str(limit), str(tmp_path / "absent")))
    for text, expected in (("max\n", whole), ("1048576\n", 2**20), (f"{2**62}\n", whole)):
        limit.write_text(text)
        assert memory_bytes() == expected


def test_the_mean_time_of_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(cpu_rates, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def action() -> None:
        clock[0] += 0.002

    assert seconds_each(action, 0.0195) == pytest.approx(0.002)
    assert 0.0195 <= clock[0] - 100 < 2 * 0.0195
