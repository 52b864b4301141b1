"""FlexAttention's masks against the dense ones: visible tokens, values and gradients; and where the model uses which."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, flex_attention
from torch.nn.attention.flex_attention import BlockMask

from ultrascale.model import flex
from ultrascale.model.self_attention import CausalAttention, window_bias
from ultrascale.model.transformer import Transformer
from ultrascale.specs.model import Model

LENGTH = 150  # more than one block, and not a whole number of them
CPU = torch.device("cpu")


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses gradients of FlexAttention on a CPU by a check of its own; what it would compute there is right."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def documents() -> Tensor:
    """Two rows: of many documents, and of one."""
    lengths = [7, 60, 1, 82]
    return torch.stack((torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)), torch.zeros(LENGTH, dtype=torch.long)))


MASKS = [(None, True), (40, False), (40, True), (None, False)]


@pytest.mark.parametrize(("window", "packed"), MASKS)
def test_a_mask_rule_equals_the_dense_mask(window: int | None, packed: bool) -> None:
    found = documents() if packed else None
    at = torch.arange(LENGTH)
    mask = flex.rule(window, found)(torch.tensor(0), torch.tensor(0), at.unsqueeze(1), at)
    for q, k in ((0, 0), (50, 50), (50, 51), (50, 10), (50, 11), (67, 66), (68, 67), (149, 68), (149, 110)):
        wanted = k <= q and (window is None or q - k < window)
        wanted = wanted and (found is None or bool(found[0, q] == found[0, k]))
        assert bool(mask[q, k]) is wanted, (q, k)


@pytest.mark.parametrize(("length", "packed"), [(150, False), (160, False), (150, True)])
def test_chunks_see_only_themselves(length: int, packed: bool) -> None:
    """By the block mask's rule, by the dense mask, and where they divide the sequence side by side."""
    found = documents() if packed else None
    at = torch.arange(length)
    wanted = (at <= at.unsqueeze(1)) & (at // 40 == at.unsqueeze(1) // 40)
    if found is not None:
        wanted = wanted & (found[0] == found[0].unsqueeze(1))
    rule = flex.rule(40, found, chunked=True)(torch.tensor(0), torch.tensor(0), at.unsqueeze(1), at)
    assert torch.equal(rule, wanted)
    q, k, v = (numbers(1, length, heads, 16, seed=heads) for heads in (4, 2, 2))
    dense = torch.zeros(length, length).masked_fill_(~wanted, -torch.inf)
    core = CausalAttention(40, chunked=True)
    bias = None if found is None else next(iter(Transformer._dense_mask(q, length, 40, found[:1], chunked=True)))
    torch.testing.assert_close(core(q, k, v, bias), CausalAttention()(q, k, v, dense), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "packed"), MASKS)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.usefixtures("uncompiled")
def test_values_and_gradients_are_those_of_the_dense_mask(sinks: bool, window: int | None, packed: bool) -> None:
    found = documents() if packed else None
    inputs = [numbers(2, LENGTH, heads, 16, seed=heads + seed).requires_grad_() for seed, heads in enumerate((4, 2, 2))]
    more = [numbers(4, seed=5).requires_grad_()] if sinks else []
    grad = numbers(2, LENGTH, 4, 16, seed=9)
    bias = next(iter(Transformer._dense_mask(inputs[0], LENGTH, window, found)), None)
    dense = CausalAttention(window)(*inputs, bias, *more)
    ours = CausalAttention(window)(*inputs, flex.mask(LENGTH, window, found, CPU), *more)
    torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-5)
    wanted, mine = (torch.autograd.grad(out, [*inputs, *more], grad) for out in (dense, ours))
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_fully_masked_blocks_are_skipped() -> None:
    """768 tokens are 6 × 6 blocks: a window of 128 sees its own and the one before."""
    mask = flex.mask(768, 128, None, CPU)
    assert mask.kv_num_blocks.flatten().tolist() == [1, 2, 2, 2, 2, 2]
    assert flex.mask(768, 128, None, CPU) is mask  # the same for every micro-batch


class _OnGPU(Tensor):
    """A tensor that reports a GPU as its device, for the selection only."""

    is_cuda = True


def bias_of(model: Transformer, packed: bool, length: int = LENGTH, on_gpu: bool = True) -> tuple[Any, ...]:
    x = torch.zeros(2, length, 64)
    x = x.as_subclass(_OnGPU) if on_gpu else x
    return model._masks(x, length, documents() if packed else None)[model.model.sliding_window is not None]


def model_of(window: int | None = None, head_dim: int = 16) -> Transformer:
    fields = {"layers": 1, "hidden": 64, "ffn": 64, "heads": 4, "kv_heads": 2, "vocab": 32, "rope_theta": 1e4}
    return Transformer(Model(name="m", head_dim=head_dim, sliding_window=window, **fields))


def test_a_gpu_gets_block_masks_and_a_cpu_dense_ones() -> None:
    for window, packed in ((None, True), (40, False), (40, True)):
        (mask,) = bias_of(model_of(window), packed)
        assert isinstance(mask, BlockMask)
    (dense,) = bias_of(model_of(40), True, on_gpu=False)
    assert isinstance(dense, Tensor)
    (dense,) = bias_of(model_of(40), False, on_gpu=False)
    assert torch.equal(dense, window_bias(LENGTH, 40, torch.float32, CPU))


def test_causal_attention_needs_no_mask() -> None:
    assert bias_of(model_of(), False) == ()
    assert bias_of(model_of(LENGTH), False) == ()  # a window that spans all is none


def test_shapes_flex_does_not_support_have_dense_masks() -> None:
    assert "heads of 8" in (flex.why_not(8, torch.bfloat16) or "")
    assert "float64" in (flex.why_not(64, torch.float64) or "")
    assert flex.why_not(64, torch.bfloat16) is None
    (dense,) = bias_of(model_of(40, head_dim=8), True)
    assert isinstance(dense, Tensor)


def test_a_replaced_attention_core_gets_no_window() -> None:
    """Context parallelism's, which takes no mask."""
    model = model_of(40)
    model.each_block()[0].attention.core = torch.nn.Identity()  # type: ignore[assignment]
    assert bias_of(model, False) == ()


def test_backends_are_requested_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """And only where attention is causal and no more: a mask may need another one."""
    core, calls = CausalAttention(), []
    core.backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(*arguments: Any, **options: Any) -> Tensor:
        now = SimpleNamespace(flash=torch._C._get_flash_sdp_enabled(), efficient=torch._C._get_mem_efficient_sdp_enabled())
        calls.append((now.flash, now.efficient))
        return real(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # not the CPU's own kernel
    q, k, v = (numbers(1, 6, heads, 8, seed=heads) for heads in (4, 2, 2))
    out = core(q, k, v)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    bias = torch.zeros(1, 1, 6, 6).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(core(q, k, v, bias), out)
    assert calls == [(True, False), (True, True)]
