"""The other ranks, which do not exist: process groups of torch's `fake` backend whatever the program asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.nn import parallel

from ultrascale.measure.foreign.ddp import BucketedDataParallel
from ultrascale.measure.foreign.gpu import on_cpu, replace_everywhere
from ultrascale.parallel.torch_private import coalescing_manager, fake_store, unset_fake_temporarily


def without_peers(rank: int, world: int, on_gpu: bool = False) -> None:
    """Replaces functions of torch.distributed in this process."""
    init, new_group = dist.init_process_group, dist.new_group

    @functools.wraps(init)
    def init_process_group(*_: Any, **__: Any) -> None:
        init("fake", store=fake_store(), rank=rank, world_size=world)

    @functools.wraps(new_group)
    def new_fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return new_group(ranks, timeout, None, *args, **kwargs)

    own = (all_gather_object, broadcast_object_list, gather_object, scatter_object_list, monitored_barrier, is_nccl_available)
    meshes = device_mesh.init_device_mesh
    replace_everywhere(
        [
            (init, init_process_group),
            (new_group, new_fake_group),
            (meshes, _outside(meshes)),
            (coalescing_manager, one_by_one),
            (parallel.DistributedDataParallel, BucketedDataParallel),
            *((getattr(dist, one.__name__), one) for one in own),
        ]
    )
    if not on_gpu:
        _meshes_with_values()


def _outside(inner: Callable[..., Any]) -> Callable[..., Any]:
    """The function with tensors that have values."""

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return inner(*args, **kwargs)

    return outer


def _meshes_with_values() -> None:
    """A DeviceMesh computes with the numbers of ranks: its tensors keep their values."""
    mesh = device_mesh.DeviceMesh
    build = mesh.__init__

    @functools.wraps(build)
    def build_on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            build(self, on_cpu(device_type), *args, **kwargs)

    mesh.__init__ = build_on_cpu  # type: ignore[method-assign]
    for name, found in list(vars(mesh).items()):
        if name in _PLAIN:
            continue
        if isinstance(found, staticmethod):
            setattr(mesh, name, staticmethod(_outside(found.__func__)))
        elif isinstance(found, property) and name == "mesh":
            setattr(mesh, name, property(_outside(found.fget)))  # type: ignore[arg-type]
        elif isinstance(found, FunctionType):
            setattr(mesh, name, _outside(found))


_PLAIN = {"__init__", "__enter__", "__exit__", "__hash__", "__eq__", "size", "get_group", "get_rank"}
"""methods of a DeviceMesh that compute with no tensor, or (the first) are replaced already"""


class _Done:
    def __init__(self) -> None:
        self.works: list[Any] = []

    def wait(self) -> None:
        pass


@contextmanager
def one_by_one(*_: Any, **__: Any) -> Iterator[_Done]:
    """In the place of a coalescing manager: torch has no collectives of several tensors without memory."""
    yield _Done()


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    object_list[:] = [obj] * len(object_list)


def broadcast_object_list(object_list: list[Any], *_: Any, **__: Any) -> None:
    pass


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if object_gather_list is not None:
        object_gather_list[:] = [obj] * len(object_gather_list)


def scatter_object_list(output: list[Any], given: list[Any] | None = None, *_: Any, **__: Any) -> None:
    output[0] = given[dist.get_rank()] if given else None


def monitored_barrier(*_: Any, **__: Any) -> None:
    pass


def is_nccl_available() -> bool:
    return True
