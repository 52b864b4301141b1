"""Split fp32 masters: the upper 16 bits are the bf16 compute copy, the lower 16 are stored separately.

bf16 is fp32 without its last 16 bits, so a bf16 copy and a whole fp32 master store the upper half twice. With rounding up from
the middle, the copy plus a signed 16-bit rest is exactly the master: four bytes per weight instead of six.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF_ULP = 1 << 15  # of bf16, in fp32 bits


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 values as bf16, rounded to the nearest (a tie away from zero), and the int16 rest of their bits."""
    bits = values.contiguous().view(torch.int32)
    upper = ((bits + HALF_ULP) >> 16).to(torch.int16).view(torch.bfloat16)
    return upper, bits.to(torch.int16)


def join(upper: Tensor, rest: Tensor) -> Tensor:
    """The fp32 values that `split` was given."""
    bits = (upper.contiguous().view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    return bits.view(torch.float32)
