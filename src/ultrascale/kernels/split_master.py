"""An fp32 master in two halves of its bits: the upper is the bf16 copy that computes, the lower 16 lie beside it.

bf16 is fp32 without its last 16 bits, so a rounded copy beside a whole master repeats half of it. Rounded up from the middle,
the copy plus a signed 16-bit rest is the master again, bit by bit: four bytes a weight instead of six.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIDDLE = 1 << 15


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 values as bf16, rounded to the nearest (a tie away from zero), and the int16 rest of their bits."""
    bits = values.contiguous().view(torch.int32)
    upper = ((bits + MIDDLE) >> 16).to(torch.int16).view(torch.bfloat16)
    return upper, bits.to(torch.int16)


def join(upper: Tensor, rest: Tensor) -> Tensor:
    """The fp32 values that `parted` was given."""
    bits = (upper.contiguous().view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    return bits.view(torch.float32)
