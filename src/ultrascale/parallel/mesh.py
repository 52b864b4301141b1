"""The device mesh of a layout, and the shard of each parameter that a rank of it holds.

tp is innermost, then cp, then dp, and pp outermost, in the order of cost/network.py. A mesh is built once and
passed as an argument; there is no global mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product

import torch
import torch.distributed as dist

from ultrascale.parallel.comm import Axis, WaitClock
from ultrascale.specs.layout import Layout


@dataclass(frozen=True)
class RankCoordinates:
    """The mesh coordinates of one rank."""

    pp: int
    dp: int
    cp: int
    tp: int

    @classmethod
    def of(cls, layout: Layout, rank: int) -> RankCoordinates:
        rank, tp = divmod(rank, layout.tp)
        rank, cp = divmod(rank, layout.cp)
        pp, dp = divmod(rank, layout.dp)
        return cls(pp, dp, cp, tp)

    def words(self, layout: Layout) -> str:
        """`dp 1, tp 0`: the coordinates on axes larger than 1; empty for one rank."""
        return ", ".join(f"{axis} {getattr(self, axis)}" for axis in ("pp", "dp", "cp", "tp") if getattr(layout, axis) > 1)

    def rank(self, layout: Layout) -> int:
        return ((self.pp * layout.dp + self.dp) * layout.cp + self.cp) * layout.tp + self.tp


@dataclass(frozen=True)
class Mesh:
    """The axes of one rank. Axes of size 1 have no group: every collective over them is the identity."""

    layout: Layout
    rank: int
    place: RankCoordinates
    device: torch.device
    tp: Axis
    cp: Axis
    pp: Axis
    data: Axis
    """ranks with the same weights: dp × cp"""
    shard: Axis
    """the data ranks that ZeRO shards over"""
    replica: Axis
    """HSDP: the ranks that hold the same shard"""
    ep: Axis
    """data ranks over which the experts are distributed"""
    expert_data: Axis
    """data ranks that hold the same experts"""
    expert_shard: Axis
    """the ranks of `expert_data` that ZeRO shards experts over"""
    kv: Axis
    """tp ranks that hold the same kv heads, if there are fewer heads than ranks"""
    ends: Axis
    """first and last pipeline rank: both hold a tied embedding"""
    stage: Axis
    """ranks of a pipeline stage that together hold one copy of its weights: ZeRO's shards and tp"""
    copies: Axis
    """ranks that hold the same parts of a stage, experts left aside"""
    expert_copies: Axis
    parts: Axis
    """ranks that together hold all weights, gradients and optimizer states once: the gradient norm is summed over them"""
    world: Axis
    clock: WaitClock = field(default_factory=WaitClock)

    @classmethod
    def build(
        cls,
        layout: Layout,
        kv_heads: int,
        rank: int = 0,
        device: torch.device | str = "cpu",
        timeout_s: float | None = None,
    ) -> Mesh:
        """Creates this rank's process groups. The default group must exist unless the layout is one process.

        `timeout_s`: timeout of each group's collectives; None: torch's default.
        """
        place, clock = RankCoordinates.of(layout, rank), WaitClock()
        groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

        def axis(name: str, ranks: Iterable[int]) -> Axis:
            members = tuple(ranks)
            group = None
            if len(members) > 1:
                if members not in groups:
                    groups[members] = join(members, timeout_s)
                group = groups[members]
            return Axis(name, group, members.index(rank), len(members), members, clock)

        def along(
            *, pp: Iterable[int] = (), dp: Iterable[int] = (), cp: Iterable[int] = (), tp: Iterable[int] = ()
        ) -> list[int]:
            """Ranks with the given coordinates, and this rank's on all other axes."""
            found = product(list(pp) or [place.pp], list(dp) or [place.dp], list(cp) or [place.cp], list(tp) or [place.tp])
            return [RankCoordinates(*coordinates).rank(layout) for coordinates in found]

        every = {name: range(getattr(layout, name)) for name in ("pp", "dp", "cp", "tp")}
        data = along(dp=every["dp"], cp=every["cp"])
        shards = layout.shards if layout.zero else 1
        place_in_data = data.index(rank)
        mine, offset = divmod(place_in_data, shards)
        shard = data[mine * shards : (mine + 1) * shards]
        first_expert, experts = place_in_data - place_in_data % layout.ep, place_in_data % layout.ep
        copies = max(1, layout.tp // kv_heads)
        first = place.tp - place.tp % copies
        # Without ZeRO all data ranks hold the same parameters, except experts.
        begin, width = (mine * shards, shards) if layout.zero else (first_expert, layout.ep)
        held = slice(mine * shards, (mine + 1) * shards) if layout.zero else slice(place_in_data, place_in_data + 1)
        stage_parts = [
            other
            for pp, tp in product(every["pp"], every["tp"])
            for other in _data_ranks(layout, pp, tp)[begin : begin + width]
        ]
        return cls(
            layout=layout,
            rank=rank,
            place=place,
            device=torch.device(device),
            tp=axis("tp", along(tp=every["tp"])),
            cp=axis("cp", along(cp=every["cp"])),
            pp=axis("pp", along(pp=every["pp"])),
            data=axis("dp", data),
            shard=axis("zero", shard),
            replica=axis("dp", data[offset::shards]),
            ep=axis("ep", data[first_expert : first_expert + layout.ep]),
            expert_data=axis("dp", data[experts :: layout.ep]),
            expert_shard=axis("zero", shard[experts :: layout.ep] if layout.zero else [rank]),
            kv=axis("tp", along(tp=range(first, first + copies))),
            ends=_ends(axis, along(pp=[0, layout.pp - 1]), rank, layout.pp),
            stage=axis("muon", sorted(other for tp in every["tp"] for other in _data_ranks(layout, place.pp, tp)[held])),
            copies=axis("muon", data[offset::shards] if layout.zero else data),
            expert_copies=axis("muon", data[offset::shards] if layout.zero else data[experts :: layout.ep]),
            parts=axis("norm", sorted(stage_parts)),
            world=axis("world", range(layout.gpus)),
            clock=clock,
        )

    def links(self) -> dict[tuple[int, int], dist.ProcessGroup]:
        """One group per pipeline neighbour and direction, so that messages of one link never wait for those of another."""
        ring, found = self.pp.ranks, {}
        edges = [(i, (i + 1) % len(ring)) for i in range(len(ring) if len(ring) > 2 else 1)]
        for turn in range(3):
            # Neighbouring edges are in different turns, so that a rank joins at most one of them at a time.
            mine = [
                (ring[a], ring[b])
                for a, b in edges
                if (2 if len(ring) % 2 and b == 0 else a % 2) == turn and self.rank in (ring[a], ring[b])
            ]
            for direction in (0, 1):
                a, b = mine[0] if mine else (self.rank, self.rank)
                group = join(tuple(sorted({a, b})))
                if mine:
                    found[(a, b) if direction == 0 else (b, a)] = group
        return found


def group_timeout_s(timeout_s: float) -> float:
    """Timeout of collectives: twice `train.timeout_s`, so that the watchdog, whose report has more detail, fires first."""
    return 2 * timeout_s


def join(members: tuple[int, ...], timeout_s: float | None = None) -> dist.ProcessGroup:
    """Creates a process group among its members only: thousands of ranks need not wait for groups they are not in.

    torch names such a group by its members and by the number of groups a rank has created before. So all ranks must create
    the same number of groups in the same order; a rank that is in no group of a turn creates a group of one.
    """
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    group = dist.new_group(list(members), timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _ends(axis: Callable[[str, Iterable[int]], Axis], ends: list[int], rank: int, pp: int) -> Axis:
    if rank in ends:
        return axis("pp", sorted(set(ends)))
    if pp > 2:
        join((rank,))
    return axis("pp", [rank])


def _data_ranks(layout: Layout, pp: int, tp: int) -> list[int]:
    return [RankCoordinates(pp, dp, cp, tp).rank(layout) for dp in range(layout.dp) for cp in range(layout.cp)]


@dataclass(frozen=True)
class Shard:
    """A rank's part of one parameter: rows `start` … `start + length` along `dim`, or all of it.

    Initialization, reduction, norm and checkpoints read it.
    """

    name: str
    """the parameter's name in the whole model"""
    shape: tuple[int, ...]
    """shape of the whole parameter"""
    dim: int | None = None
    start: int = 0
    length: int = 0
    partial: Axis | None = None
    """ranks whose gradients of this part are partial sums: the gradient is their sum"""
    is_primary: bool = True
    """whether this copy counts in the gradient norm and is saved: one of several equal copies does"""
    rows: tuple[int, int] | None = None
    """experts under ep: the first one that this rank holds and their number, along the first dimension"""
    pieces: Axis | None = None
    """ranks over which ZeRO shards this part further, along its first dimension"""
    slices: int = 1
    """into how many slices each expert's matrix is split along the second dimension, if ZeRO has more ranks than experts"""
    copies: Axis | None = None
    """ranks that hold the same values"""

    def model_parallel_part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part under tp and ep, before ZeRO shards it."""
        part = whole if self.rows is None else whole.narrow(0, *self.rows)
        return part if self.dim is None else part.narrow(self.dim, self.start, self.length)

    def piece(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's ZeRO shard of its part, chunked like torch.chunk: the last ranks may hold fewer rows, or none."""
        part = self.model_parallel_part(whole)
        if self.slices > 1:
            part = part.reshape(len(part) * self.slices, part.shape[1] // self.slices, *part.shape[2:])
        return part if self.pieces is None else part[self._rows(len(part))]

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offsets of the ZeRO shard in the whole parameter."""
        found = [self.start if dim == self.dim else 0 for dim in range(len(self.shape))]
        count = self.length if self.dim == 0 else self.shape[0]
        if self.rows is not None:
            found[0], count = self.rows
        if self.pieces is not None:
            first, within = divmod(self._rows(count * self.slices).start, self.slices)
            found[0] += first
            if within:
                found[1] += within * (self.length if self.dim == 1 else self.shape[1]) // self.slices
        return tuple(found)

    def _rows(self, count: int) -> slice:
        assert self.pieces is not None
        each = -(-count // self.pieces.size)
        return slice(min(self.pieces.rank * each, count), min((self.pieces.rank + 1) * each, count))

    @property
    def is_matrix(self) -> bool:
        """Not a norm or a bias; those of experts are stacked."""
        return len(self.shape) > 1 and not self.name.endswith("_bias")

    @property
    def is_in_layer(self) -> bool:
        """Neither of embedding nor of head."""
        return self.name.startswith("blocks.")

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether Muon steps it: matrices of layers, neither embedding nor head; a gate of one row is a vector."""
        return self.is_matrix and self.is_in_layer and min(self.shape[-2:]) > 1
