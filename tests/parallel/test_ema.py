"""The moving mean of the weights: against its formula, in layouts against one process, and through checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.harness import engine_of, in_ranks, job_of, training_of
from ultrascale.kernels import split_master
from ultrascale.parallel.mesh import Shard
from ultrascale.specs.checkpointing import Checkpointing
from ultrascale.specs.job import EMA
from ultrascale.specs.layout import Layout
from ultrascale.train import checkpoint, supported
from ultrascale.train.async_checkpoint import CheckpointManager, restore
from ultrascale.train.engine import Engine

DECAY, STEPS, BATCH = 0.7, 4, 4
TRAINING = training_of(steps=STEPS, ema_decay=DECAY, router_bias_rate=0.05)
CLOSE = 1e-5
slow = pytest.mark.slow
Means = list[tuple[Shard, torch.Tensor]]


def means(engine: Engine, first: int = 0, last: int = STEPS) -> Means:
    for number in range(first, last):
        engine.step(number)
    return [(_portable(weight.shard), engine.optimizer.moment(weight, EMA).clone()) for weight in engine.weights]


def _portable(shard: Shard) -> Shard:
    """Without process groups, which cannot be sent to another process."""
    return replace(shard, partial=None, copies=None, pieces=None if shard.pieces is None else replace(shard.pieces, group=None))


@cache
def one_process(model: str, optimizer: str = "adamw") -> dict[str, torch.Tensor]:
    engine = engine_of(job_of(model, optimizer=optimizer, ema=True), Layout(mbs=BATCH), TRAINING)
    return {shard.name: mean for shard, mean in means(engine)}


def assert_same(ranks: list[Means], wholes: dict[str, torch.Tensor]) -> None:
    seen = dict.fromkeys(wholes, 0)
    for shard, mean in (one for rank in ranks for one in rank):
        name = shard.name if shard.name in wholes else "embed.tokens.weight"  # a tied head on a stage of its own
        torch.testing.assert_close(mean, shard.piece(wholes[name]), rtol=0, atol=CLOSE, msg=name)
        seen[name] += mean.numel()
    assert all(seen[name] >= whole.numel() for name, whole in wholes.items())


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw-bf16"])
def test_it_is_the_mean_of_all_weights_so_far(optimizer: str) -> None:
    engine = engine_of(job_of("deepseek", optimizer=optimizer, ema=True), Layout(mbs=2), TRAINING)
    wanted = [weight.exact().clone() for weight in engine.weights]
    for number in range(STEPS):
        engine.step(number)
        wanted = [DECAY * old + (1 - DECAY) * weight.exact() for old, weight in zip(wanted, engine.weights, strict=True)]
    for weight, mean in zip(engine.weights, wanted, strict=True):
        torch.testing.assert_close(engine.optimizer.moment(weight, EMA), mean, msg=weight.shard.name)
    assert any(
        bool(mean.any()) for weight, mean in zip(engine.weights, wanted, strict=True) if "router.bias" in weight.shard.name
    )


def test_of_split_masters() -> None:
    engine = engine_of(job_of("llama", precision="bf16", ema=True), Layout(), TRAINING)
    for weight in engine.weights:  # as on a GPU, where the fused kernel steps
        weight.master = split_master.split(weight.exact())[1]
    engine.optimizer.ema = {weight.master: torch.zeros_like(weight.exact()) for weight in engine.weights}
    engine.optimizer.update_ema()
    for weight in engine.weights:
        torch.testing.assert_close(engine.optimizer.moment(weight, EMA), (1 - DECAY) * weight.exact())


def test_a_step_that_overflows_does_not_move_it() -> None:
    job = job_of("llama", precision="fp16", ema=True)
    engine = engine_of(job, Layout(), training_of(ema_decay=DECAY, loss_scale=2.0**40))
    before = [engine.optimizer.moment(weight, EMA).clone() for weight in engine.weights]
    assert engine.step(0).skipped
    assert all(
        torch.equal(old, engine.optimizer.moment(weight, EMA)) for old, weight in zip(before, engine.weights, strict=True)
    )


@pytest.mark.quick_cases("llama-zero 3", "tied-pp")
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        pytest.param("llama", {"dp": 2, "gas": 2}, id="llama-dp"),
        pytest.param("llama", {"dp": 4, "zero": 1}, id="llama-zero 1"),
        pytest.param("llama", {"dp": 2, "zero": 2, "gas": 2}, id="llama-zero 2"),
        pytest.param("narrow", {"dp": 4, "zero": 3}, id="llama-zero 3"),
        pytest.param("llama", {"dp": 2, "zero": 1, "offload": "optimizer", "gas": 2}, id="llama-offload"),
        pytest.param("llama", {"dp": 2, "tp": 2, "zero": 3, "gas": 2}, id="llama-tp zero 3"),
        pytest.param("tied", {"pp": 2, "gas": 4}, id="tied-pp"),
        pytest.param("tied", {"pp": 2, "schedule": "zb-v", "virtual_stages": 2, "gas": 4}, id="tied-v"),
        pytest.param("llama", {"cp": 2, "gas": 4}, id="llama-cp"),
        pytest.param("deepseek", {"dp": 2, "ep": 2, "gas": 2}, id="experts-ep"),
    ],
)
def test_layouts_equal_one_process(model: str, fields: dict[str, Any]) -> None:
    assert_same(in_ranks(means, job_of(model, ema=True), Layout(**fields), TRAINING), one_process(model))


def begun(engine: Engine, run: Path) -> None:
    manager = CheckpointManager(engine, run, Checkpointing(every=1))
    for number in range(2):
        engine.step(number)
    manager.save(2)
    manager.finish()


def resumed(engine: Engine, folder: Path) -> Means:
    restore(engine, checkpoint.open_checkpoint(folder))
    return means(engine, 2)


@pytest.mark.quick_cases("zero-pp")
@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"dp": 2, "zero": 3, "gas": 2}, {"pp": 2, "gas": 4}, id="zero-pp"),
        pytest.param({"tp": 2, "gas": 4}, {"dp": 4, "zero": 1}, id="tp-zero"),
        pytest.param({"pp": 2, "schedule": "zb-v", "virtual_stages": 2, "gas": 4}, {"tp": 2, "gas": 4}, id="v-tp"),
    ],
)
def test_it_resumes_under_another_layout(first: dict[str, Any], second: dict[str, Any], tmp_path: Path) -> None:
    job = job_of("tied", ema=True)
    in_ranks(begun, job, Layout(**first), TRAINING, tmp_path)
    source = checkpoint.latest(tmp_path)
    assert source.moments == ("exp_avg", "exp_avg_sq", "ema")
    assert_same(in_ranks(resumed, job, Layout(**second), TRAINING, source.folder), one_process("tied"))
    tensor = checkpoint.merged(source, ema=True)[1]
    assert not torch.equal(tensor("head.norm.weight"), source.tensor("head.norm.weight"))


def test_a_run_that_begins_to_keep_it_starts_at_its_weights(tmp_path: Path) -> None:
    in_ranks(begun, job_of("llama"), Layout(mbs=BATCH), training_of(steps=STEPS), tmp_path)
    source = checkpoint.latest(tmp_path)
    engine = engine_of(job_of("llama", ema=True), Layout(mbs=BATCH), TRAINING)
    for alone in (False, True):
        restore(engine, source, weights_alone=alone)
        for weight in engine.weights:
            assert torch.equal(engine.optimizer.moment(weight, EMA), weight.exact())
    with pytest.raises(Exception, match=r"holds no moving mean of its weights: leave --ema out, or train with job\.ema=true"):
        checkpoint.merged(source, ema=True)


def test_a_decay_without_a_mean_is_refused() -> None:
    problem = supported.layout_problem(job_of("llama"), Layout(), TRAINING)
    assert problem == "train.ema_decay is 0.7 but job.ema is false, so no mean of the weights is kept: try job.ema=true"
