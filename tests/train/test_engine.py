"""The step: one process against plain torch, clipping, the guard against NaN, and that a missing reduction is detected."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from model.builders import initialize
from parallel.harness import (
    SEQ,
    assert_same,
    check,
    engine_of,
    gradient_errors,
    in_ranks,
    job_of,
    one_process,
    train,
    training_of,
)
from ultrascale.data.corpora import corpus
from ultrascale.model.transformer import Transformer
from ultrascale.parallel.mesh import Mesh
from ultrascale.specs.errors import RunError
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train import engine as engines
from ultrascale.train.data import Batches
from ultrascale.train.engine import Engine, NotFiniteError
from ultrascale.train.optimizer import learning_rate

FAMILIES = ["experts", "qwen2-moe", "llama", "tied", "gpt2", "qwen2", "qwen3", "window", "one-kv-head"]


def by_hand(family: str, training: Training, batch: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and last weights of plain torch: one model, its own cross-entropy, AdamW and clipping."""
    job = job_of(family)
    model = Transformer(job.model)
    initialize(model, training.seed, job.model)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": training.weight_decay},
            {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(training.beta1, training.beta2),
        eps=training.eps,
    )
    batches = Batches(corpus(training, job.model.vocab), SEQ, batch, training.seed)
    losses, norms = [], []
    for step in range(training.steps):
        inputs, targets = batches.train(step, range(batch))
        logits = model(inputs, torch.arange(SEQ))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        z_loss = training.z_loss * logits.logsumexp(-1).square().mean()
        optimizer.zero_grad()
        (loss + z_loss).backward()
        norms.append(float(nn.utils.clip_grad_norm_(named.values(), training.clip or math.inf)))
        nn.utils.clip_grad_value_(named.values(), training.clip_value or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        optimizer.step()
        losses += [float(loss.detach()), float(z_loss.detach())] if training.z_loss else [float(loss.detach())]
    return losses, norms, {name: parameter.detach() for name, parameter in named.items()}


def _weights(engine: Engine) -> dict[str, Any]:
    """Trained to the end, the rank's part of each weight."""
    result = train(engine)
    return {
        "result": result,
        "weights": [replace(piece, gradient=w.local.clone()) for piece, w in zip(result.pieces, engine.weights, strict=True)],
    }


@pytest.mark.parametrize(("family", "z_loss"), [*((family, 0.0) for family in FAMILIES), ("tied", 0.2)])
def test_one_process_equals_plain_torch(family: str, z_loss: float) -> None:
    training = training_of(clip=0.3, z_loss=z_loss)
    losses, norms, weights = by_hand(family, training, 4)
    done = _weights(engine_of(job_of(family), Layout(gas=2, mbs=2), training))
    assert done["result"].losses == pytest.approx(losses, rel=1e-6)
    assert done["result"].norms == pytest.approx(norms, rel=1e-5)
    assert max(norms) > training.clip
    assert {piece.shard.name for piece in done["weights"]} == weights.keys()
    for piece in done["weights"]:
        torch.testing.assert_close(piece.gradient, weights[piece.shard.name], rtol=1e-4, atol=2e-6)


def test_values_are_clipped_after_the_norm_as_by_plain_torch() -> None:
    training = training_of(clip=0.5, clip_value=5e-3)
    losses, norms, weights = by_hand("llama", training, 4)
    done = _weights(engine_of(job_of("llama"), Layout(gas=2, mbs=2), training))
    assert done["result"].losses == pytest.approx(losses, rel=1e-6)
    assert done["result"].norms == pytest.approx(norms, rel=1e-5)  # of the whole gradient, before both
    for piece in done["weights"]:
        torch.testing.assert_close(piece.gradient, weights[piece.shard.name], rtol=1e-4, atol=2e-6)


def test_an_overflow_is_skipped_though_values_are_clipped() -> None:
    engine = engine_of(job_of("llama", precision="fp16"), Layout(), training_of(clip_value=1e-3, loss_scale=2.0**40))
    before = [weight.master.clone() for weight in engine.weights]
    assert engine.step(0).skipped
    assert all(torch.equal(old, weight.master) for old, weight in zip(before, engine.weights, strict=True))


@pytest.mark.parametrize(
    "clipping", [{"clip": 0.1}, {"clip": 0.5, "clip_value": 2e-3}, {"clip": 0.0, "clip_value": 2e-3}], ids=str
)
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"dp": 2, "zero": 0}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "zero": 1}, marks=pytest.mark.slow),
        {"dp": 2, "zero": 3},
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
        {"pp": 2, "gas": 2, "schedule": "zb-v", "virtual_stages": 2},
        pytest.param({"dp": 2, "tp": 2, "zero": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "cp": 2, "gas": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_clipped_weights(fields: dict[str, Any], clipping: dict[str, float]) -> None:
    """Weights after three clipped steps, with plain SGD so that the length of the gradient decides."""
    job, training, layout = job_of("gpt2", optimizer="sgd"), training_of(lr=1.0, **clipping), Layout(**{"gas": 1, **fields})
    batch = layout.dp * layout.mbs * layout.gas
    wanted = _weights(engine_of(job, Layout(mbs=batch), training))
    assert min(wanted["result"].norms) > 1.5 * training.clip
    wholes = {piece.shard.name: piece.gradient for piece in wanted["weights"]}
    wholes["head.linear.weight"] = wholes["embed.tokens.weight"]
    for rank in in_ranks(_weights, job, layout, training):
        assert rank["result"].norms == pytest.approx(wanted["result"].norms, rel=1e-5)
        for piece in rank["weights"]:
            torch.testing.assert_close(piece.gradient, piece.of(wholes[piece.shard.name]), rtol=1e-5, atol=1e-6)


def _planted(engine: Engine) -> str:
    """Trains a step, makes one number of one weight NaN on the rank that has it, trains on; returns the error."""
    engine.step(0)
    for weight in engine.weights:
        if weight.shard.name == "blocks.2.mlp.down.weight" and weight.local.numel() and engine.mesh.data.rank == 0:
            weight.local.view(-1)[0] = float("nan")
    before = [weight.local.clone() for weight in engine.weights]
    with pytest.raises(NotFiniteError) as error:
        engine.step(1)
    # The guard comes before the update: what was there is there.
    assert all(torch.equal(old, w.local) for old, w in zip(before, engine.weights, strict=True) if not old.isnan().any())
    return str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dp": 2},
        {"dp": 2, "zero": 3},
        {"tp": 2},
        {"pp": 2, "gas": 2},
        pytest.param({"pp": 2, "gas": 2, "dp": 2, "zero": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_nan_ends_the_run_on_every_rank_with_its_parameter(fields: dict[str, Any]) -> None:
    messages = in_ranks(_planted, job_of("llama"), Layout(**fields), training_of())
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 2: loss nan")
    assert "the gradient of" in messages[0]
    assert "weights are those of step 1" in messages[0]


def test_a_gradient_alone_that_is_not_finite_is_named_exactly() -> None:
    engine = engine_of(job_of("llama"), Layout(), training_of())
    loss = engine.backward(engine.read(0))
    weight = engine.weights[7]
    weight.gradient.view(-1)[3] = float("inf")
    with pytest.raises(RunError, match=rf"step 1: .*the gradient of {weight.shard.name} is not finite"):
        engine.update(0, loss)


# Planted faults: the comparison that all other tests rely on must detect each.


def _wrong(fields: dict[str, Any], family: str = "gpt2") -> float:
    """The largest error of a gradient, with the comparison failing; 0 where it passes."""
    layout, job = Layout(**{"gas": 2, **fields}), job_of(family)
    ranks = in_ranks(train, job, layout, training_of())
    reference = one_process(job, layout.dp * layout.mbs * layout.gas, training_of())
    try:
        assert_same(ranks, reference, job)
    except AssertionError:
        return max(gradient_errors(ranks, reference, job).values())
    return 0.0


@pytest.mark.slow
def test_a_missing_cp_reduction_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """picotron's mistake: gradients reduced over dp alone, though cp ranks see other tokens too."""
    whole = Mesh.build.__func__  # type: ignore[attr-defined]

    def build(cls: type[Mesh], *arguments: Any, **more: Any) -> Mesh:
        mesh: Mesh = whole(cls, *arguments, **more)
        return replace(mesh, data=replace(mesh.replica, group=None, rank=0, size=1, ranks=(mesh.rank,)))

    assert _wrong({"cp": 2}) == 0
    monkeypatch.setattr(Mesh, "build", classmethod(build))
    assert _wrong({"cp": 2}) > 1e-2


@pytest.mark.quick_cases(every=4)
@pytest.mark.parametrize(
    ("fields", "family"),
    [({"tp": 2}, "gpt2"), ({"tp": 4, "sequence_parallel": False}, "one-kv-head"), ({"pp": 2}, "gpt2"), ({"tp": 2}, "qwen3")],
)
def test_a_missing_gradient_sum_is_detected(fields: dict[str, Any], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms on slices of the sequence, repeated kv heads, tied ends: each is completed by one sum after backward."""
    monkeypatch.setattr(engines, "_all_reduce_flat", lambda tensors, axis: None)
    monkeypatch.setattr(engines.Engine, "_sum_gradients_of_embedding", lambda self: None)
    assert _wrong(fields, family) > 1e-2


def test_more_than_one_sequence_in_a_micro_batch() -> None:
    check("gpt2", dp=2, mbs=3, gas=2)


def test_a_router_with_nan_is_named() -> None:
    engine = engine_of(job_of("qwen2-moe"), Layout(mbs=2), training_of())
    router = next(weight for weight in engine.weights if weight.shard.name == "blocks.2.mlp.router.weight")
    with torch.no_grad():
        router.local[1, 3] = torch.nan
    with pytest.raises(
        NotFiniteError, match=r"step 1: loss nan, .*; the router of layer 2 scored tokens with NaN; the gradient of"
    ):
        engine.step(0)
