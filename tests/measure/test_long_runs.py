"""Three hundred steps of a cut run and of one process: rounding may part the two, but not what they learn."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed.checkpoint

from parallel.harness import family
from ultrascale.launch import launcher, local
from ultrascale.train.request import Overrides, from_model

torch.set_num_threads(1)
STEPS, LAST, CLOSE = 300, 50, 1e-3
WORDS = (
    f"train.steps={STEPS}",
    "train.lr=3e-3",
    "train.eval_every=60",
    "train.eval_batches=1",
    "checkpoint.every=100",
    "job.seq=32",
    "job.batch_tokens=256",
)


def losses(model: str, out: Path, *words: str, world: int) -> list[float]:
    shape = family(model).model_copy(update={"vocab": 256})
    request = from_model(shape, Overrides.parse([*WORDS, *words]), world)

    def train() -> None:
        launcher.train(request, out, world, quiet=True)
        os._exit(0)

    process = local.fork(train)
    process.join()
    assert process.exitcode == 0
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@cache
def alone(model: str, folder: Path) -> list[float]:
    return losses(model, folder / f"alone-{model}", world=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("llama", {"tp": 2, "pp": 2, "gas": 4, "mbs": 2}),
        ("llama", {"cp": 2, "zero": 3, "gas": 2, "mbs": 4}),
        ("experts", {"dp": 2, "ep": 2, "zero": 1, "gas": 2, "mbs": 2}),
    ],
    ids=["tp2-pp2", "zero3-cp2", "ep2-zero1"],
)
def test_three_hundred_steps_learn_what_one_process_learns(
    model: str, fields: dict[str, Any], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = fields.get("dp", 1) * fields.get("tp", 1) * fields.get("pp", 1) * fields.get("cp", 1)
    found = losses(model, tmp_path / "run", *(f"layout.{name}={value}" for name, value in fields.items()), world=world)
    expected = alone(model, tmp_path_factory.getbasetemp())
    assert len(found) == len(expected) == STEPS
    assert found[:10] == pytest.approx(expected[:10], rel=1e-5)
    means = [sum(curve[-LAST:]) / LAST for curve in (found, expected)]
    print(f"{model} {fields}: mean of the last {LAST} losses {means[0]:.6f}, in one process {means[1]:.6f}")
    assert means[0] == pytest.approx(means[1], rel=CLOSE)
    assert means[1] < 0.8 * expected[0]
