"""`bench hardware`: this machine measured, written down, and planned with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Run
from ultrascale.launch import launcher, local, machine
from ultrascale.measure import bench_hardware as hardware
from ultrascale.measure.bench_hardware import GemmShape, HardwareTimes
from ultrascale.specs.cluster import Cluster


def test_a_cpu_is_measured_and_planned_with(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    code, out, error = run("bench", "hardware", "--nproc", 2, "-o", file, "--json", tmp_path / "found.json")
    assert code == 0, error
    assert "TFLOP/s" in out
    assert "GB/s" in out
    found = Cluster.load(file)
    assert found.gpus == 2
    assert found.gpu.peak_tflops["fp32"] > 0
    written = json.loads((tmp_path / "found.json").read_text())["cluster"]
    assert written["gpu"]["peak_tflops"]["fp32"] == pytest.approx(found.gpu.peak_tflops["fp32"], rel=1e-5)
    code, out, error = run("plan", "tiny", "--cluster", file, "--seq", 64, "--batch-tokens", "1k", "--precision", "fp32")
    assert code == 0, error


def test_measured_constants_are_written_to_the_gpu_kind(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = HardwareTimes(((GemmShape(16384, 8192, 2048), 8e-4),), 1.1e-3, 3.2e-3, 5e-4, 4e-6)
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setattr(launcher, "has_gpu", lambda: True)
    monkeypatch.setattr(local, "run", lambda *_, **__: [times])
    file = tmp_path / "cluster.yaml"
    code, out, error = run("bench", "hardware", "-o", file)
    assert code == 0, error
    assert "long runs" in out
    found = Cluster.load(file)
    assert found.gpu == Cluster.load("1xh200").gpu
    assert found.efficiency == hardware.efficiency(Cluster.load("1xh200"), times)  # four digits: nothing is rounded off


def test_more_processes_than_gpus_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])
    code, _, error = run("bench", "hardware", "--nproc", 2)
    assert code == 2
    assert "nproc is 2 but this machine shows 1 GPUs" in error
