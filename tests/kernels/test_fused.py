"""The fused block against the plain one in float64, with its kernels' plain twins; and what it keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from ultrascale.kernels import float8, fused
from ultrascale.kernels.deferred import DeferredWeightGrads
from ultrascale.model import flex
from ultrascale.model.rotary import tables
from ultrascale.model.transformer import Block, Transformer, document_bias
from ultrascale.parallel import recompute
from ultrascale.specs.layout import Recompute
from ultrascale.specs.model import Model
from ultrascale.specs.validate import build
from ultrascale.train.memory import LiveBytes

MODEL = Model(name="m", layers=2, hidden=48, ffn=80, heads=4, kv_heads=2, head_dim=16, vocab=64, rope_theta=10000.0)


def built(model: Model = MODEL) -> Transformer:
    torch.manual_seed(0)
    return Transformer(model).double()


def loss_of(model: Transformer) -> Tensor:
    tokens = torch.randint(0, MODEL.vocab, (2, 10), generator=torch.Generator().manual_seed(1))
    loss: Tensor = model(tokens[:, :-1], torch.arange(9), tokens[:, 1:])
    return loss


def train_alike(plain: Transformer, ours: Transformer) -> None:
    """In float64: the loss and every gradient."""
    wanted, found = loss_of(plain), loss_of(ours)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    wanted.backward()
    found.backward()
    for (name, theirs), mine in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_positions": 4, "attention_factor": 1.5},
    ],
)
def test_scaled_positions_in_a_fused_block(scaling: dict[str, Any]) -> None:
    model = build(Model, {**MODEL.model_dump(), "max_positions": 4, "rope_scaling": scaling}, "model")
    plain, ours = built(model), built(model)
    assert not torch.allclose(loss_of(plain), loss_of(built()), rtol=1e-6)
    fused.apply(ours)
    train_alike(plain, ours)


@pytest.mark.parametrize("joined", [False, True])
def test_the_fused_block_equals_the_plain_block(joined: bool) -> None:
    plain, ours = built(), built()
    fused.apply(ours)
    if joined:
        fused.join(ours)
    assert [name for name, _ in plain.named_parameters()] == [name for name, _ in ours.named_parameters()]
    train_alike(plain, ours)


@pytest.mark.parametrize("block_mask", [False, True])
def test_documents_in_a_fused_block(block_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dense mask and with FlexAttention's, whose gradients torch refuses on a CPU by a check of its own."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0] * 9])
    mask = flex.mask(9, None, documents, torch.device("cpu")) if block_mask else document_bias(documents, torch.float64)
    plain, ours = built(), built()
    fused.apply(ours)
    rope = tables(MODEL, torch.arange(9))
    x = torch.randn(2, 9, MODEL.hidden, dtype=torch.float64)
    found = []
    for model, given in ((plain, document_bias(documents, torch.float64)), (ours, mask)):
        block, own = model.each_block()[0], x.clone().requires_grad_()
        out = block(own, rope, given)
        found.append((out, *torch.autograd.grad(out.square().sum(), (own, *block.parameters()))))
    causal = ours.each_block()[0](x, rope)
    assert not torch.allclose(found[1][0], causal)
    for mine, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5 if block_mask else 1e-9, atol=1e-5 if block_mask else 1e-11)


def test_gradients_add_up_over_micro_batches() -> None:
    once, twice = built(), built()
    for model in (once, twice):
        fused.apply(model)
    loss_of(once).backward()
    for _ in range(2):
        loss_of(twice).backward()
    for one, two in zip(once.parameters(), twice.parameters(), strict=True):
        assert one.grad is not None
        torch.testing.assert_close(two.grad, 2 * one.grad)


def test_joined_weights_are_one_view_and_others_a_copy() -> None:
    model = built()
    fused.apply(model)
    block = model.each_block()[0]
    weights = tuple(block.attention.qkv.parameters())
    copied = fused.joined(*weights)
    assert copied.data_ptr() != weights[0].data_ptr()
    fused.join(model)
    together = fused.joined(*weights)
    assert together.data_ptr() == weights[0].data_ptr()
    assert torch.equal(together, copied)
    assert fused.joined(weights[1], weights[0]).data_ptr() != weights[1].data_ptr()  # in memory, but in another order


def kept_bytes(block: Block) -> int:
    """What autograd keeps of one forward beyond its parameters, each storage once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(2, 8, MODEL.hidden, dtype=torch.float64, requires_grad=True)
    angles = torch.zeros(8, MODEL.head_dim)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x, (angles.cos(), angles.sin()))
    for parameter in block.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    del out
    return sum(kept.values())


def test_outputs_of_norms_and_gate_are_not_saved() -> None:
    """Kept are both residuals, q, k and v, attention's output, gate and up, and a few numbers per row and head."""
    model = built()
    fused.apply(model)
    wide = 2 * MODEL.hidden + 2 * MODEL.q_dim + 2 * MODEL.kv_dim + 2 * MODEL.ffn
    assert kept_bytes(model.each_block()[0]) == pytest.approx(16 * 8 * wide, rel=0.05)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_a_blocks_output_is_not_a_view(in_fp8: bool) -> None:
    """FSDP2 hangs a hook on it, and warns of views."""
    model = built().float()
    fused.apply(model)
    if in_fp8:
        float8.apply(model, "tensor", "none", torch.device("cpu"))
    angles = torch.zeros(16, MODEL.head_dim)
    out = model.each_block()[0](torch.randn(2, 16, MODEL.hidden), (angles.cos(), angles.sin()))
    assert out.requires_grad
    assert out._base is None


def test_document_masks_use_the_plain_block() -> None:
    plain, ours = built(), built()
    fused.apply(ours)
    tokens, documents = torch.arange(9).unsqueeze(0), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]])
    wanted = plain(tokens, torch.arange(9), documents=documents)
    torch.testing.assert_close(ours(tokens, torch.arange(9), documents=documents), wanted)


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_a_split_backward_keeps_the_operands_of_weight_gradients_alone(policy: Recompute) -> None:
    """Until they run: outputs of norms and gate, attention's output, and gradients of q, k, v, gate, up and both sums."""
    model, deferred = built(), DeferredWeightGrads(used=True)
    fused.apply(model, deferred)
    recompute.apply(model, policy)
    block, rope = model.each_block()[0], tables(MODEL, torch.arange(9))
    x, grad = (torch.randn(2, 9, MODEL.hidden, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    with LiveBytes() as live:
        deferred.open = True
        block(x, rope).backward(grad)  # which is the output gradient of the MLP, too
        operands = 3 * MODEL.hidden + 3 * MODEL.ffn + 2 * MODEL.q_dim + 2 * MODEL.kv_dim
        gradients = x.numel() + 2 * MODEL.hidden  # of the input and of norms
        assert live.current == 8 * (2 * 9 * operands + gradients)
        del deferred.pending[:]
        assert live.current == 8 * gradients
