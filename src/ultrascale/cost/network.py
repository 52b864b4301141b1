"""Network: bytes and time of collectives by algorithm and tier, where groups sit, and what communication is exposed.

Volumes are the bus-bandwidth factors of nccl-tests (doc/PERFORMANCE.md); the ring and tree laws are those of Thakur,
Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in MPICH", §4, with NCCL's double binary trees
(NCCL 2.4). Inside one domain the time is

    base + steps · latency + (wire + copy · B/n) / β + sqrt(wire/β · fill)

The root is what remains of a pipeline with the best chunk size: s stages of latency a and a volume that takes v cost
v + s·a + 2·sqrt(v·s·a). It is the measured slow saturation: at 16 MiB, all_gather on 8 H100s reaches 64 % of its
512 MiB bandwidth. `copy` is the rank's own share, moved inside its memory: without it all_gather on 2 H100s comes out
16 % too fast and on 8 some 6 % too slow. `switch_gain` is the reduction inside the switch (NVLink SHARP), which the
measured all_reduce on 8 Hopper GPUs uses: 445 GB/s of bus bandwidth against 350 on 4.
Coefficients per GPU kind are fitted by tools/fit_surfaces.py into surfaces/nccl.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ultrascale.cost.columns import Array, LayoutColumns
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.efficiency import Efficiency
from ultrascale.specs.errors import SpecError, nearest
from ultrascale.specs.files import package_data

if TYPE_CHECKING:
    from ultrascale.cost.hardware import ClusterRates


Floats = NDArray[np.float64]
Op = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv"]

# NCCL's tuner gives its trees 0.92 of the ring's bus bandwidth (src/graph/tuning.cc).
TREE_BANDWIDTH = 0.92

# Measured groups of 2 and 4 show the ring's bandwidth, groups of 8 the switch's.
SWITCH_REDUCES_FROM = 8

# Collectives that were not measured take the link of the one that moves its data the same way.
_MEASURED_AS: dict[str, str] = {"broadcast": "all_gather", "reduce": "reduce_scatter", "send_recv": "all_to_all"}


@dataclass(frozen=True)
class Link:
    """What one GPU can send in one direction. All but the first two are known for measured links only."""

    bandwidth_gb_s: float  # achievable bus bandwidth per GPU and direction
    latency_s: float  # per hop
    base_s: float = 0.0  # once per collective: launch and synchronisation
    fill_s: float = 0.0  # filling and draining the pipeline of chunks
    copy: float = 0.0  # weight of the rank's own share B/n
    switch_gain: float = 1.0  # bandwidth of an all_reduce inside the domain, from SWITCH_REDUCES_FROM ranks on

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_gb_s * 1e9


def wire_bytes(op: Op, bytes: ArrayLike, n: ArrayLike) -> Floats:
    """Bytes that each GPU sends for a buffer of `bytes` on `n` ranks (nccl-tests, doc/PERFORMANCE.md, Summary).

    The buffer is the full, gathered one for all_gather and reduce_scatter, and what one rank holds for all_to_all.
    """
    size, ranks = np.asarray(bytes, dtype=np.float64), np.asarray(n, dtype=np.float64)
    if op == "all_reduce":
        return np.asarray(2.0 * (ranks - 1.0) / ranks * size)
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return np.asarray((ranks - 1.0) / ranks * size)
    if op in ("broadcast", "reduce", "send_recv"):
        return np.where(ranks > 1.0, size, 0.0)
    raise SpecError(f"'{op}' is not a collective; {nearest(op, get_args(Op))}")


def _pipelined(volume_s: Floats, fill_s: float) -> Floats:
    return np.asarray(volume_s + np.sqrt(volume_s * fill_s))


def _domains(n: Floats, per_node: Floats) -> tuple[Floats, Floats]:
    """Members of the group inside one domain, and how many domains it touches."""
    local = np.minimum(n, per_node)
    return local, np.ceil(n / local)


def ring_time_s(op: Op, bytes: ArrayLike, n: ArrayLike, *, per_node: ArrayLike, intra: Link, inter: Link) -> Floats:
    """A ring through all members; g members per domain drive g NICs, so its bandwidth is min(intra, g · inter).

    All members send at every one of its n−1 steps (twice as many for all_reduce), so a step waits for the slowest hop. Seen on
    16 and 32 ranks of 2 and 4 nodes: 0.7 and 1.75 ms for a small all_gather, 45 to 55 µs a step (docs/lab.md).
    """
    size, ranks = np.asarray(bytes, dtype=np.float64), np.asarray(n, dtype=np.float64)
    local, domains = _domains(ranks, np.asarray(per_node, dtype=np.float64))
    passes, inside = 1.0, np.full_like(ranks, intra.bytes_per_s)
    if op == "all_reduce":
        passes, inside = 2.0, np.where(ranks < SWITCH_REDUCES_FROM, 1.0, intra.switch_gain) * intra.bytes_per_s
    spans = domains > 1.0
    latency = passes * (ranks - 1.0) * np.where(spans, np.maximum(inter.latency_s, intra.latency_s), intra.latency_s)
    rate = np.where(spans, np.minimum(intra.bytes_per_s, local * inter.bytes_per_s), inside)
    base = intra.base_s + np.where(spans, inter.base_s, 0.0)
    own_copy = intra.copy * size / (ranks * intra.bytes_per_s)
    volume = _pipelined(wire_bytes(op, size, ranks) / rate, max(intra.fill_s, inter.fill_s))
    return np.where(ranks > 1.0, base + latency + own_copy + volume, 0.0)


def tree_all_reduce_time_s(bytes: ArrayLike, n: ArrayLike, *, per_node: ArrayLike, intra: Link, inter: Link) -> Floats:
    """Double binary trees between domains, a chain inside each: 2·[(g−1)·intra + log2(domains)·inter] of latency.

    Every rank sends the buffer up and down once: 2·B at TREE_BANDWIDTH of the ring's rate.
    """
    size, ranks = np.asarray(bytes, dtype=np.float64), np.asarray(n, dtype=np.float64)
    local, domains = _domains(ranks, np.asarray(per_node, dtype=np.float64))
    spans = domains > 1.0
    latency = 2.0 * ((local - 1.0) * intra.latency_s + np.ceil(np.log2(domains)) * inter.latency_s)
    rate = np.where(spans, np.minimum(intra.bytes_per_s, local * inter.bytes_per_s), intra.bytes_per_s)
    base = intra.base_s + np.where(spans, inter.base_s, 0.0)
    volume_s = 2.0 * size / (rate * TREE_BANDWIDTH)
    return np.where(ranks > 1.0, base + latency + _pipelined(volume_s, max(intra.fill_s, inter.fill_s)), 0.0)


def _all_to_all_time_s(size: Floats, ranks: Floats, per_node: Floats, intra: Link, inter: Link) -> Floats:
    """What leaves the domain, (n−g)/n of the buffer, goes over the rank's own NIC while NVLink carries its part.

    The two overlap, so the slower one counts: NCCL posts every send and receive in one group, and they use different
    hardware. NVLink carries the whole volume because NCCL's PXN hands outgoing data to the GPU next to the target's
    rail first. Sends are posted one peer after another (latency per peer), the network's latency is then paid once.
    """
    local, domains = _domains(ranks, per_node)
    spans = domains > 1.0
    inside = wire_bytes("all_to_all", size, ranks) / intra.bytes_per_s
    outside = (ranks - local) / ranks * size / inter.bytes_per_s
    volume_s = np.maximum(inside, outside)
    base = intra.base_s + np.where(spans, inter.base_s + inter.latency_s, 0.0)
    own_copy = intra.copy * size / (ranks * intra.bytes_per_s)
    fill_s = max(intra.fill_s, inter.fill_s)
    return np.asarray(base + (ranks - 1.0) * intra.latency_s + own_copy + _pipelined(volume_s, fill_s))


def _send_recv_time_s(size: Floats, ranks: Floats, per_node: Floats, intra: Link, inter: Link) -> Floats:
    def over(link: Link) -> Floats:
        return np.asarray(link.base_s + link.latency_s + _pipelined(size / link.bytes_per_s, link.fill_s))

    return np.where(ranks > per_node, over(inter) + intra.base_s, over(intra))


def collective_time_s(op: Op, bytes: ArrayLike, n: ArrayLike, *, per_node: ArrayLike, intra: Link, inter: Link) -> Floats:
    """Seconds of a collective of `bytes` on a group of `n`, of which `per_node` sit in one fast domain.

    n <= per_node never leaves the domain; n == 1 costs exactly nothing. For send_recv between two domains give
    n=2, per_node=1. all_reduce takes the faster of ring and tree, as NCCL does.
    """
    size, ranks = np.asarray(bytes, dtype=np.float64), np.asarray(n, dtype=np.float64)
    local = np.asarray(per_node, dtype=np.float64)
    if op == "all_to_all":
        time = _all_to_all_time_s(size, ranks, local, intra, inter)
    elif op == "send_recv":
        time = _send_recv_time_s(size, ranks, local, intra, inter)
    else:
        time = ring_time_s(op, size, ranks, per_node=local, intra=intra, inter=inter)
        if op == "all_reduce":
            tree = tree_all_reduce_time_s(size, ranks, per_node=local, intra=intra, inter=inter)
            time = np.minimum(time, np.where(ranks > local, tree, np.inf))
    return np.where(ranks > 1.0, time, 0.0)


@dataclass(frozen=True)
class FabricOp:
    """One measured collective: fractions of the NVLink rate, seconds, and the fit's error (fractions)."""

    bandwidth_fraction: float
    base_s: float
    latency_s: float
    fill_s: float
    copy: float
    switch_gain: float
    residual_median: float
    residual_p90: float
    large_residual_median: float  # messages of 1 MiB and more
    large_residual_p90: float
    rows: int


@dataclass(frozen=True)
class FabricFit:
    """The measured NVLink domain of one GPU kind."""

    gpu: str
    nvlink_gb_s: float  # per GPU and direction, from the data sheet
    nccl: str
    max_gpus: int  # the largest measured group
    ops: Mapping[str, FabricOp]
    source: str

    def link(self, op: Op, nvlink_gb_s: float | None = None) -> Link:
        """The `intra` link of a collective; a relative gives its own NVLink rate and keeps the fractions."""
        fit = self.ops[_MEASURED_AS.get(op, op)]
        rate = self.nvlink_gb_s if nvlink_gb_s is None else nvlink_gb_s
        return Link(fit.bandwidth_fraction * rate, fit.latency_s, fit.base_s, fit.fill_s, fit.copy, fit.switch_gain)


@lru_cache(maxsize=32)
def load_fabric(gpu_table: str) -> FabricFit:
    """The fitted NVLink domain of a GPU kind ("h100"; "h100_sxm" is the same)."""
    gpu = gpu_table.removesuffix("_sxm")
    tables = package_data("ultrascale.cost", "surfaces/nccl.json")
    for row in tables["fabrics"]:
        if row["gpu"] == gpu:
            fields = {**row, "ops": {op: FabricOp(**fit) for op, fit in row["ops"].items()}}
            return FabricFit(**fields, source=tables["source"])
    raise SpecError(f"no measured collectives for {gpu_table}; {nearest(gpu, [row['gpu'] for row in tables['fabrics']])}")


# --------------------------------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class CommGroup:
    """A communication group per row: its size, and how many of its members share one fast-link domain and one node."""

    size: Array
    per_domain: Array
    per_node: Array

    @property
    def leaves_domain(self) -> Array:
        return np.asarray(self.size > self.per_domain)


def group(size: Array, stride: Array, cluster: Cluster) -> CommGroup:
    """`stride` is the distance in ranks between neighbours of the group; domains and nodes hold consecutive ranks."""

    def members(ranks: int) -> Array:
        return np.asarray(np.clip(ranks // np.maximum(stride, 1), 1, size))

    return CommGroup(size, members(cluster.fast_domain), members(cluster.gpus_per_node))


@dataclass(frozen=True)
class GroupPlacement:
    tensor: CommGroup
    context: CommGroup
    data: CommGroup
    """every rank with the same non-expert weights: dp × cp"""
    shard: CommGroup
    """the data ranks that ZeRO shards over"""
    replica: CommGroup
    """HSDP: the ranks that hold the same shard"""
    expert: CommGroup
    expert_data: CommGroup
    """every rank with the same experts"""
    pipeline: CommGroup


def strides(columns: LayoutColumns) -> dict[str, tuple[Array, Array]]:
    """Size and stride of every group: tp is innermost, then cp, then dp, pp outermost (parallel/mesh.py).

    The members of a rank's group are `stride` apart, and the rank's place among them is `rank // stride % size`.
    """
    tp, data, ones = columns.tp, columns.data_ranks, np.ones_like(columns.tp)
    return {
        "tensor": (tp, ones),
        "context": (columns.cp, tp),
        "data": (data, tp),
        "shard": (columns.shards, tp),
        "replica": (data // columns.shards, tp * columns.shards),
        "expert": (columns.ep, columns.expert_cut),
        "expert_data": (columns.expert_ranks // columns.ep, columns.expert_cut * columns.ep),
        "pipeline": (columns.pp, tp * data),
    }


def mesh(columns: LayoutColumns, cluster: Cluster) -> GroupPlacement:
    return GroupPlacement(**{name: group(size, stride, cluster) for name, (size, stride) in strides(columns).items()})


# -------------------------------------------------------------------------------------------------------------------- overlap


def exposed(transfer_s: Array, window_s: Array, constants: Efficiency) -> Array:
    """Beyond `overlap` of the window the transfer waits; while it hides, computing is slowed (it shares SMs and HBM)."""
    hidden = np.minimum(transfer_s, constants.overlap * window_s)
    return np.asarray(transfer_s - hidden + constants.overlap_slowdown * hidden)


@dataclass(frozen=True)
class CollectiveTransfer:
    """A collective that a technique calls: on which group, with how large a buffer, and how long one call takes."""

    technique: str
    collective: Op
    group: CommGroup
    buffer_bytes: Array
    time_s: Array

    @property
    def wire_bytes(self) -> Array:
        return wire_bytes(self.collective, self.buffer_bytes, self.group.size)


def transfer(
    machine: ClusterRates, technique: str, collective: Op, buffer_bytes: Array, group: CommGroup
) -> CollectiveTransfer:
    """Nothing to send is no call: a dense model has no experts to gather, and waits for no latency of theirs."""
    sent = (np.asarray(buffer_bytes) > 0) & (group.size > 1)
    time = np.zeros(sent.shape)
    if sent.any():
        send = collective == "send_recv"
        time_s = machine.send_s(buffer_bytes, group) if send else machine.collective_s(collective, buffer_bytes, group)
        time = np.where(sent, time_s, 0.0)
    return CollectiveTransfer(technique, collective, group, buffer_bytes, time)
