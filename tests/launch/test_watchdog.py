"""The watchdog: the rank that blocks the others is named with the collective and its last heartbeat; slow ranks are not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ultrascale.launch import local
from ultrascale.launch.heartbeat import Heartbeat, RankStatus, SharedMemoryHeartbeat, StoreHeartbeat, silent_ranks
from ultrascale.launch.watchdog import Watchdog, lost_a_peer
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis
from ultrascale.specs.errors import RunError

torch.set_num_threads(1)
TIMEOUT_S = 2.0


def place(rank: int) -> str:
    return f"dp {rank}"


def world_axis(rank: int, nproc: int) -> Axis:
    return Axis("dp", dist.group.WORLD, rank, nproc, tuple(range(nproc)))


def join(rank: int, nproc: int, store: str, timeout_s: float = 30.0) -> Axis:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc, timeout=timedelta(seconds=timeout_s))
    return world_axis(rank, nproc)


def train(watchdog: Watchdog, axis: Axis, steps: int, hook: object = None) -> None:
    """A loop of two phases with one reduction a step; `hook(step)` may do what a fault would."""
    for step in range(1, steps + 1):
        watchdog.at(step, "reading data")
        if callable(hook):
            hook(step)
        watchdog.at(step, "forward and backward")
        comm.all_reduce(torch.ones(4), axis)


# A rank that is stopped.


def stopping(rank: int, nproc: int, store: str, heartbeat: SharedMemoryHeartbeat) -> None:
    axis = join(rank, nproc, store)

    def stop(step: int) -> None:
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGSTOP)

    with Watchdog(heartbeat, rank, nproc, TIMEOUT_S, place, local.report) as watchdog:
        train(watchdog, axis, 5, stop)


def test_a_stopped_rank_is_named_with_the_collective_that_the_others_wait_in() -> None:
    heartbeat = SharedMemoryHeartbeat(3)
    start = time.monotonic()
    with pytest.raises(RunError) as caught:
        local.run(stopping, 3, heartbeat, timeout_s=40, heartbeat=heartbeat, describe=place)
    text = str(caught.value)
    assert "(dp 0) has not moved for" in text or "(dp 2) has not moved for" in text
    assert "step 3, forward and backward, since" in text
    assert "waiting in all_reduce over dp" in text
    assert "rank 1 (dp 1) is silent" in text
    assert "it last said step 3, reading data" in text
    assert "rank 2 (dp 2) is silent" not in text
    assert "test_watchdog.py" in text  # the stack
    assert "The process of rank 1 is stopped (SIGSTOP)" in text
    assert time.monotonic() - start < 35
    assert_no_process_is_left()


def assert_no_process_is_left() -> None:
    mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    if mine.exists():
        assert mine.read_text().split() == []


# A rank that is slow, but alive.


def sleeping(rank: int, nproc: int, store: str, heartbeat: SharedMemoryHeartbeat) -> None:
    axis = join(rank, nproc, store)
    with Watchdog(heartbeat, rank, nproc, TIMEOUT_S, place, local.report) as watchdog:
        train(watchdog, axis, 5, lambda step: time.sleep(60) if rank == 2 and step == 2 else None)


def test_a_live_rank_outside_the_collective_is_not_called_dead() -> None:
    heartbeat = SharedMemoryHeartbeat(3)
    with pytest.raises(RunError) as caught:
        local.run(sleeping, 3, heartbeat, timeout_s=40)
    text = str(caught.value)
    assert "silent" not in text
    if "rank 2 (dp 2) has not moved" in text:
        assert "in no collective that can be seen" in text
    else:
        assert "rank 2 (dp 2) is elsewhere: step 2, reading data" in text


# Over torch's store, as under torchrun.


def over_the_store(rank: int, nproc: int, store: str) -> None:
    axis = join(rank, nproc, store)
    heartbeat = StoreHeartbeat(dist.distributed_c10d._get_default_store(), nproc)

    def stop(step: int) -> None:
        if rank == 0 and step == 2:
            time.sleep(0.6)  # one heartbeat interval, so that there is a last heartbeat
            os.kill(os.getpid(), signal.SIGSTOP)

    with Watchdog(heartbeat, rank, nproc, TIMEOUT_S, place, local.report) as watchdog:
        train(watchdog, axis, 5, stop)


def test_ranks_that_share_only_a_store_name_the_one_that_stopped() -> None:
    with pytest.raises(RunError) as caught:
        local.run(over_the_store, 2, timeout_s=40)
    text = str(caught.value)
    assert "rank 1 (dp 1) has not moved for" in text
    assert "waiting in all_reduce over dp" in text
    assert "rank 0 (dp 0) is silent" in text
    assert "it last said step 2, reading data" in text
    assert_no_process_is_left()


# A peer that cannot be reached: gloo gives up first, and the rank explains what it got.


def unreachable(rank: int, nproc: int, store: str, heartbeat: SharedMemoryHeartbeat) -> None:
    axis = join(rank, nproc, store, timeout_s=3)

    def cut_off(step: int) -> None:
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)

    watchdog = Watchdog(heartbeat, rank, nproc, 20.0, place, local.report)
    try:
        with watchdog:
            train(watchdog, axis, 5, cut_off)
    except RuntimeError as error:
        raise RunError(watchdog.explain(error) if lost_a_peer(error) else "another error") from error


def test_a_gloo_error_names_step_collective_and_peer() -> None:
    heartbeat = SharedMemoryHeartbeat(3)
    with pytest.raises(RunError) as caught:
        local.run(unreachable, 3, heartbeat, timeout_s=40)
    text = str(caught.value)
    assert re.match(r"rank [02] \(dp [02]\) lost a peer at step 2, forward and backward, in all_reduce over dp: ", text)
    assert "rank 1 (dp 1) is silent" in text
    assert text.count("silent") == 1  # the other one has lost the same peer, and lives
    assert_no_process_is_left()


# What must not happen.


class FakeHeartbeat:
    """A heartbeat in this process, and what was reported to it."""

    beat_s, immediate = 0.05, True

    def __init__(self, others: dict[int, RankStatus] | None = None) -> None:
        self.notes: dict[int, RankStatus] = dict(others or {})

    def write(self, rank: int, note: RankStatus) -> None:
        self.notes[rank] = note

    def read(self, step: int) -> dict[int, RankStatus]:
        return dict(self.notes)


class ClosedHeartbeat(FakeHeartbeat):
    immediate = False

    def write(self, rank: int, note: RankStatus) -> None:
        raise ConnectionError("the store is gone")

    def read(self, step: int) -> dict[int, RankStatus]:
        raise ConnectionError("the store is gone")


def test_a_progressing_rank_is_not_reported() -> None:
    messages: list[str] = []
    with Watchdog(FakeHeartbeat(), 0, 1, 0.4, place, messages.append) as watchdog:
        for step in range(10):
            watchdog.at(step, "computing")
            time.sleep(0.1)
    assert messages == []
    assert not [thread for thread in threading.enumerate() if thread.name == "watchdog"]


ends_its_thread = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


def words_of(heartbeat: Heartbeat, world: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of the watchdog of a rank 0 that hangs at step 5, with that heartbeat."""
    ended, messages = threading.Event(), list[str]()

    def end(code: int) -> None:
        assert code == 1
        ended.set()
        raise SystemExit  # of this thread

    monkeypatch.setattr(os, "_exit", end)
    with Watchdog(heartbeat, 0, world, 0.4, place, messages.append) as watchdog:
        watchdog.at(5, "computing")
        assert ended.wait(20)
    (text,) = messages
    return text


@ends_its_thread
def test_slow_ranks_and_missing_ranks_are_reported_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    class Beating(FakeHeartbeat):
        def read(self, step: int) -> dict[int, RankStatus]:
            beat = self.notes[0].beat
            return {**self.notes, 1: RankStatus(4, "computing", 0.0, beat), 2: RankStatus(5, "computing", 0.0, beat)}

    text = words_of(Beating(), 4, monkeypatch)
    assert "rank 1 (dp 1) is behind: step 4, computing" in text
    assert "rank 3 (dp 3) never said anything" in text
    assert "rank 2" not in text


@ends_its_thread
def test_an_unreachable_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "The store that ranks met at does not answer" in words_of(ClosedHeartbeat(), 2, monkeypatch)


@ends_its_thread
def test_a_hung_store_does_not_block_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to a TCP store whose host is stopped block."""

    class HungHeartbeat(ClosedHeartbeat):
        def write(self, rank: int, note: RankStatus) -> None:
            time.sleep(30)

        def read(self, step: int) -> dict[int, RankStatus]:
            time.sleep(30)
            return {}

    assert "does not answer" in words_of(HungHeartbeat(), 2, monkeypatch)


@ends_its_thread
def test_a_hang_of_all_ranks_in_one_collective_is_attributed_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Beating(FakeHeartbeat):
        def read(self, step: int) -> dict[int, RankStatus]:
            return {0: self.notes[0], 1: self.notes[0]}

    assert "Every rank lives and says the same" in words_of(Beating(), 2, monkeypatch)


@ends_its_thread
def test_many_silent_ranks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    text = words_of(FakeHeartbeat({rank: RankStatus(5, "computing", 0.0) for rank in range(1, 1000)}), 1000, monkeypatch)
    assert "and 991 more ranks, of 1000" in text
    assert len(text.splitlines()) < 40


def asleep_for_a_while(rank: int, nproc: int, store: str) -> str:
    with Watchdog(SharedMemoryHeartbeat(1), 0, 1, 1.0, place, local.report) as watchdog:
        watchdog.at(1, "computing")
        subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.4)
        return "awake"


def test_a_run_that_was_suspended_as_a_whole_continues() -> None:
    assert local.run(asleep_for_a_while, 1, timeout_s=30) == ["awake"]


# Heartbeats.


def test_heartbeats_survive_serialization() -> None:
    heartbeat = SharedMemoryHeartbeat(3)
    notes = {0: RankStatus(7, "forward and backward", 12.5, 3), 2: RankStatus(0, "é" * 200, 1.0, 0)}
    for rank, note in notes.items():
        heartbeat.write(rank, note)
    found = heartbeat.read()
    assert found[0] == notes[0]
    assert found[2].doing.startswith("é" * 50)
    assert sorted(found) == [0, 2]
    assert heartbeat.last(1) == ""
    assert heartbeat.last(0).startswith("step 7, forward and backward, since ")


def test_the_store_has_every_heartbeat_and_only_some_ranks_read_them(tmp_path: Path) -> None:
    world = 40
    stores = [dist.FileStore(str(tmp_path / "store"), world) for _ in range(world)]
    heartbeats = [StoreHeartbeat(store, world) for store in stores]
    for rank, heartbeat in enumerate(heartbeats[:-1]):
        heartbeat.write(rank, RankStatus(rank, "reading data", 1.0, rank))
    answers = [heartbeat.read(5) for heartbeat in heartbeats]
    readers = [answer for answer in answers if answer]
    assert len(readers) == 8
    assert readers[0] == {rank: RankStatus(rank, "reading data", 1.0, rank) for rank in range(world - 1)}
    assert heartbeats[0].read(5) == readers[0]  # who has read may look again
    assert heartbeats[-1].read(6) == readers[0]  # another step, other readers


def test_heartbeat_interval_grows_with_the_number_of_ranks() -> None:
    store = dist.HashStore()
    assert StoreHeartbeat(store, 8).beat_s == 1.0
    assert StoreHeartbeat(store, 16_000).beat_s == 32.0


def test_a_rank_without_a_heartbeat_between_two_checks_is_silent() -> None:
    before = {0: RankStatus(1, "a", 0.0, 1), 1: RankStatus(1, "a", 0.0, 4)}
    now = {0: RankStatus(2, "b", 0.0, 2), 1: RankStatus(1, "a", 0.0, 4), 2: RankStatus(1, "a", 0.0, 0)}
    assert silent_ranks(before, now) == [1]


def test_program_errors_are_not_lost_peers() -> None:
    assert not lost_a_peer(RuntimeError("shape mismatch"))
    assert lost_a_peer(RuntimeError("[1.2.3.4]:80: Connection reset by peer"))
