"""`bench ladders`: every rung through the real engine, a rung that cannot run as a row, and what each bought."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from ultrascale.cli.common import plain
from ultrascale.cost.estimate import estimate
from ultrascale.measure import bench_ladders as ladders
from ultrascale.measure import bench_trial as trial
from ultrascale.measure.bench_ladders import LADDERS, Figures, Ladder, LadderMachine, Rung, planned
from ultrascale.measure.bench_trial import TrialFailure
from ultrascale.show import bench as show
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model


def here(**changes: Any) -> LadderMachine:
    fields: dict[str, Any] = {
        "model": Model.load("tiny"),
        "seq": 32,
        "mbs": 1,
        "steps": 1,
        "world": 2,
        "gpus": 0,
        "machine": lambda world, precision: None,
    }
    return LadderMachine(**{**fields, **changes})


SOON = ("tensor", "context")
LATE = [pytest.param(name, marks=pytest.mark.slow) for name in LADDERS if name not in SOON]


@pytest.mark.parametrize("name", [*SOON, *LATE])
def test_every_rung_of_a_ladder_runs_with_equal_losses(name: str) -> None:
    found = ladders.climb(name, here())
    ran = [rung for rung in found.rungs if rung.measured is not None]
    missing = {rung.name: rung.problem for rung in found.rungs if rung.measured is None}
    assert list(missing) == (["compile", "fused"] if name == "kernels" else []), missing
    bound = 2e-3 if name == "precision" else 1e-5
    assert [rung.loss for rung in ran] == pytest.approx([ran[0].loss] * len(ran), rel=bound)
    assert 5 < ran[0].loss < 6  # the logarithm of 256 words, and no learning yet
    for rung in ran:
        assert rung.measured is not None
        assert rung.measured.tensors_gib > 0
        # Collectives inside torch's FSDP are not measured separately; all others on a CPU are.
        assert (rung.measured.exposed_s is None) == (name == "zero" and rung.name != "ZeRO-0")
        assert rung.measured.bubble_s is not None
        assert (rung.measured.bubble_s > 0) == (name == "pipeline")
    tensors_gib = [rung.measured.tensors_gib for rung in ran if rung.measured]
    if name in ("recompute", "tensor"):
        assert tensors_gib == sorted(tensors_gib, reverse=True)
        assert tensors_gib[-1] < tensors_gib[0]
    if name == "zero":
        assert tensors_gib[3] < tensors_gib[1] < tensors_gib[0]


def test_rungs_are_the_playbooks() -> None:
    names = {name: [rung.name for rung in planned(name, 2)] for name in LADDERS}
    assert names["data"] == ["naive", "hooks", "buckets", "last only"]
    assert names["zero"] == ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert names["tensor"] == ["TP", "TP+SP"]
    assert names["context"] == ["allgather", "ring", "zigzag"]
    assert names["pipeline"] == ["AFAB", "1F1B", "interleaved", "zero bubble", "DualPipe"]
    assert names["recompute"] == ["none", "selective", "full"]
    assert names["precision"] == ["fp32", "bf16", "fp8"]
    assert names["kernels"] == ["eager", "compile", "fused"]
    requests = [ladders.requested(rung, here(mbs=3)) for rung in planned("data", 2)]
    assert [one.training.reduce_every_microbatch for one in requests] == [True, True, True, False]
    assert {one.layout.batch_tokens(32) for one in requests} == {2 * 4 * 3 * 32}
    assert ladders.requested(planned("pipeline", 4)[2], here(world=4)).layout.virtual_stages == 2


def test_prediction_counts_each_reduction() -> None:
    """Four reductions a step: three more than an estimate has, each as exposed as its one."""
    job = Job(model=Model.load("tiny"), cluster=Cluster.load("2xh100"), seq=128, batch_tokens=8 * 128)
    predicted = estimate(job, Layout(dp=2, mbs=1, gas=4, data_parallel="naive"))
    once, often = ladders.predicted_figures(predicted), ladders.predicted_figures(predicted, 4)
    assert predicted.time.data_s > 0
    assert once.step_s == predicted.step_time_s
    assert often.step_s == pytest.approx(once.step_s + 3 * predicted.time.data_s)
    assert once.exposed_s == pytest.approx(predicted.time.data_s)
    assert often.exposed_s == pytest.approx(4 * predicted.time.data_s)
    memory = predicted.memory[0].memory
    assert once.tensors_gib == pytest.approx((memory.total - memory.runtime) / 2**30)


def test_what_cannot_run_here_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(trial, "run", never)
    alone = ladders.climb("tensor", here(world=1, gpus=1))
    assert {rung.problem for rung in alone.rungs} == {"needs 2 GPUs, here is 1 GPU"}
    assert {rung.problem for rung in ladders.climb("zero", here(world=1)).rungs} == {"needs 2 processes, here is --nproc 1"}
    latent = ladders.climb("recompute", here(model=Model.load("deepseek-v2-lite")))
    assert all("latent attention" in str(rung.problem) for rung in latent.rungs)
    monkeypatch.setattr(trial, "run", lambda *_: TrialFailure("out of memory", "rank 0 ran out of memory at step 1"))
    assert ladders.climb("recompute", here()).rungs[0].problem == "out of memory"
    monkeypatch.setattr(trial, "run", lambda *_: TrialFailure("crashed", "ValueError: no"))
    assert ladders.climb("recompute", here()).rungs[0].problem == "crashed: ValueError: no"


def test_gains_are_over_the_last_rung_that_ran() -> None:
    slow, quick = Figures(1.0, 2.0, 0.5, 0.0), Figures(0.5, 1.0, None, 0.25)
    rungs = [
        Rung("eager", "a", measured=slow, predicted=Figures(0.8, 1.5, 0.4, 0.0), loss=11.5),
        Rung("compile", "b", problem="out of memory"),
        Rung("fused", "c", measured=quick, loss=11.5),
    ]
    assert show.gains(rungs) == ["–", "–", "2.00× the speed, -50% memory"]
    text = StringIO()
    ladder = Ladder("kernels", "m, 8 × 4,096 tokens", tuple(rungs))
    show.show_ladder(Console(file=text, width=220), ladder)
    for word in ("1.00 s (800.0 ms)", "2.00 GiB (1.50 GiB)", "– (–)", "out of memory", "2.00× the speed, -50% memory"):
        assert word in text.getvalue(), word
    written = json.loads(json.dumps({"ladders": [ladder]}, default=plain))["ladders"][0]["rungs"]
    assert written[1]["problem"] == "out of memory"
    assert written[2]["measured"]["bubble_s"] == 0.25
