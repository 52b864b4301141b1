"""FP8 all-gather for ZeRO-3: weights of fp8 GEMMs are gathered in the bytes that the GEMMs read, half of bf16's.

The scale of a weight is that of the whole weight: before the first forward after a step, one all-reduce computes the largest
entries of all weights. Each rank then casts its own rows, and the gathered weight is not cast again. Shards stay the fp32
weights that the optimizer steps and that checkpoints contain. The cost model is cost/communication.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.kernels.float8_gemm import NARROW, factor_below
from ultrascale.kernels.float8_weight import Float8Weight
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.torch_private import foreach_norm, local_tensor


class Float8GatherScales:
    """The scales of all weights of one chunk that are gathered in fp8; the weights of a group share one scale."""

    def __init__(
        self, groups: Sequence[Sequence[nn.Parameter]], axis: Axis, compute: torch.dtype, device: torch.device
    ) -> None:
        self.axis, self.compute = axis, compute
        self.shards = [local_tensor(weight) for group in groups for weight in group]
        self.factors = torch.ones(len(groups), device=device)
        self.scales = torch.ones(len(groups), device=device)
        group_indices = [index for index, group in enumerate(groups) for _ in group]
        self.group_indices = torch.tensor(group_indices, device=device)
        for shard, index in zip(self.shards, group_indices, strict=True):
            _Hooks(self.factors[index], self.scales[index], compute).attach(shard)

    @torch.no_grad()
    def update(self) -> None:
        """Computes the scales of the current weights, with one all-reduce."""
        norms = iter(foreach_norm([shard for shard in self.shards if shard.numel()], torch.inf))
        zero = self.factors.new_zeros(())
        own = torch.stack([next(norms) if shard.numel() else zero for shard in self.shards])
        group_max = torch.zeros_like(self.factors).scatter_reduce_(0, self.group_indices, own, "amax")
        # Rounded to the compute dtype, as the weights themselves are before they are cast to fp8.
        largest = comm.all_reduce(group_max, self.axis, op="max").to(self.compute)
        self.factors.copy_(factor_below(largest, NARROW))
        self.scales.copy_(self.factors.reciprocal())


class _Hooks:
    """The pre- and post-all-gather hooks that FSDP2 calls on a shard."""

    def __init__(self, factor: Tensor, scale: Tensor, compute: torch.dtype) -> None:
        self.factor, self.scale, self.compute = factor, scale, compute

    def attach(self, shard: Tensor) -> None:
        """Attaches the hooks to the plain tensor, so that the optimizer and checkpoints need not know of them."""

        def before(mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], int]:
            rows = -(-size[0] // mesh.size())  # equal on every rank: the last ranks pad
            # The factor is a power of two that keeps every entry within fp8's range: exact in any format, no clamping needed.
            narrow = (shard.to(self.compute) * self.factor).to(NARROW).view(torch.uint8)
            missing = rows - len(narrow)
            return (nn.functional.pad(narrow, (0, 0, 0, missing)) if missing else narrow,), size[0]

        def after(
            outputs: tuple[Tensor], rows: int, dtype: torch.dtype, *, out: Tensor | None = None
        ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
            if out is not None:  # created in the first gather; later gathers write into the same memory
                return None
            return Float8Weight(outputs[0][:rows].view(NARROW), self.scale, dtype), ()

        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after  # type: ignore[attr-defined]
