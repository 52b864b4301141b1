"""The optimizers against their formulas written out, which weights decay, and the learning rate of each step."""

from __future__ import annotations

import pytest
import torch

from parallel.harness import engine_of, job_of, training_of
from ultrascale.parallel.mesh import Shard
from ultrascale.specs.layout import Layout
from ultrascale.train import elementwise
from ultrascale.train.engine import Engine
from ultrascale.train.optimizer import weight_decay

LR, DECAY, BETA1, BETA2, EPS = 0.1, 0.2, 0.9, 0.95, 1e-8
FIELDS = {"lr": LR, "weight_decay": DECAY, "clip": 0.0, "lr_schedule": "constant", "steps": 3, "beta1": BETA1, "eps": EPS}


def engine(optimizer: str, **fields: object) -> Engine:
    return engine_of(job_of("gpt2", optimizer=optimizer), Layout(), training_of(**{**FIELDS, **fields}))


def stepped(optimizer: str, **fields: object) -> list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]:
    """Per parameter: the values before and after each of three steps, and the gradients between."""
    trainer = engine(optimizer, **fields)
    values = [[weight.local.clone()] for weight in trainer.weights]
    gradients: list[list[torch.Tensor]] = [[] for _ in trainer.weights]
    for step in range(3):
        loss = trainer.backward(trainer.read(step))
        for kept, weight in zip(gradients, trainer.weights, strict=True):
            kept.append(weight.gradient.clone())
        trainer.update(step, loss)
        for kept, weight in zip(values, trainer.weights, strict=True):
            kept.append(weight.local.clone())
    return [(w.shard.name, v, g) for w, v, g in zip(trainer.weights, values, gradients, strict=True)]


def decay(name: str) -> float:
    return 0.0 if "norm" in name or name.endswith("bias") else DECAY


def test_adamw() -> None:
    for name, values, gradients in stepped("adamw"):
        weight, mean, square = values[0].double(), torch.zeros(()), torch.zeros(())
        for step, gradient in enumerate(gradients, 1):
            mean = BETA1 * mean + (1 - BETA1) * gradient.double()
            square = BETA2 * square + (1 - BETA2) * gradient.double() ** 2
            weight = weight * (1 - LR * decay(name))
            weight = weight - LR * (mean / (1 - BETA1**step)) / ((square / (1 - BETA2**step)).sqrt() + EPS)
            torch.testing.assert_close(values[step].double(), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("optimizer", "momentum"), [("sgd", 0.0), ("sgd-momentum", BETA1)])
def test_sgd(optimizer: str, momentum: float) -> None:
    """As torch has it: the decay is part of the gradient, and so of the momentum."""
    for name, values, gradients in stepped(optimizer):
        weight, moving = values[0].double(), torch.zeros(())
        for step, gradient in enumerate(gradients):
            moving = momentum * moving + gradient.double() + decay(name) * weight
            weight = weight - LR * moving
            torch.testing.assert_close(values[step + 1].double(), weight, rtol=1e-5, atol=1e-6)


def test_lion() -> None:
    for name, values, gradients in stepped("lion", beta2=0.99):
        weight, moving = values[0].double(), torch.zeros(())
        for step, gradient in enumerate(gradients):
            update = torch.sign(BETA1 * moving + (1 - BETA1) * gradient.double())
            weight = weight * (1 - LR * decay(name)) - LR * update
            moving = 0.99 * moving + 0.01 * gradient.double()
            close = (values[step + 1].double() - weight).abs() < 1e-6
            assert close.double().mean() > 0.99, name  # rounding turns the sign of a key's bias, whose gradient is zero


def test_moments_in_bf16_are_rounded_without_bias() -> None:
    exact, rounded = stepped("adamw", eps=1e-4), stepped("adamw-bf16", eps=1e-4)
    for (name, values, _), (_, others, _) in zip(exact, rounded, strict=True):
        torch.testing.assert_close(others[1], values[1], msg=name)  # rounded after the step
        assert float((others[-1] - values[-1]).abs().max()) < 0.05 * LR, name
    values = torch.full((2**16,), 1 + 2.0**-9)  # a quarter of the way to the next number of bf16
    bits = elementwise.random_bits(torch.arange(2**16, dtype=torch.int32), torch.tensor(7, dtype=torch.int32))
    found = elementwise.round_stochastically(values, bits).float()
    assert sorted(set(found.tolist())) == [1.0, 1 + 2.0**-7]
    assert abs(float((found - values).mean())) < 2.0**-7 * 0.01


def test_moments_in_8_bits_are_rounded_without_bias() -> None:
    exact, rounded = stepped("adamw", eps=1e-4), stepped("adamw-8bit", eps=1e-4)
    for (name, values, _), (_, others, _) in zip(exact, rounded, strict=True):
        torch.testing.assert_close(others[1], values[1], msg=name)  # rounded after the step
        assert float((others[-1] - values[-1]).abs().max()) < 0.5 * LR, name
    bits = elementwise.random_bits(torch.arange(2**16, dtype=torch.int32), torch.tensor(7, dtype=torch.int32))
    for value, neighbours in ((1.03125, [1.0, 1.125]), (2.0**-10, [0.0, 2.0**-9]), (255.0, [240.0, 256.0])):
        found = elementwise.round_to_e4m3(torch.full((2**16,), value), bits)
        assert sorted(set(found.tolist())) == neighbours
        assert abs(float(found.mean()) - value) < 0.01 * (neighbours[1] - neighbours[0])
        assert torch.equal(found.to(torch.float8_e4m3fn).float(), found)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_rows_in_8_bits_have_their_own_range(name: str) -> None:
    """Each row of a matrix, or a whole vector; what is rounded to 0 is less than 2⁻¹⁷ of the row's largest."""
    moments, random = elementwise.E4M3Moments(), torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-12, 1e-6, 1.0, 1e6, 0.0]).unsqueeze(1)
    for values in (sizes * torch.randn(5, 300, generator=random), torch.randn(300, generator=random)):
        kept = values.square() if name == "exp_avg_sq" else values
        state = moments.zero(values, name)
        bits = torch.randint(0, 2**16, values.shape, generator=random, dtype=torch.int32)
        moments.write(state, name, kept, bits)
        found = moments.read(state, name)
        largest = kept.abs().amax(-1, keepdim=True)
        assert bool(((found - kept).abs() <= 0.27 * kept.abs() + 2.0**-15 * largest).all())
        assert torch.equal(found == 0, kept == 0) or name == "exp_avg"
        moments.write(state, name, found, torch.zeros((), dtype=torch.int32))  # as from a checkpoint
        assert torch.equal(moments.read(state, name), found)
    assert {key: value.dtype for key, value in state.items()} == {
        name: torch.float8_e4m3fn,
        f"{name}_exponents": torch.int8,
    }


def test_random_bits_do_not_depend_on_how_a_weight_is_cut() -> None:
    shard = Shard("w", (4, 6, 8))
    whole = sum(elementwise.element_indices(shard, (4, 6, 8), slice(0, 4), torch.device("cpu")))
    assert torch.equal(whole.flatten(), torch.arange(4 * 6 * 8, dtype=torch.int32))
    part = Shard("w", (4, 6, 8), dim=2, start=4, length=4, rows=(2, 2))
    found = sum(elementwise.element_indices(part, (2, 6, 4), slice(1, 2), torch.device("cpu")))
    assert torch.equal(found, part.piece(whole)[1:])


def test_matrices_decay_and_norms_and_biases_do_not() -> None:
    trainer = engine("adamw")
    loss = trainer.backward(trainer.read(0))
    trainer.optimizer.scale_gradients(0.0)
    before = [weight.local.clone() for weight in trainer.weights]
    trainer.update(0, loss)
    for old, weight in zip(before, trainer.weights, strict=True):
        kept = 1 - LR * decay(weight.shard.name)
        torch.testing.assert_close(weight.local, old * kept)
    assert sum(decay(weight.shard.name) == 0 for weight in trainer.weights) == 2 + 4 * (4 + 6)


def test_embedding_and_head_need_not_decay() -> None:
    found = engine("adamw", decay_embeddings=False)
    decaying = {weight.shard.name for weight in found.weights if weight_decay(weight, found.training)}
    assert decaying == {name for weight in found.weights if decay(name := weight.shard.name) and name.startswith("blocks.")}
    groups = {group["weight_decay"]: len(group["params"]) for group in found.optimizer.inner.param_groups}
    assert groups == {DECAY: len(decaying), 0.0: len(found.weights) - len(decaying)}


def test_the_rate_is_that_of_the_step() -> None:
    trainer = engine("sgd", warmup_steps=2, weight_decay=0.0)
    rates = []
    for step in range(3):
        loss = trainer.backward(trainer.read(step))
        before, gradient = trainer.weights[0].local.clone(), trainer.weights[0].gradient.clone()
        result = trainer.update(step, loss)
        torch.testing.assert_close(trainer.weights[0].local, before - result.lr * gradient)
        rates.append(result.lr)
    assert rates == pytest.approx([LR / 2, LR, LR])
