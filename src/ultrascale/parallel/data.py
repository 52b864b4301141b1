"""Data parallelism without ZeRO: where a rank's gradients accumulate, and when they meet those of the other data ranks.

Playbook: naive (after the whole backward), a hook per parameter, buckets in backward order; reduced in every micro-batch or
only in the last. Every variant takes means, so that reducing twice what is already equal changes nothing. The law is
cost/data.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ultrascale.parallel import comm
from ultrascale.parallel.comm import AsyncCollective, Axis

Variant = Literal["naive", "hooks", "bucketed"]
Compress = Literal["none", "bf16", "int8"]
MEGABYTE = 1e6
BLOCK = 256  # numbers with one int8 scale: a scale for a whole bucket would round its small gradients to zero


class GradientReducer(ABC):
    """The gradients of one pipeline chunk: the pipeline announces every backward, the optimizer asks for the result.

    `last` says that no other backward of the chunk follows in this step; `split` that weight gradients come apart from input
    gradients, so that hooks do not see them.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        """what computes: the chunk, or what wraps it"""

    @abstractmethod
    def begin(self) -> None:
        """Before the first micro-batch: of gradients there are none."""

    @abstractmethod
    def before_backward(self, last: bool, split: bool) -> None: ...

    def after_backward(self, last: bool, split: bool) -> None:  # noqa: B027  # where nothing is left to do
        """The chunk's weight gradients of this micro-batch are made."""

    def finish(self) -> None:  # noqa: B027
        """After everything: gradients are equal on all data ranks, or each has its shard of them."""

    @abstractmethod
    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The gradient that the optimizer steps with."""

    def held(self) -> list[torch.Tensor]:
        """Memory of gradients now, for the account of a run."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]


@dataclass
class Bucket:
    """One contiguous piece of gradients: what one all-reduce carries."""

    flat: torch.Tensor
    parameters: list[nn.Parameter]
    missing: int = 0
    """parameters whose gradient this backward has not made yet"""


class SingleMicrobatchGrads(GradientReducer):
    """One micro-batch on one rank: nothing is added to a gradient, so it stays in the tensor and the format it comes in."""

    def begin(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def before_backward(self, last: bool, split: bool) -> None:
        pass

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:  # nothing of this batch came by
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def held(self) -> list[torch.Tensor]:
        return []  # at the peak of a step: they come after it, where activations were


class BucketedGrads(GradientReducer):
    """Gradients as views of contiguous buckets, reduced by hand."""

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        variant: Variant,
        dtype: torch.dtype,
        bucket_mb: float = 25.0,
        compress: Compress = "none",
        every_microbatch: bool = False,
    ) -> None:
        super().__init__(module)
        self.axis, self.variant, self.compress, self.every_microbatch = axis, variant, compress, every_microbatch
        self.armed = False
        self.under_way: list[AsyncCollective[torch.Tensor]] = []
        self.unwritten: set[nn.Parameter] = set()
        """parameters whose view still holds the last step's gradient"""
        # Backward visits the last parameter first: buckets in that order fill one after the other.
        backward_order = list(module.parameters())[::-1]
        limit = bucket_mb * MEGABYTE / dtype.itemsize if variant == "bucketed" else 1
        self.buckets = [_bucket(group, dtype) for group in _groups(backward_order, limit)]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.views = {parameter: view for bucket in self.buckets for parameter, view in _views(bucket)}
        for parameter in backward_order:
            parameter.register_post_accumulate_grad_hook(self._made)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self.unwritten = set(self.views)
        for parameter in self.views:
            parameter.grad = None

    def before_backward(self, last: bool, split: bool) -> None:
        self.armed = self.variant != "naive" and not split and self._meets(last)
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _made(self, parameter: nn.Parameter) -> None:
        self._keep(parameter)
        if self.armed:
            bucket = self.bucket_of[parameter]
            bucket.missing -= 1
            if not bucket.missing:
                self._start(bucket)

    @torch.no_grad()
    def _keep(self, parameter: nn.Parameter) -> None:
        view = self.views[parameter]
        if parameter.grad is None or parameter.grad is view:
            return
        if parameter in self.unwritten:  # written: zeros that are added to cost two passes more
            view.copy_(parameter.grad)
            self.unwritten.remove(parameter)
        else:
            view += parameter.grad
        # Autograd adds into an existing gradient of the same kind by itself.
        parameter.grad = view if view.dtype == parameter.dtype else None

    def after_backward(self, last: bool, split: bool) -> None:
        if split:
            for parameter in self.views:
                self._keep(parameter)
        for parameter in self.unwritten:
            self.views[parameter].zero_()
        self.unwritten.clear()
        if self._meets(last) and not self.armed:
            for bucket in self.buckets:
                self._start(bucket)
        self.armed = False
        if not last:
            self.finish()  # the next micro-batch adds to these

    def finish(self) -> None:
        for handle in self.under_way:
            handle.wait()
        self.under_way = []

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.views[parameter]

    def held(self) -> list[torch.Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def _meets(self, last: bool) -> bool:
        return self.axis.size > 1 and (last or self.every_microbatch)

    def _start(self, bucket: Bucket) -> None:
        self.under_way.append(mean_start(bucket.flat, self.axis, self.compress))


def _groups(parameters: Iterable[nn.Parameter], limit: float) -> list[list[nn.Parameter]]:
    """Consecutive parameters of at most `limit` elements together, at least one each."""
    groups: list[list[nn.Parameter]] = []
    size = 0.0
    for parameter in parameters:
        if not groups or size + parameter.numel() > limit:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += parameter.numel()
    return groups


def _bucket(parameters: list[nn.Parameter], dtype: torch.dtype) -> Bucket:
    total = sum(parameter.numel() for parameter in parameters)
    return Bucket(torch.zeros(total, dtype=dtype, device=parameters[0].device), parameters)


def _views(bucket: Bucket) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
    parts = torch.split(bucket.flat, [parameter.numel() for parameter in bucket.parameters])
    return ((parameter, part.view_as(parameter)) for parameter, part in zip(bucket.parameters, parts, strict=True))


def mean_start(flat: torch.Tensor, axis: Axis, compress: Compress = "none") -> AsyncCollective[torch.Tensor]:
    """The mean over the axis, in place, the numbers travelling in full, in two bytes or in one."""
    if compress == "none":
        return comm.all_reduce_start(flat, axis, "mean")
    if compress == "bf16":
        return comm.all_reduce_start(flat.bfloat16(), axis, "mean").then(flat.copy_)
    return _eight_bits_start(flat, axis)


def _eight_bits_start(flat: torch.Tensor, axis: Axis) -> AsyncCollective[torch.Tensor]:
    """A reduce-scatter and an all-gather of bytes: slices meet in fp32 and are rounded once on either way."""
    blocks = -(-flat.numel() // (axis.size * BLOCK))
    padded = flat.new_zeros(axis.size * blocks * BLOCK)
    padded[: flat.numel()] = flat
    codes, scales = _quantised(padded.view(-1, BLOCK))
    met = comm.all_to_all(codes, axis, 0, 0).float() * comm.all_to_all(scales, axis, 0, 0)
    code, scale = _quantised(met.view(axis.size, blocks, BLOCK).mean(dim=0))
    whole = comm.all_gather(code, axis).float() * comm.all_gather(scale, axis)
    flat.copy_(whole.view(-1)[: flat.numel()])
    return comm.done(flat, axis)


def _quantised(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as int8 and its scale."""
    scales = rows.abs().amax(dim=1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (rows / scales).round().to(torch.int8), scales


class DDPGrads(GradientReducer):
    """torch's own DistributedDataParallel, for comparison. It wants a word before the backward that reduces."""

    def __init__(self, module: nn.Module, axis: Axis, bucket_mb: float, every_microbatch: bool) -> None:
        self.ddp = nn.parallel.DistributedDataParallel(
            module, process_group=axis.group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        super().__init__(self.ddp)
        self.every_microbatch = every_microbatch
        # A pipeline's forwards run ahead of its backwards: which of them reduces is said at the backward.
        self.ddp.require_backward_grad_sync = False

    def begin(self) -> None:
        for parameter in self.ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def before_backward(self, last: bool, split: bool) -> None:
        if last or self.every_microbatch:
            # DDP rebuilds its buckets in the forward after the first reduction; here another reduction may come first.
            self.ddp.reducer._rebuild_buckets()
            self.ddp.reducer.prepare_for_backward([])

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad
