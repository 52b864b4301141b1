"""Data parallelism without ZeRO: gradient accumulation and the all-reduce over data ranks.

Variants of the playbook: naive (after the whole backward), a hook per parameter, buckets in backward order; reduced in every
micro-batch or only in the last. Every variant takes means, so that reducing gradients that are already equal changes nothing.
The cost model is cost/communication.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from ultrascale.parallel import comm
from ultrascale.parallel.comm import AsyncCollective, Axis
from ultrascale.parallel.torch_private import prepare_ddp_backward
from ultrascale.specs.units import groups_up_to

BucketReduction = Literal["naive", "hooks", "bucketed"]
Compress = Literal["none", "bf16", "int8"]
MEGABYTE = 1e6
BLOCK = 256  # elements per int8 scale: one scale for a whole bucket would round its small gradients to zero


class GradientReducer(ABC):
    """Accumulates and reduces the gradients of one pipeline chunk. The pipeline calls it around every backward.

    `last`: no other backward of the chunk follows in this step. `split`: weight gradients are separate from input
    gradients, outside autograd, so that gradient hooks do not fire.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        """the chunk, or the wrapper to call in its place"""

    @abstractmethod
    def begin(self) -> None:
        """Clears gradients; called before the first micro-batch of a step."""

    def before_backward(self, last: bool, split: bool) -> None:  # noqa: B027  # some reducers have nothing to do
        pass

    def after_backward(self, last: bool, split: bool) -> None:  # noqa: B027
        """Called when the chunk's weight gradients of this micro-batch are computed."""

    def finish(self) -> None:  # noqa: B027
        """Waits for reductions. After it, gradients are equal on all data ranks, or each rank has its shard of them."""

    @abstractmethod
    def grad_for(self, parameter: nn.Parameter) -> torch.Tensor:
        """The gradient for the optimizer step."""

    def reshard(self) -> None:  # noqa: B027
        """Called after an evaluation: frees parameters that it gathered, which the next update makes stale."""

    def allocated(self) -> list[torch.Tensor]:
        """Gradient tensors in memory now, for the memory report."""
        return [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]


@dataclass
class Bucket:
    """A contiguous buffer of gradients, reduced by one all-reduce."""

    flat: torch.Tensor
    parameters: list[nn.Parameter]
    axis: Axis
    """the ranks that it is reduced over"""
    missing: int = 0
    """parameters whose gradient this backward has not computed yet"""


class SingleMicrobatchGrads(GradientReducer):
    """One micro-batch on one rank: nothing is accumulated or reduced, so gradients stay in autograd's tensors and dtype."""

    def begin(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def grad_for(self, parameter: nn.Parameter) -> torch.Tensor:
        if parameter.grad is None:  # the parameter was not used in this batch, or is a router's bias, which has no gradient
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def allocated(self) -> list[torch.Tensor]:
        return []  # none at peak memory: gradients are allocated after it, in memory that activations have freed


class BucketedGrads(GradientReducer):
    """Gradients as views of contiguous buckets, all-reduced by hooks or after backward."""

    def __init__(
        self,
        module: nn.Module,
        axis: Axis,
        variant: BucketReduction,
        dtype: torch.dtype,
        bucket_mb: float = 25.0,
        compress: Compress = "none",
        every_microbatch: bool = False,
        experts: Sequence[nn.Parameter] = (),
        expert_axis: Axis | None = None,
    ) -> None:
        """`experts`: parameters that are reduced over `expert_axis` instead of `axis`, in buckets of their own."""
        super().__init__(module)
        self.variant, self.compress, self.every_microbatch = variant, compress, every_microbatch
        self.reduce_in_hooks = False
        self.pending: list[AsyncCollective[torch.Tensor]] = []
        self.unwritten: set[nn.Parameter] = set()
        """parameters whose view still has the last step's gradient"""
        # Backward reaches the last parameter first: buckets in that order are completed one after the other.
        backward_order = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
        limit = bucket_mb * MEGABYTE / dtype.itemsize if variant == "bucketed" else 1
        expert_ids = {id(parameter) for parameter in experts}
        own, rest = ([one for one in backward_order if (id(one) in expert_ids) == is_own] for is_own in (True, False))
        self.buckets = [_bucket(group, dtype, expert_axis or axis) for group in groups_up_to(limit, own, nn.Parameter.numel)]
        self.buckets += [_bucket(group, dtype, axis) for group in groups_up_to(limit, rest, nn.Parameter.numel)]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        self.views = {parameter: view for bucket in self.buckets for parameter, view in _views(bucket)}
        for parameter in backward_order:
            parameter.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        self.unwritten = set(self.views)
        for parameter in self.views:
            parameter.grad = None

    def before_backward(self, last: bool, split: bool) -> None:
        self.reduce_in_hooks = self.variant != "naive" and not split and self._reduces(last)
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def _on_grad(self, parameter: nn.Parameter) -> None:
        self._accumulate(parameter)
        if self.reduce_in_hooks:
            bucket = self.bucket_of[parameter]
            bucket.missing -= 1
            if not bucket.missing:
                self._start(bucket)

    @torch.no_grad()
    def _accumulate(self, parameter: nn.Parameter) -> None:
        view = self.views[parameter]
        if parameter.grad is None or parameter.grad is view:
            return
        # The first is copied: zeroing and adding would cost two more passes over memory.
        _add(view, parameter.grad, copied=parameter in self.unwritten)
        self.unwritten.discard(parameter)
        # Autograd itself accumulates into an existing gradient of the same dtype.
        parameter.grad = view if view.dtype == parameter.dtype else None

    def after_backward(self, last: bool, split: bool) -> None:
        if split:
            for parameter in self.views:
                self._accumulate(parameter)
        for parameter in self.unwritten:
            self.views[parameter].zero_()
        self.unwritten.clear()
        if self._reduces(last) and not self.reduce_in_hooks:
            for bucket in self.buckets:
                self._start(bucket)
        self.reduce_in_hooks = False
        if not last:
            self.finish()  # the next micro-batch accumulates into the same buckets

    def finish(self) -> None:
        for handle in self.pending:
            handle.wait()
        self.pending = []

    def grad_for(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.views[parameter]

    def allocated(self) -> list[torch.Tensor]:
        return [bucket.flat for bucket in self.buckets]

    def _reduces(self, last: bool) -> bool:
        return last or self.every_microbatch

    def _start(self, bucket: Bucket) -> None:
        if bucket.axis.size > 1:
            self.pending.append(mean_start(bucket.flat, bucket.axis, self.compress))


def _add(total: torch.Tensor, gradient: torch.Tensor, copied: bool) -> None:
    if total.is_cuda and total.dtype != gradient.dtype and gradient.is_contiguous():
        from ultrascale.kernels import cast_triton

        cast_triton.copy([total], [gradient], add=not copied)
    elif copied:
        total.copy_(gradient)
    else:
        total += gradient


def _bucket(parameters: list[nn.Parameter], dtype: torch.dtype, axis: Axis) -> Bucket:
    total = sum(parameter.numel() for parameter in parameters)
    return Bucket(torch.zeros(total, dtype=dtype, device=parameters[0].device), parameters, axis)


def _views(bucket: Bucket) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
    parts = torch.split(bucket.flat, [parameter.numel() for parameter in bucket.parameters])
    return ((parameter, part.view_as(parameter)) for parameter, part in zip(bucket.parameters, parts, strict=True))


def mean_start(flat: torch.Tensor, axis: Axis, compress: Compress = "none") -> AsyncCollective[torch.Tensor]:
    """Starts an in-place mean over the axis, sent in full precision, in bf16 or in int8."""
    if compress == "none":
        return comm.all_reduce_start(flat, axis, "mean")
    if compress == "bf16":
        return comm.all_reduce_start(flat.bfloat16(), axis, "mean").then(flat.copy_)
    return _int8_mean_start(flat, axis)


def _int8_mean_start(flat: torch.Tensor, axis: Axis) -> AsyncCollective[torch.Tensor]:
    """A reduce-scatter and an all-gather in int8: slices are averaged in fp32 and rounded once before each collective."""
    blocks = -(-flat.numel() // (axis.size * BLOCK))
    padded = flat.new_zeros(axis.size * blocks * BLOCK)
    padded[: flat.numel()] = flat
    codes, scales = _quantize(padded.view(-1, BLOCK))
    received = comm.all_to_all(codes, axis, 0, 0).float() * comm.all_to_all(scales, axis, 0, 0)
    code, scale = _quantize(received.view(axis.size, blocks, BLOCK).mean(dim=0))
    whole = comm.all_gather(code, axis).float() * comm.all_gather(scale, axis)
    flat.copy_(whole.view(-1)[: flat.numel()])
    return comm.completed(flat, axis)


def _quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row as int8 and its scale."""
    scales = rows.abs().amax(dim=1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (rows / scales).round().to(torch.int8), scales


class DDPGrads(GradientReducer):
    """torch's DistributedDataParallel, for comparison. Its reducer must be prepared before the backward that reduces."""

    def __init__(self, module: nn.Module, axis: Axis, bucket_mb: float, every_microbatch: bool) -> None:
        self.ddp = nn.parallel.DistributedDataParallel(
            module, process_group=axis.group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
        )
        super().__init__(self.ddp)
        self.every_microbatch = every_microbatch
        # A pipeline runs forwards ahead of backwards, so the sync is enabled before the backward, not in the forward.
        self.ddp.require_backward_grad_sync = False

    def begin(self) -> None:
        for parameter in self.ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()

    def before_backward(self, last: bool, split: bool) -> None:
        if last or self.every_microbatch:
            prepare_ddp_backward(self.ddp)

    def grad_for(self, parameter: nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        return parameter.grad
