"""ZeRO-3 that gathers in fp8: weights of fp8 products travel as the bytes that the products take, half of bf16's.

The scale of a weight is that of the whole, whoever holds which part of it: before the first forward after a step, ranks agree
on the largest entries of all weights in one all-reduce. Each then casts its own rows, and nothing is cast once more where they
meet. Shards stay the fp32 weights that the optimizer steps and checkpoints keep. The law is cost/zero.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ultrascale.kernels.float8_gemm import NARROW, factor_below
from ultrascale.kernels.float8_weight import Float8Weight
from ultrascale.parallel import comm
from ultrascale.parallel.comm import Axis


class Float8GatherScales:
    """Of all weights of one chunk that are gathered in fp8; `groups` are those that share a scale."""

    def __init__(
        self, groups: Sequence[Sequence[nn.Parameter]], axis: Axis, compute: torch.dtype, device: torch.device
    ) -> None:
        self.axis, self.compute = axis, compute
        self.shards = [_local(weight) for group in groups for weight in group]
        self.factors = torch.ones(len(groups), device=device)
        self.scales = torch.ones(len(groups), device=device)
        places = [place for place, group in enumerate(groups) for _ in group]
        self.places = torch.tensor(places, device=device)
        for shard, place in zip(self.shards, places, strict=True):
            _Hooks(self.factors[place], self.scales[place], compute).attach(shard)

    @torch.no_grad()
    def agree(self) -> None:
        """The weights may have changed: their scales follow."""
        norms = iter(torch._foreach_norm([shard for shard in self.shards if shard.numel()], torch.inf))
        nothing = self.factors.new_zeros(())
        own = torch.stack([next(norms) if shard.numel() else nothing for shard in self.shards])
        together = torch.zeros_like(self.factors).scatter_reduce_(0, self.places, own, "amax")
        largest = comm.all_reduce(together, self.axis, op="max").to(self.compute)  # as it is when the numbers themselves are
        self.factors.copy_(factor_below(largest, NARROW))
        self.scales.copy_(self.factors.reciprocal())


class _Hooks:
    """What FSDP2 asks a shard for before and after its gather."""

    def __init__(self, factor: Tensor, scale: Tensor, compute: torch.dtype) -> None:
        self.factor, self.scale, self.compute = factor, scale, compute

    def attach(self, shard: Tensor) -> None:
        """To the plain tensor: what steps or keeps it need not know."""

        def before(mesh: Any, size: torch.Size, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor], int]:
            rows = -(-size[0] // mesh.size())  # as many on every rank, where the last have fewer
            # A power of two that no entry exceeds fp8's largest with: exact in any format, and nothing is to be cut off.
            narrow = (shard.to(self.compute) * self.factor).to(NARROW).view(torch.uint8)
            missing = rows - len(narrow)
            return (nn.functional.pad(narrow, (0, 0, 0, missing)) if missing else narrow,), size[0]

        def after(
            outputs: tuple[Tensor], rows: int, dtype: torch.dtype, *, out: Tensor | None = None
        ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
            if out is not None:  # made in the first gather, of the memory into which every other one writes
                return None
            return Float8Weight(outputs[0][:rows].view(NARROW), self.scale, dtype), ()

        shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = before, after  # type: ignore[attr-defined]


def _local(weight: nn.Parameter) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight._local_tensor  # itself, not the view of it that to_local() makes: FSDP2 looks at this object
