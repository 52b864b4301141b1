"""Data parallelism without ZeRO: every variant against one process, when and how often it reduces, what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parallel.harness import assert_same, check, gradient_errors, in_ranks, job_of, one_process, relative, train, training_of
from ultrascale.kernels import loss, selection
from ultrascale.kernels.selection import Kernels
from ultrascale.launch import local
from ultrascale.parallel import comm, data
from ultrascale.parallel.comm import SINGLE_RANK, Axis
from ultrascale.parallel.data import mean_start
from ultrascale.specs.layout import Layout
from ultrascale.train.engine import Engine

VARIANTS = ["naive", "hooks", "bucketed", "ddp"]
slow = pytest.mark.slow


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_against_one_process(variant: str, every: bool) -> None:
    training = training_of(bucket_mb=0.001, reduce_every_microbatch=every)
    check("gpt2", training, dp=2, gas=3, data_parallel=variant)


@pytest.mark.parametrize(
    ("schedule", "every"),
    [("1f1b", False), ("afab", True), *(pytest.param(*one, marks=slow) for one in (("1f1b", True), ("afab", False)))],
)
def test_torch_ddp_in_a_pipeline(schedule: str, every: bool) -> None:
    """Its forwards run ahead of its backwards, which DDP does not support."""
    training = training_of(bucket_mb=0.001, reduce_every_microbatch=every)
    check("gpt2", training, dp=2, pp=2, gas=3, schedule=schedule, data_parallel="ddp")


@slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_with_context_parallelism(variant: str) -> None:
    check("qwen3", dp=2, cp=2, gas=2, data_parallel=variant)


def _events(engine: Engine) -> list[str]:
    """Reductions and ends of backwards of one step, in order."""
    events: list[str] = []
    reduce, after = data.mean_start, data.BucketedGrads.after_backward

    def started(*arguments: Any) -> Any:
        events.append("reduce")
        return reduce(*arguments)

    def ended(self: Any, last: bool, split: bool) -> None:
        events.append("end")
        after(self, last, split)

    data.mean_start = started
    data.BucketedGrads.after_backward = ended  # type: ignore[method-assign]
    engine.backward(engine.read(0))
    return events


PARAMETERS = 3 + 4 * 9  # of llama: two ends and a norm; seven matmuls and two norms a layer


@pytest.mark.parametrize(
    ("variant", "bucket_mb", "every", "wanted"),
    [
        ("naive", 25.0, False, ["end"] * 3 + ["reduce"] * PARAMETERS),
        pytest.param("naive", 25.0, True, 3 * (["end"] + ["reduce"] * PARAMETERS), marks=slow),
        ("hooks", 25.0, False, ["end"] * 2 + ["reduce"] * PARAMETERS + ["end"]),
        ("hooks", 25.0, True, 3 * (["reduce"] * PARAMETERS + ["end"])),
        ("bucketed", 25.0, False, ["end"] * 2 + ["reduce"] + ["end"]),
        pytest.param("bucketed", 1e-9, False, ["end"] * 2 + ["reduce"] * PARAMETERS + ["end"], marks=slow),
        ("bucketed", 0.02, True, 3 * (["reduce"] * 8 + ["end"])),
    ],
)
def test_when_gradients_are_reduced(variant: str, bucket_mb: float, every: bool, wanted: list[str]) -> None:
    """Hooks and buckets reduce before their backward ends; naive data parallelism reduces at the end."""
    layout = Layout(dp=2, gas=3, data_parallel=variant)
    training = training_of(bucket_mb=bucket_mb, reduce_every_microbatch=every)
    for events in in_ranks(_events, job_of("llama"), layout, training):
        assert events == wanted


def _order(engine: Engine) -> list[int]:
    """For each reduction, how many of the parameters had no gradient yet when it began."""
    accumulated, left = 0, list[int]()
    total, start = len(engine.weights), data.mean_start

    def count(_: Any) -> None:
        nonlocal accumulated
        accumulated += 1

    def started(*arguments: Any) -> Any:
        left.append(total - accumulated)
        return start(*arguments)

    for weight in engine.weights:
        weight.parameter.register_post_accumulate_grad_hook(count)
    data.mean_start = started
    engine.backward(engine.read(0))
    return left


def test_buckets_fill_in_order() -> None:
    """The first starts while most gradients are still to come, and none waits for a parameter of a much later layer."""
    training = training_of(bucket_mb=0.02)
    for left in in_ranks(_order, job_of("llama"), Layout(dp=2), training):
        assert left == sorted(left, reverse=True)
        assert left[0] > PARAMETERS / 2


def _compressed(engine: Engine) -> tuple[Any, Counter[torch.dtype]]:
    """What training saw, and the bytes that travelled between the data ranks in the first step, by format."""
    sent: Counter[torch.dtype] = Counter()
    for name in ("all_reduce_start", "all_to_all", "all_gather"):
        setattr(comm, name, _watched(getattr(comm, name), engine.mesh.data, sent))
    return train(engine), sent


def _watched(function: Callable[..., Any], axis: Axis, sent: Counter[torch.dtype]) -> Callable[..., Any]:
    def watched(x: torch.Tensor, on: Axis, *arguments: Any, **more: Any) -> Any:
        if on is axis:
            sent[x.dtype] += x.nbytes
        return function(x, on, *arguments, **more)

    return watched


@pytest.mark.parametrize("variant", ["hooks", "bucketed"])
@pytest.mark.parametrize(
    ("compress", "dtype", "each", "bound"), [("bf16", torch.bfloat16, 2, 2.0**-7), ("int8", torch.int8, 1.5, 4 / 127)]
)
def test_compressed_gradients(variant: str, compress: str, dtype: torch.dtype, each: float, bound: float) -> None:
    """Near one process's and the same on all ranks, to the bit; and the small format is really what is sent."""
    job, layout, training = job_of("llama"), Layout(dp=2, gas=2, data_parallel=variant), training_of(compress=compress, steps=2)
    found = in_ranks(_compressed, job, layout, training)
    ranks = [result for result, _ in found]
    reference = one_process(job, 4, training_of(steps=2))
    if variant == "hooks" or compress == "bf16":
        assert max(gradient_errors(ranks, reference, job).values()) < bound
    # In a bucket, small gradients share the int8 scale of a block with large ones at its edge: the whole is near all the same.
    found_whole, whole = (torch.cat([piece.gradient.flatten() for piece in result.pieces]) for result in (ranks[0], reference))
    assert float((found_whole - whole).norm()) < bound / 2 * float(whole.norm())
    assert relative(ranks[0].losses, reference.losses) < 1e-2
    assert ranks[0].losses == ranks[1].losses
    for mine, other in zip(ranks[0].pieces, ranks[1].pieces, strict=True):
        assert torch.equal(mine.gradient, other.gradient)
    numbers = 2 * sum(piece.gradient.numel() for piece in ranks[0].pieces)
    for _, sent in found:
        # int8: all of it one way, this rank's half back; fp32 are the scales and nothing else. Norms are padded to a block.
        assert each * numbers <= sent[dtype] < each * numbers * (1.01 if variant == "bucketed" else 1.25)
        assert sent[torch.float32] <= 0.03 * sent[torch.int8]


def _mean(rank: int, nproc: int, store: str, compress: data.Compress, length: int) -> torch.Tensor:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    axis = Axis("dp", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    result = mean_start(_values(rank, length), axis, compress).wait()
    dist.destroy_process_group()
    return result


def _values(rank: int, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 1)


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_int8_mean_of_three_ranks(length: int) -> None:
    """Each number is rounded to 1/254 of its slice's largest when it leaves, and once more when the mean comes back."""
    inputs = torch.stack([_values(rank, length) for rank in range(3)])
    results = local.run(_mean, 3, "int8", length, timeout_s=60)
    bound = (inputs.abs().amax(dim=1).mean() + inputs.mean(0).abs().max() * (1 + 1 / 127)) / 254
    assert all(torch.equal(result, results[0]) for result in results)
    assert float((results[0] - inputs.mean(0)).abs().max()) <= float(bound) * (1 + 1e-5)


def _int8_mean(rank: int, nproc: int, store: str) -> torch.Tensor:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    axis = Axis("dp", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    values = torch.cat([torch.ones(2048), torch.full((2048,), 1e-4)])
    result = mean_start(values, axis, "int8").wait()
    dist.destroy_process_group()
    return result


def test_int8_keeps_small_gradients_among_large_ones() -> None:
    for result in local.run(_int8_mean, 2, timeout_s=60):
        torch.testing.assert_close(result[2048:], torch.full((2048,), 1e-4), rtol=1e-2, atol=0)


def test_int8_keeps_non_finite_gradients() -> None:
    codes, scales = data._quantize(torch.tensor([[1.0, float("nan")], [1.0, float("inf")], [0.0, 0.0]]))
    back = codes.float() * scales
    assert not bool(torch.isfinite(back[:2]).any())
    assert torch.equal(back[2], torch.zeros(2))


def _stale(engine: Engine) -> Any:
    """Trains with buckets that still hold something when a step begins, as they do after every step."""
    for chunk in engine.pipeline.chunks.values():
        assert isinstance(chunk.gradients, data.BucketedGrads)
        for bucket in chunk.gradients.buckets:
            bucket.flat.fill_(float("nan"))
    return train(engine)


@pytest.mark.parametrize("fields", [{"gas": 3}, {"dp": 2, "gas": 2}, {"pp": 2, "gas": 2, "schedule": "zero-bubble"}], ids=str)
def test_the_first_micro_batch_overwrites_old_gradients(fields: dict[str, Any]) -> None:
    job, layout = job_of("tied" if "pp" not in fields else "llama"), Layout(**fields)
    ranks = in_ranks(_stale, job, layout, training_of())
    assert_same(ranks, one_process(job, layout.dp * layout.gas, training_of()), job)


def test_an_unused_parameter_has_a_zero_gradient() -> None:
    used, unused = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    gradients = data.BucketedGrads(torch.nn.ModuleList([used, unused]), SINGLE_RANK, "bucketed", torch.float32)
    for step in range(2):
        for bucket in gradients.buckets:
            bucket.flat.fill_(7.0)
        gradients.begin()
        for last in (False, True):
            gradients.before_backward(last, split=False)
            used(torch.ones(1, 2)).sum().backward()
            gradients.after_backward(last, split=False)
        gradients.finish()
        assert torch.equal(gradients.grad_for(used.weight), torch.full((2, 2), 2.0)), step
        assert torch.equal(gradients.grad_for(unused.weight), torch.zeros(2, 2)), step


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_uncopied_gradients_with_fused_blocks_and_chunked_loss(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one GPU does with one micro-batch, on a CPU: several steps, so that a stale gradient would be detected."""
    job, layout = job_of(family), Layout(mbs=2)
    reference = one_process(job, 2, training_of())
    monkeypatch.setattr(selection, "choose", lambda *_: Kernels(single_microbatch=True, loss=True, fused=True))
    monkeypatch.setattr(loss, "linear_cross_entropy", partial(loss.linear_cross_entropy, chunk=7))
    assert_same(in_ranks(train, job, layout, training_of()), reference, job)


@pytest.mark.parametrize(
    "fields",
    [
        {"dp": 2, "gas": 2, "data_parallel": "hooks"},
        {"dp": 2, "gas": 2, "zero": 3},
        pytest.param({"dp": 2, "gas": 2, "data_parallel": "ddp"}, marks=slow),
        pytest.param({"pp": 2, "gas": 2}, marks=slow),
        pytest.param({"dp": 2, "zero": 1}, marks=slow),
    ],
    ids=str,
)
def test_fused_blocks_and_chunked_loss_run_gradient_hooks(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    job, layout = job_of("tied"), Layout(**fields)
    reference = one_process(job, layout.dp * layout.gas, training_of())
    monkeypatch.setattr(selection, "choose", lambda *_: Kernels(loss=True, fused=True))
    monkeypatch.setattr(loss, "linear_cross_entropy", partial(loss.linear_cross_entropy, chunk=7))
    assert_same(in_ranks(train, job, layout, training_of()), reference, job)
