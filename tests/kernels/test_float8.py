"""fp8 matmuls against torchao's emulation, torch's own kernel and wide numbers; which matmuls of a model are in fp8."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from model.builders import initialize
from ultrascale.kernels import float8, loss
from ultrascale.kernels.float8 import Float8Head, Float8Linear
from ultrascale.kernels.float8_gemm import E4M3, E5M2, Float8Gemms, PlainGemms, multiply, quantise, quantise_transposed
from ultrascale.model.transformer import Transformer
from ultrascale.specs.errors import SpecError
from ultrascale.specs.model import Model
from ultrascale.specs.training import Fp8Keep, Fp8Scaling

CPU = torch.device("cpu")
linear_cross_entropy = partial(loss.linear_cross_entropy, function=Float8Head.function)
SMALL = Model(name="small", layers=4, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=48)
scalings = pytest.mark.parametrize("scaling", get_args(Fp8Scaling))


def operands(tokens: int = 256, outputs: int = 512, inputs: int = 1024) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and the output's gradient, of sizes that differ as they do in training."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, inputs), 1.0), ((outputs, inputs), 0.02), ((tokens, outputs), 1e-5)
    x, weight, grad = (torch.randn(shape, generator=generator) * size for shape, size in shapes)
    return x, weight, grad


def three(numbers: PlainGemms, x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return numbers.forward(x, weight), numbers.grad_input(grad, weight), numbers.grad_weight(grad, x)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@scalings
def test_fp8_matmuls_have_the_error_of_eight_bits(scaling: Fp8Scaling) -> None:
    """Three bits of fraction round by 1/16 at most, 0.026 in the mean square; two bits by twice that.

    Errors of both operands add up as squares, and sums of many terms keep their relative size: 0.037 where both have three
    bits, 0.058 where a gradient has two.
    """
    found, wanted = three(Float8Gemms(scaling), *operands()), three(PlainGemms(), *operands())
    of_gradients = (0.052, 0.064) if scaling == "tensor" else (0.032, 0.042)
    for actual, exact, (least, most) in zip(found, wanted, [(0.032, 0.042), of_gradients, of_gradients], strict=True):
        assert actual.shape == exact.shape
        assert least < error(actual, exact) < most


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_fp8_matmuls_equal_torchaos(scaling: Fp8Scaling) -> None:
    pytest.importorskip("torchao")
    from torchao.float8 import CastConfig, Float8LinearConfig, ScalingGranularity
    from torchao.float8.float8_linear import Float8Linear as Theirs

    by_row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=E4M3)
    casts = {f"cast_config_{name}": by_row for name in ("input", "weight", "grad_output")} if scaling == "row" else {}
    config = Float8LinearConfig(emulate=True, round_scales_to_power_of_2=True, **casts)
    x, weight, grad = operands()
    linear = nn.Linear(1024, 512, bias=False)
    linear.weight = nn.Parameter(weight)
    theirs, x = Theirs.from_float(linear, config=config), x.requires_grad_()
    out = theirs(x)
    wanted = (out.detach(), *torch.autograd.grad(out, [x, theirs.weight], grad))
    for actual, reference in zip(three(Float8Gemms(scaling), x.detach(), weight, grad), wanted, strict=True):
        assert error(actual, reference) < 1e-6


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_emulation_is_what_the_kernel_computes(scaling: Fp8Scaling, dtype: torch.dtype) -> None:
    if scaling == "row" and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("torch's kernel for CPUs has one scale for a tensor alone before 2.13")
    x, weight, _ = operands(32, 48, 64)
    left, right = quantise(x, scaling, dtype), quantise(weight, scaling, E4M3)
    kernel = torch._scaled_mm(left.data, right.data.t(), left.scale, right.scale.t(), out_dtype=torch.float32)
    assert error(multiply(left, right, torch.float32), kernel) < 1e-6


def test_blocks_have_scales_of_their_own() -> None:
    """128 numbers of a row, 128 × 128 of a weight, each rounded as if it stood alone."""
    x, weight, _ = operands()
    x[:, 128:256] *= 1e4  # would push all others below the format's smallest number, had they the same scale
    for matrix, rows, is_weight in ((x, 1, False), (weight, 128, True)):
        data, scale = quantise(matrix, "block", E4M3, is_weight)
        assert scale.shape == (len(matrix) // rows, matrix.shape[1] // 128)
        for i, j in ((0, 0), (0, 1), (1, 3)):
            block = slice(rows * i, rows * (i + 1)), slice(128 * j, 128 * (j + 1))
            alone = quantise(matrix[block].reshape(1, -1), "tensor", E4M3)
            assert scale[i, j] == alone.scale
            assert torch.equal(data[block].float().reshape(1, -1), alone.data.float())
    # The kernel wants rows' scales column by column, squares' row by row.
    assert quantise(x, "block", E4M3).scale.stride() == (1, len(x))
    assert quantise(weight, "block", E4M3, is_weight=True).scale.is_contiguous()


@scalings
@pytest.mark.parametrize("is_weight", [False, True])
def test_transposed(scaling: Fp8Scaling, is_weight: bool) -> None:
    _, weight, _ = operands()
    found, wanted = quantise_transposed(weight, scaling, E4M3, is_weight), quantise(weight.t(), scaling, E4M3, is_weight)
    assert found.data.is_contiguous()
    assert torch.equal(found.data.float(), wanted.data.float())
    assert torch.equal(found.scale, wanted.scale)


@scalings
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_scales_are_powers_of_two_and_use_the_range(scaling: Fp8Scaling, dtype: torch.dtype) -> None:
    x, _, _ = operands()
    data, scale = quantise(x, scaling, dtype)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))
    largest = data.float().abs().max()
    assert torch.finfo(dtype).max / 2 < largest <= torch.finfo(dtype).max


@scalings
def test_zeros_stay_zeros_and_non_finite_values_propagate(scaling: Fp8Scaling) -> None:
    x, weight, _ = operands(128, 512, 512)
    assert not Float8Gemms(scaling).forward(torch.zeros_like(x), weight).any()
    for bad in (float("nan"), float("inf")):
        x[3, 5] = bad
        assert not torch.isfinite(Float8Gemms(scaling).forward(x, weight)[3]).any()


@scalings
def test_rounding_of_a_token_does_not_depend_on_the_batch(scaling: Fp8Scaling) -> None:
    """Powers of two move exponents and leave fractions, so layouts, which cut a batch in other places, compute the same.

    But for numbers 2^15 times smaller than the largest, which have fewer bits; other scales would differ by 0.03.
    """
    x, weight, _ = operands()
    x[200:] *= 100
    numbers = Float8Gemms(scaling)
    assert error(numbers.forward(x, weight)[:128], numbers.forward(x[:128], weight)) < 1e-3


def test_an_odd_number_of_tokens_falls_back_where_it_is_summed_over() -> None:
    x, weight, grad = operands(tokens=40)
    numbers = Float8Gemms("tensor")
    assert torch.equal(numbers.grad_weight(grad, x), PlainGemms().grad_weight(grad, x))
    assert error(numbers.forward(x, weight), PlainGemms().forward(x, weight)) > 0.03


def swapped(scaling: Fp8Scaling, keep: Fp8Keep, model: Model = SMALL, **parts: Any) -> tuple[Transformer, list[str]]:
    """A model in fp8, and the names of its matmuls that are."""
    transformer = Transformer(model, **parts)
    float8.apply(transformer, scaling, keep, CPU)
    return transformer, [name for name, module in transformer.named_modules() if isinstance(module, Float8Linear)]


def matmuls_of(*layers: int) -> list[str]:
    names = ("attention.qkv.q", "attention.qkv.k", "attention.qkv.v", "attention.out", "mlp.inputs.gate", "mlp.inputs.up")
    return [f"blocks.{layer}.{name}" for layer in layers for name in (*names, "mlp.down")]


def test_which_linears_are_converted() -> None:
    assert swapped("tensor", "ends")[1] == matmuls_of(1, 2)
    assert swapped("tensor", "head")[1] == matmuls_of(0, 1, 2, 3)
    assert swapped("row", "none")[1] == [*matmuls_of(0, 1, 2, 3), "head.linear"]
    # The ends are the whole model's, not a stage's.
    assert swapped("tensor", "ends", layers=range(2), head=False)[1] == matmuls_of(1)
    assert swapped("tensor", "ends", layers=range(2, 4), embed=False)[1] == matmuls_of(2)


def test_names_and_parameters_are_unchanged() -> None:
    plain = Transformer(SMALL)
    before = dict(plain.named_parameters())
    float8.apply(plain, "tensor", "none", CPU)
    after = dict(plain.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert "fp8 with a scale per tensor" in str(plain)


def test_tied_ends_stay_tied() -> None:
    model, names = swapped("tensor", "none", SMALL.model_copy(update={"tied_embeddings": True}))
    assert "head.linear" in names
    assert model.embed is not None
    assert model.head is not None
    assert model.double().head.linear.weight is model.embed.tokens.weight


def test_sizes_that_the_kernel_does_not_support_stay_plain() -> None:
    odd = SMALL.model_copy(update={"ffn": 40, "kv_heads": 1})  # keys and values of 8
    assert swapped("tensor", "none", odd)[1] == [
        *(f"blocks.{layer}.attention.{name}" for layer in range(4) for name in ("qkv.q", "out")),
        "head.linear",
    ]
    assert swapped("block", "none")[1] == []


def test_shared_experts_are_converted_and_routed_ones_are_not() -> None:
    moe = {"experts": 4, "top_k": 2, "expert_ffn": 16, "shared_experts": 1, "shared_expert_ffn": 32, "shared_gate": True}
    mixed = Model(name="mixed", layers=1, hidden=32, heads=4, kv_heads=4, ffn=0, vocab=48, moe=moe)
    _, names = swapped("tensor", "head", mixed)
    attention = matmuls_of(0)[:4]
    assert names == [*attention, *(f"blocks.0.mlp.shared.{name}" for name in ("inputs.gate", "inputs.up", "down"))]


def loss_and_gradients(model: Transformer) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.randint(SMALL.vocab, (2, 64), generator=torch.Generator().manual_seed(1))
    out = model(tokens, torch.arange(64), tokens.flip(-1))
    names, parameters = zip(*model.named_parameters(), strict=True)
    return out.detach(), dict(zip(names, torch.autograd.grad(out, parameters), strict=True))


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("keep", get_args(Fp8Keep))
def test_a_model_is_near_the_plain_one(scaling: Fp8Scaling, keep: Fp8Keep) -> None:
    """Errors of one matmul, some 0.05, add up in a gradient that has passed through four layers of seven."""
    plain, narrow = Transformer(SMALL), Transformer(SMALL)
    for model in (plain, narrow):
        initialize(model, 0, SMALL)
    float8.apply(narrow, scaling, keep, CPU)
    (wanted, exact), (found, actual) = loss_and_gradients(plain), loss_and_gradients(narrow)
    assert 0 < abs(float(found / wanted) - 1) < 2e-3
    assert max(error(actual[name], exact[name]) for name in exact) < 0.25


class TestChunkedHead:
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(48, 64, generator=generator).requires_grad_()
        weight = (torch.randn(160, 64, generator=generator) * 0.2).requires_grad_()
        return x, weight, torch.randint(160, (48,), generator=generator)

    def loss_and_grads(self, function: Callable[..., Tensor], chunk: int) -> tuple[Tensor, ...]:
        x, weight, targets = self.inputs()
        out = function(x, weight, targets, chunk)
        return out.detach(), *torch.autograd.grad(0.37 * out, [x, weight])

    def test_near_the_plain_one(self) -> None:
        found, wanted = self.loss_and_grads(linear_cross_entropy, 16), self.loss_and_grads(loss.linear_cross_entropy, 16)
        assert 0 < abs(float(found[0] / wanted[0]) - 1) < 5e-3
        for narrow, exact in zip(found[1:], wanted[1:], strict=True):
            assert 0.02 < error(narrow, exact) < 0.1  # of logits, of their gradient in two bits, of the other operand

    def test_chunk_size_does_not_change_the_result(self) -> None:
        for chunk in (4, 16):  # twelve chunks, summed four at a time, or three at once
            for found, wanted in zip(
                self.loss_and_grads(linear_cross_entropy, chunk), self.loss_and_grads(linear_cross_entropy, 48), strict=True
            ):
                assert error(found, wanted) < 1e-6

    def test_an_odd_number_of_tokens_stays_plain(self) -> None:
        x, weight, targets = self.inputs()
        found, wanted = (each(x[:40], weight, targets[:40], 16) for each in (linear_cross_entropy, loss.linear_cross_entropy))
        assert torch.equal(found, wanted)

    def test_it_replaces_the_chunked_head(self) -> None:
        chunked = Transformer(SMALL)
        loss.apply(chunked)
        float8.apply(chunked, "tensor", "none", CPU)
        assert isinstance(chunked.head, Float8Head)
        kept = Transformer(SMALL)
        loss.apply(kept)
        float8.apply(kept, "tensor", "head", CPU)
        assert not isinstance(kept.head, Float8Head)

    def test_without_gradients(self) -> None:
        (x, weight, targets), wanted = self.inputs(), self.loss_and_grads(linear_cross_entropy, 16)[0]
        with torch.no_grad():
            assert error(linear_cross_entropy(x, weight, targets, 16), wanted) < 1e-6


def test_gpus_without_fp8_are_refused_with_what_they_have() -> None:
    float8.check((9, 0), "NVIDIA H100", "block")
    float8.check((8, 9), "NVIDIA L40S", "row")
    with pytest.raises(SpecError, match=r"job.precision is fp8 but NVIDIA A100 does not compute in it .*: try bf16"):
        float8.check((8, 0), "NVIDIA A100", "tensor")
    with pytest.raises(SpecError, match=r"train.fp8_scaling is block but NVIDIA B200 .*: try tensor or row"):
        float8.check((10, 0), "NVIDIA B200", "block")


@pytest.mark.quick_cases("row")
@scalings
def test_a_block_is_one_graph(scaling: Fp8Scaling) -> None:
    """Casts then fuse with norms and gates; forward and backward are those of the block run operator by operator."""
    wide = SMALL.model_copy(update={"layers": 1, "hidden": 512, "ffn": 512, "heads": 4, "kv_heads": 4})
    eager, graph = swapped(scaling, "head", wide)[0], swapped(scaling, "head", wide)[0]
    for model in (eager, graph):
        initialize(model, 0, wide)
    torch._dynamo.reset()
    graph.each_block()[0].compile(backend="aot_eager", fullgraph=True)
    (found, actual), (wanted, exact) = loss_and_gradients(graph), loss_and_gradients(eager)
    torch.testing.assert_close(found, wanted)
    # The compiled norm rounds otherwise in the last bit of fp32, which moves a few numbers to their neighbour in fp8.
    assert max(error(actual[name], exact[name]) for name in exact) < 0.02
