"""Rotary position embeddings: cos and sin tables, frequency scaling, and the rotation of queries and keys."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ultrascale.specs.blocks import AttentionTemperature, RopeScaling
from ultrascale.specs.model import Model

Rope = tuple[Tensor, Tensor]
"""cos and sin, each [s, rotated_dim], fp32"""


def tables(model: Model, positions: Tensor, length: int | None = None, local_theta: float | None = None) -> Rope:
    """The cos and sin tables, computed in each forward pass instead of stored in buffers, which a meta-device model would lack.

    `length`: of the whole sequence, if `positions` are one context-parallel rank's part of it. `local_theta`: another base, and
    no scaling.
    """
    if local_theta is not None:
        frequencies, scaling = _unscaled(model, local_theta, positions.device), None
    else:
        frequencies = _frequencies(model, len(positions) if length is None else length, positions.device)
        scaling = model.rope_scaling
    angles = torch.outer(positions.float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    factor = 1.0 if scaling is None else attention_factor(scaling)
    return (angles.cos(), angles.sin()) if factor == 1.0 else (angles.cos() * factor, angles.sin() * factor)


def query_factors(temperature: AttentionTemperature, positions: Tensor) -> Tensor:
    """[s], fp32: what queries are multiplied by in layers that do not rotate."""
    steps = torch.floor((positions.float() + 1) / temperature.tokens)
    return 1 + temperature.scale * torch.log1p(steps)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """x [b, s, heads, d]; the pairs are (i, i + d/2), as in Llama's checkpoints. Narrower tables leave the rest."""
    cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in rope)
    if (width := cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], rope), x[..., width:]), dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def attention_factor(scaling: RopeScaling) -> float:
    """The factor of cos and sin; scores are multiplied by its square (YaRN, section 3.4). 1 for other types."""
    if scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale is None or scaling.mscale_all_dim is None:
        return _mscale(scaling.factor, 1.0)
    return _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _unscaled(model: Model, theta: float, device: torch.device) -> Tensor:
    exponents = torch.arange(0, model.rotated_dim, 2, device=device).float() / model.rotated_dim
    return 1.0 / theta**exponents


def _frequencies(model: Model, length: int, device: torch.device) -> Tensor:
    scaling = model.rope_scaling
    theta = model.rope_theta
    if scaling is not None and scaling.rope_type == "dynamic":
        theta = _ntk_base(model, scaling.factor, length)
    frequencies = _unscaled(model, theta, device)
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    yarn = scaling.rope_type == "yarn"
    share = _unscaled_by_yarn(model, scaling, device) if yarn else _unscaled_by_llama3(frequencies, scaling)
    return frequencies * (share + (1 - share) / scaling.factor)


def _ntk_base(model: Model, factor: float, length: int) -> float:
    """The base for a sequence of `length` tokens: larger if that exceeds max_positions, as in `transformers`."""
    assert model.max_positions is not None
    excess = max(length, model.max_positions) / model.max_positions - 1
    return model.rope_theta * math.pow(1 + factor * excess, model.rotated_dim / (model.rotated_dim - 2))


def _unscaled_by_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Unscaled share of each frequency: 0 for wavelengths beyond the original context, 1 for short ones, a ramp between."""
    assert scaling.original_max_positions is not None
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # in the original context
    if scaling.high_freq_factor == scaling.low_freq_factor:  # no ramp (Llama 4 Scout)
        return (turns >= scaling.low_freq_factor).to(frequencies.dtype)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return share.clamp(0, 1)


def _unscaled_by_yarn(model: Model, scaling: RopeScaling, device: torch.device) -> Tensor:
    """The same for YaRN (section 3.2): a ramp over dimensions, between those that rotate beta_fast and beta_slow times."""
    original = scaling.original_max_positions
    assert original is not None
    dim = model.rotated_dim

    def dimension(turns: float) -> float:
        """The dimension that rotates `turns` times in the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(model.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as in `transformers`: a step, and no division by zero
    ramp = (torch.arange(dim // 2, device=device).float() - low) / (high - low)
    return 1 - ramp.clamp(0, 1)
