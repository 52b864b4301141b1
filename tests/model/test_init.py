"""Initial weights depend on the seed and the parameter's name, and on nothing else."""

from __future__ import annotations

import math

import torch

from model.builders import initialize
from ultrascale.model.transformer import Transformer, full_weight
from ultrascale.specs.model import Model

TINY = Model.load("tiny")


def initialized(model: Model, seed: int = 0, **parts: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(len(parts))  # the global generator must not matter
    module = Transformer(model, **parts)  # type: ignore[arg-type]
    initialize(module, seed, model)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def test_a_stage_has_the_weights_of_the_whole_model() -> None:
    whole, part = initialized(TINY), initialized(TINY, layers=range(3, 5), embed=False)
    assert all(torch.equal(weight, whole[name]) for name, weight in part.items())


def test_seed_and_name_matter() -> None:
    first, second = initialized(TINY, 0), initialized(TINY, 1)
    assert not torch.equal(first["blocks.0.mlp.down.weight"], second["blocks.0.mlp.down.weight"])
    assert not torch.equal(first["blocks.0.mlp.down.weight"], first["blocks.1.mlp.down.weight"])


def test_spread() -> None:
    weights = initialized(TINY)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            assert (weight == 1).all()
            continue
        residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        expected = 0.02 / math.sqrt(16) if residual else 0.02
        assert abs(weight.std().item() / expected - 1) < 0.1
    biased = initialized(TINY.model_copy(update={"qkv_bias": True}))
    assert all((weight == 0).all() for name, weight in biased.items() if name.endswith("bias"))


def test_a_tied_head_without_embedding_has_the_embeddings_weights() -> None:
    tied = TINY.model_copy(update={"tied_embeddings": True})
    head = initialized(tied, layers=range(7, 8), embed=False)["head.linear.weight"]
    assert torch.equal(head, initialized(tied)["embed.tokens.weight"])
    assert not torch.equal(initialized(TINY)["head.linear.weight"], initialized(TINY)["embed.tokens.weight"])


def test_the_draw_is_pinned() -> None:
    # A resumed or re-cut run must start from the weights that earlier releases drew.
    weight = full_weight("embed.tokens.weight", torch.Size((2, 2)), 0, TINY, "cpu")
    assert weight.dtype == torch.float32
    torch.testing.assert_close(
        weight,
        torch.tensor([[-0.003689102130010724, 0.025722112506628036], [-0.00028554530581459403, 0.014161198399960995]]),
        rtol=0,
        atol=1e-7,
    )
