"""Traces that torch.profiler records of gloo ranks, one of them slowed down: it is named with the right cause."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from job_builders import analysed

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow
RANKS, SLOW, DELAY_S = 3, 1, 0.15


def train(rank: int, port: int, out: str, fault: str) -> None:
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    slow = rank == SLOW

    def batches() -> torch.Tensor:
        with torch.profiler.record_function("enumerate(DataLoader)#__next__"):
            time.sleep(DELAY_S * (slow and fault == "data loading"))
            return torch.randn(8, 64)

    turns = schedule(wait=1, warmup=1, active=3, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=turns, acc_events=True) as profiler:
        for _ in range(5):
            batch = batches()
            if slow and fault == "host":
                time.sleep(DELAY_S)
            until = time.monotonic() + DELAY_S * (slow and fault == "computing")
            while time.monotonic() < until:
                torch.mm(torch.ones(300, 300), torch.ones(300, 300))
            model(batch).sum().backward()
            profiler.step()
    profiler.export_chrome_trace(f"{out}/rank{rank}.json.gz")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("fault", ["computing", "data loading", "host"])
def test_a_slow_rank_of_gloo_is_named_with_its_cause(tmp_path: Path, fault: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (port, str(tmp_path), fault), nprocs=RANKS)
    first = analysed(tmp_path).stragglers[0]
    assert first.rank == SLOW
    assert next(iter(first.causes)) == fault
    assert first.excess[fault] > DELAY_S / 2
