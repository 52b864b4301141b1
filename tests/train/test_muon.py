"""Muon on one rank: its iterations against singular values, its steps against torch.optim.Muon."""

from __future__ import annotations

import pytest
import torch

from parallel.harness import engine_of, job_of, training_of
from ultrascale.specs.layout import Layout
from ultrascale.train import supported
from ultrascale.train.muon import COEFFICIENTS, newton_schulz


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (3, 5, 8), (3, 8, 5)])
def test_iterations_are_a_polynomial_of_the_singular_values(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrices / matrices.norm(dim=(-2, -1), keepdim=True), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(newton_schulz(matrices.clone()), left @ values.diag_embed() @ right)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("model", ["gpt2", "two-experts"])
def test_steps_are_those_of_torch(model: str, scale: str) -> None:
    """torch takes 2-D matrices alone, experts one by one, and iterates in bf16, where a batch rounds differently."""
    fields = {"muon_scale": scale, "muon_momentum": 0.9, "weight_decay": 0.2, "clip": 0.0, "lr_schedule": "constant"}
    engine = engine_of(job_of(model, optimizer="muon"), Layout(mbs=2), training_of(**fields))
    muon = engine.optimizer.muon
    assert muon is not None
    muon.dtype = torch.bfloat16
    stepped = {weight.shard.name: weight for weight in muon.weights}
    copies = {
        name: [torch.nn.Parameter(one.clone()) for one in weight.local.view(-1, *weight.local.shape[-2:])]
        for name, weight in stepped.items()
    }
    reference = torch.optim.Muon(
        [one for each in copies.values() for one in each], lr=1e-2, weight_decay=0.2, momentum=0.9, adjust_lr_fn=scale
    )
    others = [weight.shard.name for weight in engine.weights if weight.shard.name not in stepped]
    assert all("norm" in name or "bias" in name or name.startswith(("embed.", "head.")) for name in others)
    for step in range(3):
        loss = engine.backward(engine.read(step))
        for name, weight in stepped.items():
            for one, gradient in zip(copies[name], weight.gradient.view(-1, *weight.gradient.shape[-2:]), strict=True):
                one.grad = gradient.clone()
        engine.update(step, loss)
        reference.step()
        for name, weight in stepped.items():
            found = weight.local.view(-1, *weight.local.shape[-2:])
            torch.testing.assert_close(found, torch.stack([*copies[name]]).data, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(("field", "value"), [("muon_scale", "original"), ("muon_momentum", 0.9)])
def test_settings_of_another_optimizer_are_refused(field: str, value: object) -> None:
    training = training_of(**{field: value})
    assert supported.layout_problem(job_of("llama", optimizer="muon"), Layout(), training) is None
    problem = supported.layout_problem(job_of("llama"), Layout(), training)
    default = training_of().model_dump()[field]
    assert problem == f"train.{field} is {value} but job.optimizer is adamw, not muon: try {default}, or job.optimizer=muon"
