"""Findings of a profile, from traces with chosen numbers; and the comparison with a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trace_builders import Device, op, span, step, write

from ultrascale.cost.estimate import estimate
from ultrascale.measure import trace_analysis
from ultrascale.measure.trace_analysis import Analysis, analyse, read
from ultrascale.measure.trace_times import bubble
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.plan import Plan

LAYOUT = Layout(dp=2, mbs=1, gas=2)


def facts(layout: Layout = LAYOUT, pp: int = 0, **more: Any) -> dict[str, Any]:
    place = {"pp": pp, "dp": 0, "cp": 0, "tp": 0}
    metadata = {"model": "tiny", "layers": 8, "layout": layout.model_dump(mode="json"), "place": place, **more}
    return {"ultrascale": metadata}


def found(path: Path, events: list[dict[str, Any]], plan: Plan | None = None, **metadata: Any) -> Analysis:
    write(path / "rank0.json", events, **metadata)
    return analyse(read([path / "rank0.json"]), plan)


def sentence(analysis: Analysis, beginning: str) -> str:
    (one,) = [text for text in analysis.findings if text.startswith(beginning)]
    return one


def reduction(buckets: int, each: float, hidden: float) -> list[dict[str, Any]]:
    """A step of a GPU: backward 0–1000, and buckets that are reduced one after the other, `hidden` µs of them overlapped."""
    gpu = Device()
    gpu.kernel(0, 1000, launched=-190)
    start = 1000 - hidden
    calls = []
    for place in range(buckets):
        launched = -100 + place
        calls.append(span("data all_reduce", launched - 0.25, launched + 0.25))
        gpu.collective(start + place * each, start + (place + 1) * each, launched=launched)
    return [step(1, -200, 0), span("backward stage 0 micro-batch 1", -195, -50), *calls, *gpu.events]


def test_gradients_that_bunch_at_the_end(tmp_path: Path) -> None:
    """Three buckets of 100 µs, none hidden, in a step of 1.3 ms: with 12, and 25 µs each, all but the last could be."""
    finding = sentence(found(tmp_path, reduction(3, 100, 0), **facts(gradient_bytes=24_000_000)), "Gradient reduction")
    assert finding == (
        "Gradient reduction bunches at the end: 3 buckets in 300.0 µs on the rank that comes last, 300.0 µs exposed: "
        "try 12 (train.bucket_mb=2)"
    )


def test_gradients_of_another_engine(tmp_path: Path) -> None:
    """No word of ours, but DDP's forward: its own setting is named."""
    events = [one for one in reduction(1, 200, 0) if not str(one["name"]).startswith(("data", "backward"))]
    finding = sentence(found(tmp_path, [span("DistributedDataParallel.forward", -195, -150), *events]), "Gradient reduction")
    assert "1 bucket in 200.0 µs on the rank that comes last, 200.0 µs exposed: try 9 (bucket_cap_mb of torch's DDP)" in finding


def test_gradients_that_are_hidden_need_no_advice(tmp_path: Path) -> None:
    assert not [one for one in found(tmp_path, reduction(12, 25, 295), **facts()).findings if "eduction" in one]


def test_gradients_that_cannot_be_hidden(tmp_path: Path) -> None:
    """800 µs of reduction, but only half of a backward of 1 ms is of the last of two micro-batches."""
    finding = sentence(
        found(tmp_path, reduction(8, 100, 0), **facts()), "Gradient reduction takes 800.0 µs (8 buckets), longer"
    )
    assert "(500.0 µs)" in finding
    assert "layout.gas" in finding


def test_gradients_that_wait_for_a_slow_rank(tmp_path: Path) -> None:
    for rank, each in ((0, 300.0), (1, 20.0)):
        write(tmp_path / f"rank{rank}.json", reduction(1, each, 0), rank=rank, **facts())
    finding = sentence(analyse(read([tmp_path])), "Gradient reduction leaves")
    assert "160.0 µs exposed" in finding
    assert "takes 20.0 µs on the rank that comes last" in finding


def test_naive_reduction_gets_advice(tmp_path: Path) -> None:
    findings = found(tmp_path, reduction(3, 100, 0), **facts(LAYOUT.changed(data_parallel="naive"))).findings
    assert any("layout.data_parallel=bucketed" in one for one in findings)


def test_launch_bound_and_waits_and_pageable_memory(tmp_path: Path) -> None:
    gpu = Device()
    gpu.kernel(0, 10, launched=-5)
    for place in range(1, 10):
        gpu.kernel(100 * place, 100 * place + 10, launched=100 * place - 6)
    gpu.copy(1000, 1010, 994, "HtoD (Pageable -> Device)", 3 * 2**20)
    waits = [{**span("cudaStreamSynchronize", start, start + 4), "cat": "cuda_runtime"} for start in (3, 103, 203)]
    findings = found(tmp_path, [step(1, -10, 1020), *gpu.events, *waits]).findings
    late = next(one for one in findings if one.startswith("Launch-bound"))
    assert "10.0 µs on average, launched every 100.0 µs" in late
    assert any(one.startswith("The host waits for the GPU 3 times a step, 12.0 µs in all") for one in findings)
    assert any("1 copies a step between host and GPU use pageable memory, 3.00 MiB" in one for one in findings)


def test_exposed_collectives_are_named_with_advice(tmp_path: Path) -> None:
    gpu = Device()
    gpu.kernel(0, 100, launched=-50)
    gpu.collective(90, 150, launched=-40)
    finding = sentence(found(tmp_path, [span("tensor all_reduce", -41, -39), *gpu.events]), "tensor")
    assert finding.startswith(
        "tensor: 1 collective per step, 50.0 µs (33%) exposed and 10.0 µs overlapped: try a smaller layout.tp"
    )


def pipeline_of(rank: int, spans: list[tuple[str, int, float, float]], wait: tuple[float, float]) -> list[dict[str, Any]]:
    events = [step(1, 0, 1000), span("pipeline wait", *wait)]
    for name, microbatch, start, end in spans:
        begins = min(end, max(start, wait[1]))
        events += [span(f"{name} stage {rank} micro-batch {microbatch}", start, end), op("aten::mm", begins, end)]
    return events


def test_the_measured_bubble_is_compared_with_the_schedules(tmp_path: Path) -> None:
    """Two stages, two micro-batches, 1f1b: forward 100 and backward 200 on each, and a message that takes 50 each way.

    Without messages: 3 × 300 = 900 long, 600 of it busy on each rank, a third is bubble. With them the first stage waits from
    200 to 400 for its first gradient: 1000 long, 40 % bubble.
    """
    layout = Layout(pp=2, mbs=1, gas=2)
    first = [("forward", 0, 0, 100), ("forward", 1, 100, 200), ("backward", 0, 200, 700), ("backward", 1, 700, 1000)]
    second = [("forward", 0, 100, 250), ("backward", 0, 250, 450), ("forward", 1, 450, 550), ("backward", 1, 550, 750)]
    write(tmp_path / "rank0.json", pipeline_of(0, first, (200, 500)), rank=0, **facts(layout, 0))
    write(tmp_path / "rank1.json", pipeline_of(1, second, (100, 150)), rank=1, **facts(layout, 1))
    ranks = read([tmp_path])
    measured = bubble(ranks)
    assert measured is not None
    # Busy: 100 + 100 + 200 + 300 and 100 + 200 + 100 + 200 of 2 × 1000.
    assert measured.measured == pytest.approx(1 - 1300 / 2000)
    assert measured.stage_s == pytest.approx((350e-6, 300e-6))
    assert measured.scheduled == pytest.approx(0.3, abs=0.05)
    finding = sentence(analyse(ranks), "Pipeline bubble: 35% of 1.0 ms; 1f1b with these stage times has")
    assert "stage 0 takes 1.2 times as long as the fastest" in finding
    assert bubble(ranks[:1]) is None, "one rank of two tells no bubble"


def plan_of(model: str = "tiny", layout: Layout = LAYOUT) -> Plan:
    job = Job(model=Model.load(model), cluster=Cluster.load("2xh100"), seq=128, batch_tokens=layout.batch_tokens(128))
    return Plan(job=job, layout=layout, estimate=estimate(job, layout))


def test_a_plan_compared_with_a_trace_adds_up(tmp_path: Path) -> None:
    analysis = found(tmp_path, reduction(3, 100, 50), plan_of(), **facts())
    terms = {term.name: term for term in analysis.terms}
    assert terms["step time"].second == pytest.approx(1250e-6)
    assert terms["gradient reduction"].second == pytest.approx(250e-6)
    for side in ("first", "second"):
        parts = sum(getattr(term, side) or 0 for term in analysis.terms if term.part)
        assert parts == pytest.approx(getattr(terms["step time"], side), rel=1e-6)


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"the plan is of mini \(\d+ layers\) but .*rank0.json is of tiny \(8 layers\)"):
        found(tmp_path, reduction(1, 10, 0), plan_of("mini"), **facts())


def test_a_plan_of_another_layout_or_machine_is_noted(tmp_path: Path) -> None:
    events = [step(1, 0, 100), op("aten::mm", 10, 90)]
    notes = found(tmp_path, events, plan_of(layout=Layout(dp=2, mbs=2, gas=1)), **facts()).notes
    assert any("layout.mbs 2 and 1; layout.gas 1 and 2" in note for note in notes)
    assert any("the trace is of a CPU" in note for note in notes)


def test_ranks_are_sorted_and_imbalance_is_named(tmp_path: Path) -> None:
    for rank, end in ((10, 90), (2, 40)):
        write(tmp_path / f"r{rank}.json", [step(1, 0, 100), op("aten::mm", 10, end)], rank=rank)
    ranks = read([tmp_path])
    assert [one.rank for one in ranks] == [2, 10]
    finding = sentence(analyse(ranks), "Ranks compute unevenly")
    assert "rank 10 80.0 µs a step and rank 2 30.0 µs" in finding


def test_problems_of_a_run_are_listed_first(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", [step(1, 0, 100), op("aten::mm", 10, 90)])
    ranks = [replace(one, broken="it ends") for one in read([tmp_path])]
    notes = trace_analysis.analyse(ranks, problems=["the disk is full"]).notes
    assert notes[0] == "the disk is full"
    assert "was cut off (it ends)" in notes[1]
