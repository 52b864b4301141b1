"""Tensor and sequence parallelism of every family of models against one process: losses of three steps, all gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

from parallel.harness import check
from ultrascale.kernels import selection
from ultrascale.kernels.float8 import Float8Head
from ultrascale.kernels.loss import linear_cross_entropy
from ultrascale.kernels.selection import Kernels
from ultrascale.launch import local
from ultrascale.model.transformer import IGNORE_INDEX, CrossEntropy, Transformer
from ultrascale.parallel import vocab_loss
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.tensor import VocabParallelCrossEntropy
from ultrascale.parallel.vocab_loss import VocabParallelChunkedHead, VocabParallelFloat8Head, vocab_parallel_cross_entropy
from ultrascale.specs.model import Model

slow = pytest.mark.slow


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("family", [pytest.param("llama", marks=slow), "tied", "qwen2", "window"])
def test_two_ranks_of_a_family(family: str, sequence_parallel: bool) -> None:
    check(family, tp=2, gas=2, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_two_ranks(family: str, sequence_parallel: bool) -> None:
    check(family, tp=2, gas=2, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("family", ["one-kv-head", "qwen3"])
def test_fewer_kv_heads_than_ranks(family: str, sequence_parallel: bool) -> None:
    """Ranks repeat a head of keys and values: its gradient is the sum of theirs, and counts once in the norm."""
    check(family, tp=4, gas=1, mbs=2, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize(
    "fields",
    [
        {"tp": 2, "recompute": "selective"},
        {"tp": 2, "pp": 2, "gas": 2, "schedule": "zero-bubble"},
        pytest.param({"tp": 2, "recompute": "full"}, marks=slow),
        pytest.param({"tp": 2, "cp": 2}, marks=slow),
        pytest.param({"tp": 2, "pp": 2, "gas": 2, "schedule": "zero-bubble", "recompute": "selective"}, marks=slow),
        pytest.param({"tp": 2, "dp": 2, "zero": 3}, marks=slow),
    ],
    ids=str,
)
def test_slices_of_several_sequences_keep_their_order(fields: dict[str, object]) -> None:
    check("qwen3", **{"gas": 1, "mbs": 3, **fields})


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [True, pytest.param(False, marks=slow)])
def test_recomputed(policy: str, sequence_parallel: bool) -> None:
    check("gpt2", tp=2, gas=2, sequence_parallel=sequence_parallel, recompute=policy)


@pytest.mark.parametrize("context_parallel", ["zigzag", pytest.param("ulysses", marks=slow)])
def test_with_context_parallelism(context_parallel: str) -> None:
    check("gpt2", tp=2, cp=2, gas=1, context_parallel=context_parallel)


@slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_with_data_parallelism(zero: int) -> None:
    check("qwen3", tp=2, dp=2, gas=2, zero=zero)
    check("gpt2", tp=4, dp=2, gas=2, zero=zero, mbs=2)


@pytest.mark.parametrize("policy", [pytest.param("none", marks=slow), "selective", pytest.param("full", marks=slow)])
@pytest.mark.parametrize("context_parallel", [pytest.param("allgather", marks=slow), "ring", "zigzag", "ulysses"])
def test_context_parallelism_recomputed(context_parallel: str, policy: str) -> None:
    check("qwen3", cp=2, gas=1, context_parallel=context_parallel, recompute=policy)


@pytest.mark.parametrize("context_parallel", ["ring", "ulysses"])
def test_learned_positions_under_context_parallelism(context_parallel: str) -> None:
    check("gpt2", cp=2, gas=2, context_parallel=context_parallel)


def test_a_window_under_context_parallelism() -> None:
    check("window", cp=2, gas=1, context_parallel="ulysses")


def _criterion(criterion: CrossEntropy, z_loss: float) -> CrossEntropy:
    criterion.z_loss = z_loss
    return criterion


def _loss(rank: int, nproc: int, store: str, z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    logits, targets = _logits()
    mine = logits.chunk(nproc, dim=-1)[rank].clone().requires_grad_()
    axis = Axis("tp", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    loss = _criterion(VocabParallelCrossEntropy(axis), z_loss)(mine, targets)
    (3 * loss).sum().backward()
    assert mine.grad is not None
    dist.destroy_process_group()
    return loss.detach(), mine.grad


def _logits() -> tuple[torch.Tensor, torch.Tensor]:
    """Scores so far apart that their exponentials overflow, and a token that carries no loss."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 12, generator=generator) * 60
    targets = torch.randint(12, (2, 3), generator=generator)
    targets[1, 1] = IGNORE_INDEX
    return logits, targets


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_the_loss_of_cut_logits(z_loss: float) -> None:
    logits, targets = _logits()
    logits.requires_grad_()
    loss = _criterion(CrossEntropy(), z_loss)(logits, targets)
    (3 * loss).sum().backward()
    assert logits.grad is not None
    for (found, gradient), wanted in zip(local.run(_loss, 3, z_loss, timeout_s=60), logits.grad.chunk(3, dim=-1), strict=True):
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.quick_cases(every=2)
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("tied", {"tp": 2, "gas": 2, "mbs": 3}),
        ("llama", {"tp": 2, "gas": 2, "mbs": 3, "sequence_parallel": False}),
        ("llama", {"tp": 2, "dp": 2, "zero": 3, "gas": 2, "mbs": 2}),
        ("tied", {"tp": 2, "pp": 2, "gas": 4}),
        pytest.param("tied", {"tp": 2, "gas": 2, "sequence_parallel": False}, marks=slow),
        pytest.param("tied", {"tp": 4, "gas": 1, "mbs": 2}, marks=slow),
        pytest.param("gpt2", {"tp": 4, "gas": 1, "mbs": 2, "sequence_parallel": False}, marks=slow),
        pytest.param("tied", {"tp": 2, "dp": 2, "zero": 1, "gas": 2}, marks=slow),
        pytest.param("tied", {"tp": 2, "dp": 2, "zero": 3, "gas": 2, "sequence_parallel": False}, marks=slow),
        pytest.param("llama", {"tp": 2, "dp": 2, "zero": 2, "gas": 2}, marks=slow),
        pytest.param("llama", {"tp": 2, "cp": 2, "gas": 2, "mbs": 2}, marks=slow),
        pytest.param("llama", {"tp": 2, "pp": 2, "gas": 4, "schedule": "interleaved", "virtual_stages": 2}, marks=slow),
    ],
    ids=str,
)
def test_chunked_loss_of_a_cut_vocabulary(family: str, fields: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of five tokens per rank divide no micro-batch."""
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(loss=layout.gpus > 1))
    monkeypatch.setattr(vocab_loss, "vocab_parallel_cross_entropy", partial(vocab_parallel_cross_entropy, chunk=5))
    check(family, evaluate=True, **fields)


def test_the_chunked_loss_is_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "choose", lambda job, layout, training, device: Kernels(loss=layout.gpus > 1))
    monkeypatch.setattr(vocab_loss.VocabParallelChunkedHead, "loss", lambda self, hidden, _: hidden.sum())
    with pytest.raises(AssertionError):
        check("llama", tp=2, gas=1)


def _head_inputs(batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [b, 12, 6], a weight of 24 rows, targets: every third is ignored, and three in a row."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(batch, 12, 6, generator=generator, dtype=torch.float64) * 8
    weight = torch.randn(24, 6, generator=generator, dtype=torch.float64) * 8
    targets = torch.randint(24, (batch, 12), generator=generator)
    targets[:, ::3] = targets[0, :3] = IGNORE_INDEX
    return hidden, weight, targets


def _chunked_loss(
    rank: int, nproc: int, store: str, batch: int, sequence: bool, chunk: int, z_loss: float
) -> list[torch.Tensor]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    hidden, weight, targets = _head_inputs(batch)
    axis = Axis("tp", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    mine = (hidden.chunk(nproc, dim=1)[rank] if sequence else hidden).flatten(0, 1).requires_grad_()
    rows = weight.chunk(nproc)[rank].clone().requires_grad_()
    slices = torch.stack(targets.chunk(nproc, dim=1)).flatten(1) if sequence else targets.view(1, -1)
    loss = vocab_parallel_cross_entropy(mine, rows, slices, axis, chunk, z_loss=z_loss)
    (3 * loss).sum().backward()
    with torch.no_grad():
        evaluated = vocab_parallel_cross_entropy(mine, rows, slices, axis, chunk, z_loss=z_loss)
    assert mine.grad is not None
    assert rows.grad is not None
    dist.destroy_process_group()
    return [loss.detach(), evaluated, mine.grad, rows.grad]


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize(("nproc", "batch", "chunk"), [(2, 2, 5), (3, 1, 100), (4, 3, 4), (4, 1, 1)])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_chunked_loss_and_gradients_of_ranks(nproc: int, batch: int, chunk: int, sequence: bool, z_loss: float) -> None:
    hidden, weight, targets = _head_inputs(batch)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = _criterion(CrossEntropy(), z_loss)(hidden @ weight.t(), targets)
    (3 * loss).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
    for rank, (found, evaluated, grad_hidden, grad_weight) in enumerate(
        local.run(_chunked_loss, nproc, batch, sequence, chunk, z_loss, timeout_s=60)
    ):
        close(found, loss.detach())
        close(evaluated, loss.detach())
        close(grad_hidden, (hidden.grad.chunk(nproc, dim=1)[rank] if sequence else hidden.grad).flatten(0, 1))
        close(grad_weight, weight.grad.chunk(nproc)[rank])


def _float8_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [2, 96, 32], the rows of each sequence of another size, a weight of 64 rows, targets of which some are
    ignored.
    """
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 96, 32, generator=generator) * torch.tensor([1.0, 20.0]).view(2, 1, 1)
    targets = torch.randint(64, (2, 96), generator=generator)
    targets[:, ::3] = targets[0, :3] = IGNORE_INDEX
    return hidden, torch.randn(64, 32, generator=generator), targets


def _float8_loss(rank: int, nproc: int, store: str, sequence: bool, chunk: int, z_loss: float) -> list[torch.Tensor]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    hidden, weight, targets = _float8_inputs()
    axis = Axis("tp", dist.group.WORLD, rank, nproc, tuple(range(nproc)))
    plain = Transformer(Model(name="head", layers=1, hidden=32, heads=4, kv_heads=4, ffn=32, vocab=64)).head
    assert plain is not None
    plain.criterion.z_loss = z_loss
    head = VocabParallelFloat8Head(VocabParallelChunkedHead(plain, axis, sequence))
    head.linear.weight = torch.nn.Parameter(weight.chunk(nproc)[rank].clone())
    mine = (hidden.chunk(nproc, dim=1)[rank] if sequence else hidden).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_loss, "vocab_parallel_cross_entropy", partial(vocab_parallel_cross_entropy, chunk=chunk))
        loss = head.loss(mine, targets)
        with torch.no_grad():
            evaluated = head.loss(mine, targets)
    (3 * loss).sum().backward()
    assert mine.grad is not None
    assert head.linear.weight.grad is not None
    dist.destroy_process_group()
    return [loss.detach(), evaluated, mine.grad, head.linear.weight.grad]


@pytest.mark.quick_cases(every=3)
@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize(("nproc", "chunk"), [(2, 8), (2, 1000), (4, 8), (4, 5)])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
def test_float8_loss_of_a_cut_vocabulary(nproc: int, chunk: int, sequence: bool, z_loss: float) -> None:
    """Twelve chunks, in three GEMMs for the weight gradient; one; six; and chunks that fp8 does not support, in fp32."""
    hidden, weight, targets = _float8_inputs()
    function = None if chunk == 5 else Float8Head.function
    rows = hidden.flatten(0, 1).requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(rows, weight, targets.flatten(), function=function, z_loss=z_loss)
    (3 * loss).sum().backward()
    assert rows.grad is not None
    assert weight.grad is not None
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=2e-5)
    for rank, (found, evaluated, grad_hidden, grad_weight) in enumerate(
        local.run(_float8_loss, nproc, sequence, chunk, z_loss, timeout_s=60)
    ):
        close(found, loss.detach())
        close(evaluated, loss.detach())
        close(grad_hidden, rows.grad.view(2, 96, 32).chunk(nproc, dim=1)[rank] if sequence else rows.grad.view(2, 96, 32))
        close(grad_weight, weight.grad.chunk(nproc)[rank])
