"""Tensor and sequence parallelism of every family of models against one process: losses of three steps, all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel.harness import check
from ultrascale.launch import local
from ultrascale.model.transformer import IGNORE_INDEX, CrossEntropy
from ultrascale.parallel.comm import Axis
from ultrascale.parallel.tensor import VocabParallelCrossEntropy

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


def _loss(rank: int, nproc: int, store: str) -> tuple[torch.Tensor, torch.Tensor]:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=nproc)
    logits, targets = _logits()
    mine = logits.chunk(nproc, dim=-1)[rank].clone().requires_grad_()
    loss = VocabParallelCrossEntropy(Axis("tp", dist.group.WORLD, rank, nproc, tuple(range(nproc))))(mine, targets)
    (3 * loss).backward()
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


def test_the_loss_of_cut_logits() -> None:
    logits, targets = _logits()
    logits.requires_grad_()
    loss = CrossEntropy()(logits, targets)
    (3 * loss).backward()
    assert logits.grad is not None
    for (found, gradient), wanted in zip(local.run(_loss, 3, timeout_s=60), logits.grad.chunk(3, dim=-1), strict=True):
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(gradient, wanted)
