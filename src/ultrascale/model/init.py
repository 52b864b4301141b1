"""Weight initialization as a function of the seed and the parameter's name only, so that it is the same in any layout."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from ultrascale.specs.model import Model

STD = 0.02  # GPT-2's; weights that write to the residual stream divide it by sqrt(2 · layers), their number


def full_weight(name: str, shape: torch.Size, seed: int, model: Model, device: torch.device | str) -> Tensor:
    """The whole initial tensor in fp32; a rank that holds a shard takes its part of it."""
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    if name == "head.linear.weight" and model.tied_embeddings:
        name = "embed.tokens.weight"  # a stage with only the head must draw the same values as the first stage
    residual = name.endswith(("attention.out.weight", "down.weight", "experts.down"))
    std = STD / math.sqrt(2 * model.layers) if residual else STD
    return torch.empty(shape, device=device).normal_(0.0, std, generator=_generator(name, seed, device))


def _generator(name: str, seed: int, device: torch.device | str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)  # 63 bits: a generator's seed is signed
