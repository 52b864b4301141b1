"""Chunks of tensor parallelism: the order of their rows, memory, sizes that are refused, and notes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from parallel.harness import job_of, training_of
from ultrascale.kernels import autotune
from ultrascale.kernels.optional_kernels import QUACK
from ultrascale.launch import rank
from ultrascale.model.rotary import tables
from ultrascale.model.transformer import Transformer
from ultrascale.parallel import comm, fused_block
from ultrascale.parallel.async_tensor import AsyncTensorParallel
from ultrascale.parallel.comm import AsyncCollective, Axis
from ultrascale.specs.cluster import Cluster
from ultrascale.specs.job import Job
from ultrascale.specs.layout import Layout
from ultrascale.train import supported
from ultrascale.train.engine import Engine
from ultrascale.train.memory import LiveBytes

HIDDEN, LENGTH = 16, 8  # tokens of a sequence on a rank
GPU, CPU = torch.device("cuda"), torch.device("cpu")


def axis_of(size: int) -> Axis:
    return Axis("tp", None, 0, size, tuple(range(size)))


@pytest.mark.parametrize(("batch", "chunks"), [(1, 1), (1, 4), (2, 1), (2, 2), (2, 4), (3, 3), (3, 6), (4, 2), (4, 4), (6, 3)])
@pytest.mark.parametrize("size", [2, 4])
def test_gathered_chunks_in_the_order_of_the_sequence(batch: int, chunks: int, size: int) -> None:
    """Against the definition: each rank's slice of each sequence, cut into chunks, of which all ranks' are gathered."""
    tokens = torch.arange(batch * size * LENGTH).view(batch, size * LENGTH, 1)
    slices = [part.flatten() for part in tokens.chunk(size, dim=1)]
    gathered = torch.cat([part.chunk(chunks)[number] for number in range(chunks) for part in slices]).unsqueeze(1)
    tp = AsyncTensorParallel(axis_of(size), chunks)
    assert torch.equal(tp.to_sequence_order(gathered, batch), tokens)
    assert torch.equal(tp.to_chunk_order(tokens), gathered)
    is_view = tp.to_sequence_order(gathered, batch).data_ptr() == gathered.data_ptr()
    assert is_view == (batch == chunks)  # a chunk is a sequence


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Axis:
    """Collectives between two ranks with the same numbers; they allocate what real ones do, when they start."""

    def gather(x: torch.Tensor, axis: Axis, dim: int = 0, out: torch.Tensor | None = None) -> AsyncCollective[torch.Tensor]:
        whole = x.new_empty(2 * len(x), *x.shape[1:]) if out is None else out
        whole.view(2, *x.shape).copy_(x.expand(2, *x.shape))
        return AsyncCollective("all_gather", [], axis, [x], lambda: whole)

    def scatter(x: torch.Tensor, axis: Axis, dim: int = 0, out: torch.Tensor | None = None) -> AsyncCollective[torch.Tensor]:
        own = x.new_empty(len(x) // 2, *x.shape[1:]) if out is None else out
        own.copy_(x[: len(own)]).mul_(2)
        return AsyncCollective("reduce_scatter", [], axis, [x], lambda: own)

    monkeypatch.setattr(comm, "all_gather_start", gather)
    monkeypatch.setattr(comm, "reduce_scatter_start", scatter)
    return axis_of(2)


def peak_of(work: Any) -> int:
    with LiveBytes() as live:
        work()
    return live.peak


@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_two_chunks_are_live(chunks: int, two_ranks: Axis) -> None:
    tp, x, weight = AsyncTensorParallel(two_ranks, chunks), torch.randn(16, HIDDEN), torch.randn(HIDDEN, 3)
    gathered, narrow = 2 * x.nbytes, 2 * len(x) * 3 * 4
    assert peak_of(lambda: tp.all_gather_operand(x) @ weight) == narrow + 2 * gathered // chunks
    assert peak_of(lambda: tp.matmul_reduce_scatter_start(x, weight).wait()) == narrow // 4 + 2 * (narrow // 2) // chunks
    assert peak_of(lambda: tp.all_gather_start(x) @ weight) == narrow + gathered  # kept for the weight's gradient


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("batch", "chunks"), [(1, 2), (1, 8), (2, 2), (2, 4), (4, 2)])
def test_a_layer_needs_no_more_memory(batch: int, chunks: int, recompute: bool, two_ranks: Axis) -> None:
    job = job_of("llama")
    model = Transformer(job.model, range(1), embed=False, head=False)
    x = torch.randn(batch, 8, job.model.hidden, requires_grad=True)
    rope, peaks, saved = tables(job.model, torch.arange(16)), [], []
    for number in (1, chunks):
        fused_block.apply(model, two_ranks, chunks=number)
        block = model.each_block()[0]
        block.saves_gate_up = not recompute
        x.grad = None
        block.zero_grad()
        with LiveBytes() as live:
            out = block(x, rope)
            forward, between = live.peak, live.current
            live.reset_peak()
            out.sum().backward()
        peaks.append((forward, live.peak))
        saved.append(between)
    assert saved[1] == saved[0]
    assert all(one <= other for one, other in zip(peaks[1], peaks[0], strict=True)), peaks


def cut(tp: int = 2, **fields: Any) -> tuple[Job, Layout]:
    layout = Layout(tp=tp, **fields)
    job = job_of("llama").changed(cluster=Cluster.load(f"{layout.gpus}xh100"), batch_tokens=layout.batch_tokens(32))
    return job, layout


@pytest.mark.parametrize(
    ("fields", "chunks", "words"),
    [
        ({}, 3, "train.tp_chunks is 3 but .* is 1 × 16 tokens, .*: try 2 or 4$"),
        ({}, 32, "try 16$"),
        ({"mbs": 3}, 2, "3 × 16 tokens, .*: try 1 or 3$"),
        ({"mbs": 6}, 4, "try 3 or 6$"),
        ({"mbs": 2, "cp": 2, "context_parallel": "zigzag"}, 32, "2 × 8 tokens, .*: try 16$"),
    ],
)
def test_chunks_that_do_not_divide_a_slice_are_refused(fields: dict[str, Any], chunks: int, words: str) -> None:
    job, layout = cut(**fields)
    sentence = supported.layout_problem(job, layout, training_of(tp_chunks=chunks)) or ""
    assert re.search(words, sentence), sentence
    for works in re.findall(r"\d+", sentence.rpartition("try")[2]):
        assert supported.layout_problem(job, layout, training_of(tp_chunks=int(works))) is None


@pytest.mark.parametrize("fields", [{"tp": 1}, {"sequence_parallel": False}])
def test_chunks_without_slices_are_not_refused(fields: dict[str, Any]) -> None:
    job, layout = cut(**fields)
    assert supported.layout_problem(job, layout, training_of(tp_chunks=3)) is None


@pytest.mark.parametrize(
    ("device", "fields", "training", "why"),
    [
        (GPU, {"tp": 2}, {}, None),
        (CPU, {"tp": 2}, {}, "on a GPU alone"),
        (GPU, {"tp": 1}, {}, "tp = 1"),
        (GPU, {"tp": 2, "sequence_parallel": False}, {}, "without sequence parallelism"),
        (GPU, {"tp": 2}, {"kernels": "compile"}, "train.kernels is compile"),
    ],
)
def test_a_run_says_that_chunks_have_no_effect(
    device: torch.device, fields: dict[str, Any], training: dict[str, Any], why: str | None
) -> None:
    def notes(chunks: int) -> list[str]:
        job, layout = cut(**fields)
        mesh, settings = SimpleNamespace(device=device, layout=layout, tp=axis_of(layout.tp)), training_of(**training)
        engine = SimpleNamespace(job=job, mesh=mesh, training=settings.changed(tp_chunks=chunks), autotuned=())
        return rank._notes(cast(Engine, engine))

    found = [line for line in notes(4) if line not in notes(1)]
    assert found == [] if why is None else found[0].startswith("train.tp_chunks = 4 has no effect: ") and why in found[0]


def test_gemms_in_chunks_leave_the_gate_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """quack's kernels allocate their outputs: chunks could not write into one tensor."""
    monkeypatch.setattr(QUACK, "why_not", lambda dtype: None)
    monkeypatch.setattr(autotune, "time_mlp", lambda *_: autotune.MLPTimes(2.0, 1.0))
    job, layout = cut()
    for chunks, timed in ((1, True), (2, False)):
        found = autotune.fastest_mlp(job, layout, training_of(tp_chunks=chunks), torch.bfloat16, GPU)
        assert (found is not None) == timed
