"""Builders of models that several tests share."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ultrascale.model.hf import stored, whole, whole_shapes
from ultrascale.model.transformer import Transformer, full_weight
from ultrascale.specs.model import Model


@torch.no_grad()
def initialize(module: Transformer, seed: int, model: Model) -> None:
    """Fills every parameter of a plain model, or of a slice of one, in place, as the engine does."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.copy_(full_weight(name, tensor.shape, seed, model, tensor.device))


def from_hf(state: Mapping[str, torch.Tensor], model: Model) -> dict[str, torch.Tensor]:
    """Our state dict of a Hugging Face state dict."""
    found: dict[str, list[torch.Tensor]] = {}
    shapes = whole_shapes(model)
    for one in stored(model):
        for ours in one.ours:
            found.setdefault(ours, []).append(one.part(ours, state[one.name], shapes))
    if model.tied_embeddings:
        found["head.linear.weight"] = found["embed.tokens.weight"]
    return {ours: whole(parts) for ours, parts in found.items()}


def to_hf(state: Mapping[str, torch.Tensor], model: Model) -> dict[str, torch.Tensor]:
    """The Hugging Face state dict of the whole model, without a tied head, as in their files."""
    return {one.name: one.joined([state[ours] for ours in one.ours]) for one in stored(model)}
