"""Injected faults in a run of several ranks: each ends all ranks in seconds and names rank, place and step."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallel.harness import engine_of, job_of, training_of
from ultrascale.launch import local
from ultrascale.launch.heartbeat import SharedMemoryHeartbeat
from ultrascale.launch.local import RankError
from ultrascale.launch.rank_info import RankInfo
from ultrascale.launch.rendezvous import init
from ultrascale.launch.watchdog import Watchdog, lost_a_peer
from ultrascale.parallel import comm
from ultrascale.parallel.mesh import Mesh, RankCoordinates
from ultrascale.specs.errors import RunError
from ultrascale.specs.layout import Layout

torch.set_num_threads(1)
LAYOUT = Layout(dp=2, tp=2)
WORLD, STEPS, AT, VICTIM = LAYOUT.gpus, 6, 3, 2


def describe(rank: int) -> str:
    place = RankCoordinates.of(LAYOUT, rank)
    return f"dp {place.dp}, tp {place.tp}"


def rank_of_a_run(rank: int, nproc: int, store: str, heartbeat: SharedMemoryHeartbeat, fault: Callable[[], None]) -> float:
    """A loop with a collective over each axis, under the watchdog; the fault is injected into one rank in the middle."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc, timeout=timedelta(seconds=20))
    mesh = Mesh.build(LAYOUT, kv_heads=2, rank=rank)
    total = 0.0
    with Watchdog(heartbeat, rank, nproc, 3.0, describe, local.report) as watchdog:
        try:
            for step in range(1, STEPS + 1):
                watchdog.at(step, "forward and backward")
                comm.all_reduce(torch.ones(8), mesh.tp)
                if rank == VICTIM and step == AT:
                    fault()
                comm.all_reduce(torch.ones(8), mesh.data)
                watchdog.at(step, "optimizer")
                total += float(comm.all_reduce(torch.ones(1), mesh.world))
        except RuntimeError as error:
            raise (RunError(watchdog.explain(error)) if lost_a_peer(error) else error) from error
    return total


def run(fault: Callable[[], None]) -> tuple[str, float]:
    """What the user reads, and after how long."""
    heartbeat, start = SharedMemoryHeartbeat(WORLD), time.monotonic()
    with pytest.raises(RunError) as caught:
        local.run(rank_of_a_run, WORLD, heartbeat, fault, timeout_s=60, heartbeat=heartbeat, describe=describe)
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    assert not children.exists() or children.read_text().split() == []
    return str(caught.value), time.monotonic() - start


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def divide() -> None:
    raise ZeroDivisionError("division by zero, of all things")


def test_without_a_fault_it_succeeds() -> None:
    heartbeat = SharedMemoryHeartbeat(WORLD)
    assert local.run(healthy, WORLD, heartbeat, timeout_s=60) == [float(STEPS * WORLD)] * WORLD


def healthy(rank: int, nproc: int, store: str, heartbeat: SharedMemoryHeartbeat) -> float:
    return rank_of_a_run(rank, nproc, store, heartbeat, lambda: None)


def test_a_killed_rank_ends_all_and_is_named_with_coordinates_step_and_phase() -> None:
    text, seconds = run(kill)
    assert text.startswith("rank 2 (dp 1, tp 0) failed:\nthe process ended without a word (signal SIGKILL: ")
    assert f"it was at step {AT}, forward and backward" in text
    assert seconds < 45


def test_a_rank_that_raises_ends_all_with_its_traceback() -> None:
    text, seconds = run(divide)
    assert text.startswith("rank 2 (dp 1, tp 0) failed:\nTraceback")
    assert "ZeroDivisionError: division by zero, of all things" in text
    assert seconds < 45


def test_a_stopped_rank_is_named_by_waiting_ranks() -> None:
    text, seconds = run(stop)
    assert "rank 2 (dp 1, tp 0) is silent: stopped, dead or out of reach; it last said " in text
    assert f"step {AT}, forward and backward" in text
    assert "waiting in all_reduce over " in text
    assert "The process of rank 2 is stopped" in text
    assert seconds < 45


@pytest.mark.parametrize(
    ("layout", "collective"),
    [
        (Layout(dp=2, zero=3, gas=2), "all_gather of FSDP2, over dp"),
        (Layout(pp=2, gas=4), "recv over pp"),
        (Layout(tp=2, gas=2), "over tp"),
    ],
    ids=str,
)
def test_the_engines_collectives_are_named(layout: Layout, collective: str) -> None:
    heartbeat = SharedMemoryHeartbeat(2)
    with pytest.raises(RunError) as caught:
        local.run(engine_rank, 2, heartbeat, layout, timeout_s=60)
    assert "rank 0 has not moved for" in str(caught.value)
    assert collective in str(caught.value).splitlines()[0]
    assert "rank 1 is silent" in str(caught.value)


def engine_rank(rank: int, nproc: int, store: str, heartbeat: SharedMemoryHeartbeat, layout: Layout) -> None:
    torch.set_num_threads(1)  # other tests of this process may have used more, and a fork of those hangs
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    engine = engine_of(job_of("llama"), layout, training_of(), rank)
    engine.step(0)  # the first may take seconds on a busy machine, and is not what is watched
    with Watchdog(heartbeat, rank, nproc, 3.0, lambda rank: "", local.report) as watchdog:
        for step in range(2, 5):
            watchdog.at(step, "forward and backward")
            if rank == 1 and step == 3:
                stop()
            engine.step(step - 1)


def alone(rank: int, nproc: int, store: str) -> None:
    """One of three ranks never comes."""
    if rank == 2:
        time.sleep(60)
    init(RankInfo(rank, nproc, rank, nproc, store), torch.device("cpu"), timeout_s=1)


def test_a_peer_that_never_joins_is_a_clear_error() -> None:
    with pytest.raises(RunError, match=r"^rank [01] did not meet the other ranks of 3 at file:///") as caught:
        local.run(alone, 3, timeout_s=40)
    assert not isinstance(caught.value, RankError)
