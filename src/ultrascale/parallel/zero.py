"""ZeRO stages 1, 2 and 3, HSDP and CPU offload, implemented with torch's FSDP2.

| stage | parameters gathered         | gradients scattered      |
|-------|-----------------------------|--------------------------|
| 1     | once a step                 | in the last micro-batch  |
| 2     | once a step                 | in every micro-batch     |
| 3     | before each layer's passes  | in every micro-batch     |

Shards are the fp32 weights; gathered weights have the compute dtype, or fp8 for fp8 GEMMs (`Float8GatherScales`). The cost
model is cost/communication.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ultrascale.kernels.float8_gemm import E4M3, Float8Weight, power_of_two_scale
from ultrascale.kernels.fused import FusedBlock
from ultrascale.model.transformer import PredictionBlock, Transformer
from ultrascale.parallel import comm, torch_private
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.data import GradientReducer
from ultrascale.parallel.expert_layer import ParallelExperts
from ultrascale.parallel.mesh import Mesh, Shard, join
from ultrascale.parallel.torch_private import foreach_norm, local_tensor

SCALE_STRIDE = 4  # fp32 numbers: cuBLAS needs a scale at an address that is a multiple of 16


def apply(model: Transformer, mesh: Mesh, shards: dict[str, Shard], compute: torch.dtype, reduce: torch.dtype) -> None:
    """Shards every block and then the rest, in place, and records sliced experts in `shards`.

    The model may be on the meta device.
    """
    _slice_experts(model, mesh.expert_shard.size if mesh.ep.size > 1 else mesh.shard.size, shards)
    layout = mesh.layout
    formats = (
        MixedPrecisionPolicy() if compute == torch.float32 else MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False)
    )
    options: dict[str, Any] = {"mesh": _device_mesh(mesh, mesh.shard), "mp_policy": formats, "offload_policy": _offload(mesh)}
    reshard = layout.zero == 3 and not layout.keep_gathered
    if mesh.ep.size > 1:  # experts are sharded over fewer ranks: those that hold the same experts
        expert_options = {**options, "mesh": _device_mesh(mesh, mesh.expert_shard)}
        for mlp in model.moe_layers().values():
            fully_shard(mlp.experts, reshard_after_forward=reshard, **expert_options)
    blocks: list[FSDPModule] = [fully_shard(block, reshard_after_forward=reshard, **options) for block in model.each_block()]
    predicting = [block for block in blocks if isinstance(block, PredictionBlock)]
    groups = [block for block in blocks if block not in predicting]
    embedding = model.embedding
    if not (model.model.tied_embeddings and embedding is not None and model.head is not None):
        if embedding is not None:
            embed = fully_shard(embedding, reshard_after_forward=reshard, **options)
            embed.set_unshard_in_backward(False)  # which does not need its weight
            groups.insert(0, embed)
        if model.head is not None:  # stays gathered: backward begins with it
            groups.append(fully_shard(model.head, reshard_after_forward=False, **options))
    groups += predicting  # which run within the head
    fully_shard(model, reshard_after_forward=False, **options)  # a tied embedding is in the root's group
    for group, following in pairwise(groups):
        group.set_modules_to_forward_prefetch([following])
    torch_private.fsdp_gather_in_place(model, torch_private.foreach_copy_)


def gather_joined(model: Transformer, ranks: int, compute: torch.dtype) -> None:
    """Makes the gathered weights of each joined GEMM of fused blocks contiguous; otherwise the GEMM would concatenate them.

    Called after the shards have been moved to their device. Where ranks have unequal shards, padding separates the weights.
    """
    for block in model.each_block():
        if isinstance(block, FusedBlock):
            for linears in block.joined_linears():
                weights = list(linears.parameters())
                if not any(len(weight) % ranks for weight in weights):
                    torch_private.fsdp_gather_joined(block, weights, compute)


def cast_by_triton(model: Transformer) -> None:
    """On a GPU: our kernel casts shards into an all-gather, and gradients into the input of a reduce-scatter."""
    from ultrascale.kernels import cast_triton

    def copy_in(gradients: Sequence[Tensor], out: Tensor) -> bool:
        fits = cast_triton.fits(gradients, len(out))
        if fits:
            cast_triton.chunk_cat(gradients, out)
        return fits

    torch_private.fsdp_copy_in(copy_in)
    torch_private.fsdp_gather_in_place(model, cast_triton.copy)


def _slice_experts(model: Transformer, ranks: int, shards: dict[str, Shard]) -> None:
    """Slices each expert's matrices if there are more ranks than experts.

    FSDP2 shards the first dimension, which for experts is their number: a rank without an expert would hold padding as large
    as one.
    """
    for index, mlp in model.moe_layers().items():
        plain = mlp.experts
        slices, rest = divmod(ranks, len(plain.down))
        if slices < 2 or rest or any(parameter.shape[1] % slices for parameter in plain.parameters()):
            continue
        experts = ParallelExperts.of(mlp)
        experts.slice(slices)
        for leaf, _ in experts.named_parameters():
            name = f"blocks.{index}.mlp.experts.{leaf}"
            shards[name] = replace(shards[name], slices=slices)


def _device_mesh(mesh: Mesh, shard: Axis) -> DeviceMesh:
    kind = mesh.device.type
    group = shard.group or join((mesh.rank,))  # FSDP2 needs a group even for one rank
    if mesh.replica.group is None:
        return DeviceMesh.from_group(group, kind)
    ranks = torch.tensor(shard.ranks)
    first = mesh.replica.rank * mesh.shard.size * mesh.tp.size  # the ranks of one replica follow those of another
    data = torch.stack([ranks - first + place * mesh.shard.size * mesh.tp.size for place in range(mesh.replica.size)])
    return DeviceMesh.from_group([mesh.replica.group, group], kind, mesh=data, mesh_dim_names=("replica", "shard"))


def _offload(mesh: Mesh) -> OffloadPolicy:
    if mesh.layout.offload != "parameters":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")


class FSDPGrads(GradientReducer):
    """Gradients that FSDP2 reduce-scatters."""

    def __init__(self, module: Transformer, mesh: Mesh, every_microbatch: bool = False) -> None:
        super().__init__(module)
        assert isinstance(module, FSDPModule)
        self.fsdp: FSDPModule = module
        self.ends: list[nn.Module] = [
            one for one in (module.embedding, module.head) if one is not None and isinstance(one, FSDPModule)
        ]
        self.gather_again = mesh.layout.zero == 3
        self.every_microbatch = every_microbatch or mesh.layout.zero >= 2
        self.all_reduce_at_step_end = not every_microbatch
        """HSDP replicas are all-reduced once a step, however often shards are reduce-scattered"""

    def begin(self) -> None:
        for parameter in (*self.shards(), *self.unsharded()):
            parameter.grad = None
        torch_private.fsdp_begin_step(self.module)

    def before_backward(self, last: bool, split: bool) -> None:
        in_one = not split
        torch_private.fsdp_no_prefetch_beyond_first(self.module)
        self._set(
            sync=in_one and (last or self.every_microbatch),
            last=last and in_one,
            reshard=self.gather_again or (last and in_one),
        )

    def after_backward(self, last: bool, split: bool) -> None:
        if not split:
            return
        for parameter in self._parameters():  # as FSDP2 does after a backward: accumulated in the reduce dtype
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
        if last or self.every_microbatch:
            self._set(sync=True, last=last, reshard=self.gather_again or last)
            # A reduce-scatter covers only weights that have gradients, not always all: partial sums of different weights cannot
            # be all-reduced together later.
            self.fsdp.set_requires_all_reduce(True)
            torch_private.fsdp_post_backward(self.module, self.ends)

    def reshard(self) -> None:
        for group in torch_private.fsdp_param_groups(self.module):
            group.reshard()

    def grad_for(self, parameter: nn.Parameter) -> torch.Tensor:
        assert isinstance(parameter.grad, DTensor)
        return parameter.grad.to_local()

    def allocated(self) -> list[torch.Tensor]:
        # Not through the module: while parameters are gathered, its parameters have no gradients.
        shards = [parameter.sharded_param.grad for parameter in self._parameters()]
        waiting = map(torch_private.fsdp_unreduced, torch_private.fsdp_param_groups(self.module))
        return [shard for shard in (*shards, *waiting) if shard is not None]

    def gathered(self) -> list[torch.Tensor]:
        """Buffers of gathered parameters, empty between uses, for the memory report."""
        return [output for parameter in self._parameters() for output in parameter.all_gather_outputs]

    @property
    def converts(self) -> bool:
        """Whether gradients are reduced in another dtype than backward computes them in."""
        return any(parameter.reduce_dtype not in (None, parameter.param_dtype) for parameter in self._parameters())

    def accumulated(self) -> list[torch.Tensor]:
        """Unsharded gradients of earlier micro-batches that FSDP2 accumulates in another dtype than backward's."""
        found = [parameter.unsharded_accumulated_grad for parameter in self._parameters()]
        return [gradient for gradient in found if gradient is not None]

    def shards(self) -> list[nn.Parameter]:
        """This rank's shards of the parameters, whose gradients are the output of the reduce-scatter."""
        return [parameter.sharded_param for parameter in self._parameters()]

    def unsharded(self) -> list[nn.Parameter]:
        """The gathered parameters, whose gradients backward computes before the reduce-scatter."""
        return torch_private.fsdp_gathered_parameters(self.module)

    def _parameters(self) -> Iterator[Any]:
        for group in torch_private.fsdp_param_groups(self.module):
            yield from group.fsdp_params

    def _set(self, sync: bool, last: bool, reshard: bool) -> None:
        self.fsdp.set_requires_gradient_sync(sync)
        self.fsdp.set_requires_all_reduce(last or not self.all_reduce_at_step_end)
        self.fsdp.set_is_last_backward(last)
        self.fsdp.set_reshard_after_backward(reshard)


class Float8GatherScales:
    """FP8 all-gather of ZeRO-3: the weights of fp8 GEMMs are gathered in the bytes that these read, half of bf16's.

    The scale of a weight is that of the whole weight: before the first forward after a step, one all-reduce computes the
    largest entries of all weights. Each rank then casts its own rows, and the gathered weight is not cast again. Shards stay
    the fp32 weights that the optimizer steps and that checkpoints contain. The weights of a group share one scale.
    """

    def __init__(
        self, groups: Sequence[Sequence[nn.Parameter]], axis: Axis, compute: torch.dtype, device: torch.device
    ) -> None:
        self.axis, self.compute = axis, compute
        self.shards = [local_tensor(weight) for group in groups for weight in group]
        self.factors = torch.ones(len(groups), device=device)
        self.scales = torch.ones(len(groups), SCALE_STRIDE, device=device)[:, 0]
        group_indices = [index for index, group in enumerate(groups) for _ in group]
        self.group_indices = torch.tensor(group_indices, device=device)
        for shard, index in zip(self.shards, group_indices, strict=True):
            _attach_gather_hooks(shard, self.factors[index], self.scales[index], compute)

    @torch.no_grad()
    def update(self) -> None:
        """Computes the scales of the current weights, with one all-reduce."""
        norms = iter(foreach_norm([shard for shard in self.shards if shard.numel()], torch.inf))
        zero = self.factors.new_zeros(())
        own = torch.stack([next(norms) if shard.numel() else zero for shard in self.shards])
        group_max = torch.zeros_like(self.factors).scatter_reduce_(0, self.group_indices, own, "amax")
        # Rounded to the compute dtype, as the weights themselves are before they are cast to fp8.
        largest = comm.all_reduce(group_max, self.axis, op="max").to(self.compute)
        self.factors.copy_(power_of_two_scale(largest, E4M3))
        self.scales.copy_(self.factors.reciprocal())


def _attach_gather_hooks(shard: Tensor, factor: Tensor, scale: Tensor, compute: torch.dtype) -> None:
    """FSDP2 calls these hooks around an all-gather.

    They are attributes of the plain tensor, so that the optimizer and checkpoints need not know of them.
    """

    def before(mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], int]:
        rows = -(-size[0] // mesh.size())  # equal on every rank: the last ranks pad
        # The factor is a power of two that keeps every entry within fp8's range: exact in any format, no clamping needed.
        narrow = (shard.to(compute) * factor).to(E4M3).view(torch.uint8)
        missing = rows - len(narrow)
        return (nn.functional.pad(narrow, (0, 0, 0, missing)) if missing else narrow,), size[0]

    def after(
        outputs: tuple[Tensor], rows: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        if out is not None:  # created in the first gather; later gathers write into the same memory
            return None
        return Float8Weight(outputs[0][:rows].view(E4M3), scale, dtype), ()

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after  # type: ignore[attr-defined]
