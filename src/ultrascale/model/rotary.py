"""Rotary positions: the angles of each position, and the rotation of queries and keys by them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ultrascale.specs.model import Model, RopeScaling

Rope = tuple[Tensor, Tensor]
"""cos and sin, each [s, head_dim], fp32"""


def tables(model: Model, positions: Tensor) -> Rope:
    """Computed anew in each forward pass, never a buffer: a model built on the meta device has nothing to fill in."""
    angles = torch.outer(positions.float(), _frequencies(model, positions.device))
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x [b, s, heads, d]; the pairs are (i, i + d/2), as in the Hugging Face checkpoints."""
    cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in rope)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _frequencies(model: Model, device: torch.device) -> Tensor:
    exponents = torch.arange(0, model.head_dim, 2, device=device).float() / model.head_dim
    frequencies = 1.0 / model.rope_theta**exponents
    return frequencies if model.rope_scaling is None else _stretch(frequencies, model.rope_scaling)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1's: waves longer than the original context are slowed by `factor`, short ones kept, a ramp between."""
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
