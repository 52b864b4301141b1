"""Collectives against their definition, in three processes; autograd forms against the same sums in one process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.launch import local
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis

SIZE = 3
torch.set_num_threads(1)


def in_ranks(check: Callable[..., Any], *arguments: Any) -> list[Any]:
    return local.run(_rank, SIZE, check, arguments, timeout_s=60)


def _rank(rank: int, nproc: int, store: str, check: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    warnings.simplefilter("error", FutureWarning)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    try:
        return check(Axis("tp", dist.group.WORLD, rank, nproc, tuple(range(nproc))), *arguments)
    finally:
        dist.destroy_process_group()


def values(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[2, 6, 3]: whole numbers, so that sums are exact in every type."""
    return (torch.arange(36).view(2, 6, 3) + 7 * rank).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_compute_their_results(dtype: torch.dtype) -> None:
    for rank, result in enumerate(in_ranks(_collectives, dtype)):
        inputs = [values(other, dtype) for other in range(SIZE)]
        total = torch.stack(inputs).sum(0)
        assert torch.equal(result["sum"], total)
        assert torch.equal(result["max"], inputs[-1])
        assert torch.equal(result["gather"], torch.cat(inputs, 1))
        assert torch.equal(result["gather_last"], torch.cat(inputs, -1))
        assert torch.equal(result["scatter"], total[:, 2 * rank : 2 * rank + 2])
        assert torch.equal(result["switch"], torch.cat([one[:, 2 * rank : 2 * rank + 2] for one in inputs], 2))
        assert torch.equal(result["shift"], inputs[rank - 1])


def _collectives(axis: Axis, dtype: torch.dtype) -> dict[str, Tensor]:
    x = values(axis.rank, dtype)
    in_place = x.clone()
    assert comm.all_reduce(in_place, axis) is in_place
    return {
        "sum": in_place,
        "max": comm.all_reduce(x.clone(), axis, "max"),
        "gather": comm.all_gather(x, axis, 1),
        "gather_last": comm.all_gather(x, axis, -1),
        "scatter": comm.reduce_scatter(x, axis, 1),
        "switch": comm.all_to_all(x, axis, 1, 2),
        "shift": comm.shift_start([x], axis).wait()[0],
    }


def test_the_ring_of_a_group_passes_over_other_ranks() -> None:
    """Ranks 0 and 2 are an axis, rank 1 another: places on the axis are not global ranks."""
    assert in_ranks(_shifted_in_group) == [2.0, 1.0, 0.0]


def _shifted_in_group(world: Axis) -> float:
    group = dist.new_group([0, 2])
    x = torch.tensor([float(world.rank)])
    place = world.rank // 2
    axis = Axis("cp", None, 0, 1, (1,)) if world.rank == 1 else Axis("cp", group, place, 2, (0, 2))
    return comm.shift_start([x], axis).wait()[0].item()


def test_started_collectives_end_in_any_order() -> None:
    for first, second in in_ranks(_two_started):
        assert first.tolist() == [3.0]
        assert second.tolist() == [0.0, 1.0, 2.0]


def _two_started(axis: Axis) -> tuple[Tensor, Tensor]:
    x = torch.tensor([float(axis.rank)])
    summed, gathered = comm.all_reduce_start(x.clone(), axis), comm.all_gather_start(x, axis)
    second = gathered.wait()
    assert gathered.wait() is second
    return summed.wait(), second


def test_clock_records_the_wait_for_a_late_rank() -> None:
    seconds = in_ranks(_late)
    assert seconds[0]["tp"] > 0.25
    assert seconds[1]["tp"] < seconds[0]["tp"]


def _late(axis: Axis) -> dict[str, float]:
    comm.all_reduce(torch.ones(1), axis)
    axis.clock.take()
    time.sleep(0.5 if axis.rank == 1 else 0.0)
    comm.all_reduce(torch.ones(1), axis)
    seconds = axis.clock.take()
    assert axis.clock.take() == {}
    return seconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_through_the_transposed_collective(dtype: torch.dtype) -> None:
    """Each rank's loss is <f(x), w>; the expected gradients are the transposes written out."""
    weights = [values(rank, dtype) for rank in range(SIZE)]
    total = torch.stack(weights).sum(0)
    for rank, result in enumerate(in_ranks(_gradients, dtype)):
        rows = slice(2 * rank, 2 * rank + 2)
        assert torch.equal(result["copy_to"], total)
        assert torch.equal(result["reduce_from"], weights[rank])
        assert torch.equal(result["gather_from"], total[:, rows])
        assert torch.equal(result["scatter_to"], torch.cat(weights, 1))
        assert torch.equal(result["switch"], torch.cat([one[:, rows] for one in weights], 2))


def _gradients(axis: Axis, dtype: torch.dtype) -> dict[str, Tensor | None]:
    weight = values(axis.rank, dtype)
    shapes = {"copy_to": (2, 6, 3), "reduce_from": (2, 6, 3), "gather_from": (2, 2, 3), "scatter_to": (2, 18, 3)}
    found: dict[str, Tensor | None] = {}
    for name, shape in shapes.items():
        x = torch.ones(shape, dtype=dtype, requires_grad=True)
        function = getattr(comm, name)
        y = function(x, axis) if name in ("copy_to", "reduce_from") else function(x, axis, 1)
        (y * weight).sum().backward()
        assert x.detach().eq(1).all(), f"{name} changed its input"
        found[name] = x.grad
    x = torch.ones(2, 2, 9, dtype=dtype, requires_grad=True)
    (comm.switch(x, axis, 2, 1) * weight).sum().backward()
    return found | {"switch": x.grad}


def test_an_axis_of_one_is_the_identity() -> None:
    axis, x = Axis("tp", None, 0, 1, (0,)), values(0)
    for same in (
        comm.all_reduce(x, axis),
        comm.all_gather(x, axis, 1),
        comm.reduce_scatter(x, axis, 1),
        comm.all_to_all(x, axis, 1, 2),
        comm.copy_to(x, axis),
        comm.reduce_from(x, axis),
        comm.gather_from(x, axis, 1),
        comm.scatter_to(x, axis, 1),
        comm.switch(x, axis, 1, 2),
    ):
        assert same is x
    assert axis.clock.take() == {}
