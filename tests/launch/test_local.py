"""Ranks on one machine: what they return, and what the caller learns when one fails, dies or never ends."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ultrascale.launch import exit_reason, local, signals
from ultrascale.launch.local import RankError
from ultrascale.launch.signals import StopSignals
from ultrascale.specs.errors import RunError, SpecError

torch.set_num_threads(1)


def test_results_are_ordered_by_rank() -> None:
    assert local.run(slower_first, 3, "x", timeout_s=30) == [(0, 3, "x"), (1, 3, "x"), (2, 3, "x")]


def slower_first(rank: int, nproc: int, store: str, word: str) -> tuple[int, int, str]:
    time.sleep(0.1 * (nproc - rank))
    return rank, nproc, word


def test_the_rendezvous_store_is_removed_after_the_run() -> None:
    results = local.run(summed, 3, timeout_s=30)
    assert [total for total, _ in results] == [3.0, 3.0, 3.0]
    assert not Path(results[0][1].removeprefix("file://")).parent.exists()


def summed(rank: int, nproc: int, store: str) -> tuple[float, str]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item(), store


def test_large_tensors_are_returned() -> None:
    """More bytes than a pipe buffers, read after the rank that sent them has ended."""
    results = local.run(full_tensor, 2, timeout_s=30)
    assert [torch.equal(x, torch.full((1000, 300), rank, dtype=torch.bfloat16)) for rank, x in enumerate(results)] == [True] * 2


def full_tensor(rank: int, nproc: int, store: str) -> torch.Tensor:
    return torch.full((1000, 300), rank, dtype=torch.bfloat16)


def test_a_rank_that_raises_is_named_and_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 failed:\nTraceback[\s\S]*ZeroDivisionError") as caught:
        local.run(raising, 3, timeout_s=30)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 25
    assert not multiprocessing.active_children()


def raising(rank: int, nproc: int, store: str) -> float:
    if rank == 1:
        return 1 / 0
    time.sleep(60)
    return 0.0


def test_a_spec_error_has_no_traceback() -> None:
    with pytest.raises(SpecError) as caught:
        local.run(refusing, 1, timeout_s=30)
    assert str(caught.value) == "layout.cp is 3: try 2"


def refusing(rank: int, nproc: int, store: str) -> None:
    raise SpecError("layout.cp is 3: try 2")


def test_a_rank_that_exits_is_a_failure() -> None:
    with pytest.raises(RankError, match="SystemExit"):
        local.run(exiting, 2, timeout_s=30)


def exiting(rank: int, nproc: int, store: str) -> None:
    if rank == 1:
        sys.exit(3)


def test_an_unpicklable_result_is_a_failure() -> None:
    with pytest.raises(RankError, match=r"rank 0 failed[\s\S]*pickle"):
        local.run(unsendable, 1, timeout_s=30)


def unsendable(rank: int, nproc: int, store: str) -> Any:
    return lambda: rank


def test_a_rank_that_is_killed_is_named_with_the_signal() -> None:
    with pytest.raises(RankError, match=r"rank 2 failed:\n.*signal SIGKILL") as caught:
        local.run(killed, 3, timeout_s=30)
    assert caught.value.rank == 2
    assert not multiprocessing.active_children()


def killed(rank: int, nproc: int, store: str) -> None:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_the_failing_rank_is_named_and_not_its_peers(how: str) -> None:
    """Ranks 0 and 2 fail too, in the collective that rank 1 never joins."""
    with pytest.raises(RankError, match="SIGKILL" if how == "kill" else "the cause") as caught:
        local.run(leaving, 3, how, timeout_s=30)
    assert caught.value.rank == 1


def leaving(rank: int, nproc: int, store: str, how: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    dist.barrier()
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the cause")
    dist.all_reduce(torch.ones(1))


def test_of_simultaneous_failures_the_cause_is_reported() -> None:
    pairs = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    for rank, text in enumerate(("[1.2.3.4]:5: Connection closed by peer", "the cause", "rank 2 lost a peer")):
        pairs[rank][1].send_bytes(pickle.dumps((False, local._Failure(rank, text))))
    ranks = local._Ranks([pair[0] for pair in pairs], [], None, None, lambda rank: "")
    with pytest.raises(RankError, match="rank 1 failed:\nthe cause"):
        local._collect(ranks, timeout_s=10, last_s=None)


def test_a_timeout_ends_the_run() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"no answer within 0\.5 s; still running: rank 1, 2") as caught:
        local.run(two_sleep, 3, timeout_s=0.5)
    assert caught.value.rank == 1
    assert 0.5 <= time.monotonic() - start < 45
    assert not multiprocessing.active_children()


def two_sleep(rank: int, nproc: int, store: str) -> None:
    if rank > 0:
        time.sleep(60)


def test_a_rank_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.2)
    with pytest.raises(RankError, match="no answer"):
        local.run(stubborn, 1, timeout_s=0.5)
    assert not multiprocessing.active_children()


def stubborn(rank: int, nproc: int, store: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


class FakeHeartbeat:
    """A heartbeat that knows what each rank did last."""

    def last(self, rank: int) -> str:
        return f"step {rank + 5}, forward and backward, since 12:00:00"


def test_a_dead_rank_is_reported_with_coordinates_step_and_phase() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        local.run(killed, 3, timeout_s=30, heartbeat=FakeHeartbeat(), describe=lambda rank: f"dp {rank}, tp 0")
    text = str(caught.value)
    assert text.startswith("rank 2 (dp 2, tp 0) failed:\nthe process ended without a word (signal SIGKILL: ")
    assert text.endswith("it was at step 7, forward and backward, since 12:00:00")
    assert time.monotonic() - start < 25
    assert_no_process_is_left()


def assert_no_process_is_left() -> None:
    """No process, no zombie."""
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    assert not mine.exists() or mine.read_text().split() == []
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("kills", "left", "words"),
    [
        ((3, 4), 0.5, "out-of-memory killer struck meanwhile"),
        ((3, 3), 0.02, "may have been the system's out-of-memory killer, with 2% of the memory left"),
        ((3, 3), 0.5, "killed from outside, and memory was not short"),
        ((None, None), None, "killed from outside"),
    ],
)
def test_the_likely_cause_of_a_kill_is_reported(
    monkeypatch: pytest.MonkeyPatch, kills: tuple[int | None, int | None], left: float | None, words: str
) -> None:
    counts = iter(kills)
    monkeypatch.setattr(local, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(exit_reason, "oom_kills", lambda: next(counts))
    monkeypatch.setattr(exit_reason, "memory_left", lambda: left)
    with pytest.raises(RankError) as caught:
        local.run(killed, 3, timeout_s=30)
    assert words in str(caught.value)


def test_process_states_and_exit_reasons() -> None:
    assert exit_reason.state(os.getpid()) in ("R", "S")
    assert exit_reason.state(2**30) == ""
    left = exit_reason.memory_left()
    assert left is None or 0 < left < 1
    assert exit_reason.describe_exit(3, None) == "exit code 3"
    assert exit_reason.describe_exit(-signal.SIGSEGV, None) == "signal SIGSEGV"
    assert exit_reason.describe_exit(None, None) == "still running"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_stop_signal_is_forwarded_to_every_rank_and_awaited(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in signals.STOP_SIGNALS]
    results = local.run(until_stopped, 3, number, timeout_s=30, stoppable=True)
    assert results == [(rank, number.name) for rank in range(3)]
    assert [signal.getsignal(one) for one in signals.STOP_SIGNALS] == before
    assert_no_process_is_left()


def until_stopped(rank: int, nproc: int, store: str, number: signal.Signals) -> tuple[int, str | None]:
    with StopSignals() as stop:
        if rank == nproc - 1:  # all are there by now, and the parent waits
            time.sleep(1)
            os.kill(os.getppid(), number)
        while stop.received is None:
            time.sleep(0.02)
        time.sleep(0.3)  # saving
        return rank, stop.received


def test_a_second_signal_kills_all_ranks() -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match="ended at once, without saving: SIGINT came a second time"):
        local.run(saving_for_ever, 2, timeout_s=30, stoppable=True)
    assert time.monotonic() - start > 3.4
    assert_no_process_is_left()


def saving_for_ever(rank: int, nproc: int, store: str) -> None:
    with StopSignals():
        for delay in (1.0, 0.5, 2.0):  # the second is the same request as the first
            time.sleep(delay)
            if rank == nproc - 1:
                os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)


def test_a_stopped_rank_is_killed_too() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 failed[\s\S]*The process of rank 0 is stopped"):
        local.run(one_stopped, 2, timeout_s=30)
    assert time.monotonic() - start < 25
    assert_no_process_is_left()


def one_stopped(rank: int, nproc: int, store: str) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1)
    raise RuntimeError("the cause")


PARENT = """
import os, sys, time
from pathlib import Path
from ultrascale.launch import local

def rank(rank, nproc, store):
    Path(sys.argv[1], str(os.getpid())).touch()
    time.sleep(60)

local.run(rank, 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for it")
def test_ranks_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    pids = [int(file.name) for file in tmp_path.iterdir()]
    parent.kill()
    parent.wait()
    wait_for(lambda: all(exit_reason.state(pid) in ("", "Z") for pid in pids))


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 45
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)
