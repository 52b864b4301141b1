"""`bench collectives`: time collectives over sizes and groups, with algorithm and bus bandwidth, and fit latency and bandwidth.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md): algorithm bandwidth is the buffer over the time; bus bandwidth is what
each rank sends over the time, so that it compares with a link's data sheet for any collective and number of ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np

from ultrascale.cost import network as law
from ultrascale.cost.hardware import ClusterRates
from ultrascale.launch.rank_info import RankInfo
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.errors import RunError, SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.model import Model
from ultrascale.specs.units import tokens
from ultrascale.specs.validate import shown

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

# In the order of the playbook's appendix.
OPS = (
    "broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter", "reduce_scatter", "all_to_all", "send_recv",
    "barrier",
)  # fmt: skip
ELEMENT_BYTES = 4  # fp32
SIZE_FACTOR = 4  # sizes of a range grow by this
MAX_BYTES = 2**34
ROUNDS, WARM = 11, 2
ROUND_S = 2e-3  # short collectives are repeated until a round lasts about so long
MAX_REPEATS = 100
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class CollectiveTiming:
    """One collective of one size on one group; of a barrier the size is 0."""

    op: str
    ranks: int
    bytes: int
    """of the whole buffer for gather, scatter and their kin, of one rank's for the others, as nccl-tests counts"""
    median_s: float
    low_s: float
    high_s: float
    """deciles: one round in ten is faster than low_s, one slower than high_s"""

    @property
    def algorithm_gb_s(self) -> float:
        return self.bytes / self.median_s / 1e9

    @property
    def bus_gb_s(self) -> float:
        return wire_bytes(self.op, self.bytes, self.ranks) / self.median_s / 1e9


@dataclass(frozen=True)
class AlphaBetaFit:
    """time = alpha + bytes on the wire / beta."""

    op: str
    ranks: int
    alpha_s: float
    beta_gb_s: float | None
    """None: the times do not grow with the size"""
    error: float
    """median of the relative errors"""


@dataclass(frozen=True)
class SkippedCollective:
    op: str
    ranks: int
    reason: str


@dataclass(frozen=True)
class CollectivesReport:
    where: str
    """`2 processes over gloo`"""
    points: tuple[CollectiveTiming, ...]
    missing: tuple[SkippedCollective, ...] = ()

    @property
    def fits(self) -> tuple[AlphaBetaFit, ...]:
        groups = dict.fromkeys((point.op, point.ranks) for point in self.points)
        return tuple(fit([point for point in self.points if (point.op, point.ranks) == group]) for group in groups)


def wire_bytes(op: str, size: float, ranks: int) -> float:
    """Bytes that each rank sends; for gather and scatter, what the root receives or sends."""
    if op == "barrier":
        return 0.0
    if op in ("gather", "scatter"):
        return size * (ranks - 1) / ranks
    assert op in get_args(law.Op)
    return float(law.wire_bytes(op, size, ranks))  # type: ignore[arg-type]


def fit(points: Sequence[CollectiveTiming]) -> AlphaBetaFit:
    """Least squares of relative errors, so that small messages count as much as large ones."""
    op, ranks = points[0].op, points[0].ranks
    times = np.array([point.median_s for point in points])
    wire = np.array([wire_bytes(op, point.bytes, ranks) for point in points])
    if len(set(wire)) == 1:
        alpha, per_byte = float(np.median(times)), 0.0
    else:
        alpha, per_byte = np.linalg.lstsq(np.stack([1 / times, wire / times], axis=1), np.ones(len(times)), rcond=None)[0]
        if alpha < 0:
            share = wire / times
            alpha, per_byte = 0.0, float(share.sum() / (share**2).sum())
    error = float(np.median(np.abs((alpha + per_byte * wire) / times - 1)))
    return AlphaBetaFit(op, ranks, float(alpha), float(1e-9 / per_byte) if per_byte > 0 else None, error)


def sizes(text: str) -> list[int]:
    """`1k..64M`, each four times the one before, or some sizes with commas between them."""
    first, dots, last = text.partition("..")
    if not dots:
        found = [tokens(word.strip(), "--sizes", "1k..64M") for word in text.split(",")]
    else:
        low, high = (tokens(word.strip(), "--sizes", "1k..64M") for word in (first, last))
        if low > high:
            raise SpecError(f"--sizes is {shown(text)}, from large to small: try {last.strip()}..{first.strip()}")
        found = [low]
        while found[-1] * SIZE_FACTOR <= high:
            found.append(found[-1] * SIZE_FACTOR)
    if max(found) > MAX_BYTES:
        raise SpecError(f"--sizes is {shown(text)} but a buffer may have at most 16G bytes: try 1k..64M")
    return sorted(set(found))


def groups(text: str | None, world: int) -> list[int]:
    """Sizes of process groups: those given, or powers of two and all ranks."""
    if text is None:
        return sorted({*(2**power for power in range(1, 20) if 2**power < world), world})
    found = [tokens(word.strip(), "--groups", "2,4") for word in text.split(",")]
    if any(not 2 <= size <= world for size in found):
        raise SpecError(f"--groups is {shown(text)} but groups have from 2 to {world} ranks here: try 2, or a larger --nproc")
    return sorted(set(found))


def fit_link(cluster: Cluster, points: Iterable[CollectiveTiming]) -> Cluster:
    """The cluster with link constants for which the law predicts its smallest and largest all-reduce."""
    all_reduces = [point for point in points if point.op == "all_reduce" and point.ranks <= cluster.fast_domain]
    if not all_reduces:
        return cluster
    ranks = max(point.ranks for point in all_reduces)
    small, *_, large = sorted((point for point in all_reduces if point.ranks == ranks), key=lambda point: point.bytes) * 2
    latency = share = 0.0
    for _ in range(3):  # either moves the other a little
        share = _bisect(lambda value: _law_s(cluster, large, latency, value), large.median_s, 1e-3, 1.0)  # noqa: B023
        latency = _bisect(lambda value: _law_s(cluster, small, value, share), small.median_s, 0.0, 1e-2)  # noqa: B023
    constants = {"link_bandwidth": float(f"{share:.4g}"), "link_latency_s": float(f"{latency:.4g}")}
    return cluster.model_copy(update={"efficiency": cluster.efficiency.model_copy(update=constants)})


def _law_s(cluster: Cluster, point: CollectiveTiming, latency_s: float, share: float) -> float:
    changed = cluster.efficiency.model_copy(update={"link_latency_s": latency_s, "link_bandwidth": share})
    here = cluster.model_copy(update={"efficiency": changed})
    machine = ClusterRates(Job(model=Model.load("tiny"), cluster=here, seq=128, batch_tokens=128 * cluster.gpus))
    link = machine.intra("all_reduce")
    return float(law.collective_time_s("all_reduce", point.bytes, point.ranks, per_node=point.ranks, intra=link, inter=link))


def _bisect(time_s: Callable[[float], float], wanted_s: float, low: float, high: float) -> float:
    """Bisection: where a monotone law has this time, or the nearer end."""
    rising = time_s(high) > time_s(low)
    for _ in range(50):
        middle = (low + high) / 2
        if (time_s(middle) < wanted_s) == rising:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def measure(
    ops: list[str], sizes: list[int], groups: list[int], nproc: int, gpu: bool, say: Callable[[str], None]
) -> CollectivesReport:
    """In processes of this machine, new ones for each collective, so that one that fails does not lose the others."""
    from ultrascale.launch import local
    from ultrascale.train import import_torch

    import_torch()
    points: list[CollectiveTiming] = []
    missing: list[SkippedCollective] = []
    for number, op in enumerate(ops, 1):
        for group in groups:
            say(f"{op} ({number} of {len(ops)}) between {group} ranks")
            try:
                points += local.run(_local, group, op, sizes, [group], timeout_s=TIMEOUT_S)[0]
            except RunError as error:
                missing.append(SkippedCollective(op, group, str(error).strip().splitlines()[-1]))
    return CollectivesReport(_where(nproc, gpu), tuple(points), tuple(missing))


def measure_as(rank_info: RankInfo, ops: list[str], sizes: list[int], groups: list[int], gpu: bool) -> CollectivesReport | None:
    """As one rank of torchrun or Slurm; None on all but the first."""
    from ultrascale.launch.rendezvous import leave
    from ultrascale.train import import_torch

    import_torch()

    points = [point for op in ops for point in _time_groups(rank_info, op, sizes, groups)]
    leave()
    return CollectivesReport(_where(rank_info.world, gpu), tuple(points)) if rank_info.rank == 0 else None


def _where(ranks: int, gpu: bool) -> str:
    return f"{ranks} GPUs over NCCL" if gpu else f"{ranks} processes over gloo"


def _local(rank: int, nproc: int, store: str, op: str, sizes: list[int], groups: list[int]) -> list[CollectiveTiming]:
    from ultrascale.launch.rendezvous import leave

    found = _time_groups(RankInfo(rank, nproc, rank, nproc, store), op, sizes, groups)
    leave()
    return found


def _time_groups(rank_info: RankInfo, op: str, sizes: list[int], groups: list[int]) -> list[CollectiveTiming]:
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


def _timed(op: str, size: int, ranks: int, rank: int, group: ProcessGroup, device: torch.device) -> CollectiveTiming:
    import torch
    import torch.distributed as dist

    each = -(-size // (ELEMENT_BYTES * ranks))  # elements of one part: every buffer is cut evenly
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
        """The slowest rank of each round: a root that only sends is done before its data has arrived."""
        times = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group)
        return [float(value) for value in times.tolist()]

    (single_s,) = slowest([min(seconds(1) for _ in range(WARM))])
    repeats = max(1, min(MAX_REPEATS, round(ROUND_S / single_s)))
    rounds = slowest([seconds(repeats) for _ in range(ROUNDS)])
    tenths = statistics.quantiles(rounds, n=10, method="inclusive")
    return CollectiveTiming(op, ranks, ELEMENT_BYTES * each * ranks, statistics.median(rounds), tenths[0], tenths[-1])


def _action(op: str, each: int, ranks: int, rank: int, group: ProcessGroup, device: torch.device) -> Callable[[], object]:
    """The collective on zeros, which sums do not change. Groups begin at rank 0, which is the root."""
    import torch
    import torch.distributed as dist

    def zeros(elements: int) -> torch.Tensor:
        return torch.zeros(elements, device=device)

    def round_the_ring() -> None:
        sent = dist.P2POp(dist.isend, whole, (rank + 1) % ranks, group)
        for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, other, (rank - 1) % ranks, group)]):
            work.wait()

    whole, part = zeros(each * ranks), zeros(each)
    other = zeros(each * ranks) if op in ("all_to_all", "send_recv") else whole
    parts = list(whole.chunk(ranks)) if rank == 0 and each else None
    # torch 2.13 renamed these two
    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    actions: dict[str, Callable[[], object]] = {
        "broadcast": lambda: dist.broadcast(whole, 0, group),
        "reduce": lambda: dist.reduce(whole, 0, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "gather": lambda: dist.gather(part, parts, 0, group),
        "all_gather": lambda: gather_into(whole, part, group=group),
        "scatter": lambda: dist.scatter(part, parts, 0, group),
        "reduce_scatter": lambda: scatter_into(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": round_the_ring,
        "barrier": lambda: dist.barrier(group),
    }
    return actions[op]
