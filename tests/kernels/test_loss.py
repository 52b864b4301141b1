"""The loss in chunks against torch's own on whole logits: value, both gradients, tied ends, and that no logits are kept."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from model.builders import initialize
from ultrascale.cost.memory import activations
from ultrascale.kernels import loss
from ultrascale.kernels.loss import ChunkedHead, linear_cross_entropy
from ultrascale.model.transformer import IGNORE_INDEX, CrossEntropy, Transformer
from ultrascale.specs.model import Model
from ultrascale.train.memory import LiveBytes

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(tokens: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, hidden, generator=generator) * hidden**-0.5).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocab, (tokens,), generator=generator)


def plain(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, z_loss: float = 0.0) -> torch.Tensor:
    logits = (x @ weight.t()).float()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    squares = logits.exp().sum(-1).log()[targets != IGNORE_INDEX] ** 2
    return torch.stack((loss, z_loss * squares.sum())) if z_loss else loss


def close(actual: torch.Tensor, wanted: torch.Tensor, bound: float = 1e-6) -> None:
    assert actual.dtype == wanted.dtype
    assert float((actual - wanted).abs().max()) <= bound * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(("tokens", "hidden", "vocab", "chunk"), [(12, 8, 40, 4), (13, 5, 33, 4), (7, 3, 2, 100), (1, 4, 9, 1)])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_value_and_gradients_of_whole_logits(
    tokens: int, hidden: int, vocab: int, chunk: int, ignored: str, z_loss: float
) -> None:
    x, weight, targets = inputs(tokens, hidden, vocab)
    if ignored != "none":
        targets[:: 3 if ignored == "some" else 1] = IGNORE_INDEX
    found = linear_cross_entropy(x, weight, targets, chunk, z_loss=z_loss)
    wanted = plain(x, weight, targets, z_loss)
    close(found.detach(), wanted.detach())
    criterion = CrossEntropy()
    criterion.z_loss = z_loss
    close(criterion((x @ weight.t()).unsqueeze(0), targets.unsqueeze(0)).detach(), wanted.detach())
    found, wanted = found.sum(), wanted.sum()
    # The weight of a token's loss comes with backward: 0.37 stands for it.
    pairs = zip(torch.autograd.grad(0.37 * found, [x, weight]), torch.autograd.grad(0.37 * wanted, [x, weight]), strict=True)
    for actual, reference in pairs:
        close(actual, reference)


def test_bf16_sums_the_weight_gradient_of_many_chunks_in_fp32() -> None:
    """64 chunks: summed in bf16, most of their shares would fall below the last bit of the sum."""
    x, weight, targets = inputs(256, 16, 50, torch.bfloat16)
    found = torch.autograd.grad(linear_cross_entropy(x, weight, targets, 4), [x, weight])
    wide = [one.detach().float().requires_grad_() for one in (x, weight)]
    for actual, exact in zip(found, torch.autograd.grad(plain(*wide, targets), wide), strict=True):
        assert actual.dtype == torch.bfloat16
        close(actual.float(), exact, bound=2.0**-7)


def test_one_chunk_of_logits_is_live_at_a_time_and_none_is_saved() -> None:
    tokens, hidden, vocab, chunk = 512, 4, 1000, 16
    x, weight, targets = inputs(tokens, hidden, vocab)
    live = LiveBytes()
    with live:
        found = linear_cross_entropy(x, weight, targets, chunk)
    whole = 4 * tokens * vocab
    assert live.peak < whole / 4  # the plain reference of the kernel has a few copies of its chunk
    del found
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes) or one, lambda one: one):  # type: ignore[func-returns-value]
        linear_cross_entropy(x, weight, targets, chunk)
    assert sorted(kept) == sorted([x.nbytes, weight.nbytes])


def test_evaluation_computes_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = inputs(10, 4, 20)
    wanted = plain(x, weight, targets)
    monkeypatch.setattr(loss, "accumulate_matmul", None)
    with torch.no_grad():
        found = linear_cross_entropy(x, weight, targets, 3)
    assert not found.requires_grad
    close(found, wanted.detach())


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_with_chunked_loss_equals_one_without(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied ends: the gradient of the embedding is the sum of both uses."""
    monkeypatch.setattr(loss, "linear_cross_entropy", partial(linear_cross_entropy, chunk=5))
    model = Model(name="tiny", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=64, tied_embeddings=tied)
    one, other = Transformer(model), Transformer(model)
    for transformer in (one, other):
        initialize(transformer, 0, model)
    loss.apply(other)
    assert isinstance(other.head, ChunkedHead)
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in other.named_parameters()]
    tokens, positions = torch.arange(32).view(2, 16) % model.vocab, torch.arange(16)
    targets = tokens.flip(-1).clone()
    targets[0, :3] = IGNORE_INDEX
    assert torch.equal(one(tokens, positions), other(tokens, positions))
    totals = [transformer(tokens, positions, targets) for transformer in (one, other)]
    close(totals[1].detach(), totals[0].detach())
    gradients = [
        torch.autograd.grad(total, list(transformer.parameters()))
        for total, transformer in zip(totals, (one, other), strict=True)
    ]
    for actual, wanted in zip(gradients[1], gradients[0], strict=True):
        close(actual, wanted, bound=2e-6)


def test_the_memory_model_counts_the_same_chunk() -> None:
    assert loss.CHUNK == activations.LOSS_CHUNK
