"""μP: a learning rate changes what a wide model computes as much as what a narrow one does."""

from __future__ import annotations

import pytest

from parallel.harness import engine_of, job_of, training_of
from ultrascale.parallel.mesh import Shard
from ultrascale.specs.errors import SpecError
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.training import Training
from ultrascale.train import mup, supported

BASE = 32


def widened(times: int) -> Job:
    """`times` as many heads, and all else in proportion."""
    job = job_of("llama")
    width = {name: times * getattr(job.model, name) for name in ("hidden", "heads", "kv_heads", "ffn")}
    return job.changed(model=job.model.model_copy(update=width))


def test_scales_by_role() -> None:
    job, training = widened(4), Training(mup_base_width=BASE)
    matrix, head = Shard("blocks.0.mlp.down.weight", (128, 192)), Shard("head.linear.weight", (64, 128))
    router, experts = Shard("blocks.0.mlp.router.weight", (8, 128)), Shard("blocks.0.mlp.experts.up", (8, 48, 128))
    shapes = {"embed.tokens.weight": (64, 128), "blocks.0.attention.conv.q": (128, 4), "head.norm.weight": (128,)}
    others = [Shard(name, shape) for name, shape in shapes.items()]
    for shard, init in ((matrix, 0.5), (experts, 0.5), (head, 0.25), (router, 0.25)):
        assert (mup.init_scale(shard, job, training), mup.lr_scale(shard, job, training)) == (init, 0.25), shard.name
    assert {(mup.init_scale(one, job, training), mup.lr_scale(one, job, training)) for one in others} == {(1.0, 1.0)}
    assert mup.lr_scale(matrix, job, Training()) == 1


def losses(times: int, base: int | None) -> list[float]:
    """Of four steps on one batch, at a learning rate that suits the narrow model."""
    training = training_of(steps=4, lr=1e-2, mup_base_width=base, warmup_steps=0, lr_schedule="constant")
    engine = engine_of(widened(times), Layout(mbs=4), training)
    return [engine.step(0).loss for _ in range(training.steps)]


def test_a_learning_rate_carries_over_to_a_wide_model() -> None:
    narrow, wide, without = losses(1, BASE), losses(8, BASE), losses(8, None)
    assert narrow == losses(1, None)
    assert narrow[0] - narrow[-1] > 0.6
    assert wide == pytest.approx(narrow, abs=0.12)
    assert without[-1] > without[0]  # eight times as wide, it diverges


def test_base_width_is_refused_where_it_does_not_apply() -> None:
    for change, says in (({"optimizer": "sgd"}, "not adamw"), ({"adapter_rank": 2}, "frozen")):
        with pytest.raises(SpecError, match=says):
            supported.check(job_of("llama").changed(**change), Layout(), training_of(mup_base_width=BASE))
    with pytest.raises(SpecError, match="one matrix"):
        supported.check(job_of("tied"), Layout(), training_of(mup_base_width=BASE))
