"""DistributedDataParallel for a rank without peers: torch's buckets and all-reduces, without its C++ reducer.

The reducer copies bytes by address, which tensors without memory do not have. Buckets follow its rule: one with all gradients
in the first backward, then in the order in which gradients were ready, the first of 1 MiB and the others of `bucket_cap_mb`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ultrascale.measure.foreign.request import CannotRehearseError
from ultrascale.parallel.torch_private import after_backward

MIB = 2**20
FIRST_MIB, DEFAULT_MIB = 1, 25


class DDPBucket:
    """Gradients that are reduced together, in a buffer that outlives the step."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.buffer = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
        parts = self.buffer.split(sizes)  # type: ignore[no-untyped-call]
        self.views = {id(one): part.view(one.shape) for one, part in zip(parameters, parts, strict=True)}
        self.parameters, self.ready = parameters, 0


def assign(parameters: Sequence[nn.Parameter], first_bytes: float, most_bytes: float) -> list[list[nn.Parameter]]:
    """A bucket is closed by the gradient with which it reaches its limit; gradients of one dtype share buckets."""
    found: list[list[nn.Parameter]] = []
    open_by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    limits: dict[torch.dtype, float] = {}
    for parameter in parameters:
        kind = parameter.dtype
        bucket = open_by_dtype.setdefault(kind, [])
        bucket.append(parameter)
        if sum(one.nbytes for one in bucket) >= limits.get(kind, first_bytes):
            found.append(open_by_dtype.pop(kind))
            limits[kind] = most_bytes
    return [*found, *open_by_dtype.values()]


class BucketedDataParallel(nn.Module):
    """Takes the place of torch.nn.parallel.DistributedDataParallel, with its constructor."""

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Asked by torch.compile."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        device_mesh: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        self.module, self.broadcast_buffers = module, broadcast_buffers
        self.process_group = process_group if device_mesh is None else device_mesh.get_group(0)
        self.as_view, self.find_unused = gradient_as_bucket_view, find_unused_parameters
        self.limits = (bucket_cap_mb or FIRST_MIB) * MIB, (bucket_cap_mb or DEFAULT_MIB) * MIB
        self.require_backward_grad_sync, self._rebuilt, self._queued = True, False, False
        self._order: list[nn.Parameter] = []
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if find_unused_parameters and not static_graph:  # never rebuilt
            self._rebuilt = True
            self._use(assign(trained, *self.limits)[::-1])
        else:
            self._use(assign(trained, float("inf"), float("inf")))
        if init_sync:
            self._broadcast([*module.parameters(), *module.buffers()])
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.require_backward_grad_sync:
            self._broadcast(list(self.module.buffers()))
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Any) -> None:
        raise CannotRehearseError("a communication hook of DistributedDataParallel cannot be rehearsed: remove it")

    def _use(self, groups: list[list[nn.Parameter]]) -> None:
        self.buckets = [DDPBucket(group) for group in groups]
        self._bucket_of = {id(parameter): bucket for bucket in self.buckets for parameter in bucket.parameters}

    @torch.no_grad()
    def _broadcast(self, tensors: list[Tensor]) -> None:
        tensors.sort(key=lambda one: str(one.dtype))
        for _, alike in groupby(tensors, lambda one: one.dtype):
            dist.broadcast(torch.cat([one.detach().reshape(-1) for one in alike]), 0, self.process_group)

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        if not self.require_backward_grad_sync:
            return
        if not self._rebuilt:
            self._order.append(parameter)  # type: ignore[arg-type]
        if not self._queued:
            self._queued = True
            after_backward(self._finish)
        bucket = self._bucket_of[id(parameter)]
        view = bucket.views[id(parameter)]
        assert parameter.grad is not None
        if parameter.grad.untyped_storage() is not view.untyped_storage():
            view.copy_(parameter.grad)
            if self.as_view:
                parameter.grad = view
        bucket.ready += 1
        if bucket.ready == len(bucket.parameters):
            self._reduce(bucket)

    def _reduce(self, bucket: DDPBucket) -> None:
        bucket.buffer.div_(dist.get_world_size(self.process_group))
        dist.all_reduce(bucket.buffer, group=self.process_group)
        bucket.ready = -1

    @torch.no_grad()
    def _finish(self) -> None:
        """Reduces buckets of unused parameters, and copies the means back."""
        self._queued = False
        if self.find_unused:
            used = torch.zeros(len(self._bucket_of), dtype=torch.int32, device=self.buckets[0].buffer.device)
            dist.all_reduce(used, group=self.process_group)
        for bucket in self.buckets:
            if bucket.ready >= 0:
                self._reduce(bucket)
            bucket.ready = 0
            for parameter in bucket.parameters:
                if parameter.grad is not None and not self.as_view:
                    parameter.grad.copy_(bucket.views[id(parameter)])
        if not self._rebuilt:
            self._use(assign(self._order, *self.limits))
            self._rebuilt = True
