"""`bench collectives`: bandwidths and fits by hand, all ten of them over gloo, and constants that reproduce the measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import Run
from ultrascale.cost.hardware import ClusterRates
from ultrascale.cost.network import collective_time_s
from ultrascale.launch import machine
from ultrascale.measure import bench_collectives as collectives
from ultrascale.measure import bench_collectives as collectives_timed
from ultrascale.measure.bench_collectives import CollectivesReport, CollectiveTiming, SkippedCollective
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model


def test_bandwidths_are_those_of_nccl_tests() -> None:
    """1 GB in 0.5 s between 4 ranks is 2 GB/s to the algorithm; on the wire the factors of nccl-tests' PERFORMANCE.md."""
    factors = {
        "broadcast": 1, "reduce": 1, "all_reduce": 2 * 3 / 4, "gather": 3 / 4, "all_gather": 3 / 4, "scatter": 3 / 4,
        "reduce_scatter": 3 / 4, "all_to_all": 3 / 4, "send_recv": 1, "barrier": 0,
    }  # fmt: skip
    assert list(factors) == list(collectives.OPS)
    for op, factor in factors.items():
        point = CollectiveTiming(op, 4, 10**9, 0.5, 0.4, 0.6)
        assert point.algorithm_gb_s == pytest.approx(2.0)
        assert point.bus_gb_s == pytest.approx(2.0 * factor), op


def points(alpha: float, beta_gb_s: float) -> list[CollectiveTiming]:
    """Broadcasts between two: every byte goes over the wire once."""
    times = {size: alpha + size / (beta_gb_s * 1e9) for size in (1000, 10**6, 10**9)}
    return [CollectiveTiming("broadcast", 2, size, time, time, time) for size, time in times.items()]


def test_latency_and_bandwidth_are_recovered() -> None:
    fit = collectives.fit(points(20e-6, 50.0))
    assert fit.alpha_s == pytest.approx(20e-6)
    assert fit.beta_gb_s == pytest.approx(50.0)
    assert fit.error == pytest.approx(0, abs=1e-9)


def test_a_negative_latency_is_clamped_to_zero() -> None:
    fit = collectives.fit(points(-1e-9, 1.0))
    assert fit.alpha_s == 0
    assert fit.beta_gb_s == pytest.approx(1.0, rel=0.01)


def test_a_barrier_has_only_a_latency() -> None:
    times = (3e-6, 1e-6, 2e-6)
    fit = collectives.fit([CollectiveTiming("barrier", 2, 0, time, time, time) for time in times])
    assert (fit.alpha_s, fit.beta_gb_s) == (2e-6, None)


def test_sizes_and_groups() -> None:
    assert collectives.sizes("1k..64k") == [1024, 4096, 16384, 65536]
    assert collectives.sizes("1M,4k,4k") == [4096, 2**20]
    assert collectives.groups(None, 6) == [2, 4, 6]
    assert collectives.groups("4,2", 4) == [2, 4]
    for word, message in (("64k..1k", "from large to small"), ("some", "1k..64M"), ("1k..64G", "at most 16G")):
        with pytest.raises(SpecError, match=message):
            collectives.sizes(word)
    with pytest.raises(SpecError, match="from 2 to 4"):
        collectives.groups("8", 4)


def test_all_ten_between_two_processes() -> None:
    report = collectives_timed.measure(list(collectives.OPS), [1000, 4096], [2], 2, False, lambda text: None)
    assert report.missing == ()
    assert report.where == "2 processes over gloo"
    sizes = {op: [point.bytes for point in report.points if point.op == op] for op in collectives.OPS}
    assert sizes == {op: [0] if op == "barrier" else [1000, 4096] for op in collectives.OPS}
    assert all(0 < point.low_s <= point.median_s <= point.high_s for point in report.points)
    assert [fit.op for fit in report.fits] == list(collectives.OPS)


def test_parts_are_whole_numbers_of_elements() -> None:
    """1000 bytes between three: 84 elements each, 1008 bytes."""
    report = collectives_timed.measure(["all_gather"], [1000], [3], 3, False, lambda text: None)
    assert [point.bytes for point in report.points] == [1008]


def test_a_failing_collective_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from ultrascale.launch import local

    def run(function: object, nproc: int, op: str, *_: object, **__: object) -> list[list[CollectiveTiming]]:
        if op == "reduce":
            raise RunError("rank 1 failed:\nTraceback\nRuntimeError: not supported")
        return [[CollectiveTiming(op, nproc, 8, 1.0, 1.0, 1.0)]]

    monkeypatch.setattr(local, "run", run)
    report = collectives_timed.measure(["broadcast", "reduce", "barrier"], [8], [2], 2, False, lambda text: None)
    assert [point.op for point in report.points] == ["broadcast", "barrier"]
    assert report.missing == (SkippedCollective("reduce", 2, "RuntimeError: not supported"),)


def test_link_constants_reproduce_the_measurement() -> None:
    cluster = Cluster.load("8xh100")
    wanted = {"link_bandwidth": 0.6, "link_latency_s": 5e-6}
    known = cluster.model_copy(update={"efficiency": cluster.efficiency.model_copy(update=wanted)})
    link = ClusterRates(Job(model=Model.load("tiny"), cluster=known, seq=128, batch_tokens=1024)).intra("all_reduce")

    def timing(size: int) -> CollectiveTiming:
        time = float(collective_time_s("all_reduce", size, 8, per_node=8, intra=link, inter=link))
        return CollectiveTiming("all_reduce", 8, size, time, time, time)

    found = collectives.fit_link(cluster, [timing(1024), timing(2**20), timing(2**28)]).efficiency
    assert found.link_bandwidth == pytest.approx(0.6, rel=1e-3)
    assert found.link_latency_s == pytest.approx(5e-6, rel=1e-2)
    assert collectives.fit_link(cluster, []) == cluster


def test_the_command(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", list)
    file = tmp_path / "out.json"
    code, out, err = run("bench", "collectives", "--only", "all_reduce,barrier", "--sizes", "1k,4k", "--json", file)
    assert code == 0, err
    assert "bus GB/s" in out
    assert "alpha" in out
    written = json.loads(file.read_text())
    assert [(one["op"], one["bytes"]) for one in written["points"]] == [
        ("all_reduce", 1024),
        ("all_reduce", 4096),
        ("barrier", 0),
    ]
    assert written["points"][0]["bus_gb_s"] == pytest.approx(written["points"][0]["algorithm_gb_s"])  # 2·(2−1)/2 is one


def test_one_gpu_has_nothing_to_measure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA H200"])
    code, _, err = run("bench", "collectives")
    assert code == 2
    assert "there is nothing to measure" in err


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ultrascale", "bench", "collectives"]
    options = ["--only", "all_reduce,send_recv", "--sizes", "1k", "--json", str(file)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, *words, *options], capture_output=True, text=True, timeout=120, env=alone)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("latency and bandwidth") == 1  # one rank speaks
    assert [point["op"] for point in json.loads(file.read_text())["points"]] == ["all_reduce", "send_recv"]


def test_a_report_fits_each_group_separately() -> None:
    mixed = [CollectiveTiming("reduce", ranks, size, 1e-6 * ranks, 1.0, 1.0) for ranks in (2, 4) for size in (8, 16)]
    fits = CollectivesReport("x", tuple(mixed)).fits
    assert [(fit.ranks, fit.alpha_s) for fit in fits] == [(2, pytest.approx(2e-6)), (4, pytest.approx(4e-6))]
