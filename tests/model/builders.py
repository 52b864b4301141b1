"""Builders of models that several tests share."""

from __future__ import annotations

import torch

from ultrascale.model.init import full_weight
from ultrascale.model.transformer import Transformer
from ultrascale.specs.model import Model


@torch.no_grad()
def initialize(module: Transformer, seed: int, model: Model) -> None:
    """Fills every parameter of a plain model, or of a slice of one, in place, as the engine does."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.copy_(full_weight(name, tensor.shape, seed, model, tensor.device))
