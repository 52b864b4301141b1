"""Every schedule against one process, and the runtime against the schedule's own list: what ran, in which order, when."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest

from parallel.harness import check, engine_of, in_ranks, job_of, relative, training_of
from ultrascale.kernels import loss, selection
from ultrascale.kernels.float8_gemm import PlainGemms
from ultrascale.kernels.loss import linear_cross_entropy
from ultrascale.kernels.selection import Kernels
from ultrascale.parallel import vocab_loss
from ultrascale.parallel.vocab_loss import vocab_parallel_cross_entropy
from ultrascale.schedules import REGISTRY, ActionKind, build
from ultrascale.specs.layout import Layout
from ultrascale.train.engine import Engine

V: dict[str, Any] = {"virtual_stages": 2}
SCHEDULES: dict[str, dict[str, Any]] = {
    "afab": {"schedule": "afab"},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved", **V},
    "zero-bubble": {"schedule": "zero-bubble"},
    "zero-bubble-2": {"schedule": "zero-bubble", **V},
    "zb-v": {"schedule": "zb-v", **V},
    "dualpipe-v": {"schedule": "dualpipe-v", **V},
    "v-half": {"schedule": "v-half", **V},
    "v-min": {"schedule": "v-min", **V},
}
every_schedule = pytest.mark.parametrize("name", list(SCHEDULES))
slow = pytest.mark.slow


@every_schedule
@pytest.mark.parametrize("family", ["gpt2", pytest.param("tied", marks=slow), pytest.param("qwen3", marks=slow)])
def test_two_ranks(family: str, name: str) -> None:
    """GPT-2 has a tied embedding: its ends are two copies on two ranks, or in a V on the first."""
    layout = {"pp": 2, "gas": 4, **SCHEDULES[name]}
    ranks = check(family, **layout)
    wanted = build(layout["schedule"], 2, 4, layout.get("virtual_stages", 1))
    assert [tuple(result.ran) for result in ranks] == list(wanted.actions)


@pytest.mark.parametrize(
    ("pp", "name"),
    [
        *((3, name) for name in ("1f1b", "zb-v")),
        *(pytest.param(3, name, marks=slow) for name in SCHEDULES if name not in ("1f1b", "zb-v")),
        *((4, name) for name in ("interleaved", "dualpipe-v")),
        *(pytest.param(4, name, marks=slow) for name in SCHEDULES if name not in ("interleaved", "dualpipe-v")),
    ],
)
def test_more_ranks(pp: int, name: str) -> None:
    layout = {"pp": pp, "gas": 2 * pp, **SCHEDULES[name]}
    ranks = check("eight-tied", **layout)
    wanted = build(layout["schedule"], pp, 2 * pp, layout.get("virtual_stages", 1))
    assert [tuple(result.ran) for result in ranks] == list(wanted.actions)


@slow
@every_schedule
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_with_tensor_parallelism(name: str, policy: str, sequence_parallel: bool) -> None:
    check("gpt2", pp=2, tp=2, recompute=policy, sequence_parallel=sequence_parallel, **SCHEDULES[name])


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_a_deferred_weight_gradient_recomputes_once(policy: str) -> None:
    check("qwen2", pp=2, recompute=policy, **SCHEDULES["zb-v"])


def test_with_everything() -> None:
    check("tied", pp=2, tp=2, cp=2, gas=2, **SCHEDULES["zb-v"])


@slow
@every_schedule
@pytest.mark.parametrize("data_parallel", ["naive", "hooks", "bucketed"])
@pytest.mark.parametrize("every", [True, False])
def test_with_data_parallelism(name: str, data_parallel: str, every: bool) -> None:
    training = training_of(bucket_mb=0.001, reduce_every_microbatch=every)
    check("gpt2", training, pp=2, dp=2, data_parallel=data_parallel, **SCHEDULES[name])


def _when(engine: Engine) -> list[ActionKind]:
    """What the pipeline was at whenever a weight's gradient was computed."""
    plain, kinds = PlainGemms.grad_weight, list[ActionKind]()
    actions = engine.pipeline.schedule.actions[engine.pipeline.rank]

    def watched(self: PlainGemms, grad: Any, x: Any) -> Any:
        kinds.append(actions[len(engine.pipeline.ran)].kind)
        return plain(self, grad, x)

    with mock.patch.object(PlainGemms, "grad_weight", watched):
        engine.backward(engine.read(0))
    assert not any(chunk.deferred.pending or chunk.deferred.open for chunk in engine.pipeline.chunks.values())
    return kinds


@pytest.mark.parametrize("name", ["zero-bubble", "zb-v"])
def test_deferred_weight_grads_run_in_their_actions(name: str) -> None:
    layout = Layout(pp=2, gas=4, **SCHEDULES[name])
    for kinds in in_ranks(_when, job_of("llama"), layout, training_of()):
        assert ActionKind.I not in kinds
        # Seven matmuls a layer, each in the one W or B of its micro-batch; the head's is never deferred.
        assert kinds.count(ActionKind.W) > 0
        assert len(kinds) == 4 * 7 * 2


def _evaluated(engine: Engine) -> tuple[float, float, float, float]:
    """Loss of a batch by evaluation and by training; loss of held-out text before and after a step."""
    batch = engine.read(0)
    same = float(engine._sum_of_losses(engine.pipeline.evaluate(batch))) / batch.losses
    before = engine.evaluate(2)
    trained = engine.step(0).loss
    return same, trained, before, engine.evaluate(2)


@pytest.mark.parametrize(
    "fields",
    [
        {"pp": 2, **SCHEDULES["zb-v"]},
        {"tp": 2},
        {"dp": 2, "zero": 1},
        {"dp": 2, "data_parallel": "ddp"},
        *(pytest.param({"dp": 2, "zero": zero}, marks=slow) for zero in (0, 3)),
        pytest.param({"cp": 2}, marks=slow),
        pytest.param({"pp": 2, **SCHEDULES["interleaved"]}, marks=slow),
        pytest.param({"pp": 4, "gas": 8, **SCHEDULES["dualpipe-v"]}, marks=slow),
        pytest.param({"pp": 2, "dp": 2, "zero": 2, **SCHEDULES["zero-bubble"]}, marks=slow),
    ],
    ids=lambda fields: "-".join(f"{value}" for value in fields.values()),
)
def test_evaluation(fields: dict[str, Any]) -> None:
    layout = Layout(**{"gas": 4, **fields})
    model = "eight-tied" if layout.pp == 4 else "tied"
    wanted = _evaluated(engine_of(job_of(model), Layout(mbs=layout.dp * layout.gas), training_of()))
    assert wanted[0] == pytest.approx(wanted[1], rel=1e-6)
    assert abs(wanted[3] - wanted[2]) > 1e-4  # the step changed what is evaluated
    for actual in in_ranks(_evaluated, job_of(model), layout, training_of()):
        assert relative(list(actual), list(wanted)) < 1e-5


SPLIT = [name for name, fields in SCHEDULES.items() if REGISTRY[fields["schedule"]].split_backward]


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize(
    ("family", "name", "fields"),
    [
        ("tied", "zero-bubble", {}),
        ("llama", "zb-v", {"dp": 2, "zero": 3}),
        ("tied", "zero-bubble", {"tp": 2, "mbs": 3}),
        *(pytest.param("tied", name, {}, marks=slow) for name in SPLIT[1:]),
        *(pytest.param("llama", name, {"tp": 2}, marks=slow) for name in SPLIT[1:]),
        *(pytest.param("tied", name, {"dp": 2, "zero": zero}, marks=slow) for name in SPLIT[:3:2] for zero in (1, 2, 3)),
        pytest.param("llama", "zero-bubble", {"tp": 2, "sequence_parallel": False}, marks=slow),
        pytest.param("tied", "zb-v", {"tp": 2, "dp": 2, "zero": 1}, marks=slow),
        pytest.param("tied", "zero-bubble", {"tp": 2, "dp": 2, "zero": 3}, marks=slow),
    ],
    ids=str,
)
def test_chunked_loss_under_a_split_backward(
    family: str, name: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's weight gradient is computed with the loss and is not deferred; chunks divide no micro-batch."""
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(loss=layout.gpus > 1))
    monkeypatch.setattr(loss, "linear_cross_entropy", partial(linear_cross_entropy, chunk=5))
    monkeypatch.setattr(vocab_loss, "vocab_parallel_cross_entropy", partial(vocab_parallel_cross_entropy, chunk=5))
    check(family, evaluate=True, pp=2, **{"gas": 4, **fields, **SCHEDULES[name]})
