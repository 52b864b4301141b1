"""Optimizers that torch does not have and that step each element for itself: Lion, and AdamW with rounded moments.

They have the interface of torch.optim.Optimizer. Weights are stepped in chunks of rows, so that temporary tensors stay small.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ultrascale.model.transformer import EMBEDDING
from ultrascale.parallel.mesh import Shard
from ultrascale.specs.job import ADAMW_MOMENTS

if TYPE_CHECKING:
    from ultrascale.train.optimizer import Weight

CHUNK_ELEMENTS = 2**20
COMPILED_CHUNK_ELEMENTS = 2**24  # few temporary tensors remain, and each call costs the host as much as many elements a GPU


def row_chunks(tensor: Tensor, elements: int = CHUNK_ELEMENTS) -> Iterator[slice]:
    rows = max(1, elements // max(1, tensor[:1].numel()))
    for start in range(0, len(tensor), rows):
        yield slice(start, min(start + rows, len(tensor)))


class Lion(torch.optim.Optimizer):
    """Chen 2023: steps by the sign of the interpolated momentum and gradient."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group, weight in _weights_with_gradients(self):
            state, (beta1, beta2) = self.state[weight], group["betas"]
            if not state:
                state["exp_avg"] = torch.zeros_like(weight)
            assert weight.grad is not None
            for rows in row_chunks(weight):
                gradient, momentum = weight.grad[rows], state["exp_avg"][rows]
                weight[rows].mul_(1 - group["lr"] * group["weight_decay"])
                weight[rows].add_(gradient.lerp(momentum, beta1).sign_(), alpha=-group["lr"])
                momentum.lerp_(gradient, 1 - beta2)


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW whose moments are rounded to bf16 or to 8 bits at random, up or down by what they are nearer to.

    Rounded to nearest, a moment would stay where it is when it changes by less than half of the format's spacing. The random
    bits are a function of step, weight and place in the whole weight, so that they are the same in every layout.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weights: Sequence[Weight],
        copy: str | None,
        moments: BF16Moments | E4M3Moments,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        same = {} if copy is None else {copy: EMBEDDING}
        self.shards = {
            weight.master: replace(weight.shard, name=same.get(weight.shard.name, weight.shard.name)) for weight in weights
        }
        self.moments = moments
        self.updates = 0
        """with the one that `step` makes; set by the caller, which may step some weights after others"""
        on_gpu = any(weight.master.is_cuda for weight in weights)
        # One operator after the other takes a GPU 30 times as long.
        self._update = torch.compile(self._update_rows, dynamic=True) if on_gpu else self._update_rows
        self._elements = COMPILED_CHUNK_ELEMENTS if on_gpu else CHUNK_ELEMENTS

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group, weight in _weights_with_gradients(self):
            state, (beta1, beta2), rate = self.state[weight], group["betas"], group["lr"]
            if not state:
                for name in ADAMW_MOMENTS:
                    state |= self.moments.zero(weight, name)
            step, shard = self.updates, self.shards[weight]
            # Tensors, not numbers: what changes from step to step is no constant of a compiled kernel.
            kept = 1 - rate * group["weight_decay"]
            numbers = torch.tensor((kept, -rate / (1 - beta1**step), 1 - beta2**step)).to(weight.device, non_blocking=True)
            keys = [_int32(zlib.crc32(f"{shard.name} {name} {step}".encode())) for name in ADAMW_MOMENTS]
            hashed = torch.tensor(keys, dtype=torch.int32).to(weight.device, non_blocking=True)
            assert weight.grad is not None
            for rows in row_chunks(weight, self._elements):
                moments = {key: value for key, value in state.items() if value.dim()}  # a resumed run has its step there
                part = {key: value[rows] if len(value) == len(weight) else value for key, value in moments.items()}
                places = element_indices(shard, weight.shape, rows, weight.device)
                self._update(weight[rows], weight.grad[rows], part, numbers, hashed, places, (beta1, beta2), group["eps"])

    def _update_rows(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        numbers: Tensor,
        keys: Tensor,
        places: Sequence[Tensor],
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """`numbers`: the factor of weight decay, minus the rate over the first moment's correction, the second's correction."""
        mean, square = (self.moments.read(state, name) for name in ADAMW_MOMENTS)
        mean = mean.lerp(gradient, 1 - betas[0])
        square = (square * betas[1]).addcmul(gradient, gradient, value=1 - betas[1])
        weight.copy_(weight * numbers[0] + numbers[1] * mean / ((square / numbers[2]).sqrt() + eps))
        indices = reduce(torch.add, places)
        for name, value, key in zip(ADAMW_MOMENTS, (mean, square), keys, strict=True):
            self.moments.write(state, name, value, random_bits(indices, key))


class BF16Moments:
    def zero(self, weight: Tensor, name: str) -> dict[str, Tensor]:
        return {name: torch.zeros_like(weight, dtype=torch.bfloat16)}

    def read(self, state: dict[str, Tensor], name: str) -> Tensor:
        return state[name].float()

    def write(self, state: dict[str, Tensor], name: str, values: Tensor, bits: Tensor) -> None:
        state[name].copy_(round_stochastically(values, bits))


class E4M3Moments:
    """Eight bits, four of them an exponent, and a power of two for each row.

    A power of two leaves the format's numbers what they are, so that a row that tp cuts is rounded as if it were whole. The
    second moment is kept as its root, whose range is half as wide, and is never rounded to 0: the update divides by it.
    """

    def zero(self, weight: Tensor, name: str) -> dict[str, Tensor]:
        exponents = torch.zeros(_rows(weight).shape[:-1], dtype=torch.int8, device=weight.device)
        return {name: torch.zeros_like(weight, dtype=torch.float8_e4m3fn), _exponents(name): exponents}

    def read(self, state: dict[str, Tensor], name: str) -> Tensor:
        codes = state[name]
        values = (_rows(codes.float()) * _power_of_two(state[_exponents(name)].int()).unsqueeze(-1)).view(codes.shape)
        return values * values if name == "exp_avg_sq" else values

    def write(self, state: dict[str, Tensor], name: str, values: Tensor, bits: Tensor) -> None:
        is_root = name == "exp_avg_sq"
        values = values.sqrt() if is_root else values
        exponents = (_exponent(_rows(values).abs().amax(-1)) - E4M3_HIGHEST).clamp(-126, 126)
        scaled = (_rows(values) * _power_of_two(-exponents).unsqueeze(-1)).view(values.shape)
        rounded = round_to_e4m3(scaled.abs(), bits)
        if is_root:
            rounded = torch.where((values > 0) & (rounded == 0), E4M3_SPACING, rounded)
        state[name].copy_(rounded.copysign(values))
        state[_exponents(name)].copy_(exponents)


E4M3_HIGHEST = 8  # the largest element of a row is scaled to less than 2⁸; the format ends at 448
E4M3_LEAST, E4M3_SPACING = 2.0**-6, 2.0**-9  # below the first, numbers have the second between them


def _exponents(name: str) -> str:
    return f"{name}_exponents"


def _power_of_two(exponents: Tensor) -> Tensor:
    """Exactly; exponents from -126 to 127 in int32."""
    return ((exponents + 127) << 23).view(torch.float32)


def _exponent(x: Tensor) -> Tensor:
    """The least whose power of two is above each of these normal numbers; far below that of the least of them for 0."""
    return (x.view(torch.int32) >> 23) - 126


def _rows(x: Tensor) -> Tensor:
    """A vector is one row."""
    return x if x.dim() > 1 else x.unsqueeze(0)


def _weights_with_gradients(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], Tensor]]:
    for group in optimizer.param_groups:
        yield from ((group, weight) for weight in group["params"] if weight.grad is not None and weight.numel())


def element_indices(shard: Shard, local: Sequence[int], rows: slice, device: torch.device) -> list[Tensor]:
    """Some rows' elements' places in the whole weight, modulo 2³², in int32: a term for each dimension, to be summed.

    Outside what is compiled, which would compute them in int64.
    """
    sizes = [rows.stop - rows.start, *local[1:]]
    offsets = [shard.offsets[0] + rows.start, *shard.offsets[1:]]
    found = []
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        stride = math.prod(shard.shape[dim + 1 :])
        along = (torch.arange(offset, offset + size, device=device) * stride).to(torch.int32)
        found.append(along.view(-1, *[1] * (len(sizes) - 1 - dim)))
    return found


def random_bits(indices: Tensor, key: Tensor) -> Tensor:
    """16 bits of a hash of each index and the key, in int32: Wellons' lowbias32."""
    x = indices + key
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))) * _int32(factor)
    return (x ^ (x >> 16)) & 0xFFFF


def _int32(value: int) -> int:
    """With a sign."""
    return (value + 2**31) % 2**32 - 2**31


def round_stochastically(values: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16: up as often as the value is near the upper of the two neighbours."""
    return ((values.view(torch.int32) + bits) & -(2**16)).view(torch.float32).bfloat16()


def round_to_e4m3(values: Tensor, bits: Tensor) -> Tensor:
    """The same of numbers from 0 to 2⁸ to those of e4m3, still in fp32."""
    normal = ((values.view(torch.int32) + (bits << 4)) & -(2**20)).view(torch.float32)
    least = (values / E4M3_SPACING + bits / 2**16).floor() * E4M3_SPACING
    return torch.where(values < E4M3_LEAST, least, normal)
