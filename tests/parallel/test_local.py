"""Ranks on one machine: what they return, and what the caller learns when one fails, dies or never ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ultrascale.parallel import local
from ultrascale.parallel.local import RankError
from ultrascale.specs.errors import SpecError

torch.set_num_threads(1)


def test_results_come_in_the_order_of_ranks() -> None:
    assert local.run(slower_first, 3, "x", timeout_s=30) == [(0, 3, "x"), (1, 3, "x"), (2, 3, "x")]


def slower_first(rank: int, nproc: int, store: str, word: str) -> tuple[int, int, str]:
    time.sleep(0.1 * (nproc - rank))
    return rank, nproc, word


def test_ranks_meet_at_the_store_and_it_is_gone_afterwards() -> None:
    results = local.run(summed, 3, timeout_s=30)
    assert [total for total, _ in results] == [3.0, 3.0, 3.0]
    assert not Path(results[0][1].removeprefix("file://")).parent.exists()


def summed(rank: int, nproc: int, store: str) -> tuple[float, str]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    dist.destroy_process_group()
    return x.item(), store


def test_tensors_come_back_whole() -> None:
    """More bytes than a pipe holds, and after the rank that made them has ended."""
    results = local.run(filled, 2, timeout_s=30)
    assert [torch.equal(x, torch.full((1000, 300), rank, dtype=torch.bfloat16)) for rank, x in enumerate(results)] == [True] * 2


def filled(rank: int, nproc: int, store: str) -> torch.Tensor:
    return torch.full((1000, 300), rank, dtype=torch.bfloat16)


def test_a_rank_that_raises_is_named_and_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 failed:\nTraceback[\s\S]*ZeroDivisionError") as caught:
        local.run(raising, 3, timeout_s=30)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 10
    assert not multiprocessing.active_children()


def raising(rank: int, nproc: int, store: str) -> float:
    if rank == 1:
        return 1 / 0
    time.sleep(60)
    return 0.0


def test_a_wrong_spec_is_told_without_a_traceback() -> None:
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


def test_what_cannot_be_sent_back_is_a_failure() -> None:
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


@pytest.mark.parametrize("way", ["raise", "kill"])
def test_the_cause_is_named_not_the_peers_that_lost_it(way: str) -> None:
    """Ranks 0 and 2 fail too, in the collective that rank 1 never joins."""
    with pytest.raises(RankError, match="SIGKILL" if way == "kill" else "the cause") as caught:
        local.run(leaving, 3, way, timeout_s=30)
    assert caught.value.rank == 1


def leaving(rank: int, nproc: int, store: str, way: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    dist.barrier()
    if rank == 1:
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("the cause")
    dist.all_reduce(torch.ones(1))


def test_time_runs_out() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"no answer within 0\.5 s; still running: rank 1, 2") as caught:
        local.run(two_sleep, 3, timeout_s=0.5)
    assert caught.value.rank == 1
    assert 0.5 <= time.monotonic() - start < 10
    assert not multiprocessing.active_children()


def two_sleep(rank: int, nproc: int, store: str) -> None:
    if rank > 0:
        time.sleep(60)


def test_a_rank_that_ignores_the_request_to_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_S", 0.2)
    with pytest.raises(RankError, match="no answer"):
        local.run(stubborn, 1, timeout_s=0.5)
    assert not multiprocessing.active_children()


def stubborn(rank: int, nproc: int, store: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
