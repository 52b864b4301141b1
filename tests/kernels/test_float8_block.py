"""The fused block in fp8 against the plain ones in fp8: joined matmuls and other scales must not change the results."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from model.builders import initialize
from parallel.harness import job_of, training_of
from ultrascale.kernels import float8, float8_block, fused
from ultrascale.kernels.float8_block import Float8Block
from ultrascale.kernels.float8_gemm import E5M2
from ultrascale.kernels.selection import choose, why_not_fused
from ultrascale.model.transformer import Transformer
from ultrascale.specs.layout import Layout
from ultrascale.specs.model import Model
from ultrascale.specs.training import Fp8Keep

SMALL = Model(name="small", layers=3, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=64)
SIZES = {"attention.out": 0.25, "inputs": 4.0, "down": 0.0625}


def loss_and_grads(is_fused: bool, keep: Fp8Keep, layers: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients of a model in fp8; gains are no ones and weights differ in size, so that a mix-up shows."""
    model = Transformer(SMALL.model_copy(update={"layers": layers}))
    initialize(model, 0, SMALL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.linspace(0.5, 2, len(parameter)))
            parameter *= next((size for part, size in SIZES.items() if part in name), 1.0)
    if is_fused:
        fused.apply(model)
    float8.apply(model, "tensor", keep, torch.device("cpu"))
    tokens = torch.randint(64, (2, 32), generator=torch.Generator().manual_seed(0))
    loss = model(tokens, torch.arange(32), tokens.flip(-1))
    names, parameters = zip(*model.named_parameters(), strict=True)
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("keep", "layers"), [("head", 1), ("none", 1), ("ends", 3), ("head", 3)])
def test_it_computes_what_the_plain_block_computes(keep: Fp8Keep, layers: int) -> None:
    """Rows have powers of two of their own, and bounds are some too high: neither changes how a number rounds.

    Sums in another order do, for a few numbers on the edge between two of fp8, and each block passes that on: 0.03 is half of
    what one matmul in fp8 is off.
    """
    (loss, gradients), (wanted, exact) = loss_and_grads(True, keep, layers), loss_and_grads(False, keep, layers)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-5)
    assert max(error(gradients[name], exact[name]) for name in exact) < 0.03
    near = sorted(error(gradients[name], exact[name]) for name in exact)
    assert near[len(near) // 2] < 2e-3


def test_which_blocks_are_converted() -> None:
    model = Transformer(SMALL)
    fused.apply(model)
    names = list(dict(model.named_parameters()))
    float8.apply(model, "tensor", "ends", torch.device("cpu"))
    assert [type(block).__name__ for block in model.each_block()] == ["FusedBlock", "Float8Block", "FusedBlock"]
    assert list(dict(model.named_parameters())) == names
    assert isinstance(model.each_block()[1], Float8Block)


def test_the_gate_bound_holds_and_is_tight() -> None:
    """The gradients stay below the format's end, unclamped, and far above its beginning."""
    generator = torch.Generator().manual_seed(0)
    grad, both = torch.randn(64, 32, generator=generator), 3 * torch.randn(64, 64, generator=generator)
    gated, of_both = float8_block.gate_cast(both)
    to_both, turned, again = float8_block.gate_backward_cast(grad, both, of_both, float8_block.amax_bound(gated))
    largest = float(to_both.data.float().abs().max())
    assert torch.finfo(E5M2).max / 64 < largest < torch.finfo(E5M2).max
    wanted, output = fused.gate_backward(grad, both)
    assert error(to_both.data.float() * to_both.scale, wanted) < 0.06
    assert error(turned.data.t().float() * turned.scale, wanted) < 0.06
    assert error(again.data.t().float() * again.scale, output) < 0.03


def test_a_tensor_has_the_largest_scale_of_its_rows() -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 5).unsqueeze(1)
    rows = float8_block.cast_rows(x)
    whole = float8_block.cast_transposed(x, float8_block.amax_bound(rows))
    assert whole.scale == rows.scale.max() == float8_block.cast_transposed(x, float8_block.amax(x)).scale
    assert whole.data.shape == (32, 5)
    assert torch.equal(whole.data.float().t()[-1] * whole.scale, rows.data.float()[-1] * rows.scale[-1])


def test_documents_do_not_see_each_other() -> None:
    """Tokens of the first document change nothing after it; without a mask they do."""
    model = Transformer(SMALL)
    initialize(model, 0, SMALL)
    fused.apply(model)
    float8.apply(model, "tensor", "head", torch.device("cpu"))
    rows, documents = torch.arange(16).unsqueeze(0), torch.tensor([[0] * 8 + [1] * 8])
    others = torch.cat((rows[:, :8].flip(1), rows[:, 8:]), dim=1)
    for mask, seen in ((documents, False), (None, True)):
        one, other = (model(tokens, torch.arange(16), documents=mask)[:, 8:] for tokens in (rows, others))
        assert torch.equal(one, other) is not seen


@pytest.mark.parametrize(
    ("model", "fields", "word"),
    [
        ({}, {}, None),
        ({"vocab": 50}, {"fp8_keep": "none"}, None),  # the head stays in bf16, which is no matter of blocks
        ({}, {"fp8_scaling": "row"}, "scale per row"),
        ({"ffn": 100}, {}, r"gate, up and down \(64 × 100\)"),
        ({}, {"document_mask": True}, None),
    ],
    ids=str,
)
def test_when_a_gpu_runs_it(model: dict[str, Any], fields: dict[str, Any], word: str | None) -> None:
    job = job_of(SMALL.model_copy(update=model), precision="fp8", seq=32)
    training = training_of(**fields)
    assert choose(job, Layout(), training, "cuda").fused is (word is None)
    assert re.search(word or "^None$", str(why_not_fused(job, Layout(), training)))
