"""ZeRO-3 that gathers in fp8: bit for bit what wide gathers give, half of their bytes, and one all-reduce for all scales."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from parallel.harness import RankResult, in_ranks, job_of, train, training_of
from ultrascale.kernels import float8, fused
from ultrascale.kernels.float8 import Float8Linear
from ultrascale.kernels.float8_gemm import E4M3, Float8Gemms, Float8Weight, quantise
from ultrascale.kernels.selection import Kernels
from ultrascale.measure.rehearse_tracker import OperatorTracker
from ultrascale.model.transformer import Transformer
from ultrascale.parallel.comm import SINGLE_RANK
from ultrascale.parallel.zero import Float8GatherScales
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Fp8Gather, Fp8Keep, Training
from ultrascale.train import supported
from ultrascale.train.engine import Engine

slow = pytest.mark.slow
MODEL = Model(name="small", layers=4, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=64)
EXPERTS = MODEL.model_copy(
    update={"moe": Model.load("tiny-moe").moe.model_copy(update={"shared_experts": 1, "shared_expert_ffn": 32})}  # type: ignore[union-attr]
)

LAYOUTS: list[Any] = [
    {"dp": 2},
    {"dp": 3},  # 64 rows: the last rank has fewer, which are padded
    {"dp": 2, "recompute": "selective", "keep_gathered": True},
    {"dp": 2, "tp": 2, "zero_shards": 2},
    *(
        pytest.param(fields, marks=slow)
        for fields in (
            {"dp": 4, "zero_shards": 2},
            {"dp": 2, "cp": 2, "recompute": "full"},
            {"dp": 2, "pp": 2, "schedule": "zb-v", "virtual_stages": 2, "gas": 4},
            {"dp": 2, "pp": 2, "schedule": "1f1b"},
            {"dp": 2, "offload": "optimizer"},
        )
    ),
]


def both(model: Model, fields: dict[str, Any], **training: Any) -> tuple[list[RankResult], list[RankResult]]:
    """The same steps with gathers in fp8 and in what computes."""
    job, layout = job_of(model, precision="fp8"), Layout(**{"zero": 3, "gas": 2, **fields})
    narrow, wide = (in_ranks(train, job, layout, training_of(fp8_gather=gather, **training)) for gather in ("fp8", "bf16"))
    return narrow, wide


def assert_equal(narrow: list[RankResult], wide: list[RankResult]) -> None:
    for one, other in zip(narrow, wide, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        for piece, expected in zip(one.pieces, other.pieces, strict=True):
            assert torch.equal(piece.gradient, expected.gradient), piece.shard.name


@pytest.mark.quick_cases(every=6)
@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_fp8_gather_is_bitwise_equal(fields: dict[str, Any]) -> None:
    """Layouts in fp8 against one process: tests/train/test_fp8.py. Here three steps are equal in every bit."""
    assert_equal(*both(MODEL, fields, fp8_keep="none"))


@slow
def test_a_stage_without_fp8_blocks() -> None:
    """With two layers to a stage, `ends` leaves one in fp8; with two layers in all, none: nothing is there to agree on."""
    for layers in (4, 2):
        assert_equal(*both(MODEL.model_copy(update={"layers": layers}), {"dp": 2, "pp": 2}, fp8_keep="ends"))


@slow
def test_fp8_gather_is_bitwise_equal_with_experts() -> None:
    assert_equal(*both(EXPERTS, {"dp": 4, "ep": 2}, fp8_keep="head"))


def test_a_fused_block_uses_gathered_fp8_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a weight then share a scale, a power of two as theirs were: no entry is so small that it rounds otherwise."""
    monkeypatch.setattr("ultrascale.train.build.selection.choose", lambda *_: Kernels(fused=True, loss=True))
    narrow, wide = both(MODEL, {"dp": 2}, fp8_keep="none")
    assert narrow[0].losses == pytest.approx(wide[0].losses, rel=1e-6)
    for one, other in zip(narrow[0].pieces, wide[0].pieces, strict=True):
        assert torch.allclose(one.gradient, other.gradient, rtol=1e-5, atol=1e-6 * float(other.gradient.abs().max()))


def evaluated(engine: Engine) -> list[float]:
    """After one step so long that the weights' scales are others."""
    before = [float(scale) for scale in _scales(engine)]
    engine.step(0)
    loss = engine.evaluate(1)
    return [loss, sum(a != float(b) for a, b in zip(before, _scales(engine), strict=True))]


def _scales(engine: Engine) -> list[torch.Tensor]:
    return [] if engine.pipeline.scales is None else list(engine.pipeline.scales.scales)


def test_evaluation_uses_the_current_weights() -> None:
    job, layout = job_of(MODEL, precision="fp8"), Layout(dp=2, zero=3, gas=1)
    training = training_of(fp8_keep="none", lr=1.0)
    narrow, changed = in_ranks(evaluated, job, layout, training)[0]
    wide, _ = in_ranks(evaluated, job, layout, training.changed(fp8_gather="bf16"))[0]
    assert changed
    assert narrow == wide


def test_scales_are_those_of_the_compute_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """449 is 448 in bf16, which just fits: with a scale of the fp32 weight, half of fp8's range would be lost."""
    monkeypatch.setattr("ultrascale.parallel.zero.local_tensor", lambda weight: weight.data)
    weight = torch.nn.Parameter(torch.tensor([[449.0, -1.0], [3.0, 0.3]]))
    scales = Float8GatherScales([[weight]], SINGLE_RANK, torch.bfloat16, torch.device("cpu"))
    scales.update()
    assert float(scales.scales) == float(quantise(weight.data.bfloat16(), "tensor", E4M3).scale) == 1.0


def test_cublas_finds_each_scale_at_a_multiple_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ultrascale.parallel.zero.local_tensor", lambda weight: weight.data)
    weights = [torch.nn.Parameter(torch.full((2, 2), float(2**number))) for number in range(3)]
    scales = Float8GatherScales([[weight] for weight in weights], SINGLE_RANK, torch.bfloat16, torch.device("cpu"))
    scales.update()
    first = scales.scales[0].data_ptr()
    assert [(scale.data_ptr() - first) % 16 for scale in scales.scales] == [0, 0, 0]
    assert [float(scale / scales.scales[0]) for scale in scales.scales] == [1, 2, 4]


def exchanged(engine: Engine) -> Counter[tuple[str, int]]:
    engine.step(0)  # FSDP2 learns in the first step what to fetch ahead
    shard = engine.mesh.shard.group
    assert shard is not None
    watch = OperatorTracker(engine, {str(shard.group_name): "zero"})
    with watch:
        engine.step(1)
    found: Counter[tuple[str, int]] = Counter()
    for (_, _, call), count in watch.calls.items():
        found[call.kind, call.sent] += count
    return found


@pytest.mark.parametrize("keep", ["ends", "none"])
def test_gathers_send_one_byte_per_element(keep: Fp8Keep) -> None:
    """Half of bf16's on a GPU; here, where fp32 stands for bf16, a quarter. One small all-reduce comes with it."""
    job, layout = job_of(MODEL, precision="fp8"), Layout(dp=2, zero=3, gas=1)
    narrow, wide = (
        in_ranks(exchanged, job, layout, training_of(fp8_keep=keep, fp8_gather=gather))[0] for gather in ("fp8", "bf16")
    )
    block = 64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96
    layers, head = (2, 0) if keep == "ends" else (4, 64 * 64)
    # Each rank sends its half; layers are gathered twice, the head once.
    less = 3 * (2 * layers * block + head) // 2
    assert sent(wide, "all_gather") - sent(narrow, "all_gather") == less
    assert sent(wide, "reduce_scatter") == sent(narrow, "reduce_scatter")
    weights = 7 * layers + (1 if head else 0)
    assert narrow - wide == Counter({("all_reduce", 4 * weights): 1}) + Counter(
        {key: count for key, count in (narrow - wide).items() if key[0] == "all_gather"}
    )


def sent(calls: Counter[tuple[str, int]], kind: str) -> int:
    return sum(size * count for (name, size), count in calls.items() if name == kind)


def plain_shards(engine: Engine) -> set[type]:
    engine.step(0)
    return {type(tensor) for weight in engine.weights for tensor in (weight.local, weight.master, weight.gradient)}


def test_optimizer_and_checkpoint_see_plain_tensors() -> None:
    job = job_of(MODEL, precision="fp8")
    assert in_ranks(plain_shards, job, Layout(dp=2, zero=3, gas=1), training_of())[0] == {torch.Tensor}


def test_an_fp8_weight_is_not_converted_for_the_matmul() -> None:
    torch.manual_seed(0)
    weight, x, grad = torch.randn(32, 48), torch.randn(16, 48), torch.randn(16, 32)
    narrow = Float8Weight(*quantise(weight, "tensor", E4M3), torch.float32)
    numbers = Float8Gemms("tensor")
    assert torch.equal(numbers.forward(x, narrow), numbers.forward(x, weight))
    assert torch.equal(numbers.grad_input(grad, narrow), numbers.grad_input(grad, weight))
    parameter = torch.nn.Parameter(narrow)
    numbers.linear(x, parameter, None).backward(grad)  # type: ignore[no-untyped-call]
    assert type(parameter.grad) is torch.Tensor
    assert torch.equal(parameter.grad, numbers.grad_weight(grad, x))
    with pytest.raises(NotImplementedError, match="gathered in fp8"):
        F.linear(x, narrow)


def test_a_compiled_fp8_matmul_is_one_graph() -> None:
    torch.manual_seed(0)
    linear = Float8Linear(torch.nn.Linear(48, 32), Float8Gemms("tensor"))
    x = torch.randn(16, 48, requires_grad=True)
    expected = torch.autograd.grad(linear(x).square().sum(), x)[0]
    linear.weight = torch.nn.Parameter(Float8Weight(*quantise(linear.weight.data, "tensor", E4M3), torch.float32))
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    compiled(x).square().sum().backward()
    assert torch.equal(x.grad, expected)
    assert linear.weight.grad is not None


@pytest.mark.parametrize(
    ("changes", "keep", "count"),
    [({}, "none", 29), ({}, "ends", 14), ({"tied_embeddings": True}, "none", 28), ({"ffn": 100}, "head", 16)],
)
def test_which_weights_are_gathered_in_fp8(changes: dict[str, Any], keep: Fp8Keep, count: int) -> None:
    """Seven of each block and the head; but not a head that is the embedding too, nor what is no multiple of 16."""
    with torch.device("meta"):
        model = Transformer(MODEL.model_copy(update=changes))
    float8.apply(model, "tensor", keep, torch.device("cpu"))
    assert len(float8.weights(model)) == count


def test_joined_matmuls_of_a_fused_block_share_a_scale() -> None:
    with torch.device("meta"):
        model = Transformer(MODEL)
    fused.apply(model)
    float8.apply(model, "tensor", "head", torch.device("cpu"))
    assert [len(group) for group in float8.weights(model)] == 4 * [3, 2, 1, 1]


def problem(gather: Fp8Gather, precision: str = "fp8", scaling: str = "tensor", **fields: Any) -> str | None:
    layout = Layout(**{"dp": 2, "zero": 3, **fields})
    job = job_of(MODEL, precision=precision).changed(cluster=Cluster.load(f"{layout.gpus}xh100"), batch_tokens=32 * layout.dp)
    return supported.layout_problem(job, layout, Training(fp8_gather=gather, fp8_scaling=scaling))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"precision": "bf16"}, ["matmuls are in bf16", "job.precision=fp8"]),
        ({"zero": 2}, ["zero = 2", "layout.zero=3"]),
        ({"dp": 1}, ["shards = 1"]),
        ({"scaling": "row"}, ["train.fp8_scaling is row", "train.fp8_scaling=tensor"]),
        ({"scaling": "block"}, ["train.fp8_scaling is block"]),
        ({"offload": "parameters"}, ["from the host", "layout.offload=optimizer"]),
    ],
)
def test_impossible_fp8_gather_is_refused_and_auto_falls_back(fields: dict[str, Any], says: list[str]) -> None:
    message = str(problem("fp8", **fields))
    assert message.startswith("train.fp8_gather is fp8 but ")
    assert all(part in message for part in says), message
    assert problem("auto", **fields) is None
    assert problem("fp8") is None
