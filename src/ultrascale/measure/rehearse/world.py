"""A world with one rank in it: process groups whose collectives do nothing, and tensors that have no memory.

What the engine would read from a tensor has no value here. Losses and norms are read as zero, and numbers of rows that experts
take as if every expert were chosen equally often.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ultrascale.measure.rehearse.fake import QuickFakeTensorMode
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.mesh import Mesh, join
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout

_ABSENT = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def single_rank_world(rank: int, world: int) -> Iterator[None]:
    """This process as one rank of a world whose others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def without_memory(routed: int) -> Iterator[QuickFakeTensorMode]:
    """Tensors made here have shapes and storages of a size, but no bytes. `routed`: rows that a rank's experts take."""

    def tolist(tensor: FakeTensor) -> Any:
        if tensor.dim() > 1:
            return [tolist(row) for row in tensor]
        if tensor.is_floating_point():
            return [0.0] * len(tensor)
        return even(routed, len(tensor))

    with replaced(FakeTensor, "tolist", tolist), QuickFakeTensorMode() as fake:
        yield fake


def unconnected_groups(mesh: Mesh) -> tuple[Mesh, dict[str, str]]:
    """The mesh with groups of its own for each technique, where ranks that are the same share one; and whose each group is."""
    data = "zero" if mesh.layout.zero else "data"
    owners = {
        **dict.fromkeys(("tp", "kv"), "tensor"),
        "cp": "context",
        "ep": "expert",
        **dict.fromkeys(("pp", "ends"), "pipeline"),
        **dict.fromkeys(("data", "shard", "replica", "expert_data", "expert_shard"), data),
        **dict.fromkeys(("parts", "world"), "bookkeeping"),
    }
    groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
    axes: dict[str, Any] = {}
    for name, technique in owners.items():
        axis: Axis = getattr(mesh, name)
        if axis.group is not None:
            key = technique, axis.ranks
            groups[key] = groups.get(key) or join(axis.ranks)
            axes[name] = replace(axis, group=groups[key])
    return replace(mesh, **axes), {group.group_name: technique for (technique, _), group in groups.items()}


def even(rows: int, takers: int) -> list[int]:
    """So many rows over so many takers, the first of whom take what is left over."""
    each, rest = divmod(rows, takers)
    return [each + (taker < rest) for taker in range(takers)]


def routed_rows(job: Job, layout: Layout) -> int:
    """Rows that leave a rank for experts in one layer, and come to it where all experts are chosen alike."""
    return layout.mbs * job.seq // layout.cp * (job.model.moe.top_k if job.model.moe else 1)


class ConstantBatches:
    """Batches of tokens that are all the same: what a rehearsal computes depends on their number alone."""

    def __init__(self, seq: int) -> None:
        self.seq = seq

    def train(self, step: int, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.zeros(len(rows), self.seq, dtype=torch.int64) for _ in range(2))  # type: ignore[return-value]
