"""Collectives timed: gloo between processes of this machine, NCCL between its GPUs, or between the ranks of torchrun."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ultrascale.launch.rank_info import RankInfo
from ultrascale.measure.bench.collectives import ELEMENT, CollectivesReport, CollectiveTiming, SkippedCollective
from ultrascale.specs.errors import RunError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

ROUNDS, WARM = 11, 2
ROUND_S = 2e-3  # short collectives are repeated until a round lasts about so long
MOST_REPEATS = 100
TIMEOUT_S = 300.0

Say = Callable[[str], None]


def measure(ops: list[str], sizes: list[int], groups: list[int], nproc: int, gpu: bool, say: Say) -> CollectivesReport:
    """In processes of this machine, new ones for each collective: one that fails leaves the others their figures."""
    from ultrascale.launch import local
    from ultrascale.train import import_torch

    import_torch()
    points: list[CollectiveTiming] = []
    missing: list[SkippedCollective] = []
    for number, op in enumerate(ops, 1):
        for group in groups:
            say(f"{op} ({number} of {len(ops)}) between {group} ranks")
            try:
                found = local.run(_local, group, op, sizes, [group], timeout_s=TIMEOUT_S)[0]
                points += found
            except RunError as error:
                missing.append(SkippedCollective(op, group, str(error).strip().splitlines()[-1]))
    return CollectivesReport(_where(nproc, gpu), tuple(points), tuple(missing))


def measure_as(rank_info: RankInfo, ops: list[str], sizes: list[int], groups: list[int], gpu: bool) -> CollectivesReport | None:
    """As one rank of torchrun's or Slurm's; None on all but the first."""
    from ultrascale.train import import_torch

    import_torch()
    points = [point for op in ops for point in _joined(rank_info, op, sizes, groups)]
    _left()
    return CollectivesReport(_where(rank_info.world, gpu), tuple(points)) if rank_info.rank == 0 else None


def _where(ranks: int, gpu: bool) -> str:
    return f"{ranks} GPUs over NCCL" if gpu else f"{ranks} processes over gloo"


def _local(rank: int, nproc: int, store: str, op: str, sizes: list[int], groups: list[int]) -> list[CollectiveTiming]:
    found = _joined(RankInfo(rank, nproc, rank, nproc, store), op, sizes, groups)
    _left()
    return found


def _joined(rank_info: RankInfo, op: str, sizes: list[int], groups: list[int]) -> list[CollectiveTiming]:
    import torch
    import torch.distributed as dist

    from ultrascale.launch.rendezvous import join

    if dist.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    else:
        device = join(rank_info, TIMEOUT_S)
    found = []
    for ranks in groups:
        group = dist.new_group(list(range(ranks)))
        if rank_info.rank < ranks:
            assert group is not None
            found += [_timed(op, size, ranks, rank_info.rank, group, device) for size in ([0] if op == "barrier" else sizes)]
        dist.barrier()
    return found


def _left() -> None:
    from ultrascale.launch.rendezvous import leave

    leave()


def _timed(op: str, size: int, ranks: int, rank: int, group: ProcessGroup, device: torch.device) -> CollectiveTiming:
    import torch
    import torch.distributed as dist

    each = -(-size // (ELEMENT * ranks))  # elements of one part: every buffer is cut evenly
    action = _action(op, each, ranks, rank, group, device)

    def seconds(times: int) -> float:
        dist.barrier(group)
        began = time.perf_counter()
        for _ in range(times):
            action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / times

    def slowest(values: list[float]) -> list[float]:
        """Of each round the slowest rank: a root that only sends is done before its data has come."""
        told = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group)
        return [float(value) for value in told.tolist()]

    (once,) = slowest([min(seconds(1) for _ in range(WARM))])
    repeats = max(1, min(MOST_REPEATS, round(ROUND_S / once)))
    rounds = slowest([seconds(repeats) for _ in range(ROUNDS)])
    tenths = statistics.quantiles(rounds, n=10, method="inclusive")
    return CollectiveTiming(op, ranks, ELEMENT * each * ranks, statistics.median(rounds), tenths[0], tenths[-1])


def _action(op: str, each: int, ranks: int, rank: int, group: ProcessGroup, device: torch.device) -> Callable[[], object]:
    """The collective on zeros, which sums leave as they are. Groups begin at rank 0, which is the root."""
    import torch
    import torch.distributed as dist

    def zeros(elements: int) -> torch.Tensor:
        return torch.zeros(elements, device=device)

    whole, part = zeros(each * ranks), zeros(each)
    if op == "broadcast":
        return lambda: dist.broadcast(whole, 0, group)
    if op == "reduce":
        return lambda: dist.reduce(whole, 0, group=group)
    if op == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if op == "all_gather":
        gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed them
        return lambda: gather_into(whole, part, group=group)
    if op == "reduce_scatter":
        scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return lambda: scatter_into(part, whole, group=group)
    if op in ("gather", "scatter"):
        parts = list(whole.chunk(ranks)) if rank == 0 and each else None
        if op == "gather":
            return lambda: dist.gather(part, parts, 0, group)
        return lambda: dist.scatter(part, parts, 0, group)
    if op == "barrier":
        return lambda: dist.barrier(group)
    other = zeros(each * ranks)
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def round_the_ring() -> None:
        sent = dist.P2POp(dist.isend, whole, after, group)
        for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, other, before, group)]):
            work.wait()

    return round_the_ring
