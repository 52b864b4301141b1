"""Traces with known answers: compute, communication by technique, and idle time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trace_builders import BACKWARD, Device, op, span, step, write

from ultrascale.measure import trace_rank as trace
from ultrascale.measure import trace_times
from ultrascale.measure.trace_rank import kind_of, message_bytes, technique_of_group, technique_of_range
from ultrascale.measure.trace_times import RankTime


def analysed(path: Path, events: list[dict[str, Any]], **facts: Any) -> RankTime:
    return trace_times.analyse(trace.read(write(path / "trace.json", events, **facts)))


def parts(one: RankTime, number: int = 0) -> tuple[float, ...]:
    """Of a step, in microseconds: all, computing, exchanging, both, neither."""
    found = one.steps[number]
    times = found.step_s, found.computing_s, found.exchanging_s, found.both_s, found.neither_s
    return tuple(round(time_s * 1e6, 6) for time_s in times)


def exposed(one: RankTime) -> dict[str, float]:
    return {each.technique: round(each.exposed_s * 1e6, 6) for each in one.techniques}


def test_two_streams_of_a_gpu(tmp_path: Path) -> None:
    """Computing 100–160 and 200–260; an all-reduce 150–220: 10 µs hidden by the first, 40 exposed, 20 hidden by the second."""
    gpu = Device()
    gpu.kernel(100, 130, launched=10)
    gpu.kernel(120, 160, launched=12)  # overlaps the first: counted once
    gpu.collective(150, 220, launched=14)
    gpu.kernel(200, 260, launched=16)
    analysis = analysed(tmp_path, [step(4, 0, 300), *gpu.events])
    assert analysis.device == "gpu"
    assert parts(analysis) == (160, 90, 40, 30, 0)


def test_a_step_of_a_gpu_lasts_from_its_first_kernel_to_the_next_steps(tmp_path: Path) -> None:
    """The host has launched step 5 while the device still computes step 4."""
    gpu = Device()
    gpu.kernel(100, 190, launched=10)
    gpu.kernel(200, 240, launched=60)
    gpu.kernel(250, 280, launched=70)
    analysis = analysed(tmp_path, [step(4, 0, 50), step(5, 50, 90), *gpu.events])
    assert parts(analysis, 0) == (100, 90, 0, 0, 10)
    assert parts(analysis, 1) == (80, 70, 0, 0, 10)
    assert sum(one.step_s for one in analysis.steps) * 1e6 == pytest.approx(280 - 100)


def test_without_steps_the_whole_trace_is_one(tmp_path: Path) -> None:
    gpu = Device()
    gpu.kernel(100, 150, launched=90)
    gpu.kernel(250, 300, launched=240)
    analysis = analysed(tmp_path, gpu.events)
    assert [one.name for one in analysis.steps] == ["the whole trace"]
    assert parts(analysis) == (200, 100, 0, 0, 100)


def test_our_ranges_attribute_collectives_in_the_backward_thread(tmp_path: Path) -> None:
    gpu = Device()
    gpu.kernel(100, 400, launched=10)
    gpu.collective(400, 440, launched=21, kind="AllReduce")
    gpu.collective(440, 500, launched=31, kind="AllReduce", tid=BACKWARD)
    gpu.collective(500, 510, launched=41, kind="SendRecv")
    events = [
        step(4, 0, 600),
        span("tensor all_reduce", 20, 25),
        span("data all_reduce", 30, 35, BACKWARD),
        span("zero all_gather", 30, 35),  # of another thread at the same time
        *gpu.events,
    ]
    assert exposed(analysed(tmp_path, events)) == {"tensor": 40, "data": 60, "pipeline": 10}


def test_overlapping_collectives_are_counted_once(tmp_path: Path) -> None:
    gpu = Device()
    gpu.kernel(100, 110, launched=10)
    gpu.collective(110, 160, launched=21)
    gpu.collective(140, 200, launched=31)
    events = [step(4, 0, 300), span("data all_reduce", 20, 25), span("tensor all_reduce", 30, 35), *gpu.events]
    analysis = analysed(tmp_path, events)
    assert parts(analysis) == (100, 10, 90, 0, 0)
    assert exposed(analysis) == {"tensor": 60, "data": 30}
    assert {one.technique: round(one.time_s * 1e6) for one in analysis.techniques} == {"tensor": 60, "data": 50}


def test_collectives_of_other_engines_are_attributed_by_process_group(tmp_path: Path) -> None:
    """As torchtitan and Megatron name them; the group may be named by number, and the range be torch's own."""
    gpu = Device()
    gpu.kernel(0, 100, launched=-50)
    collectives = [
        ("AllGather", {"Process Group Description": "mesh_dp_shard", "Collective name": "_allgather_base"}),
        ("ReduceScatter", {"Process Group Description": "mesh_tp", "Collective name": "_reduce_scatter_base"}),
        ("AllReduce", {"Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP"}),
        ("AllReduce", {"Process Group Name": "5", "Process Group Description": "undefined"}),
        ("SendRecv", {"Process Group Description": "undefined", "Collective name": "all_to_allv"}),
        ("AllReduce", {"Process Group Description": "default_pg"}),
    ]
    for place, (kind, facts) in enumerate(collectives):
        gpu.collective(100 + 10 * place, 110 + 10 * place, launched=place, kind=kind, **facts)
    groups = {"distributedInfo": {"rank": 3, "pg_config": [{"pg_name": "5", "pg_desc": "DATA_PARALLEL_GROUP_WITH_CP"}]}}
    analysis = analysed(tmp_path, gpu.events, **groups)
    assert analysis.rank == 3
    assert exposed(analysis) == {"tensor": 20, "expert": 10, "zero": 10, "data": 10, "unknown": 10}
    kinds = {one.technique: one.kinds for one in analysis.techniques}
    assert kinds["tensor"] == {"reduce_scatter": 1, "all_reduce": 1}
    assert kinds["expert"] == {"all_to_all": 1}


def test_a_collective_is_attributed_by_its_launching_call(tmp_path: Path) -> None:
    """Kineto has no metadata for some kernels: the host's record_param_comms around the launch has."""
    gpu = Device()
    gpu.kernel(0, 100, launched=-50)
    gpu.collective(100, 110, launched=12)
    call = {**op("record_param_comms", 10, 20), "args": {"Process Group Description": "mesh_pp", "Collective name": "send"}}
    assert exposed(analysed(tmp_path, [call, *gpu.events])) == {"pipeline": 10}


def test_torchs_ddp_is_recognized_by_its_forward(tmp_path: Path) -> None:
    gpu = Device()
    gpu.kernel(0, 100, launched=-50)
    gpu.collective(100, 110, launched=12)
    assert exposed(analysed(tmp_path, gpu.events)) == {"unknown": 10}
    analysis = analysed(tmp_path, [span("DistributedDataParallel.forward", -60, -10), *gpu.events])
    assert exposed(analysis) == {"data": 10}
    assert analysis.reductions is not None


def test_gloo_waits_are_measured_in_named_ranges(tmp_path: Path) -> None:
    """Operators 0–40 and 60–90. gloo reduces 30–70 and gathers 90–100: the host waits for the first from 45 to 60."""
    events = [
        step(4, 0, 120),
        op("autograd::engine::evaluate_function: MmBackward0", 0, 95),  # holds others
        op("aten::mm", 0, 40),
        op("aten::add", 10, 20),
        op("aten::mm", 60, 90),
        span("data all_reduce", 28, 30),
        op("c10d::allreduce_", 28, 30),
        span("gloo:all_reduce", 30, 70, tid=9),
        span("data wait", 45, 60),
        span("FSDP::all_gather (blocks.0)", 90, 100),
        op("c10d::_allgather_base_", 90, 91),
        span("gloo:all_gather", 91, 100, tid=9),
    ]
    analysis = analysed(tmp_path, events)
    assert analysis.device == "cpu"
    # Computing: 0–40, 60–90 and, while gloo worked and the host did not wait, 40–45. Communication: 28–70 and 90–100.
    assert parts(analysis) == (120, 75 - 27, 15 + 10, 27, 20)
    assert exposed(analysis) == {"zero": 10, "data": 15}
    assert {one.technique: one.kinds for one in analysis.techniques} == {"zero": {"all_gather": 1}, "data": {"all_reduce": 1}}


def test_a_scatter_that_gloo_runs_as_a_reduction_keeps_its_owner(tmp_path: Path) -> None:
    events = [
        step(4, 0, 100),
        op("aten::mm", 0, 10),
        span("FSDP::post_backward_reduce", 10, 40),
        op("c10d::_reduce_scatter_base_", 10, 11),
        span("gloo:all_reduce", 11, 40, tid=9),
        op("c10d::allreduce_", 40, 41),
        span("gloo:all_reduce", 41, 50, tid=9),
    ]
    assert exposed(analysed(tmp_path, events)) == {"zero": 30, "unknown": 10}


def test_optimizer_time_is_separate(tmp_path: Path) -> None:
    """Of kernels by when they were launched, of operators by where they are."""
    gpu = Device()
    gpu.kernel(100, 160, launched=10)
    gpu.kernel(160, 190, launched=55)
    analysis = analysed(tmp_path, [step(4, 0, 90), span("optimizer", 50, 80), *gpu.events])
    assert analysis.steps[0].optimizer_s * 1e6 == pytest.approx(30)
    host = [step(4, 0, 90), op("aten::mm", 0, 50), op("Optimizer.step#AdamW.step", 50, 80), op("aten::add", 60, 70)]
    assert analysed(tmp_path, host).steps[0].optimizer_s * 1e6 == pytest.approx(10)


def test_kernels_that_are_launched_too_late(tmp_path: Path) -> None:
    """Three short kernels each wait for the host; a fourth waits for another stream, a fifth comes after a synchronisation."""
    gpu = Device()
    gpu.kernel(100, 200, launched=10)
    for place in range(3):
        start = 220 + 20 * place
        gpu.kernel(start, start + 5, launched=start - 8)
    gpu.kernel(300, 400, launched=30)  # launched long before: the device waited for something else
    wait = {**span("cudaStreamSynchronize", 350, 402), "cat": "cuda_runtime"}
    gpu.kernel(450, 500, launched=440)
    forward = span("forward stage 0 micro-batch 2", 205, 300)
    launches = analysed(tmp_path, [step(4, 0, 500), wait, forward, *gpu.events]).launches
    assert launches is not None
    assert launches.late_s * 1e6 == pytest.approx(20 + 15 + 15)
    assert (launches.gaps, launches.stretches) == (3, 1)
    assert launches.longest_s * 1e6 == pytest.approx(260 - 200)
    assert launches.kernel_s * 1e6 == pytest.approx(5)
    assert launches.every_s * 1e6 == pytest.approx(20)
    assert launches.after_waits_s * 1e6 == pytest.approx(50)
    assert {name: round(time_s * 1e6) for name, time_s in launches.where.items()} == {"forward": 50}


def test_copies_between_host_and_device(tmp_path: Path) -> None:
    gpu = Device()
    gpu.copy(100, 110, 10, "HtoD (Pageable -> Device)", 4096)
    gpu.copy(110, 120, 11, "HtoD (Pinned -> Device)", 100)
    gpu.copy(120, 125, 12, "DtoH (Device -> Pinned)", 8)
    gpu.copy(125, 130, 13, "DtoD (Device -> Device)", 10**6)
    waits = [{**span("cudaStreamSynchronize", start, start + 5), "cat": "cuda_runtime"} for start in (105, 115, 200)]
    copies = analysed(tmp_path, [step(4, 0, 150), *gpu.events, *waits]).copies
    assert copies is not None
    assert (copies.to_device, copies.to_device_bytes, copies.to_host, copies.to_host_bytes) == (2, 4196, 1, 8)
    assert (copies.pageable, copies.pageable_bytes) == (1, 4096)
    assert (copies.waits, round(copies.wait_s * 1e6)) == (2, 10)


def test_actions_of_a_pipeline_without_their_waits(tmp_path: Path) -> None:
    events = [
        step(4, 0, 200),
        span("forward stage 1 micro-batch 0", 10, 60),
        span("pipeline wait", 10, 30),
        op("aten::mm", 30, 60),
        span("backward stage 1 micro-batch 0", 60, 120),
        op("aten::mm", 60, 120),
    ]
    (found,) = analysed(tmp_path, events, baseTimeNanoseconds=5_000).actions
    assert [(one.name, one.stage, one.microbatch, one.busy) for one in found] == [("forward", 1, 0, 30), ("backward", 1, 0, 60)]
    assert found[0].start == 10 + 5, "on the machine's own clock"


def test_actions_of_a_gpu_are_when_their_kernels_run(tmp_path: Path) -> None:
    gpu = Device()
    gpu.collective(90, 100, launched=11, kind="SendRecv")
    gpu.kernel(100, 130, launched=12)
    gpu.kernel(140, 150, launched=14, tid=BACKWARD)
    gpu.kernel(150, 200, launched=30)
    events = [step(4, 0, 90), span("forward stage 0 micro-batch 0", 10, 20), span("pipeline recv", 10.5, 11.5), *gpu.events]
    ((action,),) = analysed(tmp_path, events).actions
    assert (action.start, action.end, action.busy) == (100, 150, 40)


@pytest.mark.parametrize(
    ("name", "technique"),
    [
        ("mesh_tp", "tensor"),
        ("mesh_dp_shard", "zero"),
        ("mesh_dp_shard_cp", "zero"),
        ("mesh_dp_replicate", "data"),
        ("dp_group", "data"),
        ("mesh_cp", "context"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "data"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("tp0", "tensor"),
        ("default_pg", None),
        ("undefined", None),
    ],
)
def test_names_of_process_groups(name: str, technique: str | None) -> None:
    assert technique_of_group(name) == technique


def test_names_of_collectives_and_ranges() -> None:
    kinds = ("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", "c10d::_reduce_scatter_base_", "gloo:send", "all_to_allv", "gemm")
    assert [kind_of(name) for name in kinds] == ["all_gather", "reduce_scatter", "send_recv", "all_to_all", "other"]
    assert technique_of_range("FSDP::post_backward_reduce (layers.3)") == "zero"
    assert technique_of_range("tensor wait") == "tensor"
    assert technique_of_range("forward stage 0 micro-batch 1") is None
    assert message_bytes({"In msg nelems": 10, "Out msg nelems": 40, "dtype": "BFloat16"}) == 80
